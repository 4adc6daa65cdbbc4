"""Pictures of a graph before and after the pass, its chains coloured by outcome, as one self-contained HTML page.

A chain's nodes have the colour of its outcome (`_COLOURS`), and so has the fused op that replaced it. Nodes that
belong to no chain are drawn small: runs of them that end in one user become one box, the output node is left out
(what is returned has a bold frame), and placeholders are plain text.
"""

from __future__ import annotations

import html
import itertools
import json
import logging
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import fx

from asynctp_passes import compat
from asynctp_passes.reasons import Outcome
from asynctp_passes.reporting.report import Remark, Report

__all__ = ["to_dot", "write_page"]

log = logging.getLogger(__name__)

_COLOURS: dict[Outcome, tuple[str, str, str]] = {
    # the outcome, by precedence: how its nodes are filled, their line, and what the legend says
    "MISSED": ("#ffcdd2", "#c62828", "in scope, not fused"),
    "FUSED": ("#c8e6c9", "#2e7d32", "one op with its matmuls"),
    "OVERLAPPED": ("#bbdefb", "#1565c0", "runs beside matmuls"),
    "BUCKETED": ("#e1bee7", "#7b1fa2", "one with other all-reduces"),
    "REMATERIALIZED": ("#ffe0b2", "#e65100", "made again in the backward"),
    "ACCELERATED": ("#b2dfdb", "#00695c", "an op of asynctp's, without a matmul"),
    "ERASED": ("#d7ccc8", "#5d4037", "unused, not made"),
    "SKIPPED": ("#dcdcdc", "#757575", "nothing is done"),
}
_SHORT_DTYPES = {"bfloat16": "bf16", "float": "f", "int": "i", "uint": "u"}
_ALONE = (
    *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_int_mm"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "wait_tensor", "wait"),
)
_NAMES_IN_A_BOX = 4
_DOT_TIMEOUT_S = 60
_NO_DOT = (
    "the Graphviz program 'dot' was not found, so the graphs are shown as text; install it for pictures: "
    "'apt install graphviz', 'brew install graphviz' or 'conda install -c conda-forge graphviz'"
)


# --- reading a graph ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _View:
    """A graph and what the report says about its nodes: remarks are numbered from 1, as in the page's table."""

    graph: fx.Graph
    remarks: dict[str, tuple[int, ...]]
    report: Report

    @classmethod
    def of(cls, graph: fx.Graph, report: Report) -> _View:
        """Collect the numbers of the remarks that name each node."""
        numbers: dict[str, tuple[int, ...]] = {}
        for number, remark in enumerate(report.remarks, 1):
            for name in dict.fromkeys((remark.collective, *remark.nodes)):
                numbers[name] = (*numbers.get(name, ()), number)
        return cls(graph, numbers, report)

    def outcome(self, node: fx.Node) -> Outcome | None:
        """The outcome that colours the node; None when no remark names it."""
        if _is_fused_op(node):
            return "FUSED"
        found = _first_outcome(self.remark(number) for number in self.remarks.get(node.name, ()))
        return found or ("ACCELERATED" if _op(node).startswith("asynctp.") else None)

    def remark(self, number: int) -> Remark:
        """The remark of that number."""
        return self.report.remarks[number - 1]

    def returned(self) -> set[fx.Node]:
        """The nodes that the graph returns."""
        return {source for node in self.graph.nodes if node.op == "output" for source in node.all_input_nodes}


def _op(node: fx.Node) -> str:
    """`mm` for `aten.mm.default`; `asynctp.all_gather_matmul` keeps its namespace, as all but well-known ops do."""
    if node.op != "call_function":
        return node.op if node.op in ("placeholder", "output") else f"{node.op} {node.target}"
    if compat.is_op(node.target):
        namespace, _, name = node.target._schema.name.partition("::")
        return name if namespace in ("aten", "prims", "_c10d_functional") else f"{namespace}.{name}"
    return str(getattr(node.target, "__name__", node.target))


