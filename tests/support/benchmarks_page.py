"""The tables of `docs/reference/benchmarks.md`, from the raw files in `docs/results`.

    python tests/support/benchmarks_page.py        writes them anew

Between `<!-- table: NAME -->` and `<!-- end -->` stand a table and its head: machine, torch, date, commit, raw file and
command of each run.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from asynctp_kernels.cuda.choose.cost import Problem, Rates
from selections import SMS, estimate

from asynctp_passes.tools.bench import NOISE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
RESULTS = ROOT / "docs" / "results"
_NAMES_NOW = {"unfused": "sequential"}
"""Implementations whose name is another one in raw files."""

SHIPPED = ROOT / "kernels" / "asynctp_kernels" / "cuda" / "choose" / "measured.json"
DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "fp8-rowwise": "float8_e4m3fn"}
KINDS = {"bf16": "bf16", "fp8": "tensorwise", "fp8-rowwise": "rowwise"}
SIZES = {"70b": "70B", "8b": "8B"}
SHOWN = (64, 512, 2048, 4096, 8192, 16384)
NONE = "–"


# --- runs ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """Some raw files of one machine, torch, day and commit.

    files: Names in `folder`, which begins with the day.
    """

    machine: str
    torch: str
    commit: str
    folder: str
    files: tuple[str, ...]
    command: str

    @property
    def date(self) -> str:
        """The day, as `2026-11-28`."""
        return self.folder[:10]

    @property
    def head(self) -> str:
        """Everything that the page says of the run."""
        links = ", ".join(f"[{name}](../results/{self.folder}/{name})" for name in self.files)
        return f"{self.where}, {self.date}, {self.commit}, {links}: `{self.command}`"

    @property
    def where(self) -> str:
        """The machine and torch, as `4×H200, 2.15`."""
        return f"{self.machine}, {self.torch}"

    def paths(self) -> list[Path]:
        return [RESULTS / self.folder / name for name in self.files]

    def text(self) -> str:
        """All files, one after the other."""
        return "".join(path.read_text(encoding="utf-8") for path in self.paths())

    def lines(self) -> list[Any]:
        """The objects of files with one to a line."""
        return [json.loads(line) for line in self.text().splitlines()]


LATER, H200_2, H100_2 = "2026-11-28-h200x4-later", "2026-11-25-h200x2", "2026-11-25-h100x2"
H100_4, H200_4, DAY_2 = "2026-11-28-h100x4", "2026-11-22-h200x4", "2026-11-28-h200x2"

E2E = "asynctp bench --e2e --rounds 3"
KINDS_OF_STEPS = "--kinds fp8-rowwise,fp8,bf16"
STEPS = Run("4×H200", "2.15", "9c98103", LATER, ("steps.txt", "steps-bf16.txt"), f"{E2E} {KINDS_OF_STEPS}")
GRAPHS = "--option triton.cudagraphs=True"
OTHER_STEPS = (
    Run("4×H100", "2.15", "b889172", H100_4, ("steps-2.15.txt",), "--kinds bf16,fp8"),
    Run("4×H100", "2.15", "b889172", H100_4, ("steps-2.15-fp8.txt",), "--sizes 8b --kinds fp8 --rounds 5"),
    Run("4×H100", "2.11", "689577b", H100_4, ("steps-fp8.txt",), "--sizes 8b --kinds fp8 --rounds 5"),
    Run("2×H200", "2.11", "41cdbc9", "2026-11-29-h200x2", ("steps.txt",), "--kinds bf16"),
    Run("2×H200", "2.11", "12993f7", H200_2, ("e2e-70b.txt", "e2e-8b.txt"), "--kinds fp8-rowwise"),
    Run("2×H200", "2.11", "685312b", "2026-11-23-h200x2", ("e2e-70b-tensorwise.txt", "e2e-8b.txt"), "--kinds fp8"),
    Run("2×H100", "2.11", "10f65ce", H100_2, ("e2e.txt",), KINDS_OF_STEPS),
)
FEW_TOKENS = (
    Run("4×H200", "2.11", "4ff250d", H200_4, ("e2e-2048.txt",), KINDS_OF_STEPS),
    Run("4×H200", "2.11", "c11e530", H200_4, ("e2e-2048-graphs.txt",), f"--kinds bf16 --rounds 2 {GRAPHS}"),
    Run("4×H100", "2.11", "b889172", H100_4, ("e2e-2048.json",), "--sizes 8b --kinds bf16"),
    Run("4×H100", "2.11", "b889172", H100_4, ("e2e-2048-graphs.json",), f"--sizes 8b --kinds bf16 {GRAPHS}"),
    Run("2×H200", "2.11", "93187e5", "2026-11-29-h200x2", ("steps-2048.txt",), "--sizes 8b --kinds fp8"),
    Run("2×H200", "2.11", "deac048", "2026-11-29-h200x2", ("steps-2048-in-c.txt",),
        "--sizes 8b --kinds bf16,fp8-rowwise --rounds 5"),
    Run("2×H100", "2.11", "10f65ce", H100_2, ("e2e-short.txt",), f"--sizes 8b --batches 1x1024,1x2048 {GRAPHS}"),
)  # fmt: skip
TUNED = "--ops gather,scatter --all --tune --rounds 3"
ALL_KINDS = "--kinds bf16,fp8,fp8-rowwise --all --tune --rounds 3"
AGAIN = ("bench.json", "bench-again-bf16.json", "bench-again-fp8.json")
CALLS = (
    Run("4×H200", "2.15", "9c98103", LATER, ("bench.json",), f"asynctp bench {TUNED}"),
    Run("4×H200", "2.11", "9c98103", LATER, ("bench-fp8.json", "bench-fp8-rowwise.json"),
        f"asynctp bench {TUNED} --kinds fp8,fp8-rowwise --rows 1024,2048,4096,8192,16384"),
    Run("2×H200", "2.11", "a851f53", H200_2, ("bench.json",), f"asynctp bench {ALL_KINDS}"),
    Run("2×H100", "2.11", "3a023d1 and after a46b86c", H100_2, AGAIN, f"asynctp bench {ALL_KINDS}"),
)  # fmt: skip
SUMS = "asynctp bench --ops all_reduce --all --rounds 3 --shapes …"
FEW_SUMS = Run("2×H200", "2.11", "27a1eb3", DAY_2, ("all-reduce.txt",), SUMS)
MANY_SUMS = Run("4×H100", "2.11", "482ac61", "2026-11-27-h100x4", ("all-reduce-shared.txt",), SUMS)
GEMM = Run("1×H200", "2.11", "e1364aa", "2026-11-30-h200x1", ("gemm.jsonl",), "python tests/gpu/gemm.py")
FEW_ROWS = Run(
    "1×H200", "2.11", "after 36ed580 and deac048", "2026-11-29-h200x1", ("invariant.jsonl", "invariant-cublaslt.jsonl"),
    "python tests/gpu/few_rows.py",
)  # fmt: skip
HOST = Run(
    "2 ranks on 1×H200", "2.11", "e1364aa", "2026-11-30-h200x1", ("host.jsonl",),
    "torchrun --nproc_per_node=2 tests/gpu/host.py",
)  # fmt: skip
HOST_OF_STEPS = Run(
    "4 ranks on 1×H200", "2.11", "e1364aa", "2026-11-30-h200x1", ("step.jsonl",),
    "torchrun --nproc_per_node=4 tests/gpu/step.py",
)  # fmt: skip
PEAKS = Run(
    "4 ranks on 1×H200", "2.15", "c0ea859", "2026-11-28-h200x1", ("peaks.jsonl",),
    "torchrun --nproc_per_node=4 tests/gpu/peaks.py",
)  # fmt: skip
TRAINING = RESULTS / "training.jsonl"
CHECKS = RESULTS / "checks.jsonl"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def heads(*runs: Run) -> str:
    """The head of a table: an item for each run."""
    return "".join(f"- {run.head}\n" for run in runs) + "\n"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown, without spaces around bars."""
    return "".join(f"|{'|'.join(cells)}|\n" for cells in (head, ["---"] * len(head), *lines))


