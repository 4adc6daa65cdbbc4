"""Where Dynamo gives a compiled function up on one rank, its next collective raises on all ranks, who name it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
    reduce_scatter_tensor_autograd,
)
from torch.utils.checkpoint import checkpoint

from asynctp_passes.torch_private import giving_up, process_groups

OPTIONS: dict[str, Any] = {"strict": "off", "fallback_by_default": True}
SOON_S = 5.0
"""By then every rank has raised."""


def layer(x: Tensor, w: Tensor, tag: str) -> Tensor:
    gathered = all_gather_tensor(x, 0, dist.group.WORLD) @ w
    if tag == "never":
        gathered = gathered + 1
    return reduce_scatter_tensor(gathered.relu() @ w, "sum", 0, dist.group.WORLD)


def trained(x: Tensor, w: Tensor, tag: str) -> Tensor:
    gathered = all_gather_tensor_autograd(x, 0, dist.group.WORLD) @ w
    if tag == "never":
        gathered = gathered + 1
    return reduce_scatter_tensor_autograd(gathered.relu() @ w, "sum", 0, dist.group.WORLD)


def broken(x: Tensor, w: Tensor, tag: str) -> Tensor:
    """The function in the program has no collective in a graph of its own: they are in the rest after a graph break."""
    if tag == "never":
        x = x + 1
    torch._dynamo.graph_break()
    return layer(x, w, "x")


def local(x: Tensor, w: Tensor, tag: str) -> Tensor:
    return (x + 1 if tag == "never" else x) @ w


def sums(x: Tensor, w: Tensor, tag: str) -> Tensor:
    """Of these two reductions asynctp makes one, if all ranks do."""
    group = dist.group.WORLD
    return all_reduce(x @ w, "sum", group) + all_reduce((x + (2 if tag == "never" else 1)) @ w, "sum", group)


class Copied(torch.autograd.Function):
    """What comes in front of a column-parallel matmul: only its backward communicates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return all_reduce(grad, "sum", dist.group.WORLD)


def checkpointed(x: Tensor, w: Tensor, tag: str) -> Tensor:
    """Torch hides `checkpoint` from Dynamo, which takes it into a graph all the same."""
    return checkpoint(trained, x, w, tag, use_reentrant=False)


def exchanged(x: Tensor, w: Tensor, tag: str) -> Tensor:
    """The first collective goes by torch in a graph, too."""
    x = all_to_all_single(x, None, None, dist.group.WORLD)
    return all_reduce((x + 1 if tag == "never" else x) @ w, "sum", dist.group.WORLD)


def columns(x: Tensor, w: Tensor, tag: str) -> Tensor:
    return (Copied.apply(x) + (2 if tag == "never" else 1)) @ w


@torch.compiler.disable
def logged(x: Tensor) -> Tensor:
    total = x.detach().sum()
    dist.all_reduce(total)
    return x + total


def branches(x: Tensor, w: Tensor, tag: str) -> Tensor:
    """One branch communicates, and the other one only in what torch is not to compile, which all ranks run."""
    if tag == "x":
        return layer(x, w, tag)
    return logged(x + (1 if tag == "never" else 0)) @ w


@dataclass
class Ended:
    """How the calls of one rank ended: values that are right, then the error, if any, and the seconds until it."""

    right: list[bool]
    error: str = ""
    seconds: float = 0.0


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


