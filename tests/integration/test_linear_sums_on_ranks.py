"""Sums of reductions on two real ranks: values and gradients are eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled_training import run_cases
from profiles import THOROUGH
from ranks import run_ranks
from torch import Tensor

import asynctp_passes


# --- on ranks ------------------------------------------------------------------------------------------------------
@pytest.mark.ranks
def test_training_a_block_whose_layers_each_reduce_their_gradient() -> None:
    """See the functions `case_…` of summed_cases."""
    names = ["functional", "in_bfloat16", "with_real_code"] if THOROUGH else ["in_bfloat16"]
    if not torch.__version__.startswith("2.11."):  # which loses gradients through such functions
        names.append("in_place")
    for found in run_ranks(2, run_cases, names, "summed_cases", timeout_s=400):
        assert not "".join(outcome.error for outcome in found.values())


def around_a_late_gather(rank: int, group: Any, a: Tensor, w: Tensor, x: Tensor, v: Tensor) -> list[Tensor]:
    """A sum of the first and the last reduction; of the one between, only the first rank's gather takes the matmul.

    That gather comes late, and no other rank's does.
    """
    first = funcol.all_reduce(a @ w, "sum", group)
    whole = funcol.all_gather_tensor(x, 0, group)
    largest = funcol.all_reduce(v, "max", group)
    between = funcol.all_reduce(whole @ (w if rank else w * largest), "sum", group)
    return [largest, between, first + funcol.all_reduce(a @ w.t(), "sum", group)]


def summed_around_a_late_gather(rank: int, world_size: int) -> tuple[bool, set[str], bool, int]:
    """Whether the results are eager's, the kinds of deviations, whether they are done, and how many chains are."""
    torch._inductor.config.fallback_by_default = True  # minutes of the C++ compiler
    torch.manual_seed(rank)
    values = [torch.randn(8, 8), torch.randn(8, 8), torch.randn(4, 8), torch.randn(8)]
    group = dist.group.WORLD
    compiled = torch.compile(around_a_late_gather, backend="asynctp", options={"strict": "off"})
    found, wanted = (function(rank, group, *values) for function in (compiled, around_a_late_gather))
    (report,) = asynctp_passes.reports()
    same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(found, wanted, strict=True))
    (question,) = report.questions
    return same, {text.split(":")[0] for text in question.deviations}, question.done, len(report.fused)


@pytest.mark.ranks
def test_no_rank_does_what_all_would_where_one_would_do_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, the late gather leaves its matmul to the reduction. The two sums are fused one by one."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    first, second = run_ranks(2, summed_around_a_late_gather)
    assert first == (True, {"late", "sum"}, False, 3)
    assert second == (True, {"sum"}, False, 3)
