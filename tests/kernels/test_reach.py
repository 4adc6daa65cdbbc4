"""Processes that name the same GPUs, by the same numbers, reach each other's memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from asynctp_kernels.cuda import groups
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.runtime import enroll


def seen(visible: str, index: int, apart: tuple[str, ...] = ()) -> str:
    """Name the GPUs as a process that sees some, and runs on GPU `index`; apart: pairs without access."""
    cuda: dict[str, Any] = {
        "device_count": lambda: len(visible),
        "get_device_properties": lambda each: SimpleNamespace(uuid=visible[each]),
        "can_device_access_peer": lambda one, other: visible[one] + visible[other] not in apart,
    }
    with mock.patch.multiple(torch.cuda, **cuda):
        return ", ".join(enroll.reached.__wrapped__(index))


def test_processes_that_see_all_gpus_name_the_same() -> None:
    assert {seen("abcd", index) for index in range(4)} == {"0: a, 1: b, 2: c, 3: d"}


def test_processes_that_see_one_gpu_each_name_others() -> None:
    """All of these have number 0, which torch's symmetric memory does not take."""
    assert [seen(name, 0) for name in "ab"] == ["0: a", "0: b"]


def test_one_number_for_two_gpus_is_seen() -> None:
    assert seen("ab", 0) != seen("ba", 0)


@pytest.mark.parametrize("apart", [("ac", "ca", "bc", "cb"), ("ac", "bc"), ("ca", "cb")])
def test_gpus_apart_are_named_apart(apart: tuple[str, ...]) -> None:
    """Access in one direction is none."""
    assert [seen("abc", index, apart) for index in range(3)] == ["0: a, 1: b", "0: a, 1: b", "2: c"]


# --- the outlook of a group -------------------------------------------------------------------------------------
def outlook(world: int = 4, gpus: tuple[str, ...] = ("GPU-a", "GPU-b"), **facts: str) -> tuple[str, str]:
    found = {"gpu": "H100", "torch": "2.15.0", **facts}
    with (
        mock.patch.object(groups, "rank_facts", return_value=found),
        mock.patch.object(groups, "reached", return_value=gpus),
    ):
        return groups.memory_outlook(world, 0)


def test_ranks_that_are_alike_say_the_same() -> None:
    assert outlook() == outlook()
    assert outlook()[0] == ""
    assert outlook()[1].startswith("H100, one of 2 that share memory (")


def test_ranks_that_differ_say_something_else() -> None:
    """In whatever lets `settle` refuse a group."""
    told = {outlook(**{fact: "another"})[1] for fact in enroll._REQUIRED}
    told |= {outlook()[1], outlook(host="another")[1], outlook(boot="another")[1], outlook(gpus=("GPU-a",))[1]}
    assert len(told) == len(enroll._REQUIRED) + 4


def test_a_group_that_will_have_no_memory_is_known() -> None:
    assert outlook(world=9)[0] == "9 ranks; the overlapped ops run on 2 to 8"
    with select.forced("sequential"):
        assert outlook()[0] == "ASYNCTP_CUDA_IMPLEMENTATION=sequential"


def test_a_bad_variable_is_a_reason_and_no_error() -> None:
    problem = "ASYNCTP_CUDA_IMPLEMENTATION='x' is not valid"
    with mock.patch.object(groups, "rank_facts", side_effect=ValueError(problem)):
        assert groups.memory_outlook(4, 0) == (problem, "")
