"""Read a profiler trace: how much communication was exposed, and a picture of what ran beside what.

A trace is what `torch.profiler` exports (`export_chrome_trace`, `tensorboard_trace_handler`), from any backend. Of each
device, with the union of intervals over all its streams:

    exposed communication = communication, less the time in which something computes too
    span = compute + exposed communication + idle

What counts as communication is `RULES`, one table. A GEMM that waits for its peers' rows inside the kernel, as the
fused one of asynctp can, counts as compute: compare spans as well, since the profiler does not see that wait.
"""

from __future__ import annotations

import gzip
import json
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

KINDS = ("communication", "compute", "other")
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_ANNOTATION = "gpu_user_annotation"

Interval = tuple[float, float]


class TraceError(ValueError):
    """The file is no trace that can be read, or a name is not in it; the message says what to do."""


@dataclass(frozen=True)
class Rule:
    """Events whose name `pattern` finds are of this kind.

    Attributes:
        kind: One of `KINDS`. `other` neither communicates nor hides communication.
        pattern: A regular expression, searched in the event's name.
        what: What such events are, for people.
    """

    kind: str
    pattern: str
    what: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TraceError(f"rule kind {self.kind!r} is not valid; it must be one of {', '.join(KINDS)}")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise TraceError(f"rule pattern {self.pattern!r} is not valid: {error}") from error


RULES = (
    Rule("communication", r"^nccl", "NCCL kernels"),
    Rule("communication", r"^Memcpy PtoP", "copies between GPUs"),
    Rule("communication", r"^(stage|await|keep|push_\w+|reduce)_kernel$", "asynctp's collective kernels"),
    Rule(
        "communication",
        r"(one_shot|two_shot|multimem)_(all_|reduce_)|\b(barrier|put_signal|wait_signal)_kernel\b",
        "PyTorch's symmetric-memory kernels",
    ),
    Rule("other", r"^Memcpy (HtoD|DtoH)", "copies from and to the host"),
    Rule("compute", r"^(Memcpy|Memset)", "copies within a GPU"),
    Rule("compute", r"^gemm_kernel$", "asynctp's GEMM"),
    Rule("compute", r"", "other kernels"),
)
"""What an event on a GPU is: the first rule that finds its name. The last one finds every name."""


@dataclass(frozen=True)
class Event:
    """One kernel, copy or memset on a GPU. Times in microseconds."""

    name: str
    device: int
    stream: int
    start: float
    end: float
    rule: Rule


@dataclass(frozen=True)
class Trace:
    """The events of a file's GPUs, in order of time.

    Attributes:
        name: The file.
        events: What ran on the GPUs.
        annotations: `record_function` ranges as they show on the GPUs: (name, device, interval).
        steps: Steps that a profiler schedule recorded; 1 when there was no schedule.
        machine: The GPUs, as `"4 × NVIDIA H200"`; empty where the file does not say it.
        date: The day in UTC, as `"2026-11-22"`; empty where the file does not say it.
    """

    name: str
    events: tuple[Event, ...]
    annotations: tuple[tuple[str, int, Interval], ...] = ()
    steps: int = 1
    machine: str = ""
    date: str = ""

    @property
    def devices(self) -> tuple[int, ...]:
        """The GPUs that something ran on."""
        return tuple(sorted({event.device for event in self.events}))


