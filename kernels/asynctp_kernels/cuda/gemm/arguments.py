"""The tensors of a matmul, and all arguments of the GEMM's kernels (`gemm_kernels`, `pingpong_kernels`) in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor

from asynctp_kernels.cuda.runtime.launch import Tma, aligned, aligned_columns, dense, outlines

MAX_OPERANDS = 4
#: fields of which the kernels take `MAX_OPERANDS`, numbered
_DESCRIPTORS, _POINTERS, _SIZES = ("a", "b", "c"), ("a_scale", "b_scale", "bias"), ("k", "n")
_NUMBERED = (*_DESCRIPTORS, *_POINTERS, *_SIZES)


class Matrices(NamedTuple):
    """The tensors of `a @ b` for each B, with scales and biases.

    a: [M, K]. bs: [K, N] each. outs: [M, N] each, contiguous, at multiples of 16 bytes.
    a_scale, b_scales: float32, of A and of each B; none without. biases: one for each B, or None.
    """

    a: Tensor
    bs: Sequence[Tensor]
    outs: Sequence[Tensor]
    a_scale: Tensor | None = None
    b_scales: Sequence[Tensor] = ()
    biases: Sequence[Tensor | None] = (None,)

    def as_read(self) -> Matrices:
        """The same as our kernels read them: dense but for Bs, at multiples of 16 bytes. Others are copied."""
        a, bs, outs, a_scale, b_scales, biases = self
        (a_scale,) = dense([a_scale])
        return Matrices(aligned(a), [aligned_columns(b) for b in bs], outs, a_scale, dense(b_scales), dense(biases))


@dataclass(frozen=True)
class GemmArguments:
    """Arguments to compile a kernel for: tensors stand for pointers, descriptors for TMA's, and numbers are numbers.

    The order of the fields is that of the kernels' arguments, and is said here only. `gemm_kernel` says what each is.
    """

    a: Sequence[Any]
    b: Sequence[Any]
    c: Sequence[Any]
    a_scale: Sequence[Tensor]
    b_scale: Sequence[Tensor]
    bias: Sequence[Tensor]
    words: Tensor
    done_ptr: Tensor
    outer: int
    inner: int
    k: Sequence[int]
    n: Sequence[int]
    rank: int
    world: int
    chunk_size: int
    own_tiles: int
    value: int
    real_rows: int = 0

    def listed(self, unused: Any) -> list[Any]:
        """All, in the kernels' order; `unused` stands for tensors that are not there."""
        found: list[Any] = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in _NUMBERED:
                found.append(value)
                continue
            absent = None if each.name in _DESCRIPTORS else unused if each.name in _POINTERS else 0
            found += [*value, *[absent] * (MAX_OPERANDS - len(value))]
        return found

    def launched(self, unused: int) -> list[Any]:
        """The values of a launch, but for what differs by call: numbers, and the words' and the count's addresses."""
        found = [None] * len(_DESCRIPTORS) * MAX_OPERANDS + [unused] * len(_POINTERS) * MAX_OPERANDS
        rest = self.listed(None)[len(found) :]
        return found + [value.data_ptr() if isinstance(value, Tensor) else value for value in rest]


def names() -> list[str]:
    """The names of all arguments, in the kernels' order."""
    return [
        name
        for each in fields(GemmArguments)
        for name in ([f"{each.name}{i}" for i in range(MAX_OPERANDS)] if each.name in _NUMBERED else [each.name])
    ]


_PLACES = {name: place for place, name in enumerate(names())}


class CallArguments:
    """The arguments of each launch of a kernel: what stays, with a call's tensors filled in. It holds no tensor.

    Args:
        args: What the kernel was compiled for.
        unused: The address that stands for tensors that are not there.
    """

    def __init__(self, args: GemmArguments, unused: int) -> None:
        self._values = args.launched(unused)
        self._likes = {name: outlines(getattr(args, name)) for name in _DESCRIPTORS}

    def of(self, tensors: Mapping[str, Sequence[Tensor]], numbers: Mapping[str, int]) -> list[Any]:
        """All, in the kernels' order.

        tensors: The first ones of each numbered argument. numbers: Of other arguments; addresses, too.
        """
        values = self._values.copy()
        for name, given in tensors.items():
            first, found = _PLACES[f"{name}0"], list[Any](tensor.data_ptr() for tensor in given)
            if name in self._likes:
                found = [Tma(like, address) for like, address in zip(self._likes[name], found, strict=True)]
            values[first : first + len(given)] = found
        for name, number in numbers.items():
            values[_PLACES[name]] = number
        return values
