"""Pages and pictures of graphs, and the list of a folder's pages."""

from __future__ import annotations

import hashlib
import html
import json
import logging
import re
import shutil
import subprocess
import typing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from dumps import CORPUS, load
from torch import Tensor, fx, nn

from asynctp_passes import backend, ops
from asynctp_passes.reasons import Outcome
from asynctp_passes.reporting import graph_index, graph_page
from asynctp_passes.reporting.graph_index import INDEX, write_index
from asynctp_passes.reporting.graph_page import InputName, Names, picture, write_page
from asynctp_passes.reporting.report import Remark, Report
from asynctp_passes.torch_private import dynamo

DAGRE = Path(graph_page.__file__).with_name("dagre")
GATHER = ("all_gather_into_tensor", "wait_tensor", "split", "getitem", "getitem_1", "getitem_2", "getitem_3", "cat")
REPORT = Report(
    "block <0>",
    "forward",
    (
        Remark("FUSED", "all_gather_matmul", GATHER[0], nodes=GATHER, op="asynctp::all_gather_matmul", module="up"),
        Remark("MISSED", "matmul_reduce_scatter", "reduce_scatter_tensor", "ATP202", "PRODUCT", "a <b>", "do & so"),
        Remark("SKIPPED", "all_gather", "all_gather_into_tensor_1", "ATP002", "NO_MATMUL", "nothing", "none"),
    ),
)


@pytest.fixture
def graph() -> fx.Graph:
    return load(CORPUS / "torch2.13" / "block_sp_B2__0.txt").graph


def box(drawn: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [one for one in drawn["boxes"] if one["id"] == name]
    return found


def in_page(page: str) -> dict[str, Any]:
    """The pictures that a page holds."""
    found = re.search(r'<script type="application/json" id="pictures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    drawn: dict[str, Any] = json.loads(found[1])
    return drawn


# --- pictures --------------------------------------------------------------------------------------------------
def test_chains_are_coloured_by_outcome(graph: fx.Graph) -> None:
    drawn = picture(graph, REPORT)
    for name in GATHER:
        assert (box(drawn, name)["outcome"], box(drawn, name)["remarks"]) == ("FUSED", (1,))
    assert box(drawn, "reduce_scatter_tensor")["outcome"] == "MISSED"
    assert box(drawn, "all_gather_into_tensor_1")["outcome"] == "SKIPPED"
    assert box(drawn, "mm")["outcome"] is None
    assert ["all_gather_into_tensor", "wait_tensor", "FUSED"] in drawn["edges"]
    assert box(drawn, "all_gather_into_tensor")["head"] == "all_gather_into_tensor  #1"


@pytest.mark.parametrize("outcome", typing.get_args(Outcome))
def test_every_outcome_has_colours_of_its_own_and_a_key(outcome: Outcome, graph: fx.Graph, tmp_path: Path) -> None:
    report = Report("graph", "forward", (Remark(outcome, "all_gather", "all_gather_into_tensor"),))
    page = write_page(tmp_path, graph, graph, report).read_text(encoding="utf-8")
    styles = re.findall(r"^\.([a-z]+) \{ --fill: (#\w{6}); --stroke: (#\w{6}); \}$", page, re.MULTILINE)
    assert len(styles) == 16, "eight outcomes, in light and in dark"
    assert len({colours for _, *pair in styles for colours in [tuple(pair)]}) == 16
    assert [name for name, *_ in styles].count(outcome.lower()) == 2
    assert re.findall(r'<span class="key (\w+)"></span>([A-Z]+): ', page) == [(outcome.lower(), outcome)]
    assert f'<span class="chip {outcome.lower()}">1 {outcome.lower()}</span>' in page
    assert box(in_page(page)["before"], "all_gather_into_tensor")["outcome"] == outcome


def test_long_graphs_are_folded(graph: fx.Graph) -> None:
    drawn = picture(graph, REPORT)
    assert len(drawn["boxes"]) < 0.75 * len(graph.nodes)
    assert not [one for one in drawn["boxes"] if one["id"].startswith("output")]
    assert box(drawn, "view_1")["returned"], "saved for the backward"
    assert not box(drawn, "wait_tensor")["returned"]


@pytest.mark.parametrize("path", sorted((CORPUS / "torch2.13").glob("*.txt")), ids=lambda path: path.stem)
def test_every_graph_is_drawn_without_cycles(path: Path) -> None:
    drawn = picture(load(path).graph, Report(path.stem, "forward", ()))
    names = [one["id"] for one in drawn["boxes"]]
    assert len(set(names)) == len(names) > 0
    ends = [(first, second) for first, second, _ in drawn["edges"]]
    assert {name for pair in ends for name in pair} <= set(names)
    left = set(names)
    while ready := {name for name in left if not any(b == name and a in left for a, b in ends)}:
        left -= ready
    assert not left


def test_fused_ops_stand_out() -> None:
    graph = fx.Graph()
    shard, b = graph.placeholder("shard"), graph.placeholder("b")
    assert "all_gather_matmul" in ops.OPS
    op = torch.ops.asynctp.all_gather_matmul.default
    fused = graph.call_function(op, (shard, [b], [None], 0, False, 2, "0"), name="fused")
    fused.meta["asynctp_collective"] = REPORT.remarks[0].collective
    graph.output(fused)
    found = box(picture(graph, REPORT), "fused")
    assert (found["kind"], found["outcome"], found["remarks"]) == ("fused", "FUSED", (1,))
    assert found["module"] == "up", "of the chain that it replaced"


# --- names -------------------------------------------------------------------------------------------------------
def weights(kept: bool = False) -> fx.Graph:
    """A matmul with a rearranged weight, which is returned too if it is kept, and a product with another."""
    graph = fx.Graph()
    x, w, scale, size = (graph.placeholder(name) for name in ("x", "primals_2", "primals_3", "s0"))
    for node, shape in ((x, (4, 8)), (w, (6, 8)), (scale, (6,))):
        node.meta["val"] = torch.empty(shape, device="meta")
    size.meta["val"] = 4
    turned = graph.call_function(torch.ops.aten.permute.default, (w, [1, 0]), name="permute")
    turned.meta["val"] = torch.empty(8, 6, device="meta")
    product = graph.call_function(torch.ops.aten.mm.default, (x, turned), name="mm")
    graph.call_function(torch.ops.aten.view.default, (product, [size, 6]), name="unused")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (product, scale), name="mul"), *[turned] * kept))
    return graph


