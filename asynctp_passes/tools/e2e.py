"""Side by side on whole transformer blocks: plain torch.compile, PyTorch's in-tree async TP, and asynctp.

Started by `asynctp bench --e2e` with one process a GPU. A problem is a model's width, what its matmuls compute in, a
batch, and how activations are laid out: a few blocks, compiled each, with one input, one target and one set of weights
for all backends. They train for some steps; with replicated activations there are also problems of a forward alone, for
inference, which on GPUs is one CUDA graph of all blocks. A backend with a gradient, or a row of a forward's result,
beyond its limit is shown as WRONG, whatever its speed:

    fp32, bf16   distance from plain compile's; limit: three times what lies between plain compile and no compile at
                 all, which differ by rounding alone
    fp8          distance from that in bf16 without a compiler; limit: 1.1 times plain compile's own distance

Times are medians of CUDA events over rounds in which the backends take turns in random order; the slowest rank counts.
In its turn a backend trains for a second, and the second half is timed: a GPU's clock follows the power that was
drawn before, so that right after another backend it is that one's. A turn of a forward is shorter.
One process measures all problems, each as if it were the only one: what earlier ones made the ranks share is freed.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import functools
import gc
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import asynctp_passes
from asynctp_passes.reporting.files import write_whole
from asynctp_passes.tools.cli import add_bench_options, add_end_to_end_options, mistake, settle_end_to_end, size_mistake
from asynctp_passes.tools.demo.model import PRESETS, Block, block_plan
from asynctp_passes.tools.demo.recipe import (
    BACKENDS,
    Place,
    RecipeError,
    compile_options,
    compiler,
    float8_layers,
    joined,
    peak_memory,
    place,
    refuse,
    release_shared,
    require_precision,
    styles_of,
    traced,
)
from asynctp_passes.tools.plots import draw_steps
from asynctp_passes.tools.progress import Steps

BASE = BACKENDS[0]
#: what is allowed on top of, or instead of, what is measured: rounding of the results alone
FLOOR = {"fp32": 1e-4, "bf16": 2e-2, "fp8": 1e-2, "fp8-rowwise": 1e-2}
#: a difference that is wrong however much rounding there is
WRONG = 0.9
#: how far from bf16 a gradient or a row in fp8 may be, for each part that plain compile's is
NO_WORSE = 1.1
#: runs in a row that are timed, at least
RUNS_A_ROUND = {"step": 3, "forward": 16}
#: of each half of a turn, on GPUs. Source of a step's: `docs/results/2026-11-22-h200x4/sustained.txt`
HALF_TURN_S = {"step": 0.5, "forward": 0.1}
#: until plans have their graphs, and the allocator what steps take
WARM_UP = 4
RESERVE_S = 60.0


Blocks = Sequence[Callable[[Tensor], Tensor]]
#: runs a step, which calls an argument when it begins and after its forward; or a forward, which does not
Program = Callable[..., Tensor]


def nothing() -> None:
    """Mark no time."""


@dataclass(frozen=True)
class Problem:
    """A measured problem: `batch` sequences of `sequence` tokens through `blocks` blocks.

    Attributes:
        parallel: `sp`: activations between the linear layers are sharded over the sequence; `tp`: they are replicated.
        part: `step`: forward and backward; `forward`: that alone, for inference, on GPUs in a CUDA graph.
    """

    size: str
    kind: str
    batch: int
    sequence: int
    blocks: int
    parallel: str = "sp"
    part: str = "step"

    def __str__(self) -> str:
        of_tp = "" if self.parallel == "sp" else f" {self.parallel} {self.part}"
        return f"{self.size} {self.kind} {self.batch}x{self.sequence}{of_tp}"


@dataclass(frozen=True)
class Row:
    """One backend on one problem; milliseconds, slowest rank.

    Attributes:
        step: Forward and backward; None where only a forward runs.
        forward: The forward's part of it, or all of a forward for inference.
        host: Until the host has launched all of it.
        exposed: Communication beside which nothing computes, in a traced step of the first rank; None on the CPU, and
            of a forward for inference.
        peak_bytes: The most that was allocated during a step, symmetric memory included; None as `exposed` is.
        loss: Of the first run, over all ranks.
        tensor: Name of the gradient, or row of a forward's result, that comes nearest to its limit, or goes furthest
            beyond it.
        difference: Its relative difference from plain compile's; in fp8, from that in bf16 without a compiler.
        limit: What `difference` may be; beyond it the backend is wrong.
        fused: Chains that asynctp fused and missed in the compiled graphs; None for other backends.
        compile_s: Seconds until the first run was done.
    """

    problem: Problem
    backend: str
    world: int
    step: float | None
    forward: float
    host: float
    exposed: float | None
    peak_bytes: int | None
    loss: float
    tensor: str
    difference: float
    limit: float
    fused: tuple[int, int] | None
    compile_s: float

    @property
    def right(self) -> bool:
        """False when its gradients, or rows, differ by more than rounding; nan is wrong."""
        return self.difference <= self.limit


@dataclass
class Found:
    """All that a run came to: what was measured, what raised, and what there was no time for, or no package."""

    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


# --- one problem ----------------------------------------------------------------------------------------------------
class Bench:
    """The blocks of one problem with its data, and what each backend makes of them."""

    def __init__(self, problem: Problem, here: Place, mesh: DeviceMesh, options: dict[str, Any]) -> None:
        self.problem, self.here, self.mesh, self.options = problem, here, mesh, options
        self.steps = Steps(str(problem), enabled=here.rank == 0)
        torch.manual_seed(0)
        self.blocks = [self._block() for _ in range(problem.blocks)]
        self.x, self.target = self._activation(1), self._activation(2)

    def _block(self) -> Block:
        sizes = dataclasses.replace(PRESETS[self.problem.size], sequence=self.problem.sequence)
        with self.here.device:
            block = Block(sizes)
        for name, parameter in block.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.02)
        block.to(self.dtype)
        float8_layers(block, self.problem.kind)
        plan = block_plan(1 if self.problem.parallel == "sp" else None, styles_of(self.problem.kind))
        parallelize_module(block, self.mesh, plan)
        return block

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return torch.float32 if self.problem.kind == "fp32" else torch.bfloat16

    @property
    def fp8(self) -> bool:
        """Matmuls compute in float8."""
        return self.problem.kind.startswith("fp8")

    def _activation(self, seed: int) -> Tensor:
        """This rank's part of the sequence; all of it where activations are replicated."""
        sizes = PRESETS[self.problem.size]
        generator = torch.Generator(self.here.device).manual_seed(seed)
        shape = (self.problem.batch, self.problem.sequence, sizes.width)
        whole = torch.randn(shape, device=self.here.device, generator=generator).to(self.dtype)
        if self.problem.parallel == "tp":
            return whole
        return whole.chunk(self.here.world, dim=1)[self.here.rank].contiguous()

    def step(self, blocks: Blocks, mark: Callable[[], Any] = nothing) -> Tensor:
        """Forward and backward; the loss on this rank. `mark` is called before them, and between."""
        mark()
        for module in self.blocks:
            module.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # with CUDA graphs
        self.input = self.x.clone().requires_grad_(True)
        y = self.input
        for index, block in enumerate(blocks):
            with torch.profiler.record_function(f"block {index}"):
                y = block(y)
        loss = self._loss(y)
        mark()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _loss(self, y: Tensor) -> Tensor:
        return (y - self.target).float().square().mean()

    def forward(self, blocks: Blocks, x: Tensor, mark: Callable[[], Any] = nothing) -> Tensor:
        """The result of all blocks, for inference. It has no parts, so `mark` is not called."""
        with torch.no_grad():
            return functools.reduce(lambda y, block: block(y), blocks, x)

    def program(self, blocks: Blocks, graph: bool) -> Program:
        """The program that runs some blocks. A forward may become a CUDA graph."""
        if self.problem.part == "step":
            return functools.partial(self.step, blocks)
        return self._graph(blocks) if graph else functools.partial(self.forward, blocks, self.x)

    def _graph(self, blocks: Blocks) -> Program:
        """The forward as a CUDA graph. Until it is captured, other data are computed on: nothing old is right."""
        x = self.target.clone()
        for _ in range(WARM_UP):
            self.forward(blocks, x)
        graph = torch.cuda.CUDAGraph()
        _meet(self.here)
        with torch.cuda.graph(graph):
            y = self.forward(blocks, x)
        _meet(self.here)
        x.copy_(self.x)
        y.fill_(math.nan)
        return functools.partial(_replay, graph, x, y)

    def outcome(self, program: Program) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss on this rank in one run, and all that is compared, by name."""
        found = program()
        if self.problem.part == "step":
            return found, self.gradients()
        rows = found.clone().flatten(0, 1).unbind()
        return self._loss(found), {f"row {number}": row for number, row in enumerate(rows)}

    def plain_outcome(self) -> dict[str, Tensor]:
        """All that is compared, without a compiler."""
        return self.outcome(self.program(self.blocks, graph=False))[1]

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the last step's gradients, this rank's parts: of the input and of every weight, by name."""
        leaves = {"input": self.input}
        for index, block in enumerate(self.blocks):
            leaves.update((f"{index}.{name}", parameter) for name, parameter in block.named_parameters())
        found = {}
        for name, leaf in leaves.items():
            assert leaf.grad is not None, f"no gradient for {name}"
            found[name] = (leaf.grad.to_local() if isinstance(leaf.grad, DTensor) else leaf.grad).clone()
        return found

    @property
    def traced(self) -> bool:
        """One run is traced, and its memory counted: on GPUs, of a step."""
        return self.here.gpu and self.problem.part == "step"

    def compiled(self, backend: str) -> list[Callable[[Tensor], Tensor]]:
        """The blocks as this backend compiles them, all with the same weights. A miss is counted, not raised."""
        group, options = self.mesh.get_group().group_name, {"strict": "off", **self.options}
        if self.problem.part == "forward":
            options["triton.cudagraphs"] = False  # one graph of all blocks is captured around theirs
        compile_one = compiler(backend, group, self.here.device, options, dynamic=False, fullgraph=True)
        return [compile_one(block) for block in self.blocks]


