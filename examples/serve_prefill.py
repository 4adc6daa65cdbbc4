"""Serve a Llama-style model: prefill prompts of changing lengths, then decode, with tensor parallelism.

    torchrun --standalone --nproc-per-node 2 examples/serve_prefill.py                    # a laptop: gloo, no GPU
    torchrun --standalone --nproc-per-node 4 examples/serve_prefill.py --size 70b --max-prompt 4096 --batch 8
    torchrun --standalone --nproc-per-node 2 examples/serve_prefill.py --checkpoint runs/debug/step-00000060

Prompts are pieces of a text, cut at random lengths; a batch is padded to its longest. Prefill is compiled once, with
the length as a dynamic size. A decode step is compiled once too, and on GPUs it is one CUDA graph. After a warm-up, one
compile more is an error. docs/how-to/serve.md says what is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import asynctp_passes
from asynctp_passes.tools.demo.model import PRESETS, ModelSizes, Transformer
from asynctp_passes.tools.demo.recipe import (
    BACKENDS,
    PRECISIONS,
    Place,
    RecipeError,
    compile_options,
    compiler,
    joined,
    load_checkpoint,
    parallelize_with,
    place,
    refuse,
    require,
    require_output,
    require_precision,
)
from asynctp_passes.tools.demo.train import TEXT
from asynctp_passes.tools.progress import Steps
from asynctp_passes.torch_private import inductor_compile

Step = Callable[[Tensor, Tensor, Tensor], Tensor]

#: relative distance (Frobenius norm) that a step's logits may be from those of another compiler: rounding
LIMITS = {"fp32": 1e-4, "bf16": 2e-2, "fp8": 1e-1, "fp8-rowwise": 1e-1}


# --- options -------------------------------------------------------------------------------------------------------
def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, not yet checked against the machine."""
    parser = argparse.ArgumentParser(prog="serve_prefill", description="Prefill and decode with async TP.")
    add = parser.add_argument
    add("--size", choices=PRESETS, default="debug", help="widths of the model (default: %(default)s)")
    add("--blocks", type=int, help="transformer blocks (default: 2; small: 4)")
    add("--checkpoint", type=Path, metavar="FOLDER", help="weights that train_llama.py saved (default: random ones)")
    add("--batch", type=int, default=8, help="prompts at once (default: %(default)s)")
    add("--batches", type=int, default=8, help="batches that are timed (default: %(default)s)")
    add("--min-prompt", type=int, default=16, help="shortest prompt in bytes (default: %(default)s)")
    add("--max-prompt", type=int, default=64, help="longest prompt in bytes (default: %(default)s)")
    add("--decode", type=int, default=16, metavar="N", help="bytes to generate for each prompt (default: %(default)s)")
    add("--precision", choices=PRECISIONS, help="what matmuls compute in (default: bf16, fp32 on the CPU)")
    add("--backend", choices=BACKENDS, default="asynctp", help="compiler (default: %(default)s)")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="to torch.compile, as strict=all")
    add("--cuda-graphs", choices=("decode", "none"), help="what is captured (default: decode on GPUs)")
    add("--data", type=Path, default=TEXT, help="the file that prompts are cut from (default: Newton's Opticks)")
    add(
        "--check", action="store_true", help="compare all logits with plain Inductor's on the same bytes; exit 1 if far"
    )
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--seed", type=int, default=1704, help="of weights and prompts (default: %(default)s)")
    return parser.parse_args(arguments)


