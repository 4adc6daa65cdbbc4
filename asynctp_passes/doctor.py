"""`asynctp doctor`: what will work on this machine, and what to do about what will not.

    gather_facts() ─▶ Facts ─diagnose─▶ findings, the verdict last ─render─▶ text
                                                              └─bug_report─▶ text for an issue

`gather_facts` and `last_reports` alone look at the machine; all else is pure, so that tests make up their machines.
Nothing here raises for want of a GPU, a driver, triton, torch or the kernels: that is what the findings are about.
"""

from __future__ import annotations

import functools
import getpass
import importlib
import importlib.util
import itertools
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

from asynctp_passes.config import CPU_IMPLEMENTATIONS, RUNTIME_VARIABLES, Config, ConfigError, own_variables
from asynctp_passes.reporting.report import Report

Status = Literal["ok", "info", "warn", "fail"]
Version = tuple[int, ...]
T = TypeVar("T")

OLDEST_TORCH: Version = (2, 11)
NEWEST_TORCH: Version = (2, 15)
OLDEST_TRITON: Version = (3, 6)
MAX_RANKS = 8
GEMM_CAPABILITY = 9
CPU_VARIABLE = "ASYNCTP_CPU_IMPLEMENTATION"
CUDA_VARIABLE = "ASYNCTP_CUDA_IMPLEMENTATION"
TABLE_VARIABLE = "ASYNCTP_TUNING_TABLE"
TIMEOUT_VARIABLE = "ASYNCTP_TIMEOUT_S"
REPORTS_VARIABLE = "ASYNCTP_REPORT_FILE"
#: beside those of asynctp
OTHER_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_SYMMMEM", "TRITON_INTERPRET"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)
REPORTS = 3  # of the last ones
CUDA_IMPLEMENTATIONS = ("fused", "decomposed", "direct", "sequential")  # where `cuda.choose.select` cannot be asked

# CUdevice_attribute, as in cuda.h of CUDA 12.8 and 13.0 (11.7 appends _V2 to both names). They are of the second
# version of the stream memory operations, which the ops call (cuStreamBatchMemOp_v2, since CUDA 11.7). Its 32-bit waits
# and writes have no attribute; number 92, CAN_USE_STREAM_MEM_OPS_V1, is of the deprecated first version alone.
CAN_USE_64_BIT_STREAM_MEM_OPS = 122
CAN_USE_STREAM_WAIT_VALUE_NOR = 123


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer.

    Attributes:
        name: What was looked at.
        status: "ok", "info" (good to know), "warn" (works, but slower or not everywhere) or "fail" (does not work).
        text: What is the case.
        remedy: What to do about it; empty when there is nothing to do.
    """

    name: str
    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch sees. `stream_ops`: the driver reports stream memory operations; None when it cannot say."""

    name: str
    capability: tuple[int, int]
    stream_ops: bool | None = None


