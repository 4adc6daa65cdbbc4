"""`asynctp_passes.vllm` on a stand-in of vLLM: the modules that it imports, with the interfaces of vLLM 0.33.

It is no vLLM: tests/stacks has the tests with the real one.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import json
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import imagined_ranks
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import asynctp_passes
from asynctp_passes import ConfigError, StrictError
from asynctp_passes.ir import registry

if importlib.util.find_spec("vllm") is not None:
    pytest.skip("vLLM is installed: tests/stacks has the tests with it", allow_module_level=True)

_ops = torch.library.Library("vllm", "FRAGMENT")
_ops.define("all_gather(Tensor tensor, int dim, int world_size, str group_name) -> Tensor")
_ops.define("reduce_scatter(Tensor tensor, int dim, int world_size, str group_name) -> Tensor")
_ops.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
_ops.define("flashinfer_trtllm_fused_allreduce_norm(Tensor allreduce_in, Tensor residual) -> Tensor")
torch.library.register_fake(
    "vllm::all_gather",
    lambda tensor, dim, world_size, group_name: torch.cat([tensor] * world_size, dim),
    lib=_ops,
)
torch.library.register_fake("vllm::all_reduce", lambda tensor, group_name: torch.empty_like(tensor), lib=_ops)
torch.library.register_fake(
    "vllm::flashinfer_trtllm_fused_allreduce_norm", lambda tensor, residual: torch.empty_like(tensor), lib=_ops
)
NAMES = (
    "vllm",
    "vllm.compilation",
    "vllm.compilation.passes",
    "vllm.compilation.passes.inductor_pass",
    "vllm.distributed",
    "vllm.distributed.parallel_state",
    "vllm.envs",
    "vllm.logger",
)
ROWS = SimpleNamespace(start=1, end=2048)


class InductorPass(CustomGraphPass):
    """vLLM's, as its class has it for its pass manager."""

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        return True


class Group:
    """A group of vLLM's, which knows it by weak reference."""

    def __init__(self, device_group: object) -> None:
        self.device_group = device_group


