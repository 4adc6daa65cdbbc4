"""What `asynctp bench` makes of its measurements: lines, summary, record, tuning table; and its options.

The measurements are made up: nothing here needs a GPU. `EXPECTTEST_ACCEPT=1` writes the expectations anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import torch.distributed as dist
from asynctp_kernels.cuda import select
from expecttest import assert_expected_inline

from asynctp_passes import bench, cli
from asynctp_passes.bench import Row, Timing

GPU = "NVIDIA H200"


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """4 GPUs of this name, and a tuning table of their own."""
    path = tmp_path / "cache" / "tuning.json"
    monkeypatch.setenv(select.TABLE_VARIABLE, str(path))
    monkeypatch.delenv(select.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name=GPU))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    select.refresh()
    yield path
    monkeypatch.undo()
    select.refresh()


def timing(graph: float, eager: float | None = None, host: float = 40.0) -> Timing:
    return Timing(graph, graph + 20 if eager is None else eager, host)


def row(op: str = "gather", kind: str = "bf16", m: int = 4096, k: int = 8192, n: int = 2560, **timings: Timing) -> Row:
    """A measurement; without `timings` one in which fused is the fastest."""
    found = timings or {
        "cublas": timing(250), "nccl": timing(480), "intree": timing(420), "asynctp": timing(300), "fused": timing(300),
        "decomposed": timing(310), "direct": timing(400), "unfused": timing(480),
    }  # fmt: skip
    return Row(op, kind, 4, m, k, n, found, dict.fromkeys(found, 0.002), "fused", {"other": "no"})


# --- figures -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("op", "kind", "width"),
    [
        ("gather", "bf16", 2 * 8192), ("gather", "fp8", 8192), ("gather", "fp8-rowwise", 8192),
        ("scatter", "bf16", 2 * 2560), ("scatter", "fp8", 2 * 2560),
    ],
)  # fmt: skip
def test_bound_is_the_larger_of_product_and_copies(op: str, kind: str, width: int) -> None:
    """A rank receives the three other parts of M / 4 rows: of A before a product, of the bf16 result after it."""
    copies = 3 * 1024 * width / bench.COPY_BYTES_PER_US
    assert row(op, kind, cublas=timing(1)).bound == pytest.approx(copies)
    assert row(op, kind, cublas=timing(1e6)).bound == 1e6


def test_speedup_is_over_the_better_of_the_others() -> None:
    timings = {"nccl": timing(480, 700), "intree": timing(420, 900), "asynctp": timing(300, 350)}
    assert row(**timings).speedup("graph") == pytest.approx(420 / 300)
    assert row(**timings).speedup("eager") == pytest.approx(700 / 350)
    del timings["intree"]
    assert row(**timings).speedup("graph") == pytest.approx(480 / 300)


# --- what is printed -----------------------------------------------------------------------------------------------
ROWS = [
    row(),
    row("gather", m=64, cublas=timing(20), nccl=timing(100), intree=timing(90, 95), asynctp=timing(45, 50)),
    row("scatter", "fp8", 512, 7168, 8192, cublas=timing(60), nccl=timing(160, 165), asynctp=timing(100, 130, 55.4)),
]


def test_lines() -> None:
    assert_expected_inline(
        "\n".join([bench.HEADER, *map(bench.line, ROWS)]),
        """\
op      operands    M x K x N                   cuBLAS         + NCCL        in-tree        asynctp runs        eff.  graph  eager  host
(microseconds, CUDA graph/eager; eff.: bound / ours; graph, eager: the better of NCCL and in-tree / ours)
gather  bf16          4096x8192x2560       250/270        480/500        420/440        300/320    fused       0.83   1.40   1.38    40
gather  bf16            64x8192x2560        20/40         100/120         90/95          45/50     fused       0.44   2.00   1.90    40
scatter fp8            512x7168x8192        60/80         160/165                       100/130    fused       0.60   1.60   1.27    55""",  # noqa: E501
    )


def test_lines_end_with_the_figures() -> None:
    """What is not there leaves its column empty, so that all lines of one shape are of one length."""
    for each in ROWS:
        figures = [float(text) for text in bench.line(each).split()[-4:]]
        ours = each.timings["asynctp"]
        wanted = [each.bound / ours.graph, each.speedup("graph"), each.speedup("eager"), round(ours.host)]
        assert figures == pytest.approx(wanted, abs=0.005)
    without = replace(ROWS[0], timings={name: each for name, each in ROWS[0].timings.items() if name != "intree"})
    assert len(bench.line(without)) == len(bench.line(ROWS[0])) == len(bench.line(ROWS[1]))


def test_summary() -> None:
    assert_expected_inline(
        "\n".join(bench.summary(ROWS)),
        """\
