"""Ranks on CPUs compare what they run before a graph communicates, so that none deviates alone: tried on ranks."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled_training import STRICT, compiled, plain_layer, shard_of, start, train
from generated_code import as_ops
from ranks import imagined_ranks, run_ranks
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

from asynctp_passes import DisagreementError
from asynctp_passes.ops import run_check
from asynctp_passes.torch_private import process_groups

QUIET: dict[str, Any] = {"strict": "off"}
LIMIT_S = 3.0


def two_sums(x: Tensor, w: Tensor, look: bool = False) -> tuple[Tensor, Tensor]:
    """The sum of two reduced products; with `look` one of them is seen, too, and each is reduced by itself."""
    first = funcol.all_reduce(x @ w, "sum", dist.group.WORLD)
    second = funcol.all_reduce((x + 1) @ w, "sum", dist.group.WORLD)
    return first + second, first.amax() if look else x


def operands(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 8, generator=generator), torch.randn(8, 8, generator=generator)


def with_options(program: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(program, backend="asynctp", options={**QUIET, **options})


# --- the store ------------------------------------------------------------------------------------------------------
def test_a_group_whose_life_is_not_known_sends_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    peers = process_groups.Peers(0, (0, 1), store, mock.Mock(), life=None)
    monkeypatch.setattr(process_groups, "peers_of", lambda name: peers)
    with pytest.raises(DisagreementError, match="the store of group 'tp' failed"):
        run_check.run_check(7, 1, "tp")
    assert store.num_keys() == 0


def test_nothing_is_asked_before_ranks_know_that_they_deviate(monkeypatch: pytest.MonkeyPatch) -> None:
    store = mock.Mock()
    monkeypatch.setattr(
        process_groups, "peers_of", lambda name: process_groups.Peers(0, (0, 1), store, mock.Mock(), "1")
    )
    for _ in range(3):
        run_check.run_check(0, 1, "tp")
    assert not store.method_calls


# --- ranks that share a store ---------------------------------------------------------------------------------------
class Waits(Exception):
    """A rank has looked once, and would look again."""


def look_once(*_: Any, **__: Any) -> Iterator[float]:
    yield 0.0
    raise Waits


class Rank:
    """A rank that runs graphs, by what it says and what it would wait for."""

    def __init__(self, rank: int, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group = mock.Mock()
        self.peers = process_groups.Peers(rank, (0, 1), store, self.group, "1")
        self.patch = monkeypatch
        run_check.begin(self.group)

    def runs(self, accord: int, count: int = 1) -> str:
        """Run a graph: "" where it may go on, "waits", or the error."""
        try:
            with mock.patch.object(run_check, "looks", look_once):
                return self.waits_in_vain(accord, count)
        except Waits:
            return "waits"

    def waits_in_vain(self, accord: int, count: int = 1) -> str:
        """Run a graph, and wait until the time of the group is over."""
        self.patch.setattr(process_groups, "peers_of", lambda name: self.peers)
        try:
            run_check.run_check(accord, count, "tp")
        except DisagreementError as error:
            return str(error)
        return ""


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> tuple[Rank, Rank]:
    """Two ranks in turns; each looks once."""
    monkeypatch.setattr(process_groups, "group_timeout_s", lambda group: 0.0)
    store = dist.HashStore()
    return Rank(0, store, monkeypatch), Rank(1, store, monkeypatch)


def test_ranks_that_run_alike_go_on(two: tuple[Rank, Rank]) -> None:
    first, second = two
    assert first.runs(7) == "waits"
    assert second.runs(7) == first.runs(7) == ""
    assert second.runs(0) == "waits"
    assert first.runs(0) == second.runs(0) == ""


@pytest.mark.parametrize("accord", [0, 8])
def test_ranks_that_run_unlike_graphs_raise_both(two: tuple[Rank, Rank], accord: int) -> None:
    first, second = two
    assert first.runs(7) == "waits"
    for one in (second.runs(accord), first.runs(7)):
        assert "run unlike graphs" in one
        assert "deviate=False" in one


def test_ranks_that_raised_may_run_alike_next(two: tuple[Rank, Rank]) -> None:
    """In whatever order they find out: what a rank said before it raised counts no more."""
    first, second = two
    first.runs(7)
    assert "unlike" in second.runs(8)
    assert second.runs(7) == "waits", "the first one has not raised yet"
    assert "unlike" in first.runs(7), "the second one has come again"
    assert first.runs(7) == second.runs(7) == ""


def test_a_rank_that_comes_too_late_raises_as_well(two: tuple[Rank, Rank]) -> None:
    """The first rank raises, and makes another collective next: its earlier words do not count."""
    first, second = two
    assert "rank 1 of group 'tp' did not come" in first.waits_in_vain(7)
    late = second.runs(7)
    assert "rank 1 of group 'tp' did not come" in late
    assert late.endswith("(rank 1 raises since rank 0 does)")
    assert first.runs(7) == "waits"
    assert second.runs(7) == first.runs(7) == ""


def test_graphs_that_are_cut_otherwise_are_alike(two: tuple[Rank, Rank]) -> None:
    """Rank 0 makes three collectives in one graph, and rank 1 in three. A deviation follows."""
    first, second = two
    assert first.runs(0, 3) == "waits"
    assert [second.runs(0) for _ in range(3)] == ["", "", ""]
    assert first.runs(0, 3) == ""
    assert first.runs(7) == "waits"
    assert second.runs(7) == first.runs(7) == ""


def test_a_rank_that_was_interrupted_comes_to_the_same_place(two: tuple[Rank, Rank]) -> None:
    first, second = two
    with mock.patch.object(run_check, "looks", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        first.waits_in_vain(7)
    assert second.runs(7) == first.runs(7) == ""


# --- on ranks --------------------------------------------------------------------------------------------------
def unlike(rank: int, world_size: int) -> tuple[list[bool], str, float]:
    """All ranks compile both graphs; then each runs another one."""
    x, w = operands(rank)
    function, right, error = with_options(two_sums), [], ""
    with torch.no_grad():
        for look in (False, True, False):
            got = function(x, w, look)[0]
            right.append(torch.allclose(got, two_sums(x, w)[0], atol=1e-4))
        begun = time.monotonic()
        try:
            function(x, w, rank == 0)
        except DisagreementError as raised:
            error = str(raised)
        seconds = time.monotonic() - begun
        got = function(x, w, True)[0]
        right.append(torch.allclose(got, two_sums(x, w)[0], atol=1e-4))
    return right, error, seconds


@pytest.mark.ranks
def test_ranks_that_run_unlike_graphs_raise_at_once_and_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_AGREE_S", "120")
    for right, error, seconds in run_ranks(2, unlike, timeout_s=300):
        assert right == [True] * 4
        assert seconds < 5
        for part in (
            "test_run_check.py:two_sums:",
            "sum: all_reduce(sum) in place of 1 * 0 + 1 * 1",
            "a graph in which nothing is changed",
            "deviate=False",
        ):
            assert part in error


def alone(rank: int, world_size: int) -> str:
    """Only rank 1 comes, in a group whose timeout is short."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT_S))
    dist.barrier()
    error = ""
    if rank == 1:
        with pytest.raises(DisagreementError) as raised:
            run_check.run_check(7, 1, group.group_name)
        error = str(raised.value)
    dist.barrier()
    return error