# --- steps -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """One line of `asynctp bench --e2e`: milliseconds, how many times as fast as plain Inductor, GiB."""

    time: float
    speedup: float
    forward: float
    exposed: float
    host: float
    peak: float


_STEP = re.compile(
    r"^(70b|8b) +(\S+) +(\S+) +(?:sp step +)?(inductor|intree|asynctp) +([\d.]+) +([\d.]+)x +[\d.]+ +([\d.]+)x"
    r" +([\d.]+) +([\d.]+) +([\d.]+) ",
    re.MULTILINE,
)


def steps(run: Run) -> dict[tuple[str, str, str, str], Step]:
    """By size, kind, batch and backend, of its text or JSON."""
    if run.files[0].endswith(".txt"):
        found = _STEP.findall(run.text())
        return {(size, kind, batch, backend): Step(*map(float, rest)) for size, kind, batch, backend, *rest in found}
    plain, *others = read(run.paths()[0])["rows"]
    return dict(_step(row, plain) for row in (plain, *others))


def _step(row: dict[str, Any], plain: dict[str, Any]) -> tuple[tuple[str, str, str, str], Step]:
    problem = row["problem"]
    speedups = (plain["step"] / row["step"], plain["forward"] / row["forward"])
    step = Step(row["step"], *speedups, row["exposed"], row["host"], row["peak_bytes"] / 2**30)
    return (problem["size"], problem["kind"], f"{problem['batch']}x{problem['sequence']}", row["backend"]), step


