"""Reports: what was fused, what was not, and why. Plain strings and numbers that outlive the graph."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from asynctp_passes.ir.crossings import Crossing
from asynctp_passes.planning.deviations import Ballot
from asynctp_passes.reasons import Outcome

__all__ = ["SCHEMA", "Bucketed", "Outcome", "Remark", "Report"]

SCHEMA = 2
"""Version of the JSON that `Report.to_json` writes, its field `schema`; reports without it are of version 1."""

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


@dataclass(frozen=True)
class Remark:
    """The outcome of one collective, with its facts.

    Attributes:
        outcome: What happens to it (`reasons.Outcome`): FUSED; OVERLAPPED, ACCELERATED, BUCKETED, ERASED or
            REMATERIALIZED instead; SKIPPED (nothing is done); or MISSED (in scope, and not fused, whatever is done).
        kind: `"all_gather_matmul"`, `"matmul_reduce_scatter"`, `"matmul_all_reduce"`, the same with `scaled_`, or the
            collective's own name when no chain was found.
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
            as `"fused (cost model)"`, or `"fused, then all-gather (cost model)"` of an all-reduce.
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

    def __str__(self) -> str:
        """A few lines: outcome, chain, and the facts or the reason with its remedy."""
        places = [self.source, f"in {self.module}" if self.module else None]
        where = f"  ({', '.join(filter(None, places))})" if any(places) else ""
        head = f"{_MARKS[self.outcome]} {self.outcome:<7} {self.kind}: {' -> '.join(self.nodes)}{where}"
        facts = "  ".join(f"{role} {shape}" for role, shape in self.shapes.items())
        lines = [head]
        if self.outcome == "FUSED":
            ranks = f" of {self.group_size}" if self.group_size else ""
            lines.append(f"    {self.op} over group {self.group!r}{ranks}; {facts}")
            lines.append(f"    implementation: {self.implementation}{self._cost()}")
            lines += [f"    note: {self.message}"] if self.message else []
        else:
            lines.append(f"    {self.code} {self.name}: {self.message}")
            lines += [f"    runs as {self.op}, by the means of the group's fused ops"] if self.op else []
            lines.append(f"    remedy: {self.hint}")
        if self.rematerialized_bytes:
            lines.append(f"    {_rematerialized(1, self.rematerialized_bytes)}")
        return "\n".join(lines)

    def _cost(self) -> str:
        parts = []
        if self.comm_bytes is not None:
            parts.append(_quantity(self.comm_bytes, 1024, ("B", "KiB", "MiB", "GiB")))
        if self.flops is not None:
            parts.append(_quantity(self.flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP")))
        if self.estimate_us:
            serial, overlapped = self.estimate_us["serial"], self.estimate_us["overlapped"]
            parts.append(f"model: {serial:.0f} us one after the other, at best {overlapped:.0f} us overlapped")
        return f"; {', '.join(parts)}" if parts else ""


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
        """One line."""
        size = _quantity(self.bytes, 1024, ("B", "KiB", "MiB"))
        return (
            f"= BUCKETED {len(self.collectives)} all_reduce({self.reduce_op}) over group {self.group!r} into one of "
            f"{size}: {', '.join(self.collectives)}"
        )


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
        ballots: What all ranks of a group do alike, for each group that communicates in the graph.
        notes: What else should be known: bugs of this torch that the graph meets, and what is left out since a rank
            does not do it.
        internal_errors: Errors of asynctp itself (`ATP901`), because of which the graph stayed as it was.
        matmuls: How many matmuls the graph has, whether a collective is next to them or not.
        crossings: Its results and inputs that may be halves of chains which lie in two graphs.
    """

    graph: str
    phase: str
    remarks: tuple[Remark, ...]
    torch_version: str = ""
    config_digest: str = ""
    plan_digest: str = ""
    from_cache: bool = False
    buckets: tuple[Bucketed, ...] = ()
    ballots: tuple[Ballot, ...] = ()
    notes: tuple[str, ...] = ()
    internal_errors: tuple[str, ...] = ()
    matmuls: int = 0
    crossings: tuple[Crossing, ...] = ()

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
        head = f"asynctp: {self.graph} ({self.phase}{cached}): {self.totals}"
        lines = [head, *(str(remark) for remark in self.with_outcome("FUSED", "MISSED"))]
        lines += [str(buckets) for buckets in self.buckets]
        if made_again := [remark.rematerialized_bytes for remark in self.remarks if remark.rematerialized_bytes]:
            lines.append(f"~ {_rematerialized(len(made_again), sum(made_again))}")
        by_reason = Counter((one.code, one.name, one.outcome, _reason_text(one)) for one in self.others)
        for (code, name, outcome, text), count in sorted(by_reason.items()):
            lines.append(f"{_MARKS[outcome]} {outcome} {count} x {code} {name}: {text}")
        lines += [f"{_MARKS['MISSED']} INTERNAL ERROR: {error}" for error in self.internal_errors]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON, its `schema` first; `Report.from_json` reads it back."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what `to_json` wrote, of this version of asynctp or an earlier one.

        Raises:
            ValueError: It is something else, or was written by a later version.
        """
        values = json.loads(text)
        if not (isinstance(values, dict) and isinstance(values.get("remarks"), list)):
            raise ValueError('no JSON object with a list of "remarks"')
        schema = _read(int, values.pop("schema", 1), "the report's schema")
        if schema > SCHEMA:
            raise ValueError(
                f"the report has schema {schema}, and this asynctp reads schemas up to {SCHEMA}: "
                "read it with the version of asynctp that wrote it, or a later one"
            )
        report: Report = _read(cls, values if schema > 1 else _with_names_of_now(values), "the report")
        return report


# --- reading --------------------------------------------------------------------------------------------------
_EARLIER = {"moved", "program_digest", "collectives_digest"}
"""Fields that reports of earlier versions have, which are left out."""

_RENAMED = {"coalesced": "buckets", "regathered_bytes": "rematerialized_bytes"}
"""Fields of reports and of remarks as schema 1 named them, with their names of now."""


def _with_names_of_now(values: dict[str, Any]) -> dict[str, Any]:
    """A report of schema 1 with the field names of now, its remarks too."""
    remarks = [_renamed(remark) if isinstance(remark, dict) else remark for remark in values["remarks"]]
    return _renamed({**values, "remarks": remarks})


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(name, name): value for name, value in values.items()}


_MOST_NESTED = 6
_LARGEST = 2**63


def _read(hint: Any, value: Any, place: str) -> Any:
    """A value of a type that the fields above have, from plain JSON.

    Raises:
        ValueError: It is of another one; the message names the place.
    """
    if dataclasses.is_dataclass(hint):
        return _read_fields(hint, value, place)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(inner[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _read(inner[1], item, f"{place}[{key!r}]") for key, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _read(next(each for each in inner if each is not type(None)), value, place)
    if _fits(hint, value):
        return value
    wanted = f"one of {', '.join(map(repr, inner))}" if origin is Literal else _WANTED.get(origin or hint, "an object")
    raise ValueError(f"{place} is {_shown(value)}; it must be {wanted}")


_WANTED = {
    str: "a text",
    bool: "true or false",
    int: "an integer below 2**63",
    float: "a number",
    tuple: "a list",
    Any: "values that are nested a few times only",
}


def _read_fields(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {_shown(value)}; it must be an object")
    hints, fields = _hints(kind), {one.name: one for one in dataclasses.fields(kind)}
    needed = {name for name, one in fields.items() if one.default is one.default_factory is dataclasses.MISSING}
    if unknown := sorted(set(value) - set(fields) - _EARLIER):
        raise ValueError(f"{place} has {unknown[0]!r}, which is none of {', '.join(fields)}")
    if missing := sorted(needed - set(value)):
        raise ValueError(f"{place} has no {missing[0]!r}")
    own = {name: item for name, item in value.items() if name in fields}
    found = kind(**{name: _read(hints[name], item, f"{place}'s {name}") for name, item in own.items()})
    if kind is Remark and found.estimate_us and not {"serial", "overlapped"} <= set(found.estimate_us):
        raise ValueError(f"{place}'s estimate_us has {sorted(found.estimate_us)}; it must have serial and overlapped")
    return found


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fits(hint: Any, value: Any) -> bool:
    if hint is Any:
        return _is_plain(value, _MOST_NESTED)
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if hint in (int, float):
        number = isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
        return number and abs(value) < _LARGEST
    return typing.get_origin(hint) is None and isinstance(value, hint)


def _is_plain(value: Any, depth: int) -> bool:
    """True for values that are nested a few times only: what walks through others would end in a RecursionError."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_plain(item, depth - 1) for item in items)


def _shown(value: Any) -> str:
    """A value in short, whatever it is."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value)[:80] if not isinstance(value, int) or abs(value) < _LARGEST else "too large a number"


# --- words ----------------------------------------------------------------------------------------------------
def _rematerialized(count: int, size: int) -> str:
    gathers = "1 gather of the forward is" if count == 1 else f"{count} gathers of the forward are"
    whole = _quantity(size, 1024, ("B", "KiB", "MiB", "GiB"))
    return f"{gathers} made again, so that nothing of what was gathered ({whole}) is kept for the backward"


def _reason_text(remark: Remark) -> str:
    return remark.message.split(" [", 1)[0]


def _quantity(count: float, step: int, units: tuple[str, ...]) -> str:
    """A number with three digits in the largest unit that it fills: `24 MiB`."""
    size = 0
    while count >= step and size < len(units) - 1:
        count, size = count / step, size + 1
    return f"{count:.3g} {units[size]}" if count < 1000 else f"{count:.0f} {units[size]}"
