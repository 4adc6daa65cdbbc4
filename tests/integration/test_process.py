"""`enable` and `disable`: asynctp in programs that choose Inductor themselves."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compiled_training import pair_in_one_process
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.codecache import AotCodeCompiler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.distributed._functional_collectives import all_gather_tensor

import asynctp_passes
from asynctp_passes import Config, ConfigError, ExpectError, StrictError, backend

OFF = Config(strict="off")


@pytest.fixture(autouse=True)
def two_ranks(tmp_path: Path) -> Iterator[None]:
    """A group of two, and this process is its first rank."""
    with pair_in_one_process(tmp_path):
        yield
    asynctp_passes.disable()


def program(x: Tensor, w: Tensor) -> Tensor:
    return all_gather_tensor(x, 0, dist.group.WORLD) @ w


def fused_by(compiled: Any, **inputs: Any) -> int:
    """How many chains are fused in what is compiled for new inputs."""
    torch._dynamo.reset()
    asynctp_passes.clear_reports()
    compiled(torch.ones(4, 16, **inputs), torch.ones(16, 8, **inputs))
    return sum(len(report.fused) for report in asynctp_passes.reports())


def test_what_was_compiled_before_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The remedy works: what is reset, or compiled later, is fused."""
    torch._dynamo.reset()
    compiled, inputs = torch.compile(program), (torch.ones(4, 16), torch.ones(16, 8))
    compiled(*inputs)
    with caplog.at_level(logging.WARNING, "asynctp_passes"):
        asynctp_passes.enable(OFF)
    (said,) = (text for record in caplog.records if "enable()" in (text := record.getMessage()))
    assert "enable() comes too late for what is compiled already" in said
    assert "test_process.py:program:" in said
    asynctp_passes.clear_reports()
    torch.compiler.reset()
    compiled(*inputs)
    assert sum(len(report.fused) for report in asynctp_passes.reports()) == 1
    asynctp_passes.disable()
    torch.compiler.reset()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "asynctp_passes"):
        asynctp_passes.enable(OFF)
    assert "comes too late" not in caplog.text


@pytest.mark.parametrize(
    "compiled",
    [
        torch.compile(program),
        torch.compile(program, backend="inductor"),
        torch.compile(program, options={"max_autotune": False}),
    ],
    ids=["default", "by name", "with options"],
)  # fmt: skip
def test_what_inductor_compiles_is_fused_until_it_ends(compiled: Any) -> None:
    assert fused_by(compiled) == 0
    asynctp_passes.enable(OFF)
    assert fused_by(compiled) == 1
    asynctp_passes.disable()
    assert fused_by(compiled) == 0


def test_other_threads_too() -> None:
    """Inductor's options are each thread's own since torch 2.12, and a GPU's backward is compiled in autograd's."""
    found = []
    asynctp_passes.enable(OFF)
    thread = threading.Thread(target=lambda: found.append(fused_by(torch.compile(program))))
    with torch._inductor.config.patch(fallback_by_default=True):
        thread.start()
        thread.join()
    assert found == [1]


def test_backward_too() -> None:
    with asynctp_passes.enable(OFF):
        torch._dynamo.reset()
        asynctp_passes.clear_reports()
        x, w = torch.ones(4, 16, requires_grad=True), torch.ones(16, 8, requires_grad=True)
        torch.compile(program)(x, w).sum().backward()
    phases = {report.phase: len(report.fused) for report in asynctp_passes.reports()}
    assert phases == {"forward": 1, "backward": 1}


def test_a_block_ends_what_it_began() -> None:
    compiled = torch.compile(program)
    with asynctp_passes.enable(OFF):
        with asynctp_passes.enable(OFF):
            pass
        assert fused_by(compiled) == 1
    assert fused_by(compiled) == 0


def test_twice_is_once() -> None:
    asynctp_passes.enable(OFF)
    asynctp_passes.enable(OFF)
    assert fused_by(torch.compile(program)) == 1
    asynctp_passes.disable()
    asynctp_passes.disable()
    assert fused_by(torch.compile(program)) == 0


def test_our_own_backend_beside_it_keeps_its_configuration() -> None:
    """It expects two chains, which the process does not; its pass runs once."""
    asynctp_passes.enable(OFF)
    assert fused_by(torch.compile(program, backend="asynctp", options={"expect": 1})) == 1
    with pytest.raises(Exception) as raised:  # noqa: PT011 (Inductor wraps it)
        fused_by(torch.compile(program, backend="asynctp", options={"expect": 2}))
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), ExpectError)


def test_passes_of_the_users_run_too() -> None:
    seen = []
    asynctp_passes.enable(OFF)
    with torch._inductor.config.patch(post_grad_custom_post_pass=seen.append):
        assert fused_by(torch.compile(program)) == 1
    assert len(seen) == 1


FORMER = {
    "compile_fx": lambda gm, inputs: compile_fx(gm, inputs),
    "compile_fx with options": lambda gm, inputs: compile_fx(gm, inputs, config_patches={"max_autotune": False}),
    "compile_fx_inner": aot_autograd(fw_compiler=compile_fx_inner),
}
"""Backends with functions of Inductor's that were imported before `enable`."""