def steps_of_blocks() -> str:
    """Steps of four H200s, whole."""
    found = steps(STEPS)
    lines = []
    for size, kind in [(size, kind) for size in SIZES for kind in reversed(KINDS)]:
        plain, intree, ours = (found.get((size, kind, "1x8192", each)) for each in ("inductor", "intree", "asynctp"))
        assert plain is not None
        assert intree is not None
        cells = [f"{SIZES[size]} {KINDS[kind]}", f"{plain.time:.1f}", speedups(intree)]
        if ours is None:
            cells += [NONE, NONE, f"{plain.exposed:.1f}", f"{plain.host:.1f}", f"{plain.peak:.2f}"]
        else:
            cells += [f"{ours.time:.1f}", f"**{ours.speedup:.2f}**/{ours.forward:.2f}"]
            cells += [f"{plain.exposed:.1f}→{ours.exposed:.1f}", f"{plain.host:.1f}→{ours.host:.1f}"]
            cells.append(f"{plain.peak:.2f}→{ours.peak:.2f}")
        lines.append(cells)
    head = ["Blocks", "plain, ms", "in-tree", "asynctp, ms", "speedup", "exposed, ms", "host, ms", "peak, GiB"]
    return heads(STEPS) + table(head, lines)


def other_steps() -> str:
    """Speedups of step and forward with 8192 tokens: a line for each machine, a column for each size and kind."""
    columns = [(size, kind) for size in SIZES for kind in KINDS]
    lines: dict[str, dict[tuple[str, str], list[str]]] = {}
    for run in OTHER_STEPS:
        for (size, kind, _, backend), step in steps(run).items():
            if backend == "asynctp" and _is_of(run, kind):
                lines.setdefault(run.where, {}).setdefault((size, kind), []).append(speedups(step))
    body = [[where, *("; ".join(line.get(column, [NONE])) for column in columns)] for where, line in lines.items()]
    names = [f"{SIZES[size]} {KINDS[kind]}" for size, kind in columns]
    return f"`{E2E}` with\n\n{heads(*OTHER_STEPS)}{table(['GPUs, torch', *names], body)}"


def _is_of(run: Run, kind: str) -> bool:
    """Whether the command measures this kind."""
    return re.search(rf"[ ,]{kind}(,| |$)", run.command) is not None


