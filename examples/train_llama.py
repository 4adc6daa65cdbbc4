"""Train a Llama-style model on text, with tensor and sequence parallelism (TP), or FSDP2 and TP.

    torchrun --standalone --nproc-per-node 2 examples/train_llama.py                     # a laptop: gloo, no GPU
    torchrun --standalone --nproc-per-node 4 examples/train_llama.py --size 70b --steps 20 --precision fp8-rowwise
    torchrun --standalone --nproc-per-node 4 examples/train_llama.py --dp 2 --tp 2 --size 8b --ac full

The vocabulary is the 256 bytes, so any text file will do and no tokenizer is needed. `8b` and `70b` are Llama 3's
widths with two blocks (`--blocks`). The text by default is the opening of Newton's Opticks, which comes with the
package (64 KB); another: `--data FILE`, or `--data FOLDER` for all text files in it, such as Python's own library.
docs/how-to/train.md says what is measured, logged and saved.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import asynctp_passes
from asynctp_passes.tools.demo.model import PRESETS, ModelSizes, Transformer
from asynctp_passes.tools.demo.recipe import (
    BACKENDS,
    PRECISIONS,
    RECOMPUTE,
    Place,
    RecipeError,
    compile_blocks,
    compile_options,
    compiler,
    joined,
    load_checkpoint,
    parallelize_with,
    peak_memory,
    place,
    refuse,
    require,
    require_output,
    require_precision,
    traced,
)
from asynctp_passes.tools.demo.train import TEXT, Batches, Progress

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
#: with more, the loss of the 32 blocks of `8b` rises
LEARNING_RATES = {"debug": 3e-3, "small": 3e-4, "8b": 3e-5, "70b": 3e-5}


# --- options -------------------------------------------------------------------------------------------------------
def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, not yet checked against the machine."""
    parser = argparse.ArgumentParser(prog="train_llama", description="Train a Llama-style model with async TP.")
    add = parser.add_argument
    add("--size", choices=PRESETS, default="debug", help="widths of the model (default: %(default)s)")
    add("--blocks", type=int, help="transformer blocks (default: 2; small: 4)")
    add("--sequence", type=int, help="bytes in a sequence (default: debug 128, small 512, others 8192)")
    add("--batch", type=int, help="sequences a step of each data-parallel rank (default: debug and small 8, others 1)")
    add("--steps", type=int, default=60, help="train until this step (default: %(default)s)")
    add("--learning-rate", type=float, help="of AdamW, after 10 steps of warm-up (default: 3e-3 to 3e-5, by size)")
    add("--seed", type=int, default=1704, help="of weights and data (default: %(default)s)")
    add("--precision", choices=PRECISIONS, help="what matmuls compute in (default: bf16, fp32 on the CPU)")
    add("--ac", choices=RECOMPUTE, default="none", help="what the backward computes again (default: %(default)s)")
    add("--backend", choices=BACKENDS, default="asynctp", help="compiler (default: %(default)s)")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="to torch.compile, as strict=all")
    add("--dp", type=int, default=1, help="data-parallel ranks, which shard the weights (default: %(default)s)")
    add("--tp", type=int, help="tensor-parallel ranks (default: all ranks / dp)")
    add("--data", type=Path, help="a text file, or a folder of them (default: Newton's Opticks)")
    add("--checkpoint-dir", type=Path, help="save the last step here, in a folder step-N")
    add("--checkpoint-every", type=int, default=0, metavar="N", help="save every N steps too")
    add("--resume", action="store_true", help="go on from the newest checkpoint of --checkpoint-dir")
    add("--loss-log", type=Path, metavar="FILE.jsonl", help="append one JSON object for each logged step")
    add("--log-every", type=int, default=1, metavar="N", help="log each Nth step (default: %(default)s)")
    add("--tensorboard", type=Path, metavar="FOLDER", help="write loss and speed for TensorBoard")
    add("--profile", type=Path, metavar="FOLDER", help="trace the step --profile-step, and log exposed communication")
    add("--profile-step", type=int, default=10, metavar="N", help="(default: %(default)s)")
    return parser.parse_args(arguments)