def calls(
    function: Callable[..., Tensor],
    tags: list[str],
    within: Callable[[int], contextlib.AbstractContextManager[Any]] = lambda step: nothing(),
    count: int | None = None,
    after: Callable[[], object] = nothing,
    **compiled: Any,
) -> Ended:
    """Call a function once for each tag as it is, and then compiled, until an error.

    within: In what each compiled call runs, by number. count: Of the compiled calls, if there is none for each tag.
    after: Called after each of them.
    """
    torch.manual_seed(dist.get_rank())
    step_function = torch.compile(function, backend="asynctp", options=OPTIONS, **compiled)
    w, trains = torch.randn(32, 32), function in (trained, columns, checkpointed)
    inputs = [torch.randn(16, 32, requires_grad=trains) for _ in tags]
    ended = Ended([])

    def values(of: Callable[..., Tensor], x: Tensor, tag: str) -> Tensor:
        return torch.autograd.grad(of(x, w, tag).square().sum(), x)[0] if trains else of(x, w, tag)

    expected = [values(function, x, tag) for x, tag in zip(inputs, tags, strict=True)]
    for step, (x, tag, value) in enumerate(zip(inputs[:count], tags[:count], expected[:count], strict=True)):
        begun = time.monotonic()
        try:
            with within(step):
                ended.right.append(torch.allclose(values(step_function, x, tag), value, atol=1e-3))
            after()
        except Exception as raised:
            return Ended(ended.right, f"{type(raised).__name__}: {raised}", time.monotonic() - begun)
    return ended


def tags_of(rank: int, alone: bool, count: int = 6) -> list[str]:
    """A new tag with each call, on rank 0 alone or on all ranks."""
    return [f"step {step}" if rank == 0 or not alone else "x" for step in range(count)]


def at_limit(rank: int, _: int, name: str, alone: bool, limit: int) -> Ended:
    torch._dynamo.config.recompile_limit = limit
    return calls(globals()[name], tags_of(rank, alone))


def at_limit_under_strict(rank: int, _: int) -> Ended:
    torch._dynamo.config.recompile_limit = 3
    with mock.patch.dict(OPTIONS, strict="all"):
        return calls(layer, tags_of(rank, False))


def at_limit_of_all_forms(rank: int, _: int) -> Ended:
    """The wrapper of a partial is left first: what it calls has graphs of its own."""
    torch._dynamo.config.accumulated_recompile_limit = 2
    return calls(functools.partial(layer), tags_of(rank, True))


def at_limit_when_compiled_again(rank: int, _: int) -> Ended:
    """The limit is reached by one compiled function; another one of the same code has no graph of its own."""
    torch._dynamo.config.recompile_limit = 2
    first = calls(layer, tags_of(rank, True, 2))
    second = calls(layer, tags_of(rank, True, 3)[2:])
    return Ended(first.right + second.right, second.error, second.seconds)


def at_limit_of_whole_graphs(rank: int, _: int) -> Ended:
    torch._dynamo.config.recompile_limit = 3
    """All ranks go on with another function."""
    ended = calls(layer, tags_of(rank, False), fullgraph=True)
    torch._dynamo.config.recompile_limit = 8
    assert ended.error.startswith("FailOnRecompileLimitHit")
    return calls(broken, ["x", "x"])


def left_in_a_local_branch(rank: int, _: int) -> Ended:
    """Rank 0 leaves in a branch without collectives, after which all meet, and has a graph of the other branch."""
    torch._dynamo.config.recompile_limit = 3
    tags = ["x", "a", "b", "c", "d", "x"] if rank == 0 else ["x", *"aaaa", "x"]
    return calls(branches, tags, after=dist.barrier)


def under_stance(rank: int, _: int, stance: str, alone: bool) -> Ended:
    """Two calls in the graph, then two of a rank or of all under a stance, the last of which no graph fits."""

    def within(step: int) -> Any:
        return torch.compiler.set_stance(stance) if step > 1 and (rank == 0 or not alone) else nothing()

    return calls(layer, ["x", "x", "x", "y" if rank == 0 or not alone else "x"], within)


def skipped(rank: int, _: int) -> Ended:
    """Dynamo is switched off in rank 0's last call, which needs another graph."""

    def within(step: int) -> Any:
        return torch._dynamo.config.patch(disable=True) if rank == 0 and step == 1 else nothing()

    return calls(layer, ["x", "y" if rank == 0 else "x"], within)


def compiled_with_limit(function: Callable[..., Tensor], limit: int) -> tuple[Callable[..., Tensor], Tensor, Tensor]:
    """A compiled function with so many forms at most, an input of this rank's, and a weight that changes nothing."""
    torch._dynamo.config.recompile_limit = limit
    torch.manual_seed(dist.get_rank())
    return torch.compile(function, backend="asynctp", options=OPTIONS), torch.randn(16, 32), torch.eye(32)