def _replay(graph: torch.cuda.CUDAGraph, x: Tensor, y: Tensor, mark: Callable[[], Any] = nothing) -> Tensor:
    """Compute `y` again. The graph reads `x`, which must live as long."""
    graph.replay()
    return y


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor], here: Place) -> dict[str, float]:
    """Relative distance (Frobenius norm) of each pair, the largest over all ranks; nan where one is not a number."""
    assert list(actual) == list(expected)
    pairs = ((actual[name].float(), expected[name].float()) for name in expected)
    values = torch.stack([((a - b).norm() / b.norm().clamp_min(1e-20)).double() for a, b in pairs])
    return dict(zip(expected, largest(values, here), strict=True))


def slowest(value: float, here: Place) -> float:
    """The largest of the ranks' values; nan when one is."""
    return largest(torch.tensor([value], device=here.device, dtype=torch.float64), here)[0]


def largest(values: Tensor, here: Place) -> list[float]:
    """The largest of the ranks' values, element by element; nan where one is."""
    found = [torch.empty_like(values) for _ in range(here.world)]
    dist.all_gather(found, values)
    return [float(each) for each in torch.stack(found).amax(0)]  # amax keeps nan


def limits(rounding: dict[str, float], floor: float) -> dict[str, float]:
    """The limit of each tensor's difference: three times what rounding alone moves it, but at least `floor`.

    Never so much that one of zeros, which differs by 1, would pass.
    """
    return {name: min(max(3 * value, floor), WRONG) for name, value in rounding.items()}


