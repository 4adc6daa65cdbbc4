"""Notes on bugs of torch: where the pattern is at hand there is one, elsewhere none."""

from __future__ import annotations

import logging
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from dumps import CORPUS, load
from graph_builder import GraphBuilder
from passes import run_pass
from scripts import run_forked

import asynctp_passes
from asynctp_passes import Note, Report
from asynctp_passes.reporting import torch_notes
from asynctp_passes.torch_private import dynamo, process_groups

_OPS = torch.library.Library("notes_like", "FRAGMENT")
_OPS.define("custom_sum(Tensor x) -> Tensor")

BROKEN = "Dynamo developers have intentionally marked that the function `_maybe_view_chunk_cat` should not be traced."


@pytest.mark.skipif(not hasattr(torch._inductor.config, "batch_invariant"), reason="torch has it from 2.13 on")
def test_fused_chains_under_the_batch_invariant_mode() -> None:
    path = CORPUS / "torch2.13/funcol_ag_2d_dim0__0.txt"
    assert run_pass(load(path).graph).notes == ()
    with torch._inductor.config.patch(batch_invariant=True):
        (note,) = run_pass(load(path).graph).notes
    assert "is a promise of the kernels for GPUs" in note.text


def test_fused_chains_that_are_batch_invariant() -> None:
    b = GraphBuilder()
    x, w = (b.input(name, [64, 64], torch.bfloat16, device="cuda") for name in ("x", "w"))
    report = run_pass(b.returns(b.mm(b.gather(x), w)), invariant="batch")
    (note,) = report.notes
    assert "have the same bits however many rows there are" in note.text
    assert report.fused[0].invariant == "batch"
    assert ", batch-invariant" in str(report)


@pytest.mark.skipif(not hasattr(torch._inductor.config, "batch_invariant"), reason="torch has it from 2.13 on")
@pytest.mark.parametrize(
    ("invariant", "switch", "held"),
    [("auto", True, "batch"), ("auto", False, ""), ("off", True, ""), ("batch", False, "batch")],
)
def test_the_option_wins_over_inductors_switch(invariant: str, switch: bool, held: str) -> None:
    b = GraphBuilder()
    x, w = (b.input(name, [64, 64], torch.bfloat16, device="cuda") for name in ("x", "w"))
    with torch._inductor.config.patch(batch_invariant=switch):
        report = run_pass(b.returns(b.mm(b.gather(x), w)), invariant=invariant)
    assert [one.invariant for one in report.fused] == [held]
    assert [note.kind for note in report.notes] == ["bits"] * bool(held)


def test_small_chains_that_are_not_batch_invariant() -> None:
    def notes(least: int = 50_000, **options: str) -> list[Note]:
        b = GraphBuilder()
        x, w, large = (
            b.input(name, [rows, 64], torch.bfloat16, device="cuda")
            for name, rows in (("x", 64), ("w", 64), ("large", 640))
        )
        graph = b.returns(b.mm(b.gather(x), w), b.mm(b.gather(large), w))
        return list(run_pass(graph, min_bytes=least, **options).notes)

    assert notes() == []
    fused, small = notes(invariant="batch")
    assert "have the same bits however many rows there are" in fused.text
    assert small.text.startswith("all_gather_into_tensor: the program's own ops make these chains")
    assert "Set min_bytes=0 and min_flops=0, and they are fused" in small.text
    (fused,) = notes(0, invariant="batch")
    assert "have the same bits however many rows there are" in fused.text


def test_a_matmul_of_one_row_that_inductor_decomposed() -> None:
    """As `torch._inductor.decomposition.mm` has it."""

    def notes(invariant: str) -> list[Note]:
        b = GraphBuilder()
        x, w = (b.input(name, sizes, torch.bfloat16, device="cuda") for name, sizes in (("x", [1, 64]), ("w", [64, 8])))
        wide = [b.call(torch.ops.aten.unsqueeze.default, *each) for each in ((x, 2), (w, 0))]
        total = b.call(torch.ops.aten.sum.dim_IntList, b.mul(*wide), [1])
        return list(run_pass(b.returns(b.all_reduce(total)), invariant=invariant).notes)

    assert notes("batch") == []
    with torch._inductor.config.patch(coordinate_descent_tuning=True):
        assert notes("off") == []
        (note,) = notes("batch")
    assert note.text.startswith("Inductor's coordinate_descent_tuning makes a matmul of one row a sum")
    assert not note.informs


def test_an_op_that_may_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "has_peers", lambda: True)
    b = GraphBuilder()
    x = b.mm(b.input("x", [4, 8]), b.input("w", [8, 8]))
    (note,) = run_pass(b.returns(b.call_like(x.meta["val"], torch.ops.notes_like.custom_sum.default, x))).notes
    assert (note.kind, note.informs) == ("opaque", True)
    assert "notes_like.custom_sum.default; register a collective with register_collective" in note.text


def test_a_gather_hidden_by_a_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "graph_breaks", lambda: [BROKEN, "print", BROKEN])
    (note,) = run_pass(load(CORPUS / "torch2.13/funcol_ag_2d_dim0__0.txt").graph).notes
    assert "2 times in this process" in note.text
    monkeypatch.setattr(dynamo, "graph_breaks", lambda: ["print"])
    assert torch_notes.hidden_calls() == ""


