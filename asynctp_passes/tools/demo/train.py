"""One rank of the demo: it trains the same model twice, and sends home the losses and the reports.

What `examples/train_llama.py` shares with it is here too: the text, the batches and the progress bar.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import asynctp_passes
from asynctp_passes.tools.demo.model import ModelSizes, Transformer, parallelize

TEXT = Path(__file__).with_name("opticks.txt")
_SEED = 1704  # the year of the first edition


@dataclass(frozen=True)
class Settings:
    """A training run. Plain values, so that it can be sent to the ranks."""

    steps: int = 60
    batch: int = 8
    learning_rate: float = 3e-3
    graph_dir: str | None = None
    sizes: ModelSizes = field(default_factory=ModelSizes)
    backends: tuple[str, ...] = ("inductor", "asynctp")


@dataclass
class Result:
    """The result that rank 0 sends home.

    Attributes:
        losses: Loss of each step, by backend.
        seconds: Time of the first step (compilation included) and of all others, by backend.
        reports: The reports of the asynctp run, as JSON.
    """

    losses: dict[str, list[float]]
    seconds: dict[str, tuple[float, float]]
    reports: list[str]


def train_both(rank: int, world_size: int, settings: Settings) -> Result:
    """Train with each backend, from the same weights on the same batches. The default group is initialized."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("tp",))
    result = Result({}, {}, [])
    progress = Progress(len(settings.backends) * settings.steps, enabled=rank == 0)
    for backend in settings.backends:
        torch._dynamo.reset()
        took = ", ".join(f"{name} took {first:.0f} s" for name, (first, _) in result.seconds.items())
        losses, seconds = _train(backend, mesh, device, settings, progress, took)
        result.losses[backend], result.seconds[backend] = losses, seconds
    result.reports = [report.to_json() for report in asynctp_passes.reports()]
    progress.close("trained, the processes end")
    return result


def _train(
    backend: str, mesh: DeviceMesh, device: torch.device, settings: Settings, progress: Progress, took: str = ""
) -> tuple[list[float], tuple[float, float]]:
    """Losses of all steps, and the seconds of the first and of the others; `took` says what others' first took."""
    torch.manual_seed(_SEED)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = parallelize(Transformer(settings.sizes).to(device, dtype), mesh)
    compiled = _compile(model, backend, settings.graph_dir if dist.get_rank() == 0 else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8)
    batches = Batches(text, settings.sizes.sequence, settings.batch, dp=1, dp_rank=0, seed=_SEED)
    losses: list[float] = []
    marks = [time.monotonic()]
    for step in range(settings.steps):
        compiling = f"compiling ({took})" if took else "compiling"
        progress.show(f"{backend:<8} {f'loss {losses[-1]:.3f}' if step else compiling}")
        losses.append(_step(compiled, optimizer, batches.draw(device)))
        marks.append(time.monotonic())
        progress.advance()
    return losses, (marks[1] - marks[0], marks[-1] - marks[1])


def _compile(model: Transformer, backend: str, graph_dir: str | None) -> Callable[[Tensor], Tensor]:
    """`torch.compile` with graph caches off, so that every run of the demo compiles and writes its pages."""
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    options: dict[str, Any] = {"strict": "all", "graph_dir": graph_dir} if backend == "asynctp" else {}
    return torch.compile(model, backend=backend, options=options, dynamic=False)


def _step(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    """One step of training; the loss is the mean over the whole batch, the same on every rank."""
    tokens, targets = batch
    with loss_parallel():
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss = loss.detach()
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


class Batches:
    """Draws (bytes, next bytes) at random places of the text. Its state says where it is, and can be restored.

    Every rank draws the places of the whole batch and takes its own, so ranks agree without talking.
    """

    def __init__(self, text: Tensor, sequence: int, batch: int, dp: int, dp_rank: int, seed: int) -> None:
        self.text, self.length, self.total = text, sequence + 1, batch * dp
        self.mine = slice(batch * dp_rank, batch * (dp_rank + 1))
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each `[batch, sequence]`."""
        starts = torch.randint(len(self.text) - self.length + 1, (self.total,), generator=self.generator)
        rows = torch.stack([self.text[start : start + self.length] for start in starts[self.mine].tolist()])
        rows = rows.to(device, non_blocking=True).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Progress:
    """A progress bar on standard error: redrawn in place on a terminal, one line a tenth elsewhere."""

    def __init__(self, total: int, *, enabled: bool, width: int = 30) -> None:
        self.total, self.enabled, self.width = total, enabled, width
        self.done = 0
        self.tenth = -1
        self.started = time.monotonic()
        self.live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show(self, text: str) -> None:
        """Draw the bar with `text` behind it."""
        tenth = 10 * self.done // self.total
        if not self.enabled or (not self.live and tenth == self.tenth):
            return
        self.tenth = tenth
        filled = self.width * self.done // self.total
        bar = "#" * filled + "-" * (self.width - filled)
        line = f"[{bar}] {self.done:>3}/{self.total} {time.monotonic() - self.started:4.0f} s  {text}"
        print(f"\r{line:<78}" if self.live else line, end="" if self.live else "\n", file=sys.stderr, flush=True)

    def advance(self) -> None:
        """One more step is done."""
        self.done += 1

    def close(self, text: str = "done") -> None:
        """Draw the full bar and end its line."""
        self.tenth = -1
        self.show(text)
        if self.enabled and self.live:
            print(file=sys.stderr)
