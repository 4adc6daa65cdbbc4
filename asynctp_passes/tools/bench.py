"""Side by side on this machine: cuBLAS alone, cuBLAS + NCCL, PyTorch's ops over symmetric memory, and ours.

Started by `asynctp bench` with one process a GPU. What is measured are calls of the fused ops: those of the built-in
shapes, or of a program's reports. Before a variant is timed, its results are compared with fp32 on fresh random data,
eager and in a CUDA graph; one that is WRONG is shown so, and never gets into the tuning table. Timing: medians of CUDA
events over rounds in which the variants take turns, each behind another one in each round (`orders`), in a CUDA graph
and eager, each for 30 ms or so, by when the power limit tells; the slowest rank counts.
Efficiency = max(cuBLAS alone, bytes / copy bandwidth) / time in a graph.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from asynctp_kernels import cuda
from asynctp_kernels.cuda.choose import select, tables
from asynctp_kernels.cuda.choose.wire import TRANSPORTS
from asynctp_kernels.cuda.implementations import ENTRIES, IMPLEMENTATIONS
from asynctp_kernels.torch_private import symmetric_empty, symmetric_rendezvous
from torch import Tensor

import asynctp_passes.ops  # noqa: F401  registers the ops
from asynctp_passes.config import can_be_written
from asynctp_passes.ops import plain_collectives as plain
from asynctp_passes.ops import reference
from asynctp_passes.ops.calls import SCALES, signature
from asynctp_passes.reporting.files import write_whole
from asynctp_passes.tools.cli import OPS, add_bench_options, add_table_options, calls_of_report, mistake
from asynctp_passes.tools.plots import GATHER_SHAPES, SCATTER_SHAPES, draw_calls
from asynctp_passes.torch_private import intree, torch_ops

ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COPY_BYTES_PER_US = select.Rates().copy
#: of gathers and scatters PyTorch has fused ops; of all-reduces it has two that follow a matmul
PEERS = ("cublas", "nccl", "intree", "oneshot", "twoshot")
PEERS_OF_ALL_REDUCE, PEERS_OF_OTHERS = ("cublas", "nccl", "oneshot", "twoshot"), ("cublas", "nccl", "intree")
#: what is less than this fast, against the other, is slower by more than noise
NOISE = 0.98
#: an error that is wrong however large that of cuBLAS + NCCL is
WRONG = 0.1
#: calls in a row that one measurement is the mean of: for so long, if these are not too few or too many
STEADY_US, FEWEST_CALLS, MOST_CALLS = 30e3, 6, 64


@dataclass(frozen=True)
class Timing:
    """Microseconds: in a CUDA graph, eager, and of host time per eager call. Slowest rank."""

    graph: float
    eager: float
    host: float


@dataclass(frozen=True)
class Row:
    """One call: what was measured of each variant that runs.

    Attributes:
        problem: What the selector sees of the call.
        kind: Of its operands, as `kind_of` names it.
        timings: By variant.
        errors: By variant: of the row of a result that is furthest from fp32, the relative distance.
        limit: What an error may be; beyond it the variant is wrong.
        chosen: What asynctp ran; empty where it raised.
        left_out: Why the other variants did not run.
    """

    problem: select.Problem
    kind: str
    timings: dict[str, Timing]
    errors: dict[str, float]
    limit: float
    chosen: str
    left_out: dict[str, str]

    @property
    def wrong(self) -> list[str]:
        """The variants whose results are."""
        return [name for name, error in self.errors.items() if not error <= self.limit]

    @property
    def right(self) -> bool:
        """No variant is wrong, and asynctp ran."""
        return not self.wrong and "asynctp" in self.timings

    @property
    def bound(self) -> float:
        """max(cuBLAS alone, bytes / copy bandwidth), microseconds."""
        halves = 2 if self.problem.op == "all_reduce" else 1
        copies = halves * self.problem.wire_bytes / COPY_BYTES_PER_US
        return max(self.timings["cublas"].graph, copies) if "cublas" in self.timings else copies

    def speedup(self, mode: str, variant: str = "asynctp") -> float | None:
        """Against the best of the peers that communicate; None if the variant or these are missing or wrong."""
        found = {name: getattr(self.timings[name], mode) for name in self.timings if name not in self.wrong}
        others = [found[name] for name in PEERS[1:] if name in found]
        return float(min(others) / found[variant]) if others and variant in found else None

    def may_run(self, implementation: str) -> bool:
        """Does it share a transport with what ran by itself? Any does where nothing ran."""
        return not self.chosen or not set(TRANSPORTS[implementation]).isdisjoint(TRANSPORTS[self.chosen])

    def slower(self, variant: str) -> bool:
        """Is it, in a graph or eager, by more than noise?"""
        return any((self.speedup(mode, variant) or 1.0) < NOISE for mode in ("graph", "eager"))


def world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


# --- calls -------------------------------------------------------------------------------------------------------
Arguments = dict[str, Any]  # of a fused op, as `Remark.call` has them


def built_in(op: str, kind: str, m: int, k: int, n: int, world: int) -> tuple[str, Arguments]:
    """The name of the fused op for one built-in shape, and its arguments; `m`: rows over all ranks."""
    if op == "all_reduce":
        name, arguments = built_in("scatter", kind, m, k, n, world)
        del arguments["scatter_dim"], arguments["group_size"]
        return name.replace("reduce_scatter", "all_reduce"), arguments
    gathers, rowwise = op == "gather", "rowwise" in kind
    dtype, rows = "bfloat16" if kind == "bf16" else "float8_e4m3fn", m // world if gathers else m
    a, b = _spec(dtype, rows, k), {"dtype": dtype, "shape": [k, n], "stride": [1, k]}
    a_scale, b_scale = (_spec("float32", rows, 1), _spec("float32", 1, n)) if rowwise else [_spec("float32")] * 2
    how = {"out_dtype": "bfloat16", "use_fast_accum": not kind.endswith("precise")}
    where, group = {"reduce_op": "sum", "scatter_dim": 0}, {"group_size": world}
    last = {"return_a_full": False, **group}
    b_scales = {"b_scales": [b_scale], **how}
    if gathers:
        scales = {"a_scale": a_scale, "gather_a_scale": rowwise, **b_scales}
        name, arguments = "all_gather_matmul", {"a_shard": a, "bs": [b], "biases": [None], "gather_dim": 0, **last}
    else:
        scales = {"a_scales": [a_scale], **b_scales}
        name, arguments = "matmul_reduce_scatter", {"a_parts": [a], "b_parts": [b], "biases": [None], **where, **group}
    return name, arguments if kind == "bf16" else arguments | scales


def _spec(dtype: str, *shape: int) -> Arguments:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return {"dtype": dtype, "shape": list(shape), "stride": strides}


class Call:
    """One call of a fused op with random operands, and its variants as functions.

    Args:
        op: Its name.
        arguments: Its arguments, as `Remark.call` has them.
        device: Of the operands.
    """

    def __init__(self, op: str, arguments: Arguments, device: torch.device) -> None:
        self.op, self.device = op, device
        self.group, self.world = world_group().group_name, dist.get_world_size()
        self.gathers, self.scaled = op.startswith("all_gather"), arguments.get("b_scales") is not None
        self._drawn: list[tuple[str, Tensor]] = []
        given = {name: self._made(name, value) for name, value in arguments.items()}
        of_op = signature(op)
        self.call: Any = of_op.named({**given, "group_name": self.group})
        self._arguments = of_op.in_order({**given, "group_name": self.group})
        self.a_parts: list[Tensor] = [self.call.a_shard] if self.gathers else self.call.a_parts
        self.bs: list[Tensor] = self.call.bs if self.gathers else self.call.b_parts
        self.biases: list[Tensor | None] = self.call.biases
        a_scales = [self.call.a_scale] if self.gathers else self.call.a_scales
        self.a_scales: list[Tensor] = a_scales if self.scaled else []
        self.b_scales: list[Tensor] = self.call.b_scales or []
        self.along: Tensor | None = self.call.along_shard if self.gathers else None
        self.travels: bool = self.gathers and self.call.gather_a_scale
        self.out_dtype: torch.dtype = self.call.out_dtype or self.a_parts[0].dtype
        self.dim: int = (self.call.gather_dim if self.gathers else self.call.scatter_dim) or 0
        self._whole: list[Tensor] = []
        self.renew()

    @property
    def problem(self) -> select.Problem:
        """The problem that the selector sees."""
        return cuda.problem_of(self.call, self.world)

    # --- operands ----------------------------------------------------------------------------------------------
    def _made(self, name: str, value: Any) -> Any:
        """An argument, with tensors where it describes them."""
        if isinstance(value, list):
            return [self._made(name, item) for item in value]
        if name in ("out_dtype", "sum_dtype") and value is not None:
            return getattr(torch, value)
        if not isinstance(value, dict):
            return value
        sizes = [size if stride else 1 for size, stride in zip(value["shape"], value["stride"], strict=True)]
        dtype = getattr(torch, value["dtype"])
        tensor = torch.empty_strided(sizes, value["stride"], dtype=dtype, device=self.device)
        self._drawn.append((name, tensor))
        return tensor.expand(value["shape"])

    def renew(self) -> None:
        """Draw all operands anew, where they are."""
        for name, tensor in self._drawn:
            if "scale" in name or name == "along_shard":
                values = torch.rand(tensor.shape, device=self.device) + 0.5
            else:
                values = torch.randn(tensor.shape, device=self.device)
            if name in ("bs", "b_parts") and tensor.itemsize > 1:
                values *= tensor.shape[0] ** -0.5
            if name == "a_scale" and not self.travels:
                dist.broadcast(values, 0)  # one, or those of all rows: the same on all ranks
            tensor.copy_(values.to(tensor.dtype))
        if self.gathers:
            shards = [*self.a_parts, *(self.a_scales if self.travels else [])]
            whole = [plain.gather(shard, self.dim, self.world, self.group) for shard in shards]
            self._whole = self._whole or whole
            for old, new in zip(self._whole, whole, strict=True):
                old.copy_(new)

    @property
    def full(self) -> Tensor:
        """The gathered A."""
        return self._whole[0]

    @property
    def full_scale(self) -> Tensor | None:
        """Its scales."""
        return self._whole[1] if self.travels else next(iter(self.a_scales), None)

    # --- results -----------------------------------------------------------------------------------------------
    def expected(self) -> list[Tensor]:
        """The results in fp32 from operands in fp32 (TF32 off); fp64 would take longer than the benchmark."""
        a_parts = [self._taken(self.full, i) for i in range(len(self.bs))] if self.gathers else self.a_parts
        a_scales = [self.full_scale] * len(self.bs) if self.gathers else self.a_scales
        products = []
        for i, (a, b, bias) in enumerate(zip(a_parts, self.bs, self.biases, strict=True)):
            left, right = a.float(), b.float()
            if self.scaled:
                left, right = left * _each(a_scales[i], a.shape), right * _each(self.b_scales[i], b.shape)
            product = left @ right
            products.append(product if bias is None else product + bias.float())
        if self.gathers:
            full = [self.full.float()] if self.call.return_a_full else []
            along = [] if self.along is None else [plain.gather(self.along, self.dim, self.world, self.group)]
            return [*products, *full, *along]
        total, how = (
            self._sum(products, None if self.call.added is None else self.call.added.float()),
            self.call.reduce_op,
        )
        if self.op.endswith("all_reduce"):
            return [plain.all_reduce(total, how, self.group)]
        return [plain.reduce_scatter(total, how, self.dim, self.world, self.group)]

    def error(self, function: Callable[[], list[Tensor]]) -> float:
        """How far the results are from fp32, on new data: the worst row's relative distance, of any rank."""
        self.renew()
        worst = 0.0
        for out, wanted in zip(function(), self.expected(), strict=True):
            found = math.nan
            if out.shape == wanted.shape:
                found = float((_norms(out.float() - wanted) / _norms(wanted).clamp_min(1e-20)).max())
            worst = max(worst, math.inf if math.isnan(found) else found)
        return slowest(worst, self.device)

    # --- variants ----------------------------------------------------------------------------------------------
    def variant(self, name: str) -> Callable[[], list[Tensor]]:
        """The variant as a function of nothing; ours forced to one implementation, unless it is "asynctp"."""
        if name in PEERS:
            function: Callable[[], list[Tensor]] = getattr(self, f"_{name}")
            return function
        if name == "asynctp":
            return self._ours

        def forced() -> list[Tensor]:
            with select.forced(name):
                return self._ours()

        return forced

    def _ours(self) -> list[Tensor]:
        found = getattr(torch.ops.asynctp, self.op)(*self._arguments)
        return found if self.gathers else [found]

    def _product(self, i: int, a: Tensor, a_scale: Tensor | None) -> Tensor:
        """The product of operand `i`: on a GPU by cuBLAS, with as little host time as compiled code takes."""
        b, bias = self.bs[i], self.biases[i]
        if a_scale is None:
            return reference.product(a, b, bias)
        b_scale, fast = self.b_scales[i], self.call.use_fast_accum
        by_rows = (a_scale.shape, b_scale.shape) == ((a.shape[0], 1), (1, b.shape[1]))
        alike = a_scale.ndim == b_scale.ndim == 0 or (by_rows and self.out_dtype == torch.bfloat16)
        if a.is_cuda and a.ndim == 2 and alike and bias is None and b.stride(0) == 1:
            return torch_ops.scaled_mm(a, b, a_scale, b_scale, None, self.out_dtype, fast)
        return reference.scaled_product(a, b, a_scale, b_scale, bias, self.out_dtype, fast)

    def _products(self, a: Tensor, a_scale: Tensor | None) -> list[Tensor]:
        """The matmuls of a gathered A and its scale."""
        return [self._product(i, self._taken(a, i), a_scale) for i in range(len(self.bs))]

    def _taken(self, a: Tensor, i: int) -> Tensor:
        """The rows of a gathered A that operand `i` takes."""
        return reference.taken(a, self.call.rows_of(i))

    def _total(self) -> Tensor:
        """The sum of the products before a reduction."""
        scales = self.a_scales if self.scaled else [None] * len(self.bs)
        products = [self._product(i, a, scale) for i, (a, scale) in enumerate(zip(self.a_parts, scales, strict=True))]
        terms = products if self.call.sum_dtype is None else [product.to(self.call.sum_dtype) for product in products]
        return self._sum(terms, self.call.added)

    def _sum(self, products: list[Tensor], added: Tensor | None) -> Tensor:
        """The sum that a rank sends: its products times their factors, and what is added."""
        each, of_sum = reference.split_factors(self.call.factors, len(products))
        first, *others = [reference.multiplied(*pair) for pair in zip(products, each, strict=True)]
        return reference.multiplied(sum([*others, *([] if added is None else [added])], first), of_sum)

    def _cublas(self) -> list[Tensor]:
        """The products alone."""
        return self._products(self.full, self.full_scale) if self.gathers else [self._total()]

    def _nccl(self) -> list[Tensor]:
        if self.gathers:
            full = self._gather(self.a_parts[0])
            scale = self._gather(self.a_scales[0]) if self.travels else self.full_scale
            along = [] if self.along is None else [self._gather(self.along)]
            return [*self._products(full, scale), *([full] if self.call.return_a_full else []), *along]
        total, how, c10d = self._total(), self.call.reduce_op, torch.ops._c10d_functional
        if self.op.endswith("all_reduce"):
            return [plain.all_reduce(total, how, self.group, in_place=True)]
        if self.dim == 0 and how == "sum":
            return [c10d.wait_tensor(c10d.reduce_scatter_tensor(total, how, self.world, self.group))]
        return [plain.reduce_scatter(total, how, self.dim, self.world, self.group)]

    def _gather(self, shard: Tensor) -> Tensor:
        if self.dim != 0 or not shard.is_contiguous():
            return plain.gather(shard, self.dim, self.world, self.group)
        c10d, raw = torch.ops._c10d_functional, shard.view(torch.uint8) if shard.itemsize == 1 else shard
        return c10d.wait_tensor(c10d.all_gather_into_tensor(raw, self.world, self.group)).view(shard.dtype)

    def _intree(self) -> list[Tensor]:
        """PyTorch's own fused op.

        Raises:
            NotImplementedError: It has none for this call.
        """
        intree, a, fast = torch.ops.symm_mem, self.a_parts[0], self.call.use_fast_accum
        plain, count = all(bias is None for bias in self.biases), len(self.bs)
        if self.gathers and self.along is None and self.call.b_rows is None and (self.scaled or plain):
            if self.scaled:
                full, outs = intree.fused_all_gather_scaled_matmul(
                    a, self.bs, self.a_scales[0], self.b_scales, self.dim, self.group, self.biases, [None] * count,
                    [self.out_dtype] * count, [fast] * count)  # fmt: skip
            else:
                returned = self.call.return_a_full
                full, outs = intree.fused_all_gather_matmul(a, self.bs, self.dim, self.group, return_A=returned)
            return [*outs, full] if self.call.return_a_full else list(outs)
        fits = plain and count == 1 and (a.ndim == 2 or not self.scaled)
        if "reduce_scatter" in self.op and fits and not signature(self.op).given(self.call) - SCALES:
            how = self.call.reduce_op
            if not self.scaled:
                return [intree.fused_matmul_reduce_scatter(a, self.bs[0], how, self.dim, self.group)]
            return [intree.fused_scaled_matmul_reduce_scatter(
                a, self.bs[0], self.a_scales[0], self.b_scales[0], how, self.dim, self.dim, self.group,
                [a.shape[0], self.bs[0].shape[1]], out_dtype=self.out_dtype, use_fast_accum=fast)]  # fmt: skip
        raise NotImplementedError("PyTorch has no fused op for this call")

    @functools.cached_property
    def _shared(self) -> Tensor:
        """Symmetric memory for the matmul's result, which PyTorch's all-reduces over it read.

        Raises:
            NotImplementedError: The call is more than the sum of one plain matmul.
        """
        plain = self.biases == [None] and not self.scaled and self.a_parts[0].ndim == 2
        if not plain or self.call.reduce_op != "sum" or signature(self.op).given(self.call):
            raise NotImplementedError("only a plain matmul is made in symmetric memory, and summed up")
        shape = (self.a_parts[0].shape[0], self.bs[0].shape[1])
        memory = symmetric_empty(math.prod(shape) * self.out_dtype.itemsize, self.device)
        symmetric_rendezvous(memory, world_group())
        return memory.view(self.out_dtype).view(shape)

    def _oneshot(self) -> list[Tensor]:
        torch.mm(self.a_parts[0], self.bs[0], out=self._shared)
        return [torch.ops.symm_mem.one_shot_all_reduce(self._shared, "sum", self.group)]

    def _twoshot(self) -> list[Tensor]:
        torch.mm(self.a_parts[0], self.bs[0], out=self._shared)
        return [torch.ops.symm_mem.two_shot_all_reduce_(self._shared, "sum", self.group)]


