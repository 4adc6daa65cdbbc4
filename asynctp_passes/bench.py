"""Side by side on this machine: cuBLAS alone, cuBLAS + NCCL, PyTorch's in-tree fused ops, and ours.

Started by `asynctp bench` with one process a GPU. Every variant's error against fp32 on fresh random data is in the
results. Timing: medians of CUDA events over rounds in which the variants take turns in random order, in a CUDA graph
and eager; the slowest rank counts. Efficiency = max(cuBLAS alone, bytes / copy bandwidth) / time in a graph.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from asynctp_kernels import cuda
from asynctp_kernels.cuda import select
from torch import Tensor

import asynctp_passes.ops  # noqa: F401  registers the ops
from asynctp_passes import compat
from asynctp_passes.cli import add_bench_options

#: (K, N) per rank: what Llama-3 70B (TP 4) and 8B put behind a gather and before a scatter
GATHER_SHAPES = ((8192, 2560), (8192, 14336), (4096, 7168), (8192, 3584))
SCATTER_SHAPES = ((2048, 8192), (7168, 8192), (3584, 4096))
ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COPY_BYTES_PER_US = 370e3  # copy engines, all ranks pulling at once, 4 x H200
KINDS = ("bf16", "fp8", "fp8-rowwise", "fp8-precise", "fp8-rowwise-precise")
OURS = ("asynctp", *select.IMPLEMENTATIONS)
PEERS = ("cublas", "nccl", "intree")


@dataclass(frozen=True)
class Timing:
    """Microseconds: in a CUDA graph, eager, and of host time per eager call. Slowest rank."""

    graph: float
    eager: float
    host: float


@dataclass(frozen=True)
class Row:
    """One problem: what was measured of each variant that runs, and how large its error was."""

    op: str
    kind: str
    world: int
    m: int
    k: int
    n: int
    timings: dict[str, Timing]
    errors: dict[str, float]
    chosen: str
    left_out: dict[str, str]

    @property
    def bound(self) -> float:
        """max(cuBLAS alone, bytes / copy bandwidth), microseconds."""
        itemsize = 1 if self.kind != "bf16" and self.op == "gather" else 2
        width = self.k if self.op == "gather" else self.n
        wire = self.m // self.world * (self.world - 1) * width * itemsize / COPY_BYTES_PER_US
        return max(self.timings["cublas"].graph, wire)

    def speedup(self, mode: str) -> float:
        """Against the better of cuBLAS + NCCL and in-tree."""
        others = [getattr(self.timings[name], mode) for name in ("nccl", "intree") if name in self.timings]
        return float(min(others) / getattr(self.timings["asynctp"], mode))


def world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


class Problem:
    """Random operands of one shape, and its variants as functions."""

    def __init__(self, op: str, kind: str, m: int, k: int, n: int) -> None:
        self.op, self.kind, self.group = op, kind, world_group().group_name
        self.world = dist.get_world_size()
        device = torch.device("cuda", torch.cuda.current_device())
        rows = m // self.world if op == "gather" else m
        self.b = _cast(torch.randn(n, k, device=device) * (k * self.world) ** -0.5, kind).t()
        self.a = _cast(torch.randn(rows, k, device=device), kind)
        self.full = _gather(self.a) if op == "gather" else self.a
        self.a_scale = self.full_scale = self.b_scale = torch.ones((), device=device)
        self.fast = is_fast(kind)
        if "rowwise" in kind:
            self.a_scale = torch.rand(rows, 1, device=device) + 0.5
            self.b_scale = torch.rand(1, n, device=device) + 0.5
            self.full_scale = _gather(self.a_scale) if op == "gather" else self.a_scale
        self.travels = "rowwise" in kind and op == "gather"

    def product(self, a: Tensor, scale: Tensor) -> Tensor:
        if self.kind == "bf16":
            return torch.mm(a, self.b)
        return compat.scaled_mm(a, self.b, scale, self.b_scale, None, torch.bfloat16, fast=self.fast)

    def variant(self, name: str) -> Callable[[], Tensor]:
        """The variant as a function of nothing; ours forced to one implementation, unless it is "asynctp"."""
        if name in PEERS:
            function: Callable[[], Tensor] = getattr(self, f"_{name}_{self.op}")
            return function
        if name == "asynctp":
            return self._ours

        def forced() -> Tensor:
            with select.forced(name):
                return self._ours()

        return forced

    def _ours(self) -> Tensor:
        group = self.group
        ours = torch.ops.asynctp
        if self.op == "gather":
            if self.kind == "bf16":
                return ours.all_gather_matmul(self.a, [self.b], [None], 0, False, self.world, group)[0]
            return ours.all_gather_scaled_matmul(
                self.a, self.a_scale, [self.b], [self.b_scale], [None], 0, self.travels, torch.bfloat16, self.fast,
                False, self.world, group)[0]  # fmt: skip
        if self.kind == "bf16":
            return ours.matmul_reduce_scatter([self.a], [self.b], [None], "sum", 0, self.world, group)
        return ours.scaled_matmul_reduce_scatter(
            [self.a],
            [self.b],
            [self.a_scale],
            [self.b_scale],
            [None],
            "sum",
            0,
            torch.bfloat16,
            self.fast,
            self.world,
            group,
        )

    def _cublas_gather(self) -> Tensor:
        return self.product(self.full, self.full_scale)

    def _cublas_scatter(self) -> Tensor:
        return self.product(self.a, self.a_scale)

    def _nccl_gather(self) -> Tensor:
        scale = self.full_scale if not self.travels else _nccl_gather(self.a_scale, self.group, self.world)
        return self.product(_nccl_gather(self.a, self.group, self.world), scale)

    def _nccl_scatter(self) -> Tensor:
        c10d = torch.ops._c10d_functional
        product = self.product(self.a, self.a_scale)
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(product, "sum", self.world, self.group))

    def _intree_gather(self) -> Tensor:
        intree = torch.ops.symm_mem
        if self.kind == "bf16":
            return intree.fused_all_gather_matmul(self.a, [self.b], 0, self.group, return_A=False)[1][0]
        return intree.fused_all_gather_scaled_matmul(
            self.a, [self.b], self.a_scale, [self.b_scale], 0, self.group, [None], [None], [torch.bfloat16], [self.fast]
        )[1][0]

    def _intree_scatter(self) -> Tensor:
        intree = torch.ops.symm_mem
        if self.kind == "bf16":
            return intree.fused_matmul_reduce_scatter(self.a, self.b, "sum", 0, self.group)
        return intree.fused_scaled_matmul_reduce_scatter(
            self.a, self.b, self.a_scale, self.b_scale, "sum", 0, 0, self.group,
            [self.a.shape[0], self.b.shape[1]], out_dtype=torch.bfloat16, use_fast_accum=self.fast)  # fmt: skip

    def expected(self) -> Tensor:
        """The result in fp32 from operands in fp32 (TF32 off); fp64 would take longer than the benchmark."""
        product = self.full.float() @ self.b.float()
        product = product * self.full_scale * self.b_scale
        if self.op == "gather":
            return product
        out = torch.empty(product.shape[0] // self.world, product.shape[1], device=product.device)
        dist.reduce_scatter_tensor(out, product)
        return out


def is_fast(kind: str) -> bool:
    """Whether sums of fp8 products may be less precise than fp32, as in a forward; torchao's backward is precise."""
    return not kind.endswith("precise")


