"""`asynctp bench --e2e`: a run on the CPU, and what it makes of measurements, which are made up here.

`EXPECTTEST_ACCEPT=1` writes the expectations anew.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from interpreter import interpreter_fault
from ranks import run_ranks
from scripts import run_forked_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asynctp_passes.tools import cli, e2e
from asynctp_passes.tools.demo.model import Styles
from asynctp_passes.tools.demo.recipe import Place, RecipeError
from asynctp_passes.tools.e2e import Found, Problem, Row

FP8 = torch.float8_e4m3fn
HERE = Place(0, 4, torch.device("cpu"))
QUICK = ["--option", "fallback_by_default=True"] if "fallback_by_default" in torch._inductor.list_options() else []


def row(backend: str = "inductor", **values: Any) -> Row:
    """A measurement of a 70B block in bf16."""
    return replace(
        Row(
            problem=Problem("70b", "bf16", 1, 8192, 2), backend=backend, world=4, step=40.0, forward=14.0, host=6.0,
            exposed=7.5, peak_bytes=3 * 2**30, loss=1.99882, tensor="0.wq", difference=0.0, limit=0.05,
            fused=None, compile_s=20.0,
        ),
        **values,
    )  # fmt: skip


BASE = row()
INTREE = row("intree", step=48.0, forward=13.0, exposed=3.0, difference=0.71)
OURS = row("asynctp", step=32.0, forward=11.2, exposed=0.4, difference=0.018, fused=(8, 0))
FORWARD = row(
    "asynctp", problem=Problem("70b", "bf16", 1, 8, 2, "tp", "forward"), step=None, forward=0.21, host=0.02,
    exposed=None, peak_bytes=None, tensor="row 5", difference=0.06, fused=(2, 0),
)  # fmt: skip


# --- a run -----------------------------------------------------------------------------------------------------------
@pytest.mark.ranks
def test_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """All backends on two ranks: equal losses and gradients, all chains fused, and the raw results in a file."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out"
    assert cli.main(["bench", "--e2e", "--cpu", "--rounds", "1", "--out", str(out), *QUICK]) == 0
    printed, progress = capfd.readouterr()
    for step in (
        "compile and compare backends, 1 of 3",
        "compile and compare backends, 3 of 3 (the step before took ",
        "compute without a compiler",
        "warm up",
        "time all backends, 1 of 1",
    ):
        assert progress.count(f" s  debug fp32 2x64: {step}") == 1, "one rank says it"
        assert step not in printed
    assert "note: PyTorch's async TP fuses on GPUs only; here intree is plain Inductor" in printed
    assert f"wrote {out}: e2e.json" in printed
    said = json.loads((out / "e2e.json").read_text())
    assert (said["machine"], said["failed"], said["left_out"]) == ("2 x CPU (gloo)", [], [])
    assert said["command"].startswith("asynctp bench --e2e --ranks 2 --cpu --sizes debug --kinds fp32 --batches 2x64")
    assert [each["backend"] for each in said["rows"]] == ["inductor", "intree", "asynctp"]
    for each in said["rows"]:
        assert each["right"]
        assert each["difference"] < 1e-5
        assert each["loss"] == pytest.approx(said["rows"][0]["loss"], rel=1e-5)
        assert each["step"] > each["forward"] > 0
    assert [each["fused"] for each in said["rows"]] == [None, None, [8, 0]]