@dataclass(frozen=True)
class Facts:
    """All that the checks know of the machine. The defaults are a machine without anything.

    Attributes:
        version: Of asynctp. installed: Of the package that is installed; empty where none is.
        places: The folders of its two halves, the kernels' empty where they cannot be found.
        options_error: Why Config refuses the environment: torch.compile would raise it. Empty when it does not.
        torch, triton: Versions; None where the import fails.
        torch_cuda: The CUDA version that torch was built for; None for a build without CUDA.
        interpreted: Triton runs its interpreter (TRITON_INTERPRET=1).
        interpreter_fault: Why the interpreted kernels do not run, with the remedy; empty if not asked for, or they run.
        kernels_error: Why `asynctp_kernels.cuda` cannot be imported; None when it can.
        gluon_error: Why its kernels in Gluon cannot be; None when they can, or where `interpreted`, which has none.
        native_error: Why its C code cannot be built; None when it can, or where no GPU calls it.
        driver: The newest CUDA version that the NVIDIA driver knows, 13000 for 13.0; None without a driver.
        peer_writes: Stream memory operations may write to another GPU's memory; None when not known.
        unreachable: Pairs of GPUs, as indices, without access to each other's memory in both directions.
        symmetric_memory: Name of torch's backend for CUDA tensors; None where there is none.
        micro_pipeline: Inductor's own async TP pass is on in this process.
        implementations: Names of what a fused op can run on GPUs.
        environment: The variables that matter, where set: those of asynctp, and `OTHER_VARIABLES`.
        table_path: Where the tuning table is looked for; empty when not known.
        table_gpus: GPUs that it has measurements of; None when there is no such file.
        table_error: Why the file cannot be read; empty when it can.
    """

    version: str = ""
    installed: str = ""
    places: tuple[str, str] = ("", "")
    options_error: str = ""
    python: Version = (3, 10)
    torch: str | None = None
    torch_cuda: str | None = None
    triton: str | None = None
    interpreted: bool = False
    interpreter_fault: str = ""
    kernels_error: str | None = None
    gluon_error: str | None = None
    native_error: str | None = None
    driver: int | None = None
    peer_writes: bool | None = None
    gpus: tuple[Gpu, ...] = ()
    unreachable: tuple[tuple[int, int], ...] = ()
    symmetric_memory: str | None = None
    micro_pipeline: bool = False
    implementations: tuple[str, ...] = CUDA_IMPLEMENTATIONS
    environment: Mapping[str, str] = field(default_factory=dict)
    table_path: str = ""
    table_gpus: tuple[str, ...] | None = None
    table_error: str = ""