def _cast(values: Tensor, kind: str) -> Tensor:
    return values.to(torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _gather(shard: Tensor) -> Tensor:
    raw = _bytes(shard)
    full = raw.new_empty(raw.shape[0] * dist.get_world_size(), *raw.shape[1:])
    dist.all_gather_into_tensor(full, raw)
    return full.view(shard.dtype)


def _nccl_gather(shard: Tensor, group: str, world: int) -> Tensor:
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_gather_into_tensor(_bytes(shard), world, group)).view(shard.dtype)


# --- timing ------------------------------------------------------------------------------------------------------
def slowest(value: float) -> float:
    """The largest of the ranks' values."""
    found = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found.item())


def _meet() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def _events(function: Callable[[], Any], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        function()
    end.record()
    torch.cuda.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed * 1e3 / count


def _host_time(function: Callable[[], Any]) -> float:
    """Of one eager call, in microseconds, while the GPU is not waited for."""
    _meet()
    start = time.perf_counter()
    for _ in range(8):
        function()
    elapsed = (time.perf_counter() - start) * 1e6 / 8
    torch.cuda.synchronize()
    return elapsed


def _capture(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    _meet()
    with torch.cuda.graph(graph):
        function()
    _meet()
    graph.replay()
    _meet()
    return graph


def measure(
    problem: Problem, names: Sequence[str], rounds: int
) -> tuple[dict[str, Timing], dict[str, float], dict[str, str]]:
    """Timings and relative errors of the variants that run, and why the others do not."""
    expected = problem.expected()
    functions, graphs, errors, hosts, left_out = {}, {}, {}, {}, {}
    for name in names:
        function = problem.variant(name)
        try:
            out = function()
        except (
            RuntimeError,
            TypeError,
            AttributeError,
            NotImplementedError,
        ) as error:  # every rank sees the same shapes
            left_out[name] = str(error).splitlines()[0][:200]
            continue
        if name != "cublas" or problem.op == "gather":
            errors[name] = slowest(((out.float() - expected).norm() / expected.norm()).item())
        del out
        function()
        hosts[name] = slowest(statistics.median(_host_time(function) for _ in range(3)))
        functions[name], graphs[name] = function, _capture(function)
    del expected
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in functions}
    for number in range(rounds):
        order = list(functions)
        random.Random(number).shuffle(order)
        for name in order:
            _meet()
            times[name][0].append(_events(graphs[name].replay, 6))
            _meet()
            times[name][1].append(_events(functions[name], 6))
    timings = {
        name: Timing(slowest(statistics.median(graph)), slowest(statistics.median(eager)), hosts[name])
        for name, (graph, eager) in times.items()
    }
    return timings, errors, left_out


def chosen(problem: Problem) -> str:
    """What the selector picks for this problem."""
    problem.variant("asynctp")()
    return cuda.last_implementation(world_group())


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure everything asked for, one row at a time."""
    world = dist.get_world_size()
    names = [*PEERS, "asynctp", *(select.IMPLEMENTATIONS if options.all else ())]
    for kind in options.kinds:
        for op, shapes in (("gather", GATHER_SHAPES), ("scatter", SCATTER_SHAPES)):
            for k, n in shapes:
                for m in options.rows:
                    if op in options.ops and m % world == 0:
                        torch.manual_seed(int(time.time()) * world + dist.get_rank())
                        problem = Problem(op, kind, m, k, n)
                        timings, errors, left_out = measure(problem, names, options.rounds)
                        yield Row(op, kind, world, m, k, n, timings, errors, chosen(problem), left_out)
                        del problem


# --- what comes out ----------------------------------------------------------------------------------------------
def line(row: Row) -> str:
    """One line of the table."""
    ours = row.timings["asynctp"]
    efficiency = row.bound / ours.graph
    cells = [f"{row.timings[name].graph:7.0f}/{row.timings[name].eager:<6.0f}" if name in row.timings else " " * 14
             for name in ("cublas", "nccl", "intree", "asynctp")]  # fmt: skip
    return (
        f"{row.op:7} {row.kind:11} {row.m:6}x{row.k}x{row.n:<6} {' '.join(cells)} {row.chosen:10} "
        f"{efficiency:5.2f} {row.speedup('graph'):6.2f} {row.speedup('eager'):6.2f} {ours.host:5.0f}"
    )


HEADER = (
    f"{'op':7} {'operands':11} {'M x K x N':19} {'cuBLAS':>14} {'+ NCCL':>14} {'in-tree':>14} {'asynctp':>14} "
    f"{'runs':10} {'eff.':>5} {'graph':>6} {'eager':>6} {'host':>5}\n"
    "(microseconds, CUDA graph/eager; eff.: bound / ours; graph, eager: the better of NCCL and in-tree / ours)"
)


def summary(found: Sequence[Row]) -> list[str]:
    """Geometric means and worst cases."""
    lines = []
    for kind in dict.fromkeys(row.kind for row in found):
        for op in dict.fromkeys(row.op for row in found):
            mine = [row for row in found if row.kind == kind and row.op == op]
            if not mine:
                continue
            for mode in ("graph", "eager"):
                speedups = [row.speedup(mode) for row in mine]
                mean = statistics.geometric_mean(speedups)
                worst = min(mine, key=lambda row: row.speedup(mode))
                lines.append(
                    f"{kind} {op} {mode}: {mean:.2f}x the better of cuBLAS + NCCL and in-tree (geometric mean of "
                    f"{len(mine)}); least {min(speedups):.2f}x at M={worst.m}, K={worst.k}, N={worst.n}"
                )
    return lines


def record(found: Sequence[Row], command: str) -> dict[str, Any]:
    """Everything, as JSON: what the machine is, the command, and each row."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{dist.get_world_size()} x {properties.name}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "command": command,
        "rows": [{**asdict(row), "bound": row.bound} for row in found],
    }


