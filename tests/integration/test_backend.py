"""The backend end to end: on real ranks it computes what eager does, with every chain fused; alone, its surroundings.

The tests on ranks start one set of processes for all of their cases, since starting costs more than a case.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import backend_cases
import pytest
import serving_ops
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled_training import (
    NEWER_THAN_2_11,
    PLAIN_HITS,
    STRICT,
    Outcome,
    compiled,
    plain_layer,
    run_cases,
    shard_of,
    start,
    train,
)
from profiles import of_profile
from ranks import imagined_ranks, run_ranks
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import asynctp_passes
from asynctp_passes import (
    AsyncTPPass,
    Config,
    ConfigError,
    DisagreementError,
    GroupError,
    RematerializePartitioner,
    RematerializePass,
    Report,
    StrictError,
    backend,
    pipeline,
)
from asynctp_passes.remat import joint
from asynctp_passes.torch_private import dynamo

CASES = of_profile(backend_cases.CASES, set(backend_cases.CASES) - set(backend_cases.OF_KINDS_SHOWN))

# --- on ranks ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of Inductor's caches, empty at first, for the ranks of this module."""
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, cache_folder: Path) -> list[dict[str, Outcome]]:
    """The outcomes of all selected cases on two ranks, and of `cache_filled`."""
    selected = {item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in CASES if name in selected or name == "cache_filled"]
    return run_ranks(2, run_cases, names, timeout_s=600)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(two_ranks: list[dict[str, Outcome]], case: str) -> None:
    """See the function `case_…` of backend_cases."""
    check_ranks([outcomes[case] for outcomes in two_ranks])


@pytest.mark.ranks
def test_cache_of_another_process(two_ranks: list[dict[str, Outcome]], cache_folder: Path) -> None:
    """A second pair of processes compiles nothing, computes the same, and has the same reports."""
    filled = [outcomes["cache_filled"] for outcomes in two_ranks]
    found = [outcomes["cache_of_other_process"] for outcomes in run_ranks(2, run_cases, ["cache_of_other_process"])]
    check_ranks(filled)
    check_ranks(found)
    for first, second in zip(filled, found, strict=True):
        assert first.facts["pid"] != second.facts["pid"]
        assert first.facts["uuid"] == second.facts["uuid"]
        assert [report.from_cache for report in (*first.reports, *second.reports)] == [False, False, True, True]
        assert [report.remarks for report in first.reports] == [report.remarks for report in second.reports]


@pytest.mark.ranks
def test_second_mesh_dimension_on_four_ranks(cache_folder: Path) -> None:
    """Gathers of weights over the other dimension are left alone; what is fused there otherwise is right."""
    outcomes = run_ranks(4, run_cases, backend_cases.GRID_CASES, timeout_s=300)
    enrolled, automatic = backend_cases.GRID_CASES
    for case in backend_cases.GRID_CASES:
        check_ranks([outcome[case] for outcome in outcomes])
    for rank in outcomes:
        assert summary(rank[enrolled]) == {
            "forward": {"FUSED tp": 2, "ATP001 dp": 2},
            "backward": {"FUSED tp": 2, "ATP001 dp": 2},
        }
        assert summary(rank[automatic]) == {
            "forward": {"FUSED tp": 2, "ATP003 dp": 2},
            "backward": {"FUSED tp": 2, "ATP009 dp": 2},  # the weights' gradients: matmul → reduce-scatter
        }


def check_ranks(outcomes: list[Outcome]) -> None:
    """Fail with what a rank says, or skip when torch cannot run the case."""
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
    if errors:
        pytest.fail("\n".join(errors))
    if outcomes[0].not_runnable:
        pytest.skip(f"plain Inductor neither: {outcomes[0].not_runnable[:200]}")
    plans = {tuple(report.plan_digest for report in outcome.reports) for outcome in outcomes}
    assert len(plans) == 1, "ranks decided differently"


def summary(outcome: Outcome) -> dict[str, dict[str, int]]:
    """Counts of remarks by phase, by what became of them, and by the dimension of the mesh."""
    dims = outcome.facts["dims"]
    counts: dict[str, dict[str, int]] = {}
    for report in outcome.reports:
        found = (f"{remark.code or remark.outcome} {dims[remark.group]}" for remark in report.remarks)
        counts[report.phase] = dict(Counter(found))
    return counts