def _version(text: str) -> Version:
    """(2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _cuda_text(version: int) -> str:
    """The version 13.0 of the number 13000."""
    return f"{version // 1000}.{version % 1000 // 10}"


# --- versions --------------------------------------------------------------------------------------------------
def own_version(facts: Facts) -> Iterator[Finding]:
    """Say which asynctp runs, which one is installed, and where its two halves are."""
    found = facts.version
    if facts.installed != facts.version:
        found += f", where {facts.installed or 'none'} is installed"
    yield Finding("asynctp", "ok", f"{found}; passes in {facts.places[0]}, kernels in {facts.places[1] or '(nowhere)'}")


def torch_version(facts: Facts) -> Iterator[Finding]:
    """torch is there, and one of the versions that this package is written for."""
    span = f"{_dotted(OLDEST_TORCH)} to {_dotted(NEWEST_TORCH)}"
    if facts.torch is None:
        yield Finding("torch", "fail", "cannot be imported", f"install torch {span}")
    elif OLDEST_TORCH <= _version(facts.torch)[:2] <= NEWEST_TORCH:
        yield Finding("torch", "ok", facts.torch)
    else:
        yield Finding("torch", "warn", f"{facts.torch} is not supported", f"use torch {span}")


def torch_build(facts: Facts) -> Iterator[Finding]:
    """torch was built for CUDA, if there is a driver."""
    if facts.torch is None:
        return
    if facts.torch_cuda is not None:
        yield Finding("torch build", "ok", f"CUDA {facts.torch_cuda}")
    elif facts.driver is None:
        yield Finding("torch build", "info", "without CUDA")
    else:
        remedy = "install a CUDA build of torch to use the GPUs"
        yield Finding("torch build", "warn", "without CUDA, though there is an NVIDIA driver", remedy)


def python_version(facts: Facts) -> Iterator[Finding]:
    """Which one: pip has checked that it is new enough."""
    yield Finding("python", "ok", _dotted(facts.python))


def triton_version(facts: Facts) -> Iterator[Finding]:
    """triton is there, new enough, and the kernels can be imported with it."""
    remedy = f"install triton {_dotted(OLDEST_TRITON)} or newer"
    if facts.triton is None:
        status: Status = "warn" if facts.gpus else "info"
        yield Finding("triton", status, "cannot be imported: the fused ops run sequentially", remedy)
    elif _version(facts.triton) < OLDEST_TRITON:
        yield Finding("triton", "fail" if facts.gpus else "warn", f"{facts.triton} is too old for the kernels", remedy)
    else:
        yield Finding("triton", "ok", facts.triton)
    if facts.triton is not None and facts.kernels_error is not None:
        text = f"the kernels cannot be imported: {facts.kernels_error}"
        yield Finding("kernels", "fail" if facts.gpus else "warn", text, "install asynctp-passes and triton again")
    elif facts.triton is not None and facts.gluon_error is not None:
        text = f"some calls take longer than they could, as triton has another Gluon: {facts.gluon_error}"
        remedy = "update asynctp-passes, or install an older triton"
        yield Finding("kernels", "warn" if facts.gpus else "info", text, remedy)
    if facts.native_error is not None:
        text = f"calls take the host longer than they could, as C code cannot be built: {facts.native_error}"
        yield Finding("call sites", "warn", text, "install gcc and this Python's headers, or set CC to a C compiler")


def interpreter(facts: Facts) -> Iterator[Finding]:
    """The interpreted kernels run, where they are asked for."""
    if facts.interpreter_fault:
        yield Finding("interpreter", "fail", facts.interpreter_fault)
    elif facts.environment.get(CPU_VARIABLE) == "interpreted":
        yield Finding("interpreter", "ok", "the interpreted kernels (CPU, for tests) run")


# --- GPUs ------------------------------------------------------------------------------------------------------
def driver_version(facts: Facts) -> Iterator[Finding]:
    """There is an NVIDIA driver, and it is new enough for this torch."""
    if facts.driver is None:
        yield Finding("driver", "info", "no NVIDIA driver")
    elif facts.torch_cuda and facts.driver // 1000 < _version(facts.torch_cuda)[0]:
        text = f"knows CUDA {_cuda_text(facts.driver)}, and torch was built for {facts.torch_cuda}: torch cannot use it"
        yield Finding("driver", "fail", text, "update the NVIDIA driver, or install torch for an older CUDA")
    else:
        yield Finding("driver", "ok", f"CUDA {_cuda_text(facts.driver)}")


def gpu_models(facts: Facts) -> Iterator[Finding]:
    """Say which GPUs there are, and what their compute capability allows."""
    if not facts.gpus and (facts.driver is None or facts.torch_cuda is None):
        yield Finding("GPUs", "info", "none that torch can use")
    elif not facts.gpus:
        remedy = "look at CUDA_VISIBLE_DEVICES and nvidia-smi"
        yield Finding("GPUs", "warn", "torch sees none, though there is an NVIDIA driver", remedy)
    for gpu in sorted({(gpu.name, gpu.capability) for gpu in facts.gpus}):
        count = sum((other.name, other.capability) == gpu for other in facts.gpus)
        text = f"{count} × {gpu[0]}, compute capability {_dotted(gpu[1])}"
        if gpu[1][0] == GEMM_CAPABILITY:
            yield Finding("GPUs", "ok", f"{text}: every implementation")
        else:
            yield Finding("GPUs", "info", f"{text}: decomposed, direct or sequential; the fused GEMM is for 9.0")


def gpu_count(facts: Facts) -> Iterator[Finding]:
    """Groups can have several ranks, all on one model."""
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if len(facts.gpus) == 1 and visible is not None:
        text = f"CUDA_VISIBLE_DEVICES={visible} shows one GPU: groups whose processes see one each run sequentially"
        yield Finding("GPU count", "info", text, "let each process see all GPUs of its group")
    elif len(facts.gpus) == 1:
        yield Finding("GPU count", "info", "one GPU has no peer to overlap with")
    if len(facts.gpus) > MAX_RANKS:
        yield Finding("GPU count", "info", f"groups of more than {MAX_RANKS} ranks run sequentially")
    models = sorted({gpu.name for gpu in facts.gpus})
    if len(models) > 1:
        text = f"{len(models)} models: ranks on unlike GPUs can choose unlike implementations, and then hang"
        yield Finding(
            "GPU count", "warn", text, f"keep a group on one model, or set {CUDA_VARIABLE} to one that all of them run"
        )


def peer_access(facts: Facts) -> Iterator[Finding]:
    """Every GPU reaches every other one's memory."""
    if len(facts.gpus) < 2:
        return
    if facts.unreachable:
        remedy = "keep groups within GPUs that reach each other (nvidia-smi topo -p2p r shows which do)"
        yield Finding("peer access", "warn", f"none between GPUs {_pairs(facts.unreachable)}", remedy)
    else:
        yield Finding("peer access", "ok", "between all GPUs")


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    """The first few of them, "0-1, 0-2"."""
    shown = ", ".join(f"{a}-{b}" for a, b in pairs[:4])
    return f"{shown} and {len(pairs) - 4} other pairs" if len(pairs) > 4 else shown