def limits_in_fp8(base: dict[str, float], floor: float) -> dict[str, float]:
    """How far from bf16 each tensor may be, given how far plain compile's is in fp8: hardly further."""
    return {name: min(NO_WORSE * value + floor, WRONG) for name, value in base.items()}


def nearest_to_its_limit(found: dict[str, float], allowed: dict[str, float]) -> tuple[str, float, float]:
    """The tensor with the largest difference for its limit: name, difference and limit. nan is the largest."""
    ratios = {name: value / allowed[name] for name, value in found.items()}
    name = max(ratios, key=lambda name: (ratios[name] != ratios[name], ratios[name]))
    return name, found[name], allowed[name]


@dataclass
class Prepared:
    """A backend that is compiled and checked, and not timed yet."""

    program: Program
    loss: float
    differences: dict[str, float]
    fused: tuple[int, int] | None
    compile_s: float
    runs: int
    times: list[tuple[float, float]] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)


def prepare(bench: Bench, backend: str, expected: dict[str, Tensor] | None) -> tuple[Prepared, dict[str, Tensor]]:
    """Compile by a first run, and compare what it gives with `expected` (none for the first backend)."""
    here, start = bench.here, time.perf_counter()
    asynctp_passes.clear_reports()
    program = bench.program(bench.compiled(backend), graph=here.gpu)
    loss, found = bench.outcome(program)
    dist.all_reduce(loss)
    reports = asynctp_passes.reports()
    fused = (sum(len(each.fused) for each in reports), sum(len(each.missed) for each in reports))
    ready = Prepared(
        program,
        float(loss) / here.world,
        differences(found, found if expected is None else expected, here),
        fused if backend == "asynctp" else None,
        slowest(time.perf_counter() - start, here),
        RUNS_A_ROUND[bench.problem.part],
    )
    return ready, found