@pytest.mark.ranks
def test_run_without_sequence_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A forward and a step: two all-reduces in each direction, all fused, of rows and tokens that no rank divides.

    Ranks are forked from a process that has torch; `test_run_on_the_cpu` has torchrun start them.
    """

    def start(module: str, ranks: int, arguments: Sequence[str], cpu: bool = False) -> int:
        print(run_forked_ranks(Path(e2e.__file__), *arguments, cwd=tmp_path, ranks=ranks))
        return 0

    monkeypatch.setattr(cli, "_start_ranks", start)
    given = ["--parallel", "tp", "--rows", "1", "--batches", "1x5", "--backends", "inductor,asynctp", "--blocks", "1"]
    assert cli.main(["bench", "--e2e", "--cpu", "--rounds", "1", "--out", str(tmp_path), *given, *QUICK]) == 0
    said = json.loads((tmp_path / "e2e.json").read_text())
    assert (said["failed"], said["left_out"]) == ([], [])
    assert "--batches 1x5 --parallel tp --backends inductor,asynctp --rows 1 " in said["command"]
    base, ours = said["rows"][::2], said["rows"][1::2]
    shown = capfd.readouterr().out.splitlines()
    for (shape, part, fused), plain, fast in zip([("1x1", "forward", 2), ("1x5", "step", 4)], base, ours, strict=True):
        for each in (plain, fast):
            problem = each["problem"]
            assert (f"{problem['batch']}x{problem['sequence']}", problem["parallel"], problem["part"]) == (
                shape, "tp", part,
            )  # fmt: skip
            assert each["right"]
            assert each["difference"] < 1e-5
            assert each["loss"] == pytest.approx(plain["loss"], rel=1e-5)
            assert each["forward"] > 0
            assert each["step"] is None if part == "forward" else each["step"] > each["forward"]
            assert sum(f" {shape} " in line and f" tp {part} " in line for line in shown) == 2
        assert (plain["fused"], fast["fused"]) == (None, [fused, 0])


# --- what ranks share ------------------------------------------------------------------------------------------------
def untimed(bench: e2e.Bench, prepared: dict[str, e2e.Prepared], rounds: int) -> None:
    """In place of `e2e.measure`."""
    for each in prepared.values():
        each.times.append((2.0, 1.0))
        each.hosts.append(1.0)


def shared_in_problems(rank: int, world: int, problems: list[tuple[str, str]]) -> list[int | None]:
    """Bytes that asynctp shares at the end of each problem, taken from `Row.peak_bytes`, which GPUs count them in.

    problems: (batch, the implementation of all calls), interpreted.
    """
    from asynctp_kernels import cuda

    patches = {
        "measure": untimed,
        "peak_bytes": lambda bench, backend, blocks, held: cuda.shared_bytes(bench.mesh.get_group()),
    }
    batches = ",".join(batch for batch, _ in problems)
    options = e2e.parse(["--blocks", "1", "--backends", "inductor,asynctp", "--batches", batches, *QUICK])
    with mock.patch.multiple(e2e, **patches):
        measured = e2e.rows(options, Place(rank, world, torch.device("cpu")), Found())
        shared = []
        for _, implementation in problems:
            with cuda.forced(implementation):
                base, ours = next(measured), next(measured)
            assert (base.backend, ours.backend, ours.right, ours.fused) == ("inductor", "asynctp", True, (8, 0))
            shared.append(ours.peak_bytes)
        assert list(measured) == []
    return shared


@pytest.mark.ranks
@pytest.mark.thorough
def test_a_problem_shares_what_it_shares_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has the process to itself, and later ones share no more than that: their calls make all of it anew.

    Signals and a box, or landings and their words, each of 2 MiB, the least there is.
    """
    if fault := interpreter_fault():
        pytest.skip(fault)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("ASYNCTP_CPU_IMPLEMENTATION", "interpreted")
    problems = [("1x16", "decomposed"), ("1x32", "direct"), ("1x16", "decomposed")]
    assert run_ranks(2, shared_in_problems, problems, timeout_s=240) == [[2 * 2**21, 3 * 2**21, 2 * 2**21]] * 2