def stream_memory_ops(facts: Facts) -> Iterator[Finding]:
    """Streams can wait for words in memory and write them, here and at a peer."""
    if not facts.gpus:
        return
    reported = {gpu.stream_ops for gpu in facts.gpus}
    if False in reported:
        remedy = f"if a fused op raises 'operation not supported', set {CUDA_VARIABLE}=sequential"
        yield Finding("stream memory operations", "warn", "the driver reports none", remedy)
    elif None in reported:
        yield Finding("stream memory operations", "info", "not known")
    else:
        yield Finding("stream memory operations", "ok", "supported")
    if facts.peer_writes is False:
        yield Finding("peer signals", "info", "a 4-byte copy each: from CUDA 13.1 on stream writes do not reach peers")
    elif facts.peer_writes:
        yield Finding("peer signals", "ok", "stream memory operations")


def symmetric_memory(facts: Facts) -> Iterator[Finding]:
    """torch can share GPU memory among ranks. NVLink multicast is not looked at, since nothing uses it."""
    if not facts.gpus:
        return
    found = facts.symmetric_memory
    if found == "CUDA":
        yield Finding("symmetric memory", "ok", "CUDA backend")
    elif facts.kernels_error is not None and found is None:
        yield Finding("symmetric memory", "info", "not known, since the kernels cannot be imported")
    elif found is None:
        yield Finding("symmetric memory", "warn", "torch has none for CUDA", "install an official torch for Linux")
    else:
        text = f"{found} backend: the ops are written and tested for CUDA's"
        yield Finding("symmetric memory", "warn", text, "unset TORCH_SYMMMEM, or set it to CUDA")


# --- settings --------------------------------------------------------------------------------------------------
def runtime_variables(facts: Facts) -> Iterator[Finding]:
    """Our variables of the run time that are set: what they mean, or that the value is not valid."""
    cuda = ("auto", *facts.implementations)
    limits: dict[str, tuple[Callable[[str], bool], str]] = {
        TIMEOUT_VARIABLE: (lambda text: 0 < _try(lambda: float(text), 0.0) < math.inf, "a positive number of seconds"),
        CPU_VARIABLE: (CPU_IMPLEMENTATIONS.__contains__, f"one of {', '.join(CPU_IMPLEMENTATIONS)}"),
        CUDA_VARIABLE: (cuda.__contains__, f"one of {', '.join(cuda)}"),
        TABLE_VARIABLE: (bool, "the path of a file"),
    }
    for name, (valid, limit) in limits.items():
        value = facts.environment.get(name)
        if value is None:
            continue
        if valid(value):
            meaning = RUNTIME_VARIABLES[name.partition("_")[2].lower()]
            yield Finding(name, "info", f"{value!r}: {re.split(': | [(]', meaning)[0]}")
        else:
            yield Finding(name, "fail", f"{value!r} is not valid", f"set it to {limit}, or unset it")


def options(facts: Facts) -> Iterator[Finding]:
    """Config takes the environment: torch.compile would raise what it does not."""
    if facts.options_error:
        yield Finding("options", "fail", facts.options_error, "correct or unset the variable")