def measure(bench: Bench, prepared: dict[str, Prepared], rounds: int) -> None:
    """Time all backends in turns, into their `times` and `hosts`."""
    bench.steps.begin("warm up")
    half_turn = HALF_TURN_S[bench.problem.part] * 1e3
    for ready in prepared.values():
        for _ in range(WARM_UP):
            ready.program()
        if bench.here.gpu:
            ready.runs = max(ready.runs, math.ceil(half_turn / slowest(_time(bench.here, ready)[0], bench.here)))
    for number in bench.steps.each("time all backends", range(rounds)):
        order = list(prepared)
        random.Random(number).shuffle(order)
        for backend in order:
            ready = prepared[backend]
            ready.times.append(_time(bench.here, ready))
            ready.hosts.append(_host_time(bench.here, ready.program))


def _meet(here: Place) -> None:
    if here.gpu:
        torch.cuda.synchronize()
    dist.barrier()
    if here.gpu:
        torch.cuda.synchronize()


def _time(here: Place, ready: Prepared) -> tuple[float, float]:
    """Milliseconds of a run and of its forward: the means of some runs, back to back, after as many more."""
    marks: list[Any] = []

    def mark() -> None:
        if here.gpu:
            marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            marks[-1].record()
        else:
            marks.append(time.perf_counter() * 1e3)

    for _ in range(ready.runs):  # another backend's have left the allocator in another state, and the clock
        ready.program()
    _meet(here)
    mark()
    for _ in range(ready.runs):
        ready.program(mark)
    mark()
    _meet(here)

    def between(a: Any, b: Any) -> float:
        return float(a.elapsed_time(b) if here.gpu else b - a)

    whole, within = between(marks[0], marks[-1]), marks[1:-1]
    forward = sum(map(between, within[::2], within[1::2])) if within else whole
    return whole / ready.runs, forward / ready.runs


