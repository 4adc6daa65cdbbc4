"""One small program on several gloo ranks of this machine, eager and compiled; every rank prints one verdict line.

A case of `rank_cases` defines `program(rank, ranks, compiled)`, which returns a tensor or a list of them (results, then
gradients), compiles with `compiled(function)`, and ends with `run(program)`. The same program runs eager first; its
values are what is right.

    export PYTHONPATH=tests/support
    python tests/support/rank_cases/CASE.py                       backend="asynctp"
    python tests/support/rank_cases/CASE.py inductor asynctp      both
    SHOW=1 python tests/support/rank_cases/CASE.py                with the reports and the traceback

A verdict is "right", or begins with what is the matter: WRONG values, a CRASH, a HANG (a wait ran out of its bound),
SILENT (neither an error nor a warning where one is due), or a REASON that is not as it should be.
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "ASYNCTP_TIMEOUT_S": "15",
}
for _name, _value in _SETTINGS.items():  # before torch is imported
    os.environ.setdefault(_name, _value)

import asynctp_kernels  # noqa: E402
import torch  # noqa: E402
import torch._inductor.config  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import Tensor  # noqa: E402

import asynctp_passes  # noqa: E402

__all__ = ["Complaint", "all_raise", "fused", "none_missed", "run"]

PEERS_S = 30
"""Seconds that a plain collective waits for a peer."""
PATIENCE = float(os.environ.get("RANKS_PATIENCE", "1"))
"""How many times longer than usual ranks may take: for a machine that does other things too."""

Compile = Callable[..., Any]
Program = Callable[[int, int, Compile], "Tensor | Sequence[Tensor]"]
Judge = Callable[[list[asynctp_passes.Remark]], str]


class Complaint(Exception):
    """Raised by a program that judges for itself what was reported; its text is the verdict."""


def all_raise(call: Callable[[], object], part: str, seconds: float = 40) -> None:
    """Complain unless a call of a compiled function raises on every rank, soon, with an error that names this part.

    Eager it is not made: its collectives are of the ranks that run it.
    """
    if _eager:
        return
    raised, begun = "", time.monotonic()
    try:
        call()
    except (asynctp_passes.DisagreementError, asynctp_kernels.SymmetricMemoryError) as error:
        raised = str(error)
    took, errors = time.monotonic() - begun, [""] * dist.get_world_size()
    dist.all_gather_object(errors, raised)
    if not all(part in one for one in errors):
        raise Complaint(f"CRASH not all ranks raise an error that names {part!r}: {errors}")
    if took > seconds * PATIENCE:
        raise Complaint(f"HANG an error after {took:.0f} s")


_eager: list[bool] = []
"""Not empty while the program runs eager."""


def fused(count: int = 1) -> Judge:
    """A judge: at least so many chains are fused."""
    return functools.partial(_fused, count)


def none_missed(count: int = 1) -> Judge:
    """A judge: at least so many chains are fused, and none is MISSED."""
    return functools.partial(_none_missed, count)


def run(
    program: Program,
    ranks: int = 2,
    *,
    options: dict[str, Any] | None = None,
    judge: Judge | None = None,
    complain: bool = False,
    kernels: bool = False,
    interpreted: bool = False,
    seconds: float = 150,
) -> None:
    """Run a program on ranks and exit: with status 0 where every rank is right, else 1.

    Args:
        program: What each rank runs.
        ranks: How many there are.
        options: Of `backend="asynctp"`; strict is "off" unless given.
        judge: Says what is wrong with the remarks of a rank whose values are right, or "".
        complain: The program must be refused, or warned of.
        kernels: Let Inductor make C++ kernels; without, all of Inductor runs but minutes of the C++ compiler.
        interpreted: Run what CUDA runs, in Triton's interpreter. A wait that has a bound there has none on CUDA.
        seconds: After so long a rank hangs, times `PATIENCE`.
    """
    if interpreted and os.environ.get("TRITON_INTERPRET") != "1":  # triton, which is imported, has looked already
        paths = os.pathsep.join(sys.path)
        os.environ.update(TRITON_INTERPRET="1", ASYNCTP_CPU_IMPLEMENTATION="interpreted", PYTHONPATH=paths)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    wrong = False
    for backend in sys.argv[1:] or ["asynctp"]:
        with tempfile.TemporaryDirectory() as folder:
            args = (program, backend, options, judge, complain, kernels, folder)
            verdicts = _forked(ranks, args, pathlib.Path(folder), seconds * PATIENCE)
        for rank, verdict in enumerate(verdicts):
            print(f"{pathlib.Path(sys.argv[0]).stem} {backend} rank {rank}: {verdict}", flush=True)
            wrong = wrong or not verdict.startswith("right")
    sys.stdout.flush()
    os._exit(wrong)


def _forked(ranks: int, args: tuple[Any, ...], folder: pathlib.Path, seconds: float) -> list[str]:
    """The verdict of each rank."""
    context = mp.get_context("fork")
    started = [context.Process(target=_rank, args=(rank, ranks, *args)) for rank in range(ranks)]
    for process in started:
        process.start()
    until = time.monotonic() + seconds
    for process in started:
        process.join(max(0.0, until - time.monotonic()))
    verdicts = []
    for rank, process in enumerate(started):
        hangs = process.is_alive()
        if hangs:
            process.kill()
            process.join()
        ended = f"HANG no result after {seconds:g} s" if hangs else f"CRASH exit status {process.exitcode}"
        file = folder / f"verdict{rank}"
        verdicts.append(file.read_text() if file.exists() else ended)
    return verdicts


def _rank(
    rank: int,
    ranks: int,
    program: Program,
    backend: str,
    options: dict[str, Any] | None,
    judge: Judge | None,
    complain: bool,
    kernels: bool,
    folder: str,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=PEERS_S * PATIENCE),
    )
    heard = _Heard()
    logging.getLogger("asynctp_passes").addHandler(heard)
    logging.lastResort = None
    torch.compiler.config.force_disable_caches = True
    torch._inductor.config.fallback_by_default = not kernels
    warnings.simplefilter("ignore")

    def compiled(function: Callable[..., Any], **kwargs: Any) -> Any:
        own = kwargs.pop("options", {})
        if backend == "asynctp":
            kwargs["options"] = {"strict": "off", **(options or {}), **own}
        return torch.compile(function, backend=backend, **kwargs)

    verdict = _verdict(functools.partial(_seeded, program, rank, ranks), compiled, complain, heard)
    if verdict == "right" and judge is not None and backend == "asynctp":
        verdict = judge([remark for report in asynctp_passes.reports() for remark in report.remarks]) or verdict
    if os.environ.get("SHOW"):
        for report in asynctp_passes.reports():
            print(f"rank {rank}", report, flush=True)
    _hand_in(pathlib.Path(folder), rank, ranks, verdict)


def _hand_in(folder: pathlib.Path, rank: int, ranks: int, verdict: str) -> None:
    """Write a rank's verdict, and end when all have: peers may still wait for what this rank keeps."""
    (folder / f"verdict{rank}.new").write_text(verdict)
    (folder / f"verdict{rank}.new").rename(folder / f"verdict{rank}")
    until = time.monotonic() + PEERS_S * PATIENCE
    while time.monotonic() < until and not all((folder / f"verdict{one}").exists() for one in range(ranks)):
        time.sleep(0.1)
    os._exit(0)