class Vllm:
    """The stand-in: its groups, its batches, and its ways to look up a pass and to hash one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: dict[str, Callable[[], Group | None]] = {}
        self.compiles_for: Any = ROWS
        modules = {name: ModuleType(name) for name in NAMES}
        found = modules["vllm.compilation.passes.inductor_pass"]
        vars(found).update(InductorPass=InductorPass, get_pass_context=self._context)
        vars(modules["vllm.distributed.parallel_state"]).update(_groups=self.groups)
        modules["vllm.distributed"].parallel_state = modules["vllm.distributed.parallel_state"]  # type: ignore[attr-defined]
        self.envs = modules["vllm"].envs = modules["vllm.envs"]  # type: ignore[attr-defined]
        modules["vllm.logger"].init_logger = logging.getLogger  # type: ignore[attr-defined]
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def _context(self) -> Any:
        assert self.compiles_for is not None
        return SimpleNamespace(compile_range=self.compiles_for)

    def look_up(self, text: str) -> Any:
        """A pass by its text, as `CompilationConfig` looks it up."""
        module, _, name = text.rpartition(".")
        found = __import__(module).__dict__[name]
        assert isinstance(found, InductorPass)
        return found

    def have_kernel(self, monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
        """Have a kernel of matmuls where vLLM has its own."""
        names = ("vllm.model_executor", "vllm.model_executor.determinism")
        modules = [ModuleType(name) for name in (*names, f"{names[-1]}.batch_invariant")]
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(modules[-1]).update(matmul_kernel_persistent=kernel)
        modules[-2].batch_invariant = modules[-1]  # type: ignore[attr-defined]

    def key(self, *passes: Any) -> str:
        """The hash that `PostGradPassManager` makes."""
        return hashlib.sha256(json.dumps([one.uuid() for one in passes]).encode()).hexdigest()


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    """The stand-in, on the first of two ranks whose group is `tp:0`; nothing of it stays."""
    with imagined_ranks(2):
        stand_in = Vllm(monkeypatch)
        group = Group(dist.group.WORLD)
        stand_in.groups["tp:0"] = lambda: group
        asynctp_passes.clear_reports()
        yield stand_in
    sys.modules.pop("asynctp_passes.vllm", None)
    for name in ("vllm", "asynctp", "asynctp_joint"):
        vars(asynctp_passes).pop(name, None)
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        if registry.is_registered(f"vllm.{name}.default"):
            asynctp_passes.unregister(getattr(torch.ops.vllm, name))


def graph_of(program: Callable[..., Tensor]) -> fx.Graph:
    with FakeTensorMode():
        return make_fx(program)(torch.empty(8, 16), torch.empty(16, 32)).graph


def layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.vllm.all_reduce(x @ w, "tp:0")


def in_second_group(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.vllm.all_reduce(x @ w, "tp:1")


def taken_first(x: Tensor, w: Tensor) -> Tensor:
    product = x @ w
    return torch.ops.vllm.flashinfer_trtllm_fused_allreduce_norm(product, product)


def fused(graph: fx.Graph) -> int:
    return sum("asynctp" in str(node.target) for node in graph.nodes)


FUSE, JOINT = "asynctp_passes.vllm.asynctp", "asynctp_passes.vllm.asynctp_joint"


def test_the_text_of_a_pass_fuses_reports_and_logs(vllm: Vllm, caplog: pytest.LogCaptureFixture) -> None:
    graph = graph_of(layer)
    with caplog.at_level(logging.INFO, "vllm.asynctp"):
        vllm.look_up(FUSE)(graph)
    assert fused(graph) == 1
    (report,) = asynctp_passes.reports()
    assert (len(report.fused), len(report.missed)) == (1, 0)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "vllm.asynctp"]
    assert said.startswith("asynctp: graph (inference, 1 to 2048 tokens): 1 of 1 chains fused, 0 missed")


def test_without_a_range_of_tokens_the_log_names_none(vllm: Vllm, caplog: pytest.LogCaptureFixture) -> None:
    vllm.compiles_for = None
    with caplog.at_level(logging.INFO, "vllm.asynctp"):
        vllm.look_up(FUSE)(graph_of(layer))
    assert "(inference): 1 of 1 chains fused" in caplog.text


def test_copies_and_pickles_work_as_the_pass_does(vllm: Vllm) -> None:
    for text in (FUSE, JOINT):
        ours = vllm.look_up(text)
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert vllm.key(other) == vllm.key(ours)
    graph = graph_of(layer)
    pickle.loads(pickle.dumps(vllm.look_up(FUSE)))(graph)
    assert fused(graph) == 1


def test_a_pickle_carries_options_to_a_worker_without_the_variables(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCTP_STRICT", "all")
    sent = pickle.dumps(vllm.look_up(FUSE))
    monkeypatch.delenv("ASYNCTP_STRICT")
    with pytest.raises(StrictError):
        pickle.loads(sent)(graph_of(taken_first))


def test_vllms_own_switch_is_obeyed(vllm: Vllm) -> None:
    """`VLLM_BATCH_INVARIANT`, of the process that reads vLLM's configuration."""
    vllm.envs.VLLM_BATCH_INVARIANT = True
    sent = pickle.dumps(vllm.look_up(FUSE))
    assert vllm.look_up(JOINT)._ours.config.invariant == "batch"
    del vllm.envs.VLLM_BATCH_INVARIANT
    pickle.loads(sent)(graph_of(layer))
    (report,) = asynctp_passes.reports()
    assert [note.kind for note in report.notes] == ["bits"]
    del sys.modules["asynctp_passes.vllm"]
    assert vllm.look_up(FUSE)._ours.config.invariant == "auto"


