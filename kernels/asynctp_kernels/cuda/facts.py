"""Facts that decide how a call is run: the arguments of its op, the ranks of its group, and what follows from them.

Fields have the names of the op's arguments, whose meaning is told there (`asynctp_passes.ops.calls`). `of` takes them
from an op's call, which has them as attributes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asynctp_kernels.cuda.choose.wire import INVARIANT, Wire
from asynctp_kernels.cuda.gemm.cublas import Recipe, Scaling, block_recipe
from asynctp_kernels.shard_layout import ShardLayout, gather_layout, scatter_layout


def _arguments(kind: type[GatherFacts] | type[ReduceFacts], call: Any) -> dict[str, Any]:
    """The fields of a kind of facts that an op's call gives; optional ones may be None there."""
    found = {field: getattr(call, field.name) for field in fields(kind) if field.name != "world"}
    return {field.name: value for field, value in found.items() if value is not None or field.default is MISSING}


class Piece(NamedTuple):
    """Rows `first` to `end` of a range of A's rows, which B number `b` multiplies; `out`: where in its result."""

    b: int
    first: int
    end: int
    out: int


@dataclass(frozen=True, repr=False)
class GatherFacts:
    """A gather and its matmuls; the tensors stand for all tensors of their shapes, strides and dtypes.

    world: ranks of the group. b_rows: empty where every B takes all rows.
    """

    a_shard: Tensor
    bs: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    gather_dim: int
    return_a_full: bool
    world: int
    a_scale: Tensor | None = None
    b_scales: Sequence[Tensor] = ()
    gather_a_scale: bool = False
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    along_shard: Tensor | None = None
    all_keep: bool | None = None
    accord: int = 0
    b_rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, call: Any, world: int) -> GatherFacts:
        """The facts of an op's call in a group of so many ranks."""
        found = _arguments(cls, call)
        return cls(world=world, **{**found, "b_rows": tuple(found.get("b_rows", ()))})

    @property
    def kind(self) -> str:
        """As `Problem.op` says."""
        return "gather"

    @property
    def invariant(self) -> bool:
        """A row's bits depend on nothing but the row, the Bs and the number of ranks."""
        return bool(self.accord & INVARIANT)

    @property
    def kept_by_all(self) -> bool:
        """Every rank keeps the gathered A, whether it returns it or not."""
        return self.return_a_full if self.all_keep is None else self.all_keep

    @property
    def matmul_dtype(self) -> torch.dtype:
        """The dtype of the results: without scales that of A, but int32 of int8."""
        return self.out_dtype or (torch.int32 if self.a_shard.dtype == torch.int8 else self.a_shard.dtype)

    @property
    def row_numbers(self) -> Tensor | None:
        """The numbers that are gathered with the shard: its scales by rows or by blocks, or what is only returned."""
        return self.a_scale if self.gather_a_scale else self.along_shard

    @property
    def layout(self) -> ShardLayout:
        return gather_layout(self.a_shard.shape, self.gather_dim % self.a_shard.ndim, self.world)

    @property
    def outer(self) -> int:
        return self.layout.outer

    @property
    def rows(self) -> int:
        """Rows of the results, over all ranks."""
        return self.layout.full_rows

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the matmuls' results."""
        lines, widths = self.layout.full_shape[:-1], [b.shape[1] for b in self.bs]
        if not self.b_rows:
            return [(*lines, width) for width in widths]
        runs = [(end - first, self.rows // every if every else 0) for first, end, every in self._rows_of_each()]
        return [(rows * count, width) for (rows, count), width in zip(runs, widths, strict=True)]

    def _rows_of_each(self) -> list[tuple[int, int, int]]:
        """`first`, `end` and `every` of each B."""
        return [self.b_rows[at : at + 3] for at in range(0, len(self.b_rows), 3)]  # type: ignore[misc]

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        """Pieces of each range of rows, in the order of the gathered A; none where every B takes all rows."""
        inner, found = max(self.layout.inner, 1), list[list[Piece]]()
        for begin in range(0, self.rows if self.b_rows else 0, inner):
            found.append([])
            for i, (first, end, every) in enumerate(self._rows_of_each()):
                for run in range(begin // every, -(-(begin + inner) // every)):
                    start, stop = max(begin, run * every + first), min(begin + inner, run * every + end)
                    if start < stop:
                        out = run * (end - first) + start - (run * every + first)
                        found[-1].append(Piece(i, start - begin, stop - begin, out))
        return found

    @property
    def wire(self) -> Wire:
        """The facts of the call that all ranks share."""
        own_bytes = self.a_shard.numel() * self.a_shard.itemsize
        numbers = 0 if self.row_numbers is None else 4 * self.row_numbers.numel()
        return Wire(
            "all_gather", self.world, own_bytes, number_bytes=numbers, kept_by_all=self.kept_by_all, accord=self.accord
        )

    @property
    def scaling(self) -> Scaling | None:
        return None if self.a_scale is None else Scaling(self.matmul_dtype, self.use_fast_accum)

    @property
    def device_index(self) -> int:
        return self.a_shard.device.index

    @property
    def is_empty(self) -> bool:
        """Nothing is multiplied."""
        layout = self.layout
        return layout.rows == 0 or layout.cols == 0 or not self.bs or any(b.shape[1] == 0 for b in self.bs)

    @property
    def is_dense(self) -> bool:
        """All operands but Bs are contiguous."""
        return _are_dense([self.a_shard, self.a_scale, self.along_shard, *self.b_scales, *self.biases])

    @property
    def recipes(self) -> list[Recipe | None]:
        """Blocks that the scales of each matmul are of; empty where there are no scales."""
        if self.a_scale is None:
            return []
        rows = self.layout.rows if self.gather_a_scale else self.layout.full_rows
        pairs = zip(self.bs, self.b_scales, strict=True)
        return [block_recipe(rows, b, self.a_scale, b_scale) for b, b_scale in pairs]


def _are_dense(tensors: Sequence[Tensor | None]) -> bool:
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


class Times(NamedTuple):
    """Factors of each matmul, of what is added to them, and of the whole."""

    matmuls: tuple[float, ...]
    added: float
    whole: float


@dataclass(frozen=True, repr=False)
class ReduceFacts:
    """Matmuls and the sum of them over ranks; tensors and `world` as of `GatherFacts`.

    scatter_dim: None of an all-reduce, whose As and what is added are [M, *] here. factors: powers of two, or negatives
    of such; empty: nothing is multiplied. real_rows: of the scattered dimension; zeros are sent after them. None: all.
    """

    a_parts: Sequence[Tensor]
    b_parts: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    reduce_op: str
    scatter_dim: int | None
    world: int
    a_scales: Sequence[Tensor] = ()
    b_scales: Sequence[Tensor] = ()
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    sum_dtype: torch.dtype | None = None
    added: Tensor | None = None
    factors: tuple[float, ...] = ()
    real_rows: int | None = None
    accord: int = 0

    @classmethod
    def of(cls, call: Any, world: int) -> ReduceFacts:
        """The facts of an op's call in a group of so many ranks; of an all-reduce, of its rows."""
        found = _arguments(cls, call)
        found["factors"] = nonunit(call.factors)
        if call.scatter_dim is None:
            found["a_parts"], found["a_scales"] = as_rows(call.a_parts, call.a_scales or ())
            found["added"] = None if call.added is None else flat(call.added)
        return cls(world=world, **found)

    @property
    def kind(self) -> str:
        """As `Problem.op` says."""
        return "all_reduce" if self.scatter_dim is None else "scatter"

    @property
    def invariant(self) -> bool:
        """As of a gather."""
        return bool(self.accord & INVARIANT)

    @property
    def dim(self) -> int:
        """The dimension whose parts ranks add up: of an all-reduce that of its rows."""
        return 0 if self.scatter_dim is None else self.scatter_dim

    @property
    def matmul_dtype(self) -> torch.dtype:
        """The dtype of the matmuls."""
        return self.out_dtype or self.a_parts[0].dtype

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of the data on its way, and of the result."""
        return self.sum_dtype or self.matmul_dtype

    @property
    def wire(self) -> Wire:
        """The facts of the call that all ranks share."""
        if self.scatter_dim is None:
            kind, size = "all_reduce", self.rows * self.b_parts[0].shape[1]
        else:
            kind, size = "reduce_scatter", self.layout.rows * self.layout.cols
        dtype, how = self.wire_dtype, self.reduce_op
        return Wire(kind, self.world, size * dtype.itemsize, dtype, how, accord=self.accord)

    @property
    def parts(self) -> ShardLayout:
        """The layout of a pushed all-reduce: an equal run of elements for each rank to add up."""
        elements = self.rows * self.b_parts[0].shape[1]
        return scatter_layout((self.world, elements // self.world), 0, self.world)

    @property
    def layout(self) -> ShardLayout:
        full = (*self.a_parts[0].shape[:-1], self.b_parts[0].shape[1])
        return scatter_layout(full, self.dim % len(full), self.world)

    @property
    def rows(self) -> int:
        """Rows of the matmuls, over all ranks."""
        return math.prod(self.a_parts[0].shape[:-1])

    @property
    def outer(self) -> int:
        return self.layout.outer

    @property
    def real_in_block(self) -> int | None:
        """How many of the rows of an outer block, over all ranks, come before the padding; None without any."""
        shape = self.a_parts[0].shape[:-1]
        if self.real_rows is None or self.real_rows == shape[self.dim]:
            return None
        return self.real_rows * math.prod(shape[self.dim + 1 :])

    @property
    def scaling(self) -> Scaling | None:
        return Scaling(self.matmul_dtype, self.use_fast_accum) if self.a_scales else None

    @property
    def device_index(self) -> int:
        return self.a_parts[0].device.index

    @property
    def is_empty(self) -> bool:
        """Nothing is multiplied."""
        return self.rows == 0 or any(0 in b.shape for b in self.b_parts)

    @property
    def is_dense(self) -> bool:
        """All operands but Bs are contiguous."""
        return _are_dense([*self.a_parts, *self.a_scales, *self.b_scales, *self.biases, self.added])

    @property
    def recipes(self) -> list[Recipe | None]:
        """Blocks that the scales of each matmul are of; empty where there are no scales."""
        scales = zip(self.b_parts, self.a_scales, self.b_scales, strict=True) if self.a_scales else ()
        return [block_recipe(self.rows, b, a_scale, b_scale) for b, a_scale, b_scale in scales]

    @property
    def times(self) -> Times:
        """Factors, with as few passes over memory as give the program's numbers.

        A number below 1 for the sum goes to its terms, which are smaller then than the program's. What that takes from
        subnormal ones is no more than the program's rounding does, but in float16, where these are not rare. That of
        several terms stays where bits may not differ: `whole` multiplies their sum.
        """
        count = len(self.a_parts)
        may_move = not self.invariant or (count == 1 and self.added is None)
        each, rest = self.factors[:count] or (1.0,) * count, self.factors[count:]
        whole = rest[0] if rest else 1.0
        smaller = abs(whole) < 1 and all(abs(factor) <= 1 for factor in each) and self.wire_dtype != torch.float16
        if (smaller and may_move) or abs(whole) == 1:
            return Times(tuple(factor * whole for factor in each), whole, 1.0)
        return Times(each, 1.0, whole)

    @property
    def gemm_factor(self) -> float | None:
        """The factor of one GEMM's result, the sum of all matmuls; None where they need unlike numbers.

        Several are multiplied before they are added in the program, and may add up to what has no place in fp32.
        """
        count = len(self.a_parts)
        each, whole = set(self.factors[:count]) or {1.0}, self.factors[count:]
        first = each.pop()
        if each or (count > 1 and abs(first) != 1) or (whole and abs(first) != 1):
            return None
        return first * whole[0] if whole else first


def part_rows(call: ReduceFacts, rank: int) -> list[tuple[int, int, int]]:
    """(rank, first row, end) of each rank's part of an all-reduce, in the order in which `rank` multiplies them.

    A row in which one part ends and the next begins is multiplied with the first of them. There are as many rows as
    ranks, or more, so none is of three parts.
    """
    world, columns, part = call.world, call.b_parts[0].shape[1], call.parts.cols
    order = [(rank + step) % world for step in range(1, world + 1)]
    begins = [dst * part // columns if dst == order[0] else -(-dst * part // columns) for dst in range(world)]
    ends = [*begins[1:], call.rows]
    return [(dst, begins[dst], ends[dst]) for dst in order]


def as_rows(a_parts: Sequence[Tensor], a_scales: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Every A as [M, K], and its scale as one element or a matrix."""
    return [flat(a) for a in a_parts], [scale if scale.numel() == 1 else flat(scale) for scale in a_scales]


def flat(tensor: Tensor) -> Tensor:
    """[*, n] as [M, n]. A view takes most of a microsecond, also one that changes nothing."""
    return tensor if tensor.ndim == 2 else tensor.flatten(0, -2)  # also without columns


def nonunit(factors: Sequence[float] | None) -> tuple[float, ...]:
    """The factors of a call; empty where all are 1, so that nothing is multiplied."""
    return tuple(factors) if factors and any(factor != 1 for factor in factors) else ()


Facts = GatherFacts | ReduceFacts


def facts_of(call: Any, world: int) -> Facts:
    """The facts of an op's call in a group of so many ranks; of tensors, fake ones do."""
    return GatherFacts.of(call, world) if call.op.startswith("all_gather") else ReduceFacts.of(call, world)