@pytest.mark.ranks
def test_a_rank_to_which_nobody_comes_is_told_who_is_missing() -> None:
    _, error = run_ranks(2, alone, timeout_s=120)
    assert f"rank 0 of group '1' did not come, within its timeout of {LIMIT_S:g} s" in error
    assert "a graph of accord 7" in error


def in_turn(rank: int, world_size: int) -> bool:
    """Three ranks with a group for each pair. Rank 2 comes to its check only after rank 1's group has communicated.

    Groups communicate in the order [0, 1], [1, 2], [0, 2].
    """
    x, w = operands(rank)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (1, 2), (0, 2))}

    def program(x: Tensor, first: bool, last: bool) -> Tensor:
        if first:
            x = x + _summed(x, w, groups[0, 1])
        if last:
            x = x + _summed(x.tanh(), w, groups[0, 2])
        return x

    def step(function: Callable[..., Tensor]) -> Tensor:
        if rank == 2:
            dist.recv(torch.zeros(1), 1, group=groups[1, 2])
        got = function(x, rank != 2, rank != 1)
        if rank == 1:
            dist.send(torch.ones(1), 2, group=groups[1, 2])
        return got

    function = with_options(program)
    with torch.no_grad(), mock.patch.object(process_groups, "group_timeout_s", return_value=20.0):
        function(x, rank != 2, rank != 1)
        return torch.allclose(step(function), step(program), atol=1e-4)


