"""Ranks meet before a graph that sends otherwise than its program, so that no rank does so alone: tried on ranks."""

from __future__ import annotations

import contextlib
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
from ranks import imagined_ranks, run_ranks
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

from asynctp_passes import DisagreementError, compat
from asynctp_passes.ops import meeting

QUIET: dict[str, Any] = {"strict": "off", "log": False, "trace": False}
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
def test_a_group_whose_life_is_not_known_meets_nobody_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    peers = compat.Peers(0, (0, 1), store, mock.Mock(), life=None)
    monkeypatch.setattr(compat, "peers_of", lambda name: peers)
    with pytest.raises(DisagreementError, match="the store of group 'tp' failed"):
        meeting.meet("key", "drop: [0]", "tp")
    assert store.num_keys() == 0


# --- on ranks --------------------------------------------------------------------------------------------------
def unlike(rank: int, world_size: int) -> tuple[list[bool], str]:
    """All ranks compile both graphs; then each runs another one. The rank that would send one sum runs it eagerly."""
    x, w = operands(rank)
    function, right, error = with_options(two_sums), [], ""
    with torch.no_grad():
        for look in (False, True, False):
            got = function(x, w, look)[0]
            right.append(torch.allclose(got, two_sums(x, w)[0], atol=1e-4))
        with mock.patch.object(compat, "group_timeout_s", return_value=LIMIT_S):
            try:
                got = function(x, w, rank == 0)[0]
            except DisagreementError as raised:
                error = str(raised)
                got = two_sums(x, w)[0]
        right.append(torch.allclose(got, two_sums(x, w)[0], atol=1e-4))
    return right, error


@pytest.mark.ranks
def test_ranks_that_run_unlike_graphs_send_nothing_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compile, so that no vote, comes before. One rank raises before it sends, and the other's values are right."""
    monkeypatch.setenv("ASYNCTP_AGREE_S", "120")
    (first, none), (second, error) = run_ranks(2, unlike, timeout_s=300)
    assert first == second == [True] * 4
    assert not none
    for part in (
        "rank 0 of group",
        f"{LIMIT_S:g} s",
        "sum: all_reduce(sum) in place of 1 * 0 + 1 * 1",
        "deviate=False",
    ):
        assert part in error