def _host_time(here: Place, program: Program) -> float:
    """Milliseconds until the host has launched one run, while the GPU is not waited for."""
    _meet(here)
    start = time.perf_counter()
    program()
    elapsed = (time.perf_counter() - start) * 1e3
    _meet(here)
    return elapsed


def peak_bytes(bench: Bench, backend: str, program: Program, held: int) -> int | None:
    """The most that is allocated during a step, without the `held` bytes of the benchmark itself."""
    if not bench.traced:
        return None
    measured = (bench.here.device, backend, bench.mesh.get_group())
    torch.cuda.synchronize()
    peak_memory(*measured)
    program()
    torch.cuda.synchronize()
    return int(slowest(peak_memory(*measured) - held, bench.here))


def exposed(bench: Bench, program: Program, path: Path) -> float | None:
    """Milliseconds of exposed communication in one step, traced into `path` by the first rank."""
    here = bench.here
    if not bench.traced:
        return None
    _meet(here)
    value = 0.0
    if here.rank == 0:
        value = traced(program, path, here.device)[1].exposed / 1e3
    else:
        program()
    _meet(here)
    return slowest(value, here)


# --- all problems ---------------------------------------------------------------------------------------------------
class Budget:
    """Time that is left, by the slowest rank's clock, so that all ranks decide alike."""

    def __init__(self, seconds: float, here: Place) -> None:
        self.end, self.here, self.longest = time.monotonic() + seconds, here, 0.0

    def allows(self) -> bool:
        """True while something as long as the longest so far still fits."""
        return slowest(time.monotonic() + self.longest - self.end, self.here) < 0

    def spent(self, seconds: float) -> None:
        """Something took so long."""
        self.longest = max(self.longest, slowest(seconds, self.here))


def rows(options: argparse.Namespace, here: Place, found: Found) -> Iterator[Row]:
    """Measure every problem while there is time; what is not measured is named in `found.left_out`."""
    mesh = init_device_mesh(here.device.type, (here.world,), mesh_dim_names=("tp",))
    budget = Budget(options.timeout, here)
    for problem in problems(options):
        try:
            require_precision(problem.kind)
        except RecipeError as error:
            found.left_out.append(f"{problem}: {error}")
            continue
        if budget.allows():
            start_anew(here, mesh)
            yield from _rows_of(problem, options, here, mesh, budget, found)
        else:
            found.left_out.append(f"{problem}: no time left of --timeout {options.timeout}")


def start_anew(here: Place, mesh: DeviceMesh) -> None:
    """Forget what was compiled before, and free what it made the ranks share, which would count in the next peak.

    Every rank calls it between two problems, when it has dropped all that is compiled. The memory goes after a
    barrier, when no GPU has work left: a rank may still have read its peers'.
    """
    torch.compiler.reset()
    _meet(here)
    release_shared(mesh.get_group())
    gc.collect()
    if here.gpu:
        torch.cuda.empty_cache()