def _verdict(program: Callable[[Compile], list[Tensor]], compiled: Compile, complain: bool, heard: _Heard) -> str:
    try:
        _eager.append(True)
        want = program(lambda function, **kwargs: function)
        _eager.clear()
        dist.barrier()
    except Exception as error:
        return f"CRASH eager: {type(error).__name__}: {_short(error)}"
    try:
        verdict = _compared(want, program(compiled))
    except Exception as error:
        if os.environ.get("SHOW"):
            traceback.print_exc()
        return _of_error(error, complain)
    if verdict == "right" and complain:
        return f"right, it warns: {heard.said[0]}" if heard.said else "SILENT no error and no warning"
    return verdict


def _seeded(program: Program, rank: int, ranks: int, compiled: Compile) -> list[Tensor]:
    torch.manual_seed(0)
    results = program(rank, ranks, compiled)
    return _tensors([results] if isinstance(results, Tensor) else results)


def _tensors(results: Iterable[Tensor]) -> list[Tensor]:
    from torch.distributed.tensor import DTensor

    whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in results)
    return [each.detach().clone() for each in whole]


def _compared(want: Sequence[Tensor], got: Sequence[Tensor]) -> str:
    for index, (a, b) in enumerate(zip(want, got, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"WRONG result {index} is {b.dtype} {tuple(b.shape)}, not {a.dtype} {tuple(a.shape)}"
        close, a, b = 1e-4 if a.dtype.itemsize > 2 else 3e-2, a.double(), b.double()
        odd = ~(a.isfinite() & b.isfinite())
        if not bool(((a == b) | (a.isnan() & b.isnan()))[odd].all()):
            return f"WRONG result {index}: {int(odd.sum())} of {odd.numel()} elements inf or NaN on one side only"
        error, scale = (a - b)[~odd].abs(), a[~odd].abs()
        if error.numel() and error.max() > close * scale.max():
            return f"WRONG result {index}: max error {error.max():.3g}, largest value {scale.max():.3g}"
    return "right"


def _of_error(error: BaseException, complain: bool) -> str:
    """What an exception means; Inductor wraps those of a pass."""
    chain = [error]
    while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) and inner not in chain:
        chain.append(inner)
    last, kind = chain[-1], type(chain[-1]).__name__
    if isinstance(last, Complaint):
        return _short(last)
    if complain and kind.endswith(("StrictError", "ExpectError")):
        return f"right, it raises {kind}"
    for each in chain:
        if type(each).__name__ == "PeerTimeout":
            return f"HANG (without a bound on CUDA) {_short(each)}"
        if any(sign in str(each) for sign in ("Timed out waiting", "Connection closed by peer", "pair closure")):
            return "HANG a plain collective waited in vain for a peer that gave up or makes another call"
    return f"CRASH {kind}: {_short(last)}"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _fused(count: int, remarks: list[asynctp_passes.Remark]) -> str:
    found = sum(remark.outcome == "FUSED" for remark in remarks)
    return "" if found >= count else f"REASON {found} fused, not {count}: {_named(remarks)}"


def _none_missed(count: int, remarks: list[asynctp_passes.Remark]) -> str:
    missed = any(remark.outcome == "MISSED" for remark in remarks)
    return _fused(count, remarks) or (f"REASON MISSED: {_named(remarks)}" if missed else "")


def _named(remarks: list[asynctp_passes.Remark]) -> str:
    others = (remark for remark in remarks if remark.outcome != "FUSED")
    return ", ".join(f"{one.outcome} {one.kind} {one.code} {one.name}".strip() for one in others) or "-"


class _Heard(logging.Handler):
    """The warnings of the package, a line each."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(" ".join(record.getMessage().split())[:160])