def few_tokens() -> str:
    """The same with fewer tokens."""
    lines: dict[tuple[str, str], dict[str, list[str]]] = {}
    for run in FEW_TOKENS:
        for (size, kind, batch, backend), step in steps(run).items():
            if backend == "asynctp" and (_is_of(run, kind) or "--kinds" not in run.command):
                mode = f"{batch[2:]}, CUDA graphs" if GRAPHS in run.command else batch[2:]
                line = lines.setdefault((run.machine, mode), {})
                line.setdefault(size, []).append(f"{KINDS[kind]} {speedups(step)}")
    body = [[*where, *(", ".join(line.get(size, [NONE])) for size in SIZES)] for where, line in lines.items()]
    command = f"`{E2E} --batches 1x2048` with"
    return f"{command}\n\n{heads(*FEW_TOKENS)}{table(['GPUs', 'tokens', *SIZES.values()], body)}"


def speedups(step: Step) -> str:
    """Of the step and the forward."""
    return f"{step.speedup:.2f}/{step.forward:.2f}"


# --- training --------------------------------------------------------------------------------------------------------
def training() -> str:
    """Medians and means of the steps of whole models."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for each in map(json.loads, TRAINING.read_text(encoding="utf-8").splitlines()):
        number = re.findall(r"-(\d)\.jsonl$", each["file"])
        runs.setdefault(f"{each['machine']} {each['dp']} {each['blocks']} {each['precision']} {number}", []).append(
            each
        )
    lines: list[list[str]] = []
    told: dict[str, None] = {}
    for members in runs.values():
        times = {each["backend"]: counted(each) for each in members}
        first = members[0]
        where = f"{gpus(first['machine'])}, {first['torch'][:4]}"
        told[f"{where}, {first['date']}, {first['commit']}"] = None
        program = f"{'FSDP×TP' if first['dp'] == 2 else 'TP'} {first['blocks']} {KINDS[first['precision']]}"
        cells = [
            f"{statistics.median(times[name]):.3f} ({statistics.mean(times[name]):.3f})" if name in times else NONE
            for name in ("inductor", "intree", "asynctp")
        ]
        ratios = [of(times["inductor"]) / of(times["asynctp"]) for of in (statistics.median, statistics.mean)]
        lines.append([where, program, str(len(times["asynctp"])), *cells, f"{ratios[0]:.2f} ({ratios[1]:.2f})"])
    head = ["GPUs, torch", "mesh, blocks, dtype", "steps", "plain, s", "in-tree, s", "asynctp, s", "speedup"]
    command = (
        "torchrun --nproc_per_node=… examples/train_llama.py --size 8b --ac selective --blocks … --dp … --tp 2 "
        "--steps … --precision … --backend …"
    )
    listed = "; ".join(told)
    return f"{listed}, [training.jsonl](../results/training.jsonl): `{command}`\n\n{table(head, lines)}"


def counted(run: dict[str, Any]) -> list[float]:
    """Seconds of the steps that count: neither the first ones nor one that ran under the profiler."""
    first, last = run["steps"]
    return [
        seconds
        for step, seconds in enumerate(run["seconds"], 1)
        if first <= step <= last and step not in run["left_out"]
    ]


def gpus(machine: str) -> str:
    """`4 x NVIDIA H100 80GB HBM3` as `4×H100`."""
    count, name = re.findall(r"^(\d+) x NVIDIA (\w+)", machine)[0]
    return f"{count}×{name}"


# --- calls -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Call:
    """One problem of `asynctp bench`: raw, and the implementation that the shipped table picks for it."""

    raw: dict[str, Any]
    picked: str

    def time(self, name: str, mode: str) -> float:
        """Microseconds."""
        return float(self.raw["timings"][name][mode])

    def speedup(self, mode: str, ours: str | None = None) -> float:
        """How many times as fast as the better of cuBLAS + NCCL and PyTorch's op the picked one is, or `ours`."""
        best = min(self.time(name, mode) for name in ("nccl", "intree") if name in self.raw["timings"])
        return best / self.time(ours or self.picked, mode)

    @property
    def efficiency(self) -> float:
        """The bound over what is picked, in a graph."""
        return float(self.raw["bound"]) / self.time(self.picked, "graph")