def _rows_of(
    problem: Problem, options: argparse.Namespace, here: Place, mesh: DeviceMesh, budget: Budget, found: Found
) -> Iterator[Row]:
    bench = Bench(problem, here, mesh, compile_options(options.option))
    prepared: dict[str, Prepared] = {}
    expected: dict[str, Tensor] | None = None
    if bench.fp8:
        bench.steps.begin("compute in bf16 without a compiler")
        try:
            expected = in_bf16(bench)
        except Exception as error:  # on every rank: they run the same program
            found.failed.append(f"{problem} in bf16 without a compiler: {_said(error)}")
            return
    for backend in bench.steps.each("compile and compare backends", options.backends):
        if prepared and not budget.allows():
            found.left_out.append(f"{problem} {backend}: no time left of --timeout {options.timeout}")
            continue
        try:
            prepared[backend], outcome = prepare(bench, backend, expected)
        except Exception as error:  # on every rank, too
            found.failed.append(f"{problem} {backend}: {_said(error)}")
            if not prepared:
                return
            continue
        expected = outcome if expected is None else expected
        del outcome
        budget.spent(prepared[backend].compile_s)
    assert expected is not None
    allowed = _allowed(bench, prepared[BASE], expected, found)
    measure(bench, prepared, options.rounds)
    held = sum(each.numel() * each.element_size() for each in expected.values())
    with tempfile.TemporaryDirectory() as scratch:
        traces = scratch if options.out is None else options.out / "traces"
        ready_ones = prepared.items()
        for backend, ready in bench.steps.each("trace and count memory", ready_ones) if bench.traced else ready_ones:
            tensor, difference, limit = nearest_to_its_limit(ready.differences, allowed)
            step = slowest(statistics.median(step for step, _ in ready.times), here)
            path = Path(traces, f"{str(problem).replace(' ', '-')}-{backend}.json")
            yield Row(
                problem=problem,
                backend=backend,
                world=here.world,
                step=step if problem.part == "step" else None,
                forward=slowest(statistics.median(forward for _, forward in ready.times), here),
                host=slowest(statistics.median(ready.hosts), here),
                exposed=exposed(bench, ready.program, path),
                peak_bytes=peak_bytes(bench, backend, ready.program, held),
                loss=ready.loss,
                tensor=tensor,
                difference=difference,
                limit=limit,
                fused=ready.fused,
                compile_s=ready.compile_s,
            )


def in_bf16(bench: Bench) -> dict[str, Tensor]:
    """All that is compared, of the same weights, input and target in bf16, without a compiler."""
    return Bench(dataclasses.replace(bench.problem, kind="bf16"), bench.here, bench.mesh, {}).plain_outcome()


def _allowed(bench: Bench, base: Prepared, expected: dict[str, Tensor], found: Found) -> dict[str, float]:
    """How far each tensor may be from the `expected` one."""
    floor = FLOOR[bench.problem.kind]
    if bench.fp8:
        return limits_in_fp8(base.differences, floor)
    bench.steps.begin("compute without a compiler")
    try:
        plain = bench.plain_outcome()
    except Exception as error:
        found.left_out.append(f"{bench.problem} without a compiler ({_said(error)}): results may differ by {floor}")
        return limits(dict.fromkeys(expected, 0.0), floor)
    return limits(differences(plain, expected, bench.here), floor)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def problems(options: argparse.Namespace) -> list[Problem]:
    """Everything asked for. Forwards are the quickest, and come first."""
    forwards = [("tp", "forward", f"1x{rows}") for rows in options.rows or ()]
    steps = [(parallel, "step", batch) for parallel in options.parallel for batch in options.batches]
    asked = itertools.product([*forwards, *steps], options.kinds, options.sizes)
    return [
        Problem(size, kind, int(batch), int(sequence), options.blocks, parallel, part)
        for (parallel, part, text), kind, size in asked
        for batch, sequence in [text.split("x")]
    ]


# --- what comes out -------------------------------------------------------------------------------------------------
HEADER = (
    f"{'model':6} {'operands':11} {'batch':8} {'runs':10} {'backend':9} {'step':>9} {'':>6} {'forward':>9} {'':>6} "
    f"{'exposed':>8} {'host':>7} {'peak':>6} {'loss':>9} {'differs':>9} {'fused':>7}\n"
    "(milliseconds and times as fast as plain compile; exposed communication; GiB; relative difference of gradients,\n"
    "or of a forward's rows: from plain compile's; in fp8, from those in bf16 without a compiler)"
)


