"""The picture of a process: chains by function and compile, what is judged by it, and its end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compiled_training import pair_in_one_process
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import asynctp_passes
from asynctp_passes import ExpectError, Remark, Report, StrictError, backend
from asynctp_passes.reporting.picture import Picture
from asynctp_passes.torch_private import dynamo

Program = Callable[..., Any]
OFF = {"strict": "off"}
X, W = torch.ones(4, 16), torch.ones(16, 8)


@pytest.fixture(autouse=True)
def two_ranks(tmp_path: Path) -> Iterator[None]:
    """A group of two, and this process is its first rank."""
    with pair_in_one_process(tmp_path):
        yield


def compiled(program: Any, **options: Any) -> Any:
    return torch.compile(program, backend="asynctp", options={**OFF, **options})


def gathered(x: Tensor) -> Tensor:
    return all_gather_tensor(x, 0, dist.group.WORLD)


def missed() -> list[Remark]:
    return [remark for report in asynctp_passes.reports() for remark in report.missed]


# --- nothing to fuse ----------------------------------------------------------------------------------------------
def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "nothing to fuse" in record.message]


def test_a_model_that_is_not_parallel(caplog: pytest.LogCaptureFixture) -> None:
    model = two_layers()
    for count in (4, 5):
        torch._dynamo.reset()
        compiled(model)(torch.ones(count, 32))
    assert warnings_of(caplog) == []
    for count in (6, 7):
        torch._dynamo.reset()
        compiled(model)(torch.ones(count, 32))
    (warning,) = warnings_of(caplog)
    assert "3 graphs multiply, and none has a collective next to a matmul so far" in warning
    assert "Or the model was not parallelized" in warning


def test_linears_that_are_compiled_each_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    model, mesh = two_layers(), init_device_mesh("cpu", (2,))
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(model, mesh, plan)
    for index in (0, 2):
        model[index].forward = compiled(model[index].forward, expect=1)
    model(torch.ones(4, 32))
    (warning,) = warnings_of(caplog)
    assert "(expect=1)" in warning
    assert "No graph communicates: the hooks of parallelize_module do" in warning


def test_an_op_that_may_be_the_only_communication(caplog: pytest.LogCaptureFixture) -> None:
    library = torch.library.Library("picture_like", "FRAGMENT")
    library.define("talk(Tensor x) -> Tensor")
    library.impl("talk", torch.clone, "CPU")
    torch.library.register_fake("picture_like::talk", torch.empty_like, lib=library)
    compiled(lambda x: torch.ops.picture_like.talk(x @ W), strict="all")(X)
    (report,) = asynctp_passes.reports()
    assert "picture_like.talk.default" in report.notes[0].text
    (warning,) = warnings_of(caplog)
    assert "nothing tells whether these ops communicate" in warning.lower()
    assert "picture_like.talk.default" in warning
    assert "No graph communicates" not in warning
    library._destroy()


def test_backward_graphs_count_too(caplog: pytest.LogCaptureFixture) -> None:
    """Two linears have two graphs, and two more in training."""
    model = two_layers()
    for index in (0, 2):
        model[index].forward = compiled(model[index].forward)
    loss = model(torch.ones(4, 32)).sum()
    assert warnings_of(caplog) == []
    loss.backward()
    assert len(warnings_of(caplog)) == 1


def test_no_warning_where_something_is_fused_or_there_are_no_peers(caplog: pytest.LogCaptureFixture) -> None:
    compiled(lambda x: gathered(x) @ W, expect=1)(X)
    compiled(lambda x: x @ W, expect=1)(X)
    assert warnings_of(caplog) == []
    asynctp_passes.clear_reports()
    dist.destroy_process_group()
    try:
        compiled(lambda x: x @ W + 1, expect=1)(X)
        assert warnings_of(caplog) == []
    finally:
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)


# --- the picture of the process -----------------------------------------------------------------------------------
def test_the_summary_counts_a_function_once() -> None:
    program = compiled(lambda x: gathered(x) @ W)
    for rows in (4, 6, 8):
        torch._dynamo.mark_static(x := torch.ones(rows, 16))
        program(x)
    found = asynctp_passes.summary()
    assert (found.fused, found.missed, found.graphs) == (1, 0, 3)
    assert str(found).splitlines()[0].startswith("asynctp: 1 of 1 chains fused, 0 missed, 0 collectives skipped")
    asynctp_passes.require(fused=1)
    with pytest.raises(ExpectError, match="1 chains are fused and 0 missed in this process; at least 2 must"):
        asynctp_passes.require(fused=2)
    with pytest.raises(asynctp_passes.ConfigError, match="fused=-1 is not valid"):
        asynctp_passes.require(fused=-1)
    asynctp_passes.clear_reports()
    left = asynctp_passes.summary()
    assert left == asynctp_passes.Summary(breaks=left.breaks, calls=left.calls)


def fuses(x: Tensor) -> Tensor:
    return gathered(x) @ W


def misses(x: Tensor) -> Tensor:
    return gathered(x).softmax(0) @ W


def of_branches(one: Program, other: Program, before: Program = torch.clone) -> Program:
    def program(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: one(x) + 1, lambda x: other(x * 2) + 2, (x,)), before(x)

    return program


@torch.compiler.nested_compile_region
def region(x: Tensor) -> Tensor:
    return fuses(x)


def of_a_region(x: Tensor) -> Tensor:
    """It is one graph, which runs twice."""
    return region(x).sum() + region(x)


def in_pieces(*programs: Program, **options: Any) -> Program:
    """All programs in one function, each compiled by a call of its own, as DDP's buckets are."""

    def compile_pieces(gm: torch.fx.GraphModule, inputs: list[Any]) -> Program:
        def piece(number: int) -> Any:
            graph, copied = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
            graph.graph_copy(gm.graph, copied)
            graph.output((copied[gm.graph.output_node().args[0][number]],))
            graph.eliminate_dead_code()
            return backend.asynctp(torch.fx.GraphModule(gm, graph), inputs, options={**OFF, **options})

        made = [piece(number) for number in range(len(programs))]
        return lambda *given: [one(*given)[0] for one in made]

    compiled: Program = torch.compile(lambda x: [one(x) for one in programs], backend=compile_pieces)
    return compiled