@pytest.mark.parametrize("former", FORMER.values(), ids=FORMER.keys())
@pytest.mark.parametrize("training", [False, True])
def test_a_backend_that_imported_inductor_before(former: Any, training: bool) -> None:
    asynctp_passes.enable(OFF)
    compiled = torch.compile(program, backend=former)
    for _ in range(2):  # then from the caches, where there are any
        torch._dynamo.reset()
        asynctp_passes.clear_reports()
        y = compiled(*(torch.ones(size, requires_grad=training) for size in ((4, 16), (16, 8))))
        if training:
            y.sum().backward()
        found = [(report.phase, len(report.fused)) for report in asynctp_passes.reports()]
        assert found == ([("forward", 1), ("backward", 1)] if training else [("inference", 1)])
    asynctp_passes.disable()
    assert fused_by(compiled) == 0


def test_a_backend_that_imported_inductor_before_takes_no_graph_of_plain_inductor() -> None:
    """AOTAutograd's cache keeps asynctp's graph and plain Inductor's under two keys."""
    compiled = torch.compile(program, backend=FORMER["compile_fx"])
    assert fused_by(compiled) == 0
    with asynctp_passes.enable(OFF):
        assert fused_by(compiled) == 1
    assert fused_by(compiled) == 0


def test_passes_of_ours_run_once_in_a_backend_that_imported_inductor_before() -> None:
    seen = []
    asynctp_passes.enable(OFF)
    with torch._inductor.config.patch(post_grad_custom_post_pass=seen.append):
        options = backend.with_passes({}, asynctp_passes.AsyncTPPass(OFF))
    with torch._inductor.config.patch(options):
        assert fused_by(torch.compile(program, backend=FORMER["compile_fx"])) == 1
    assert len(seen) == len(asynctp_passes.reports()) == 1


def test_other_backends_are_left_alone() -> None:
    asynctp_passes.enable(OFF)
    assert fused_by(torch.compile(program, backend="aot_eager")) == 0


def test_a_compile_without_passes_is_left_alone_and_said(caplog: pytest.LogCaptureFixture) -> None:
    asynctp_passes.enable(OFF)
    with caplog.at_level(logging.WARNING, "asynctp_passes"):
        assert fused_by(torch.compile(program, options={"use_post_grad_passes": False})) == 0
    assert "is left alone: mode='lite', or use_post_grad_passes=False" in caplog.text


def test_ahead_of_time() -> None:
    """AOTInductor compiles with a compiler of its own inside. Its code is not built: `test_backend` loads what is."""
    asynctp_passes.enable(OFF)
    asynctp_passes.clear_reports()

    class Module(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return program(x, w)

    exported = torch.export.export(Module(), (torch.ones(4, 16), torch.ones(16, 8)))
    built = mock.Mock(side_effect=RuntimeError("the code is written"))
    with mock.patch.object(AotCodeCompiler, "compile", built), pytest.raises(Exception, match="the code is written"):
        torch._inductor.aoti_compile_and_package(exported)
    assert sum(len(report.fused) for report in asynctp_passes.reports()) == 1


def test_another_configuration() -> None:
    asynctp_passes.enable(OFF)
    with pytest.raises(ConfigError, match=r"the process has .*; call asynctp_passes.disable\(\) before"):
        asynctp_passes.enable(Config(strict="all"))
    assert fused_by(torch.compile(program)) == 1


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("post_grad_custom_post_pass", asynctp_passes.AsyncTPPass),
        ("joint_custom_post_pass", asynctp_passes.RematerializePass),
        ("custom_partitioner_fn", asynctp_passes.RematerializePartitioner),
    ],
)
def test_a_pass_of_ours_in_inductors_options(option: str, ours: type) -> None:
    with (
        torch._inductor.config.patch({option: ours(OFF)}),
        pytest.raises(ConfigError, match=f"has {ours.__name__} already; take that out, or leave enable"),
    ):
        asynctp_passes.enable(OFF)
    assert fused_by(torch.compile(program)) == 0


def test_no_configuration() -> None:
    with pytest.raises(ConfigError, match="config"):
        asynctp_passes.enable({"strict": "all"})  # type: ignore[arg-type]


def test_a_graph_that_is_cached_is_drawn_all_the_same(tmp_path: Path) -> None:
    """A folder for pages is a part of the key: what was compiled without one is compiled again, once."""
    folder = tmp_path / "pages"
    fused_by(torch.compile(program, backend="asynctp"))
    drawn = {"graph_dir": str(folder)}
    for pages in (1, 1):
        assert fused_by(torch.compile(program, backend="asynctp", options=drawn)) == 1
        assert len([path for path in folder.glob("*.html") if path.name != "index.html"]) == pages


def test_a_chain_in_two_graphs_is_told_as_by_the_backend() -> None:
    """The whole backend works, and not its pass alone: `torch.compile` gives Inductor arguments of its own."""
    asynctp_passes.enable(Config(strict="all"))

    def breaks(x: Tensor, w: Tensor) -> Tensor:
        whole = all_gather_tensor(x, 0, dist.group.WORLD)
        torch._dynamo.graph_break()
        return whole @ w

    with pytest.raises(Exception, match="ATP120") as raised:
        fused_by(torch.compile(breaks))
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), StrictError)


def test_arguments_of_inductors_own_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torch.compile` gives them, under asynctp and without it."""
    seen: list[dict[str, Any]] = []
    module = torch._inductor.compile_fx
    original = module.compile_fx

    @functools.wraps(original)
    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(inspect.signature(original).bind(*args, **kwargs).arguments)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "compile_fx", spy)
    own = ("model_", "example_inputs_", "inner_compile", "config_patches")
    fused_by(torch.compile(program))
    plain = {name: value for name, value in seen[0].items() if name not in own}
    seen.clear()
    with asynctp_passes.enable(OFF):
        assert fused_by(torch.compile(program)) == 1
    assert {name: value for name, value in seen[0].items() if name not in own} == plain