def _summed(x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", group) + funcol.all_reduce((x + 1) @ w, "sum", group)


@pytest.mark.ranks
def test_a_group_compares_after_the_groups_that_communicate_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_AGREE_S", "120")
    assert run_ranks(3, in_turn, timeout_s=300) == [True] * 3


# --- which graphs compare ---------------------------------------------------------------------------------------
@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """What is compared (accord, count), in a process that is the first of two imagined ranks."""
    found: list[tuple[int, int]] = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(run_check, "run_check", lambda accord, count, group: found.append((accord, count)))
    with imagined_ranks(2):
        yield found
        torch._dynamo.reset()


@pytest.mark.parametrize("fallback", [False, True])
def test_each_graph_that_communicates_compares(checks: list[tuple[int, int]], fallback: bool) -> None:
    with torch.no_grad():
        with_options(two_sums, fallback_by_default=fallback)(*operands(0))
        with_options(lambda x, w: x @ w, fallback_by_default=fallback)(*operands(0))
    assert checks == [(0, 1)] * 2, "imagined ranks are not asked, so that there is no accord"


def test_both_halves_of_a_training_function_compare(checks: list[tuple[int, int]]) -> None:
    """The gather that is made again counts, too: where all ranks do so."""
    start()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layer, weights = plain_layer(mesh)
    function = compiled(lambda x: layer(x * x), options={**STRICT, "rematerialize": "always"})
    train(function, shard_of(mesh, 2, 4, 16), weights)
    assert checks == [(0, 1)] * 5


def test_a_group_on_gpus_does_not_compare_on_the_host(checks: list[tuple[int, int]]) -> None:
    """There unlike calls are found where they meet, and no host waits."""
    with mock.patch("asynctp_passes.planning.plan.on_wire", return_value=True), torch.no_grad():
        with_options(two_sums)(*operands(0))
    assert checks == []


@pytest.mark.parametrize("fallback", [False, True])
def test_the_compiled_code_communicates_in_order_and_after_its_checks(
    checks: list[tuple[int, int]], fallback: bool
) -> None:
    """Inductor may run what reads one tensor in any order, the check and its all-reduce too. Nothing uses the first.

    A group of its own has no deviation; the next one has a sum, and the last one two maxima.
    """
    first, second, third = (dist.new_group([0, 1]) for _ in range(3))

    def program(x: Tensor, w: Tensor) -> Tensor:
        seen = funcol.all_reduce(x, "sum", first)
        total = _summed(x * 2, w, second)
        largest = [funcol.all_reduce(one.amax(), "max", third) for one in (x, w)]
        return seen.sum() + total * largest[0] * largest[1]

    function = with_options(program, fallback_by_default=fallback)
    with torch.no_grad():
        _, (code,) = run_and_get_code(function, *operands(0))
    called = r"^ +(?:\w+ = )?torch\.ops\.\w+\.(run_check|\w*all_reduce)_?\.default\(.*'(\d+)'"
    calls = re.findall(called, as_ops(code), re.MULTILINE)
    names = [group.group_name for group in (first, second, third)]
    wanted = [
        *(("run_check", names[0]), ("all_reduce", names[0])),
        *(("run_check", names[1]), ("run_check", names[1]), ("matmul_all_reduce", names[1])),
        *(("run_check", names[2]), ("all_reduce", names[2])) * 2,
    ]
    assert calls == wanted
