"""The picture of the process: all graphs that were compiled, their chains by module, and why there may be none."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from dataclasses import dataclass, field

from asynctp_passes.config import Config
from asynctp_passes.errors import ExpectError
from asynctp_passes.ops.choice import calls_made
from asynctp_passes.reporting.report import Remark, Report
from asynctp_passes.torch_private import dynamo, process_groups

log = logging.getLogger(__name__)

_GRAPHS_BEFORE_A_WARNING = 3
_SHOWN = 5


@dataclass(frozen=True)
class Summary:
    """All that was compiled in this process with asynctp, in numbers and texts.

    All graphs into which torch cuts one compile of a function count together. A function that was compiled several
    times counts once for its forward and once for its backward: with the compile that has the most missed chains, then
    the fewest fused ones. A method counts so for each module that it was compiled for.

    Attributes:
        fused: Chains that became one op.
        missed: Chains that are in scope and were not fused.
        skipped: Collectives that are out of scope or not worth fusing, and to which nothing is done.
        others: Collectives to which something else is done (OVERLAPPED, ACCELERATED, BUCKETED, ERASED, REMATERIALIZED).
        graphs: Graphs that were compiled, or taken from Inductor's cache, with and without collectives.
        from_cache: Those of them that Inductor took from its cache.
        breaks: Why torch broke graphs, a text for each time, with the place where torch says it.
        uncompiled: Functions with tensors that torch failed to compile, and why. They run as they are written.
        modules: Chains and collectives by path of their module: outcome and number; "" where no module is known.
        misses: The remarks of the missed chains.
        internal_errors: Errors of asynctp itself.
        calls: Calls of the fused ops that the host made, by op, then implementation. Replays of CUDA graphs are not
            counted.
    """

    fused: int = 0
    missed: int = 0
    skipped: int = 0
    others: int = 0
    graphs: int = 0
    from_cache: int = 0
    breaks: tuple[str, ...] = ()
    uncompiled: dict[str, str] = field(default_factory=dict)
    modules: dict[str, dict[str, int]] = field(default_factory=dict)
    misses: tuple[Remark, ...] = ()
    internal_errors: tuple[str, ...] = ()
    calls: dict[str, dict[str, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        """A page for people: totals, a line for each module, what is missed, and where graphs break."""
        cached = f", {self.from_cache} from Inductor's cache" if self.from_cache else ""
        lines = [
            f"asynctp: {self.fused} of {self.fused + self.missed} chains fused, {self.missed} missed, {self.skipped} "
            f"collectives skipped, {self.others} others; {_many(self.graphs, 'graph')}{cached}, "
            f"{_many(len(self.breaks), 'graph break')}"
        ]
        width = max((len(module) for module in self.modules), default=0)
        for module, counts in self.modules.items():
            told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
            lines.append(f"  {module or '(no module)':<{width}}  {told}")
        for op, counts in self.calls.items():
            lines.append(f"called {op}: {', '.join(f'{count} {name}' for name, count in counts.items())}")
        lines += [str(remark) for remark in self.misses]
        lines += [f"! INTERNAL ERROR: {error}" for error in self.internal_errors]
        lines += [f"! NOT COMPILED {name}: {reason}" for name, reason in self.uncompiled.items()]
        lines += [f"graph break: {_first_line(text)}" for text in self.breaks[:_SHOWN]]
        if len(self.breaks) > _SHOWN:
            lines.append(f"graph break: {len(self.breaks) - _SHOWN} more (TORCH_LOGS=graph_breaks)")
        return "\n".join(lines)

    def require(self, fused: int, missed: int) -> None:
        """Raise if fewer chains are fused or more are missed than that; an uncompiled function counts as one missed.

        Raises:
            ExpectError: It is so; the message is the picture.
        """
        if self.fused < fused or self.missed + len(self.uncompiled) > missed or self.internal_errors:
            functions = f", and {_many(len(self.uncompiled), 'function')} not compiled" if self.uncompiled else ""
            raise ExpectError(
                f"asynctp: {self.fused} chains are fused and {self.missed} missed in this process{functions}; at least "
                f"{fused} must be fused, and at most {missed} missed.\n{self}"
            )


@dataclass
class _Compile:
    """The reports of one compile of a function, of one phase: one for each graph into which torch cut it.

    Attributes:
        attempt: Dynamo's number of the attempt; the next one compiles all graphs again.
        ended: An error of asynctp's ended it; where torch tries again, it compiles all graphs again.
    """

    attempt: int = 0
    ended: bool = False
    reports: list[Report] = field(default_factory=list)

    def badness(self) -> tuple[int, int]:
        """A measure by which the worst compile of a function is told."""
        failed = sum(len(report.missed) + len(report.internal_errors) for report in self.reports)
        return failed, -sum(len(report.fused) for report in self.reports)


_Key = tuple[str, str, int, str, bool]
"""The function, by Dynamo's name and its own; its module; the phase; and whether chains lie in two graphs."""