def test_each_problem_starts_anew_behind_a_barrier(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is dropped, all ranks have come and are done, and only then memory goes; on a GPU to the end."""
    said: list[str] = []

    def measured(problem: Problem, *_: Any) -> Iterator[Row]:
        said.append(str(problem))
        yield row(problem=problem)

    monkeypatch.setattr(torch.compiler, "reset", lambda: said.append("reset"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("empty"))
    monkeypatch.setattr(dist, "barrier", lambda: said.append("barrier"))
    monkeypatch.setattr(e2e, "release_shared", lambda group: said.append(f"release {group.group_name}"))
    monkeypatch.setattr(e2e.gc, "collect", lambda: said.append("collect"))
    monkeypatch.setattr(e2e, "_rows_of", measured)
    monkeypatch.setattr(e2e, "init_device_mesh", lambda *_, **__: mesh)
    monkeypatch.setattr(e2e, "slowest", lambda value, here: value)
    options = e2e.parse(["--batches", "1x64,1x32"])
    assert len(list(e2e.rows(options, Place(0, 1, torch.device("cuda", 0)), Found()))) == 2
    release = f"release {mesh.get_group().group_name}"
    anew = ["reset", "synchronize", "barrier", "synchronize", release, "collect", "empty"]
    assert said == [*anew, "debug fp32 1x64", *anew, "debug fp32 1x32"]


# --- right and wrong -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("difference", "right"), [(0.05, True), (0.051, False), (math.nan, False), (math.inf, False)])
def test_a_backend_beyond_the_limit_is_wrong(difference: float, right: bool) -> None:
    assert row(difference=difference).right is right


def test_each_gradient_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e, "largest", lambda values, here: values.tolist())
    a, b = torch.ones(4), torch.arange(1.0, 5.0)
    assert e2e.differences({"a": a, "b": b}, {"a": a, "b": b}, HERE) == {"a": 0, "b": 0}
    assert e2e.differences({"a": -a, "b": b * 1.25}, {"a": a, "b": b}, HERE) == pytest.approx({"a": 2, "b": 0.25})
    assert math.isnan(e2e.differences({"a": a * math.nan}, {"a": a}, HERE)["a"])


def test_limits_follow_rounding_but_zeros_never_pass() -> None:
    allowed = e2e.limits({"exact": 0.0, "rounded": 0.1, "cancelled": 0.56}, floor=0.02)
    assert allowed == pytest.approx({"exact": 0.02, "rounded": 0.3, "cancelled": 0.9})


def test_in_fp8_nothing_may_be_much_further_from_bf16_than_plain_compile() -> None:
    allowed = e2e.limits_in_fp8({"exact": 0.0, "rounded": 0.1, "cancelled": 0.56, "noise": 0.99}, floor=0.01)
    assert allowed == pytest.approx({"exact": 0.01, "rounded": 0.12, "cancelled": 0.626, "noise": 0.9})


class Rounded(torch.autograd.Function):
    """x in an fp8 format, as an operand of a matmul."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of fp8 are those of bf16."""
    monkeypatch.setattr(e2e, "float8_layers", lambda block, kind: None)
    monkeypatch.setattr(e2e, "styles_of", lambda kind: Styles())
    monkeypatch.setattr(e2e, "require_precision", lambda kind: None)


def test_in_fp8_all_are_compared_with_bf16(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other roundings are right although they differ from plain compile's; one of a bit less is wrong."""
    formats = {"inductor": (1.0, FP8), "intree": (1.5, FP8), "asynctp": (1.02, FP8)}  # where its grid lies, and which

    def compiled(bench: e2e.Bench, backend: str) -> list[Any]:
        scale, dtype = formats[backend]
        return [lambda x, block=block: block(Rounded.apply(x * scale, dtype) / scale) for block in bench.blocks]

    def rows() -> dict[str, Row]:
        found, here = Found(), Place(0, 1, torch.device("cpu"))
        measured = {each.backend: each for each in e2e.rows(options, here, found)}
        assert (found.failed, found.left_out) == ([], [])
        return measured

    without_torchao(monkeypatch)
    monkeypatch.setattr(e2e.Bench, "compiled", compiled)
    monkeypatch.setattr(e2e, "measure", untimed)
    options = e2e.parse(["--kinds", "fp8-rowwise", "--blocks", "1", "--batches", "1x16"])
    rounded = rows()
    assert list(rounded) == ["inductor", "intree", "asynctp"]
    assert all(0.01 < each.difference <= each.limit < 0.1 and each.right for each in rounded.values())
    formats["asynctp"] = (1.0, torch.float8_e5m2)
    worse = rows()
    assert [each.difference for each in worse.values()][:2] == [each.difference for each in rounded.values()][:2]
    assert [each.right for each in worse.values()] == [True, True, False]
    assert worse["asynctp"].difference < 3 * worse["inductor"].difference, "three times the rounding would let it pass"


def test_each_row_of_a_forward_is_compared(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of many that is a thousandth off is wrong, and is named."""

    def compiled(bench: e2e.Bench, backend: str) -> list[Any]:
        factor = torch.ones(64, 1)
        factor[17] += 1e-3 * (backend == "asynctp")
        return [lambda x, block=block: block(x) * factor for block in bench.blocks]

    monkeypatch.setattr(e2e.Bench, "compiled", compiled)
    monkeypatch.setattr(e2e, "measure", untimed)
    options = e2e.parse(["--parallel", "tp", "--rows", "64", "--blocks", "1"])
    measured = e2e.rows(options, Place(0, 1, torch.device("cpu")), Found())
    found = [next(measured) for _ in options.backends]
    assert [each.right for each in found] == [True, True, False]
    assert (found[2].tensor, found[2].step, found[2].forward) == ("row 17", None, 1.0)
    assert found[2].difference == pytest.approx(1e-3, rel=1e-2)


def test_a_captured_forward_computes_on_what_is_compared(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what warm-up computed nor what is in memory when the capture ends can pass for a replay's result."""
    bench = e2e.Bench(Problem("debug", "fp32", 1, 4, 1, "tp", "forward"), Place(0, 1, torch.device("cpu")), mesh, {})
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    seen: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        calls.append((x, x * 2))
        return calls[-1][1]

    graph = mock.Mock(replay=lambda: torch.mul(calls[-1][0], 2, out=calls[-1][1]))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda each: contextlib.nullcontext(each))
    program = bench.program([block], graph=True)
    assert len(seen) == e2e.WARM_UP + 1
    assert all(torch.equal(each, bench.target) for each in seen)
    assert calls[-1][1].isnan().all()
    loss, rows = bench.outcome(program)
    assert len(seen) == e2e.WARM_UP + 1, "replayed, and not run"
    assert torch.equal(torch.stack(list(rows.values())), 2 * bench.x[0])
    assert torch.equal(loss, (2 * bench.x - bench.target).square().mean())


def test_no_bf16_no_verdict(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what fp8 is compared with the problem has failed, and says so."""
    without_torchao(monkeypatch)
    monkeypatch.setattr(e2e.Bench, "step", mock.Mock(side_effect=RuntimeError("out of memory")))
    found = Found()
    options = e2e.parse(["--kinds", "fp8", "--batches", "1x32"])
    assert list(e2e.rows(options, Place(0, 1, torch.device("cpu")), found)) == []
    assert found.failed == ["debug fp8 1x32 in bf16 without a compiler: RuntimeError: out of memory"]


@pytest.mark.parametrize(
    ("found", "nearest"),
    [
        ({"exact": 0.0, "rounded": 0.0}, ("exact", 0.0, 0.02)),
        ({"exact": 0.015, "rounded": 0.2}, ("exact", 0.015, 0.02)),
        ({"exact": 0.001, "rounded": 0.2}, ("rounded", 0.2, 0.3)),
        ({"exact": 0.5, "rounded": 0.2}, ("exact", 0.5, 0.02)),
    ],
)
def test_the_gradient_that_is_reported(found: dict[str, float], nearest: tuple[str, float, float]) -> None:
    assert e2e.nearest_to_its_limit(found, {"exact": 0.02, "rounded": 0.3}) == nearest


def test_what_is_not_a_number_is_reported_before_all_others() -> None:
    found = e2e.nearest_to_its_limit({"a": 5.0, "b": math.nan, "c": 7.0}, dict.fromkeys("abc", 0.1))
    assert found[0] == "b"
    assert not row(tensor=found[0], difference=found[1], limit=found[2]).right


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        ({"rows": [{"right": True}], "failed": []}, 0, 0),
        ({"rows": [{"right": True}, {"right": False}], "failed": []}, 0, 1),
        ({"rows": [{"right": True}], "failed": ["70b intree: raised"]}, 0, 1),
        ({"rows": [], "failed": [], "left_out": ["debug fp8 2x64: no torchao"]}, 0, 2),
        ({"rows": [{"right": True}], "failed": [], "left_out": ["debug fp8 2x64: no torchao"]}, 0, 0),
        ({"rows": [{"right": True}], "failed": []}, 1, 3),
        (None, 1, 3),
    ],
)
def test_exit_code(
    said: Any, status: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """0 all is right, 1 a backend is wrong or raised, 2 nothing was measured, 3 the ranks did not end well."""

    def ranks(module: str, count: int, arguments: list[str], cpu: bool) -> int:
        if said is not None:
            Path(arguments[arguments.index("--out") + 1], "e2e.json").write_text(json.dumps(said))
        return status

    monkeypatch.setattr(cli, "_start_ranks", ranks)
    assert cli.main(["bench", "--e2e", "--cpu"]) == code
    assert ("ended early; what was measured is above" in capsys.readouterr().err) == (code == 3)


# --- what comes out --------------------------------------------------------------------------------------------------
def test_lines() -> None:
    assert_expected_inline(
        "\n".join([e2e.HEADER, *(e2e.line(each, BASE) for each in (BASE, INTREE, OURS)), e2e.line(FORWARD, FORWARD)]),
        """\
model  operands    batch    runs       backend        step          forward         exposed    host   peak      loss   differs   fused
(milliseconds and times as fast as plain compile; exposed communication; GiB; relative difference of gradients,
or of a forward's rows: from plain compile's; in fp8, from those in bf16 without a compiler)
70b    bf16        1x8192   sp step    inductor     40.000  1.00x    14.000  1.00x     7.50    6.00   3.00   1.99882   0.0e+00
70b    bf16        1x8192   sp step    intree       48.000  0.83x    13.000  1.08x     3.00    6.00   3.00   1.99882   7.1e-01          WRONG: 0.wq may differ by 5.0e-02
70b    bf16        1x8192   sp step    asynctp      32.000  1.25x    11.200  1.25x     0.40    6.00   3.00   1.99882   1.8e-02  8 of 8
70b    bf16        1x8      tp forward asynctp                        0.210  1.00x             0.02          1.99882   6.0e-02  2 of 2  WRONG: row 5 may differ by 5.0e-02""",  # noqa: E501
    )


def test_record_keeps_everything() -> None:
    said = json.loads(
        json.dumps(e2e.record(Found([BASE, OURS, FORWARD], ["x: raised"], ["y: no time"]), HERE, "the command"))
    )
    assert (said["failed"], said["left_out"], said["command"]) == (["x: raised"], ["y: no time"], "the command")
    rows = [{**each, "problem": Problem(**each["problem"]), "fused": each["fused"] and tuple(each["fused"])}
            for each in said["rows"]]  # fmt: skip
    kept = [Row(**{name: value for name, value in each.items() if name != "right"}) for each in rows]
    assert kept == [BASE, OURS, FORWARD]


def test_time_is_shared_by_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is begun that, by what the longest took so far, would not end in time."""
    monkeypatch.setattr(e2e, "slowest", lambda value, here: value)
    clock = [100.0]
    monkeypatch.setattr(e2e.time, "monotonic", lambda: clock[0])
    budget = e2e.Budget(60, HERE)
    assert budget.allows()
    budget.spent(25)
    clock[0] = 134.0
    assert budget.allows()
    clock[0] = 136.0
    assert not budget.allows()


# --- options ---------------------------------------------------------------------------------------------------------
def test_problems_of_the_options() -> None:
    options = e2e.parse(["--sizes", "debug", "--kinds", "fp32,bf16", "--batches", "1x64,2x32", "--blocks", "3"])
    assert list(map(str, e2e.problems(options))) == [
        "debug fp32 1x64", "debug bf16 1x64", "debug fp32 2x32", "debug bf16 2x32",
    ]  # fmt: skip
    assert {each.blocks for each in e2e.problems(options)} == {3}


def test_problems_without_sequence_parallelism() -> None:
    """Forwards come first, so that what takes longest is left out where time runs out."""
    options = e2e.parse(["--parallel", "sp,tp", "--rows", "1,8", "--batches", "1x64"])
    assert list(map(str, e2e.problems(options))) == [
        "debug fp32 1x1 tp forward", "debug fp32 1x8 tp forward", "debug fp32 1x64", "debug fp32 1x64 tp step",
    ]  # fmt: skip
    assert e2e.parse(["--parallel", "tp"]).rows == [1, 64]
    assert e2e.parse([]).rows is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "9b"], "--sizes '9b' is not valid; it must be of debug, small, 8b, 70b"),
        (["--kinds", "int8"], "--kinds 'int8' is not valid; it must be of fp32, bf16, fp8, fp8-rowwise"),
        (["--batches", "4096"], "--batches '4096' is not valid; it must be BATCHxSEQUENCE, as 2x4096"),
        (["--batches", "0x64"], "--batches '0x64' is not valid"),
        (
            ["--backends", "asynctp"],
            "--backends 'asynctp' is not valid; it must be inductor first: it is what the",
        ),
        (["--backends", "inductor,eager"], "--backends 'eager' is not valid; it must be of inductor, intree, asynctp"),
        (["--blocks", "0"], "--blocks 0 is not valid; it must be at least 1"),
        (["--out", "/dev/null"], "--out /dev/null is not valid; it must be a folder that can be written, or made"),
        (["--batches", "2x64x2"], "--batches '2x64x2' is not valid"),
        (["--parallel", "dp"], "--parallel 'dp' is not valid; it must be of sp, tp"),
        (["--rows", "64"], "--rows is not valid with --e2e --parallel sp; add --parallel tp, or leave it out"),
        (["--rows", "0", "--parallel", "tp"], "--rows 0 is not valid; it must be at least 1"),
        (["--sizes", "70b"], "--sizes '70b' is not valid without GPUs; it must be debug"),
        (["--option", "strict"], "--option 'strict' is not valid; it must be NAME=VALUE, as strict=all"),
        (["--option", "strict=no"], "--option: asynctp: strict='no' is not valid; it must be one of ('off', 'zero', "),
        (["--option", "strickt=all"], "--option: asynctp: option 'strickt' is not valid; it must be one of "),
    ],
)
def test_bad_options(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError) as raised:
        e2e.parse(arguments)
    assert message in str(raised.value)