@pytest.mark.parametrize(
    ("program", "fused", "missed"),
    [
        (compiled(of_branches(fuses, misses, fuses)), 2, 1),
        (compiled(of_a_region), 1, 0),
        (in_pieces(fuses, lambda x: fuses(x) + 1, misses), 2, 1),
    ],
    ids=["branches-and-more", "region", "pieces"],
)
def test_the_summary_counts_all_graphs_of_a_compile(program: Program, fused: int, missed: int) -> None:
    """And those of one compile alone: a recompile, and a compile after a reset, are the same function's."""
    for rows in (4, 6):
        torch._dynamo.mark_static(x := torch.ones(rows, 16))
        program(x)
    torch._dynamo.reset()
    program(torch.ones(4, 16))
    found = asynctp_passes.summary()
    assert (found.fused, found.missed) == (fused, missed)
    asynctp_passes.require(fused=fused, missed=missed)
    with pytest.raises(ExpectError):
        asynctp_passes.require(fused=fused + 1, missed=missed)


def test_graphs_that_torch_compiles_again_count_once() -> None:
    """After an error of asynctp's, as in a backward, and in another attempt at a function."""
    fused, missed = (
        Report("graph 0/0", "backward", (Remark(outcome, "all_gather_matmul", "gather"),))
        for outcome in ("FUSED", "MISSED")
    )
    found = Picture()
    for attempt in (0, 1):
        with mock.patch.object(dynamo, "compile_under_way", return_value=(0, attempt)):
            for _ in range(2):
                found.note(fused)
                assert found.earlier("backward") == [fused]
                found.note(missed, raised=True)
                assert found.earlier("backward") == []
    assert (found.summary().fused, found.summary().missed) == (1, 1)


# --- strictness ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "program",
    [of_branches(misses, lambda x: x.new_zeros(8, 8), fuses), of_branches(fuses, misses)],
)
def test_a_graph_is_judged_with_its_branches(program: Program) -> None:
    compiled(program, strict="zero", expect=1)(torch.ones(4, 16))
    found = asynctp_passes.summary()
    assert (found.fused, found.missed) == (1, 1)
    for options, error in (({"strict": "all"}, StrictError), ({"expect": 2}, ExpectError)):
        torch._dynamo.reset()
        with pytest.raises(torch._inductor.exc.InductorError) as raised:
            compiled(program, **options)(torch.ones(4, 16))
        assert isinstance(raised.value.inner_exception, error)


