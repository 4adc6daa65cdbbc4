"""The outcome for a group whose ranks differ: a function of the facts alone, so that all ranks know it."""

from __future__ import annotations

import itertools
import json
import logging
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.runtime import enroll
from asynctp_kernels.cuda.runtime.enroll import RankFacts, settle
from asynctp_kernels.errors import NotEnrolled

ONE: RankFacts = {
    "host": "node", "boot": "boot", "gpu": "H200, 132 SMs", "sources": "s1", "torch": "2.13.0", "triton": "3.9.0",
    "driver": "13000", "backend": "CUDA", "implementation": "auto", "table": "none",
}  # fmt: skip
GPU, KEY = "NVIDIA H200", "gather:2:bfloat16:4096:2048"


def ranks(*changes: dict[str, str]) -> list[RankFacts]:
    return [ONE | change for change in changes]


def outcome(found: list[RankFacts]) -> str:
    """The result of `settle`, or its error as a text."""
    try:
        return settle(found)
    except (ValueError, NotEnrolled) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("world", [2, 8])
def test_ranks_that_are_alike_are_enrolled(world: int) -> None:
    assert settle([ONE] * world) == ""


DIFFERENCES = {
    "host": ("other", "its ranks are on 2 hosts (node, other), not on one"),
    "boot": (
        "b2",
        "on several machines that are all named 'node' (boot ids: ranks 0, 2: boot; rank 1: b2), not on one",
    ),
    "gpu": ("H100", "unlike GPUs (ranks 0, 2: H200, 132 SMs; rank 1: H100); keep a group on GPUs of one model"),
    "sources": ("s2", "unlike files of asynctp_kernels (ranks 0, 2: s1; rank 1: s2); install one version of asynctp"),
    "torch": ("2.12.1", "unlike versions of torch (ranks 0, 2: 2.13.0; rank 1: 2.12.1); install one version for all"),
    "triton": ("3.8.0", "unlike versions of triton (ranks 0, 2: 3.9.0; rank 1: 3.8.0); install one version"),
    "driver": ("12080", "unlike CUDA drivers (ranks 0, 2: 13000; rank 1: 12080); let all ranks see one driver"),
    "backend": ("NVSHMEM", "unlike symmetric memory of torch (ranks 0, 2: CUDA; rank 1: NVSHMEM); set TORCH_SYMMMEM"),
}


@pytest.mark.parametrize("fact", DIFFERENCES)
def test_ranks_that_differ_run_the_plain_program(fact: str) -> None:
    value, said = DIFFERENCES[fact]
    with pytest.raises(NotEnrolled, match=re.escape(said)):
        settle(ranks({}, {fact: value}, {}))


def test_every_fact_matters() -> None:
    """A fact that nobody looks at is no fact."""
    for fact in ONE:
        assert outcome(ranks({}, {fact: "another"})) != outcome([ONE, ONE]), fact


def test_ranks_that_force_unlike_implementations_all_raise() -> None:
    found = ranks({"implementation": "fused"}, {}, {"implementation": "fused", "host": "other"})
    assert outcome(found) == (
        "ValueError: asynctp: ASYNCTP_CUDA_IMPLEMENTATION differs among the ranks of a group (ranks 0, 2: fused; rank "
        "1: auto); set it to one value on all of them, or unset it"
    )


def test_ranks_that_were_tuned_apart_are_enrolled() -> None:
    assert settle(ranks({"table": "t1"}, {}, {"table": "t1"})) == "ranks 0, 2: t1; rank 1: none"


def test_the_result_is_the_same_on_every_rank() -> None:
    """It is a function of what all ranks have: the same list."""
    for first, second in itertools.combinations(ONE, 2):
        found = ranks({first: "x"}, {second: "y"}, {})
        results = [outcome([json.loads(json.dumps(facts)) for facts in found]) for _ in found]
        assert results == [results[0]] * 3


@pytest.mark.parametrize("change", [{"more": "of a later version"}, {"table": None}, {"torch": 3}])
def test_facts_of_another_version_can_be_read(change: dict[str, Any]) -> None:
    other: Any = {"sources": "another", **change}
    with pytest.raises(NotEnrolled, match=r"^its ranks are on 2 hosts \(node, unknown\)"):
        settle([ONE, other])


def test_facts_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(select.VARIABLE, "direct")
    machine = mock.Mock(machine=lambda index: ((9, 0), 132, GPU), driver_version=mock.Mock(side_effect=RuntimeError))
    with (
        mock.patch.object(enroll, "driver", machine),
        mock.patch.object(select, "tuned", return_value={GPU: {KEY: {"64": "direct"}}}),
    ):
        facts = enroll.rank_facts(0)
    assert (facts["gpu"], facts["implementation"]) == (f"{GPU}, 132 SMs, compute capability 9.0", "direct")
    assert facts["table"] != "none"
    assert facts["driver"] == enroll.UNKNOWN, "that cannot be had is no fault"
    assert len(facts["sources"]) == 16
    assert facts.keys() == ONE.keys()


def enrolled(*others: dict[str, str]) -> dict[str, Any]:
    """The table of a group whose other ranks differ like that from this one, which was tuned."""

    def exchange(topic: str, text: str) -> list[str]:
        return [text, *(json.dumps(json.loads(text) | other) for other in others)]

    board: Any = SimpleNamespace(exchange=exchange)
    machine = mock.Mock(machine=lambda index: ((9, 0), 132, GPU), IN_ORDER=True)
    tuned = {GPU: {KEY: {"64": "sequential"}}}
    with mock.patch.object(enroll, "driver", machine), mock.patch.object(select, "tuned", return_value=tuned):
        return enroll.enroll(board, "tp", 0)


def test_own_measurements_count_where_all_ranks_have_them(caplog: pytest.LogCaptureFixture) -> None:
    assert enrolled({}, {})[GPU][KEY]["64"] == "sequential"
    assert caplog.records == []


def test_the_shipped_table_counts_where_ranks_were_tuned_apart(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert enrolled({}, {"table": "none"}) == select.shipped()
    (record,) = caplog.records
    assert "group tp chooses implementations by the shipped table alone" in record.getMessage()
    assert "rank 2: none" in record.getMessage()


def test_what_is_settled_is_raised() -> None:
    with pytest.raises(ValueError, match="ASYNCTP_CUDA_IMPLEMENTATION differs"):
        enrolled({"implementation": "other"})
    with pytest.raises(NotEnrolled, match="unlike versions of torch"):
        enrolled({"torch": "1.0"})
