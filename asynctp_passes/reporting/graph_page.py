"""Pictures of a graph before and after the pass, its chains coloured by outcome, as one self-contained HTML page.

A chain's nodes have the colour of its outcome (`_COLOURS`), and so has the fused op that replaced it. Nodes that
belong to no chain are drawn small: runs of them that end in one user become one box. A parameter or buffer is a line
in each box that reads it, the output node and sizes are left out, and what is returned has a bold frame.

The page draws itself: `dagre` (`dagre/README.md`), which it holds, places the boxes.
"""

from __future__ import annotations

import functools
import html
import itertools
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from torch import fx

from asynctp_passes.ir.nodes import describe_tensor, is_number, module_of, path_of, traits_of, values_of
from asynctp_passes.reasons import Outcome
from asynctp_passes.reporting.graph_index import about, write_index
from asynctp_passes.reporting.report import Remark, Report
from asynctp_passes.torch_private import dynamo, partitioner, torch_ops

log = logging.getLogger(__name__)


class _Colours(NamedTuple):
    """How an outcome's nodes are filled, and their line, in light and in dark; and what the legend says."""

    light: tuple[str, str]
    dark: tuple[str, str]
    meaning: str


_COLOURS: dict[Outcome, _Colours] = {  # by precedence
    "MISSED": _Colours(("#ffcdd2", "#c62828"), ("#4a1d1f", "#f0706c"), "in scope, not fused"),
    "FUSED": _Colours(("#c8e6c9", "#2e7d32"), ("#1c3a20", "#6abf6e"), "one op with its matmuls"),
    "OVERLAPPED": _Colours(("#bbdefb", "#1565c0"), ("#15314c", "#6cb2f2"), "runs beside matmuls"),
    "BUCKETED": _Colours(("#e1bee7", "#7b1fa2"), ("#3b2043", "#cd90d8"), "one with other all-reduces"),
    "REMATERIALIZED": _Colours(("#ffe0b2", "#bf4400"), ("#482d0f", "#f9ab4e"), "made again in the backward"),
    "ACCELERATED": _Colours(("#b2dfdb", "#00695c"), ("#0f3835", "#4fb5aa"), "an op of asynctp's, without a matmul"),
    "ERASED": _Colours(("#d7ccc8", "#5d4037"), ("#38302c", "#bba79f"), "unused, not made"),
    "SKIPPED": _Colours(("#dcdcdc", "#616161"), ("#38393b", "#b4b6b9"), "nothing is done"),
}
_ALONE = (
    *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_int_mm"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "wait_tensor", "wait"),
)
_NAMES_IN_A_BOX = 4
_TYPES_IN_A_BOX = 2
_WRAPPERS = re.compile(r"(?<![^.])(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)(\.|$)")


# --- names of inputs -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class InputName:
    """A name for people of a graph's input.

    Attributes:
        text: As `"layers.0.wq.weight"`, `"x"`.
        held: It is a parameter or a buffer, or such a one rearranged.
    """

    text: str
    held: bool = False


@dataclass
class Names:
    """The names of the inputs of one compiled function's graphs.

    Attributes:
        inputs: By their number in the function.
        saved: Of rearranged weights that the forward keeps for the backward, by their node's name.
    """

    inputs: dict[int, InputName] = field(default_factory=dict)
    saved: dict[str, InputName] = field(default_factory=dict)

    @classmethod
    def of(cls, gm: fx.GraphModule) -> Names:
        """The names by which Dynamo finds the inputs of a function that it compiles just now."""
        return cls({number: _input_name(source) for number, source in dynamo.input_sources(gm).items()})

    def of_graph(self, graph: fx.Graph) -> dict[str, InputName]:
        """The names of a graph's placeholders, by their node's name, as far as they are known."""
        numbers = partitioner.program_inputs(graph)
        names = {
            node.name: self.saved.get(node.name) or self.inputs.get(numbers.get(node, -1))
            for node in graph.find_nodes(op="placeholder")
        }
        return {node: name for node, name in names.items() if name is not None}

    def save(self, graph: fx.Graph, names: Mapping[str, InputName]) -> None:
        """Keep the names of weights that a forward rearranges and returns: its backward takes them by these names."""
        for node in _returned(graph):
            weight, steps = node, list[str]()
            while weight.op == "call_function" and traits_of(weight).rearranges and weight.all_input_nodes:
                steps.append(_op(weight))
                weight = weight.all_input_nodes[0]
            name = names.get(weight.name) if weight.op == "placeholder" else None
            if name is not None and name.held and steps:
                self.saved[node.name] = InputName(_calls(reversed(steps), name.text), True)