def settle(options: argparse.Namespace, ranks: int, gpu: bool) -> ModelSizes:
    """Fill in the defaults, check every value, and return the model's sizes.

    Raises:
        RecipeError: A value is out of range here.
    """
    preset = PRESETS[options.size]
    options.compile_options = compile_options(options.option)
    options.blocks = preset.layers if options.blocks is None else options.blocks
    options.precision = options.precision or ("bf16" if gpu else "fp32")
    options.cuda_graphs = options.cuda_graphs or ("decode" if gpu else "none")
    require(options.blocks >= 1, "blocks", options.blocks, "at least 1")
    require(options.batches >= 1, "batches", options.batches, "at least 1")
    require(options.decode >= 1, "decode", options.decode, "at least 1")
    require(options.min_prompt >= 2, "min-prompt", options.min_prompt, "at least 2")
    require(options.max_prompt >= options.min_prompt, "max-prompt", options.max_prompt, f"at least --min-prompt {options.min_prompt}")  # fmt: skip  # noqa: E501
    require(
        options.batch % ranks == 0 and options.batch > 0, "batch", options.batch,
        f"a multiple of the {ranks} ranks, over which the bytes of a decode step are split",
    )  # fmt: skip
    require_output("json", options.json)
    if not gpu and options.cuda_graphs != "none":
        raise RecipeError("--cuda-graphs decode needs GPUs, and there are none here; leave it out")
    sizes = dataclasses.replace(preset, layers=options.blocks, sequence=options.max_prompt + options.decode)
    try:
        dataclasses.replace(sizes, sequence=ranks).require_divisible(ranks)
        require_precision(options.precision)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return sizes


# --- prompts -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Prompts:
    """A batch: `tokens[batch, longest]`, zeros behind the end of each, and the `lengths[batch]`."""

    tokens: Tensor
    lengths: Tensor


def draw(options: argparse.Namespace, text: Tensor, count: int, device: torch.device) -> list[Prompts]:
    """Batches of prompts, the same on every rank."""
    generator = torch.Generator().manual_seed(options.seed)
    batches = []
    for _ in range(count):
        lengths = torch.randint(options.min_prompt, options.max_prompt + 1, (options.batch,), generator=generator)
        starts = torch.randint(len(text) - options.max_prompt, (options.batch,), generator=generator)
        tokens = torch.zeros(options.batch, int(lengths.max()), dtype=torch.long)
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            tokens[row, :length] = text[start : start + length]
        batches.append(Prompts(tokens.to(device), lengths.to(device)))
    return batches


# --- serving -------------------------------------------------------------------------------------------------------
@dataclass
class Times:
    """Milliseconds of each prefill and of each decode step, and what came out of a batch.

    Attributes:
        answers: The bytes, `[batch, decode]`.
        logits: What they were chosen by, `[batch, decode, vocabulary]`; empty unless they were to be kept.
        tokens: Of all prompts, without what pads them.
    """

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    answers: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    tokens: int = 0


class Clock:
    """Wall time, with the GPU waited for at both ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> float:
        """Milliseconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() * 1e3