def test_a_cached_graph_has_the_breaks_of_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that filled the cache may have broken graphs, and this one not; or the other way round."""
    monkeypatch.setattr(dynamo, "graph_breaks", lambda: [BROKEN, BROKEN])
    (filled,) = torch_notes.notes(load(CORPUS / "torch2.13/funcol_ag_2d_dim0__0.txt").graph)
    monkeypatch.setattr(dynamo, "graph_breaks", list)
    another = Note("torch", "another note")
    assert torch_notes.with_own_breaks((filled, another)) == (another,)
    monkeypatch.setattr(dynamo, "graph_breaks", lambda: [BROKEN])
    (broken, other) = torch_notes.with_own_breaks((filled, another))
    assert (broken.kind, other) == ("breaks", another)
    assert "1 time in this process" in broken.text


def test_a_collective_whose_handle_hides_it() -> None:
    """Megatron's layers ask for handles; dynamo gives such a call up. The text is dynamo's own."""
    program = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import asynctp_passes

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

def layer(x, w):
    full = torch.empty(2 * x.shape[0], x.shape[1])
    handle = dist.all_gather_into_tensor(full, x, async_op=True)
    handle.wait()
    return full @ w

torch.compile(layer, backend="asynctp")(torch.ones(4, 8), torch.ones(8, 8))
print("reports:", len(asynctp_passes.reports()))
"""
    done = _run(program)
    assert done.returncode == 0, done.stderr
    assert "reports: 0" in done.stdout
    assert "async_op=True" in done.stderr
    assert "in no report" in done.stderr


def test_blocks_that_breaks_hide() -> None:
    """Such a model runs without a graph, or in pieces, and nothing else would say why."""
    program = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint_sequential
import asynctp_passes

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
plain, hooked = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
hooked.register_full_backward_hook(lambda module, grads_in, grads_out: None)

def model(x):
    return hooked(checkpoint_sequential([plain], 1, x, use_reentrant=False))

options = {"fallback_by_default": True}
torch.compile(model, backend="asynctp", options=options)(torch.ones(4, 8, requires_grad=True))
asynctp_passes.reports()
"""
    done = _run(program)
    assert done.returncode == 0, done.stderr
    assert "at torch.utils.checkpoint.checkpoint_sequential, 1 time in this process" in done.stderr
    assert "at a module with a backward hook, 1 time in this process" in done.stderr


def test_a_frame_that_dynamo_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    text = "raised exception RuntimeError('torch.distributed.nn.functional.all_gather is not supported')"
    monkeypatch.setitem(counters, "unimplemented", Counter({text: 1}))
    assert "torch.distributed.nn.functional, 1 time in" in torch_notes.hidden_calls()


def test_it_is_logged_where_there_is_no_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A frame that torch gave up on gives no graph, and so no report."""
    monkeypatch.setattr(dynamo, "graph_breaks", lambda: [BROKEN])
    with caplog.at_level(logging.WARNING, "asynctp_passes"):
        asynctp_passes.reports()
    assert "in no report" in caplog.text


def test_graph_breaks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters, "graph_break", Counter({BROKEN: 2}))
    assert dynamo.graph_breaks() == [BROKEN, BROKEN]


def test_the_installed_torch_says_so_if_it_breaks_the_graph() -> None:
    """On torch 2.11 and 2.12 the gather is hidden and the note logged; newer ones fuse it, without a note."""
    program = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore
import asynctp_passes

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
group = dist.group.WORLD  # 2.12 fails behind the break if the graph there takes the group

def layer(x, w):
    return funcol.all_gather_tensor(x, 1, group) @ w

torch.compile(layer, backend="asynctp")(torch.ones(2, 4, 8), torch.ones(8, 8))
print("fused:", sum(len(report.fused) for report in asynctp_passes.reports()))
"""
    done = _run(program)
    assert done.returncode == 0, done.stderr
    fused = "fused: 1" in done.stdout
    assert fused != ("in no report" in done.stderr), done.stderr


@pytest.mark.parametrize("recipe", ["torch.nn.functional.ScalingType.RowWise", "ROWWISE"])
def test_the_installed_torch_says_so_if_it_does_not_trace_scaled_mm(recipe: str) -> None:
    """torch 2.11 and 2.12 break the graph at `F.scaled_mm`; 2.12 gives the frame up if that names the recipe."""
    program = f"""
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore
import asynctp_passes

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
library = torch.library.Library("aten", "IMPL")  # some versions have no kernel for CPUs; eager runs what is not traced
library.impl("_scaled_mm_v2", lambda a, b, *_: a.float() @ b.float(), "CPU")
ROWWISE = torch.nn.functional.ScalingType.RowWise

def layer(x, w, x_scale, w_scale):
    whole, scale = (funcol.all_gather_tensor(part, 0, dist.group.WORLD) for part in (x, x_scale))
    return torch.nn.functional.scaled_mm(whole, w, scale, {recipe}, w_scale, {recipe}, output_dtype=torch.float32)

fp8 = torch.float8_e4m3fn
operands = torch.ones(16, 32).to(fp8), torch.ones(64, 32).to(fp8).t(), torch.ones(16, 1), torch.ones(1, 64)
torch.compile(layer, backend="asynctp")(*operands)
print("fused:", sum(len(report.fused) for report in asynctp_passes.reports()))
"""
    done = _run(program)
    assert done.returncode == 0, done.stderr
    fused = "fused: 2" in done.stdout  # the operand's gather and the scale's
    assert fused or "fused: 0" in done.stdout
    assert fused != ("broke a graph at torch.nn.functional.scaled_mm" in done.stderr), done.stdout + done.stderr


def _run(program: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(program, encoding="utf-8")
        return run_forked(path)


def test_notes_are_printed_and_survive_json() -> None:
    report = Report("graph", "forward", (), notes=(Note("torch", "beware"),))
    assert str(report).splitlines()[-1] == "note: beware"
    assert Report.from_json(report.to_json()) == report