def line(row: Row, base: Row) -> str:
    """One line of the table, against plain compile on the same problem."""
    each = row.problem
    fused = "" if row.fused is None else f"{row.fused[0]} of {sum(row.fused)}"
    traced = "" if row.exposed is None else f"{row.exposed:.2f}"
    peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}"
    wrong = "" if row.right else f"  WRONG: {row.tensor} may differ by {row.limit:.1e}"
    step = "" if row.step is None or base.step is None else f"{row.step:9.3f} {base.step / row.step:5.2f}x"
    return (
        f"{each.size:6} {each.kind:11} {f'{each.batch}x{each.sequence}':8} {f'{each.parallel} {each.part}':10} "
        f"{row.backend:9} {step:16} {row.forward:9.3f} {base.forward / row.forward:5.2f}x {traced:>8} "
        f"{row.host:7.2f} {peak:>6} {row.loss:9.5f} {row.difference:9.1e} {fused:>7}{wrong}"
    ).rstrip()


def record(found: Found, here: Place, command: str) -> dict[str, Any]:
    """Everything, as JSON."""
    name = torch.cuda.get_device_properties(here.device).name if here.gpu else "CPU (gloo)"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{here.world} x {name}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "command": command,
        "rows": [{**asdict(row), "right": row.right} for row in found.rows],
        "failed": found.failed,
        "left_out": found.left_out,
    }


# --- options and the process ----------------------------------------------------------------------------------------
def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The worker's options, with the defaults of the machine.

    Raises:
        RecipeError: One is not valid; the message says what is.
    """
    parser = argparse.ArgumentParser(prog="asynctp bench --e2e")
    add_bench_options(parser)
    add_end_to_end_options(parser)
    options = parser.parse_args(arguments)
    settle_end_to_end(options, torch.cuda.is_available())
    _refuse(mistake(options, end_to_end=True))
    return options


def _refuse(said: str) -> None:
    if said:
        raise RecipeError(said)


def check_sizes(options: argparse.Namespace, world: int) -> None:
    """Check that every problem splits evenly over the ranks.

    Raises:
        RecipeError: One does not.
    """
    _refuse(size_mistake(options, world))


def command(options: argparse.Namespace, world: int) -> str:
    """The command that measures the same again."""
    words = [f"--ranks {world}"] + ([] if torch.cuda.is_available() else ["--cpu"])
    names = ("sizes", "kinds", "batches", "parallel", "backends")
    words += [f"--{name} {','.join(getattr(options, name))}" for name in names]
    words += [f"--rows {','.join(map(str, options.rows))}"] if options.rows else []
    words += [f"--blocks {options.blocks} --rounds {options.rounds}", *(f"--option {each}" for each in options.option)]
    return f"asynctp bench --e2e {' '.join(words)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """One process of the benchmark: 0 done, 2 it could not run."""
    try:
        options = parse(arguments)
        here = place("-m asynctp_passes.tools.e2e")
        check_sizes(options, here.world)
    except RecipeError as error:
        return refuse("asynctp: bench", error)
    faulthandler.dump_traceback_later(options.timeout + RESERVE_S, exit=True)
    with joined(here):
        run(options, here)
    faulthandler.cancel_dump_traceback_later()
    return 0


def run(options: argparse.Namespace, here: Place) -> Found:
    """Measure, print each row as it comes, and write after each what there is so far."""
    found, first = Found(), here.rank == 0
    if first:
        print(HEADER, flush=True)
        if not here.gpu and "intree" in options.backends:
            print("note: PyTorch's async TP fuses on GPUs only; here intree is plain Inductor", flush=True)
    for row in rows(options, here, found):
        found.rows.append(row)
        if first:
            print(line(row, next(each for each in found.rows if each.problem == row.problem)), flush=True)
            write(found, options, here)
    if first:
        for what, lines in (("failed", found.failed), ("left out", found.left_out)):
            print("".join(f"{what}: {each}\n" for each in lines), end="", flush=True)
        write(found, options, here)
        if options.out is not None:
            draw_steps(record(found, here, command(options, here.world)), options.out / "e2e.png")
    return found


def write(found: Found, options: argparse.Namespace, here: Place) -> None:
    """Write `e2e.json`, so that what was measured is kept whatever comes after."""
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record(found, here, command(options, here.world)), indent=1)
    write_whole(options.out / "e2e.json", f"{text}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
