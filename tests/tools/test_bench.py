"""What `asynctp bench` makes of its measurements: lines, summary, record, tuning table; and its options.

The measurements are made up: nothing here needs a GPU. `EXPECTTEST_ACCEPT=1` writes the expectations anew.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import bench_calls
import torch.distributed as dist
from asynctp_kernels.cuda.choose import select
from asynctp_kernels.cuda.implementations import ENTRIES
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder
from passes import copied, run_pass
from ranks import run_ranks
from torch.fx import Graph

from asynctp_passes.tools import bench, cli
from asynctp_passes.tools.bench import Row, Timing

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
        "decomposed": timing(310), "direct": timing(400), "sequential": timing(480),
    }  # fmt: skip
    dtype = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
    problem = select.Problem.of(op, 4, m, [k], [n], dtype, torch.bfloat16, "precise" not in kind)
    ran = "fused" if "asynctp" in found else ""
    return Row(problem, kind, found, dict.fromkeys(found, 0.002), 0.006, ran, {"other": "no"})


def wrong(found: Row, *names: str) -> Row:
    """The same, in which some variants give other results."""
    return replace(found, errors={**found.errors, **dict.fromkeys(names, 0.5)})


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


def test_what_is_wrong_is_not_compared_with() -> None:
    """Neither a wrong peer nor a wrong asynctp has a speed; nan is wrong."""
    timings = {"nccl": timing(480), "intree": timing(42), "asynctp": timing(300)}
    assert row(**timings).right
    assert wrong(row(**timings), "intree").speedup("graph") == pytest.approx(480 / 300)
    assert wrong(row(**timings), "intree", "nccl").speedup("graph") is None
    assert wrong(row(**timings), "asynctp").speedup("eager") is None
    for found in (wrong(row(**timings), "intree"), replace(row(**timings), errors={"nccl": float("nan")})):
        assert not found.right
    del timings["asynctp"]
    assert not row(**timings).right
    assert row(**timings).speedup("graph") is None


def test_limit_of_an_error() -> None:
    """Three times that of the plain program; at least one rounding, and never so much that zeros would pass."""
    assert bench.limit({"nccl": 0.004, "fused": 0.5}, torch.bfloat16) == pytest.approx(0.012)
    assert bench.limit({"nccl": 0.0001}, torch.bfloat16) == bench.limit({}, torch.bfloat16) == 2**-7
    assert bench.limit({"nccl": float("inf")}, torch.float16) == bench.WRONG


# --- what is printed -----------------------------------------------------------------------------------------------
ROWS = [
    row(),
    row("gather", m=64, cublas=timing(20), nccl=timing(100), intree=timing(90, 95), asynctp=timing(45, 50)),
    row("scatter", "fp8", 512, 7168, 8192, cublas=timing(60), nccl=timing(160, 165), asynctp=timing(100, 130, 55.4)),
]


def test_lines() -> None:
    absent = replace(row(m=128, nccl=timing(100)), chosen="", left_out={"asynctp": "out of memory"})
    assert_expected_inline(
        "\n".join([bench.HEADER, *map(bench.line, [*ROWS, wrong(ROWS[0], "fused"), absent])]),
        """\
