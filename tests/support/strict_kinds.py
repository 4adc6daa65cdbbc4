"""Kinds of misses and silences: what of each is logged, and which of `strict`, `expect` and `require` raise for it.

`test_strict_kinds` does each kind under each setting; the page of reports shows the table (`page_parts`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

import asynctp_passes
from asynctp_passes import Config, ExpectError, StrictError, steps
from asynctp_passes.tools import reason_programs

SETTINGS: dict[str, dict[str, Any]] = {
    "zero": {"strict": "zero"},
    "all": {"strict": "all"},
    "expect": {"strict": "off", "expect": 2},
    "require": {"strict": "off"},
}
"""Options of each column but the first. After the last one, `require(fused=2, missed=0)` is called."""

X, W = torch.ones(4, 16), torch.ones(16, 8)
Options = dict[str, Any]
MISSED = {"all": StrictError, "expect": ExpectError, "require": ExpectError}
NOTHING_FUSED = {"zero": StrictError, **MISSED}


@dataclass(frozen=True)
class Kind:
    """A row of the table.

    Attributes:
        text: What happens.
        logged: What is logged by default.
        raises: The error of each setting that raises; those left out do not.
        act: Compiles and runs it with these options, in the first of two ranks; None where ranks of its own show it.
        says: The level of a log entry of it, and words in that; None if there is none.
        shown_by: Tests that show it, where `act` is None.
        patch: Makes a context in which it happens.
        always: It raises whatever is set.
    """

    text: str
    logged: str
    raises: dict[str, type[Exception]] = field(default_factory=dict)
    act: Callable[[Options], Any] | None = None
    says: tuple[str, str] | None = None
    shown_by: tuple[str, ...] = ()
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext
    always: bool = False


def _compiled(program: Any, options: Options) -> Any:
    return torch.compile(program, backend="asynctp", options=options)


def _gathered(x: Tensor) -> Tensor:
    return all_gather_tensor(x, 0, dist.group.WORLD)


def _reversed(x: Tensor) -> Tensor:
    return torch.cat(_gathered(x).chunk(2)[::-1])


def _one_is_missed(options: Options) -> None:
    _compiled(lambda x: (_gathered(x) @ W, _reversed(x + 1) @ W), options)(X)


def _all_are_missed(options: Options) -> None:
    _compiled(lambda x: _reversed(x) @ W, options)(X)


def _one_may_be_no_chain(options: Options) -> None:
    _compiled(lambda x: _gathered(x).cumsum(0) @ W, options)(X)


def _opaque_op_between(options: Options) -> None:
    _compiled(lambda x: _gathered(x) @ reason_programs.exchange(W), options)(X)


def _opaque_op_beside(options: Options) -> None:
    _compiled(lambda x: (reason_programs.exchange(x), _gathered(x) @ W, _gathered(x + 1) @ W), options)(X)


def _break_in_a_chain(options: Options) -> None:
    def program(x: Tensor) -> Tensor:
        whole = _gathered(x)
        torch._dynamo.graph_break()
        return whole @ W

    _compiled(program, options)(X)


def _break_at_a_collective(options: Options) -> None:
    def program(x: Tensor) -> Tensor:
        whole = torch.empty(8, 16)
        handle = dist.all_gather_into_tensor(whole, x, async_op=True)
        assert handle is not None
        handle.wait()
        return whole @ W

    _compiled(program, options)(X)
    asynctp_passes.reports()


def _uncompiled(options: Options) -> None:
    def program(x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x + 1
        return _gathered(x) @ W

    _compiled(program, options)(X)


def _uncompiled_from_a_line_on(options: Options) -> None:
    def program(x: Tensor) -> Tensor:
        x = x.relu()  # two ops, after which Dynamo can stop
        x = x + 1
        try:
            torch._dynamo.graph_break()
            return _gathered(x) @ W
        finally:
            x = x + 1

    _compiled(program, options)(X)


def _turned_off(options: Options) -> None:
    with torch.compiler.set_stance("force_eager"):
        _compiled(lambda x: _gathered(x) @ W, options)(X)


def _no_chain(options: Options) -> None:
    for count in (4, 6, 8):
        torch._dynamo.reset()
        _compiled(lambda x: x @ W, options)(torch.ones(count, 16))


def _out_of_scope(options: Options) -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        return all_reduce(x.amax(), "max", dist.group.WORLD), _gathered(x) @ W, _gathered(x + 1) @ W

    _compiled(program, options)(X)


def _enabled_late(options: Options) -> None:
    compiled = torch.compile(lambda x: _gathered(x) @ W)
    compiled(X)
    with asynctp_passes.enable(Config(**options)):
        compiled(X)


def _both_are_fused(options: Options) -> None:
    _compiled(lambda x: (_gathered(x) @ W, _gathered(x + 1) @ W), options)(X)


def _cached(options: Options) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        asynctp_passes.clear_reports()
        _both_are_fused(options)
    assert [report.from_cache for report in asynctp_passes.reports()] == [True]


def _not_agreed(options: Options) -> None:
    _compiled(lambda x: _gathered(x).relu() @ W, {**options, "deviate": False})(X)


def _failing() -> AbstractContextManager[Any]:
    return mock.patch.object(steps, "rewrite", side_effect=NotImplementedError("nobody foresaw this"))


KINDS = {
    "one is missed": Kind(
        "Some chains of a graph are MISSED", "a warning each", MISSED, _one_is_missed, ("WARNING", "ATP101")
    ),
    "all are missed": Kind(
        "All chains of a graph are MISSED", "a warning each", NOTHING_FUSED, _all_are_missed, ("WARNING", "ATP101")
    ),
    "may be no chain": Kind(
        "Only `ATP121`, `ATP203`: perhaps nothing to mend",
        "a warning each",
        MISSED,
        _one_may_be_no_chain,
        ("WARNING", "ATP121"),
    ),
    "opaque op between": Kind(
        "An opaque op in a chain",
        "a warning: `ATP213`",
        NOTHING_FUSED,
        _opaque_op_between,
        ("WARNING", "ATP213"),
    ),
    "opaque op beside": Kind(
        "An opaque op beside chains", "as info", {}, _opaque_op_beside, ("INFO", "may communicate")
    ),
    "break in a chain": Kind(
        "A graph break in a chain, between two graphs",
        "a warning: `ATP120`",
        NOTHING_FUSED,
        _break_in_a_chain,
        ("WARNING", "ATP120"),
    ),
    "break at a collective": Kind(
        "A graph break at a collective, which is in no graph then",
        "`reports()` warns of known kinds",
        {"require": ExpectError},
        _break_at_a_collective,
        ("WARNING", "async_op=True"),
    ),
    "uncompiled": Kind(
        "A function with tensors that Dynamo fails to compile",
        "a warning, which names it and why",
        MISSED,
        _uncompiled,
        ("WARNING", "torch fails to compile"),
    ),
    "uncompiled rest": Kind(
        "The same from a line on",
        "the same, with the line",
        MISSED,
        _uncompiled_from_a_line_on,
        ("WARNING", "torch cannot resume"),
    ),
    "turned off": Kind(
        "`torch.compile` turned off, as by `torch.compiler.set_stance`",
        "nothing",
        {"require": ExpectError},
        _turned_off,
    ),
    "given up": Kind(
        "A compiled function that Dynamo gives up on some ranks",
        "the error, on every rank, where others wait on asynctp's own wire",
        shown_by=("test_one_rank_reaches_the_recompile_limit", "test_collectives_that_go_by_torch_are_left_in_peace"),
        always=True,
    ),
    "no chain": Kind(
        "Three graphs with matmuls (one with `expect`), and no chain",
        "one warning, with causes",
        {"require": ExpectError},
        _no_chain,
        ("WARNING", "nothing to fuse"),
    ),
    "out of scope": Kind("A SKIPPED collective", "as info", {}, _out_of_scope, ("INFO", "SKIPPED")),
    "enabled late": Kind(
        "`enable()` after a function was compiled",
        "a warning, which names it",
        {"require": ExpectError},
        _enabled_late,
        ("WARNING", "comes too late"),
    ),
    "cached": Kind(
        "A graph from Inductor's cache, all fused",
        "its report: `from_cache`",
        {},
        _cached,
        ("INFO", "from Inductor's cache"),
    ),
    "not agreed": Kind(
        "A deviation that ranks do not all do, or `deviate=False`",
        "a warning: `ATP212`, if fused in no other way",
        NOTHING_FUSED,
        _not_agreed,
        ("WARNING", "ATP212"),
    ),
    "ranks differ": Kind(
        "Ranks that run unlike calls",
        "the error, on every rank",
        shown_by=("test_ranks_that_run_unlike_graphs_raise_at_once_and_send_nothing",),
        always=True,
    ),
    "internal error": Kind(
        "An error of asynctp itself (`ATP901`)",
        "an error, once a kind",
        NOTHING_FUSED,
        _both_are_fused,
        ("ERROR", "internal error ATP901"),
        patch=_failing,
    ),
    "no passes": Kind(
        'No passes in Inductor (`mode="lite"`)',
        "the error; under `enable()` a warning instead",
        shown_by=("test_passes_turned_off", "test_a_compile_without_passes_is_left_alone_and_said"),
        always=True,
    ),
}
"""All kinds, in the order of the page."""


def markdown() -> str:
    """The table."""
    lines = ['| Case | Logged | `"zero"` | `"all"` | `expect=N` | `require` |', "|---|---|---|---|---|---|"]
    for kind in KINDS.values():
        raises = ["raises" if kind.always or name in kind.raises else "-" for name in SETTINGS]
        lines.append(f"| {' | '.join([kind.text, kind.logged, *raises])} |")
    return "\n".join(lines)


def act(kind: Kind, setting: str) -> None:
    """Do a kind under a setting; raises what that raises."""
    assert kind.act is not None
    with kind.patch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind.act(SETTINGS[setting])
    if setting == "require":
        asynctp_passes.require(fused=2, missed=0)
