"""Reports: the outcome of each collective of a graph, and why. Plain strings and numbers that outlive the graph."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from asynctp_passes.ir.records import Crossing, Question
from asynctp_passes.reasons import Outcome
from asynctp_passes.reporting.typed_json import read

SCHEMA = 3
"""Version of the JSON that `Report.to_json` writes, its field `schema`; no other one is read."""


_COLUMNS = 100
"""No line is longer, but for a word that is."""

_MARKS: dict[Outcome, str] = {
    "FUSED": "+",
    "OVERLAPPED": "|",
    "ACCELERATED": ">",
    "BUCKETED": "=",
    "ERASED": "-",
    "REMATERIALIZED": "~",
    "SKIPPED": ".",
    "MISSED": "!",
}
_SEQUENTIAL = "sequential"
_NOTHING_OVERLAPS = "note: sequential: the collective, then the matmul; nothing overlaps on a CPU, or without triton"


@dataclass(frozen=True)
class Remark:
    """The outcome of one collective, with its facts.

    Attributes:
        outcome: What happens to it (`reasons.Outcome`): FUSED; OVERLAPPED, ACCELERATED, BUCKETED, ERASED or
            REMATERIALIZED instead; SKIPPED (nothing is done); or MISSED (in scope, and not fused, whatever is done).
        kind: `"all_gather_matmul"`, `"matmul_reduce_scatter"`, `"matmul_all_reduce"`, or the collective's own name
            when no chain was found.
        collective: Name of the collective's node in the original graph.
        code: Reason code (`"ATP101"`); empty when FUSED.
        name: Reason name (`"PIECES_REORDERED"`); empty when FUSED.
        message: What is the case, with the facts of this chain; when FUSED, what else should be known of it.
        hint: What to do about it; empty when FUSED.
        nodes: Names of the chain's nodes in graph order, collective and matmuls included.
        source: `file:line` in the user's program, when the graph knows it.
        group: Name of the process group.
        group_size: Number of ranks in it; 0 where the graph does not say it and the group does not exist.
        shapes: Shapes by role (`"shard"`, `"operand"`, `"out"`), as text: `"bf16[2, 4*s0, 64]"`.
        op: The fused op that replaced the chain; of what is not fused, the op without a matmul that stands for the
            collective, where its group has such (`"asynctp::all_gather"`), else empty.
        implementation: What the op runs: `"sequential"` (plain collective and matmul: no overlap), or the kernel's
            name; on CUDA, where the op chooses per call, what it will choose for `call` on this machine, and by what,
            as `"fused (cost model)"`.
        call: What the op is called with, by argument name and without the group: tensors as
            `{"dtype": "bfloat16", "shape": [4, 8], "stride": [8, 1]}`. Empty unless FUSED, with symbolic sizes, and
            under an error, where nothing is rewritten. `asynctp bench --report` measures these calls.
        comm_bytes: Bytes this rank receives (gather), sends (scatter) or both (all-reduce) in the fused op; None if
            unknown.
        keeps_gather: True when the program's own gather stays beside the fused op, for other users; `message` has both
            sizes.
        rematerialized_bytes: Bytes of the gathered tensor, where the backward makes a gather of the forward again, so
            that nothing of it is kept (`Config.rematerialize`); 0 where it does not, or where sizes are symbolic.
        flops: Floating-point operations of the chain's matmuls on this rank; None if unknown.
        estimate_us: Modelled times in microseconds (`"comm"`, `"matmul"`, `"serial"`, `"overlapped"`); empty when the
            device has no model.
        invariant: `"batch"` where a row of the fused chain has the same bits however many rows there are
            (`Config.invariant`); else empty.
        module: Path in what was compiled of the module of the chain's first matmul, or of the collective, as
            `"attention.wo"`; in a backward graph, of the forward's. None where the graph does not know it.
    """

    outcome: Outcome
    kind: str
    collective: str
    code: str = ""
    name: str = ""
    message: str = ""
    hint: str = ""
    nodes: tuple[str, ...] = ()
    source: str | None = None
    group: str = ""
    group_size: int = 0
    shapes: dict[str, str] = field(default_factory=dict)
    op: str = ""
    implementation: str = ""
    call: dict[str, Any] = field(default_factory=dict)
    comm_bytes: int | None = None
    keeps_gather: bool = False
    rematerialized_bytes: int = 0
    flops: int | None = None
    estimate_us: dict[str, float] = field(default_factory=dict)
    module: str | None = None
    invariant: str = ""

    def __str__(self) -> str:
        """A few lines: the place, the outcome, the nodes, and the facts or the reason with its remedy."""
        ranks = f", {self.group_size} ranks" if self.group_size else ""
        group = f" over {self.group!r}{ranks}" if self.group else ""
        lines = [
            *_wrapped(f"{_MARKS[self.outcome]} {self.outcome:<7} ", f"{_place(self)}{self.kind}{group}"),
            *_wrapped("    ", _chain(self.nodes)),
        ]
        if self.outcome == "FUSED":
            lines += _wrapped("    ", ", ".join(f"{role} {shape}" for role, shape in self.shapes.items()))
            bits = f", {self.invariant}-invariant" if self.invariant else ""
            lines += _wrapped("    ", f"runs {self.implementation}{bits}{_cost(self)}")
            lines += _wrapped("    note: ", self.message) if self.message else []
        else:
            lines += _wrapped("    ", f"{self.code} {self.name}: {self.message}")
            lines += _wrapped("    ", f"runs as {self.op}, by the means of the group's fused ops") if self.op else []
            lines += _wrapped("    remedy: ", self.hint)
        if self.rematerialized_bytes:
            lines += _wrapped("    ", _rematerialized(1, self.rematerialized_bytes))
        return "\n".join(lines)


@dataclass(frozen=True)
class Bucketed:
    """Small all-reduces that became one; each also has its remark, as BUCKETED.

    Attributes:
        collectives: Names of their nodes in the original graph, in graph order.
        group: Name of the process group.
        reduce_op: `"max"` or `"min"`.
        dtype: Of the elements, as `"float64"`.
        bytes: Size of the one that they became.
    """

    collectives: tuple[str, ...]
    group: str
    reduce_op: str
    dtype: str
    bytes: int

    def __str__(self) -> str:
        """A line or two."""
        size = _quantity(self.bytes, 1024, ("B", "KiB", "MiB"))
        text = (
            f"{len(self.collectives)} all_reduce({self.reduce_op}) over group {self.group!r} into one of {size}: "
            f"{', '.join(self.collectives)}"
        )
        return "\n".join(_wrapped("= BUCKETED ", text))


NoteKind = Literal["breaks", "opaque", "bits", "torch", "ranks", "own", "calls"]


@dataclass(frozen=True)
class Note:
    """A sentence on a graph that its remarks do not say.

    Attributes:
        kind: `"breaks"`: torch broke graphs of this process. `"opaque"`: ops that may communicate. `"bits"`: what they
            may depend on. `"torch"`: a bug of this torch. `"ranks"`: what is left out since a rank does not do it.
            `"own"`: the all-reduces without a matmul that are reduce-scatters. `"calls"`: why the generated code does
            not call the fused ops directly.
        text: The note.
    """

    kind: NoteKind
    text: str

    @property
    def informs(self) -> bool:
        """Whether it is for information, and no warning."""
        return self.kind in ("opaque", "bits", "own", "calls")

    def __str__(self) -> str:
        """The text."""
        return self.text

    def __contains__(self, words: str) -> bool:
        """Whether the text has these words, as of a `str`."""
        return words in self.text


@dataclass(frozen=True)
class Report:
    """A report of one graph: the outcome of each of its collectives.

    Attributes:
        graph: Name of the graph, as far as the compiler knows it.
        phase: `"forward"`, `"backward"` or `"inference"`.
        remarks: One per collective, in graph order.
        torch_version: Version of torch that compiled the graph.
        config_digest: Digest of the configuration, see `Config.digest`.
        plan_digest: Hash of the fused chains, equal on all ranks that decided alike.
        from_cache: True when the compiled graph came from Inductor's cache; the remarks are those of the
            compile that filled the cache.
        buckets: Sets of small all-reduces that became one each.
        questions: What the ranks of each group that communicates in the graph were asked, and what they do.
        notes: What else should be known.
        internal_errors: Errors of asynctp itself (`ATP901`), because of which the graph stayed as it was.
        matmuls: How many matmuls the graph has, whether a collective is next to them or not.
        crossings: Its results and inputs that may be halves of chains which lie in two graphs.
        seconds: How long the pass took, with what it waited for other ranks; of no account when reports are compared.
    """

    graph: str
    phase: str
    remarks: tuple[Remark, ...]
    torch_version: str = ""
    config_digest: str = ""
    plan_digest: str = ""
    from_cache: bool = False
    buckets: tuple[Bucketed, ...] = ()
    questions: tuple[Question, ...] = ()
    notes: tuple[Note, ...] = ()
    internal_errors: tuple[str, ...] = ()
    matmuls: int = 0
    crossings: tuple[Crossing, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def fused(self) -> tuple[Remark, ...]:
        """The remarks of fused chains."""
        return self.with_outcome("FUSED")

    @property
    def missed(self) -> tuple[Remark, ...]:
        """The remarks of chains that are in scope and were not fused."""
        return self.with_outcome("MISSED")

    @property
    def skipped(self) -> tuple[Remark, ...]:
        """The remarks of collectives that are out of scope or not worth fusing, and to which nothing else is done."""
        return self.with_outcome("SKIPPED")

    @property
    def others(self) -> tuple[Remark, ...]:
        """The remarks of collectives that are neither FUSED nor MISSED, whatever else is done to them."""
        return tuple(remark for remark in self.remarks if remark.outcome not in ("FUSED", "MISSED"))

    def with_outcome(self, *outcomes: Outcome) -> tuple[Remark, ...]:
        """The remarks of collectives with one of these outcomes, in graph order."""
        return tuple(remark for remark in self.remarks if remark.outcome in outcomes)

    @property
    def totals(self) -> str:
        """How many remarks there are of each outcome, in words."""
        chains, counts = len(self.fused) + len(self.missed), Counter(remark.outcome for remark in self.others)
        others = f"{len(self.others)} other collectives"
        if counts.keys() <= {"SKIPPED"}:
            others += " skipped"
        else:
            others += f": {', '.join(f'{counts[one]} {one.lower()}' for one in _MARKS if counts[one])}"
        return f"{len(self.fused)} of {chains} chains fused, {len(self.missed)} missed, {others}"

    def __str__(self) -> str:
        """A page for people: the totals, every fused and missed chain, and the others by reason."""
        cached = ", from Inductor's cache" if self.from_cache else ""
        lines = [*_wrapped("", f"asynctp: {self.graph} ({self.phase}{cached}): {self.totals}")]
        lines += map(str, (*self.with_outcome("FUSED", "MISSED"), *self.buckets))
        if made_again := [remark.rematerialized_bytes for remark in self.remarks if remark.rematerialized_bytes]:
            lines += _wrapped("~ ", _rematerialized(len(made_again), sum(made_again)))
        reasons = ((one.code, one.name, one.outcome, one.message.split(" [", 1)[0]) for one in self.others)
        for (code, name, outcome, text), count in sorted(Counter(reasons).items()):
            lines += _wrapped(f"{_MARKS[outcome]} {outcome} ", f"{count} x {code} {name}: {text}")
        for error in self.internal_errors:
            lines += _wrapped(f"{_MARKS['MISSED']} INTERNAL ERROR: ", error)
        for note in self.notes:
            lines += _wrapped("note: ", note.text)
        if any(remark.implementation == _SEQUENTIAL for remark in self.fused):
            lines += _wrapped("", _NOTHING_OVERLAPS)
        return "\n".join(lines)

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON, its `schema` first; `Report.from_json` reads it back."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what `to_json` wrote; fields that are missing have their defaults.

        Raises:
            ValueError: It is something else, or has another schema.
        """
        values = json.loads(text)
        if not (isinstance(values, dict) and isinstance(values.get("remarks"), list)):
            raise ValueError('no JSON object with a list of "remarks"')
        schema = read(int, values.pop("schema", None), "the report's schema")
        if schema != SCHEMA:
            raise ValueError(
                f"the report has schema {schema}, and this asynctp reads schema {SCHEMA}: "
                "read it with the version of asynctp that wrote it"
            )
        return cast("Report", read(cls, values, "the report"))


