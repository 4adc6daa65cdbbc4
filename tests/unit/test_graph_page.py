"""Pages and pictures of graphs."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import typing
from pathlib import Path

import pytest
import torch
from dumps import CORPUS, load
from torch import fx

from asynctp_passes import ops
from asynctp_passes.reasons import Outcome
from asynctp_passes.reporting import graph_page
from asynctp_passes.reporting.graph_page import to_dot, write_page
from asynctp_passes.reporting.report import Remark, Report

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz' dot is not installed")

GATHER = ("all_gather_into_tensor", "wait_tensor", "split", "getitem", "getitem_1", "getitem_2", "getitem_3", "cat")
REPORT = Report(
    "block <0>",
    "forward",
    (
        Remark("FUSED", "all_gather_matmul", GATHER[0], nodes=GATHER, op="asynctp::all_gather_matmul"),
        Remark("MISSED", "matmul_reduce_scatter", "reduce_scatter_tensor", "ATP202", "PRODUCT", "a <b>", "do & so"),
        Remark("SKIPPED", "all_gather", "all_gather_into_tensor_1", "ATP002", "NO_MATMUL", "nothing", "none"),
    ),
)


@pytest.fixture
def graph() -> fx.Graph:
    return load(CORPUS / "torch2.13" / "block_sp_B2__0.txt").graph


def attributes(dot: str, name: str) -> str:
    match = re.search(rf'^  "{re.escape(name)}" \[(.*)\];$', dot, re.MULTILINE)
    assert match is not None, f"{name} is not drawn"
    return match[1]


def test_chains_are_coloured_by_outcome(graph: fx.Graph) -> None:
    dot = to_dot(graph, REPORT)
    for name in GATHER:
        assert "#c8e6c9" in attributes(dot, name)
        assert 'class="r1"' in attributes(dot, name)
    assert "#ffcdd2" in attributes(dot, "reduce_scatter_tensor")
    assert "#dcdcdc" in attributes(dot, "all_gather_into_tensor_1")
    assert "fillcolor" not in attributes(dot, "mm")
    assert '"all_gather_into_tensor" -> "wait_tensor" [color="#2e7d32"' in dot


@pytest.mark.parametrize("outcome", typing.get_args(Outcome))
def test_every_outcome_has_a_colour_of_its_own_and_a_key(outcome: Outcome, graph: fx.Graph, tmp_path: Path) -> None:
    report = Report("graph", "forward", (Remark(outcome, "all_gather", "all_gather_into_tensor"),))
    page = write_page(tmp_path, graph, graph, report).read_text(encoding="utf-8")
    legend = re.findall(r'<span class="key" style="background:(#\w+);border:1px solid (#\w+)"></span>([A-Z]+): ', page)
    colours = {name: (fill, line) for fill, line, name in legend}
    assert len(set(colours.values())) == len(colours) == 8
    fill, line = colours[outcome]
    assert f'fillcolor="{fill}", color="{line}"' in attributes(to_dot(graph, report), "all_gather_into_tensor")
    assert f".chip.{outcome.lower()} {{ background: {line}; }}" in page
    assert f'<span class="chip {outcome.lower()}">1 {outcome.lower()}</span>' in page


def test_long_graphs_are_folded(graph: fx.Graph) -> None:
    dot = to_dot(graph, REPORT)
    drawn = len(re.findall(r"^  \"[^\"]+\" \[", dot, re.MULTILINE))
    assert drawn < 0.75 * len(graph.nodes)
    assert '"output' not in dot
    assert 'penwidth="2.5"' in attributes(dot, "view_1")  # saved for the backward, so returned


@needs_dot
@pytest.mark.parametrize("name", ["block_sp_B2__0", "torchao_rowwise_block__1", "mlp_sp_uneven_seq__0"])
def test_dot_reads_it_and_it_has_no_cycles(name: str) -> None:
    dot = to_dot(load(CORPUS / "torch2.13" / f"{name}.txt").graph, Report(name, "forward", ()))
    done = subprocess.run(["dot", "-Tsvg"], input=dot, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert shutil.which("acyclic") is None or subprocess.run(["acyclic", "-n"], input=dot, text=True).returncode == 0


def test_a_page_needs_nothing_else(graph: fx.Graph, tmp_path: Path) -> None:
    page = write_page(tmp_path, graph, graph, REPORT).read_text(encoding="utf-8")
    namespaces = ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink")
    assert set(re.findall(r"https?://[^\"'<>\s]+", page)) <= set(namespaces)
    assert not re.search(r"<(link|img|iframe)|<script[^>]+src|@import|url\(", page)
    assert "ATP202 PRODUCT" in page
    assert "a &lt;b&gt;" in page
    assert "do &amp; so" in page
    assert "block &lt;0&gt;" in page


def test_pages_never_overwrite_each_other(graph: fx.Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_page.shutil, "which", lambda name: None)
    paths = [write_page(tmp_path / "new" / "folder", graph, graph, REPORT) for _ in range(3)]
    assert [path.name for path in paths] == [
        "block-0-forward.html",
        "block-0-forward-2.html",
        "block-0-forward-3.html",
    ]


def test_without_dot_the_page_is_text(
    graph: fx.Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graph_page.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING, logger="asynctp_passes"):
        page = write_page(tmp_path, graph, graph, REPORT).read_text(encoding="utf-8")
    for text in (page, caplog.text):
        assert "apt install graphviz" in text
        assert "brew install graphviz" in text
    assert "<svg" not in page
    assert '<span class="fused">    #1     all_gather_into_tensor = ' in page
    assert '<span class="missed">    #2     reduce_scatter_tensor = ' in page


def test_a_failing_dot_is_said(graph: fx.Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_page.shutil, "which", lambda name: "/bin/false")
    page = write_page(tmp_path, graph, graph, REPORT).read_text(encoding="utf-8")
    assert "could not draw the graphs" in page


def test_fused_ops_stand_out() -> None:
    graph = fx.Graph()
    shard, b = graph.placeholder("shard"), graph.placeholder("b")
    assert "all_gather_matmul" in ops.OPS
    op = torch.ops.asynctp.all_gather_matmul.default
    fused = graph.call_function(op, (shard, [b], [None], 0, False, 2, "0"), name="fused")
    fused.meta["asynctp_collective"] = REPORT.remarks[0].collective
    graph.output(fused)
    text = attributes(to_dot(graph, REPORT), "fused")
    assert 'fillcolor="#2e7d32"' in text
    assert 'class="r1"' in text
