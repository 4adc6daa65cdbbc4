"""Launching a compiled Triton kernel: compiled once per plan, called without specialisation.

`kernel[grid](...)` inspects every argument of every call. A plan's arguments differ from call to call in addresses
only, so `prepare` compiles once and keeps `CompiledKernel[grid]`, Triton's own call without the inspection.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from asynctp_kernels.cuda.runtime import driver as gpu
from asynctp_kernels.signals import IS_INTERPRETED

#: a CTA of fewer bytes of shared memory leaves an SM's divided as a GEMM wants it (direct kernels have 2048)
SMALL = 4096
#: most that a kernel takes which runs beside a GEMM's CTA: its warps, registers of a thread, bytes of shared memory
BESIDE_WARPS, BESIDE_REGISTERS, BESIDE_SHARED = 8, 56, 512
#: of an SM. Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
REGISTERS = 64 << 10
#: a multiplication and an addition may be one instruction. Said for each kernel: Triton's own default changes in 3.10.
FUSION = {"enable_fp_fusion": True}


class Tma:
    """A TMA descriptor's fields, for a launch: what `TensorDescriptor` holds, without a tensor being kept alive.

    Args:
        template: The descriptor that the kernel was compiled with; only the address may differ.
        address: Bytes; a multiple of 16.
    """

    __slots__ = ("address", "block_shape", "padding", "round_f32_to_tf32", "shape", "strides")

    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: str

    def __init__(self, template: TensorDescriptor | Tma, address: int) -> None:
        self.shape, self.strides, self.block_shape = template.shape, template.strides, template.block_shape
        self.padding = template.padding
        self.round_f32_to_tf32 = getattr(template, "round_f32_to_tf32", False)
        self.address = address

    @property
    def base(self) -> Tma:
        """Itself, which has `data_ptr`."""
        return self

    def data_ptr(self) -> int:
        return self.address


def outlines(descriptors: Sequence[TensorDescriptor]) -> list[Tma]:
    """Templates for `Tma` without the tensors: a plan outlives the call that it was made for, and holds no memory."""
    return [Tma(descriptor, 0) for descriptor in descriptors]


def grid(wanted: int, most: int) -> int:
    """How many CTAs to launch: `most`, or the next power of two, so that few kernels are compiled for small calls."""
    return min(most, 1 << max(wanted - 1, 0).bit_length())


def describe(
    like: torch.Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
) -> TensorDescriptor:
    """A TMA descriptor template over `like`'s memory: sizes, strides and block in elements, last stride 1."""
    return TensorDescriptor(like, list(shape), list(strides), list(block))


@dataclass(frozen=True)
class Launch:
    """A compiled kernel, called as `launch(stream, args)`, and what one CTA of it needs of an SM."""

    run: Callable[[int, Sequence[Any]], None]
    threads: int
    registers: int
    shared: int

    def __call__(self, stream: int, values: Sequence[Any]) -> None:
        self.run(stream, values)
        gpu.note(stream, values)


class NotCompiled(RuntimeError):
    """Triton does not compile a kernel; the cause is what it says."""


def prepare(
    kernel: Any,
    programs: int,
    args: Sequence[Any],
    constants: dict[str, Any],
    num_warps: int,
    **options: Any,
) -> Launch:
    """Compile `kernel` for arguments like `args` and load it; where Triton interprets, there is nothing to compile.

    Args:
        kernel: A `@triton.jit` function whose constexpr parameters come last.
        programs: Size of the grid.
        args: Example arguments: tensors, descriptors, integers, floats, None.
        constants: The constexpr parameters, in the order of the signature.
        num_warps: Warps of a CTA, without those that the kernel gives other tasks; `options` are Triton's others:
            `num_stages`, `maxnreg`.

    Raises:
        NotCompiled: See there.
    """
    if IS_INTERPRETED:
        from asynctp_kernels.cuda.runtime import interpreted

        return Launch(_by_triton(interpreted.prepare(kernel, programs, args), constants), 32 * num_warps, 0, 0)
    try:
        options = {**constants, **options, **FUSION, "num_warps": num_warps}
        compiled = kernel.warmup(*args, grid=(programs, 1, 1), **options)
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
    except Exception as error:
        raise NotCompiled(f"{kernel.__name__}: {type(error).__name__}: {error}") from error
    run = _by_triton(compiled[(programs, 1, 1)], constants)
    shared: int = compiled.metadata.shared
    if shared < SMALL:
        gpu.leave_shared_memory(compiled.function)
    return Launch(run, 32 * compiled.metadata.num_warps, int(compiled.n_regs), shared)


def _by_triton(run: Callable[..., None], constants: dict[str, Any]) -> Callable[[int, Sequence[Any]], None]:
    tail = tuple(constants.values())
    return lambda stream, values: run(*values, *tail, stream=stream)


def fit_together(first: Launch, second: Launch) -> bool:
    """Whether one CTA of each fits on one SM of compute capability 9 at the same time.

    Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 64 K registers, allocated in
    units of 8 a thread, and 228 KB of shared memory, of which each CTA takes 1 KB for the system.
    """
    registers = sum(-(-launch.registers // 8) * 8 * launch.threads for launch in (first, second))
    return registers <= REGISTERS and first.shared + second.shared + (2 << 10) <= 228 << 10


def leaves_room(gemm: Launch) -> bool:
    """Whether one CTA of any kernel that stages or reduces fits on an SM beside a GEMM's."""
    return fit_together(gemm, Launch(gemm.run, 32 * BESIDE_WARPS, BESIDE_REGISTERS, BESIDE_SHARED))


def align(size: int, unit: int = 256) -> int:
    """`size` in bytes rounded up, so that what follows it is aligned for every dtype and for wide loads."""
    return -(-size // unit) * unit


def misaligned(addresses: Sequence[int]) -> int:
    """Whether one of these is no multiple of 16."""
    return functools.reduce(operator.or_, addresses) % 16


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` contiguous at an address that TMA and the kernels take (a multiple of 16), copied if it is not.

    No choice depends on alignment: ranks whose tensors differ in it must still run the same implementation.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def aligned_columns(b: torch.Tensor) -> torch.Tensor:
    """`b` of either memory order at such an address; strides stay."""
    if b.data_ptr() % 16 == 0:
        return b
    copy = torch.empty_strided(b.shape, b.stride(), dtype=b.dtype, device=b.device)
    return copy.copy_(b)


def dense(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """Scales or biases as matmuls read them, element after element, at multiples of 16 bytes; None stays None."""
    return [None if tensor is None else aligned(tensor) for tensor in tensors]