# --- one collective -------------------------------------------------------------------------------------------
def _place(remark: Remark) -> str:
    """The module and the line, from the current folder on, as far as they are known, with a colon after them."""
    source = remark.source and remark.source.removeprefix(os.path.join(os.getcwd(), ""))
    if remark.module and source:
        return f"{remark.module} ({source}): "
    place = remark.module or source
    return f"{place}: " if place else ""


def _chain(nodes: Sequence[str]) -> str:
    """Names of nodes with arrows; several of one op, one after the other, by the op's name and their number."""
    parts = []
    for op, same in itertools.groupby(nodes, lambda name: re.sub(r"_\d+$", "", name)):
        names = list(same)
        parts.append(names[0] if len(names) == 1 else f"{op} x {len(names)}")
    return " -> ".join(parts)


def _cost(remark: Remark) -> str:
    parts = []
    if remark.comm_bytes is not None:
        parts.append(_quantity(remark.comm_bytes, 1024, ("B", "KiB", "MiB", "GiB")))
    if remark.flops is not None:
        parts.append(_quantity(remark.flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP")))
    if {"serial", "overlapped"} <= remark.estimate_us.keys():
        serial, overlapped = remark.estimate_us["serial"], remark.estimate_us["overlapped"]
        parts.append(f"model: {serial:.0f} us one after the other, at best {overlapped:.0f} us overlapped")
    return f"; {', '.join(parts)}" if parts else ""


# --- parts ----------------------------------------------------------------------------------------------------
def _rematerialized(count: int, size: int) -> str:
    gathers = "1 gather of the forward is" if count == 1 else f"{count} gathers of the forward are"
    whole = _quantity(size, 1024, ("B", "KiB", "MiB", "GiB"))
    return f"{gathers} made again, so that nothing of what was gathered ({whole}) is kept for the backward"


def _quantity(count: float, step: int, units: tuple[str, ...]) -> str:
    """A number with three digits in the largest unit that it fills: `24 MiB`."""
    size = 0
    while count >= step and size < len(units) - 1:
        count, size = count / step, size + 1
    return f"{count:.3g} {units[size]}" if count < 1000 else f"{count:.0f} {units[size]}"


def _wrapped(first: str, text: str) -> list[str]:
    """Lines of `_COLUMNS` columns; those after the first are indented."""
    indent = " " * (6 if first.startswith("    ") else 4)
    return textwrap.wrap(
        first + text, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