def calls(run: Run) -> list[Call]:
    """All of a run's; of those that were measured again, with a later version, the last."""
    picks, found = read(SHIPPED), {}
    for told in map(read, run.paths()):
        for raw in told["rows"]:
            raw["timings"] = {_NAMES_NOW.get(name, name): times for name, times in raw["timings"].items()}
            key = f"{raw['op']}:{raw['world']}:{DTYPES[raw['kind']]}:{raw['k']}:{raw['n']}"
            picked = picks[told["machine"].partition(" x ")[2]][key].get(str(raw["m"])) or by_model(key, raw["m"])
            found[raw["kind"], key, raw["m"]] = Call(raw, picked)
    return list(found.values())


def by_model(key: str, rows: int) -> str:
    """What the cost model picks where the table has nothing: its measured winner takes the host longer now."""
    op, world, dtype, depth, width = key.split(":")
    asked = Problem.of(
        op, int(world), rows, [int(depth)], [int(width)], getattr(torch, dtype), torch.bfloat16, fast=True
    )
    return min(("fused", "decomposed"), key=lambda name: estimate(asked, name, Rates(), SMS))


MODES = [(op, mode) for op in ("gather", "scatter") for mode in ("graph", "eager")]


def means_of_calls() -> str:
    """Geometric means against the better of the two others, by machine and kind, and how many calls are slower."""
    lines = []
    for run in CALLS:
        found = calls(run)
        for kind in KINDS:
            mine = [call for call in found if call.raw["kind"] == kind]
            if not mine:
                continue
            means = [f"{mean(c.speedup(mode) for c in mine if c.raw['op'] == op):.2f}" for op, mode in MODES]
            slow, slow_as_run = ([sum(c.speedup(mode, ours) < NOISE for c in mine) for mode in ("graph", "eager")]
                                 for ours in (None, "asynctp"))  # fmt: skip
            counts = f"{slow[0]}, {slow[1]} ({slow_as_run[0]}, {slow_as_run[1]})"
            lines.append([f"{run.machine}, {KINDS[kind]}", *means, f"{counts} of {len(mine)}"])
    head = ["", "gather, graph", "gather, eager", "scatter, graph", "scatter, eager", "slower"]
    return heads(*CALLS) + table(head, lines)


def calls_by_rows() -> str:
    """Of four H200s in bf16, by rows: geometric means, and the least of the shapes."""
    found = calls(CALLS[0])
    lines = []
    for m in SHOWN:
        cells = [str(m)]
        for op, mode in MODES:
            ratios = [call.speedup(mode) for call in found if (call.raw["m"], call.raw["op"]) == (m, op)]
            cells.append(f"{mean(ratios):.2f} ({min(ratios):.2f})")
        lines.append(cells)
    head = ["M", *(f"{op}, {mode}" for op, mode in MODES)]
    return f"The first of these runs, by rows:\n\n{table(head, lines)}"


def mean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(list(values))


# --- all-reduces -----------------------------------------------------------------------------------------------------
_SUM = re.compile(r"^all_reduce bf16 +(\d+)x\d+x\d+ +(.*?) +\w+ +\d+ +[\d.]+ +([\d.]+) +([\d.]+) +\d+$", re.MULTILINE)
"""M, the times of all variants, and speedups in a graph and eager."""
ROWS_OF_SUMS = ((1, 64), (256, 1024), (2048, 4096), (5001, 16384))


def all_reduces() -> str:
    """Against the best other way, and against NCCL, by rows."""
    lines = []
    for run in (FEW_SUMS, MANY_SUMS):
        found = []
        for m, times, graph, eager in _SUM.findall(run.text()):
            nccl, ours = ([float(each) for each in times.split()[index].split("/")] for index in (1, -1))
            found.append((int(m), float(graph), float(eager), nccl[0] / ours[0], nccl[1] / ours[1]))
        for least, most in ROWS_OF_SUMS:
            mine = [ratios for m, *ratios in found if least <= m <= most]
            if mine:
                cells = [f"{mean(each):.2f} ({min(each):.2f})" for each in zip(*mine, strict=True)]
                lines.append([run.machine, f"{least}–{most}", str(len(mine)), *cells])
    head = ["GPUs", "M", "calls", "graph", "eager", "NCCL, graph", "NCCL, eager"]
    return heads(FEW_SUMS, MANY_SUMS) + table(head, lines)


