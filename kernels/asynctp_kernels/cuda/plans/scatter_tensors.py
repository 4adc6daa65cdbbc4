"""The memory of one call of matmuls and the sum of them over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

#: As, Bs, A scales, B scales, biases and what is added, as `ReduceFacts` has them
Operands = tuple[
    Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None], Tensor | None
]


class ScatterTensors(NamedTuple):
    """All memory of one call: the operands, then what it makes.

    staging: the sum of the matmuls, as the implementation lays it out. out: the result. extras: matmuls apart that
    are not made in the place of that sum.
    """

    a_parts: Sequence[Tensor]
    b_parts: Sequence[Tensor]
    a_scales: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    added: Tensor | None
    staging: Tensor
    out: Tensor
    extras: list[Tensor]

    def addresses(self) -> tuple[int, ...]:
        """Addresses of all tensors but the small operands."""
        tensors = (*self.a_parts, *self.b_parts, self.added, self.staging, self.out, *self.extras)
        return tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])

    def small(self) -> list[Tensor]:
        """Scales and biases."""
        tensors = (*self.a_scales, *self.b_scales, *self.biases)
        return [tensor for tensor in tensors if tensor is not None]

    def with_small(self, small: Sequence[Tensor]) -> ScatterTensors:
        """The same with other small operands."""
        rest = iter(small)
        a_scales, b_scales = ([next(rest) for _ in scales] for scales in (self.a_scales, self.b_scales))
        biases = [None if bias is None else next(rest) for bias in self.biases]
        return self._replace(a_scales=a_scales, b_scales=b_scales, biases=biases)