@dataclass(frozen=True)
class Summary:
    """A summary of one device, in microseconds per step: the module says which numbers add up.

    Attributes:
        trace: The file.
        device: The GPU's index.
        steps: Steps that the times were divided by.
        span: From the first event's start to the last one's end.
        compute: Something computes.
        communication: Something communicates.
        exposed: Something communicates, nothing computes.
        idle: Neither.
        parts: By what the rules call it: kind, number of events per step, sum of their lengths.
    """

    trace: str
    device: int
    steps: int
    span: float
    compute: float
    communication: float
    exposed: float
    idle: float
    parts: Mapping[str, tuple[str, float, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


# --- intervals ---------------------------------------------------------------------------------------------------
def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """How long disjoint intervals are together."""
    return sum(end - start for start, end in intervals)


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """How long two unions run at the same time."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


# --- reading -----------------------------------------------------------------------------------------------------
def read(path: str | Path, rules: Sequence[Rule] = ()) -> Trace:
    """Read a trace, `.json` or `.json.gz`.

    Args:
        path: The file.
        rules: Tried before `RULES`.

    Raises:
        TraceError: It cannot be read, is no trace, or holds nothing that ran on a GPU.
    """
    return _trace(path, _load(Path(path)), rules)


def _trace(path: str | Path, whole: Mapping[str, Any], rules: Sequence[Rule] = ()) -> Trace:
    """The trace of the file at `path`, from which `whole` has been loaded."""
    known = (*rules, *RULES)
    rule_of: dict[str, Rule] = {}
    events, annotations, steps = [], [], set()
    for item in whole["traceEvents"]:
        if not isinstance(item, dict) or item.get("ph") != "X":
            continue
        name, category = str(item.get("name", "")), str(item.get("cat", ""))
        if name.startswith("ProfilerStep#"):
            steps.add(name)
        elif category in _GPU_CATEGORIES:
            rule = rule_of.setdefault(name, _classify(name, known))
            device, stream, (start, end) = _place(item, path)
            events.append(Event(name, device, stream, start, end, rule))
        elif category == _ANNOTATION:
            device, _, interval = _place(item, path)
            annotations.append((name, device, interval))
    if not events:
        raise TraceError(
            f"{path}: the trace holds nothing that ran on a GPU; profile with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] on a machine with GPUs"
        )
    events.sort(key=lambda event: (event.start, event.stream))
    by_time = tuple(sorted(annotations, key=lambda each: each[2]))
    about = _machine(whole), _date(whole, events[0].start)
    return Trace(str(path), tuple(events), by_time, max(1, len(steps)), *about)


def _machine(whole: Mapping[str, Any]) -> str:
    devices, ranks = whole.get("deviceProperties"), whole.get("distributedInfo")
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    count = ranks.get("world_size") if isinstance(ranks, dict) else None
    return "" if not isinstance(name, str) else f"{count} × {name}" if type(count) is int else name


def _date(whole: Mapping[str, Any], start: float) -> str:
    """The day of an event, whose time counts from the file's base; empty where there is none."""
    base = whole.get("baseTimeNanoseconds")
    if type(base) is not int:
        return ""
    seconds = base / 1e9 + start / 1e6
    return time.strftime("%Y-%m-%d", time.gmtime(seconds)) if 0 < seconds < _LATEST else ""


_LATEST = 2.0**33  # seconds since 1970: in the year 2242


def _load(path: Path) -> dict[str, Any]:
    """The whole file, with its list of events in `traceEvents`."""
    try:
        data = path.read_bytes()
        parsed = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise TraceError(f"cannot read {path}: {error}; it must be a trace that torch.profiler exported") from error
    whole = parsed if isinstance(parsed, dict) else {"traceEvents": parsed}
    if not isinstance(whole.get("traceEvents"), list):
        raise TraceError(f"{path}: there is no list of traceEvents; it must be a trace that torch.profiler exported")
    return whole


def _place(item: Mapping[str, Any], path: str | Path) -> tuple[int, int, Interval]:
    """Device, stream and interval of an event."""
    arguments = item.get("args") if isinstance(item.get("args"), dict) else {}
    assert isinstance(arguments, dict)
    try:
        device = int(arguments.get("device", item["pid"]))
        stream = int(arguments.get("stream", item["tid"]))
        start, length = float(item["ts"]), float(item["dur"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path}: the event {_name(item)} lacks a time, device or stream ({error!r})") from error
    if not (abs(start) < _LONGEST and 0 <= length < _LONGEST and max(abs(device), abs(stream)) < _LONGEST):
        raise TraceError(
            f"{path}: the event {_name(item)} has ts={start:g} and dur={length:g}; they must be microseconds, and its "
            "device and stream numbers of this machine's"
        )
    return device, stream, (start, start + length)


_LONGEST = 1e18
"""More microseconds than a trace has, and more devices."""


def _name(item: Mapping[str, Any]) -> str:
    return repr(str(item.get("name")))[:200]


def _classify(name: str, rules: Sequence[Rule]) -> Rule:
    return next(rule for rule in rules if re.search(rule.pattern, name))


# --- figures -----------------------------------------------------------------------------------------------------
def summarize(trace: Trace, window: Interval | None = None) -> tuple[Summary, ...]:
    """The figures of each device; of the part within `window` when it is given (then not divided by steps)."""
    steps = trace.steps if window is None else 1
    return tuple(
        _summarize(trace.name, device, cut([event for event in trace.events if event.device == device], window), steps)
        for device in trace.devices
    )


def cut(events: Sequence[Event], window: Interval | None) -> list[Event]:
    """The events, or their parts, that lie in the window."""
    if window is None:
        return list(events)
    low, high = window
    inside = [event for event in events if event.end > low and event.start < high]
    return [replace(each, start=max(low, each.start), end=min(high, each.end)) for each in inside]


def _summarize(trace: str, device: int, events: Sequence[Event], steps: int) -> Summary:
    def of(kind: str) -> list[Interval]:
        return union((event.start, event.end) for event in events if event.rule.kind == kind)

    compute, communication = of("compute"), of("communication")
    span = max((event.end for event in events), default=0.0) - min((event.start for event in events), default=0.0)
    exposed = length(communication) - overlap(compute, communication)
    parts: dict[str, tuple[str, float, float]] = {}
    for event in events:
        _, count, total = parts.get(event.rule.what, ("", 0.0, 0.0))
        parts[event.rule.what] = (event.rule.kind, count + 1 / steps, total + (event.end - event.start) / steps)
    return Summary(
        trace=trace,
        device=device,
        steps=steps,
        span=span / steps,
        compute=length(compute) / steps,
        communication=length(communication) / steps,
        exposed=exposed / steps,
        idle=(span - length(compute) - exposed) / steps,
        parts=parts,
    )


def find_annotation(trace: Trace, name: str, device: int) -> Interval:
    """Where the first `record_function(name)` range lies on a device.

    Raises:
        TraceError: There is none of this name; the message lists those that are there.
    """
    found = union(interval for each, where, interval in trace.annotations if (each, where) == (name, device))
    if not found:
        names = sorted({each for each, where, _ in trace.annotations if where == device})
        raise TraceError(
            f"{trace.name}: no range {name!r} on GPU {device}; there are {', '.join(names[:20]) or 'none'}. "
            f'Name one in the program: with torch.profiler.record_function("{name}"): ...'
        )
    return found[0]


# --- what is printed ---------------------------------------------------------------------------------------------
_ROWS: tuple[tuple[str, Callable[[Summary], float]], ...] = (
    ("span", lambda each: each.span),
    ("compute", lambda each: each.compute),
    ("communication", lambda each: each.communication),
    ("  exposed", lambda each: each.exposed),
    ("idle", lambda each: each.idle),
)


def render(summary: Summary) -> str:
    """A table of one device."""
    steps = "" if summary.steps == 1 else f", per step of {summary.steps}"
    lines = [f"{summary.trace}: GPU {summary.device}{steps}"]
    for name, value in _ROWS:
        part = value(summary) / summary.span if summary.span else 0.0
        lines.append(f"  {name:<16}{value(summary) / 1e3:>10.3f} ms{100 * part:>7.1f} %")
    for what, (kind, count, total) in sorted(summary.parts.items(), key=lambda item: (item[1][0], -item[1][2])):
        lines.append(f"    {kind:<14}{total / 1e3:>10.3f} ms in {count:g} x {what}")
    return "\n".join(lines)


def compare(before: Summary, after: Summary) -> str:
    """Both, side by side, and how the second differs."""
    lines = [
        f"before: {before.trace}, GPU {before.device}",
        f"after:  {after.trace}, GPU {after.device}",
        f"  {'per step':<16}{'before':>13}{'after':>13}{'change':>13}",
    ]
    for name, value in _ROWS:
        old, new = value(before), value(after)
        change = f"{100 * (new - old) / old:+.1f} %" if old else "-"
        lines.append(f"  {name:<16}{old / 1e3:>10.3f} ms{new / 1e3:>10.3f} ms{change:>13}")
    return "\n".join(lines)


# --- picture -----------------------------------------------------------------------------------------------------
_COLOURS = {"communication": "#c0392b", "compute": "#2f6cb0", "other": "#6b7280"}
_LEFT, _WIDTH, _ROW, _TOP, _TAIL = 110, 1000, 30, 38, 32
_STYLE = """<style>
text { fill: #1d1d1f } .title { font-size: 14px } .line { stroke: #d0d0d4 } .end { stroke: #1d1d1f }
.page { fill: #fff } .box { stroke: #fff; stroke-width: .5 } .name { fill: #fff; font-size: 10px }
@media (prefers-color-scheme: dark) { text { fill: #e9e9ec } .name { fill: #fff } .line { stroke: #3a3b40 }
.end { stroke: #e9e9ec } .page { fill: #151618 } .box { stroke: #151618 } }
</style>"""
#: names of kernels, and what is shown of them where a box has room; the whole name is in its tooltip
_FOLDED = (
    (r"^triton_([a-z]+)_fused_.*_(\d+)$", r"triton_\1_…_\2"),
    (r"^ncclDevKernel_(\w+?)_(?:RING|TREE|NVLS|COLLNET)\w*(?:\(.*)?$", r"nccl \1"),
    (r"^nvjet_(?:sm\d+_)?\w+?_(\d+x\d+)_.*$", r"nvjet \1"),
    (r"^cudnn_generated_\w*?(flash_[a-z]+)_.*$", r"cudnn \1"),
    (r"^(Memcpy|Memset) (\w+).*$", r"\1 \2"),
    (r"^(?:void )?(?:\w+::|\(anonymous namespace\)::)*(\w+)[<(].*$", r"\1"),
)


@dataclass(frozen=True)
class Panel:
    """A part of a trace that is drawn.

    Attributes:
        trace: The trace.
        device: The GPU; the first one when None.
        window: Start and end in the trace's microseconds; the whole trace when None.
        title: Written above it; the file's name when empty.
    """

    trace: Trace
    device: int | None = None
    window: Interval | None = None
    title: str = ""


def timeline(*panels: Panel) -> str:
    """An SVG picture, for light and dark pages: a row for each stream of a GPU, a box for each event, coloured by kind.

    Several panels are one below the other, on one time scale.

    Args:
        panels: What to draw, one at least.

    Raises:
        TraceError: Nothing ran on one's device in its window.
    """
    drawn = [_Drawn.of(panel) for panel in panels]
    longest = max(each.high - each.low for each in drawn)
    scale, parts, top = _WIDTH / max(longest, 1e-9), list[str](), 0
    for each in drawn:
        parts += each.lines(top, scale, longest)
        top += each.height
    for index, (kind, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 150 * index
        parts.append(f'<rect x="{x}" y="{top + 4}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{top + 14}">{kind}</text>')
    height, width = top + 26, _LEFT + _WIDTH + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">'
    )
    page = '<rect class="page" width="100%" height="100%"/>'
    return "\n".join([head, _STYLE, page, *parts, "</svg>", ""])


@dataclass(frozen=True)
class _Drawn:
    """A panel, with the events in it; times in microseconds."""

    title: str
    device: int
    low: float
    high: float
    events: Sequence[Event]

    @classmethod
    def of(cls, panel: Panel) -> _Drawn:
        trace = panel.trace
        device = trace.devices[0] if panel.device is None else panel.device
        events = cut([event for event in trace.events if event.device == device], panel.window)
        if not events:
            raise TraceError(f"{trace.name}: nothing ran on GPU {device} there; the GPUs are {trace.devices}")
        low, high = panel.window or (min(event.start for event in events), max(event.end for event in events))
        place = f"GPU {device} of {trace.machine}" if trace.machine else f"GPU {device}"
        name = panel.title or Path(trace.name).name
        return cls(", ".join(part for part in (name, place, trace.date) if part), device, low, high, events)

    @property
    def streams(self) -> list[int]:
        return sorted({event.stream for event in self.events})

    @property
    def height(self) -> int:
        return _TOP + _ROW * len(self.streams) + _TAIL

    def lines(self, top: int, scale: float, longest: float) -> Iterator[str]:
        """The elements, from `top` on."""
        summary = _summarize("", self.device, self.events, 1)
        length, exposed = (_in_unit(value, longest) for value in (self.high - self.low, summary.exposed))
        told = f"{self.title}: {length}, exposed communication {exposed}"
        yield f'<text class="title" x="8" y="{top + 20}">{escape(told)}</text>'
        bottom = top + self.height - _TAIL
        yield from _scale(top + _TOP - 4, bottom, scale, longest)
        for row, stream in enumerate(self.streams):
            y = top + _TOP + _ROW * row
            yield f'<text x="8" y="{y + 18}">stream {stream}</text>'
            for event in self.events:
                if event.stream == stream:
                    yield _box(event, _LEFT + (event.start - self.low) * scale, y, scale)
        end = _LEFT + (self.high - self.low) * scale
        yield f'<line class="end" x1="{end:.1f}" x2="{end:.1f}" y1="{top + _TOP - 4}" y2="{bottom}"/>'


def _in_unit(value: float, longest: float) -> str:
    """Microseconds as text: in milliseconds where the longest time of a picture has many."""
    return f"{value / 1000:.2f} ms" if longest >= _IN_MILLISECONDS else f"{value:.0f} µs"


_IN_MILLISECONDS = 5000.0
_MOST_TICKS = 10


def _scale(top: int, bottom: int, scale: float, longest: float) -> Iterator[str]:
    """Lines at round times, with the times below."""
    step = next(
        factor * 10.0**power for power in range(-3, 12) for factor in (1, 2, 5)
        if longest / (factor * 10.0**power) <= _MOST_TICKS
    )  # fmt: skip
    for number in range(int(longest / step + 1e-9) + 1):
        time, x = number * step, _LEFT + number * step * scale
        text = f"{time / 1000:.10g} ms" if longest >= _IN_MILLISECONDS else f"{time:.10g} µs"
        yield f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom + 4}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>'


def folded(name: str) -> str:
    """A kernel's name in short: `triton_red_…_25`, `nccl AllGather`, `nvjet 128x128`."""
    return next((re.sub(pattern, short, name) for pattern, short in _FOLDED if re.match(pattern, name)), name)


def _box(event: Event, x: float, y: float, scale: float) -> str:
    """One event, with its name in short where there is room, and the whole of it in a tooltip."""
    width = max(0.5, (event.end - event.start) * scale)
    name, room = folded(event.name), int((width - 6) / 6.2)
    label = name if len(name) <= room else f"{name[: room - 1]}…" if room >= _SHORTEST else ""
    text = f'<text class="name" x="{x + 3:.1f}" y="{y + 17}">{escape(label)}</text>' if label else ""
    return (
        f"<g><title>{escape(event.name)}, {event.end - event.start:.1f} µs</title>"
        f'<rect class="box" x="{x:.2f}" y="{y + 3}" width="{width:.2f}" '
        f'height="{_ROW - 8}" fill="{_COLOURS[event.rule.kind]}"/>{text}</g>'
    )


_SHORTEST = 6  # letters of a name that is cut
