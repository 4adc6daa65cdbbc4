"""Processes that name the same GPUs reach each other's memory, whichever GPUs each of them sees."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from asynctp_kernels.cuda import groups
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.runtime import enroll, reach
from asynctp_kernels.cuda.runtime.enroll import Facts

MACHINE = "abcd"  # its GPUs, by the end of their names


class Nvml:
    """A stand-in for the driver's library: `apart` are pairs of GPUs without access, in this direction."""

    def __init__(self, apart: set[str] = frozenset(), fails: str = "") -> None:  # type: ignore[assignment]
        self.apart, self.fails, self.shut = apart, fails, 0

    def nvmlInit_v2(self) -> int:
        return int(self.fails == "init")

    def nvmlShutdown(self) -> int:
        self.shut += 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(MACHINE)
        return int(self.fails == "count")

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        text.value = f"GPU-{MACHINE[handle.value - 1]}".encode()
        return 0

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, way: int, status: Any) -> int:
        pair = MACHINE[one.value - 1] + MACHINE[other.value - 1]
        status._obj.value = 3 if pair in self.apart and way == 1 else 0
        return int(self.fails == "status")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reach.reached.cache_clear()
    reach._known_to_nvml.cache_clear()
    yield
    reach.reached.cache_clear()
    reach._known_to_nvml.cache_clear()


def seen(visible: str, index: int, nvml: Nvml | None, apart: set[str] = frozenset()) -> str:  # type: ignore[assignment]
    """What a process that sees some GPUs names, of which `index` is its own; `apart`: pairs of them, for CUDA."""
    reach.reached.cache_clear()
    reach._known_to_nvml.cache_clear()
    cuda: dict[str, Any] = {
        "device_count": lambda: len(visible),
        "get_device_properties": lambda each: SimpleNamespace(uuid=visible[each]),
        "can_device_access_peer": lambda one, other: visible[one] + visible[other] not in apart,
    }
    library = mock.Mock(return_value=nvml) if nvml is not None else mock.Mock(side_effect=OSError("no such file"))
    with mock.patch.multiple(torch.cuda, **cuda), mock.patch.object(ctypes, "CDLL", library):
        return "".join(name.removeprefix("GPU-") for name in reach.reached(index))


def test_a_process_that_sees_one_gpu_names_those_that_its_peers_name() -> None:
    alone = {seen(name, 0, Nvml()) for name in MACHINE}
    assert alone == {seen("abcd", 2, Nvml()), seen("cd", 1, Nvml())} == {"abcd"}


def test_gpus_apart_are_named_apart() -> None:
    islands = Nvml(apart={"ac", "ad", "bc", "bd", "ca", "da", "cb", "db"})
    assert [seen(name, 0, islands) for name in MACHINE] == ["ab", "ab", "cd", "cd"]


def test_access_in_one_direction_is_none() -> None:
    assert [seen(name, 0, Nvml(apart={"ab"})) for name in "ab"] == ["acd", "bcd"]


def test_what_cuda_refuses_is_not_reached() -> None:
    assert seen("abcd", 0, Nvml(), apart={"ba"}) == "acd"


@pytest.mark.parametrize("nvml", [None, Nvml(fails="init"), Nvml(fails="count")], ids=["none", "no init", "no count"])
def test_without_the_library_a_process_knows_what_it_sees(nvml: Nvml | None) -> None:
    assert [seen(name, 0, nvml) for name in MACHINE] == ["a", "b", "c", "d"], "no two are alike"
    assert {seen("abcd", index, nvml) for index in range(4)} == {"abcd"}
    assert seen("abcd", 0, nvml, apart={"ac"}) == "abd"


def test_a_pair_that_the_library_cannot_tell_of_is_apart() -> None:
    broken = Nvml(fails="status")
    assert seen("a", 0, broken) == "a"
    assert broken.shut == 1


# --- the outlook of a group -------------------------------------------------------------------------------------
def outlook(world: int = 4, gpus: tuple[str, ...] = ("GPU-a", "GPU-b"), **facts: str) -> tuple[str, str]:
    found = Facts(**{"gpu": "H100", "torch": "2.15.0", **facts})
    with (
        mock.patch.object(groups, "facts_of", return_value=found),
        mock.patch.object(groups, "reached", return_value=gpus),
    ):
        return groups.outlook(world, 0)


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
    with mock.patch.object(groups, "facts_of", side_effect=ValueError("ASYNCTP_CUDA_IMPLEMENTATION='x' is not valid")):
        assert groups.outlook(4, 0) == ("ASYNCTP_CUDA_IMPLEMENTATION='x' is not valid", "")