def kind_of(arguments: Arguments) -> str:
    """The number format of a call, as `--kinds` names it; also fp8-blocks, and fp16 and fp32."""
    a = arguments["a_shard"] if "a_shard" in arguments else arguments["a_parts"][0]
    if arguments.get("b_scales") is None:
        return str(a["dtype"]).replace("bfloat", "bf").replace("float", "fp")
    shapes = [scale["shape"] for scale in arguments["b_scales"]]
    rowwise = any(math.prod(shape) > 1 for shape in shapes)
    blocks = any(len(shape) == 2 and shape[0] > 1 for shape in shapes)
    scales = "-blocks" if blocks else "-rowwise" if rowwise else ""
    return f"fp8{scales}{'' if arguments.get('use_fast_accum') else '-precise'}"


def _each(scale: Tensor | None, shape: torch.Size) -> Tensor:
    """Scales that broadcast to a tensor of this shape: one, by rows or columns, or of blocks of 128."""
    assert scale is not None
    if scale.numel() == 1:
        return scale.reshape(())
    for dim in (-2, -1):
        if scale.shape[dim] not in (1, shape[dim]):
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, shape[dim])
    return scale


def _norms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dim=-1)


# --- timing ------------------------------------------------------------------------------------------------------
def slowest(value: float, device: torch.device) -> float:
    """The largest of the ranks' values."""
    found = torch.tensor(value, device=device, dtype=torch.float64)
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