# --- one kernel, one call --------------------------------------------------------------------------------------------
def gemm() -> str:
    """cuBLAS's time over the GEMM's, by op and kind: least and greatest, and the geometric mean of all."""
    found: dict[str, dict[int, list[float]]] = {}
    for line in GEMM.lines():
        if "case" in line:
            op, kind, rows, *_ = line["case"].split()
            found.setdefault(f"{op}, {KINDS[kind]}", {}).setdefault(int(rows), []).append(line["cublas"] / line["gemm"])
    rows = sorted({m for by_rows in found.values() for m in by_rows})
    lines = [
        [
            name,
            *(f"{min(by_rows[m]):.2f}–{max(by_rows[m]):.2f}" for m in rows),
            f"{statistics.geometric_mean(itertools.chain(*by_rows.values())):.3f}",
        ]
        for name, by_rows in found.items()
    ]
    return heads(GEMM) + table(["M", *map(str, rows), "mean"], lines)


def few_rows() -> str:
    """cuBLAS's time over ours, by kind and rows: mean and least; and the time of reading the weights over ours."""
    found: dict[str, dict[int, Mapping[str, float]]] = {}
    for line in FEW_ROWS.lines():
        if "kind" in line:
            found.setdefault(line["kind"], {})[line["rows"]] = line
    rows = sorted({m for by_rows in found.values() for m in by_rows})
    lines = []
    for kind, by_rows in found.items():
        lines.append([KINDS[kind], *(f"{by_rows[m]['mean']:.2f} ({by_rows[m]['least']:.2f})" for m in rows)])
        lines.append([f"{KINDS[kind]}, of memory", *(f"{by_rows[m]['bound']:.2f}" for m in rows)])
    return heads(FEW_ROWS) + table(["M", *map(str, rows)], lines)