NAMES = {"x": InputName("x"), "primals_2": InputName("up.weight", True), "primals_3": InputName("norm.weight", True)}


def test_weights_are_named_in_the_boxes_that_read_them() -> None:
    drawn = picture(weights(), REPORT, NAMES)
    assert {one["id"] for one in drawn["boxes"]} == {"x", "mm", "mul", "unused"}
    assert box(drawn, "mm")["weights"] == ["permute(up.weight)  f32[8, 6]"]
    assert box(drawn, "mul")["weights"] == ["norm.weight  f32[6]"]
    assert (box(drawn, "x")["kind"], box(drawn, "x")["weights"]) == ("input", [])
    assert sorted(drawn["edges"]) == [["mm", "mul", None], ["mm", "unused", None], ["x", "mm", None]]


def test_a_weight_that_others_need_rearranged_has_a_box() -> None:
    drawn = picture(weights(kept=True), REPORT, NAMES)
    assert box(drawn, "permute")["weights"] == ["up.weight  f32[6, 8]"]
    assert box(drawn, "permute")["returned"]
    assert box(drawn, "mm")["weights"] == []


def test_inputs_without_a_name_keep_that_of_their_node() -> None:
    drawn = picture(weights(), REPORT)
    assert box(drawn, "primals_2")["head"] == "primals_2"
    assert box(drawn, "mm")["weights"] == []


