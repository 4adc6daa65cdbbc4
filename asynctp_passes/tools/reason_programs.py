"""Programs of reasons: for each code that is MISSED, one that gives it, and the same program mended.

`asynctp reasons CODE` prints them, and the page of all reasons shows them. `tests/integration/test_reason_programs.py`
compiles both of each: the first gives its code; the second has a fused chain, and nothing is missed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor

from asynctp_passes.reasons import CATALOGUE

RANKS = 4
"""Size of the group that the programs are written for."""


@dataclass(frozen=True)
class Program:
    """A program of tensors and a group.

    Attributes:
        call: The function; its last argument is the group.
        tensors: Sizes of each tensor, in the order of the arguments. A dtype may come last; a name is a dynamic size.
        options: Options of torch.compile that it needs.
    """

    call: Callable[..., Any]
    tensors: tuple[list[Any], ...]
    options: dict[str, bool]


PROGRAMS: dict[str, list[Program]] = {}
"""Two programs of each code: the missed one, and the mended one."""


def source_of(code: str) -> str:
    """The source of both programs of a code, or a comment that says why there is none; empty for other codes."""
    if why := next((one.no_program for one in CATALOGUE.values() if one.code == code), ""):
        return f"# No program gives it on a CPU: {why}.\n"
    return "\n\n".join(inspect.getsource(program.call) for program in PROGRAMS.get(code, ()))


def script_of(code: str) -> str:
    """Both programs of a code as a script that runs on ranks, and prints what becomes of each; else as `source_of`."""
    if code not in PROGRAMS:
        return source_of(code)
    functions = "\n\n".join(re.sub(r"^@takes.*\n", "", source) for source in map(_source, PROGRAMS[code]))
    runs = "\n".join(map(_run, PROGRAMS[code]))
    return f"{_HEAD}\n\n\n{functions}\n\n{_SETUP}\n{runs}\nif dist.get_rank() == 0:\n    {_SHOW}\n"


def _source(program: Program) -> str:
    return inspect.getsource(program.call)


_HEAD = f"""\
# torchrun --nproc-per-node {RANKS} FILE.py
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor

import asynctp_passes"""
_SETUP = 'dist.init_process_group("gloo")\ntorch.set_grad_enabled(False)'
_SHOW = 'print(*asynctp_passes.reports(), sep="\\n")'


def _run(program: Program) -> str:
    """The statement that runs a program. A dynamic dimension has 12 elements."""
    tensors = []
    for sizes in program.tensors:
        *rest, dtype = sizes if sizes and isinstance(sizes[-1], torch.dtype) else (*sizes, None)
        numbers = [12 if isinstance(size, str) else size for size in rest]
        tensors.append(f"torch.ones({numbers})" + (f".to({dtype})" if dtype else ""))
    dynamic = ", dynamic=True" if any(isinstance(size, str) for sizes in program.tensors for size in sizes) else ""
    options = {"strict": "off", **program.options}
    call = f'torch.compile({program.call.__name__}, backend="asynctp", options={options}{dynamic})'
    return f"{call}(\n    {', '.join(tensors)}, dist.group.WORLD\n)"


def takes(**arguments: list[Any] | bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function in the table, by its name: `atp101_missed`, then `atp101_mended`."""
    tensors = tuple(value for value in arguments.values() if isinstance(value, list))
    options = {name: value for name, value in arguments.items() if isinstance(value, bool)}

    def enter(call: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.setdefault(call.__name__[:6].upper(), []).append(Program(call, tensors, options))
        return call

    return enter


@torch.library.custom_op("asynctp_reasons::exchange", mutates_args=())
def exchange(x: Tensor) -> Tensor:
    """An unregistered op of another library: it may communicate."""
    return x.clone()


exchange.register_fake(torch.empty_like)


# --- 1xx structure -----------------------------------------------------------------------------------------------
@takes(x=[4, 8], w=[8, 12])
def atp101_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    return torch.cat(whole.chunk(4)[::-1]) @ w


@takes(x=[4, 8], w=[8, 12])
def atp101_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    out = all_gather_tensor(x, 0, group) @ w
    return torch.cat(out.chunk(4)[::-1])


@takes(x=[4, 8], w=[8, 12])
def atp102_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor(x, 0, group).repeat(2, 1) @ w


@takes(x=[4, 8], w=[8, 12])
def atp102_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return (all_gather_tensor(x, 0, group) @ w).repeat(2, 1)


@takes(x=[4, 8], w=[8, 12])
def atp103_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor(x, 0, group)[:8] @ w


@takes(x=[4, 8], w=[8, 12])
def atp103_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return (all_gather_tensor(x, 0, group) @ w)[:8]


@takes(x=[4, 8], prefix=[2, 8], w=[8, 12])
def atp104_missed(x: Tensor, prefix: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    return torch.cat([prefix, whole]) @ w


@takes(x=[4, 8], prefix=[2, 8], w=[8, 12])
def atp104_mended(x: Tensor, prefix: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    return torch.cat([prefix @ w, whole @ w])


@takes(x=[4, 8], w=[8, 12])
def atp105_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    return F.rms_norm(whole, [8]) @ w


@takes(x=[4, 8], w=[8, 12])
def atp105_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    norm = F.rms_norm(x, [8])
    return all_gather_tensor(norm, 0, group) @ w


@takes(x=[4, 32], w=[16, 32, torch.float8_e4m3fn], w_scale=[1, 16])
def atp106_missed(x: Tensor, w: Tensor, w_scale: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    scale = whole.abs().mean(1, keepdim=True) / 64
    fp8 = (whole / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch._scaled_mm(fp8, w.t(), scale, w_scale, out_dtype=torch.bfloat16)


@takes(x=[4, 32], w=[16, 32, torch.float8_e4m3fn], w_scale=[1, 16])
def atp106_mended(x: Tensor, w: Tensor, w_scale: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    scale = whole.abs().amax(1, keepdim=True) / 448
    fp8 = (whole / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch._scaled_mm(fp8, w.t(), scale, w_scale, out_dtype=torch.bfloat16)


@takes(x=[4, 8], w=[32, 12])
def atp107_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    pieces = all_gather_tensor(x, 0, group).chunk(4)
    return torch.stack(pieces, dim=2).flatten(1) @ w  # the ranks' numbers alternate in each row


@takes(x=[4, 8], w=[32, 12])
def atp107_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    pieces = all_gather_tensor(x, 0, group).chunk(4)
    return torch.cat(pieces, dim=1) @ w  # and here follow one another; the rows of w are in the same order


@takes(x=["rows", 8], w=[96, 12])
def atp108_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor(x, 0, group).view(-1, 96) @ w


@takes(x=[12, 8], w=[96, 12])
def atp108_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor(x, 0, group).view(-1, 96) @ w


@takes(a=[16, 8], w=[8, 12], v=[6, 16])
def atp109_missed(a: Tensor, w: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
    x = reduce_scatter_tensor(a @ w, "sum", 0, group)
    return v @ all_gather_tensor(x, 0, group)


@takes(a=[16, 8], w=[8, 12], v=[6, 16], u=[12, 8])
def atp109_mended(a: Tensor, w: Tensor, v: Tensor, u: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    x = reduce_scatter_tensor(a @ w, "sum", 0, group)
    whole = all_gather_tensor(x, 0, group)
    return v @ whole, whole @ u  # the second one overlaps with the gather


@takes(a=[16, 8], w=[8, 12])
def atp110_missed(a: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return reduce_scatter_tensor(a @ w + 0.25, "sum", 0, group)


@takes(a=[16, 8], w=[8, 12])
def atp110_mended(a: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return reduce_scatter_tensor(a @ w, "sum", 0, group) + 1  # once for each rank


@takes(a=[16, 8], w=[8, 12], residual=[16, 12])
def atp111_missed(a: Tensor, w: Tensor, residual: Tensor, group: ProcessGroup) -> Tensor:
    return reduce_scatter_tensor(residual + (a @ w + residual), "sum", 0, group)


@takes(a=[16, 8], w=[8, 12], residual=[16, 12])
def atp111_mended(a: Tensor, w: Tensor, residual: Tensor, group: ProcessGroup) -> Tensor:
    return reduce_scatter_tensor(a @ w + 2 * residual, "sum", 0, group)


@takes(x=[4, 8], w=[8, 12], whole=[16, 8])
def atp113_missed(x: Tensor, w: Tensor, whole: Tensor, group: ProcessGroup) -> Tensor:
    gather = torch.ops._c10d_functional.all_gather_into_tensor_out
    out = torch.ops._c10d_functional.wait_tensor(gather(x, 4, group.group_name, out=whole))
    return out @ w  # the gather wrote into a tensor of the program


@takes(x=[4, 8], w=[8, 12])
def atp113_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor(x, 0, group) @ w


@takes(x=[15, 8], w=[8, 12], residual=[16, 12])
def atp114_missed(x: Tensor, w: Tensor, residual: Tensor, group: ProcessGroup) -> Tensor:
    padded = F.pad(x @ w, (0, 0, 0, 1))  # 15 tokens
    return reduce_scatter_tensor(padded + residual, "sum", 0, group)


@takes(x=[15, 8], w=[8, 12], residual=[15, 12])
def atp114_mended(x: Tensor, w: Tensor, residual: Tensor, group: ProcessGroup) -> Tensor:
    padded = F.pad(x @ w + residual, (0, 0, 0, 1))
    return reduce_scatter_tensor(padded, "sum", 0, group)


@takes(x=[1, 4, 8], w=[4, 8, 12])
def atp115_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return torch.bmm(all_gather_tensor(x, 0, group), w)  # a weight for each sequence


@takes(x=[1, 4, 8], w=[8, 12])
def atp115_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor(x, 0, group) @ w


@takes(x=[3, 6], w=[6, 10])
def atp116_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    whole = F.pad(all_gather_tensor(x, 0, group), (0, 2, 0, 4))
    return (whole @ F.pad(w, (0, 6, 0, 2)))[:-4, :-6]


@takes(x=[3, 6], w=[6, 10])
def atp116_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor(x, 0, group) @ w


@takes(x=[4, 8], w=[8, 12])
def atp117_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    return (whole - whole.mean()) @ w


@takes(x=[4, 8], w=[8, 12])
def atp117_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    mean = all_reduce(x.mean(), "avg", group)
    return all_gather_tensor(x - mean, 0, group) @ w


@takes(a=[16, 8], w=[8, 12], dy=[16, 6])
def atp118_missed(a: Tensor, w: Tensor, dy: Tensor, group: ProcessGroup) -> Tensor:
    x = reduce_scatter_tensor(a @ w, "sum", 0, group).view(2, 2, 12)  # the batch comes first, then the sequence
    whole = torch.cat(all_gather_tensor(x, 0, group).chunk(4), dim=1)
    return whole.flatten(0, 1).t() @ dy


@takes(a=[16, 8], w=[8, 12], dy=[16, 6], v=[12, 8])
def atp118_mended(a: Tensor, w: Tensor, dy: Tensor, v: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    x = reduce_scatter_tensor(a @ w, "sum", 0, group).view(2, 2, 12)
    whole = torch.cat(all_gather_tensor(x, 0, group).chunk(4), dim=1)
    return whole.flatten(0, 1).t() @ dy, whole.flatten(0, 1) @ v  # the second one overlaps with the gather


@takes(x=[4, 8], w=[8, 12])
def atp120_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    print("gathered", whole.shape)  # torch.compile ends one graph here, and begins the next
    return whole @ w


@takes(x=[4, 8], w=[8, 12])
def atp120_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    out = whole @ w
    print("gathered", whole.shape)
    return out


@takes(x=[4, 8], w=[8, 12])
def atp121_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    return whole.cumsum(1) @ w


@takes(x=[4, 8], w=[8, 12])
def atp121_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    summed = x.cumsum(1)  # along each row
    return all_gather_tensor(summed, 0, group) @ w


# --- 2xx legality ------------------------------------------------------------------------------------------------
@takes(a=[16, 8], w=[8, 12])
def atp201_missed(a: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return reduce_scatter_tensor(a @ w, "max", 0, group)


@takes(a=[16, 8], w=[8, 12])
def atp201_mended(a: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return reduce_scatter_tensor(a @ w, "sum", 0, group)


@takes(a=[16, 8], w=[8, 12])
def atp202_missed(a: Tensor, w: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    part = a @ w
    return reduce_scatter_tensor(part, "sum", 0, group), part.relu()


@takes(a=[16, 8], w=[8, 12])
def atp202_mended(a: Tensor, w: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    out = reduce_scatter_tensor(a @ w, "sum", 0, group)
    return out, out.relu()


@takes(x=[4, 8], v=[16, 8])
def atp203_missed(x: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    return (whole @ whole.t()) @ v


@takes(x=[4, 8], v=[4, 8])
def atp203_mended(x: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
    state = all_reduce(x.t() @ v, "sum", group)  # whole.t() @ v first: each rank multiplies its own rows of both
    return all_gather_tensor(x, 0, group) @ state


@takes(x=[4, 8], w=[8, 12], bias=[12])
def atp205_missed(x: Tensor, w: Tensor, bias: Tensor, group: ProcessGroup) -> Tensor:
    return torch.addmm(bias, all_gather_tensor(x, 0, group), w, alpha=2)


@takes(x=[4, 8], w=[8, 12], bias=[12])
def atp205_mended(x: Tensor, w: Tensor, bias: Tensor, group: ProcessGroup) -> Tensor:
    return torch.addmm(bias, all_gather_tensor(x, 0, group), 2 * w)


@takes(x=[4, 32, torch.float8_e4m3fn], w=[16, 32, torch.float8_e4m3fn], one=[], result_scale=[])
def atp206_missed(x: Tensor, w: Tensor, one: Tensor, result_scale: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    return torch._scaled_mm(whole, w.t(), one, one, scale_result=result_scale, out_dtype=torch.float8_e4m3fn)


@takes(x=[4, 32, torch.float8_e4m3fn], w=[16, 32, torch.float8_e4m3fn], one=[], result_scale=[])
def atp206_mended(x: Tensor, w: Tensor, one: Tensor, result_scale: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    out = torch._scaled_mm(whole, w.t(), one, one, out_dtype=torch.float32)
    return (out * result_scale).to(torch.float8_e4m3fn)


@takes(x=[4, 8], positions=[16, 8], w=[8, 12])
def atp208_missed(x: Tensor, positions: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return (all_gather_tensor(x, 0, group) + positions) @ w


@takes(x=[4, 8], positions=[4, 8], w=[8, 12])
def atp208_mended(x: Tensor, positions: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor(x + positions, 0, group) @ w  # each rank has those of its rows


@takes(x=[4, 8], w=[8, 12], fallback_random=True)
def atp209_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    return (whole + torch.rand_like(whole)) @ w


@takes(x=[4, 8], w=[8, 12], fallback_random=True)
def atp209_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    noisy = x + torch.rand_like(x)
    return all_gather_tensor(noisy, 0, group) @ w


@takes(x=[4, 8], w=[8, 12])
def atp210_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    whole = all_gather_tensor(x, 0, group)
    largest = all_reduce(whole.amax(), "max", group)
    mean = all_reduce(w, "avg", group)
    return whole @ mean, largest


@takes(x=[4, 8], w=[8, 12])
def atp210_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    mean = all_reduce(w, "avg", group)
    whole = all_gather_tensor(x, 0, group)
    return whole @ mean, all_reduce(whole.amax(), "max", group)


@takes(a=[16, 4], w=[4, 8])
def atp211_missed(a: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_reduce((a @ w).t().contiguous(), "sum", group)


@takes(a=[16, 4], w=[4, 8])
def atp211_mended(a: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_reduce(a @ w, "sum", group).t()


@takes(x=[4, 8], w=[8, 12])
def atp213_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    whole = all_gather_tensor(x, 0, group)
    return whole @ exchange(w)


@takes(x=[4, 8], w=[8, 12])
def atp213_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    weight = exchange(w)  # or, if it communicates with no other rank: register_local("asynctp_reasons::exchange")
    return all_gather_tensor(x, 0, group) @ weight


@takes(x=[4, 8], w=[8, 12], deviate=False)
def atp212_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor(x, 0, group).relu() @ w


@takes(x=[4, 8], w=[8, 12], deviate=False)
def atp212_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor(x.relu(), 0, group) @ w


# --- 3xx kernel limits -------------------------------------------------------------------------------------------
@takes(x=[4, 8, torch.int32], w=[8, 12, torch.int32])
def atp301_missed(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor(x, 0, group) @ w


@takes(x=[4, 8, torch.float32], w=[8, 12, torch.float32])
def atp301_mended(x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather_tensor(x, 0, group) @ w