def test_sizes_that_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    options = e2e.parse(["--sizes", "debug", "--batches", "1x66"])
    with pytest.raises(RecipeError, match=r"1x66: sequence=66 is not valid for 4 tensor-parallel ranks"):
        e2e.check_sizes(options, 4)
    e2e.check_sizes(e2e.parse(["--sizes", "debug", "--batches", "1x66", "--parallel", "tp"]), 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "1x64,1x66", "--ranks", "4"], "--sizes debug --batches 1x66: sequence=66 is not valid for 4"),
        (
            ["--ranks", "3"],
            "--sizes debug --batches 2x64: heads=8 is not valid for 3 tensor-parallel ranks; it must be",
        ),
        (["--batches", "64"], "--batches '64' is not valid"),
        (["--backends", "asynctp"], "--backends 'asynctp' is not valid"),
        (["--sizes", "8b"], "--sizes '8b' is not valid without GPUs"),
        (["--option", "expect=-1"], "--option: asynctp: expect=-1 is not valid"),
    ],
)
def test_what_cannot_be_measured_starts_no_rank(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(cli, "_start_ranks") as started:
        assert cli.main(["bench", "--e2e", "--cpu", *arguments]) == 2
    assert not started.called
    assert message in capsys.readouterr().err


def test_without_gpus_the_cpu_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--e2e"]) == 2
    assert "bench: 0 GPUs here, it needs at least 2 of one host" in (said := capsys.readouterr().err)
    assert "add --cpu, to time a tiny model on the CPU" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpu"], "--cpu is not valid without --e2e; add --e2e, or leave it out"),
        (["--sizes", "8b"], "--sizes is not valid without --e2e"),
        (["--parallel", "tp"], "--parallel is not valid without --e2e"),
        (["--e2e", "--rows", "64"], "--rows is not valid with --e2e --parallel sp; add --parallel tp, or"),
        (["--e2e", "--tune"], "--tune is not valid with --e2e"),
        (["--e2e", "--cpu", "--ranks", "1"], "--ranks 1 is not valid; it must be at least 2"),
    ],
)
def test_options_of_the_other_benchmark(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_is_named_twice_is_measured_once() -> None:
    options = e2e.parse(["--rows", "4,1,4", "--parallel", "tp,tp", "--sizes", "debug,debug"])
    assert (options.rows, options.parallel, options.sizes) == ([4, 1], ["tp"], ["debug"])