bf16 gather graph: 1.67x the better of cuBLAS + NCCL and in-tree (geometric mean of 2); least 1.40x at M=4096, K=8192, N=2560
bf16 gather eager: 1.62x the better of cuBLAS + NCCL and in-tree (geometric mean of 2); least 1.38x at M=4096, K=8192, N=2560
fp8 scatter graph: 1.60x the better of cuBLAS + NCCL and in-tree (geometric mean of 1); least 1.60x at M=512, K=7168, N=8192
fp8 scatter eager: 1.27x the better of cuBLAS + NCCL and in-tree (geometric mean of 1); least 1.27x at M=512, K=7168, N=8192""",  # noqa: E501
    )
    assert bench.summary([]) == []


# --- what is written ---------------------------------------------------------------------------------------------
def test_record_round_trip() -> None:
    """All that was measured can be had back from the JSON text."""
    said = json.loads(json.dumps(bench.record(ROWS, "asynctp bench --rows 64")))
    assert {name: value for name, value in said.items() if name not in ("date", "rows")} == {
        "machine": f"4 x {GPU}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "command": "asynctp bench --rows 64",
    }
    assert [each.pop("bound") for each in said["rows"]] == [each.bound for each in ROWS]
    assert [read(each) for each in said["rows"]] == ROWS


def read(said: dict[str, Any]) -> Row:
    return Row(**{**said, "timings": {name: Timing(**each) for name, each in said["timings"].items()}})


def test_tuning_table_has_the_fastest_of_ours() -> None:
    """Fastest in a graph and eager together: by the product of both."""
    even = {"fused": timing(100, 100), "direct": timing(60, 170), "decomposed": timing(200, 46)}
    peers = {"nccl": timing(1), "cublas": timing(1), "asynctp": timing(1)}
    found = [row(m=512, **peers, **even), row(m=1024), row(m=64, **peers), row("scatter", "fp8", 512, 7168, 8192)]
    assert bench.tuning_table(found) == {
        GPU: {
            "gather:4:bfloat16:8192:2560": {"512": "decomposed", "1024": "fused"},
            "scatter:4:float8_e4m3fn:7168:8192": {"512": "fused"},
        }
    }


def problem(found: Row) -> select.Problem:
    """As the selector sees a call of the measured sizes."""
    dtype = torch.bfloat16 if found.kind == "bf16" else torch.float8_e4m3fn
    fast = "precise" not in found.kind
    return select.Problem.of(found.op, found.world, found.m, [found.k], [found.n], dtype, torch.bfloat16, fast)


def test_the_selector_takes_the_tuning_table(table: Path) -> None:
    slow = {"fused": timing(300), "decomposed": timing(310), "direct": timing(400), "unfused": timing(10)}
    kinds = ("fp8", "fp8-rowwise-precise")
    found = [row(m=96, k=520, n=264, **slow), *(row("scatter", kind, 512, 528, 256, **slow) for kind in kinds)]
    for each in found:
        assert select.choose(problem(each), {}, 132, GPU).source == "cost model"
    assert bench.write_tuning(found) == table
    select.refresh()
    for each in found:
        choice = select.choose(problem(each), {}, 132, GPU)
        assert (choice.implementation, choice.source) == ("unfused", "measured")


def test_a_second_measurement_is_merged_into_the_table(table: Path) -> None:
    other = {"fused": timing(300), "direct": timing(100)}
    bench.write_tuning([row(m=64), row(m=128)])
    before = json.loads(table.read_text())
    before["another GPU"] = {"gather:2:bfloat16:8:8": {"64": "direct"}}
    table.write_text(json.dumps(before))
    bench.write_tuning([row(m=128, **other), row(m=256, **other)])
    assert json.loads(table.read_text()) == {
        "another GPU": {"gather:2:bfloat16:8:8": {"64": "direct"}},
        GPU: {"gather:4:bfloat16:8192:2560": {"64": "fused", "128": "direct", "256": "direct"}},
    }


def test_fp8_kinds_decide_together() -> None:
    tensorwise = row(kind="fp8", direct=timing(1), fused=timing(2))
    rowwise = row(kind="fp8-rowwise", direct=timing(2), fused=timing(1))
    assert bench.tuning_table([tensorwise, rowwise]) == bench.tuning_table([rowwise, tensorwise])


def test_precise_fp8_decides_for_itself() -> None:
    """torchao's backward sums in fp32, where our GEMM is slower against cuBLAS than with fast sums."""
    fast = row(kind="fp8", fused=timing(1), unfused=timing(2))
    precise = row(kind="fp8-precise", fused=timing(2), unfused=timing(1))
    assert bench.tuning_table([fast, precise])[GPU] == {
        "gather:4:float8_e4m3fn:8192:2560": {"4096": "fused"},
        "gather:4:float8_e4m3fn:8192:2560:precise": {"4096": "unfused"},
    }


