"""The list of the graph pages in a folder, `index.html`, read from the pages themselves."""

from __future__ import annotations

import html
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import torch

from asynctp_passes.reporting.files import write_whole
from asynctp_passes.reporting.report import Report
from asynctp_passes.reporting.typed_json import read
from asynctp_passes.torch_private import dynamo

log = logging.getLogger(__name__)

INDEX = "index.html"
_META = re.compile(r'<meta name="asynctp-graph" content="([^"]*)">')
_MARK = '<meta name="asynctp-index" content="1">'
_HEAD = 65536  # characters of a page in which its element is
_COUNTED = ("FUSED", "MISSED", "SKIPPED")


@dataclass(frozen=True)
class About:
    """A page in a few values, which it holds in an element of its head.

    Attributes:
        graph: Name of the graph, as `"graph 0/0"`.
        phase: `"forward"`, `"backward"` or `"inference"`.
        function: The function that was compiled, with its file and line; empty where it is not known.
        rank: The process's rank; None without a process group.
        written: Local date and time.
        counts: Number of its collectives by outcome.
        misses: Of each that was missed, its code by the number of its remark.
    """

    graph: str
    phase: str
    function: str = ""
    rank: int | None = None
    written: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    misses: dict[str, str] = field(default_factory=dict)

    @classmethod
    def now(cls, report: Report) -> About:
        """Values of a page that is written now, in this process."""
        function = dynamo.compiled_function()
        return cls(
            graph=report.graph,
            phase=report.phase,
            function="" if function is None else function.name,
            rank=_rank(),
            written=time.strftime("%Y-%m-%d %H:%M:%S"),
            counts=dict(Counter(remark.outcome for remark in report.remarks)),
            misses={str(n): one.code for n, one in enumerate(report.remarks, 1) if one.outcome == "MISSED"},
        )

    @property
    def subtitle(self) -> str:
        """The function, the rank and the time, as far as they are known."""
        rank = "" if self.rank is None else f"rank {self.rank}"
        return ", ".join(part for part in (self.function, rank, self.written) if part)

    def to_meta(self) -> str:
        """The element."""
        return f'<meta name="asynctp-graph" content="{html.escape(json.dumps(asdict(self)))}">'

    @classmethod
    def in_page(cls, page: str) -> About | None:
        """Read it from the beginning of a page; None for one of another program, or of another version."""
        found = _META.search(page)
        if found is None:
            return None
        try:
            about: About = read(cls, json.loads(html.unescape(found[1])), "the page")
        except ValueError:
            return None
        return about


def _rank() -> int | None:
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if known else None


def write_index(folder: Path) -> None:
    """Write `index.html` of a folder, in whose place there is a whole one at any time. One of another program stays.

    Other processes may write pages and the index at the same time: it is written until it lists what is there.

    Raises:
        OSError: It cannot be written, or a page cannot be read.
    """
    place = folder / INDEX
    if place.exists() and _MARK not in _beginning(place):
        log.info("%s is no list of graph pages, so it stays as it is", place)
        return
    listed: list[Path] | None = None
    while (pages := sorted(path for path in folder.glob("*.html") if path.name != INDEX)) != listed:
        found = [(path.name, about) for path in pages if (about := _about(path)) is not None]
        found.sort(key=lambda one: (_natural(one[1].graph), one[1].written, _natural(one[0])))
        write_whole(place, _index(found).encode("utf-8", errors="replace"))
        listed = pages


def _about(path: Path) -> About | None:
    """Read what a page tells of its graph; None for a page of another program, and for one that is gone by now."""
    try:
        return About.in_page(_beginning(path))
    except FileNotFoundError:
        return None


def _beginning(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_HEAD)


def _natural(text: str) -> list[tuple[int, str]]:
    """The key by which `graph-2` comes before `graph-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def _index(found: Sequence[tuple[str, About]]) -> str:
    template = Template(Path(__file__).with_name("graph_index.html").read_text(encoding="utf-8"))
    totals: Counter[str] = Counter()
    for _, about in found:
        totals.update(about.counts)
    return template.substitute(
        mark=_MARK,
        totals=f"{len(found)} graph{'' if len(found) == 1 else 's'}",
        rows="\n".join(_row(name, about) for name, about in found),
        sums="".join(f"<td>{count}</td>" for count in _columns(totals)),
    )


def _columns(counts: Any) -> tuple[int, ...]:
    """Fused, missed, skipped, and all others."""
    shown = [counts.get(outcome, 0) for outcome in _COUNTED]
    return *shown, sum(counts.values()) - sum(shown)


def _row(name: str, about: About) -> str:
    link = html.escape(name)
    misses = " ".join(f'<a href="{link}#r{number}">{html.escape(code)}</a>' for number, code in about.misses.items())
    numbers = "".join(
        f'<td class="{outcome}{"" if count else " none"}">{count}</td>'
        for outcome, count in zip(("fused", "missed", "skipped", "other"), _columns(about.counts), strict=True)
    )
    texts = (about.phase, about.function, "" if about.rank is None else str(about.rank), about.written)
    cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
    return f'<tr><td><a href="{link}">{html.escape(about.graph)}</a></td>{cells}{numbers}<td>{misses}</td></tr>'