class Model(nn.Module):
    """Two layers, one in a list; a buffer; an argument in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.last = nn.Linear(4, 4, bias=False)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
        return self.last(torch.relu(self.layers[0](x)) + self.offset) * more[0]


@pytest.fixture
def drawn_graphs(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, InputName]]:
    """The names of inputs in the graphs that are compiled, by phase: none of them communicates, so there is no page."""
    found: dict[str, dict[str, InputName]] = {}

    def publish(
        report: Report, config: Any, before: Any = None, after: Any = None, *, names: Any = None, **_: Any
    ) -> None:
        found[report.phase] = names.of_graph(before)
        if report.phase == "forward":
            names.save(before, found["forward"])

    monkeypatch.setattr(backend, "_publish", publish)
    return found


@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "checkpointed"])
def test_names_of_a_compiled_module(drawn_graphs: dict[str, Any], tmp_path: Path, wrapped: bool) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch._dynamo.reset()
    model = Model()
    if wrapped:
        model.layers[0] = checkpoint_wrapper(model.layers[0])
    options = {"graph_dir": str(tmp_path), "fx_graph_cache": False}
    compiled = torch.compile(model, backend="asynctp", options=options)
    compiled(torch.randn(2, 4, requires_grad=True), [torch.randn(2, 4)]).sum().backward()
    held = {name.text for name in drawn_graphs["forward"].values() if name.held}
    assert held == {"layers.0.weight", "layers.0.bias", "last.weight", "offset"}
    assert {name.text for name in drawn_graphs["forward"].values() if not name.held} == {"x", "more[0]"}
    backward = list(drawn_graphs["backward"].values())
    assert any(name.held and "last.weight" in name.text for name in backward)


def test_names_of_a_closure(drawn_graphs: dict[str, Any], tmp_path: Path) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        options = {"graph_dir": str(tmp_path), "fx_graph_cache": False}
        torch.compile(lambda x: layer(x), backend="asynctp", options=options)(torch.randn(2, 4))
    assert set(drawn_graphs["inference"].values()) == {InputName("weight", True), InputName("x")}


def test_a_graph_of_no_compiler_has_no_names() -> None:
    assert Names().of_graph(weights()) == {}


# --- pages -------------------------------------------------------------------------------------------------------
def test_a_page_needs_nothing_else(graph: fx.Graph, tmp_path: Path) -> None:
    page = write_page(tmp_path, graph, graph, REPORT).read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"'<>\s]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|iframe)\b|<script[^>]+src|@import|url\(|sourceMappingURL", page)
    assert set(re.findall(r'href="([^"]*)"', page)) == {INDEX}
    assert "ATP202 PRODUCT" in page
    assert "a &lt;b&gt;" in page
    assert "do &amp; so" in page
    assert "block &lt;0&gt;" in page
    assert "prefers-color-scheme: dark" in page


def test_a_page_is_whole(graph: fx.Graph, tmp_path: Path) -> None:
    """Elements are closed in their order, whatever names and messages hold."""
    odd = Remark(
        "MISSED", "all_gather", "all_gather_into_tensor", "ATP202", "X", "</script><b>&", "$ ${x}", module="a<b"
    )
    page = write_page(tmp_path, graph, graph, Report("</script>", "forward", (odd,))).read_text(encoding="utf-8")
    empty = {"meta", "br", "link"}
    open_now: list[str] = []

    class Elements(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            open_now.extend(set() if tag in empty else {tag})

        def handle_endtag(self, tag: str) -> None:
            assert open_now.pop() == tag

    reader = Elements()
    reader.feed(page)
    reader.close()
    assert open_now == []
    assert page.count("</script>") == 3
    assert not re.search(r"\$(styles|legend|layout|pictures|rows)", page)
    assert "</script><b>&" in box(in_page(page)["before"], "all_gather_into_tensor")["tip"]


def test_a_page_has_the_graphs_as_text(graph: fx.Graph, tmp_path: Path) -> None:
    page = write_page(tmp_path, graph, graph, REPORT).read_text(encoding="utf-8")
    assert "<noscript>" in page
    assert '<span class="fused">    #1     all_gather_into_tensor = ' in page
    assert '<span class="missed">    #2     reduce_scatter_tensor = ' in page


def test_the_layout_is_the_one_that_is_named(graph: fx.Graph, tmp_path: Path) -> None:
    program, told = (DAGRE / "dagre.min.js").read_bytes(), (DAGRE / "README.md").read_text()
    assert f"`{hashlib.sha256(program).hexdigest()}`" in told
    version = re.search(r"# dagre (\S+)", told)
    assert version is not None
    assert f'"{version[1]}"' in program.decode()
    page = write_page(tmp_path, graph, graph, REPORT).read_text(encoding="utf-8")
    assert (DAGRE / "LICENSE").read_text().strip() in page
    assert "Permission is hereby granted, free of charge" in page


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("place", ["", "#r2"], ids=["whole", "chain"])
def test_a_browser_draws_it(graph: fx.Graph, tmp_path: Path, place: str) -> None:
    page = write_page(tmp_path, graph, graph, REPORT)
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri() + place], capture_output=True, text=True, timeout=120)
    drawn = in_page(page.read_text(encoding="utf-8"))["before"]
    (svg,) = re.findall(r'data-graph="before"><svg.*?</svg>', done.stdout, re.DOTALL)
    assert svg.count('<g class="box ') == len(drawn["boxes"])
    assert svg.count('<g class="edge') == len(drawn["edges"])
    assert svg.count('data-remarks="2"') == 1
    assert done.stdout.count('<tr data-remark="2" tabindex="0" class="on">') == (place == "#r2")


CLICK = """<script>
{
document.getElementById("whole").click();
document.querySelector('tr[data-remark="1"]').click();
const pane = document.querySelector(".before svg"), frame = pane.getBoundingClientRect();
const fits = box => {
  const r = box.getBoundingClientRect();
  return r.left >= frame.left && r.right <= frame.right && r.top >= frame.top && r.bottom <= frame.bottom;
};
const members = [...pane.querySelectorAll('[data-remarks~="1"] rect')];
document.body.dataset.fit = `${members.filter(fits).length} of ${members.length}`;
document.body.dataset.scale = members[0].getBoundingClientRect().height / members[0].height.baseVal.value;
}
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_click_fits_the_whole_chain(graph: fx.Graph, tmp_path: Path) -> None:
    page = write_page(tmp_path, graph, graph, REPORT)
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", CLICK), encoding="utf-8")
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert f'data-fit="{len(GATHER)} of {len(GATHER)}"' in done.stdout
    scale = re.search(r'data-scale="([\d.]+)"', done.stdout)
    assert scale is not None
    assert 0.4 < float(scale[1]) <= 1.51, "large enough to read"


