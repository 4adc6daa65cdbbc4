"""The only file of this package that touches private torch APIs, and those whose names depend on the version."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def process_group(group: Any) -> ProcessGroup:
    """The group, from it, its name, a DeviceMesh of one dimension or `(DeviceMesh, dim)`.

    Raises:
        ValueError: It is none of these, or there is no such group.
    """
    if isinstance(group, ProcessGroup):
        return group
    try:
        if isinstance(group, str):
            return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
        mesh, *dim = group if isinstance(group, tuple) else (group,)
        found: ProcessGroup = mesh.get_group(*dim)
        return found
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"asynctp: group={group!r} is not valid; it must be a ProcessGroup, the name of one, a DeviceMesh of one "
            "dimension or (DeviceMesh, dim)"
        ) from error


@functools.cache
def group_resolver() -> Callable[[str], ProcessGroup]:
    """The function that gives the group of a name; looked up once, for every call of an op needs it.

    It raises RuntimeError where no group has the name (torch's own message).
    """
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve  # type: ignore[no-any-return]


def group_store(group: ProcessGroup) -> Any:
    """The key-value store that the ranks of `group` share; keys of other groups are not seen in it.

    Raises:
        KeyError: torch.distributed does not know the group, or not any more.
    """
    return dist.distributed_c10d._get_process_group_store(group)


def group_timeout_s(group: ProcessGroup) -> float:
    """Seconds after which the group's own collectives run out; torch's default where the backend does not say."""
    for device in ("cuda", "cpu"):
        try:
            options: Any = group._get_backend(torch.device(device)).options
            seconds: float = options._timeout.total_seconds()
        except (AttributeError, RuntimeError):
            continue
        return seconds
    return dist.distributed_c10d.default_pg_timeout.total_seconds()


def symmetric_empty(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes of memory that `symmetric_rendezvous` can share. Shape: [size] uint8."""
    import torch.distributed._symmetric_memory as symm_mem

    return symm_mem.empty(size, dtype=torch.uint8, device=device)


def symmetric_rendezvous(memory: torch.Tensor, group: ProcessGroup) -> Any:
    """Share `memory` with every rank of `group` (collective); gives torch's handle, with `buffer_ptrs` by rank."""
    import torch.distributed._symmetric_memory as symm_mem

    return symm_mem.rendezvous(memory, group.group_name)


def symmetric_memory_backend() -> str | None:
    """Name of the backend that shares memory of GPUs, such as "CUDA"; None where torch has none."""
    import torch.distributed._symmetric_memory as symm_mem

    return symm_mem.get_backend(torch.device("cuda"))


def micro_pipeline_enabled() -> bool:
    """Inductor's own async TP pass is on. It cannot be where nobody has imported Inductor, and this does not."""
    return bool(getattr(sys.modules.get("torch._inductor.config"), "_micro_pipeline_tp", False))


def new_tensors(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that makes a contiguous tensor, not initialized, on `device`, which must then be the current one.

    As the code that Inductor generates does it, in a third of the host time of `torch.empty`.
    """
    guards: Any = torch._C._dynamo.guards
    make = guards._empty_strided_cpu if device.type == "cpu" else guards._empty_strided_cuda
    strides = torch.empty(*shape, device="meta").stride()
    return functools.partial(make, tuple(shape), strides, dtype)


#: the current GPU, in a process that has memory on one: `torch.cuda.current_device` looks whether it has. These are
#: functions of C, which each call asks; torch for CPUs lacks them, and asks none.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
#: the driver handle of the current stream of a GPU of this index, without a Python stream object
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
#: whether the current stream is being captured in a CUDA graph
is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)


@functools.cache
def _waits() -> Callable[[torch.Tensor, Callable[[], None]], None]:
    """`register_wait`, with one class for all calls.

    A class is part of a reference cycle, and would keep what it refers to until a GC.
    """
    from torch._C._distributed_c10d import Work, _register_work

    class Waited(Work):
        def __init__(self, on_wait: Callable[[], None]) -> None:
            super().__init__()
            self.on_wait = on_wait

        def wait(self, timeout: timedelta = timedelta(0)) -> bool:
            self.on_wait()
            return True

    def register(result: torch.Tensor, on_wait: Callable[[], None]) -> None:
        _register_work(result, Waited(on_wait))

    return register


def register_wait(result: torch.Tensor, wait: Callable[[], None]) -> None:
    """Let `_c10d_functional.wait_tensor(result)` call `wait`, which makes the current stream wait for the result.

    `wait`, and what it refers to, is kept until then and no longer.
    """
    _waits()(result, wait)


def gather_into(whole: torch.Tensor, shard: torch.Tensor, group: ProcessGroup) -> None:
    """Fill contiguous `whole` with all ranks' contiguous shards, in rank order, on the current stream."""
    if shard.itemsize == 1:  # not every backend knows fp8
        whole, shard = whole.view(torch.uint8), shard.view(torch.uint8)
    if hasattr(dist, "all_gather_single"):  # since torch 2.13
        dist.all_gather_single(whole, shard, group=group)
    else:
        dist.all_gather_into_tensor(whole, shard, group=group)


def scatter_into(part: torch.Tensor, whole: torch.Tensor, reduce_op: str, group: ProcessGroup) -> None:
    """Fill contiguous `part` with this rank's rows of the "sum" or "avg" of contiguous `whole`."""
    op = dist.ReduceOp.AVG if reduce_op == "avg" else dist.ReduceOp.SUM
    if hasattr(dist, "reduce_scatter_single"):
        dist.reduce_scatter_single(part, whole, op, group=group)
    else:
        dist.reduce_scatter_tensor(part, whole, op, group=group)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """`torch._scaled_mm` of 2-D operands, `b` column-major, into `out` if given."""
    return torch._scaled_mm(a, b, a_scale, b_scale, bias=bias, out_dtype=out_dtype, use_fast_accum=fast, out=out)


def int_mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """`a @ b` of int8 in int32, into `out` if given.

    CUDA's takes more than 16 rows, and sizes that are multiples of 8: operands of others are padded.
    """
    (rows, depth), columns = a.shape, b.shape[1]
    more = (max(17, rows) - rows, -depth % 8, -columns % 8)
    if not a.is_cuda or not any(more):
        return torch._int_mm(a, b, out=out)
    a = torch.nn.functional.pad(a, (0, more[1], 0, more[0]))
    b = torch.nn.functional.pad(b.t(), (0, more[1], 0, more[2])).t()
    found = torch._int_mm(a, b)[:rows, :columns]
    return found.contiguous() if out is None else out.copy_(found)


def scaled_mm_in_blocks(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scaling_types: tuple[int, int],
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_mm` with scales of blocks, as that wants them, into `out` if given.

    scaling_types: values of `torch.nn.functional.ScalingType`, of A and of B.
    """
    of_a, of_b = scaling_types
    op = torch.ops.aten._scaled_mm_v2
    scales: tuple[Any, ...] = ([a_scale], [of_a], [], [b_scale], [of_b], [])
    args: tuple[Any, ...] = (a, b, *scales, bias, out_dtype, [])
    result: torch.Tensor = op.default(*args, fast) if out is None else op.out(*args, fast, out=out)
    return result