def left_beside_eager_backward(rank: int, _: int) -> Ended:
    """Rank 0 leaves a call without collectives, around which all ranks have some that only a backward makes."""
    step_function, x, w = compiled_with_limit(branches, 2)
    ended = Ended([torch.allclose(step_function(x, w, "x"), branches(x, w, "x"), atol=1e-3)])
    for step in range(5):
        tag = f"step {step}" if rank == 0 else "a"
        given = x.clone().requires_grad_()
        for function in (step_function, branches):
            given.grad = None
            Copied.apply(function(Copied.apply(given), w, tag)).sum().backward()
            ended.right.append(torch.allclose(given.grad, torch.full_like(x, 4.0)))
    return ended


class CalledInBackward(torch.autograd.Function):
    """A function whose backward is a call of one that torch.compile has wrapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, called: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.called = called
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.called(grad), None


def left_in_a_backward(rank: int, _: int) -> Ended:
    step_function, x, w = compiled_with_limit(layer, 3)
    ended = Ended([])
    for tag in tags_of(rank, alone=True):
        given, begun = x.clone().requires_grad_(), time.monotonic()
        try:
            CalledInBackward.apply(given, functools.partial(step_function, w=w, tag=tag)).sum().backward()
        except Exception as raised:
            return Ended(ended.right, f"{type(raised).__name__}: {raised}", time.monotonic() - begun)
        ended.right.append(torch.allclose(given.grad, torch.full_like(x, 2.0)))
    return ended


def left_alone_with_sums(rank: int, _: int) -> Ended:
    """Rank 0 leaves a graph that sends something else than the program. The others are not in its last call."""
    torch._dynamo.config.recompile_limit = 2
    process_groups.group_timeout_s = lambda group: 6.0  # type: ignore[assignment]
    return calls(sums, ["a", "b", "never"], count=3 if rank == 0 else 2)


@pytest.fixture
def on_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks run what GPUs run."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("ASYNCTP_CPU_IMPLEMENTATION", "interpreted")
    monkeypatch.setenv("ASYNCTP_TIMEOUT_S", "60")


def check_left(ended: list[Ended], rights: int, *parts: str) -> None:
    """All ranks are right until rank 0 leaves; then all raise, and name the parts."""
    for one in ended:
        assert one.error.startswith("UnlikeCalls: unlike calls have met: rank "), one
        assert " as it is written, since " in one.error
        assert one.seconds < SOON_S
        assert all(part in one.error for part in parts), one.error
    assert all(one.right == [True] * rights for one in ended), ended


def check_right(ended: list[Ended]) -> None:
    assert all(one.error == "" and one.right and all(one.right) for one in ended), ended


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["layer", "trained", "columns", "checkpointed", "exchanged"])
def test_one_rank_reaches_the_recompile_limit(on_wire: None, name: str) -> None:
    ended = run_ranks(2, at_limit, name, True, 2)
    check_left(
        ended, 2, "torch._dynamo.config.recompile_limit=2 is reached", f":{name}:", "Remedy: raise torch._dynamo"
    )


@pytest.mark.ranks
def test_the_limit_and_the_function_are_named_that_the_user_knows(on_wire: None) -> None:
    ended = run_ranks(2, at_limit_of_all_forms)
    check_left(ended, 4, "torch._dynamo.config.accumulated_recompile_limit=2 is reached", ":layer:")


@pytest.mark.ranks
def test_the_limit_is_reached_by_another_compile_of_the_function(on_wire: None) -> None:
    check_left(run_ranks(2, at_limit_when_compiled_again), 2, "recompile_limit=2 is reached", ":layer:")


@pytest.mark.ranks
def test_of_three_ranks_the_others_name_the_one_that_left(on_wire: None) -> None:
    check_left(run_ranks(3, at_limit, "layer", True, 2), 2, "recompile_limit=2 is reached")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "alone", "limit"),
    [
        ("layer", True, 8),
        ("layer", False, 3),
        ("broken", False, 3),
        ("trained", False, 3),
        ("columns", False, 3),
        ("local", True, 3),
        ("broken", True, 3),
    ],
    ids=[
        "with the limit raised",
        "together",
        "a broken one together",
        "a trained one together",
        "a backward together",
        "nothing is sent",
        "what is called has a graph",
    ],
)
def test_values_come_where_no_rank_leaves_alone(on_wire: None, name: str, alone: bool, limit: int) -> None:
    check_right(run_ranks(2, at_limit, name, alone, limit))


@pytest.mark.ranks
def test_where_all_leave_strict_raises(on_wire: None) -> None:
    for one in run_ranks(2, at_limit_under_strict):
        assert one.right == [True] * 3
        assert one.error.startswith("StrictError: asynctp: torch fails to compile ")
        assert "recompile_limit=3 is reached, with 3 compiled forms" in one.error


@pytest.mark.ranks
def test_where_torch_raises_at_the_limit_all_may_go_on(on_wire: None) -> None:
    check_right(run_ranks(2, at_limit_of_whole_graphs))


@pytest.mark.ranks
def test_the_backward_of_other_code_is_left_in_peace(on_wire: None) -> None:
    check_right(run_ranks(2, left_beside_eager_backward))


@pytest.mark.ranks
def test_a_call_within_a_backward_is_one_that_is_left(on_wire: None) -> None:
    check_left(run_ranks(2, left_in_a_backward), 3, "torch._dynamo.config.recompile_limit=3 is reached", ":layer:")


@pytest.mark.ranks
@pytest.mark.parametrize("wire", [True, False])
def test_a_call_without_collectives_waits_for_nobody(wire: bool, request: pytest.FixtureRequest) -> None:
    if wire:
        request.getfixturevalue("on_wire")
    ended = run_ranks(2, left_in_a_local_branch)
    check_right(ended)
    assert [len(one.right) for one in ended] == [6, 6]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("stance", "rights"),
    [("force_eager", 2), ("eager_on_recompile", 3), ("eager_then_compile", 3), ("aot_eager_then_compile", 3)],
)
def test_a_stance_of_one_rank(on_wire: None, stance: str, rights: int) -> None:
    ended = run_ranks(2, under_stance, stance, True)
    check_left(ended, rights, f"set_stance('{stance}') is in force", "set one stance on every rank")


class Keeps:
    """A compiler that has a tensor: Dynamo compiles frames that are given it, if they are not left out."""

    def __init__(self) -> None:
        self.kept = torch.ones(2)

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        return module.forward


def compiled_after_one_was_given_up(rank: int, _: int) -> bool:
    giving_up._hook_collectives()
    doubled = torch.compile(lambda x: 2 * x, backend=Keeps(), fullgraph=True)
    both = torch.compile(lambda x: doubled(x) + 1, backend=Keeps(), fullgraph=True)
    return torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0)) and torch.equal(
        both(torch.ones(2)), 3 * torch.ones(2)
    )


@pytest.mark.ranks
def test_what_is_compiled_after_a_function_was_given_up_has_no_frame_of_ours() -> None:
    assert run_ranks(2, compiled_after_one_was_given_up) == [True, True]


@pytest.mark.ranks
@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "aot_eager_then_compile"])
def test_a_stance_of_all_ranks(on_wire: None, stance: str) -> None:
    check_right(run_ranks(2, under_stance, stance, False))


@pytest.mark.ranks
def test_a_frame_that_is_skipped_on_one_rank(on_wire: None) -> None:
    check_left(run_ranks(2, skipped), 1, "Dynamo skips it", "compiled on every rank, or on none")


@pytest.mark.ranks
def test_collectives_that_go_by_torch_are_left_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a graph sends something else than the program does."""
    check_right(run_ranks(2, at_limit, "layer", True, 3))
    check_right(run_ranks(2, at_limit, "sums", False, 3))
    first, second = run_ranks(2, left_alone_with_sums)
    assert "recompile_limit=2 is reached" in first.error
    assert first.right == second.right == [True] * 2
    assert second.error == ""