def forced_implementation(facts: Facts) -> Iterator[Finding]:
    """The implementation that is asked for can run; one that cannot raises at every call."""
    unfit = [gpu for gpu in facts.gpus if gpu.capability[0] != GEMM_CAPABILITY]
    asked = facts.environment.get(CUDA_VARIABLE, "auto")
    if unfit and asked.startswith("fused") and asked in facts.implementations:
        text = f"{asked!r} cannot run on {unfit[0].name}, whose compute capability is {_dotted(unfit[0].capability)}"
        yield Finding(CUDA_VARIABLE, "fail", text, "set it to auto, decomposed or direct, or unset it")
    if facts.gpus and facts.interpreted:
        text = "Triton runs its interpreter, which cannot compile the GPU kernels"
        yield Finding("TRITON_INTERPRET", "fail", text, "unset it: it is for the interpreted kernels on CPU")


def cuda_variables(facts: Facts) -> Iterator[Finding]:
    """Variables of CUDA and torch that change what to expect."""
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        yield Finding("CUDA_VISIBLE_DEVICES", "info", f"{visible!r}: torch sees no other GPUs")
    if not facts.gpus:
        return
    if facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        text = "'1': works, but copies and matmuls may overlap less, since all streams share one queue"
        yield Finding("CUDA_DEVICE_MAX_CONNECTIONS", "info", text, "unset it unless something else needs it")


def tuning_table(facts: Facts) -> Iterator[Finding]:
    """The measured choices can be read, and are of these GPUs."""
    named = TABLE_VARIABLE in facts.environment
    if not facts.table_path or not (facts.gpus or named):
        return
    others = sorted({gpu.name for gpu in facts.gpus} - set(facts.table_gpus or ()))
    where = f"{facts.table_path}: "
    if facts.table_error:
        remedy = "delete the file, or write it anew"
        yield Finding("tuning table", "fail", f"{where}cannot be read ({facts.table_error})", remedy)
    elif facts.table_gpus is None and named:
        yield Finding("tuning table", "warn", f"{where}no such file", f"correct or unset {TABLE_VARIABLE}")
    elif facts.table_gpus is None:
        yield Finding("tuning table", "info", f"none ({facts.table_path}): the shipped table and the cost model choose")
    elif others:
        text = f"{where}nothing of {', '.join(others)}: the shipped table and the cost model choose there"
        yield Finding("tuning table", "info", text)
    elif facts.gpus:
        yield Finding("tuning table", "ok", f"{where}measured on these GPUs")


# --- known bugs of torch ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class KnownBug:
    """A bug of torch from version `first` to `last`, both included; a prefix stands for all that begin with it.

    Attributes:
        micro_pipeline: It is one of Inductor's own async TP pass, and does not matter while that is off.
    """

    first: Version
    last: Version
    text: str
    remedy: str
    micro_pipeline: bool = False

    def concerns(self, version: Version) -> bool:
        return self.first <= version[: len(self.first)] and version[: len(self.last)] <= self.last


KNOWN_BUGS = (
    KnownBug(
        (2, 11),
        (2, 11),
        "the gradient through a torch.autograd.Function whose forward writes into the tensor that it returns, as "
        "torch.distributed.reduce_scatter_tensor(out, x) does, is 0 under torch.compile, with any backend",
        "use collectives that return their result in such functions (torch.distributed._functional_collectives), or a "
        "newer torch",
    ),
    KnownBug(
        (2, 11),
        (2, 12),
        "all_gather_tensor(gather_dim != 0) breaks a compiled graph, which hides the collective from every pass "
        "(pytorch issue 179722)",
        "use DTensor or gather_dim=0, or a newer torch",
    ),
    KnownBug(
        (2, 11),
        (2, 12),
        "torch.compile does not trace torch.nn.functional.scaled_mm: the graph breaks there, which hides the matmul "
        "from every pass; 2.12 gives up the whole frame if it names the recipe",
        "use torch._scaled_mm or torch.ops.aten._scaled_mm_v2, or a newer torch",
    ),
    KnownBug(
        (2, 11),
        (2, 13),
        "symm_mem.fused_scaled_matmul_reduce_scatter of torch's own async TP pass gives wrong results for a 3-D output "
        "scattered along dim 1 with a batch above 1",
        "leave torch._inductor.config._micro_pipeline_tp off",
        micro_pipeline=True,
    ),
    KnownBug(
        (2, 12),
        (2, 13, 0),
        "attention on DTensors that is fully checkpointed inside of what is compiled fails when it runs",
        "checkpoint around what is compiled, or selectively, with attention saved, or use another version of torch",
    ),
    KnownBug(
        (2, 13, 0),
        (2, 13, 0),
        "ranks of several tensor-parallel groups that share Inductor's cache may find each other's graphs of DTensors, "
        "which name the other rank's group (RuntimeError: Could not resolve the process group)",
        "give each rank a TORCHINDUCTOR_CACHE_DIR of its own",
    ),
)