def serve(
    prefill: Step,
    decode: Step,
    batches: Iterable[Prompts],
    count: int,
    device: torch.device,
    keep: bool = False,
    forced: Sequence[Tensor] | None = None,
) -> Times:
    """Answer each batch, `count` bytes a prompt. The first byte comes of the prefill.

    Args:
        prefill, decode: The model, for prompts and for one byte more of each.
        batches: The prompts.
        count: Bytes to generate.
        device: Where the model is.
        keep: Keep the logits.
        forced: Go on with these bytes, `[batch, count]` a batch, whatever the likeliest ones are.
    """
    times, clock = Times(), Clock(device)
    for number, prompts in enumerate(batches):
        batch, longest = prompts.tokens.shape
        positions = torch.arange(longest, device=device).expand(batch, longest).contiguous()
        for each in (prompts.tokens, positions):
            torch._dynamo.mark_dynamic(each, 1)  # one compile serves all lengths
        answer: list[Tensor] = []
        kept: list[Tensor] = []
        latest, first = prompts.tokens[:, 0], torch.zeros_like(prompts.lengths)
        for step in range(count):
            places = prompts.lengths + (step - 1)
            start = clock.now()
            if step == 0:
                logits = prefill(prompts.tokens, positions, places)
            else:
                torch.compiler.cudagraph_mark_step_begin()
                logits = decode(latest[:, None], places[:, None], first)
            latest = logits.argmax(-1)
            (times.decode if step else times.prefill).append(clock.now() - start)
            answer.append(latest)
            if keep:
                kept.append(logits.float().cpu())  # a replayed graph overwrites its results
            if forced is not None:
                latest = forced[number][:, step].to(device)
        times.tokens += int(prompts.lengths.sum())
        times.answers.append(torch.stack(answer, 1).cpu())
        times.logits += [torch.stack(kept, 1)] if keep else []
    return times


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the mean; the slowest value bounds p99 of few."""
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "mean": statistics.fmean(values), "count": len(values)}


def load_weights(model: Transformer, folder: Path) -> None:
    """The weights of a checkpoint of train_llama.py, in any number of ranks.

    Raises:
        RecipeError: It does not fit, or is none.
    """
    remedy = "give a folder step-N that train_llama.py wrote, and the --size and --blocks that it was trained with"
    load_checkpoint({"model": model.state_dict()}, folder, "--checkpoint", remedy)


def run(options: argparse.Namespace, sizes: ModelSizes, here: Place) -> dict[str, Any]:
    """Serve, and return everything that was measured. The default group is initialized."""
    ranks, device = here.world, here.device
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))
    dtype = torch.float32 if options.precision == "fp32" else torch.bfloat16
    torch.manual_seed(options.seed)
    with device:
        model = Transformer(sizes).to(dtype).eval()
    parallelize_with(model, mesh, options.precision, dim=0)
    if options.checkpoint is not None:
        load_weights(model, options.checkpoint)
    model.allocate(options.batch, sizes.sequence, ranks)

    group = mesh.get_group().group_name
    prefill, decode = compiled(model, options, group, device)
    text = torch.frombuffer(bytearray(options.data.read_bytes()), dtype=torch.uint8).long()
    steps = Steps("serve_prefill", enabled=here.rank == 0)
    warm, batches = 3, draw(options, text, options.batches + 3, device)
    with torch.no_grad():
        started = time.perf_counter()
        serve(prefill, decode, steps.each("warm up and compile", batches[:warm]), max(options.decode, 4), device)
        compiling = time.perf_counter() - started
        with torch.compiler.set_stance("fail_on_recompile"):
            timed = steps.each("answer and time batches", batches[warm:])
            times = serve(prefill, decode, timed, options.decode, device, keep=options.check)
        again = steps.each("check batches", batches[warm:])
        checked = check(model, again, times, options, group, here) if options.check else None
    steps.end()
    return {
        "options": vars(options),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if here.gpu else "cpu",
        "ranks": ranks,
        "warm_up_seconds": compiling,
        "prefill_ms": percentiles(times.prefill),
        "prefill_tokens_per_s": 1e3 * times.tokens / sum(times.prefill),
        "decode_ms": percentiles(times.decode) if times.decode else None,
        "fused": sum(len(report.fused) for report in asynctp_passes.reports()),
        "missed": sum(len(report.missed) for report in asynctp_passes.reports()),
        "cuda_graph_skips": inductor_compile.cudagraph_skips() if options.cuda_graphs == "decode" else None,
        "check": checked,
        "answers": [bytes(row).decode("latin-1") for row in times.answers[0].tolist()],
    }


def compiled(model: Transformer, options: argparse.Namespace, group: str, device: torch.device) -> tuple[Step, Step]:
    """The model for prompts of any length, and for one byte more, which CUDA graphs may capture.

    torch.compile takes a mode or options: with options, a mode is spelled as what it stands for.
    """
    graphs = {"triton.cudagraphs": True} if options.cuda_graphs == "decode" else {}
    prefill = compiler(options.backend, group, device, options.compile_options, fullgraph=True)
    decode = compiler(
        options.backend, group, device, {**options.compile_options, **graphs}, fullgraph=True, dynamic=False
    )
    return prefill(model.serve), decode(model.serve)


def check(
    model: Transformer, batches: Iterable[Prompts], times: Times, options: argparse.Namespace, group: str, here: Place
) -> dict[str, Any]:
    """The logits of every step against those of plain Inductor (for that: of no compiler), led along the same bytes."""
    steps: tuple[Step, Step] = (model.serve, model.serve)
    if options.backend != "inductor":
        plain = argparse.Namespace(**{**vars(options), "backend": "inductor", "cuda_graphs": "none"})
        steps = compiled(model, plain, group, here.device)
    expected = serve(*steps, batches, options.decode, here.device, keep=True, forced=times.answers)
    distance = max(map(farthest, times.logits, expected.logits), key=worse)
    everywhere: list[Any] = [None] * here.world
    dist.all_gather_object(everywhere, distance)
    differ = sum(int((a != b).sum()) for a, b in zip(times.answers, expected.answers, strict=True))
    return {
        "against": "the model without a compiler" if options.backend == "inductor" else "plain Inductor",
        "distance": max(everywhere, key=worse),
        "limit": LIMITS[options.precision],
        "bytes": sum(each.numel() for each in times.answers),
        "differ": differ,
    }


def farthest(found: Tensor, expected: Tensor) -> float:
    """The largest relative distance of a step's logits `[batch, steps, vocabulary]`; nan where one is."""
    return float(((found - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))).amax())