def test_branches_that_fuse_nothing_raise_on_every_compile() -> None:
    for _ in range(2):
        torch._dynamo.reset()
        with pytest.raises(torch._inductor.exc.InductorError, match=r"fused 0 of 2 chains of graph 0/0") as raised:
            compiled(of_branches(misses, misses), strict="zero")(torch.ones(4, 16))
        assert isinstance(raised.value.inner_exception, StrictError)
        assert str(raised.value).count("! MISSED") == 2


def test_a_piece_is_judged_with_those_before_it() -> None:
    in_pieces(fuses, misses, strict="zero", expect=1)(torch.ones(4, 16))
    assert len(missed()) == 1
    torch._dynamo.reset()
    with pytest.raises(torch._inductor.exc.InductorError, match=r"chains of graph \S+ \(inference\)"):
        in_pieces(lambda x: x @ W, misses, strict="zero")(torch.ones(4, 16))


def test_the_summary_counts_calls_by_implementation() -> None:
    program = compiled(lambda x: gathered(x) @ W)
    program(X)
    before = asynctp_passes.summary().calls["all_gather_matmul"]["sequential"]
    for _ in range(3):
        program(X)
    found = asynctp_passes.summary()
    assert found.calls["all_gather_matmul"]["sequential"] == before + 3
    told = ", ".join(f"{count} {name}" for name, count in found.calls["all_gather_matmul"].items())
    assert f"called all_gather_matmul: {told}" in str(found).splitlines()
    assert f"{before + 3} sequential" in told


def test_the_summary_counts_functions_that_are_compiled_after_a_reset() -> None:
    """Dynamo numbers them from 0 again."""
    compiled(lambda x: gathered(x) @ W)(X)
    torch._dynamo.reset()
    compiled(lambda x: gathered(x) @ W + 1)(X)
    assert asynctp_passes.summary().fused == 2


AT_EXIT = """
import logging
import torch
from torch.distributed._functional_collectives import all_gather_tensor
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import asynctp_passes

torch._inductor.config.fallback_by_default = True
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
program = lambda x: all_gather_tensor(x, 0, dist.group.WORLD) @ torch.ones(16, 8)
torch.compile(program, backend="asynctp")(torch.ones(4, 16))
dist.destroy_process_group()
print("done")
print(logging.getLogger("asynctp_passes").level)
"""


def test_a_process_that_is_told_by_its_environment() -> None:
    """What is required is judged at its end, and TORCH_LOGS knows the package: `+` shows more, as of torch's own."""
    environment = {**os.environ, "ASYNCTP_REQUIRE": "fused=2,missed=0", "TORCH_LOGS": "asynctp_passes"}
    ran = subprocess.run(
        [sys.executable, "-c", AT_EXIT], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, f"done\n{logging.INFO}\n"), ran.stderr
    assert "ASYNCTP_REQUIRE: asynctp: 1 chains are fused" in ran.stderr
    assert "1 of 1 chains fused, 0 missed" in ran.stderr


RANKS = """
import multiprocessing
import sys
import torch
from torch.distributed._functional_collectives import all_gather_tensor
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import asynctp_passes

def program(x):
    return all_gather_tensor(x, 0, dist.group.WORLD) @ torch.ones(16, 8)

def rank(compiles):
    torch._inductor.config.fallback_by_default = True
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    if compiles:
        torch.compile(program, backend="asynctp")(torch.ones(4, 16))
    helper = multiprocessing.get_context("fork").Process(target=print, args=("helped",), kwargs={"flush": True})
    helper.start()
    helper.join()
    dist.destroy_process_group()
    print(helper.exitcode, flush=True)

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["torch"])
    for method in ("fork", "forkserver", "spawn"):
        start = multiprocessing.get_context(method).Process
        ranks = [start(target=rank, args=(compiles,)) for compiles in ((True, False) if method == "fork" else (False,))]
        for process in ranks:
            process.start()
            process.join()
        print(method, [process.exitcode for process in ranks], flush=True)
"""


def test_a_requirement_of_ranks_that_a_process_starts(tmp_path: Path) -> None:
    """Each rank answers for itself, and the last one compiles nothing. Launchers and helpers do not answer."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    environment = {**os.environ, "ASYNCTP_REQUIRE": "fused=1"}
    ran = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    codes = {"fork": [0, 1], "forkserver": [1], "spawn": [1]}
    assert ran.stdout == "".join("helped\n0\n" * len(each) + f"{method} {each}\n" for method, each in codes.items())
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("ASYNCTP_REQUIRE: asynctp: 0 chains are fused") == len(codes)
