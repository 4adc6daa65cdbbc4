"""Programs after public issues and model code, on real ranks: values are eager's, and what is said of each is true."""

from __future__ import annotations

from typing import Any

import found_programs
import pytest
import torch
import torch._inductor.config
from compiled_training import GATHERS_ALONG_ANY
from profiles import thorough
from ranks import run_ranks

pytestmark = pytest.mark.ranks

RUNNABLE = {
    "three_streams_in_a_batch": GATHERS_ALONG_ANY,
    "head_of_all_but_the_last_token": GATHERS_ALONG_ANY,
    "step_of_a_batch_of_any_length": GATHERS_ALONG_ANY,
    "batch_invariant_block": hasattr(torch._inductor.config, "batch_invariant"),
}
"""Whether this torch can compile those that some torch cannot."""

Ran = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module", name="ran")
def two_ranks() -> Ran:
    return run_ranks(found_programs.RANKS, found_programs.run_found, timeout_s=500)


@pytest.mark.parametrize(
    "name",
    [thorough(name) if name in found_programs.OF_KINDS_SHOWN else name for name in found_programs.FOUND],
)
def test_values_are_those_of_eager_and_reports_as_expected(ran: Ran, name: str) -> None:
    if not RUNNABLE.get(name, True):
        pytest.skip("torch 2.11 and 2.12 cannot")
    program = found_programs.FOUND[name]
    for rank in (one[name] for one in ran):
        assert "error" not in rank, rank["error"]
        assert rank["outcomes"] == program.expected, "\n".join(rank["told"])
        assert len(rank["eager"]) == len(rank["compiled"])
        for eager, compiled in zip(rank["eager"], rank["compiled"], strict=True):
            close = 1e-4 if eager.dtype.itemsize > 2 else 3e-2
            torch.testing.assert_close(compiled, eager, rtol=close, atol=close)
        assert any(program.says in text for text in rank["said"]) if program.says else rank["said"] == []