def settle(options: argparse.Namespace, world: int, gpu: bool) -> ModelSizes:
    """Fill in the defaults, check every value, and return the model's sizes.

    Raises:
        RecipeError: A value is out of range here.
    """
    preset = PRESETS[options.size]
    large = options.size in ("8b", "70b")
    defaults = {
        "blocks": preset.layers, "sequence": preset.sequence, "batch": 1 if large else 8,
        "learning_rate": LEARNING_RATES[options.size], "precision": "bf16" if gpu else "fp32",
    }  # fmt: skip
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name, least in {"blocks": 1, "sequence": 2, "batch": 1, "steps": 1, "dp": 1, "checkpoint_every": 0,
                        "log_every": 1, "profile_step": 2}.items():  # fmt: skip
        value = getattr(options, name)
        require(value >= least, name.replace("_", "-"), value, f"at least {least}")
    require(options.learning_rate > 0, "learning-rate", options.learning_rate, "greater than 0")
    require(world % options.dp == 0, "dp", options.dp, f"a divisor of the {world} processes that torchrun started")
    options.tp = world // options.dp if options.tp is None else options.tp
    require(
        options.dp * options.tp == world, "tp", options.tp,
        f"{world // options.dp} with --dp {options.dp}: dp times tp is the number of processes, {world}",
    )  # fmt: skip
    if options.profile is not None:
        require(options.profile_step <= options.steps, "profile-step", options.profile_step, f"at most --steps {options.steps}")  # fmt: skip  # noqa: E501
        if not gpu:
            raise RecipeError("--profile measures what GPUs do, and there are none here; leave it out")
    if (options.resume or options.checkpoint_every) and options.checkpoint_dir is None:
        raise RecipeError("--resume and --checkpoint-every need --checkpoint-dir FOLDER; add it")
    require_output("loss-log", options.loss_log)
    for name in ("checkpoint-dir", "tensorboard", "profile"):
        require_output(name, getattr(options, name.replace("-", "_")), folder=True)
    options.compile_options = compile_options(options.option)
    sizes = dataclasses.replace(preset, layers=options.blocks, sequence=options.sequence)
    try:
        sizes.require_divisible(options.tp)
        require_precision(options.precision)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return sizes


# --- data ----------------------------------------------------------------------------------------------------------
def read_text(path: Path, least: int) -> Tensor:
    """The bytes of a file, or of all text files of a folder, in order of their names.

    Raises:
        RecipeError: There is nothing, or too little.
    """
    if not path.exists():
        raise RecipeError(f"--data {path} is not there; give a text file or a folder")
    try:
        files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in TEXT_SUFFIXES)
        data = b"".join(each.read_bytes() for each in files)
    except OSError as error:
        raise RecipeError(f"--data {path} cannot be read ({error}); give a text file or a folder") from error
    if len(data) < least:
        raise RecipeError(
            f"--data {path} has {len(data)} bytes of text ({', '.join(TEXT_SUFFIXES)}); a sequence needs at least "
            f"{least}; give more text, or a smaller --sequence"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# --- model ---------------------------------------------------------------------------------------------------------
def build(options: argparse.Namespace, sizes: ModelSizes, mesh: DeviceMesh, device: torch.device) -> Transformer:
    """float8 → TP → compile each block (and recompute it) → FSDP2, which keeps fp32 weights and gathers `precision`."""
    torch.manual_seed(options.seed)
    with device:
        model = Transformer(sizes)
    parallelize_with(model, mesh["tp"], options.precision)
    group = mesh["tp"].get_group().group_name
    compile_one = compiler(options.backend, group, device, options.compile_options, dynamic=False, fullgraph=True)
    compile_blocks(model, compile_one, options.ac)
    half = {} if options.precision == "fp32" else {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(**half)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    return model


class Trainer:
    """Model, optimizer and data; one step at a time. It is what a checkpoint holds."""

    def __init__(
        self, options: argparse.Namespace, sizes: ModelSizes, mesh: DeviceMesh, text: Tensor, device: torch.device
    ) -> None:
        self.options, self.mesh, self.sizes, self.device = options, mesh, sizes, device
        self.model = build(options, sizes, mesh, self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), fused=self.device.type == "cuda"
        )
        dp_rank = mesh["dp"].get_local_rank()
        self.batches = Batches(text, sizes.sequence, options.batch, options.dp, dp_rank, options.seed)
        self.text_digest = hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16]
        self.step = 0

    def train(self) -> tuple[Tensor, Tensor]:
        """One step: the loss over all ranks' batches, and the gradient's norm."""
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * min(1.0, self.step / 10)
        tokens, targets = self.batches.draw(self.device)
        with loss_parallel():
            logits = self.model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = whole(loss.detach())
        if self.options.dp > 1:
            dist.all_reduce(loss, op=dist.ReduceOp.SUM, group=self.mesh["dp"].get_group())
            loss /= self.options.dp
        return loss, whole(norm)

    # --- checkpoints ---
    def facts(self) -> dict[str, Any]:
        """The facts that a run must share with the checkpoint that it goes on from."""
        names = ("size", "blocks", "sequence", "seed", "learning_rate")
        batch = {"batch times dp": self.options.batch * self.options.dp, "text": self.text_digest}
        return {**{name: getattr(self.options, name) for name in names}, **batch}

    def save(self) -> Path:
        """Write everything that the next step depends on: weights, optimizer, data position, random states, step."""
        path = self.options.checkpoint_dir / f"step-{self.step:08}"
        if dist.get_rank() == 0:  # of an earlier run: until this one is complete, there is none of this step
            (path / ".metadata").unlink(missing_ok=True)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save(
            {"model": model, "optimizer": optimizer, "train": self._position(), "facts": self.facts()},
            checkpoint_id=path,
        )
        return Path(path)

    def _position(self) -> dict[str, Any]:
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state()
        return {"step": self.step, "data": self.batches.generator.get_state(), f"random {dist.get_rank()}": random}

    def resume(self) -> Path:
        """Go on from the newest checkpoint.

        Raises:
            RecipeError: There is none, it is damaged, or it is of another run.
        """
        path = newest(self.options.checkpoint_dir)
        facts = dict.fromkeys(self.facts())
        remedy = "remove it to go on from the one before, or leave --resume out"
        load_checkpoint({"facts": facts}, path, "--resume", remedy)
        require_same(self.facts(), facts, path)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        position = self._position()
        known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        random = f"random {dist.get_rank()}"
        if not any(key.startswith(f"train.{random}.") for key in known):
            del position[random]  # it was written by fewer ranks
        state = {"model": model, "optimizer": optimizer, "train": position}
        load_checkpoint(state, path, "--resume", remedy)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.step = position["step"]
        self.batches.generator.set_state(position["data"])
        if random in position:
            torch.set_rng_state(position[random]["cpu"])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(position[random]["cuda"])
        return path


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def require_same(mine: dict[str, Any], theirs: dict[str, Any], path: Path) -> None:
    """Check that a checkpoint is of a run with the same data and model."""
    for name, value in mine.items():
        if theirs[name] != value:
            raise RecipeError(
                f"--resume: {name} is {value} and was {theirs[name]} in {path}; give what the checkpoint has, or "
                "another --checkpoint-dir"
            )