def worse(distance: float) -> tuple[bool, float]:
    """Orders distances; nan is the largest."""
    return distance != distance, distance


def right(found: dict[str, Any]) -> bool:
    """True if the checked error, if any, is within its limit; nan is not."""
    return found["check"] is None or found["check"]["distance"] <= found["check"]["limit"]


def show(found: dict[str, Any]) -> str:
    """A table of the latencies."""
    lines = [
        f"{found['options']['backend']} on {found['ranks']} x {found['device']}; ms{'':>14}p50       p90       p99"
    ]
    for name, key in (("prefill", "prefill_ms"), ("decode step", "decode_ms")):
        if found[key]:
            cells = "".join(f"{found[key][cut]:10.2f}" for cut in ("p50", "p90", "p99"))
            lines.append(f"  {name:<14}{found[key]['count']:>5} x {cells:>40}")
    lines.append(f"  prefill {found['prefill_tokens_per_s']:,.0f} prompt tokens/s; {found['fused']} collectives fused, "
                 f"{found['missed']} missed; warm-up {found['warm_up_seconds']:.0f} s")  # fmt: skip
    if found["cuda_graph_skips"]:
        lines.append(
            f"  NOT in a CUDA graph: {found['cuda_graph_skips']} compiled graphs; TORCH_LOGS=perf_hints says why"
        )
    if found["check"] is not None:
        lines.append(
            "  logits differ by {distance:.1e} from those of {against} (limit {limit:.0e}); {differ} of {bytes} bytes "
            "do".format(**found["check"])
            + ("" if right(found) else ": WRONG")
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """One process of the server; 0 done, 1 logits are beyond their limit under --check, 2 it could not run."""
    options = parse(arguments)
    try:
        return launch(options)
    except RecipeError as error:
        return refuse("serve_prefill", error)


def launch(options: argparse.Namespace) -> int:
    """Check everything that can be checked before the ranks meet, then serve."""
    here = place("examples/serve_prefill.py", options.size)
    sizes = settle(options, here.world, here.gpu)
    if not options.data.is_file() or options.data.stat().st_size <= options.max_prompt:
        raise RecipeError(f"--data {options.data} is not valid; it must be a file of more than --max-prompt bytes")
    if options.checkpoint is not None and not (options.checkpoint / ".metadata").is_file():
        raise RecipeError(
            f"--checkpoint {options.checkpoint} is not valid; it must be a folder step-N that train_llama.py wrote"
        )
    if here.rank == 0 and options.backend == "intree" and not here.gpu:
        print("note: PyTorch's async TP fuses on GPUs only; here --backend intree is plain Inductor", file=sys.stderr)
    with joined(here):
        found = run(options, sizes, here)
    if here.rank == 0:
        print(show(found))
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    return 0 if right(found) else 1


if __name__ == "__main__":
    sys.exit(main())
