"""Chains that lie in two graphs: a collective in one, and its matmul in another that is compiled later.

Which tensor a graph takes is only known when it is called. So the results of a function that may be half of a chain
are remembered in its first calls, while they live. Dynamo shows the tensors with which it calls the next function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from asynctp_passes.config import Config
from asynctp_passes.ir.records import Crossing
from asynctp_passes.reasons import MATMUL_IN_ANOTHER_GRAPH, Refusal
from asynctp_passes.reporting.internal import contained
from asynctp_passes.reporting.report import Remark, Report
from asynctp_passes.torch_private import dynamo

_CALLS = 16
"""Calls of a compiled function whose results are remembered: the functions that take them are compiled by then."""


class _Half(NamedTuple):
    """One half of a chain, which left a graph.

    Attributes:
        crossing: The tensor that left.
        before: The report of its graph.
        ended: Place and reason of the graph break at which that graph ended; empty where its function returned.
        version: How often the tensor had been changed in place; None where nobody counts that.
    """

    crossing: Crossing
    before: Report
    ended: str
    version: int | None = None


_lock = threading.Lock()
_left: MutableMapping[torch.Tensor, _Half] = WeakTensorKeyDictionary()


def forget() -> None:
    """Forget all tensors that left graphs."""
    with _lock:
        _left.clear()


def remembering(compiled: Callable[..., Any], gm: fx.GraphModule, report: Report | None) -> Callable[..., Any]:
    """`compiled`, whose results are remembered that may be halves of chains; itself where there are none.

    Args:
        report: That of its graph, without its backward; None: it has no graph.
    """
    with contained("watch results that may be halves of chains"):
        leaving = [one for one in report.crossings if one.leaves] if report is not None else []
        if report is not None and leaving and not dynamo.is_precompiled(compiled):
            return _Remembering(compiled, [_Half(one, report, dynamo.graph_break_of(gm)) for one in leaving])
    return compiled


class _Remembering:
    """A compiled function, some of whose results are remembered in its first calls."""

    def __init__(self, compiled: Callable[..., Any], halves: list[_Half]) -> None:
        self._compiled, self._halves, self._calls = compiled, halves, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self._compiled(*args, **kwargs)
        if self._calls < _CALLS:
            self._calls += 1
            with contained("remember results that may be halves of chains"), _lock:
                whole = results if isinstance(results, tuple | list) else (results,)
                for half in self._halves:
                    tensor = whole[half.crossing.index] if half.crossing.index < len(whole) else None
                    if isinstance(tensor, torch.Tensor):  # else the caller has results in another structure
                        _left[tensor] = half._replace(version=dynamo.version_of(tensor))
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_compiled"], name)


def cut_chains(given: Mapping[int, torch.Tensor], report: Report | None, config: Config) -> tuple[Report | None, int]:
    """A report of the chains that lie in a function's graph and in an earlier one; None without any.

    Args:
        given: The tensors with which the function is called, by number.
        report: That of its graph, without its backward; None: it has no graph.

    Returns:
        The report, and how many chains are fused in the graphs of both halves.
    """
    halves = list[tuple[_Half, Crossing]]()
    with contained("look for chains that lie in two graphs"):
        for one in report.crossings if report is not None else ():
            half = None if one.leaves else _half_of(given.get(one.index))
            if half is None or not config.enrolls(half.crossing.group or one.group):
                continue
            roles = half.crossing.role, one.role  # a gathered tensor is multiplied, or a result of a matmul reduced
            if (roles[0] == "all_gather") == (roles[1] == "matmul") and "matmul" in roles:
                halves.append((half, one))
    if report is None or not halves:
        return None, 0
    remarks = tuple(_remark(half, after, report.graph) for half, after in halves)
    facts = {name: getattr(report, name) for name in ("torch_version", "config_digest", "from_cache")}
    fused = len(report.fused) + max(len(half.before.fused) for half, _ in halves)
    return Report(report.graph, report.phase, remarks, **facts), fused


def _half_of(tensor: torch.Tensor | None) -> _Half | None:
    """The half of a chain that a tensor is, as it left its graph: nothing has changed it in place since then.

    Where nobody counts changes, it is one only after a graph break: a function that returns may be followed by changes.
    """
    with _lock:
        half = None if tensor is None else _left.get(tensor)
    if tensor is None or half is None or half.version != dynamo.version_of(tensor):
        return None
    return half if half.ended or half.version is not None else None


def _remark(half: _Half, after: Crossing, graph: str) -> Remark:
    before, reason = half.crossing, MATMUL_IN_ANOTHER_GRAPH
    collective, matmul = (before, after) if before.role == "all_gather" else (after, before)
    own, other = ("gathered", "multiplied") if collective is before else ("multiplied", "reduced")
    ended = f"torch broke the graph at {half.ended}" if half.ended else "the function of the first one returns between"
    places = [f" at {one.source}" if one.source else "" for one in (before, after)]
    facts = f"{before.tensor} is {own} in {half.before.graph}{places[0]}, and {other} in {graph}{places[1]}; {ended}"
    return Remark(
        outcome="MISSED",
        kind=collective.role,
        collective=collective.node,
        code=reason.code,
        name=reason.name,
        message=str(Refusal(reason, facts)),
        hint=reason.hint,
        nodes=(before.node, after.node),
        source=matmul.source or collective.source,
        group=collective.group,
        group_size=collective.group_size,
        shapes={"input" if collective is after else "output": before.tensor},
        module=matmul.module or collective.module,
    )