def newest(folder: Path) -> Path:
    """The checkpoint of the highest step that is complete (its metadata is written last)."""
    found = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    if not found:
        raise RecipeError(f"--resume: no checkpoint in {folder}; leave --resume out, or give another --checkpoint-dir")
    return found[-1]


# --- what is logged ------------------------------------------------------------------------------------------------
class Log:
    """JSON lines and TensorBoard, on the first rank."""

    def __init__(self, options: argparse.Namespace, first: bool) -> None:
        self.file = self.board = None
        if not first:
            return
        if options.tensorboard is not None:
            self.board = tensorboard_writer(options.tensorboard)
        if options.loss_log is not None:
            options.loss_log.parent.mkdir(parents=True, exist_ok=True)
            self.file = options.loss_log.open("a", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        """One line; numbers of a step go to TensorBoard too."""
        if self.file is not None:
            print(json.dumps({"event": event, **values}, default=str), file=self.file, flush=True)
        if self.board is not None and event in ("step", "profile"):
            for name, value in values.items():
                if name != "step" and isinstance(value, int | float):
                    self.board.add_scalar(name, value, values["step"])

    def close(self) -> None:
        for sink in (self.file, self.board):
            if sink is not None:
                sink.close()


def tensorboard_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RecipeError(f"--tensorboard needs the tensorboard package ({error}); pip install tensorboard") from error
    return SummaryWriter(str(folder))


# --- the run -------------------------------------------------------------------------------------------------------
def run(options: argparse.Namespace, sizes: ModelSizes, text: Tensor, log: Log, here: Place) -> None:
    """Train until `--steps`. The default group is initialized."""
    first = here.rank == 0
    mesh = init_device_mesh(here.device.type, (options.dp, options.tp), mesh_dim_names=("dp", "tp"))
    trainer = Trainer(options, sizes, mesh, text, here.device)
    if options.resume:
        path = trainer.resume()
        if first:
            print(f"resumed {path} at step {trainer.step}", flush=True)
        require(options.steps > trainer.step, "steps", options.steps, f"more than the checkpoint's {trainer.step}")
    log.write(
        "start",
        date=time.strftime("%Y-%m-%d"),
        options=vars(options),
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if here.gpu else "cpu",
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        resumed_at=trainer.step,
    )
    train_steps(trainer, log, first)
    reports = asynctp_passes.reports()
    if first and options.backend == "asynctp":
        fused, missed = (sum(len(getattr(each, name)) for each in reports) for name in ("fused", "missed"))
        log.write("fusion", fused=fused, missed=missed, graphs=len(reports))
        print(f"asynctp: {fused} collectives fused, {missed} missed in {len(reports)} compiled graphs")


def train_steps(trainer: Trainer, log: Log, first: bool) -> None:
    """Train, log, trace and save as the options say; the last line printed sums up."""
    options = trainer.options
    progress = Progress(options.steps - trainer.step, enabled=first)
    progress.show("compiling")
    meter, loss = Meter(trainer), float("nan")
    while trainer.step < options.steps:
        result = traced_step(trainer, log, first)
        step, last = trainer.step, trainer.step == options.steps
        progress.advance()
        if last or step % options.log_every == 0:
            loss, norm = (float(value) for value in result)  # waits for the GPU
            log.write("step", step=step, loss=loss, gradient_norm=norm, **meter.read())
            progress.show(f"step {step}  loss {loss:.4f}  {meter.speeds[-1]:,.0f} tokens/s")
        if options.checkpoint_dir and (last or (options.checkpoint_every and step % options.checkpoint_every == 0)):
            log.write("checkpoint", step=step, path=str(trainer.save()))
            meter.restart()
    progress.close()
    if first:
        print(
            f"{options.backend}, {options.precision}: loss {loss:.4f} at step {trainer.step}; "
            f"median {statistics.median(meter.speeds):,.0f} tokens/s"
        )


def traced_step(trainer: Trainer, log: Log, first: bool) -> tuple[Tensor, Tensor]:
    """The next step, under the profiler if it is the one to trace."""
    options = trainer.options
    if options.profile is None or trainer.step + 1 != options.profile_step:
        return trainer.train()
    path = options.profile / f"trace-rank{dist.get_rank()}.json"
    result, found = traced(trainer.train, path, trainer.device)
    exposed, span = found.exposed / 1e3, found.span / 1e3
    log.write(
        "profile", step=trainer.step, trace=str(path), span_ms=span, compute_ms=found.compute / 1e3,
        communication_ms=found.communication / 1e3, exposed_communication_ms=exposed,
    )  # fmt: skip
    if first:
        print(f"step {trainer.step}: {exposed:.3f} ms of {span:.3f} ms are exposed communication: {path}")
    return result


class Meter:
    """Speed since the last reading."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.tokens = trainer.options.batch * trainer.options.dp * trainer.sizes.sequence
        self.speeds: list[float] = []
        self.restart()

    def restart(self) -> None:
        """Leave out what came since the last reading."""
        self.mark, self.since = time.perf_counter(), self.trainer.step

    def read(self) -> dict[str, float]:
        """Means over the steps since the last reading, and the peak of memory."""
        seconds = (time.perf_counter() - self.mark) / (self.trainer.step - self.since)
        self.speeds.append(self.tokens / seconds)
        self.restart()
        return {
            "seconds": seconds,
            "tokens_per_s": self.speeds[-1],
            "peak_memory_bytes": peak_memory(
                self.trainer.device, self.trainer.options.backend, self.trainer.mesh["tp"].get_group()
            ),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """One process of the training; 0 done, 2 it could not run."""
    options = parse(arguments)
    try:
        launch(options)
    except RecipeError as error:
        return refuse("train_llama", error)
    return 0


def launch(options: argparse.Namespace) -> None:
    """Check everything that can be checked before the ranks meet, then train."""
    here = place("examples/train_llama.py", options.size)
    sizes = settle(options, here.world, here.gpu)
    text = read_text(options.data or TEXT, sizes.sequence + 1)
    if options.resume:
        newest(options.checkpoint_dir)
    if here.rank == 0 and options.backend == "intree" and not here.gpu:
        print("note: PyTorch's async TP fuses on GPUs only; here --backend intree is plain Inductor", file=sys.stderr)
    # the gradient's norm is summed over two mesh dimensions, one after the other, which is a line for each rank
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    log = Log(options, here.rank == 0)
    try:
        with joined(here):
            run(options, sizes, text, log, here)
    finally:
        log.close()


if __name__ == "__main__":
    sys.exit(main())