def test_no_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not bench.plot(ROWS, tmp_path / "bench.png")
    assert list(tmp_path.glob("*.png")) == []


@pytest.mark.parametrize("count", [1, 3, 5])
def test_plot(count: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = [replace(each, k=each.k + i) for i in range(count) for each in ROWS]
    assert bench.plot(found, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_plotted_of_nothing(tmp_path: Path) -> None:
    assert not bench.plot([], tmp_path / "bench.png")
    assert list(tmp_path.glob("*.png")) == []


# --- options -----------------------------------------------------------------------------------------------------
def test_options_by_default() -> None:
    assert vars(bench.parse([])) == {
        "rows": list(bench.ROWS), "ops": ["gather", "scatter"], "kinds": ["bf16"], "rounds": 7, "all": False,
        "tune": False, "out": None, "timeout": 1800,
    }  # fmt: skip


def test_tuning_needs_all() -> None:
    options = bench.parse(["--tune"])
    assert (options.tune, options.all) == (True, True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--kinds", "bf16,fp4"], "--kinds 'fp4' is not valid; it must be of bf16, fp8, fp8-rowwise, fp8-precise, "),
        (["--ops", "reduce"], "--ops 'reduce' is not valid; it must be of gather, scatter"),
        (["--rows", "many"], "argument --rows: invalid"),
    ],
)
def test_bad_options(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.parse(given)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


COMMANDS = [
    [],
    ["--rows", "64,512", "--ops", "scatter", "--kinds", "fp8,bf16", "--rounds", "3"],
    ["--all", "--out", "results", "--timeout", "60"],
    ["--tune"],
]


@pytest.mark.parametrize("given", COMMANDS, ids=" ".join)
def test_workers_get_what_the_command_was_given(given: list[str]) -> None:
    options = cli._parser().parse_args(["bench", *given])
    assert vars(bench.parse(cli._bench_arguments(options))) == vars(bench.parse(given))


@pytest.mark.parametrize("given", COMMANDS, ids=" ".join)
def test_the_recorded_command_measures_the_same(given: list[str]) -> None:
    options = bench.parse(given)
    program, name, ranks, count, *rest = bench.command(options).split()
    assert (program, name, ranks, count) == ("asynctp", "bench", "--ranks", "4")
    again = bench.parse(rest)
    for measured in ("rows", "ops", "kinds", "rounds", "all", "tune"):
        assert getattr(again, measured) == getattr(options, measured)


@pytest.mark.parametrize(
    ("gpus", "ranks", "said"),
    [
        (0, None, "bench: 0 GPUs here, it needs at least 2"),
        (1, 1, "bench: 1 GPUs here, it needs at least 2"),
        (4, 5, "bench: --ranks 5 is not valid; it must be 2 to 4"),
        (16, None, "bench: --ranks 16 is not valid; it must be 2 to 8"),
        (4, 1, "bench: --ranks 1 is not valid"),
    ],
)
def test_ranks_that_cannot_be(
    gpus: int, ranks: int | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert cli.main(["bench", *([] if ranks is None else ["--ranks", str(ranks)])]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "given", "ranks"), [(4, [], 4), (8, ["--ranks", "2"], 2)])
def test_ranks_that_are_started(gpus: int, given: list[str], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(command: list[str], env: None, check: bool) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(returncode=len(started) - 1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(cli.subprocess, "run", run)
    assert cli.main(["bench", *given, "--rows", "64"]) == 0
    assert cli.main(["bench", *given, "--rows", "64"]) == 3, "a worker failed"
    assert f"--nproc-per-node={ranks}" in started[0]
    assert started[0][started[0].index("asynctp_passes.bench") + 1 :][:2] == ["--rows", "64"]