def known_bugs(facts: Facts) -> Iterator[Finding]:
    """Say what is known to be broken in this version of torch, whether or not a program meets it."""
    version = _version(facts.torch or "")
    for bug in KNOWN_BUGS:
        if version and bug.concerns(version) and (facts.micro_pipeline or not bug.micro_pipeline):
            yield Finding("torch bug", "warn", bug.text, bug.remedy)


# --- the answer ------------------------------------------------------------------------------------------------
CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    own_version,
    torch_version,
    torch_build,
    python_version,
    triton_version,
    interpreter,
    driver_version,
    gpu_models,
    gpu_count,
    peer_access,
    stream_memory_ops,
    symmetric_memory,
    runtime_variables,
    forced_implementation,
    cuda_variables,
    tuning_table,
    known_bugs,
    options,
)


def diagnose(facts: Facts) -> list[Finding]:
    """All findings: the versions of asynctp and torch first, the verdict last."""
    findings = [finding for check in CHECKS for finding in check(facts)]
    return [*findings, verdict(facts, findings)]


def verdict(facts: Facts, findings: Iterable[Finding]) -> Finding:
    """Say what the fused ops will do here, in one line."""
    failed = [finding for finding in findings if finding.status == "fail"]
    if failed:
        return Finding("verdict", "fail", f"not usable as asked: {failed[0].name}: {failed[0].text}")
    if not facts.gpus:
        asked = facts.environment.get(CPU_VARIABLE) == "interpreted"
        what = "interpreted kernels run" if asked else "reference implementation runs"
        return Finding("verdict", "info", f"CPU only: the {what}")
    reasons = list(sequential_reasons(facts))
    if reasons:
        return Finding("verdict", "warn", f"the fused ops run sequentially here: {'; '.join(reasons)}")
    gemm = all(gpu.capability[0] == GEMM_CAPABILITY for gpu in facts.gpus)
    return Finding("verdict", "ok", f"the fused ops run overlapped here{'' if gemm else ', without the fused GEMM'}")


def sequential_reasons(facts: Facts) -> Iterator[str]:
    """Why the ops do not overlap on these GPUs; nothing when they do."""
    if facts.environment.get(CUDA_VARIABLE) == "sequential":
        yield f"{CUDA_VARIABLE} asks for it"
    if facts.triton is None:
        yield "triton is missing"
    elif facts.symmetric_memory is None:
        yield "torch has no symmetric memory for CUDA"
    if len(facts.gpus) == 1:
        yield "there is one GPU"
    elif len(facts.unreachable) == len(facts.gpus) * (len(facts.gpus) - 1) // 2:
        yield "no GPU reaches another one's memory"
    elif facts.unreachable:
        yield f"groups with GPUs {_pairs(facts.unreachable)} have no peer access (others overlap)"


def usable(findings: Iterable[Finding]) -> bool:
    """Nothing failed."""
    return all(finding.status != "fail" for finding in findings)


