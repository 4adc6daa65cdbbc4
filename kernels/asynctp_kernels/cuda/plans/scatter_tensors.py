"""The memory of one call of matmuls and the sum of them over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
        """Addresses of all tensors: those that are given, then those that are made."""
        a_parts, b_parts, a_scales, b_scales, biases, added, staging, out, extras = self
        tensors = (added, *a_parts, *b_parts, *a_scales, *b_scales, *biases, staging, out, *extras)
        return tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])

    def with_each(self, stand_ins: Sequence[Any]) -> ScatterTensors:
        """The same with others in the place of the tensors, in the order of `addresses`."""
        rest = iter(stand_ins)
        added = None if self.added is None else next(rest)
        lists = [[None if one is None else next(rest) for one in many] for many in self[:5]]
        every: Any = (*lists, added, next(rest), next(rest), [next(rest) for _ in self.extras])
        return ScatterTensors(*every)