def tuning_table(found: Sequence[Row]) -> dict[str, dict[str, dict[str, str]]]:
    """{GPU: {problem: {rows: implementation}}}: `fastest` by the geometric mean of graph and eager time."""
    costs: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in found:
        dtype = torch.bfloat16 if row.kind == "bf16" else torch.float8_e4m3fn  # both ways to scale decide together
        sizes = (row.op, row.world, row.m, [row.k], [row.n])
        key = select.Problem.of(*sizes, dtype, torch.bfloat16, is_fast(row.kind)).key
        for name in set(select.IMPLEMENTATIONS) & set(row.timings):
            timing = row.timings[name]
            costs.setdefault((key, str(row.m)), {}).setdefault(name, []).append(math.log(timing.graph * timing.eager))
    table: dict[str, dict[str, str]] = {}
    for (key, rows_of_a), by_name in costs.items():
        most = max(map(len, by_name.values()))
        times = {name: math.exp(sum(logs) / len(logs) / 2) for name, logs in by_name.items() if len(logs) == most}
        table.setdefault(key, {})[rows_of_a] = select.fastest(times)
    return {torch.cuda.get_device_name(): table}


def write_tuning(found: Sequence[Row]) -> Path:
    """Merge what was measured into the table that the selector reads."""
    path = select.table_path()
    merged = select.read_tuned(path)
    for name, problems in tuning_table(found).items():
        for key, by_rows in problems.items():
            merged.setdefault(name, {}).setdefault(key, {}).update(by_rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
    whole.replace(path)
    return path


def plot(found: Sequence[Row], path: Path) -> bool:
    """Efficiency over M, one panel a shape; False without matplotlib, or rows."""
    if not found:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((row.op, row.kind, row.k, row.n) for row in found))
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4 * columns, 3 * lines), squeeze=False, sharey=True)
    for axis, (op, kind, k, n) in zip(axes.flat, panels, strict=False):
        mine = [row for row in found if (row.op, row.kind, row.k, row.n) == (op, kind, k, n)]
        for name, label in (("nccl", "cuBLAS + NCCL"), ("intree", "in-tree"), ("asynctp", "asynctp")):
            points = [(row.m, row.bound / row.timings[name].graph) for row in mine if name in row.timings]
            axis.plot([m for m, _ in points], [value for _, value in points], marker="o", label=label)
        axis.set(xscale="log", title=f"{op} {kind} K={k} N={n}", xlabel="M", ylim=(0, 1.1))
        axis.axhline(1, color="grey", linewidth=0.5)
    axes[0][0].set_ylabel("bound / time (CUDA graph)")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)
    return True


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The worker's options.

    Raises:
        SystemExit: one is not valid; the message says what is.
    """
    parser = argparse.ArgumentParser(prog="asynctp bench")
    add_bench_options(parser)
    options = parser.parse_args(arguments)
    options.kinds = options.kinds or ["bf16"]
    options.timeout = options.timeout or 1800
    for name, valid in (("kinds", KINDS), ("ops", ("gather", "scatter"))):
        for value in getattr(options, name):
            if value not in valid:
                parser.error(f"--{name} {value!r} is not valid; it must be of {', '.join(valid)}")
    options.rows = options.rows or list(ROWS)
    options.all = options.all or options.tune
    return options


def command(options: argparse.Namespace) -> str:
    """The command that measures the same again."""
    kept = {"rows": options.rows, "ops": options.ops, "kinds": options.kinds, "rounds": [options.rounds]}
    words = [f"--{name} {','.join(map(str, values))}" for name, values in kept.items()]
    words += [f"--{name}" for name in ("all", "tune") if getattr(options, name)]
    return f"asynctp bench --ranks {dist.get_world_size()} {' '.join(words)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """One process of the benchmark."""
    options = parse(arguments)
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    compat.register_intree_ops()
    first = dist.get_rank() == 0
    found = []
    if first:
        print(HEADER, flush=True)
    for row in rows(options):
        found.append(row)
        if first:
            print(line(row), flush=True)
    if first:
        print("\n".join(summary(found)))
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "bench.json").write_text(json.dumps(record(found, command(options)), indent=1))
            plotted = plot(found, options.out / "bench.png")
            print(
                f"wrote {options.out / 'bench.json'}"
                + (" and bench.png" if plotted else " (no plot: no matplotlib, or no rows)")
            )
        if options.tune:
            print(f"wrote {write_tuning(found)}")
    faulthandler.cancel_dump_traceback_later()
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