def render(findings: Sequence[Finding]) -> str:
    """The findings as a table, remedies indented below their lines, and the verdict as the last line."""
    *rows, last = findings
    width = max(len(row.name) for row in rows) if rows else 0
    lines = []
    for row in rows:
        lines.append(f"{row.status:<4}  {row.name:<{width}}  {row.text}")
        if row.remedy and row.status != "ok":
            lines.append(f"{'':<4}  {'':<{width}}  → {row.remedy}")
    return "\n".join([*lines, "", last.text])


# --- for an issue ----------------------------------------------------------------------------------------------
def bug_report(facts: Facts, findings: Sequence[Finding], reports: Sequence[Report], names: Sequence[str]) -> str:
    """The text for an issue about asynctp, in Markdown: findings, the environment, and the last reports.

    Args:
        reports: As `last_reports` gives them.
        names: Of the user and the host, which must not be in it; nor are paths.
    """
    environment = [f"{name}={value}" for name, value in sorted(facts.environment.items())]
    parts = [
        (f"asynctp {facts.version}, torch {facts.torch}", render(findings)),
        ("Environment", "\n".join(environment) or "no variable of asynctp's is set"),
        *((f"Report {number} of {len(reports)}", str(report)) for number, report in enumerate(reports, 1)),
    ]
    if not reports:
        parts.append(("Reports", f"none: set {REPORTS_VARIABLE} to a file, run the program, and ask again here"))
    text = "\n\n".join(f"### {title}\n\n```text\n{body.strip()}\n```" for title, body in parts)
    return without_places(text, names)


#: from a root, a home or a working directory on; or some folders and a file with a suffix
_PATHS = re.compile(r"(?<![\w/.])(?:~|\.{1,2})?/[\w/.@+~%=-]+|(?<![\w/])[\w.@+-]+(?:/[\w.@+-]+)+\.\w+")


def without_places(text: str, names: Sequence[str]) -> str:
    """A text without paths and without these names. Of a path to a file with a suffix the file's name stays."""

    def shortened(path: re.Match[str]) -> str:
        last = path.group().rstrip("/.").rpartition("/")[2]
        return f"…/{last}" if re.search(r"\w\.\w+$", last) else "…"

    text = _PATHS.sub(shortened, text)
    for name in sorted(filter(None, names), key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text)
    return text


def last_reports(environ: Mapping[str, str], folder: Path) -> list[Report]:
    """The newest reports of the file that `ASYNCTP_REPORT_FILE` names, or of the newest such file in `folder`."""
    named = environ.get(REPORTS_VARIABLE)
    paths = filter(Path.is_file, [Path(named)] if named else folder.glob("*.jsonl"))  # no endless pipe, nor a dead link
    newest = sorted(paths, key=lambda path: _try(lambda: path.stat().st_mtime, 0.0), reverse=True)
    return next((found for path in newest if (found := _reports_of(path))), [])


def _reports_of(path: Path) -> list[Report]:
    """The last reports of a file, the oldest first; none of what is no file of reports."""
    lines = _try(lambda: path.read_text("utf-8", "replace"), "").splitlines()
    found = (_try(functools.partial(Report.from_json, line), None) for line in lines[-REPORTS:])
    return [report for report in found if report is not None]


def own_names() -> tuple[str, ...]:
    """The names of the user and of the host."""
    host = _try(socket.gethostname, "")
    return _try(getpass.getuser, ""), host, host.partition(".")[0]