def met_often(rank: int, world_size: int, count: int) -> tuple[int, list[bool]]:
    """How often ranks met in calls of a graph, and which of the meetings' keys are in the store at the end."""
    x, w = operands(rank)
    function, told = with_options(two_sums), []

    def meet(key: str, deviations: str, group: str, own: Callable[..., None] = meeting.meet) -> None:
        told.append(key)
        own(key, deviations, group)

    with torch.no_grad(), mock.patch.object(meeting, "meet", meet):
        for _ in range(count):
            function(x, w)
        dist.barrier()
    peers = compat.peers_of(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    assert peers is not None
    at = f"asynctp/{peers.life}/meet/{told[0]}"
    return len(told), [peers.store.check([f"{at}/{number}/{rank}"]) for number in range(count)]


@pytest.mark.ranks
def test_ranks_meet_in_each_call_and_leave_one_key_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_AGREE_S", "120")
    for met, kept in run_ranks(2, met_often, 5, timeout_s=300):
        assert met == 5
        assert kept == [False, False, False, False, True]


def alone(rank: int, world_size: int) -> tuple[bool, str]:
    """Only rank 1 meets, in a group whose timeout is short."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT_S))
    dist.barrier()
    error = ""
    if rank == 1:
        try:
            meeting.meet("key", "drop: [0]", group.group_name)
        except DisagreementError as raised:
            error = str(raised)
    dist.barrier()
    return rank == 1, error


@pytest.mark.ranks
def test_a_rank_that_nobody_meets_is_told_who_is_missing() -> None:
    (_, none), (_, error) = run_ranks(2, alone, timeout_s=120)
    assert not none
    assert "rank 0 of group" in error
    assert "drop: [0]" in error


def meets_again(rank: int, world_size: int) -> list[bool]:
    """Rank 0 does not come to the third call, in which rank 1 raises. Afterwards both call the graph again."""
    x, w = operands(rank)
    function, right = with_options(two_sums), []
    with torch.no_grad():
        function(x, w)
        for step in range(4):
            with mock.patch.object(compat, "group_timeout_s", return_value=LIMIT_S if step == 1 else 300.0):
                absent = step == 1 and rank == 0
                try:
                    got = two_sums(x, w)[0] if absent else function(x, w)[0]
                except DisagreementError:
                    right.append(step == 1)
                    got = two_sums(x, w)[0]
            right.append(torch.allclose(got, two_sums(x, w)[0], atol=1e-4))
    return right


@pytest.mark.ranks
def test_ranks_meet_again_after_a_meeting_to_which_one_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its post in the store must not count in a later meeting, in which it would be one ahead."""
    monkeypatch.setenv("ASYNCTP_AGREE_S", "120")
    first, second = run_ranks(2, meets_again, timeout_s=300)
    assert first == [True] * 4
    assert second == [True] * 5


def late(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 0 comes after rank 1 has left. It waits for it in the next meeting, to which rank 1 comes."""
    group, error = dist.group.WORLD.group_name, ""  # type: ignore[union-attr]
    with mock.patch.object(compat, "group_timeout_s", return_value=LIMIT_S if rank else 120.0):
        if rank == 0:
            time.sleep(2 * LIMIT_S)
        else:
            try:
                meeting.meet("key", "drop: [0]", group)
            except DisagreementError as raised:
                error = str(raised)
            time.sleep(2 * LIMIT_S)
    with mock.patch.object(compat, "group_timeout_s", return_value=120.0):
        meeting.meet("key", "drop: [0]", group)
    peers = compat.peers_of(group)
    assert peers is not None
    at = f"asynctp/{peers.life}/meet/key"
    kept = [number for number in range(3) if peers.store.check([f"{at}/{number}/{rank}"])]
    dist.barrier()
    return error, str(kept)


@pytest.mark.ranks
def test_a_rank_that_comes_late_does_not_go_on_alone() -> None:
    (none, kept), (error, kept_too) = run_ranks(2, late, timeout_s=120)
    assert not none
    assert "rank 0 of group" in error
    assert kept == kept_too == "[1]"


def interrupted(rank: int, world_size: int) -> bool:
    """Rank 0 is interrupted while it waits for rank 1, and calls the graph again; rank 1 comes in between."""
    x, w = operands(rank)
    function, raised = with_options(two_sums), False
    with torch.no_grad(), mock.patch.object(compat, "group_timeout_s", return_value=20.0):
        function(x, w)
        if rank == 0:
            with mock.patch.object(meeting, "looks", side_effect=KeyboardInterrupt):
                try:
                    function(x, w)
                except KeyboardInterrupt:
                    raised = True
        dist.barrier()
        got = function(x, w)[0]
        return raised == (rank == 0) and torch.allclose(got, two_sums(x, w)[0], atol=1e-4)


@pytest.mark.ranks
def test_a_rank_that_is_interrupted_in_a_meeting_has_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its post in the store must not let its peers go on: it sends nothing, and comes to the next meeting."""
    monkeypatch.setenv("ASYNCTP_AGREE_S", "120")
    assert run_ranks(2, interrupted, timeout_s=300) == [True, True]


def met_when_interrupted(rank: int, world_size: int) -> list[bool]:
    """Rank 0 is interrupted when all have come and know it. Then it calls the graph again, twice as rank 1 does."""
    x, w = operands(rank)
    function, right = with_options(two_sums), []

    def interrupt(*given: Any, wait: Callable[..., bool] = meeting._wait) -> bool:
        assert wait(*given)
        dist.recv(torch.zeros(1), 1)
        raise KeyboardInterrupt

    def go_on(*given: Any, wait: Callable[..., bool] = meeting._wait) -> bool:
        peers, place = given[:2]
        came = wait(*given)
        peers.store.compare_set(f"{place}/outcome", "", meeting._MET)
        dist.send(torch.ones(1), 0)
        return came

    with torch.no_grad(), mock.patch.object(compat, "group_timeout_s", return_value=20.0):
        function(x, w)
        if rank == 0:
            with mock.patch.object(meeting, "_wait", interrupt), pytest.raises(KeyboardInterrupt):
                function(x, w)
        for first in (rank == 1, False):
            with mock.patch.object(meeting, "_wait", go_on) if first else contextlib.nullcontext():
                right.append(torch.allclose(function(x, w)[0], two_sums(x, w)[0], atol=1e-4))
    return right


@pytest.mark.ranks
def test_a_rank_that_is_interrupted_after_all_have_met_comes_to_that_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers have gone on, and wait for what it sends."""
    monkeypatch.setenv("ASYNCTP_AGREE_S", "120")
    assert run_ranks(2, met_when_interrupted, timeout_s=300) == [[True, True]] * 2


def in_turn(rank: int, world_size: int) -> bool:
    """Three ranks with a group for each pair. Rank 2 comes to its meeting only after rank 1's group has communicated.

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
    with torch.no_grad(), mock.patch.object(compat, "group_timeout_s", return_value=20.0):
        function(x, rank != 2, rank != 1)
        return torch.allclose(step(function), step(program), atol=1e-4)


def _summed(x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", group) + funcol.all_reduce((x + 1) @ w, "sum", group)


@pytest.mark.ranks
def test_a_group_meets_after_the_groups_that_communicate_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_AGREE_S", "120")
    assert run_ranks(3, in_turn, timeout_s=300) == [True] * 3


# --- which graphs meet -----------------------------------------------------------------------------------------
@pytest.fixture
def meetings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The deviations that ranks met for, in a process that is the first of two imagined ranks."""
    found: list[str] = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(meeting, "meet", lambda key, deviations, group: found.append(deviations))
    with imagined_ranks(2):
        yield found
        torch._dynamo.reset()


@pytest.mark.parametrize("fallback", [False, True])
def test_a_graph_with_a_deviation_meets_before_it_communicates(meetings: list[str], fallback: bool) -> None:
    with torch.no_grad():
        with_options(two_sums, fallback_by_default=fallback)(*operands(0))
    assert meetings == ["sum: all_reduce(sum) in place of 1 * 0 + 1 * 1"]


def test_a_graph_without_one_does_not(meetings: list[str]) -> None:
    with torch.no_grad():
        with_options(two_sums, deviate=False)(*operands(0))
        with_options(two_sums)(*operands(0), look=True)
    assert meetings == []


def test_a_gather_that_is_made_again_is_met_for_in_the_backward(meetings: list[str]) -> None:
    start()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layer, weights = plain_layer(mesh)
    function = compiled(lambda x: layer(x * x), options={**STRICT, "rematerialize": "always"})
    train(function, shard_of(mesh, 2, 4, 16), weights)
    (again,) = meetings
    assert again.startswith("again: all_gather 0 after 1 collective (1 of the group, ")


def test_a_group_on_gpus_does_not_meet(meetings: list[str]) -> None:
    """There unlike calls are found where they meet, and no host waits."""
    with mock.patch("asynctp_passes.planning.plan.on_wire", return_value=True), torch.no_grad():
        with_options(two_sums)(*operands(0))
    assert meetings == []


@pytest.mark.parametrize("fallback", [False, True])
def test_the_compiled_code_communicates_in_order_and_after_its_meetings(meetings: list[str], fallback: bool) -> None:
    """Inductor may run what reads one tensor in any order, the meeting and its all-reduce too. Nothing uses the first.

    A group of its own has no deviation; the next one has a sum, and the last one a bucket, whose operands are inputs.
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
    calls = re.findall(r"^ +(?:\w+ = )?torch\.ops\.\w+\.(meet|\w*all_reduce)_?\.default\(.*'(\d+)'", code, re.MULTILINE)
    names = [group.group_name for group in (first, second, third)]
    wanted = [("all_reduce", names[0]), ("meet", names[1]), ("matmul_all_reduce", names[1])]
    assert calls == [*wanted, ("meet", names[2]), ("all_reduce", names[2])]