def host() -> str:
    """Microseconds of a call, medians: at addresses of the call before, at new ones, and with cold caches."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    nccl: dict[str, float] = {}
    cublas: list[dict[str, float]] = []
    for line in HOST.lines():
        implementation, way, us = line.get("implementation", "cuBLAS"), line.get("way", ""), line["us"]
        if implementation == "NCCL":
            nccl[line["call"].removesuffix(" of one rank")] = us["median"]
        elif line["addresses"] == "first":
            cublas += [{}] if implementation == "cuBLAS" else []
        elif implementation == "cuBLAS":
            cublas[-1][line["addresses"]] = us["median"]
        else:
            found.setdefault((implementation, way), {}).setdefault(line["call"], {})[line["addresses"]] = us["median"]
    calls = dict.fromkeys(call for cells in found.values() for call in cells if "three" not in call)
    columns = sorted(calls, key=lambda call: call not in found["decomposed", "op"])
    lines = [
        [f"`{name}`, {way}", *(_by_address(cells[call]) if call in cells else NONE for call in columns)]
        for (name, way), cells in sorted(found.items(), key=lambda item: "fused direct decomposed".index(item[0][0]))
    ]
    beside, alone = ", ".join(f"{call} {us:.0f}" for call, us in nccl.items()), map(_by_address, cublas)
    return (
        heads(HOST)
        + table(["", *columns], lines)
        + f"\nThe program's own calls: cuBLAS {'; beside the gather and scatter of `direct` '.join(alone)}. "
        + f"NCCL's call and wait by one rank: {beside}.\n"
    )


def host_of_steps() -> str:
    """Milliseconds of the launching thread in a step, medians, and the least in parentheses."""
    lines = []
    for line in HOST_OF_STEPS.lines():
        ms = [f"{line['ms'][name]:.1f} ({line['least'][name]:.1f})" for name in ("asynctp", "NCCL, one rank")]
        lines.append([line["step"], *ms, f"{line['ratio']:.2f}"])
    return heads(HOST_OF_STEPS) + table(["Step", "asynctp", "NCCL", "ratio"], lines)


ADDRESSES = ("known", "all new", "cold")


def _by_address(us: dict[str, float]) -> str:
    return " / ".join(f"{us[name]:.0f}" for name in ADDRESSES) if us.keys() >= set(ADDRESSES) else NONE


def memory() -> str:
    """Peaks of a rank in GiB: plain Inductor's, and asynctp's with gathers kept, or made again."""
    problems = [(size, kind) for size in SIZES for kind in KINDS]
    plain = steps(STEPS)
    peaks = {(*line["problem"].split(":")[:2], line["variant"]): line["peak_GiB"] for line in PEAKS.lines()}
    lines = [["plain Inductor", *(f"{plain[size, kind, '1x8192', 'inductor'].peak:.2f}" for size, kind in problems)]]
    for variant, label in (("never", '`"never"`'), ("always", '`"always"`')):
        lines.append([label, *(f"{peaks[size, kind, variant]:.2f}" for size, kind in problems)])
    head = ["`rematerialize`", *(f"{SIZES[size]} {KINDS[kind]}" for size, kind in problems)]
    return heads(PEAKS) + table(head, lines)


# --- checks ----------------------------------------------------------------------------------------------------------
def checks() -> str:
    """Results that were right, by check and machine, of one run or more."""
    found: dict[str, dict[str, list[str]]] = {}
    lines = [json.loads(line) for line in CHECKS.read_text(encoding="utf-8").splitlines()]
    assert not any(line["wrong"] for line in lines), "the sentence below says so"
    for line in lines:
        count, _ = line["machine"].split(" x ")
        where = gpus(line["machine"])
        where = where if int(count) == line["ranks"] else f"{line['ranks']} on {where}"
        check = line["check"] + (", torch 2.15" if line["torch"].startswith("2.15") else "")
        found.setdefault(check, {}).setdefault(where, []).append(f"{line['right']:,}")
    body = [[check, "; ".join(f"{where}: {'+'.join(each)}" for where, each in places.items())]
            for check, places in sorted(found.items())]  # fmt: skip
    days = sorted({line["date"] for line in lines})
    right, refused = (sum(line.get(name, 0) for line in lines) for name in ("right", "refused"))
    told = "[checks.jsonl](../results/checks.jsonl) has each run's torch, date, commit and command:"
    head = f"{days[0]} to {days[-1]}; {told}"
    said = f"All {right:,} results of {len(lines)} runs are right. {refused:,} cases were refused, with their reason."
    return f"{head}\n`torchrun --nproc_per_node=… tests/gpu/….py`\n\n{table(['Check', 'right'], body)}\n{said}\n"


TABLES: dict[str, Callable[[], str]] = {
    "steps": steps_of_blocks,
    "steps of other machines": other_steps,
    "few tokens": few_tokens,
    "training": training,
    "gathers and scatters": means_of_calls,
    "gathers and scatters by rows": calls_by_rows,
    "all-reduces": all_reduces,
    "GEMM": gemm,
    "few rows": few_rows,
    "host": host,
    "host of steps": host_of_steps,
    "memory": memory,
    "checks": checks,
}
RUNS = (STEPS, *OTHER_STEPS, *FEW_TOKENS, *CALLS, FEW_SUMS, MANY_SUMS, GEMM, FEW_ROWS, HOST, PEAKS)
_PLACE = re.compile(r"(<!-- table: (.*?) -->\n\n)(.*?)(\n<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    """The page with its tables made anew."""
    return _PLACE.sub(lambda found: found[1] + TABLES[found[2]]() + found[4], page)


def names(page: str) -> Iterator[str]:
    """Names of the tables in a page."""
    return (found[2] for found in _PLACE.finditer(page))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