def _input_name(source: str) -> InputName:
    held = re.search(r"_(parameters|buffers)('\])?\[", source) is not None
    argument = re.sub(r"^[LG]\['(\w+)'\]", r"\1", source)
    return InputName(_WRAPPERS.sub("", path_of(source if held else argument)) or source, held)


def _calls(steps: Iterable[str], text: str) -> str:
    """`view(permute(w))` of the steps permute and view."""
    return functools.reduce(lambda inner, step: f"{step}({inner})", steps, text)


# --- reading a graph ---------------------------------------------------------------------------------------
class _View:
    """A graph and what the report says about its nodes: remarks are numbered from 1, as in the page's table."""

    def __init__(self, graph: fx.Graph, report: Report, names: Mapping[str, InputName]) -> None:
        self.graph, self.report, self.names = graph, report, names
        self.remarks: dict[str, tuple[int, ...]] = {}
        for number, remark in enumerate(report.remarks, 1):
            for name in dict.fromkeys((remark.collective, *remark.nodes)):
                self.remarks[name] = (*self.remarks.get(name, ()), number)

    def outcome(self, node: fx.Node) -> Outcome | None:
        """The outcome that colours the node; None when no remark names it."""
        if _is_fused_op(node):
            return "FUSED"
        found = _first_outcome(self.remark(number) for number in self.remarks.get(node.name, ()))
        return found or ("ACCELERATED" if _op(node).startswith("asynctp.") else None)

    def remark(self, number: int) -> Remark:
        """The remark of that number."""
        return self.report.remarks[number - 1]

    def numbers(self, node: fx.Node) -> tuple[int, ...]:
        """The remarks of a node. A fused op carries the name of the collective that it replaced."""
        name = node.meta.get("asynctp_collective", node.name)
        if _is_fused_op(node):
            remarks = enumerate(self.report.remarks, 1)
            return tuple(number for number, remark in remarks if remark.collective == name)
        return self.remarks.get(name, ())

    def is_weight(self, node: fx.Node) -> bool:
        """It is a parameter or a buffer of a known name."""
        return node.op == "placeholder" and node.name in self.names and self.names[node.name].held

    def name(self, node: fx.Node) -> str:
        """A name of a node for people: of an input its own where it is known."""
        known = self.names.get(node.name) if node.op == "placeholder" else None
        return known.text if known else node.name


def _op(node: fx.Node) -> str:
    """`mm` for `aten.mm.default`; `asynctp.all_gather_matmul` keeps its namespace, as all but well-known ops do."""
    if node.op != "call_function":
        return node.op if node.op in ("placeholder", "output") else f"{node.op} {node.target}"
    if torch_ops.is_op(node.target):
        namespace, _, name = node.target._schema.name.partition("::")
        return name if namespace in ("aten", "prims", "_c10d_functional") else f"{namespace}.{name}"
    return str(getattr(node.target, "__name__", node.target))


def _is_fused_op(node: fx.Node) -> bool:
    return _op(node).startswith("asynctp.") and "matmul" in _op(node)


def _first_outcome(remarks: Iterable[Remark]) -> Outcome | None:
    """The outcome of some remarks that comes first in `_COLOURS`."""
    outcomes = {remark.outcome for remark in remarks}
    return next((outcome for outcome in _COLOURS if outcome in outcomes), None)


