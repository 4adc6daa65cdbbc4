"""The list of the graph pages in a folder, `index.html`, made of the row that each page holds in its head."""

from __future__ import annotations

import contextlib
import html
import json
import logging
import re
import time
from collections import Counter
from pathlib import Path
from string import Template

import torch

from asynctp_passes.reasons import Outcome
from asynctp_passes.reporting.files import write_whole
from asynctp_passes.reporting.report import Report
from asynctp_passes.torch_private import dynamo

log = logging.getLogger(__name__)

INDEX = "index.html"
_ROW = re.compile(r'<meta name="asynctp-row" content="([^"]*)">')
_MARK = '<meta name="asynctp-index" content="1">'
_HEAD = 1 << 18  # characters of a page in which its element is
_COUNTED: tuple[Outcome, ...] = ("FUSED", "MISSED", "SKIPPED")
_PAGE = "\0"  # in a row, the name of its page, which is not known before the page is written


def about(report: Report) -> tuple[str, str]:
    """A page that is written now, in this process, by the report of its graph.

    Returns:
        The function, the rank and the time, as far as they are known; and the element of the page's head with its row.
    """
    known, rank, written = dynamo.compiled_function(), _rank(), time.strftime("%Y-%m-%d %H:%M:%S")
    function = "" if known is None else known.name
    counts = Counter(remark.outcome for remark in report.remarks)
    shown = [counts[outcome] for outcome in _COUNTED]
    numbers = (*shown, counts.total() - sum(shown))
    missed = [(number, one.code) for number, one in enumerate(report.remarks, 1) if one.outcome == "MISSED"]
    links = " ".join(f'<a href="{_PAGE}#r{number}">{html.escape(code)}</a>' for number, code in missed)
    cells = [
        f'<td><a href="{_PAGE}">{html.escape(report.graph)}</a></td>',
        *(f"<td>{html.escape(text)}</td>" for text in (report.phase, function, "" if rank is None else str(rank))),
        f"<td>{written}</td>",
        *(
            f'<td class="{kind}{"" if count else " none"}">{count}</td>'
            for kind, count in zip(("fused", "missed", "skipped", "other"), numbers, strict=True)
        ),
        f"<td>{links}</td>",
    ]
    row = json.dumps([report.graph, written, numbers, f"<tr>{''.join(cells)}</tr>"])
    subtitle = ", ".join(part for part in (function, "" if rank is None else f"rank {rank}", written) if part)
    return subtitle, f'<meta name="asynctp-row" content="{html.escape(row)}">'


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
        found = []
        for path in pages:
            with contextlib.suppress(FileNotFoundError, TypeError, ValueError):  # it is gone, or of another version
                if (held := _ROW.search(_beginning(path))) is not None:
                    graph, written, (fused, missed, skipped, others), row = json.loads(html.unescape(held[1]))
                    key = _natural(graph), written, _natural(path.name), path.name
                    found.append((*key, (fused, missed, skipped, others), row))
        found.sort()
        template = Template(Path(__file__).with_name("graph_index.html").read_text(encoding="utf-8"))
        sums = [sum(numbers) for numbers in zip(*(one[-2] for one in found), strict=True)]
        index = template.substitute(
            mark=_MARK,
            totals=f"{len(found)} graph{'' if len(found) == 1 else 's'}",
            rows="\n".join(one[-1].replace(_PAGE, html.escape(one[3])) for one in found),
            sums="".join(f"<td>{number}</td>" for number in sums),
        )
        write_whole(place, index.encode("utf-8", errors="replace"))
        listed = pages


def _beginning(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_HEAD)


def _natural(text: str) -> list[tuple[int, str]]:
    """The key by which `graph-2` comes before `graph-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]