def _is_fused_op(node: fx.Node) -> bool:
    return _op(node).startswith("asynctp.") and "matmul" in _op(node)


def _first_outcome(remarks: Iterable[Remark]) -> Outcome | None:
    """The outcome of some remarks that comes first in `_COLOURS`."""
    outcomes = {remark.outcome for remark in remarks}
    return next((outcome for outcome in _COLOURS if outcome in outcomes), None)


def _stands_alone(node: fx.Node, view: _View) -> bool:
    """True for nodes that get a box of their own."""
    return node.op in ("placeholder", "output") or _op(node) in _ALONE or bool(view.outcome(node))


def _type(node: fx.Node) -> str:
    """`bf16[2, 32, 64]`, or nothing when the node carries no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = str(value.dtype).removeprefix("torch.")
    for long, short in _SHORT_DTYPES.items():
        if dtype.startswith(long):
            dtype = short + dtype[len(long) :]
            break
    return f"{dtype}{[str(size) for size in value.shape]}".replace("'", "")


def _boxes(view: _View) -> dict[fx.Node, list[fx.Node]]:
    """Nodes drawn together, by the last of them.

    A node joins its only user when neither stands alone: every way out of it leads through that user, so the drawn
    graph stays free of cycles.
    """
    last: dict[fx.Node, fx.Node] = {}
    boxes: dict[fx.Node, list[fx.Node]] = {}
    returned = view.returned()
    for node in reversed(list(view.graph.nodes)):
        users = list(node.users)
        joins = len(users) == 1 and node not in returned
        if joins and not _stands_alone(node, view) and not _stands_alone(users[0], view):
            last[node] = last[users[0]]
        else:
            last[node] = node
        boxes.setdefault(last[node], []).insert(0, node)
    return boxes


# --- dot -----------------------------------------------------------------------------------------------------
def to_dot(graph: fx.Graph, report: Report) -> str:
    """Draw a graph as Graphviz text.

    Args:
        graph: The graph, before or after the pass.
        report: What the pass reported; remarks name nodes of the graph before.

    Returns:
        A directed graph in the dot language. SVG elements of a chain's nodes get the class `r<number of its remark>`.
    """
    view = _View.of(graph, report)
    boxes = _boxes(view)
    home = {node: last for last, nodes in boxes.items() for node in nodes}
    returned = view.returned()
    lines = [
        "digraph asynctp {",
        '  graph [rankdir=TB, nodesep=0.15, ranksep=0.25, bgcolor="transparent"];',
        '  node [shape=box, style="filled,rounded", fontname="Helvetica", fontsize=10, height=0.2, margin="0.08,0.04",'
        ' fillcolor="#ffffff", color="#b0b0b0"];',
        '  edge [arrowsize=0.5, color="#9a9a9a"];',
    ]
    for last, nodes in boxes.items():
        for name in _copies(last, home) if _is_drawn(last) else ():
            lines.append(f"  {_quote(name)} [{_attributes(view, nodes, last in returned)}];")
    lines += _edges(view, home)
    return "\n".join([*lines, "}"]) + "\n"


def _is_drawn(node: fx.Node) -> bool:
    """Unused placeholders and the output node are left out."""
    return node.op != "output" and not (node.op == "placeholder" and all(user.op == "output" for user in node.users))


def _copies(node: fx.Node, home: dict[fx.Node, fx.Node]) -> list[str]:
    """The names under which a node is drawn: a constant beside each of its users, everything else once."""
    if node.op == "placeholder" or node.all_input_nodes:
        return [node.name]
    return list(dict.fromkeys(_copy(node, home[user]) for user in node.users)) or [node.name]


def _copy(source: fx.Node, user: fx.Node) -> str:
    constant = source.op != "placeholder" and not source.all_input_nodes
    return f"{source.name}@{user.name}" if constant else source.name


def _attributes(view: _View, nodes: Sequence[fx.Node], returned: bool) -> str:
    node = nodes[-1]
    outcome = view.outcome(node)
    values = {"label": _label(view, nodes), "tooltip": _tooltip(view, nodes)}
    if not node.all_input_nodes:
        values |= {"shape": "plaintext", "style": "", "fontcolor": "#606060", "fontsize": "8"}
    elif _op(node) == "getitem":
        values |= {"fontsize": "8"}
    if outcome:
        fill, line, _ = _COLOURS[outcome]
        values |= {"fillcolor": fill, "color": line, "class": _classes(view, node)}
    if _is_fused_op(node):
        values |= {"fillcolor": _COLOURS["FUSED"][1], "fontcolor": "#ffffff", "fontsize": "12"}
    if returned:
        values |= {"penwidth": "2.5"}
    return ", ".join(f"{key}={_quote(value)}" for key, value in values.items())


def _label(view: _View, nodes: Sequence[fx.Node]) -> str:
    node = nodes[-1]
    if len(nodes) > 1:
        return f"{_listed([_op(member) for member in nodes])}\n{_named(node)}"
    if _op(node) == "getitem":
        return f"[{node.args[1]}]"
    numbers = " ".join(f"#{number}" for number in _numbers(view, node))
    head = node.name if node.op == "placeholder" else f"{_op(node)}   {numbers}".rstrip()
    return f"{head}\n{_named(node)}".rstrip()


def _named(node: fx.Node) -> str:
    """Name and type, without a name that only repeats the op."""
    repeats = node.op == "placeholder" or node.name == _op(node)
    return _type(node) if repeats else f"{node.name}  {_type(node)}".rstrip()


def _listed(names: Sequence[str]) -> str:
    if len(names) <= _NAMES_IN_A_BOX:
        return ", ".join(names)
    return f"{len(names)} ops: {', '.join(names[:2])}, …, {names[-1]}"


def _tooltip(view: _View, nodes: Sequence[fx.Node]) -> str:
    remarks = (str(view.remark(number)) for number in view.remarks.get(nodes[-1].name, ()))
    return "\n".join([*(_statement(node) for node in nodes), *remarks])


def _statement(node: fx.Node) -> str:
    """`mm = mm(view_2, permute)  bf16[32, 16]`."""
    values = [*(str(value) for value in node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    call = node.op if node.op in ("placeholder", "output") else f"{_op(node)}({', '.join(values)})"
    return f"{node.name} = {call}  {_type(node)}".rstrip()


def _classes(view: _View, node: fx.Node) -> str:
    return " ".join(f"r{number}" for number in _numbers(view, node))


def _numbers(view: _View, node: fx.Node) -> tuple[int, ...]:
    """The remarks of a node. A fused op carries the name of the collective that it replaced."""
    name = node.meta.get("asynctp_collective", node.name)
    remarks = enumerate(view.report.remarks, 1)
    if _is_fused_op(node):
        return tuple(number for number, remark in remarks if remark.collective == name)
    return view.remarks.get(name, ())


def _edges(view: _View, home: dict[fx.Node, fx.Node]) -> list[str]:
    lines = []
    drawn = set()
    for node in view.graph.nodes:
        for source in node.all_input_nodes:
            ends = (home[source], home[node])
            if ends[0] is ends[1] or ends in drawn or not all(map(_is_drawn, ends)):
                continue
            drawn.add(ends)
            lines.append(f"  {_quote(_copy(*ends))} -> {_quote(ends[1].name)}{_edge_style(view, source, node)};")
    return lines


def _edge_style(view: _View, source: fx.Node, node: fx.Node) -> str:
    shared = set(view.remarks.get(source.name, ())) & set(view.remarks.get(node.name, ()))
    outcome = _first_outcome(map(view.remark, shared))
    return "" if outcome is None else f' [color="{_COLOURS[outcome][1]}", penwidth=2]'


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\\n", "\\l" if text.count("\n") > 2 else "\\n")


# --- the page ------------------------------------------------------------------------------------------------
@dataclass
class _Pictures:
    """Both graphs as HTML, and why they are not drawings, if they are not."""

    before: str
    after: str
    notice: str = ""


def write_page(folder: str | Path, before: fx.Graph, after: fx.Graph, report: Report) -> Path:
    """Write one HTML page with a graph before and after the pass. It needs no network and no other file.

    Args:
        folder: Where to write; made when it is not there.
        before: The graph before the pass (a copy).
        after: The graph after it.
        report: What the pass reported.

    Returns:
        The page's path, `<graph>-<phase>.html`, or with `-2`, `-3`, … when that name is taken.
    """
    pictures = _pictures(before, after, report)
    template = Template(Path(__file__).with_name("graph_page.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=html.escape(f"{report.graph} ({report.phase})"),
        totals=_totals(report),
        styles=_styles(),
        legend=_legend(),
        notice=f'<p class="notice">{html.escape(pictures.notice)}</p>' if pictures.notice else "",
        before=pictures.before,
        after=pictures.after,
        rows="\n".join(_row(number, remark) for number, remark in enumerate(report.remarks, 1)),
        report=html.escape(str(report)),
        before_text=_listing(before, report),
        after_text=_listing(after, report),
    )
    path = _write_new(Path(folder), _slug(f"{report.graph}-{report.phase}"), page)
    log.info("graph page of %s (%s): %s", report.graph, report.phase, path)
    return path


def _pictures(before: fx.Graph, after: fx.Graph, report: Report) -> _Pictures:
    """Both graphs as SVG, or as text when they cannot be drawn."""
    try:
        return _Pictures(_svg(to_dot(before, report)), _svg(to_dot(after, report)))
    except FileNotFoundError:
        notice = _NO_DOT
    except (subprocess.SubprocessError, OSError) as error:
        notice = f"'dot' could not draw the graphs, so they are shown as text: {error}"
    log.warning("asynctp: %s", notice)
    texts = [f'<pre class="listing">{_listing(graph, report)}</pre>' for graph in (before, after)]
    return _Pictures(texts[0], texts[1], notice)


def _svg(dot: str) -> str:
    """Draw with the `dot` program; only the `<svg>` element, without the XML header."""
    program = shutil.which("dot")
    if program is None:
        raise FileNotFoundError("dot")
    done = subprocess.run([program, "-Tsvg"], input=dot.encode(), capture_output=True, timeout=_DOT_TIMEOUT_S)
    if done.returncode:
        raise subprocess.SubprocessError(done.stderr.decode(errors="replace").strip()[-400:])
    text = done.stdout.decode()
    return text[text.index("<svg") :]


def _listing(graph: fx.Graph, report: Report) -> str:
    """The graph as coloured text: a line a node, members of a chain indented under its number."""
    view = _View.of(graph, report)
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder" and not node.users:
            continue
        outcome = view.outcome(node)
        marks = " ".join(f"#{number}" for number in _numbers(view, node))
        text = html.escape(f"    {marks:<6} {_statement(node)}" if outcome else _statement(node))
        lines.append(f'<span class="{outcome.lower()}">{text}</span>' if outcome else text)
    return "\n".join(lines)


def _styles() -> str:
    """CSS of the outcomes: of the chips, and of the lines of a listing."""
    lines = {outcome.lower(): line for outcome, (_, line, _) in _COLOURS.items()}
    chips = [f".chip.{name} {{ background: {line}; }}" for name, line in lines.items()]
    return "\n".join([*chips, *(f"pre .{name} {{ color: {line}; font-weight: 600; }}" for name, line in lines.items())])


def _legend() -> str:
    return "\n".join(
        f'<span class="key" style="background:{fill};border:1px solid {line}"></span>{outcome}: {html.escape(meaning)}'
        for outcome, (fill, line, meaning) in _COLOURS.items()
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
        f"{html.escape(remark.kind)}<br><small>{chain}</small>{source}",
        shapes,
        reason,
        remedy,
    ]
    return f'<tr data-remark="r{number}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.") or "graph"


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