def test_vllms_own_switch_gives_way_to_the_option(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    monkeypatch.setenv("ASYNCTP_INVARIANT", "off")
    assert vllm.look_up(FUSE)._ours.config.invariant == "off"


def test_the_kernel_of_vllms_switch_is_fused(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `VLLM_BATCH_INVARIANT`, unquantized linears call a Triton kernel of vLLM's."""
    kernels = pytest.importorskip("triton_programs")

    def down(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.vllm.all_reduce(kernels.linear(x, weight), "tp:0")

    def up(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return kernels.linear(torch.ops.vllm.all_gather(x, 0, 2, "tp:0"), weight, bias)

    x, weight, bias = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32)
    before = vllm.key(vllm.look_up(FUSE))
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    vllm.have_kernel(monkeypatch, kernels.rows_times_weight)
    del sys.modules["asynctp_passes.vllm"]
    ours = vllm.look_up(FUSE)
    assert vllm.key(ours) != before
    try:
        for program, *inputs in ((down, x, weight), (up, x, weight, bias)):
            graph = kernels.graph_of(program, *inputs).graph
            ours(graph)
            report = asynctp_passes.reports()[-1]
            assert [one.outcome for one in report.remarks] == ["FUSED"]
            assert "bits" in [note.kind for note in report.notes]
            assert not any("triton" in str(node.target) for node in graph.nodes)
    finally:
        asynctp_passes.unregister(kernels.rows_times_weight)


@pytest.mark.parametrize("kernel", [None, lambda a_ptr, b_ptr, c_ptr, bias_ptr: None])
def test_without_that_kernel_nothing_is_registered(vllm: Vllm, monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
    """As where there is no Triton, and vLLM's is a function of Python."""
    vllm.look_up(FUSE).uuid()
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    if kernel is not None:
        vllm.have_kernel(monkeypatch, kernel)
    before = registry.digest()
    vllm.look_up(FUSE).uuid()
    assert registry.digest() == before


def test_the_key_has_options_groups_and_the_kind_of_pass(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = vllm.look_up(FUSE)
    before = vllm.key(ours)
    assert vllm.key(ours) == before
    assert vllm.key(vllm.look_up(JOINT)) != before
    second = Group(dist.new_group([0, 1]))
    vllm.groups["tp:1"] = lambda: second
    with_group = vllm.key(ours)
    assert with_group != before
    del sys.modules["asynctp_passes.vllm"]
    monkeypatch.setenv("ASYNCTP_MIN_BYTES", "12345")
    assert vllm.key(vllm.look_up(FUSE)) != with_group


def test_a_key_that_cannot_be_made_is_that_of_no_cache(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = vllm.look_up(FUSE)
    monkeypatch.setattr(type(ours._ours), "uuid", lambda self: None)
    assert vllm.key(ours) != vllm.key(ours)


def test_a_group_that_comes_later_is_known_at_the_next_call(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCTP_STRICT", "off")
    ours = vllm.look_up(FUSE)
    early = graph_of(in_second_group)
    ours(early)
    assert fused(early) == 0
    assert asynctp_passes.reports()[-1].remarks[0].code == "ATP113"
    second = Group(dist.new_group([0, 1]))
    vllm.groups["tp:1"] = lambda: second
    late = graph_of(in_second_group)
    ours(late)
    assert fused(late) == 1
    first = graph_of(layer)
    ours(first)
    assert fused(first) == 1


@pytest.mark.parametrize("gone", [lambda: None, lambda: Group("7"), lambda: Group(object())])
def test_groups_that_torch_does_not_know_are_left_out(vllm: Vllm, gone: Callable[[], Group | None]) -> None:
    vllm.look_up(FUSE)
    from asynctp_passes.vllm import register_ops

    vllm.groups["tp:1"] = gone
    assert list(register_ops()) == ["tp:0"]


def test_all_reduces_that_vllm_took_first_are_named(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ASYNCTP_STRICT", "off")
    with caplog.at_level(logging.WARNING, "vllm.asynctp"):
        vllm.look_up(FUSE)(graph_of(taken_first))
    assert "fuse_allreduce_rms took 1 all-reduces of graph, 1 to 2048 tokens" in caplog.text
    assert '"pass_config": {"fuse_allreduce_rms": false}' in caplog.text


@pytest.mark.parametrize("strict", ["zero", "all"])
def test_they_are_an_error_under_strict(vllm: Vllm, monkeypatch: pytest.MonkeyPatch, strict: str) -> None:
    monkeypatch.setenv("ASYNCTP_STRICT", strict)
    graph = graph_of(taken_first)
    before = str(graph)
    with pytest.raises(StrictError, match=r"fuse_allreduce_rms took 1 all-reduces(?s:.*)ATP113") as raised:
        vllm.look_up(FUSE)(graph)
    assert raised.value.report is not None
    assert str(graph) == before


@pytest.mark.parametrize("padding", [True, False])
def test_padding_that_each_rank_times_for_itself_is_named(
    vllm: Vllm, padding: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with torch._inductor.config.patch(shape_padding=padding), caplog.at_level(logging.WARNING, "vllm.asynctp"):
        vllm.look_up(JOINT)(graph_of(layer))
    assert ("shape_padding is on" in caplog.text) == padding


def test_a_bad_option_is_an_error_when_vllm_reads_its_configuration(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCTP_STRICKT", "all")
    with pytest.raises(ConfigError, match="did you mean 'ASYNCTP_STRICT'"):
        vllm.look_up(FUSE)