def _repeats(function: Callable[[], Any], device: torch.device) -> int:
    """How often to call it in a row, so that the clock comes to where the power limit has it in a program."""
    return max(FEWEST_CALLS, min(MOST_CALLS, int(STEADY_US / slowest(_events(function, FEWEST_CALLS), device))))


def _host_time(function: Callable[[], Any]) -> float:
    """The host time of one eager call among others, in microseconds, while the GPU is not waited for.

    The median, because the first calls behind a wait take the host several times as long, whatever they call.
    """
    times = []
    _meet()
    for _ in range(16):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def _capture(function: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    graph = torch.cuda.CUDAGraph()
    _meet()
    with torch.cuda.graph(graph):
        found = function()
    _meet()
    graph.replay()
    _meet()
    return graph, found


def orders(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The turns of each round, the same on every rank: few variants come again behind the one that they were behind.

    What ran before has left a clock and a temperature: always behind cuBLAS, a call takes some percent longer than
    behind NCCL.
    """
    draw, behind = random.Random(0), Counter[tuple[str, str]]()
    found: list[list[str]] = []
    for _ in range(rounds):
        last = found[-1][-1:] if found else []
        drawn = [draw.sample(names, len(names)) for _ in range(300)]
        best = min(drawn, key=lambda order: sum(behind[pair] for pair in itertools.pairwise([*last, *order])))
        behind.update(itertools.pairwise([*last, *best]))
        found.append(best)
    return found


def measure(
    call: Call, names: Sequence[str], rounds: int
) -> tuple[dict[str, Timing], dict[str, float], dict[str, str]]:
    """Timings and errors of the variants that run, and why the others do not."""
    functions, graphs, repeats, errors, left_out = {}, {}, {}, {}, {}
    for name in names:
        function = call.variant(name)
        try:
            function()
            graph, captured = _capture(function)
        except Exception as error:  # on every rank: they see the same shapes
            left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        if name != "cublas":
            errors[name] = error_of(call, function, graph, captured)
        functions[name], graphs[name] = function, graph
        repeats[name] = _repeats(graph.replay, call.device)
    times: dict[str, tuple[list[float], list[float], list[float]]] = {name: ([], [], []) for name in functions}
    for order in orders(list(functions), rounds):
        for name in order:
            _meet()
            times[name][0].append(_events(graphs[name].replay, repeats[name]))
            _meet()
            times[name][1].append(_events(functions[name], repeats[name]))
            times[name][2].append(_host_time(functions[name]))

    def median(found: Sequence[float]) -> float:
        return slowest(statistics.median(found), call.device)

    timings = {name: Timing(*map(median, found)) for name, found in times.items()}
    return timings, errors, left_out


def error_of(
    call: Call, function: Callable[[], list[Tensor]], graph: torch.cuda.CUDAGraph, captured: list[Tensor]
) -> float:
    """The larger of the errors of the eager call and of the graph's replay."""

    def replayed() -> list[Tensor]:
        graph.replay()
        return captured

    return max(call.error(function), call.error(replayed))


def limit(errors: dict[str, float], out_dtype: torch.dtype) -> float:
    """The limit of an error: three times that of the plain program, which rounds too, but at least one rounding."""
    return min(max(3 * errors.get("nccl", 0.0), torch.finfo(out_dtype).eps), WRONG)


def chosen(call: Call) -> str:
    """The selector's choice for this call."""
    call.variant("asynctp")()
    return cuda.last_implementation(world_group())


def calls(options: argparse.Namespace, world: int) -> Iterator[tuple[str, Arguments]]:
    """Everything asked for: the ops' names and arguments."""
    if options.report is not None:
        yield from (each[:2] for each in calls_of_report(options.report) if each[2] == world)
        return
    for kind, op in itertools.product(options.kinds, options.ops):
        for m, k, n in shapes_of(op, options):
            if op == "all_reduce" or m % world == 0:
                yield built_in(op, kind, m, k, n, world)


def shapes_of(op: str, options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """(M, K, N) of an op: those asked for, or the built-in ones."""
    if options.shapes:
        return [(m, k, n) for m, k, n in (map(int, text.split("x")) for text in options.shapes)]
    return [(m, k, n) for k, n in (GATHER_SHAPES if op == "gather" else SCATTER_SHAPES) for m in options.rows]


def rows(options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Measure everything asked for, one row at a time."""
    world = dist.get_world_size()
    for op, arguments in calls(options, world):
        peers = PEERS_OF_ALL_REDUCE if op.endswith("all_reduce") else PEERS_OF_OTHERS
        names = [*peers, "asynctp", *(IMPLEMENTATIONS if options.all else ())]
        torch.manual_seed(int(time.time()) * world + dist.get_rank())
        call = Call(op, arguments, device)
        timings, errors, left_out = measure(call, names, options.rounds)
        ran = chosen(call) if "asynctp" in timings else ""
        allowed = limit(errors, call.out_dtype)
        yield Row(call.problem, kind_of(arguments), timings, errors, allowed, ran, left_out)
        del call


# --- what comes out ----------------------------------------------------------------------------------------------
def line(row: Row) -> str:
    """One line of the table."""
    each, ours = row.problem, row.timings.get("asynctp")
    cells = [f"{row.timings[name].graph:7.0f}/{row.timings[name].eager:<6.0f}" if name in row.timings else " " * 14
             for name in (*PEERS, "asynctp")]  # fmt: skip
    efficiency = f"{row.bound:6.0f} {row.bound / ours.graph:5.2f}" if ours else " " * 12
    speedups = [f"{row.speedup(mode):6.2f}" if row.speedup(mode) else " " * 6 for mode in ("graph", "eager")]
    faults = [f"WRONG: {name} ({row.errors[name]:.1e}, may be {row.limit:.1e})" for name in row.wrong]
    faults += [] if ours else [f"asynctp: {row.left_out['asynctp']}"]
    shape = "x".join((str(each.rows), *each.sizes))
    return (
        f"{each.op:10} {row.kind:19} {shape:26} {' '.join(cells)} {row.chosen:10} {efficiency} {' '.join(speedups)} "
        f"{f'{ours.host:5.0f}' if ours else '':5}{''.join(f'  {fault}' for fault in faults)}"
    ).rstrip()


HEADER = (
    f"{'op':10} {'operands':19} {'M x K x N':26} {'cuBLAS':>14} {'+ NCCL':>14} {'in-tree':>14} "
    f"{'one-shot':>14} {'two-shot':>14} {'asynctp':>14} {'runs':10} {'floor':>6} {'eff.':>5} {'graph':>6} {'eager':>6} "
    f"{'host':>5}\n"
    "(microseconds, CUDA graph/eager; eff.: floor / ours; graph, eager: the best of NCCL and PyTorch's / ours)"
)


def summary(found: Sequence[Row]) -> list[str]:
    """Geometric means and worst cases."""
    lines = []
    for kind, op in dict.fromkeys((row.kind, row.problem.op) for row in found):
        for mode in ("graph", "eager"):
            of_op = (row for row in found if (row.kind, row.problem.op) == (kind, op))
            speedups = {row.problem: speedup for row in of_op if (speedup := row.speedup(mode)) is not None}
            if not speedups:
                continue
            worst = min(speedups, key=lambda problem: speedups[problem])
            depths, widths = worst.sizes
            lines.append(
                f"{kind} {op} {mode}: {statistics.geometric_mean(speedups.values()):.2f}x the best of cuBLAS + NCCL "
                f"and PyTorch's (geometric mean of {len(speedups)}); least {speedups[worst]:.2f}x at M={worst.rows}, "
                f"K={depths}, N={widths}"
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
        "rows": [_recorded(row) for row in found],
    }


def _recorded(row: Row) -> dict[str, Any]:
    """A row by what is measured; `k` and `n` are numbers, or text where there are several: `2048+256+256`."""
    each = row.problem
    k, n = (int(size) if size.isdigit() else size for size in each.sizes)
    what = {"op": each.op, "kind": row.kind, "world": each.world, "m": each.rows, "k": k, "n": n, "key": each.key}
    found = {name: value for name, value in asdict(row).items() if name not in ("problem", "kind")}
    return {**what, **found, "bound": row.bound, "wrong": row.wrong, "right": row.right}


def tuning_table(found: Sequence[Row]) -> dict[str, dict[str, dict[str, str]]]:
    """{GPU: {problem: {rows: implementation}}}: `fastest` by the geometric mean of graph and eager time.

    Of those that can run on the call's transport, which is settled before a table is asked. Of these those that are
    slower than cuBLAS + NCCL and in-tree neither in a graph nor eager, where there are any. Calls that have one key
    decide together, as fp8 with tensorwise and with rowwise scales: what cannot run one of them, or is wrong, is none
    of theirs.
    """
    calls: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        calls.setdefault((row.problem.key, str(row.problem.rows)), []).append(row)
    table: dict[str, dict[str, str]] = {}
    for (key, rows_of_a), alike in calls.items():
        able = [
            name for name in IMPLEMENTATIONS
            if all(name in row.timings and name not in row.wrong and row.may_run(name) for row in alike)
        ]  # fmt: skip
        never_slower = [name for name in able if not any(row.slower(name) for row in alike)]
        times = {name: _mean_time(name, alike) for name in never_slower or able}
        if times:
            table.setdefault(key, {})[rows_of_a] = select.fastest(times, ENTRIES[alike[0].problem.op])
    return {torch.cuda.get_device_name(): table}


def _mean_time(variant: str, found: Sequence[Row]) -> float:
    return statistics.geometric_mean(
        time for row in found for time in (row.timings[variant].graph, row.timings[variant].eager)
    )


def write_tuning(found: Sequence[Row]) -> Path:
    """Merge what was measured into the table that the selector reads."""
    path = select.table_path()
    write_whole(path, tables.as_text(tables.merged(select.read_tuned(path), tuning_table(found))).encode())
    return path


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The worker's options.

    Raises:
        SystemExit: one is not valid; the message says what is.
    """
    parser = argparse.ArgumentParser(prog="asynctp bench")
    add_bench_options(parser)
    add_table_options(parser)
    options = parser.parse_args(arguments)
    parser.prog = "asynctp tune" if options.tune else parser.prog
    options.timeout = 1800 if options.timeout is None else options.timeout
    if options.report is None:
        options.kinds, options.ops = options.kinds or ["bf16"], options.ops or list(OPS)
        options.rows = options.rows or ([] if options.shapes else list(ROWS))
    said = mistake(options, end_to_end=False) or (_table_mistake() if options.tune else "")
    if said:
        parser.error(said)
    options.all = options.all or options.tune
    return options


def _table_mistake() -> str:
    """Why nothing can be added to the tuning table; empty when it can."""
    path = select.table_path()
    try:
        select.read_tuned(path)
    except ValueError as error:
        return str(error)
    if can_be_written(str(path), folder=False):
        return ""
    return f"the tuning table {path} cannot be written; name another file in ASYNCTP_TUNING_TABLE"


def command(options: argparse.Namespace) -> str:
    """The command that measures the same again."""
    sizes = {"shapes": options.shapes} if options.shapes else {"rows": options.rows}
    built_in = {**sizes, "ops": options.ops, "kinds": options.kinds}
    kept = {"rounds": [options.rounds], **(built_in if options.report is None else {"report": [options.report]})}
    words = [f"--{name} {','.join(map(str, values))}" for name, values in kept.items()]
    words += [f"--{name}" for name in ("all", "tune") if getattr(options, name)]
    return f"asynctp bench --ranks {dist.get_world_size()} {' '.join(words)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """One process of the benchmark."""
    options = parse(arguments)
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    intree.register_ops()
    run(options, device)
    faulthandler.cancel_dump_traceback_later()
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    return 0


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Measure. The first rank prints each row as it comes, and writes after each what there is so far."""
    found: list[Row] = []
    first = dist.get_rank() == 0
    if first:
        print(HEADER, flush=True)
    for row in rows(options, device):
        found.append(row)
        if first:
            print(line(row), flush=True)
            write(found, options)
    if first:
        print("".join(f"{each}\n" for each in summary(found)), end="", flush=True)
        if options.out is not None:
            draw_calls(record(found, command(options)), options.out / "bench.png")
        if options.tune:
            print(f"wrote {select.table_path()}", flush=True)


def write(found: Sequence[Row], options: argparse.Namespace) -> None:
    """Write `bench.json` and the tuning table, so that what was measured is kept whatever comes after."""
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record(found, command(options)), indent=1)
        write_whole(options.out / "bench.json", f"{text}\n".encode())
    if options.tune:
        write_tuning(found)


if __name__ == "__main__":
    sys.exit(main())