class Picture:
    """Collects the reports of this process. A warning, once, says that there is nothing to fuse in its graphs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        with self._lock:
            self._compiles: dict[_Key, dict[int, _Compile]] = {}
            self._apart = itertools.count(-1, -1)
            self._names: dict[str, str] = {}
            self._uncompiled: dict[str, str] = {}
            self._graphs = self._from_cache = self._multiplying = 0
            self._warned = False

    def begin_in_child(self) -> None:
        """Begin anew in a process that was forked, perhaps while another thread held the lock."""
        self._lock = threading.Lock()
        self.forget()

    def note(self, report: Report, across: bool = False, *, raised: bool = False, strayed: bool = False) -> None:
        """A graph was compiled, or came from Inductor's cache.

        Args:
            across: It is of chains that lie in two graphs.
            raised: An error of asynctp's ends the compile.
            strayed: It came from the cache, and the compile under way may be another one.
        """
        with self._lock:
            if not across:
                self._graphs += 1
                self._from_cache += report.from_cache
                self._multiplying += report.matmuls > 0
            function = report.graph.partition("/")[0] if "/" in report.graph else f"graph {len(self._compiles)}"
            if (known := dynamo.compiled_function()) is not None:
                self._names[function] = known.name  # numbers begin anew after torch._dynamo.reset()
            number, attempt = (None if strayed else dynamo.compile_under_way()) or (next(self._apart), 0)
            module = 0 if strayed else dynamo.compiled_module()
            key = function, self._names.get(function, ""), module, report.phase, across
            compiles = self._compiles.setdefault(key, {})
            one = compiles.get(number)
            if one is None or one.ended or one.attempt != attempt:
                one = compiles[number] = _Compile(attempt)
            one.reports.append(report)
            one.ended = raised

    def note_uncompiled(self, function: str, reason: str) -> bool:
        """Torch failed to compile a function. Returns whether that is new."""
        with self._lock:
            is_new = function not in self._uncompiled
            self._uncompiled.setdefault(function, reason)
        return is_new

    def earlier(self, phase: str) -> list[Report]:
        """The reports that the compile under way has so far, of graphs of one phase."""
        under_way = dynamo.compile_under_way()
        if under_way is None:
            return []
        number, attempt = under_way
        with self._lock:
            alike = [compiles for key, compiles in self._compiles.items() if key[-2:] == (phase, False)]
            found = [compiles[number] for compiles in alike if number in compiles]
        return [report for one in found if one.attempt == attempt and not one.ended for report in one.reports]

    def _worst(self) -> list[Report]:
        """The reports of the worst compile of each function, the latest of several."""
        worst = [max(reversed(compiles.values()), key=_Compile.badness) for compiles in self._compiles.values()]
        return [report for one in worst for report in one.reports]

    def summary(self) -> Summary:
        """The picture as it is now."""
        with self._lock:
            reports, graphs, cached = self._worst(), self._graphs, self._from_cache
            uncompiled = dict(self._uncompiled)
        remarks = [remark for report in reports for remark in report.remarks]
        counts = Counter(remark.outcome for remark in remarks)
        modules: dict[str, Counter[str]] = {}
        for remark in remarks:
            modules.setdefault(remark.module or "", Counter())[remark.outcome] += 1
        calls: dict[str, dict[str, int]] = {}
        for (op, implementation), count in calls_made().items():
            calls.setdefault(op, {})[implementation] = count
        return Summary(
            fused=counts["FUSED"],
            missed=counts["MISSED"],
            skipped=counts["SKIPPED"],
            others=len(remarks) - counts["FUSED"] - counts["MISSED"] - counts["SKIPPED"],
            graphs=graphs,
            from_cache=cached,
            breaks=tuple(dynamo.graph_breaks()),
            uncompiled=uncompiled,
            modules={module: dict(found) for module, found in sorted(modules.items())},
            misses=tuple(remark for remark in remarks if remark.outcome == "MISSED"),
            internal_errors=tuple(error for report in reports for error in report.internal_errors),
            calls=calls,
        )

    def warn_of_nothing(self, config: Config) -> None:
        """Warn, once, that graphs multiply and none has a collective next to a matmul, in a group of ranks."""
        with self._lock:
            if self._warned or not self._multiplying:
                return
            reports = self._worst()
            at_once = config.expect or (config.strict == "all" and _opaque_notes(reports))
            if self._multiplying < _GRAPHS_BEFORE_A_WARNING and not at_once:
                return
            if any(report.fused or report.missed for report in reports) or not process_groups.has_peers():
                return
            self._warned = True
            count, causes = self._multiplying, _causes(reports)
        log.warning(
            "asynctp: nothing to fuse: %s multiply, and none has a collective next to a matmul so far%s. %s "
            "asynctp_passes.summary() has the whole picture",
            *(_many(count, "graph"), f" (expect={config.expect})" if config.expect else ""),
            " ".join(f"({number}) {cause}." for number, cause in enumerate(causes, 1)),
        )


def _opaque_notes(reports: list[Report]) -> list[str]:
    """The notes of ops that may communicate, each once."""
    return list(dict.fromkeys(str(note) for report in reports for note in report.notes if note.kind == "opaque"))


def _causes(reports: list[Report]) -> list[str]:
    """Why no collective is next to a matmul, as far as it can be seen here; at least one cause."""
    remarks = [remark for report in reports for remark in report.remarks]
    opaque = _opaque_notes(reports)
    causes = [text[0].upper() + text[1:] for text in opaque][:_SHOWN]
    if breaks := dynamo.graph_breaks():
        first = _first_line(breaks[0])
        causes.append(f"Torch broke graphs {len(breaks)} times, first since: {first}; TORCH_LOGS=graph_breaks has all")
    if skipped := Counter(f"{remark.code} {remark.name}" for remark in remarks):
        told = ", ".join(f"{count} x {name}" for name, count in skipped.items())
        causes.append(f"Collectives are in the graphs, and skipped: {told}; asynctp_passes.reports() says why")
    elif not opaque:
        causes.append(
            "No graph communicates: the hooks of parallelize_module do, outside of what is compiled; compile the model "
            "or a module around the one with the hooks. Or the model was not parallelized; torch warns where no key of "
            "the plan matched a module. Or another backend of torch.compile has the graphs that communicate"
        )
    return causes


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


picture = Picture()
"""The picture of all that was compiled in this process."""