# --- in one process, over a fake group of four ------------------------------------------------------------
@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For the tests in this process: empty caches, no reports, no compiled code."""
    if request.node.get_closest_marker("ranks") is None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        start()
    yield
    torch._dynamo.reset()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks, of which this process is the first and the others do not exist: results mean nothing."""
    with imagined_ranks(4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def gather_matmul(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Rows gathered, then multiplied."""
    group, weight = mesh.get_group(), torch.ones(16, 8)

    def program(x: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, group) @ weight

    return program


def step(mesh: DeviceMesh, **kwargs: Any) -> tuple[Report, ...]:
    """Compile two layers anew, train one step, and return the reports of that."""
    start()
    layer, weights = plain_layer(mesh)
    train(compiled(layer, **kwargs), shard_of(mesh, 2, 4, 16), weights)
    return asynctp_passes.reports()


def hits() -> tuple[int, int]:
    """How many graphs came from Inductor's cache since the last `start`, and programs from AOTAutograd's."""
    return counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]


def test_fake_group(mesh: DeviceMesh) -> None:
    """What a compile for many ranks will do can be seen on one machine."""
    forward, backward = step(mesh)
    assert [remark.kind for remark in forward.fused] == ["all_gather_matmul", "matmul_reduce_scatter"]
    assert [remark.group_size for remark in (*forward.fused, *backward.fused)] == [4] * 4
    assert not (*forward.missed, *forward.others, *backward.missed, *backward.others)


class Spy(CustomGraphPass):
    """A pass of the user's: keeps the ops it sees, and Inductor's options at that time."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.options: dict[str, Any] = {}

    def __call__(self, graph: fx.Graph) -> None:
        self.targets += [str(node.target) for node in graph.nodes if node.op == "call_function"]
        self.options = torch._inductor.config.get_config_copy()

    def uuid(self) -> str:
        return "spy"


def assert_before_ours(spy: Spy) -> None:
    assert "_c10d_functional.all_gather_into_tensor.default" in spy.targets
    assert not any("asynctp" in target for target in spy.targets)
    (report,) = asynctp_passes.reports()
    assert len(report.fused) == 1


def test_own_pass_in_config(mesh: DeviceMesh) -> None:
    spy = Spy()
    with torch._inductor.config.patch(post_grad_custom_post_pass=spy):
        compiled(gather_matmul(mesh))(torch.ones(4, 16))
        assert torch._inductor.config.post_grad_custom_post_pass is spy
    assert_before_ours(spy)


@pytest.mark.parametrize("several", [False, True])
def test_own_pass_in_options(mesh: DeviceMesh, several: bool) -> None:
    spy = Spy()
    own: Any = [Spy(), spy, AsyncTPPass()] if several else spy
    compiled(gather_matmul(mesh), options={**STRICT, "post_grad_custom_post_pass": own})(torch.ones(4, 16))
    assert_before_ours(spy)


def test_own_pass_that_asks_for_the_phase(mesh: DeviceMesh) -> None:
    custom_graph_pass = pytest.importorskip("torch._inductor.custom_graph_pass")
    if not hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"):
        pytest.skip("this torch has no CustomInferenceAwareGraphPass")
    seen = []

    class Aware(custom_graph_pass.CustomInferenceAwareGraphPass):  # type: ignore[misc,name-defined]
        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            seen.append(is_inference)

        def uuid(self) -> None:
            return None

    with torch._inductor.config.patch(post_grad_custom_post_pass=Aware()):
        step(mesh)
        compiled(gather_matmul(mesh))(torch.ones(4, 16))
    assert seen == [False, False, True]


def test_inductor_options_pass_through(mesh: DeviceMesh) -> None:
    spy = Spy()
    options = {
        **STRICT,
        "post_grad_custom_post_pass": spy,
        "triton.unique_kernel_names": False,
        "realize-reads-threshold": 3,
    }
    compiled(gather_matmul(mesh), options=options)(torch.ones(4, 16))
    assert spy.options["triton.unique_kernel_names"] is False
    assert spy.options["realize_reads_threshold"] == 3
    assert_before_ours(spy)


@pytest.mark.parametrize(("asked", "padded"), [({}, False), ({"shape_padding": True}, True)])
def test_matmuls_are_padded_only_where_asked(mesh: DeviceMesh, asked: dict[str, bool], padded: bool) -> None:
    """Each rank would time for itself whether padding pays, and have another graph than its peers."""
    spy = Spy()
    compiled(gather_matmul(mesh), options={**STRICT, **asked, "post_grad_custom_post_pass": spy})(torch.ones(4, 16))
    assert spy.options["shape_padding"] is padded


@pytest.mark.parametrize(
    ("mode", "option"), [("reduce-overhead", "triton.cudagraphs"), ("max-autotune-no-cudagraphs", "max_autotune")]
)
def test_modes_pass_through(mesh: DeviceMesh, mode: str, option: str) -> None:
    spy = Spy()
    with torch._inductor.config.patch(post_grad_custom_post_pass=spy):
        torch.compile(gather_matmul(mesh), backend="asynctp", mode=mode, dynamic=False)(torch.ones(4, 16))
    assert spy.options[option] is True
    assert_before_ours(spy)


def test_cuda_graphs_with_options(mesh: DeviceMesh) -> None:
    """torch.compile takes a mode or options; with options, CUDA graphs are asked for by the mode's own."""
    spy = Spy()
    options = {**STRICT, "post_grad_custom_post_pass": spy, "triton.cudagraphs": True}
    compiled(gather_matmul(mesh), options=options)(torch.ones(4, 16))
    assert spy.options["triton.cudagraphs"] is True
    assert_before_ours(spy)


def test_a_reset_forgets_cuda_graphs(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Inductor itself: graphs of code that is forgotten are not kept, with their memory."""
    from torch._inductor import cudagraph_trees

    called: list[str] = []
    monkeypatch.setattr(cudagraph_trees, "reset_cudagraph_trees", lambda: called.append("reset"))
    torch._dynamo.reset()
    called.clear()
    compiled(gather_matmul(mesh))(torch.ones(4, 16))
    torch._dynamo.reset()
    assert called == ["reset"]


def cause(error: BaseException) -> BaseException:
    """What torch has wrapped."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return error if inner is None else cause(inner)


def test_unknown_option(mesh: DeviceMesh) -> None:
    with pytest.raises(Exception, match=r"'strickt' is not valid.*'min_bytes'.*Inductor option") as raised:
        compiled(gather_matmul(mesh), options={"strickt": "all"})(torch.ones(4, 16))
    assert isinstance(cause(raised.value), ConfigError)


def test_inductors_options_have_types() -> None:
    """As with backend="inductor": a text is no bool, and "False" would be true."""
    with pytest.raises(ConfigError, match=r"coordinate_descent_tuning='False' is not valid.*type bool.*type str"):
        backend.split_options({"coordinate_descent_tuning": "False"})
    patches = {
        "coordinate_descent_tuning": True,
        "max_autotune_gemm_backends": "ATEN",
        "post_grad_custom_pre_pass": print,
    }
    assert backend.split_options(patches) == (Config(), patches)


def test_our_options_with_dashes() -> None:
    """As torch.compile allows for Inductor's."""
    config, patches = backend.split_options({"min-bytes": 7, "shape-padding": True})
    assert (config.min_bytes, patches) == (7, {"shape_padding": True})


def test_bad_value(mesh: DeviceMesh) -> None:
    with pytest.raises(Exception, match="strict='some' is not valid") as raised:
        compiled(gather_matmul(mesh), options={"strict": "some"})(torch.ones(4, 16))
    assert isinstance(cause(raised.value), ConfigError)


def test_passes_turned_off(mesh: DeviceMesh) -> None:
    """Inductor would not run the pass: an error rather than a program that is silently not fused."""
    if "use_post_grad_passes" not in torch._inductor.list_options():
        pytest.skip("this torch cannot turn post-grad passes off")
    with pytest.raises(Exception, match="use_post_grad_passes") as raised:
        compiled(gather_matmul(mesh), options={"use_post_grad_passes": False})(torch.ones(4, 16))
    assert isinstance(cause(raised.value), ConfigError)


def test_strict_raises_on_every_compile(mesh: DeviceMesh) -> None:
    """Sums of rows between the gather and the matmul: the code reaches the user, and no cache hides it."""
    group, weight = mesh.get_group(), torch.ones(16, 8)

    def program(x: Tensor) -> Tensor:
        whole = funcol.all_gather_tensor(x, 0, group)
        return (whole * whole.sum(-1, keepdim=True)) @ weight

    for _ in range(2):
        start()
        with pytest.raises(torch._inductor.exc.InductorError, match="ATP105") as raised:
            compiled(program)(torch.ones(4, 16))
        error = raised.value.inner_exception
        assert isinstance(error, StrictError)
        assert error.report is not None
        assert [remark.code for remark in error.report.missed] == ["ATP105"]
        assert asynctp_passes.reports() == (error.report,)
        assert hits() == (0, 0)


# --- caches and reports -----------------------------------------------------------------------------------
def test_cached_graphs_bring_their_reports(mesh: DeviceMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drawn = {**STRICT, "graph_dir": str(tmp_path / "graphs")}
    first = step(mesh, options=drawn)
    assert hits() == (0, 0)
    with caplog.at_level(logging.INFO, logger="asynctp_passes"):
        second = step(mesh, options={**drawn, "report_file": str(tmp_path / "new" / "reports")})
    assert hits() == (2, PLAIN_HITS)
    assert [report.from_cache for report in (*first, *second)] == [False, False, True, True]
    assert [report.remarks for report in first] == [report.remarks for report in second]
    written = [Report.from_json(line) for line in (tmp_path / "new" / "reports").read_text().splitlines()]
    assert written == list(second)
    assert "(forward, from Inductor's cache): 2 of 2 chains fused" in caplog.text
    assert "there is no graph to draw" in caplog.text
    assert "from Inductor's cache" in str(second[0])


def test_a_full_disk_ends_no_program(mesh: DeviceMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the file nor, in whose place there is a file by now, the folder can be written."""
    options = {**STRICT, "report_file": "/dev/full", "graph_dir": str(tmp_path / "graphs")}
    with mock.patch.object(asynctp_passes.backend, "_draw", side_effect=NotADirectoryError(20, "no folder")):
        assert len(step(mesh, options=options)) == 2
    assert caplog.text.count("report_file='/dev/full' could not be written ([Errno 28]") == 2
    assert caplog.text.count("could not be written ([Errno 20] no folder); the program goes on") == 2


def test_a_cached_graph_tells_of_no_break_of_the_process_that_compiled_it(mesh: DeviceMesh) -> None:
    with mock.patch.object(dynamo, "graph_breaks", return_value=["async_op=True for distributed collectives"]):
        first = step(mesh)
    second = step(mesh)
    assert hits() == (2, PLAIN_HITS)
    assert ["torch broke a graph" in str(report) for report in (*first, *second)] == [True, True, False, False]


def test_counters_are_left_clean(mesh: DeviceMesh) -> None:
    for _ in range(2):
        step(mesh)
        assert not [name for name in counters["inductor"] if name.startswith("asynctp")]


def test_cache_without_autograd_cache(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    """The backward graph is then found in the cache later than the forward graph, without the backend being called."""
    with torch._functorch.config.patch(enable_autograd_cache=False), caplog.at_level(logging.INFO, "asynctp_passes"):
        first = step(mesh)
        second = step(mesh)
    assert "(backward, from Inductor's cache): 2 of 2 chains fused" in caplog.text  # at once
    assert hits() == (2, 0)
    assert [(report.phase, report.from_cache) for report in second] == [("forward", True), ("backward", True)]
    assert [report.remarks for report in first] == [report.remarks for report in second]


def test_ahead_of_time(mesh: DeviceMesh, tmp_path: Path) -> None:
    """AOTInductor runs the pass that its options have, and what it loads calls the fused ops."""
    group = mesh.get_group()

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return funcol.all_gather_tensor(x, 0, group) @ weight

    given = torch.ones(4, 16), torch.ones(16, 8)
    program = torch.export.export(Layer(), given)
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    ours = {"post_grad_custom_post_pass": AsyncTPPass(Config(strict="all", expect=1)), **quick}
    path = str(tmp_path / "layer.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=ours)
    (report,) = asynctp_passes.reports()
    assert [remark.kind for remark in report.fused] == ["all_gather_matmul"]
    if not NEWER_THAN_2_11:
        pytest.skip("torch 2.11 loads no package with an op that is given the name of a group")
    assert torch._inductor.aoti_load_package(path)(*given).shape == (16, 8)


@pytest.mark.parametrize("kind", ["gather", "scatter", "sum"])
def test_cpp_wrapper_takes_what_it_takes_of_inductor(kind: str, mesh: DeviceMesh) -> None:
    """Since torch 2.12 it takes no op that takes a group, but for torch's own all-reduce."""
    group, w = mesh.get_group(), torch.ones(16, 16)
    program: Callable[[Tensor], Tensor] = {
        "gather": lambda x: funcol.all_gather_tensor(x, 0, group) @ w,
        "scatter": lambda x: funcol.reduce_scatter_tensor(x @ w, "sum", 0, group),
        "sum": lambda x: funcol.all_reduce(x @ w, "sum", group),
    }[kind]
    told = list[str]()
    for name in ("inductor", "asynctp"):
        torch._dynamo.reset()
        try:
            got = torch.compile(program, backend=name, options={"cpp_wrapper": True})(torch.ones(4, 16))
            told.append(str(got.shape))
            assert kind == "scatter" or torch.equal(
                got, torch.full_like(got, 16.0)
            )  # what a fake scatter sends is not set
        except torch._inductor.exc.InductorError as error:
            told.append(str(error.inner_exception if hasattr(error, "inner_exception") else error))
    assert told[1] == ("arg type Any is not yet supported by custom_op_wrapper" if NEWER_THAN_2_11 else told[0])
    assert told[0] == told[1] or kind == "sum"
    assert asynctp_passes.summary().fused == 1


def test_cache_of_the_bare_pass(mesh: DeviceMesh) -> None:
    """The pass without the backend: `reports()` fetches what came with cached graphs."""
    with torch._inductor.config.patch(post_grad_custom_post_pass=AsyncTPPass(Config(strict="all"))):
        first = step(mesh, backend="inductor")
        second = step(mesh, backend="inductor")
    assert hits() == (2, PLAIN_HITS)
    assert [report.from_cache for report in (*first, *second)] == [False, False, True, True]
    assert [report.remarks for report in first] == [report.remarks for report in second]


@pytest.mark.parametrize(
    ("options", "hit"),
    [
        ({"strict": "zero"}, False),
        ({"rematerialize": "always"}, False),
        ({"min_bytes": 1}, False),
        ({"expect": 1}, False),
        ({"report_file": os.devnull}, True),
    ],
)
def test_cache_key_has_the_configuration(mesh: DeviceMesh, options: dict[str, Any], hit: bool) -> None:
    compiled(gather_matmul(mesh))(torch.ones(4, 16))
    start()
    compiled(gather_matmul(mesh), options={**STRICT, **options})(torch.ones(4, 16))
    assert hits() == ((1, 1) if hit else (0, 0))
    assert [report.from_cache for report in asynctp_passes.reports()] == [hit]


def test_cache_key_has_the_sizes_of_groups() -> None:
    """An all-reduce is not told how many ranks there are: what is left alone on one rank would be on four."""
    weight, found = torch.ones(16, 8), []

    def program(x: Tensor) -> Tensor:
        return funcol.all_reduce(x @ weight, "sum", dist.group.WORLD)

    for ranks in (1, 4, 2):
        start()
        with imagined_ranks(ranks):
            compiled(program)(torch.ones(4, 16))
        (report,) = asynctp_passes.reports()
        (remark,) = report.remarks
        found.append((report.from_cache, remark.code or remark.outcome, remark.group_size))
    assert found == [(False, "ATP004", 1), (False, "FUSED", 4), (False, "FUSED", 2)]


def test_a_cached_graph_that_does_not_stand_is_reported_by_its_compile_alone(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cached graph that does not run is in no report, however often it was read."""
    compiled(gather_matmul(mesh))(torch.ones(4, 16))
    start()
    real, asked = backend._refused, list[int]()

    def refused(cached: list[Report], *args: Any, **options: Any) -> list[str]:
        asked.append(len(cached))
        return ["a deviation"] if cached else real(cached, *args, **options)

    monkeypatch.setattr(backend, "_refused", refused)
    out = compiled(gather_matmul(mesh))(torch.ones(4, 16))
    assert torch.equal(out, gather_matmul(mesh)(torch.ones(4, 16)))
    assert 1 in asked
    assert "compiles again without caches" in caplog.text
    assert [(report.from_cache, len(report.fused)) for report in asynctp_passes.reports()] == [(False, 1)]


def test_cache_key_has_the_sources(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(gather_matmul(mesh))(torch.ones(4, 16))
    start()
    monkeypatch.setattr(backend, "sources_digest", lambda: "another version")
    compiled(gather_matmul(mesh))(torch.ones(4, 16))
    assert hits() == (0, 0)
    assert [report.from_cache for report in asynctp_passes.reports()] == [False]


def test_cache_key_has_the_registered_ops(mesh: DeviceMesh) -> None:
    """A custom collective is missed, taken from the cache, and fused as soon as it is registered."""
    serving_ops.GROUPS["tp:0"] = mesh.get_group()

    def program(x: Tensor) -> Tensor:
        whole: Tensor = torch.ops.vllm_like.all_gather(x, 0, 4, "tp:0")
        return whole @ torch.ones(16, 8)

    found = []
    for registered in (False, False, True, True, False):
        start()
        with serving_ops.registered(mesh.get_group()) if registered else contextlib.nullcontext():
            compiled(program, options={**STRICT, "strict": "off"})(torch.ones(4, 16))
        (report,) = asynctp_passes.reports()
        found.append((report.from_cache, *(remark.code or remark.outcome for remark in report.remarks)))
    missed, fused = [[(cached, word) for cached in (False, True)] for word in ("ATP113", "FUSED")]
    assert found == [*missed, *fused, missed[1]]


def test_cached_graph_without_report(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "_send_with_cache_entry", lambda report: None)
    compiled(gather_matmul(mesh))(torch.ones(4, 16))
    start()
    with caplog.at_level(logging.INFO, logger="asynctp_passes"):
        compiled(gather_matmul(mesh))(torch.ones(4, 16))
    assert hits() == (1, 1)
    assert asynctp_passes.reports() == ()
    assert "no report came with it" in caplog.text


def test_report_of_a_compile_under_way_is_not_taken(mesh: DeviceMesh) -> None:
    """Asking for the reports inside a compile, after the pass, does not keep them from the cache entry."""
    asked: list[int] = []

    class Curious(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            AsyncTPPass(Config(strict="all"))(graph)
            asked.append(len(asynctp_passes.reports()))

        def uuid(self) -> str:
            return "curious"

    for expected in (False, True):
        start()
        with torch._inductor.config.patch(post_grad_custom_post_pass=Curious()):
            compiled(gather_matmul(mesh), "inductor")(torch.ones(4, 16))
        assert [report.from_cache for report in asynctp_passes.reports()] == [expected]
    assert asked == [1]


def test_pass_is_plain_data(mesh: DeviceMesh) -> None:
    ours = AsyncTPPass(Config(groups=(mesh.get_group(), mesh), strict="all"))
    assert ours.config.groups == (mesh.get_group().group_name,)
    for twin in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert twin.config == ours.config
        assert twin.uuid() == ours.uuid()
    assert not any(isinstance(value, dist.ProcessGroup) for value in vars(ours.config).values())
    json.dumps(ours.config.groups)


def test_cache_key_has_what_the_ops_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached report that names another implementation than the one that runs would be wrong."""
    before = AsyncTPPass(Config()).uuid()
    monkeypatch.setenv("ASYNCTP_CPU_IMPLEMENTATION", "interpreted")
    asynctp_passes.ops.refresh()
    try:
        assert AsyncTPPass(Config()).uuid() != before
    finally:
        monkeypatch.undo()
        asynctp_passes.ops.refresh()


def test_a_group_that_does_not_exist_is_an_error(mesh: DeviceMesh) -> None:
    compiled = torch.compile(torch.nn.Linear(4, 4), backend="asynctp", options={"groups": "nowhere"})
    with pytest.raises(Exception, match=r"groups has \['nowhere'\].*there are \['0'\]"):
        compiled(torch.randn(2, 4))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="Inductor has the pattern with oneDNN only")
def test_weights_that_inductor_hides_are_a_matmul(mesh: DeviceMesh) -> None:
    """Of a product with weights of int8, Inductor makes a node of its own before it calls a pass."""

    def layer(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        product = torch.nn.functional.linear(x, weight.to(torch.bfloat16)) * scales
        return funcol.all_reduce(product, "sum", mesh.get_group())

    start()
    weight, scales = torch.randint(-8, 8, (16, 16), dtype=torch.int8), torch.rand(16, dtype=torch.bfloat16)
    with torch.no_grad():
        function = compiled(layer, options={**STRICT, "strict": "off"})
        function(torch.randn(2, 4, 16, dtype=torch.bfloat16), weight, scales)
    (report,) = asynctp_passes.reports()
    (remark,) = report.remarks
    assert (remark.outcome, remark.name) == ("MISSED", "MATMUL_NOT_UNDERSTOOD")
    assert "woq_int8, which Inductor put in the place of" in remark.message


@pytest.mark.parametrize("one", [AsyncTPPass, RematerializePass, RematerializePartitioner])
def test_so_it_is_for_the_bare_passes(mesh: DeviceMesh, one: type) -> None:
    """A mesh dimension's name is none of a group."""
    with pytest.raises(GroupError, match=r"groups has \['tp'\].*there are \['0'\]"):
        one(Config(groups="tp"))(torch.fx.Graph(), *([[]] if one is RematerializePartitioner else []))


def test_the_joint_pass_raises_what_it_says(mesh: DeviceMesh) -> None:
    error = DisagreementError("all ranks have agreed")
    there_is_something = mock.patch.object(pipeline, "communicates", return_value=True)
    fails = mock.patch.object(joint, "run_joint", side_effect=error)
    with there_is_something, fails, pytest.raises(DisagreementError) as found:
        RematerializePass(Config(strict="off"))(torch.fx.Graph())
    assert found.value is error


class Rows(torch.nn.Module):
    """Rows that are gathered, and computed with before they are multiplied."""

    def __init__(self, mesh: DeviceMesh, kind: str) -> None:
        super().__init__()
        self.group, rows = mesh.get_group(), torch.ones(4, 16)
        if kind == "buffer":
            self.register_buffer("rows", rows)
        else:
            rows = DTensor.from_local(rows, mesh, [Shard(0)]) if kind == "sharded parameter" else rows
            self.rows = torch.nn.Parameter(rows, requires_grad=False)

    def forward(self, w: Tensor) -> Tensor:
        rows = self.rows
        full = rows.full_tensor() if isinstance(rows, DTensor) else funcol.all_gather_tensor(rows, 0, self.group)
        return full.cumsum(0) @ w


@pytest.mark.parametrize(
    ("kind", "outcome"), [("parameter", "SKIPPED"), ("sharded parameter", "SKIPPED"), ("buffer", "MISSED")]
)
def test_a_frozen_parameter_is_known_and_a_buffer_is_none(mesh: DeviceMesh, kind: str, outcome: str) -> None:
    """Also where Inductor's cache has the graph of another kind."""
    for each in ("buffer", "parameter", kind):
        start()
        compiled(Rows(mesh, each), options={**STRICT, "strict": "off"})(torch.ones(16, 8))
        (report,) = asynctp_passes.reports()
    assert [remark.outcome for remark in report.remarks] == [outcome]