op         operands            M x K x N                          cuBLAS         + NCCL        in-tree       one-shot       two-shot        asynctp runs        floor  eff.  graph  eager  host
(microseconds, CUDA graph/eager; eff.: floor / ours; graph, eager: the best of NCCL and PyTorch's / ours)
gather     bf16                4096x8192x2560                 250/270        480/500        420/440                                      300/320    fused         250  0.83   1.40   1.38    40
gather     bf16                64x8192x2560                    20/40         100/120         90/95                                        45/50     fused          20  0.44   2.00   1.90    40
scatter    fp8                 512x7168x8192                   60/80         160/165                                                     100/130    fused          60  0.60   1.60   1.27    55
gather     bf16                4096x8192x2560                 250/270        480/500        420/440                                      300/320    fused         250  0.83   1.40   1.38    40  WRONG: fused (5.0e-01, may be 6.0e-03)
gather     bf16                128x8192x2560                                 100/120                                                                                                             asynctp: out of memory""",  # noqa: E501
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
bf16 gather graph: 1.67x the best of cuBLAS + NCCL and PyTorch's (geometric mean of 2); least 1.40x at M=4096, K=8192, N=2560
bf16 gather eager: 1.62x the best of cuBLAS + NCCL and PyTorch's (geometric mean of 2); least 1.38x at M=4096, K=8192, N=2560
fp8 scatter graph: 1.60x the best of cuBLAS + NCCL and PyTorch's (geometric mean of 1); least 1.60x at M=512, K=7168, N=8192
fp8 scatter eager: 1.27x the best of cuBLAS + NCCL and PyTorch's (geometric mean of 1); least 1.27x at M=512, K=7168, N=8192""",  # noqa: E501
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
    names = ["bound", "wrong", "right", "errors", "limit", "kind", "chosen", "left_out"]
    assert [{name: each[name] for name in names} for each in said["rows"]] == [
        {name: getattr(each, name) for name in names} for each in ROWS
    ]
    for each, found in zip(said["rows"], ROWS, strict=True):
        assert {name: Timing(**times) for name, times in each["timings"].items()} == found.timings
        sizes = (each["op"], each["world"], each["m"], (each["n"],), each["k"], each["key"])
        problem = found.problem
        assert sizes == (problem.op, problem.world, problem.rows, problem.widths, problem.depth, problem.key)


def test_record_of_several_products() -> None:
    problem = select.Problem.of("scatter", 2, 64, [32, 256, 32], [48], torch.float8_e4m3fn, torch.bfloat16, True)
    (said,) = bench.record([replace(row(), problem=problem)], "")["rows"]
    assert (said["k"], said["n"]) == ("256+32+32", 48)


def test_tuning_table_has_the_fastest_of_ours() -> None:
    """Fastest in a graph and eager together: by the product of both."""
    even = {"fused": timing(100, 100), "direct": timing(60, 150), "decomposed": timing(200, 46)}
    peers = {"nccl": timing(1), "cublas": timing(1), "asynctp": timing(1)}
    found = [row(m=512, **peers, **even), row(m=1024), row(m=64, **peers), row("scatter", "fp8", 512, 7168, 8192)]
    assert bench.tuning_table(found) == {
        GPU: {
            "gather:4:bfloat16:8192:2560": {"512": "decomposed", "1024": "fused"},
            "scatter:4:float8_e4m3fn:7168:8192": {"512": "fused"},
        }
    }


def test_only_what_the_transport_carries_can_win() -> None:
    """Programs settle the transport first, so another one's winner would leave its call to the cost model."""
    times = {"direct": timing(1), "sequential": timing(2), "decomposed": timing(3), "fused": timing(4)}
    ran = {
        "fused": "decomposed",
        "decomposed": "decomposed",
        "direct": "direct",
        "sequential": "sequential",
        "": "direct",
    }
    for chosen, winner in ran.items():
        (by_rows,) = bench.tuning_table([replace(row(**times), chosen=chosen)])[GPU].values()
        assert by_rows == {"4096": winner}, chosen


def test_tuning_table_has_what_is_never_slower_first() -> None:
    """What is fastest by the product of both times may be slower than in-tree in a graph."""
    ours = {"direct": timing(92, 129), "fused": timing(101, 126), "decomposed": timing(80, 153)}
    peers = {"nccl": timing(119, 235), "intree": timing(87, 727)}

    def picked(*found: Row) -> str:
        (by_rows,) = bench.tuning_table(found)[GPU].values()
        return by_rows["4096"]

    assert picked(row(**ours)) == picked(row(nccl=timing(119, 235), **ours)) == "direct"
    assert picked(row(**peers, **ours)) == picked(row(**ours), row(**peers, **ours)) == "decomposed"
    assert picked(row(intree=timing(87, 140), **ours)) == "direct"  # each is slower in one of the two
    assert picked(wrong(row(**peers, **ours), "intree")) == "direct"


def test_the_selector_takes_the_tuning_table(table: Path) -> None:
    slow = {"fused": timing(300), "decomposed": timing(310), "direct": timing(400), "sequential": timing(10)}
    kinds = ("fp8", "fp8-rowwise-precise")
    found = [row(m=96, k=520, n=264, **slow), *(row("scatter", kind, 512, 528, 256, **slow) for kind in kinds)]
    for each in found:
        assert select.choose(each.problem, ENTRIES[each.problem.op], {}, 132, GPU).source == "cost model"
    assert bench.write_tuning(found) == table
    select.refresh()
    for each in found:
        choice = select.choose(each.problem, ENTRIES[each.problem.op], {}, 132, GPU)
        assert (choice.implementation, choice.source) == ("sequential", "measured")


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


@pytest.mark.parametrize(("count", "rounds"), [(4, 3), (6, 5), (7, 3), (7, 5), (8, 3)])
def test_no_variant_comes_twice_behind_the_same_one(count: int, rounds: int) -> None:
    """Else the clock that the one leaves would be in the other's median."""
    names = [str(number) for number in range(count)]
    turns = bench.orders(names, rounds)
    assert turns == bench.orders(names, rounds), "all ranks agree"
    assert [sorted(order) for order in turns] == [names] * rounds
    pairs = list(itertools.pairwise(itertools.chain.from_iterable(turns)))
    assert len(pairs) == len(set(pairs)) == count * rounds - 1


@pytest.mark.parametrize("rounds", [1, 7])
def test_few_variants_take_turns(rounds: int) -> None:
    assert bench.orders(["a"], rounds) == [["a"]] * rounds
    assert all(sorted(order) == ["a", "b"] for order in bench.orders(["a", "b"], rounds))


def test_fp8_kinds_decide_together() -> None:
    tensorwise = row(kind="fp8", direct=timing(1), fused=timing(2))
    rowwise = row(kind="fp8-rowwise", direct=timing(2), fused=timing(1))
    assert bench.tuning_table([tensorwise, rowwise]) == bench.tuning_table([rowwise, tensorwise])


def test_precise_fp8_decides_for_itself() -> None:
    """torchao's backward sums in fp32, where our GEMM is slower against cuBLAS than with fast sums."""
    fast = row(kind="fp8", fused=timing(1), sequential=timing(2))
    precise = row(kind="fp8-precise", fused=timing(2), sequential=timing(1))
    assert bench.tuning_table([fast, precise])[GPU] == {
        "gather:4:float8_e4m3fn:8192:2560": {"4096": "fused"},
        "gather:4:float8_e4m3fn:8192:2560:precise": {"4096": "sequential"},
    }


def test_what_is_wrong_is_never_in_the_table() -> None:
    fastest = {"direct": timing(1), "fused": timing(2), "sequential": timing(3)}
    assert bench.tuning_table([row(**fastest)])[GPU] == {"gather:4:bfloat16:8192:2560": {"4096": "direct"}}
    found = [wrong(row(**fastest), "direct"), row(**fastest)]
    for order in (found, found[::-1]):
        assert bench.tuning_table(order)[GPU] == {"gather:4:bfloat16:8192:2560": {"4096": "fused"}}
    assert bench.tuning_table([wrong(row(**fastest), *fastest)])[GPU] == {}


def test_what_was_measured_is_written_row_by_row(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that hangs or raises later takes nothing of it away."""

    def rows(options: object, device: torch.device) -> Iterator[Row]:
        yield ROWS[0]
        yield row("scatter", n=8192)
        raise RuntimeError("NCCL is gone")

    monkeypatch.setattr(bench, "rows", rows)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    options = bench.parse(["--tune", "--out", str(tmp_path / "out")])
    with pytest.raises(RuntimeError, match="NCCL is gone"):
        bench.run(options, torch.device("cpu"))
    said = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [each["op"] for each in said["rows"]] == ["gather", "scatter"]
    assert set(json.loads(table.read_text())[GPU]) == {"gather:4:bfloat16:8192:2560", "scatter:4:bfloat16:8192:8192"}
    assert capsys.readouterr().out.splitlines()[2:] == [bench.line(ROWS[0]), bench.line(row("scatter", n=8192))]


# --- options -----------------------------------------------------------------------------------------------------
def test_options_by_default() -> None:
    assert vars(bench.parse([])) == {
        "rows": list(bench.ROWS), "shapes": None, "ops": ["gather", "scatter", "all_reduce"], "kinds": ["bf16"],
        "rounds": 7, "all": False, "tune": False, "out": None, "timeout": 1800, "report": None,
    }  # fmt: skip


def test_shapes_that_are_asked_for() -> None:
    """An all-reduce takes any number of rows."""
    options = bench.parse(["--shapes", "7x64x48,16x32x80"])
    found = {
        (op, *(arguments.get("a_shard") or arguments["a_parts"][0])["shape"])
        for op, arguments in bench.calls(options, 4)
    }
    assert found == {
        ("all_gather_matmul", 4, 32), ("matmul_reduce_scatter", 16, 32), ("matmul_all_reduce", 7, 64),
        ("matmul_all_reduce", 16, 32),
    }  # fmt: skip


def test_all_reduces_have_peers_of_their_own() -> None:
    """PyTorch's all-reduces over symmetric memory, of one plain matmul; the best of all counts."""
    timings = {"nccl": timing(40), "oneshot": timing(30), "twoshot": timing(36), "asynctp": timing(20)}
    assert row("all_reduce", **timings).speedup("graph") == pytest.approx(30 / 20)
    made = {kind: bench.built_in("all_reduce", kind, 8, 16, 16, 1) for kind in ("bf16", "fp8")}
    with mock.patch.multiple(bench, world_group=mock.Mock(return_value=mock.Mock(group_name="tp"))):
        plain, scaled = (bench.Call(*each, torch.device("cpu")) for each in made.values())
    shared = torch.zeros(8 * 16 * 2, dtype=torch.uint8)
    with (
        mock.patch.multiple(bench, symmetric_empty=lambda size, device: shared, symmetric_rendezvous=mock.DEFAULT),
        mock.patch.object(bench, "world_group"),
        mock.patch.object(torch.ops, "symm_mem", mock.Mock(two_shot_all_reduce_=lambda total, how, group: total)),
    ):
        (total,) = plain.variant("twoshot")()
    assert total.data_ptr() == shared.data_ptr()
    assert torch.equal(total, torch.mm(plain.a_parts[0], plain.bs[0]))
    with pytest.raises(NotImplementedError, match="only a plain matmul"):
        scaled.variant("oneshot")()


def test_tuning_needs_all() -> None:
    options = bench.parse(["--tune"])
    assert (options.tune, options.all) == (True, True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--kinds", "bf16,fp4"], "--kinds 'fp4' is not valid; it must be of bf16, fp8, fp8-rowwise, fp8-precise, "),
        (["--ops", "reduce"], "--ops 'reduce' is not valid; it must be of gather, scatter, all_reduce"),
        (["--shapes", "64x128"], "--shapes '64x128' is not valid; it must be MxKxN, as 16x2048x8192"),
        (["--shapes", "1x2x3", "--rows", "4"], "--rows is not valid with --shapes, which have them"),
        (["--rows", "many"], "argument --rows: invalid value 'many'; it must be numbers, as 512,2048"),
        (["--rows", "64,0"], "--rows 0 is not valid; it must be at least 1"),
        (["--rounds", "0"], "--rounds 0 is not valid; it must be at least 1"),
        (["--timeout", "0"], "--timeout 0 is not valid; it must be at least 1"),
        (["--out", "/dev/null"], "--out /dev/null is not valid; it must be a folder that can be written, or made"),
    ],
)
def test_bad_options(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.parse(given)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("damaged.json", "damaged.json is no tuning table"),
        ("", "is no tuning table ([Errno 21] Is a directory"),
        ("damaged.json/new.json", "damaged.json/new.json cannot be written; name another file in ASYNCTP_TUNING_TABLE"),
    ],
)
def test_a_table_that_cannot_be_tuned(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said before anything is measured."""
    (tmp_path / "damaged.json").write_text("{")
    monkeypatch.setenv("ASYNCTP_TUNING_TABLE", str(tmp_path / path))
    with pytest.raises(SystemExit):
        bench.parse(["--tune"])
    assert said in capsys.readouterr().err
    bench.parse([])


@pytest.mark.parametrize(
    "given",
    [
        ["--kinds", "fp4"],
        ["--rounds", "0"],
        ["--e2e", "--cpu", "--timeout", "0"],
        ["--e2e", "--cpu", "--sizes", "9b"],
        ["--e2e", "--cpu", "--backends", "inductor,eager"],
    ],
    ids=" ".join,
)
def test_bad_options_start_no_rank(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an earlier run measured stays."""
    for name in ("bench.json", "e2e.json"):
        (tmp_path / name).touch()
    with mock.patch.object(cli, "_start_ranks") as started:
        assert cli.main(["bench", *given, "--out", str(tmp_path)]) == 2
    assert not started.called
    assert len(list(tmp_path.iterdir())) == 2
    assert "is not valid; it must be" in capsys.readouterr().err


COMMANDS = [
    [],
    ["--rows", "64,512", "--ops", "scatter", "--kinds", "fp8,bf16", "--rounds", "3"],
    ["--shapes", "1x2048x8192,7x64x64", "--ops", "all_reduce"],
    ["--all", "--out", "results", "--timeout", "60"],
    ["--tune"],
    ["--report", "reports.jsonl", "--tune", "--rounds", "3"],
]


@pytest.mark.parametrize("given", COMMANDS, ids=" ".join)
def test_workers_get_what_the_command_was_given(given: list[str]) -> None:
    options = cli._parser().parse_args(["bench", *given])
    assert vars(bench.parse(cli._bench_arguments(options))) == vars(bench.parse(given))


def test_tune_is_bench_with_tune() -> None:
    options = cli._parser().parse_args(["tune", "--report", "reports.jsonl", "--rounds", "3"])
    assert options.run is cli._parser().parse_args(["bench"]).run
    expected = bench.parse(["--report", "reports.jsonl", "--rounds", "3", "--tune"])
    assert vars(bench.parse(cli._bench_arguments(options))) == vars(expected)


@pytest.mark.parametrize("given", COMMANDS, ids=" ".join)
def test_the_recorded_command_measures_the_same(given: list[str]) -> None:
    options = bench.parse(given)
    program, name, ranks, count, *rest = bench.command(options).split()
    assert (program, name, ranks, count) == ("asynctp", "bench", "--ranks", "4")
    again = bench.parse(rest)
    for measured in ("report", "rows", "shapes", "ops", "kinds", "rounds", "all", "tune"):
        assert getattr(again, measured) == getattr(options, measured)


@pytest.mark.parametrize(
    ("gpus", "ranks", "said"),
    [
        (0, None, "{}: 0 GPUs here, it needs at least 2"),
        (1, 1, "{}: 1 GPUs here, it needs at least 2"),
        (4, 5, "{}: --ranks 5 is not valid; it must be 2 to 4"),
        (16, None, "{}: --ranks 16 is not valid; it must be 2 to 8"),
        (4, 1, "{}: --ranks 1 is not valid"),
    ],
)
def test_ranks_that_cannot_be(
    gpus: int, ranks: int | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for command in ("bench", "tune"):
        assert cli.main([command, *([] if ranks is None else ["--ranks", str(ranks)])]) == 2
        told = capsys.readouterr().err
        assert f"asynctp: {said.format(command)}" in told
        assert "--cpu" not in told


def test_tune_speaks_of_tune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with mock.patch.object(cli, "_start_ranks", return_value=1):
        assert cli.main(["tune", "--rows", "64"]) == 3
    with mock.patch.object(cli, "_start_ranks", return_value=0):
        assert cli.main(["tune", "--rounds", "0"]) == 2
    for arguments in (
        ["--ops", "gather", "--rows", "63"],
        ["--kinds", "fp4"],
        ["--report", str(tmp_path / "none.jsonl")],
    ):
        assert cli.main(["tune", *arguments]) == 2
    monkeypatch.setenv("ASYNCTP_TUNING_TABLE", str(tmp_path))
    with pytest.raises(SystemExit):
        bench.parse(["--tune"])
    told = capsys.readouterr().err
    assert told.count("asynctp: tune: ") == 5
    assert "asynctp tune: error: " in told
    assert "bench" not in told
    with pytest.raises(SystemExit):
        cli.main(["tune", "--help"])
    assert "--e2e" not in capsys.readouterr().out


@pytest.mark.parametrize(("gpus", "given", "ranks"), [(4, [], 4), (8, ["--ranks", "2"], 2)])
def test_ranks_that_are_started(gpus: int, given: list[str], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(command: list[str], env: None) -> SimpleNamespace:
        started.append(command)
        code = len(started) - 1
        return SimpleNamespace(wait=lambda: code)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(cli.subprocess, "Popen", run)
    assert cli.main(["bench", *given, "--rows", "64"]) == 0
    assert cli.main(["bench", *given, "--rows", "64"]) == 3, "a worker failed"
    assert f"--nproc-per-node={ranks}" in started[0]
    given = started[0][started[0].index("asynctp_passes.tools.bench") + 1 :]
    assert given[given.index("--rows") + 1] == "64"


def ended(monkeypatch: pytest.MonkeyPatch, out: Path, found: list[Row], code: int = 0) -> int:
    """What the command returns when its workers measured this and ended with `code`."""

    def run(command: list[str], env: None) -> SimpleNamespace:
        if found:
            options = bench.parse(command[command.index("asynctp_passes.tools.bench") + 1 :])
            bench.write(found, options)
        return SimpleNamespace(wait=lambda: code)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(cli.subprocess, "Popen", run)
    return cli.main(["bench", "--out", str(out)])


def test_exit_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """0 if all is right, 1 if something is wrong or asynctp did not run, 3 if a rank failed; rows are kept."""
    absent = replace(row(nccl=timing(100)), left_out={"asynctp": "no"})
    assert ended(monkeypatch, tmp_path, ROWS) == 0
    assert ended(monkeypatch, tmp_path, [*ROWS, wrong(ROWS[0], "direct")]) == 1
    assert ended(monkeypatch, tmp_path, [*ROWS, absent]) == 1
    capsys.readouterr()
    assert ended(monkeypatch, tmp_path, ROWS[:1], code=1) == 3
    told = capsys.readouterr()
    assert told.out == f"wrote {tmp_path}: bench.json\n"
    assert told.err == "asynctp: bench: ended early; what was measured is above\n"
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == 1
    assert ended(monkeypatch, tmp_path, [], code=1) == 3
    assert list(tmp_path.iterdir()) == [], "no rows of an earlier run"


# --- calls of reports --------------------------------------------------------------------------------------------
def gathered(ranks: int = 4, rows: int = 64, **options: Any) -> Graph:
    b = GraphBuilder(ranks)
    x, w = (
        b.input("x", [rows, 32], torch.bfloat16, **options),
        b.input("w", [32, 48], torch.bfloat16, column_major=True),
    )
    return b.returns(b.mm(b.gather(x), w))


def report_file(path: Path, *graphs: Graph) -> Path:
    """As `Config.report_file` collects them."""
    path.write_text("".join(run_pass(graph).to_json() + "\n" for graph in graphs))
    return path


def test_calls_of_a_report(tmp_path: Path) -> None:
    """Each once, those of this number of ranks, and exactly as the program makes them."""
    path = report_file(tmp_path / "r.jsonl", gathered(), gathered(2), gathered(), gathered(rows=6, dynamic=0))
    options = bench.parse(["--report", str(path), "--tune"])
    assert [ranks for _, _, ranks in cli.calls_of_report(path)] == [4, 2]
    for ranks, rows in ((4, 256), (2, 128)):
        op, arguments = bench.built_in("gather", "bf16", rows, 32, 48, ranks)
        assert list(bench.calls(options, ranks)) == [(op, arguments)]


@pytest.mark.parametrize(("sizes", "given", "ranks"), [([2], [], 2), ([2, 4], ["--ranks", "4"], 4)])
def test_ranks_are_those_of_the_report(
    sizes: list[int], given: list[str], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def run(command: list[str], env: None) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(cli.subprocess, "Popen", run)
    path = report_file(tmp_path / "r.jsonl", *map(gathered, sizes))
    assert cli.main(["bench", "--report", str(path), *given]) == 0
    assert f"--nproc-per-node={ranks}" in started[0]
    assert started[0][started[0].index("--report") + 1] == str(path)


@pytest.mark.parametrize(
    ("graphs", "given", "said"),
    [
        ([gathered(2), gathered(4)], [], "has groups of 2 and 4 ranks; say which with --ranks"),
        ([gathered(2)], ["--ranks", "4"], "bench: --ranks 4 is not valid; the groups in"),
        ([gathered(rows=6, dynamic=0)], [], "has no fused call with its sizes; it must be what report_file collected"),
        ([gathered(2)], ["--rows", "64"], "bench: --rows is not valid with --report, which has them"),
        ([gathered(2)], ["--kinds", "fp8"], "bench: --kinds is not valid with --report, which has them"),
        ([gathered(2)], ["--e2e"], "bench: --report is not valid with --e2e; leave one of them out"),
    ],
)
def test_reports_that_cannot_be_measured(
    graphs: list[Graph], given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = report_file(tmp_path / "r.jsonl", *map(copied, graphs))
    assert cli.main(["bench", "--report", str(path), *given]) == 2
    assert said in capsys.readouterr().err


def test_no_report_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.jsonl").write_text("{}\n")
    for name, said in (("absent.jsonl", "cannot read"), ("r.jsonl", "r.jsonl:1 is not a report")):
        assert cli.main(["bench", "--report", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err


# --- results are judged ------------------------------------------------------------------------------------------
@pytest.mark.ranks
def test_results_are_judged() -> None:
    """On every rank: all forms of a call are right in all variants, and what is wrong on one rank is seen on all."""
    first, second = run_ranks(bench_calls.WORLD, bench_calls.judge)
    assert first == second
    assert set(first) == set(bench_calls.CALLS)
    for name, found in first.items():
        assert found["nccl"] <= found["limit"] / 2, name
        assert found["asynctp"] <= found["limit"] / 2, name
        for fault in ("stale", "one element", "not a number"):
            assert found[fault] > found["limit"], (name, fault)


def test_calls_are_named_by_what_they_compute_in() -> None:
    for op in cli.OPS:
        for kind in cli.KINDS:
            assert bench.kind_of(bench.built_in(op, kind, 32, 64, 48, 2)[1]) == kind
    assert bench.kind_of(bench_calls.CALLS["fp8 gather by blocks"][1]) == "fp8-blocks-precise"
    assert bench.kind_of(bench_calls.CALLS["fp8 scatter of a sum"][1]) == "fp8-rowwise-precise"


@pytest.mark.ranks
def test_the_whole_of_it(tmp_path: Path) -> None:
    """On CPUs, with clocks of the host for events of GPUs, and functions called again for CUDA graphs."""
    path = report_file(tmp_path / "r.jsonl", gathered(bench_calls.WORLD))
    rows, others = run_ranks(bench_calls.WORLD, bench_calls.measure, ["--report", str(path), "--tune", "--rounds", "2"])
    (found,) = rows
    assert [each.errors for each in others] == [found.errors]
    assert (found.problem.key, found.problem.rows) == ("gather:2:bfloat16:32:48", 128)
    assert set(found.timings) == {"cublas", "nccl", "asynctp", *bench.IMPLEMENTATIONS} - {"direct"}
    assert set(found.left_out) == {"intree", "direct"}
    assert found.left_out["direct"] == "RuntimeError: direct is out of order and more"
    assert found.wrong == ["fused"], "in a graph it gives what it gave before"
    assert all(min(each.graph, each.eager, each.host) > 0 for each in found.timings.values())
    assert all(0 < error <= found.limit for name, error in found.errors.items() if name != "fused")
    assert list(bench.tuning_table(rows)[GPU]) == [found.problem.key]
    assert "WRONG: fused (" in bench.line(found)
