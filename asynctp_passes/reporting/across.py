"""Chains that lie in two graphs: a collective in one, and its matmul in another that is compiled later, or was before.

Which tensor a graph takes is only known when it is called. So the results of a compiled function that may be half of a
chain are marked by their memory, and Dynamo shows the tensors with which it calls the next one that it compiles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from asynctp_passes.config import Config
from asynctp_passes.ir.records import Crossing
from asynctp_passes.reasons import MATMUL_IN_ANOTHER_GRAPH, Refusal
from asynctp_passes.reporting.internal import contained
from asynctp_passes.reporting.report import Remark, Report
from asynctp_passes.torch_private import dynamo, tensor_storage

__all__ = ["Border", "forget"]

_CALLS = 16
"""Calls of a compiled function whose results are marked: the functions that take them are compiled by then."""


@dataclass(frozen=True)
class _Half:
    """One half of a chain, which left a graph.

    Attributes:
        crossing: The tensor that left.
        graph: Name of its graph.
        ended: Place and reason of the graph break at which that graph ended; empty where its function returned.
        fused: Chains that are fused in that graph.
        size: Elements of the tensor.
        version: How often it had been changed in place; None where nobody counts that.
    """

    crossing: Crossing
    graph: str
    ended: str
    fused: int
    size: int = 0
    version: int | None = None


_lock = threading.Lock()
_left: dict[int, tuple[tensor_storage.Storage, _Half]] = {}


def forget() -> None:
    """Forget all tensors that left graphs."""
    with _lock:
        _left.clear()


class Border:
    """The border of one compiled function: the halves of chains that come in, and those that leave.

    Errors that nobody foresaw end neither a compile nor a call; halves are not seen then.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._arrived: dict[int, _Half] = {}
        self._ended = ""
        with contained("look for halves of chains among a function's inputs"):
            self.tensors = dynamo.given_tensors(gm)
            self._arrived = {index: half for index, one in self.tensors.items() if (half := _half_of(one)) is not None}
            self._ended = dynamo.graph_break_of(gm)

    def missed(self, report: Report | None, config: Config) -> tuple[Report | None, int]:
        """A report of the chains that lie in this function's graph and an earlier one; None without any.

        Args:
            report: That of the function's graph, without its backward; None: it has no graph.
            config: The configuration.

        Returns:
            The report, and how many chains are fused in the graphs of both halves.
        """
        if report is None or not self._arrived:
            return None, 0
        pairs = list[tuple[_Half, Crossing]]()
        with contained("look for chains that lie in two graphs"):
            pairs = self._pairs(report, config)
        if not pairs:
            return None, 0
        return _report(report, pairs), len(report.fused) + max(half.fused for half, _ in pairs)

    def _pairs(self, report: Report, config: Config) -> list[tuple[_Half, Crossing]]:
        arrived = [(self._arrived.get(one.index), one) for one in report.crossings if not one.leaves]
        pairs = [(half, one) for half, one in arrived if half is not None and _are_halves(half.crossing, one)]
        return [(half, one) for half, one in pairs if config.enrolls(half.crossing.group or one.group)]

    def marking(self, compiled: Callable[..., Any], report: Report | None) -> Callable[..., Any]:
        """`compiled`, whose results are marked that may be halves of chains; itself where there are none."""
        with contained("watch results that may be halves of chains"):
            leaving = [one for one in report.crossings if one.leaves] if report is not None else []
            if report is not None and leaving and not dynamo.is_precompiled(compiled):
                return _Marking(compiled, [_Half(one, report.graph, self._ended, len(report.fused)) for one in leaving])
        return compiled


def _half_of(tensor: torch.Tensor) -> _Half | None:
    """The half of a chain that a tensor is all of, as it left its graph: nothing has changed it in place since then.

    Where nobody counts changes, it is one only after a graph break: a function that returns may be followed by changes.
    """
    with _lock:
        if not _left or not tensor_storage.has_storage(tensor):
            return None
        storage, half = _left.get(tensor_storage.Storage(tensor).number, (None, None))
    if storage is None or half is None or not storage.lives or _as_left(half) != _as_left(tensor):
        return None
    return half if half.ended or half.version is not None else None


def _as_left(one: _Half | torch.Tensor) -> tuple[int, int | None]:
    if isinstance(one, _Half):
        return one.size, one.version
    return tensor_storage.size_of(one), tensor_storage.version_of(one)


def _are_halves(before: Crossing, after: Crossing) -> bool:
    """True for a gathered tensor that is multiplied, and a result of a matmul that is reduced."""
    return (before.role == "all_gather") == (after.role == "matmul") and "matmul" in (before.role, after.role)


class _Marking:
    """A compiled function that marks some of its results, in its first calls."""

    def __init__(self, compiled: Callable[..., Any], halves: Sequence[_Half]) -> None:
        self._compiled, self._halves, self._calls = compiled, halves, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self._compiled(*args, **kwargs)
        if self._calls < _CALLS:
            self._calls += 1
            with contained("mark results that may be halves of chains"):
                self._mark(results)
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_compiled"], name)

    def _mark(self, results: Any) -> None:
        whole = results if isinstance(results, tuple | list) else (results,)
        with _lock:
            for number in [number for number, (storage, _) in _left.items() if not storage.lives]:
                del _left[number]
            for half in self._halves:
                tensor = whole[half.crossing.index] if half.crossing.index < len(whole) else None
                if isinstance(tensor, torch.Tensor) and tensor_storage.has_storage(tensor):
                    storage = tensor_storage.Storage(tensor)
                    size, version = _as_left(tensor)
                    _left[storage.number] = storage, replace(half, size=size, version=version)


def _report(report: Report, pairs: Sequence[tuple[_Half, Crossing]]) -> Report:
    """The report of chains that lie in two graphs; `report` is that of the later graph."""
    return Report(
        graph=report.graph,
        phase=report.phase,
        remarks=tuple(_remark(half, after, report.graph) for half, after in pairs),
        torch_version=report.torch_version,
        config_digest=report.config_digest,
        from_cache=report.from_cache,
    )


def _remark(half: _Half, after: Crossing, graph: str) -> Remark:
    before, reason = half.crossing, MATMUL_IN_ANOTHER_GRAPH
    collective, matmul = (before, after) if before.role == "all_gather" else (after, before)
    own, other = ("gathered", "multiplied") if collective is before else ("multiplied", "reduced")
    ended = f"torch broke the graph at {half.ended}" if half.ended else "the function of the first one returns between"
    facts = f"{before.tensor} is {own} in {half.graph}{_at(before)}, and {other} in {graph}{_at(after)}; {ended}"
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


def _at(crossing: Crossing) -> str:
    return f" at {crossing.source}" if crossing.source else ""