def test_pages_never_overwrite_each_other(graph: fx.Graph, tmp_path: Path) -> None:
    paths = [write_page(tmp_path / "new" / "folder", graph, graph, REPORT) for _ in range(3)]
    assert [path.name for path in paths] == [
        "block-0-forward.html",
        "block-0-forward-2.html",
        "block-0-forward-3.html",
    ]


# --- the list of a folder's pages ----------------------------------------------------------------------------------
def listed(folder: Path) -> list[list[str]]:
    """The cells of the rows of a folder's list, without their elements."""
    rows = re.findall(r"<tr>(<td>.*?)</tr>", (folder / INDEX).read_text(encoding="utf-8"))
    return [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td.*?</td>", row)] for row in rows]


def test_a_folder_has_a_list_of_its_pages(graph: fx.Graph, tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("of another program")
    for number, row in enumerate(("{", "[]", "[1, 2, 3]", '["g", "today", 1, "row"]')):
        held = f'<meta name="asynctp-row" content="{html.escape(row)}">'
        (tmp_path / f"mine-{number}.html").write_text(f"of another version{held}")
    for name, phase in (("graph 10/0", "forward"), ("graph 2/0", "forward"), ("graph 2/0", "backward")):
        write_page(tmp_path, graph, graph, Report(name, phase, REPORT.remarks))
    rows = listed(tmp_path)
    assert [row[0] for row in rows] == ["graph 2/0", "graph 2/0", "graph 10/0"]
    assert sorted(row[1] for row in rows) == ["backward", "forward", "forward"]
    assert [row[5:] for row in rows] == [["1", "1", "1", "0", "ATP202"]] * 3
    index = (tmp_path / INDEX).read_text(encoding="utf-8")
    assert '<th colspan="5">all</th><td>3</td><td>3</td><td>3</td><td>0</td>' in index
    assert '<a href="graph-2-0-backward.html#r2">ATP202</a>' in index
    assert "mine" not in index
    assert all((tmp_path / name).exists() for name in re.findall(r'href="([^"#]+)', index))


@pytest.mark.parametrize(("rank", "said"), [(3, "m.py:step:1, rank 3, "), (0, "m.py:step:1, rank 0, "), (None, "")])
def test_a_page_and_its_row_say_whose_it_is(rank: int | None, said: str, graph: fx.Graph, tmp_path: Path) -> None:
    function = None if rank is None else dynamo.CompiledFunction("m.py:step:1", "m.py:step:1")
    with (
        mock.patch.object(graph_index, "_rank", return_value=rank),
        mock.patch.object(graph_index.time, "strftime", return_value="today"),
        mock.patch.object(dynamo, "compiled_function", return_value=function),
    ):
        page = write_page(tmp_path, graph, graph, REPORT).read_text(encoding="utf-8")
    assert f"<p>{said}today &nbsp;" in page
    named = ["", ""] if rank is None else ["m.py:step:1", str(rank)]
    assert listed(tmp_path) == [["block &lt;0&gt;", "forward", *named, "today", "1", "1", "1", "0", "ATP202"]]


def test_an_index_of_another_program_stays(graph: fx.Graph, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / INDEX).write_text("<h1>my site</h1>")
    with caplog.at_level(logging.INFO, logger="asynctp_passes"):
        write_page(tmp_path, graph, graph, REPORT)
    assert (tmp_path / INDEX).read_text() == "<h1>my site</h1>"
    assert f"{tmp_path / INDEX} is no list of graph pages" in caplog.text


def test_a_page_that_comes_while_the_list_is_written_is_listed(
    graph: fx.Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_page(tmp_path, graph, graph, REPORT)
    later, real = tmp_path / "later.html", graph_index.write_whole

    def slow(path: Path, data: bytes) -> None:
        if not later.exists():
            later.write_text(first.read_text())
        real(path, data)

    monkeypatch.setattr(graph_index, "write_whole", slow)
    write_index(tmp_path)
    assert len(listed(tmp_path)) == 2