def _returned(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the graph returns."""
    return {source for node in graph.nodes if node.op == "output" for source in node.all_input_nodes}


def _stands_alone(node: fx.Node, view: _View) -> bool:
    """True for nodes that get a box of their own."""
    return node.op in ("placeholder", "output") or _op(node) in _ALONE or bool(view.outcome(node))


def _type(node: fx.Node) -> str:
    """`bf16[2, 32, 64]`, of several tensors the first few, or nothing when the node carries none."""
    values = values_of(node)
    told = [describe_tensor(one) for one in values[:_TYPES_IN_A_BOX]]
    return ", ".join([*told, f"{len(values)} tensors"] if len(values) > _TYPES_IN_A_BOX else told)


def _runs(view: _View, returned: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Nodes drawn together, by the last of them.

    A node joins its only user when neither stands alone: every way out of it leads through that user, so the drawn
    graph stays free of cycles.
    """
    last: dict[fx.Node, fx.Node] = {}
    runs: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(list(view.graph.nodes)):
        users = list(node.users)
        joins = len(users) == 1 and node not in returned
        if joins and not _stands_alone(node, view) and not _stands_alone(users[0], view):
            last[node] = last[users[0]]
        else:
            last[node] = node
        runs.setdefault(last[node], []).insert(0, node)
    return runs


# --- what the page draws ---------------------------------------------------------------------------------------
def picture(graph: fx.Graph, report: Report, names: Mapping[str, InputName] | None = None) -> dict[str, Any]:
    """The boxes and arrows of a graph, in plain values.

    Args:
        report: What the pass reported; remarks name nodes of the graph before.
        names: Names of placeholders, by their node's name.

    Returns:
        `boxes`, each with its `id`, a `kind` (`"op"`, `"fused"`, `"input"` or `"constant"`), `head`, `lines`,
        `weights` that it reads, `module`, `tip`, `outcome` or None, the numbers of its `remarks`, and whether it is
        `returned`; and `edges`, each `[from, to, outcome or None]`.
    """
    view = _View(graph, report, names or {})
    returned = _returned(graph)
    runs = _runs(view, returned)
    home = {node: last for last, nodes in runs.items() for node in nodes}
    inline = {last: text for last, nodes in runs.items() if (text := _inlined(view, nodes, returned))}
    drawn = {last: nodes for last, nodes in runs.items() if last not in inline and _is_drawn(last)}
    boxes = [
        {"id": name, **_box(view, nodes, inline, last in returned)}
        for last, nodes in drawn.items()
        for name in _copies(last, home)
    ]
    return {"boxes": boxes, "edges": _edges(view, home, drawn)}


def _inlined(view: _View, nodes: Sequence[fx.Node], returned: set[fx.Node]) -> str:
    """A weight, or one that a single op of no chain rearranges for its only user, is a line there: its text, or ""."""
    node = nodes[-1]
    if view.is_weight(node):
        return f"{view.names[node.name].text}  {_type(node)}".rstrip()
    sources = node.all_input_nodes
    if len(nodes) > 1 or len(sources) != 1 or len(node.users) != 1 or node in returned or _stands_alone(node, view):
        return ""
    if not traits_of(node).rearranges or not view.is_weight(sources[0]):
        return ""
    return f"{_calls([_op(node)], view.names[sources[0].name].text)}  {_type(node)}".rstrip()


def _is_drawn(node: fx.Node) -> bool:
    """Unused placeholders, the output node and sizes are left out."""
    unused = node.op == "placeholder" and all(user.op == "output" for user in node.users)
    return node.op != "output" and not unused and not is_number(node)


def _copies(node: fx.Node, home: dict[fx.Node, fx.Node]) -> list[str]:
    """The names under which a node is drawn: a constant beside each of its users, everything else once."""
    return list(dict.fromkeys(_copy(node, home[user]) for user in node.users)) or [node.name]


def _copy(source: fx.Node, user: fx.Node) -> str:
    constant = source.op != "placeholder" and not source.all_input_nodes
    return f"{source.name}@{user.name}" if constant else source.name


def _box(view: _View, nodes: Sequence[fx.Node], inline: Mapping[fx.Node, str], returned: bool) -> dict[str, Any]:
    node = nodes[-1]
    sources = dict.fromkeys(source for member in nodes for source in member.all_input_nodes)
    head, *lines = _label(view, nodes)
    return {
        "kind": _kind(node),
        "head": head,
        "lines": lines,
        "weights": [inline[source] for source in sources if source in inline],
        "module": "" if len(nodes) == 1 and _op(node) == "getitem" else _module(view, node),
        "tip": "\n".join([*(_statement(view, one) for one in nodes), *map(str, map(view.remark, view.numbers(node)))]),
        "outcome": view.outcome(node),
        "remarks": view.numbers(node),
        "returned": returned,
    }


def _kind(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    return "fused" if _is_fused_op(node) else "op" if node.all_input_nodes else "constant"


def _module(view: _View, node: fx.Node) -> str:
    """The path of a node's module; of a fused op, its chain's."""
    paths = [module_of(node), *(view.remark(number).module for number in view.numbers(node))]
    return _WRAPPERS.sub("", next((path for path in paths if path), "")).rstrip(".")


def _label(view: _View, nodes: Sequence[fx.Node]) -> list[str]:
    node = nodes[-1]
    if len(nodes) > 1:
        return [_listed([_op(member) for member in nodes]), _named(view, node)]
    if _op(node) == "getitem":
        return [f"[{node.args[1]}]"]
    numbers = " ".join(f"#{number}" for number in view.numbers(node))
    head = view.name(node) if node.op == "placeholder" else _op(node)
    return [line for line in (f"{head}  {numbers}".rstrip(), _named(view, node)) if line]


def _named(view: _View, node: fx.Node) -> str:
    """Name and type, without a name that only repeats the op."""
    repeats = view.name(node) == node.name if node.op == "placeholder" else node.name == _op(node)
    return _type(node) if repeats else f"{node.name}  {_type(node)}".rstrip()


def _listed(names: Sequence[str]) -> str:
    if len(names) <= _NAMES_IN_A_BOX:
        return ", ".join(names)
    return f"{len(names)} ops: {', '.join(names[:2])}, …, {names[-1]}"


def _statement(view: _View, node: fx.Node) -> str:
    """`mm = mm(view_2, permute)  bf16[32, 16]`, and of an input its own name."""
    values = [*(str(value) for value in node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    call = node.op if node.op in ("placeholder", "output") else f"{_op(node)}({', '.join(values)})"
    known = "" if view.name(node) == node.name else f"  {view.name(node)}"
    return f"{node.name} = {call}{known}  {_type(node)}".rstrip()


def _edges(view: _View, home: dict[fx.Node, fx.Node], drawn: Mapping[fx.Node, Any]) -> list[list[str | None]]:
    """From box to box, each once. One within a chain has its outcome."""
    found: dict[tuple[str, str], Outcome | None] = {}
    for node in view.graph.nodes:
        for source in node.all_input_nodes:
            ends = (home[source], home[node])
            if ends[0] is not ends[1] and ends[0] in drawn and ends[1] in drawn:
                shared = set(view.remarks.get(source.name, ())) & set(view.remarks.get(node.name, ()))
                found.setdefault((_copy(*ends), ends[1].name), _first_outcome(map(view.remark, shared)))
    return [[*ends, outcome] for ends, outcome in found.items()]


# --- the page ------------------------------------------------------------------------------------------------
def write_page(
    folder: str | Path, before: fx.Graph, after: fx.Graph, report: Report, names: Names | None = None
) -> Path:
    """Write one HTML page with a graph before and after the pass. It needs no network and no other file.

    `index.html` in the same folder, which lists all its pages, is written anew.

    Args:
        folder: Where to write; made when it is not there.
        names: The names of the function's inputs; a forward adds what its backward takes.

    Returns:
        The page's path, `<graph>-<phase>.html`, or with `-2`, `-3`, … when that name is taken.
    """
    names = names or Names()
    known = names.of_graph(before)
    if report.phase == "forward":
        names.save(before, known)
    subtitle, row = about(report)
    pictures = {"before": picture(before, report, known), "after": picture(after, report, known)}
    template = Template(Path(__file__).with_name("graph_page.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=html.escape(f"{report.graph} ({report.phase})"),
        about=row,
        subtitle=html.escape(subtitle),
        totals=_totals(report),
        styles=_styles(),
        legend=_legend(report),
        layout=_layout(),
        pictures=json.dumps(pictures, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        rows="\n".join(_row(number, remark) for number, remark in enumerate(report.remarks, 1)),
        report=html.escape(str(report)),
        before_text=_listing(before, report, known),
        after_text=_listing(after, report, known),
    )
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", f"{report.graph}-{report.phase}").strip("-.") or "graph"
    path = _write_new(Path(folder), stem, page)
    write_index(Path(folder))
    log.info("graph page of %s (%s): %s", report.graph, report.phase, path)
    return path


@functools.cache
def _layout() -> str:
    """The layout program, with its licence, for a script element."""
    folder = Path(__file__).with_name("dagre")
    licence = (folder / "LICENSE").read_text(encoding="utf-8").strip()
    program = (folder / "dagre.min.js").read_text(encoding="utf-8").partition("//# sourceMappingURL")[0].strip()
    return f"/*! dagre, from npm's @dagrejs/dagre\n{licence} */\n{program}"


def _listing(graph: fx.Graph, report: Report, names: Mapping[str, InputName]) -> str:
    """The graph as coloured text: a line a node, members of a chain indented under its number."""
    view = _View(graph, report, names)
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder" and not node.users:
            continue
        outcome = view.outcome(node)
        marks = " ".join(f"#{number}" for number in view.numbers(node))
        text = html.escape(f"    {marks:<6} {_statement(view, node)}" if outcome else _statement(view, node))
        lines.append(f'<span class="{outcome.lower()}">{text}</span>' if outcome else text)
    return "\n".join(lines)


def _styles() -> str:
    """CSS: of each outcome a class with its fill and its line, in light and in dark."""
    style = ".{} {{ --fill: {}; --stroke: {}; }}".format
    light = [style(outcome.lower(), *colours.light) for outcome, colours in _COLOURS.items()]
    dark = [style(outcome.lower(), *colours.dark) for outcome, colours in _COLOURS.items()]
    return "\n".join([*light, "@media (prefers-color-scheme: dark) {", *dark, "}"])


def _legend(report: Report) -> str:
    """The outcomes that are there, with their colours."""
    return "\n".join(
        f'<span class="key {outcome.lower()}"></span>{outcome}: {html.escape(colours.meaning)}'
        for outcome, colours in _COLOURS.items()
        if report.with_outcome(outcome)
    )


def _totals(report: Report) -> str:
    """How many remarks there are of each outcome; the others than these three are left out where there are none."""
    counts = {outcome: len(report.with_outcome(outcome)) for outcome in _COLOURS}
    shown = [outcome for outcome in _COLOURS if counts[outcome] or outcome in ("FUSED", "MISSED", "SKIPPED")]
    return " ".join(f'<span class="chip {one.lower()}">{counts[one]} {one.lower()}</span>' for one in shown)


def _row(number: int, remark: Remark) -> str:
    """One line of the table of remarks."""
    reason = f"<b>{remark.code} {remark.name}</b><br>{html.escape(remark.message)}" if remark.code else ""
    remedy = html.escape(remark.hint)
    if remark.outcome == "FUSED":
        reason = f"<b>{html.escape(remark.op)}</b><br>implementation: {html.escape(remark.implementation)}"
    shapes = "<br>".join(html.escape(f"{role} {shape}") for role, shape in remark.shapes.items())
    source = f"<br><small>{html.escape(remark.source)}</small>" if remark.source else ""
    chain = " → ".join(html.escape(name) for name in remark.nodes) or html.escape(remark.collective)
    cells: list[Any] = [
        f"#{number}",
        f'<span class="chip {remark.outcome.lower()}">{remark.outcome}</span>',
        f"<b>{html.escape(_WRAPPERS.sub('', remark.module or '').rstrip('.'))}</b>{source}",
        f"{html.escape(remark.kind)}<br><small>{chain}</small>",
        shapes,
        reason,
        remedy,
    ]
    return f'<tr data-remark="{number}" tabindex="0">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _write_new(folder: Path, stem: str, page: str) -> Path:
    """Write under the first free name; other processes may write to the folder at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / (f"{stem}.html" if number == 1 else f"{stem}-{number}.html")
        try:
            file = path.open("x", encoding="utf-8", errors="replace")
        except FileExistsError:
            continue
        try:
            with file:
                file.write(page)
        except OSError:
            path.unlink(missing_ok=True)  # no half of a page
            raise
        return path
    raise AssertionError("unreachable")