# --- the machine -----------------------------------------------------------------------------------------------
def gather_facts() -> Facts:
    """Ask torch, triton, the driver and the environment. What cannot be asked is as on a machine without it."""
    torch, triton = (_module(name)[0] for name in ("torch", "triton"))
    kernels_error = _module("asynctp_kernels.cuda")[1]
    torch_private, select, driver = (
        _module(f"asynctp_kernels.{name}")[0] for name in ("torch_private", "cuda.choose.select", "cuda.runtime.driver")
    )
    choice, asked = _module("asynctp_passes.ops.choice")[0], os.environ.get(CPU_VARIABLE) == "interpreted"
    interpreted = bool(_try(lambda: triton.knobs.runtime.interpret, False))
    gluon_error = None if interpreted else _module("asynctp_kernels.cuda.gemm.pingpong_kernels")[1]
    edited = _module("asynctp_kernels.cuda.runtime.edited")[0]
    path = str(_try(lambda: select.table_path(), ""))
    table_gpus, table_error = _read_table(path, lambda place: select.read_tuned(place))
    gpus = _gpus(torch, driver)
    native = _try(lambda: edited.native(), None) if gpus and not interpreted else None
    kernels = _try(lambda: importlib.util.find_spec("asynctp_kernels"), None)
    return Facts(
        version=_version_of(sys.modules["asynctp_passes"]) or "",
        installed=_try(lambda: metadata.version("asynctp-passes"), ""),
        places=(str(Path(__file__).parent), str(Path(kernels.origin).parent) if kernels and kernels.origin else ""),
        options_error=_fault(Config.from_options),
        python=sys.version_info[:3],
        torch=_version_of(torch),
        torch_cuda=_try(lambda: torch.version.cuda, None),
        triton=_version_of(triton),
        interpreted=interpreted,
        interpreter_fault=_fault(lambda: choice.kernels_or_none(torch.empty(0))) if asked and choice else "",
        kernels_error=kernels_error,
        gluon_error=gluon_error,
        native_error=native if isinstance(native, str) else None,
        driver=_try(lambda: driver.driver_version(), None),
        peer_writes=_try(lambda: driver.peer_writes_supported(), None),
        gpus=gpus,
        unreachable=_unreachable(torch, len(gpus)),
        symmetric_memory=_try(lambda: torch_private.symmetric_memory_backend(), None),
        micro_pipeline=_try(lambda: torch_private.micro_pipeline_enabled(), False),
        implementations=_try(lambda: select.offered(), CUDA_IMPLEMENTATIONS),
        environment=own_variables(os.environ)
        | {name: os.environ[name] for name in OTHER_VARIABLES if name in os.environ},
        table_path=path,
        table_gpus=table_gpus,
        table_error=table_error,
    )


def _module(name: str) -> tuple[Any, str | None]:
    """A module and None, or None and why it cannot be imported, whatever that is: broken installs are our trade."""
    try:
        return importlib.import_module(name), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _try(question: Callable[[], T], otherwise: T) -> T:
    """The answer, or `otherwise` where asking fails: the doctor must not die of what the machine has."""
    try:
        return question()
    except Exception:
        return otherwise


def _fault(question: Callable[[], object]) -> str:
    """The error of a question, as the user reads it; empty without one."""
    try:
        question()
    except (ConfigError, RuntimeError) as error:
        return str(error)
    return ""


def _version_of(module: ModuleType | None) -> str | None:
    return None if module is None else str(getattr(module, "__version__", "0"))


def _gpus(torch: Any, driver: Any) -> tuple[Gpu, ...]:
    if not _try(lambda: torch.version.cuda and torch.cuda.is_available(), False):
        return ()
    numbers = (CAN_USE_64_BIT_STREAM_MEM_OPS, CAN_USE_STREAM_WAIT_VALUE_NOR)

    def found(index: int) -> Gpu:
        reported = _try(lambda: any(driver.device_attribute(index, number) for number in numbers), None)
        return Gpu(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), reported)

    return tuple(map(found, range(torch.cuda.device_count())))


def _unreachable(torch: Any, count: int) -> tuple[tuple[int, int], ...]:
    return tuple(
        (a, b)
        for a, b in itertools.combinations(range(count), 2)
        if not (torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a))
    )


def _read_table(path: str, read: Callable[[Path], Iterable[str]]) -> tuple[tuple[str, ...] | None, str]:
    """The GPUs that the tuning table at `path` names, None without such a file; and why it cannot be read."""
    if not path or not os.path.exists(path):
        return None, ""
    try:
        return tuple(read(Path(path))), ""
    except (OSError, ValueError, RecursionError) as error:
        return None, str(error)
