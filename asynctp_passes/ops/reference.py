"""The unfused programs: what every fused op must equal, in plain functional collectives and matmuls.

Two layers live here. The functions at the top check their arguments, take any spelling of a process group and are
meant to be called by hand. The `unfused_*` functions at the bottom have the fused ops' own argument lists; the ops
run them wherever no kernel takes over. All arguments are checked in `check_gather` and `check_scatter`, which the
ops use too.

Numerics: every product is rounded once to its output dtype (bias included), converted to `sum_dtype` if there is one,
and multiplied by its factor if there are `factors`. Then the products are added in list order, `added` last; that is
multiplied if there is a factor for it, and the collective sums. All is in the dtype that the products have. On CPU
`"avg"` is the sum divided by the number of ranks, since gloo has no average in every supported torch; elsewhere the
backend's own average is used.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, SupportsIndex, TypeVar

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ReduceOp

from asynctp_passes import compat

__all__ = [
    "Callers",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "check_gather",
    "check_scatter",
    "group_and_size",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
    "unfused_all_gather_matmul",
    "unfused_all_gather_scaled_matmul",
    "unfused_matmul_all_reduce",
    "unfused_matmul_reduce_scatter",
    "unfused_scaled_matmul_all_reduce",
    "unfused_scaled_matmul_reduce_scatter",
]

PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BLOCK = 128
SCALINGS = (
    ("one", "one"),
    ("one", "rows"),
    ("rows", "one"),
    ("rows", "rows"),
    ("1x128", "128x128"),
    ("128x128", "1x128"),
    ("1x128", "1x128"),
)
"""How A and B can be scaled together. `rows` means the columns of B, and a block is of rows or columns x 128 of K."""
BLOCKWISE = {"1x128", "128x128"}
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALED_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDENED = (torch.bfloat16, torch.float16)
"""Dtypes of products that can be summed in float32."""
REDUCE_OPS = ("sum", "avg")
LARGEST_EXPONENT = 60
"""A factor is at most 2 to this power, or at least 2 to its negative: the product of two is normal in float32."""
_PROCESS_GROUP: Any = getattr(torch.distributed, "ProcessGroup", ())  # () where torch is built without distributed


_KINDS: dict[str, tuple[Any, str]] = {
    "gather_dim": (SupportsIndex, "an int"),
    "scatter_dim": (SupportsIndex, "an int"),
    "reduce_op": (str, f"one of {REDUCE_OPS}"),
    "out_dtype": (torch.dtype, "a torch.dtype"),
    "sum_dtype": (torch.dtype | None, "a torch.dtype or None"),
    "factors": (Sequence | None, "a list of numbers, or None"),
}
_TENSORS = ("a_shard", "a", "bs", "b", "a_scale", "a_scales", "b_scales", "biases", "added")
_OPTIONAL = ("biases", "added")
P = ParamSpec("P")
R = TypeVar("R")


def _of_kinds(method: Callable[P, R]) -> Callable[P, R]:
    """A caller that first looks at what its arguments are: tensors of this rank, numbers, names.

    Given something else, torch would say what it could not convert, or which strategy DTensor does not have.
    """
    names = tuple(inspect.signature(method).parameters)

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():  # where torch traces, it knows
            for name, value in (*zip(names, args, strict=False), *kwargs.items()):
                _require_kind(method.__name__, name, value)
        return method(*args, **kwargs)

    return call


def _require_kind(op: str, name: str, value: Any) -> None:
    if name in _KINDS:
        kind, words = _KINDS[name]
        _require(isinstance(value, kind), op, name, value, words)
    elif name in _TENSORS:
        if isinstance(value, Iterator):  # which can be looked at once only
            return
        several = isinstance(value, Iterable) and not isinstance(value, Tensor | str)
        for item in value if several else [value]:
            fits = isinstance(item, Tensor) and not hasattr(item, "to_local")
            limit = "a tensor, or a list of tensors, of this rank; give to_local() of a DTensor"
            _require(fits or (item is None and name in _OPTIONAL), op, name, type(item), limit)


# --- called by hand ------------------------------------------------------------------------------------
class Callers:
    """The programs under their own names, with keyword arguments and any spelling of a process group.

    This module has them as unfused programs, `asynctp_passes.ops` as the fused ops (differentiable but for the scaled
    ones, whose gradient raises, and traceable by torch.compile).

    Args:
        programs: What has each program as an attribute, with the fused op's argument list.
        checks: Whether arguments are checked here; the ops check them themselves.
    """

    def __init__(self, programs: Any, *, checks: bool) -> None:
        self._programs, self._checks = programs, checks

    @_of_kinds
    def all_gather_matmul(
        self,
        a_shard: Tensor,
        bs: Tensor | Sequence[Tensor],
        *,
        gather_dim: int,
        group: Any,
        biases: Tensor | Sequence[Tensor | None] | None = None,
        return_a_full: bool = False,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Gather `a_shard` over the ranks, then multiply by each of `bs`: `shard → all_gather → mm, mm, …`.

        Differentiable as far as torch's own collectives are.

        Args:
            a_shard: This rank's piece of A.
            bs: Right-hand operands, or the one there is.
            gather_dim: Dimension of A to gather along, negative from the end; the last is the contraction.
            group: Group name, ProcessGroup, one-dimensional DeviceMesh, or `(DeviceMesh, dim)`.
            biases: One per operand, added to its product; None adds none.
            return_a_full: Whether to return the gathered A too.

        Shapes:
            a_shard: `[*, M/W, *, K]` over W ranks (`[*, K/W]` if the last dimension is gathered); bs: `[K, N_i]`;
            biases: `[N_i]` or `[1, N_i]`; products: `[*, M, *, N_i]`; a_full: `[*, M, *, K]`.

        Returns:
            The products, and the gathered A or None. All contiguous, none an alias of an input.

        Raises:
            ValueError: Shapes, dtypes, dims or lists that do not fit together, or a group that does not exist.

        Source:
            torch.distributed._functional_collectives (all_gather_single) and torch.addmm.
        """
        name, size = group_and_size(group)
        b_parts = as_list(bs)
        offsets = optional_list(biases, len(b_parts))
        if self._checks:
            check_gather("all_gather_matmul", a_shard, b_parts, offsets, gather_dim, size)
        outs = self._programs.all_gather_matmul(a_shard, b_parts, offsets, gather_dim, return_a_full, size, name)
        return split_a_full(outs, return_a_full)

    @_of_kinds
    def all_gather_scaled_matmul(
        self,
        a_shard: Tensor,
        a_scale: Tensor,
        bs: Tensor | Sequence[Tensor],
        b_scales: Tensor | Sequence[Tensor],
        *,
        gather_dim: int,
        group: Any,
        biases: Tensor | Sequence[Tensor | None] | None = None,
        gather_a_scale: bool = False,
        out_dtype: torch.dtype = torch.bfloat16,
        use_fast_accum: bool = False,
        return_a_full: bool = False,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Gather fp8 `a_shard` over the ranks, then multiply by each of `bs`, with scales. Not differentiable.

        Args:
            a_shard: This rank's piece of A, fp8.
            a_scale: fp32 factor of A: one number, one per row, or one per block of 1x128 or 128x128.
            bs: Right-hand operands, or the one there is, fp8 (on CUDA column-major, else they are copied).
            b_scales: fp32 factor of each operand: one number, one per column, or one per block, not of 128x128 too.
            gather_dim: Dimension of A to gather along, negative from the end; the last is the contraction.
            group: Group name, ProcessGroup, one-dimensional DeviceMesh, or `(DeviceMesh, dim)`.
            biases: One per operand, added to its product; None adds none.
            gather_a_scale: True if `a_scale` holds the rows of the shard and is to be gathered with it; False if it is
                the same on all ranks: one number, or all rows of the gathered A.
            out_dtype: Dtype of the products.
            use_fast_accum: Whether CUDA may accumulate with less than fp32's precision.
            return_a_full: Whether to return the gathered A too.

        Shapes:
            As `all_gather_matmul`; a_scale: one element, or rows of A and a 1 (`[*, M/W, *, 1]` if gathered, else
            `[*, M, *, 1]`); b_scales: one element, or `[1, N_i]`. Of blocks: `[*, rows, K/128]` for 1x128 and, if
            the rows are a multiple of 128, `[*, rows/128, K/128]`; b_scales `[K/128, N_i]` or `[K/128, N_i/128]`, sizes
            rounded up.

        Units:
            Scales multiply: the value is `fp8 number × scale`.

        Returns:
            The products in `out_dtype`, and the gathered fp8 A or None.

        Raises:
            ValueError: Shapes, dtypes, dims or lists that do not fit together, or a group that does not exist.

        Source:
            torch.distributed._functional_collectives (all_gather_single); torch._scaled_mm.
        """
        name, size = group_and_size(group)
        b_parts, b_factors = as_list(bs), as_list(b_scales)
        offsets = optional_list(biases, len(b_parts))
        if self._checks:
            scales = GatherScales(a_scale, b_factors, gather_a_scale, out_dtype)
            check_gather("all_gather_scaled_matmul", a_shard, b_parts, offsets, gather_dim, size, scales)
        operands = (a_shard, a_scale, b_parts, b_factors, offsets, gather_dim, gather_a_scale)
        outs = self._programs.all_gather_scaled_matmul(*operands, out_dtype, use_fast_accum, return_a_full, size, name)
        return split_a_full(outs, return_a_full)

    @_of_kinds
    def matmul_reduce_scatter(
        self,
        a: Tensor | Sequence[Tensor],
        b: Tensor | Sequence[Tensor],
        *,
        scatter_dim: int,
        group: Any,
        reduce_op: str = "sum",
        biases: Tensor | Sequence[Tensor | None] | None = None,
        sum_dtype: torch.dtype | None = None,
        added: Tensor | None = None,
        factors: Sequence[float] | None = None,
    ) -> Tensor:
        """Multiply, add up the products, then reduce-scatter the sum: `mm + mm + … → reduce_scatter → out_shard`.

        Differentiable as far as torch's own collectives are.

        Args:
            a: Left-hand operand, or one per product.
            b: Right-hand operand, or one per product.
            scatter_dim: Dimension of the product to scatter along, negative from the end; the last is its columns.
            group: Group name, ProcessGroup, one-dimensional DeviceMesh, or `(DeviceMesh, dim)`.
            reduce_op: `"sum"` or `"avg"` over the ranks (the products of one rank are always summed).
            biases: One, or one per product, added on every rank; None adds none.
            sum_dtype: float32: products of 16 bits, once rounded, are converted to it before anything is added, and
                the result has it. None converts nothing.
            added: What this rank adds to its products, in the result's dtype; None adds nothing.
            factors: What this rank multiplies its products by, once rounded and converted: a number for each, and one
                more for the whole sum, if that is multiplied too. Powers of two, or negatives of such; None
                multiplies nothing.

        Shapes:
            a: `[*, M, *, K_i]`; b: `[K_i, N]`; biases: `[N]` or `[1, N]`; added: `[*, M, *, N]`; result over W ranks:
            `[*, M/W, *, N]`, or `[*, M, *, N/W]` if the last dimension is scattered.

        Returns:
            This rank's piece, contiguous.

        Raises:
            ValueError: Shapes, dtypes, dims or lists that do not fit together, or a group that does not exist.

        Source:
            torch.distributed._functional_collectives (reduce_scatter_single) and torch.addmm.
        """
        name, size = group_and_size(group)
        a_parts, b_parts = operands_of("matmul_reduce_scatter", a), as_list(b)
        offsets = optional_list(biases, len(a_parts))
        if self._checks:
            operands = (a_parts, b_parts, offsets, reduce_op)
            optional = SumOptions(sum_dtype, added, factors)
            check_scatter("matmul_reduce_scatter", *operands, scatter_dim, size, optional=optional)
        out: Tensor = self._programs.matmul_reduce_scatter(
            a_parts, b_parts, offsets, reduce_op, scatter_dim, size, name, sum_dtype, added, numbers(factors)
        )
        return out

    @_of_kinds
    def scaled_matmul_reduce_scatter(
        self,
        a: Tensor | Sequence[Tensor],
        b: Tensor | Sequence[Tensor],
        a_scales: Tensor | Sequence[Tensor],
        b_scales: Tensor | Sequence[Tensor],
        *,
        scatter_dim: int,
        group: Any,
        reduce_op: str = "sum",
        biases: Tensor | Sequence[Tensor | None] | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        use_fast_accum: bool = False,
        sum_dtype: torch.dtype | None = None,
        added: Tensor | None = None,
        factors: Sequence[float] | None = None,
    ) -> Tensor:
        """Multiply fp8 operands with scales, add up the products, then reduce-scatter the sum. Not differentiable.

        Args:
            a: Left-hand operand, or one per product, fp8.
            b: Right-hand operand, or one per product, fp8 (on CUDA column-major, else it is copied).
            a_scales: fp32 factor of each left-hand operand: one number, one per row or per block.
            b_scales: fp32 factor of each right-hand operand: one number, one per column or per block.
            scatter_dim: Dimension of the product to scatter along, negative from the end; the last is its columns.
            group: Group name, ProcessGroup, one-dimensional DeviceMesh, or `(DeviceMesh, dim)`.
            reduce_op: `"sum"` or `"avg"` over the ranks (the products of one rank are always summed).
            biases: One, or one per product, added on every rank; None adds none.
            out_dtype: Dtype of the products, and of their sum if that has no other.
            use_fast_accum: Whether CUDA may accumulate with less than fp32's precision.
            sum_dtype: float32: products of 16 bits, once rounded, are converted to it before anything is added, and
                the result has it. None converts nothing.
            added: What this rank adds to its products, in the result's dtype; None adds nothing.
            factors: What this rank multiplies its products by, once rounded and converted: a number for each, and one
                more for the whole sum, if that is multiplied too. Powers of two, or negatives of such; None
                multiplies nothing.

        Shapes:
            As `matmul_reduce_scatter`; a_scales: one element, or `[*, M, *, 1]`; b_scales: one element, or `[1, N]`.
            Blocks as in `all_gather_scaled_matmul`.

        Units:
            Scales multiply: the value is `fp8 number × scale`.

        Returns:
            This rank's piece in `out_dtype` or `sum_dtype`, contiguous.

        Raises:
            ValueError: Shapes, dtypes, dims or lists that do not fit together, or a group that does not exist.

        Source:
            torch.distributed._functional_collectives (reduce_scatter_single); torch._scaled_mm.
        """
        name, size = group_and_size(group)
        a_parts, b_parts = operands_of("scaled_matmul_reduce_scatter", a), as_list(b)
        offsets = optional_list(biases, len(a_parts))
        if self._checks:
            scales = ScatterScales(as_list(a_scales), as_list(b_scales), out_dtype)
            op, parts, where = "scaled_matmul_reduce_scatter", (a_parts, b_parts, offsets), (scatter_dim, size, scales)
            check_scatter(op, *parts, reduce_op, *where, optional=SumOptions(sum_dtype, added, factors))
        operands = (a_parts, b_parts, as_list(a_scales), as_list(b_scales), offsets, reduce_op, scatter_dim)
        out: Tensor = self._programs.scaled_matmul_reduce_scatter(
            *operands, out_dtype, use_fast_accum, size, name, sum_dtype, added, numbers(factors)
        )
        return out

    @_of_kinds
    def matmul_all_reduce(
        self,
        a: Tensor | Sequence[Tensor],
        b: Tensor | Sequence[Tensor],
        *,
        group: Any,
        reduce_op: str = "sum",
        biases: Tensor | Sequence[Tensor | None] | None = None,
        sum_dtype: torch.dtype | None = None,
        added: Tensor | None = None,
        factors: Sequence[float] | None = None,
    ) -> Tensor:
        """Multiply, add up the products, then all-reduce the sum: `mm + mm + … → all_reduce → out`.

        Differentiable as far as torch's own collectives are.

        Args:
            a: Left-hand operand, or one per product.
            b: Right-hand operand, or one per product.
            group: Group name, ProcessGroup, one-dimensional DeviceMesh, or `(DeviceMesh, dim)`.
            reduce_op: `"sum"` or `"avg"` over the ranks (the products of one rank are always summed).
            biases: One, or one per product, added on every rank; None adds none.
            sum_dtype: float32: products of 16 bits, once rounded, are converted to it before anything is added, and
                the result has it. None converts nothing.
            added: What this rank adds to its products, in the result's dtype; None adds nothing.
            factors: What this rank multiplies its products by, once rounded and converted: a number for each, and one
                more for the whole sum, if that is multiplied too. Powers of two, or negatives of such; None
                multiplies nothing.

        Shapes:
            a: `[*, M, K_i]`; b: `[K_i, N]`; biases: `[N]` or `[1, N]`; added and result: `[*, M, N]`, on every rank.

        Returns:
            The sum, contiguous, the same on all ranks.

        Raises:
            ValueError: Shapes, dtypes or lists that do not fit together, or a group that does not exist.

        Source:
            torch.distributed._functional_collectives (all_reduce) and torch.addmm.
        """
        name, _ = group_and_size(group)
        a_parts, b_parts = operands_of("matmul_all_reduce", a), as_list(b)
        offsets = optional_list(biases, len(a_parts))
        if self._checks:
            parts = (a_parts, b_parts, offsets, reduce_op)
            check_all_reduce("matmul_all_reduce", *parts, optional=SumOptions(sum_dtype, added, factors))
        out: Tensor = self._programs.matmul_all_reduce(
            a_parts, b_parts, offsets, reduce_op, name, sum_dtype, added, numbers(factors)
        )
        return out

    @_of_kinds
    def scaled_matmul_all_reduce(
        self,
        a: Tensor | Sequence[Tensor],
        b: Tensor | Sequence[Tensor],
        a_scales: Tensor | Sequence[Tensor],
        b_scales: Tensor | Sequence[Tensor],
        *,
        group: Any,
        reduce_op: str = "sum",
        biases: Tensor | Sequence[Tensor | None] | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        use_fast_accum: bool = False,
        sum_dtype: torch.dtype | None = None,
        added: Tensor | None = None,
        factors: Sequence[float] | None = None,
    ) -> Tensor:
        """Multiply fp8 operands with scales, add up the products, then all-reduce the sum. Not differentiable.

        Args:
            a: Left-hand operand, or one per product, fp8.
            b: Right-hand operand, or one per product, fp8 (on CUDA column-major, else it is copied).
            a_scales: fp32 factor of each left-hand operand: one number, one per row or per block.
            b_scales: fp32 factor of each right-hand operand: one number, one per column or per block.
            group: Group name, ProcessGroup, one-dimensional DeviceMesh, or `(DeviceMesh, dim)`.
            reduce_op: `"sum"` or `"avg"` over the ranks (the products of one rank are always summed).
            biases: One, or one per product, added on every rank; None adds none.
            out_dtype: Dtype of the products, and of their sum if that has no other.
            use_fast_accum: Whether CUDA may accumulate with less than fp32's precision.
            sum_dtype: float32: products of 16 bits, once rounded, are converted to it before anything is added, and
                the result has it. None converts nothing.
            added: What this rank adds to its products, in the result's dtype; None adds nothing.
            factors: What this rank multiplies its products by, once rounded and converted: a number for each, and one
                more for the whole sum, if that is multiplied too. Powers of two, or negatives of such; None
                multiplies nothing.

        Shapes:
            As `matmul_all_reduce`; a_scales: one element, or `[*, M, 1]`; b_scales: one element, or `[1, N]`.
            Blocks as in `all_gather_scaled_matmul`.

        Units:
            Scales multiply: the value is `fp8 number × scale`.

        Returns:
            The sum in `out_dtype` or `sum_dtype`, contiguous, the same on all ranks.

        Raises:
            ValueError: Shapes, dtypes or lists that do not fit together, or a group that does not exist.

        Source:
            torch.distributed._functional_collectives (all_reduce); torch._scaled_mm.
        """
        name, _ = group_and_size(group)
        a_parts, b_parts = operands_of("scaled_matmul_all_reduce", a), as_list(b)
        offsets = optional_list(biases, len(a_parts))
        if self._checks:
            scales = ScatterScales(as_list(a_scales), as_list(b_scales), out_dtype)
            parts = (a_parts, b_parts, offsets, reduce_op)
            optional = SumOptions(sum_dtype, added, factors)
            check_all_reduce("scaled_matmul_all_reduce", *parts, scales, optional=optional)
        operands = (a_parts, b_parts, as_list(a_scales), as_list(b_scales), offsets, reduce_op)
        out: Tensor = self._programs.scaled_matmul_all_reduce(
            *operands, out_dtype, use_fast_accum, name, sum_dtype, added, numbers(factors)
        )
        return out


# --- spellings of arguments ------------------------------------------------------------------------------
def group_and_size(group: Any) -> tuple[Any, int]:
    """The group's name and its number of ranks, from a name, ProcessGroup, 1-D DeviceMesh or `(DeviceMesh, dim)`.

    Raises:
        ValueError: The group does not exist, or is none of these.
    """
    name = _group_name(group)
    try:
        return name, compat.process_group_size(name)
    except (RuntimeError, ValueError) as error:
        limit = (
            "the name of an existing process group; create it first, or pass the ProcessGroup itself. If a compiled "
            "graph names it, torch found another rank's graph in its cache (torch 2.13.0): give each rank a "
            "TORCHINDUCTOR_CACHE_DIR of its own"
        )
        raise _invalid("group", "group", name, limit) from error


def _group_name(group: Any) -> str:
    if isinstance(group, str):
        return group
    if isinstance(group, _PROCESS_GROUP):  # asked first: torch.compile cannot trace hasattr on a ProcessGroup
        return str(group.group_name)
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        try:
            return str(group[0].get_group(group[1]).group_name)
        except (IndexError, KeyError, RuntimeError) as error:
            raise _invalid("group", "group", group, "a mesh with the name or the number of one of its dims") from error
    limit = "a group name, a ProcessGroup, a DeviceMesh or (DeviceMesh, dim)"
    _require(hasattr(group, "get_group"), "group", "group", group, limit)
    _require(group.ndim == 1, "group", "group", group, 'a mesh of one dimension; slice it first (mesh["tp"])')
    return str(group.get_group().group_name)


def as_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """A list of the tensors, or of the one tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def operands_of(op: str, a: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The left-hand operands of a call: without one there would be no tensor that an op could be found by.

    Raises:
        ValueError: There are none.
    """
    parts = as_list(a)
    _check_lengths(op, len(parts), {})
    return parts


def optional_list(biases: Tensor | Sequence[Tensor | None] | None, count: int) -> list[Tensor | None]:
    """A list of the biases, or of the one bias; `count` times None if there are none."""
    if biases is None:
        return [None] * count
    return [biases] if isinstance(biases, Tensor) else list(biases)


def numbers(factors: Sequence[float] | None) -> list[float] | None:
    """The factors as a list of floats."""
    return None if factors is None else [float(factor) for factor in factors]


def split_a_full(outs: list[Tensor], return_a_full: bool) -> tuple[list[Tensor], Tensor | None]:
    """Separate a gather op's products from the gathered A behind them."""
    return (outs[:-1], outs[-1]) if return_a_full else (outs, None)


# --- checks ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class GatherScales:
    """The arguments that only the scaled gather op has."""

    a_scale: Tensor
    b_scales: Sequence[Tensor]
    gather_a_scale: bool
    out_dtype: torch.dtype
    along_shard: Tensor | None = None


@dataclass(frozen=True)
class ScatterScales:
    """The arguments that only the scaled scatter and all-reduce ops have."""

    a_scales: Sequence[Tensor]
    b_scales: Sequence[Tensor]
    out_dtype: torch.dtype


@dataclass(frozen=True)
class SumOptions:
    """The optional arguments of the ops that reduce sums of products."""

    sum_dtype: torch.dtype | None = None
    added: Tensor | None = None
    factors: Sequence[float] | None = None


def check_gather(
    op: str,
    a_shard: Tensor,
    bs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    gather_dim: int,
    group_size: int,
    scales: GatherScales | None = None,
    *,
    sizes: bool = True,
) -> None:
    """Check a gather op's arguments; without `sizes` only what adds no guard under dynamic shapes.

    Raises:
        ValueError: Names the argument, its value, the limit and the remedy.
    """
    _check_lengths(op, len(bs), {"bs": bs, "biases": biases})
    dim = _check_dim(op, "gather_dim", gather_dim, a_shard.ndim)
    for i, (b, bias) in enumerate(zip(bs, biases, strict=True)):
        _check_product(op, ("a_shard", f"bs[{i}]", f"biases[{i}]"), a_shard, b, bias, scales)
    if scales is not None:
        _check_lengths(op, len(bs), {"b_scales": scales.b_scales})
        rowwise_in_contraction = scales.gather_a_scale and dim == a_shard.ndim - 1
        limit = "False when the last dimension is gathered: one row would have another scale on every rank"
        _require(not rowwise_in_contraction, op, "gather_a_scale", True, limit)
        _check_along(op, scales, a_shard.ndim, dim)
    if sizes:
        _check_gather_sizes(op, a_shard, bs, biases, dim, group_size, scales)


def _check_along(op: str, scales: GatherScales, ndim: int, dim: int) -> None:
    along = scales.along_shard
    if along is not None:
        limit = "absent where a_scale is gathered, or the last dimension: one number per row travels with the data"
        _require(not scales.gather_a_scale and dim < ndim - 1, op, "along_shard", _describe(along), limit)
        fits = along.ndim == ndim and along.dtype == torch.float32
        _require(fits, op, "along_shard", _describe(along), f"float32, of {ndim} dimensions as a_shard")


def _check_gather_sizes(
    op: str,
    a_shard: Tensor,
    bs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dim: int,
    group_size: int,
    scales: GatherScales | None,
) -> None:
    full = gathered_shape(a_shard.shape, dim, group_size)
    for i, (b, bias) in enumerate(zip(bs, biases, strict=True)):
        _check_inner(op, "gathered A", full, f"bs[{i}]", b)
        _check_bias(op, f"biases[{i}]", bias, b)
    if scales is not None:
        rows = a_shard.shape if scales.gather_a_scale else full
        _check_a_scale(op, "a_scale", scales.a_scale, rows, tensorwise_allowed=not scales.gather_a_scale)
        if (along := scales.along_shard) is not None:
            limit = f"of shape {[*a_shard.shape[:-1], 1]}: one number per row"
            _require(tuple(along.shape) == (*a_shard.shape[:-1], 1), op, "along_shard", _describe(along), limit)
        for i, (b, b_scale) in enumerate(zip(bs, scales.b_scales, strict=True)):
            _check_b_scale(op, f"b_scales[{i}]", b_scale, b)
            _check_pair(op, f"a_scale and b_scales[{i}]", (scales.a_scale, rows), (b_scale, b))


def check_scatter(
    op: str,
    a_parts: Sequence[Tensor],
    b_parts: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    reduce_op: str,
    scatter_dim: int,
    group_size: int,
    scales: ScatterScales | None = None,
    *,
    optional: SumOptions = SumOptions(),
    sizes: bool = True,
) -> None:
    """Check a scatter op's arguments; without `sizes` only what adds no guard under dynamic shapes.

    Raises:
        ValueError: Names the argument, its value, the limit and the remedy.
    """
    parts = (a_parts, b_parts, biases)
    check_all_reduce(op, *parts, reduce_op, scales, optional=optional, sizes=sizes)
    dim = _check_dim(op, "scatter_dim", scatter_dim, a_parts[0].ndim)
    if sizes:
        size = (*a_parts[0].shape[:-1], b_parts[0].shape[1])[dim]
        limit = f"a multiple of the group's {group_size} ranks; pad that dimension"
        _require(size % group_size == 0, op, f"size of dimension {dim} of the product", size, limit)


def check_all_reduce(
    op: str,
    a_parts: Sequence[Tensor],
    b_parts: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    reduce_op: str,
    scales: ScatterScales | None = None,
    *,
    optional: SumOptions = SumOptions(),
    sizes: bool = True,
) -> None:
    """Check the arguments of an op that reduces products; without `sizes` only what adds no guard.

    Raises:
        ValueError: Names the argument, its value, the limit and the remedy.
    """
    _check_lengths(op, len(a_parts), {"a_parts": a_parts, "b_parts": b_parts, "biases": biases})
    _require(reduce_op in REDUCE_OPS, op, "reduce_op", reduce_op, f"one of {REDUCE_OPS}")
    _check_ndim(op, a_parts[0].ndim)
    for i, (a, b, bias) in enumerate(zip(a_parts, b_parts, biases, strict=True)):
        _check_product(op, (f"a_parts[{i}]", f"b_parts[{i}]", f"biases[{i}]"), a, b, bias, scales)
        alike = a.ndim == a_parts[0].ndim and (scales is not None or a.dtype == a_parts[0].dtype)
        _require(
            alike, op, f"a_parts[{i}]", _describe(a), f"of the rank and dtype of a_parts[0], {_describe(a_parts[0])}"
        )
    if scales is not None:
        _check_lengths(op, len(a_parts), {"a_scales": scales.a_scales, "b_scales": scales.b_scales})
    products = a_parts[0].dtype if scales is None else scales.out_dtype
    sum_dtype, added = optional.sum_dtype, optional.added
    _check_sum_dtype(op, products, sum_dtype)
    _check_factors(op, len(a_parts), optional.factors)
    if added is not None:
        limit = f"a tensor of the result's {sum_dtype or products} on {a_parts[0].device}, where A is; convert it first"
        fits = added.dtype == (sum_dtype or products) and added.device == a_parts[0].device
        _require(fits and added.ndim == a_parts[0].ndim, op, "added", _describe(added), limit)
    if sizes:
        _check_sum_sizes(op, a_parts, b_parts, biases, scales)
        shape = (*a_parts[0].shape[:-1], b_parts[0].shape[1])
        limit = f"of the products' shape {list(shape)}; expand it first"
        _require(added is None or added.shape == shape, op, "added", added is not None and _describe(added), limit)


def _check_sum_dtype(op: str, products: torch.dtype, sum_dtype: torch.dtype | None) -> None:
    fits = sum_dtype in (None, products) or (sum_dtype == torch.float32 and products in WIDENED)
    limit = f"None, the products' {products}, or torch.float32 for products of a dtype in {WIDENED}"
    _require(fits, op, "sum_dtype", sum_dtype, limit)


def _check_factors(op: str, count: int, factors: Sequence[float] | None) -> None:
    if factors is None:
        return
    limit = f"{count}, one for each product, or {count + 1}, one more for their sum"
    _require(count <= len(factors) <= count + 1, op, "len(factors)", len(factors), limit)
    for i, factor in enumerate(factors):
        fraction, exponent = math.frexp(factor)
        limit = f"a power of two from 2^-{LARGEST_EXPONENT} to 2^{LARGEST_EXPONENT}, or the negative of one"
        _require(abs(fraction) == 0.5 and abs(exponent - 1) <= LARGEST_EXPONENT, op, f"factors[{i}]", factor, limit)


def _check_sum_sizes(
    op: str,
    a_parts: Sequence[Tensor],
    b_parts: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: ScatterScales | None,
) -> None:
    product = (*a_parts[0].shape[:-1], b_parts[0].shape[1])
    for i, (a, b, bias) in enumerate(zip(a_parts, b_parts, biases, strict=True)):
        _check_inner(op, f"a_parts[{i}]", a.shape, f"b_parts[{i}]", b)
        _check_bias(op, f"biases[{i}]", bias, b)
        same = (*a.shape[:-1], b.shape[1]) == product
        limit = f"of the first product's shape {product}, since the products are added"
        _require(same, op, f"product {i}", (*a.shape[:-1], b.shape[1]), limit)
    if scales is not None:
        for i, (a, b) in enumerate(zip(a_parts, b_parts, strict=True)):
            _check_a_scale(op, f"a_scales[{i}]", scales.a_scales[i], a.shape)
            _check_b_scale(op, f"b_scales[{i}]", scales.b_scales[i], b)
            pair = (scales.a_scales[i], a.shape), (scales.b_scales[i], b)
            _check_pair(op, f"a_scales[{i}] and b_scales[{i}]", *pair)


def check_group(op: str, group_size: int, group: Any) -> None:
    """Check that a group exists and has the size that the op was told.

    Raises:
        ValueError: It does not exist, or has another size.
    """
    _, actual = group_and_size(group)
    limit = f"the size of group {group!r}, which has {actual} ranks; compile again after changing groups"
    _require(group_size == actual, op, "group_size", group_size, limit)


def _invalid(op: str, name: str, value: object, limit: str) -> ValueError:
    return ValueError(f"asynctp {op}: {name}={value!r} is not valid; it must be {limit}")


def _require(condition: bool, op: str, name: str, value: object, limit: str) -> None:
    if not condition:
        raise _invalid(op, name, value, limit)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _check_lengths(op: str, count: int, lists: dict[str, Sequence[Any]]) -> None:
    _require(count > 0, op, "number of operands", count, "at least 1")
    for name, items in lists.items():
        none = " (None for no bias)" if name == "biases" else ""
        _require(len(items) == count, op, f"len({name})", len(items), f"{count}: one for each product{none}")


def normalize_dim(dim: int, ndim: int) -> int:
    """The dimension counted from the front."""
    return dim + ndim if dim < 0 else dim


def _check_ndim(op: str, ndim: int) -> None:
    _require(ndim >= 2, op, "dimensions of A", ndim, "at least 2 (rows and contraction); unsqueeze a vector first")


def _check_dim(op: str, name: str, dim: int, ndim: int) -> int:
    _check_ndim(op, ndim)
    _require(-ndim <= dim < ndim, op, name, dim, f"between {-ndim} and {ndim - 1} for an operand of {ndim} dimensions")
    return normalize_dim(dim, ndim)


def _check_product(
    op: str,
    names: tuple[str, str, str],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    scales: GatherScales | ScatterScales | None,
) -> None:
    """Ranks, dtypes and devices of one product's operands: facts that are static under dynamic shapes."""
    a_name, b_name, bias_name = names
    _require(b.ndim == 2, op, b_name, _describe(b), "a matrix [K, N]; flatten or transpose it first")
    _require(a.device == b.device, op, b_name, _describe(b), f"on the device of {a_name}, {a.device}")
    if scales is None:
        _require(a.dtype in PLAIN_DTYPES, op, a_name, _describe(a), f"of a dtype in {PLAIN_DTYPES}")
        _require(b.dtype == a.dtype, op, b_name, _describe(b), f"of the dtype of {a_name}, {a.dtype}; cast one of them")
    else:
        for name, operand in ((a_name, a), (b_name, b)):
            _require(operand.dtype in FP8_DTYPES, op, name, _describe(operand), f"of a dtype in {FP8_DTYPES}")
        _require(scales.out_dtype in SCALED_OUT_DTYPES, op, "out_dtype", scales.out_dtype, f"in {SCALED_OUT_DTYPES}")
    if bias is not None:
        dtypes = (a.dtype,) if scales is None else SCALED_OUT_DTYPES
        fits = bias.ndim in (1, 2) and bias.dtype in dtypes and bias.device == a.device
        limit = f"a vector [N] or a row [1, N] of a dtype in {dtypes} on {a.device}"
        _require(fits, op, bias_name, _describe(bias), limit)


def _check_inner(op: str, a_name: str, a_shape: Sequence[int], b_name: str, b: Tensor) -> None:
    limit = f"of {a_shape[-1]} rows, the last size of {a_name} {list(a_shape)}"
    _require(a_shape[-1] == b.shape[0], op, b_name, _describe(b), limit)


def _check_bias(op: str, name: str, bias: Tensor | None, b: Tensor) -> None:
    if bias is not None:
        n = b.shape[1]
        fits = tuple(bias.shape) in ((n,), (1, n))
        _require(fits, op, name, _describe(bias), f"of shape [{n}] or [1, {n}]: one number per output column")


def _check_a_scale(op: str, name: str, scale: Tensor, rows: Sequence[int], tensorwise_allowed: bool = True) -> None:
    shapes = _shapes_of_a_scale(rows)
    fits = tuple(scale.shape) in shapes.values() or (tensorwise_allowed and scale.numel() == 1)
    tensorwise = "one number, or " if tensorwise_allowed else ""
    limit = f"float32, {tensorwise}of shape {' or '.join(f'{list(shape)} ({kind})' for kind, shape in shapes.items())}"
    _require(fits and scale.dtype == torch.float32, op, name, _describe(scale), limit)


def _check_b_scale(op: str, name: str, scale: Tensor, b: Tensor) -> None:
    shapes = _shapes_of_b_scale(b)
    fits = scale.numel() == 1 or tuple(scale.shape) in shapes.values()
    limit = f"float32, one number, or of shape {' or '.join(f'{list(at)} ({kind})' for kind, at in shapes.items())}"
    _require(fits and scale.dtype == torch.float32, op, name, _describe(scale), limit)


def _check_pair(op: str, names: str, of_a: tuple[Tensor, Sequence[int]], of_b: tuple[Tensor, Tensor]) -> None:
    shapes = [list(of_a[0].shape), list(of_b[0].shape)]
    limit = f"scaled in one of these ways: {', '.join(f'{a} x {b}' for a, b in SCALINGS)}"
    _require(_scaling(of_a, of_b) is not None, op, names, shapes, limit)


def _scaling(of_a: tuple[Tensor, Sequence[int]], of_b: tuple[Tensor, Tensor]) -> tuple[str, str] | None:
    """Which of `SCALINGS` the scales of an A (with its shape) and a B (with it) are, by their shapes."""
    kinds_a = _kinds(of_a[0], _shapes_of_a_scale(of_a[1]))
    kinds_b = _kinds(of_b[0], _shapes_of_b_scale(of_b[1]))
    return next((pair for pair in SCALINGS if pair[0] in kinds_a and pair[1] in kinds_b), None)


def _kinds(scale: Tensor, shapes: dict[str, tuple[int, ...]]) -> set[str]:
    one = {"one"} if scale.numel() == 1 else set()
    return one | {kind for kind, shape in shapes.items() if shape == tuple(scale.shape)}


def _shapes_of_a_scale(a: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """How the scales of an A of this shape can be arranged; blocks of 128 rows must be whole."""
    *lead, rows, depth = a
    shapes: dict[str, tuple[int, ...]] = {"rows": (*lead, rows, 1), "1x128": (*lead, rows, _blocks(depth))}
    return shapes | ({} if rows % BLOCK else {"128x128": (*lead, rows // BLOCK, _blocks(depth))})


def _shapes_of_b_scale(b: Tensor) -> dict[str, tuple[int, ...]]:
    depth, columns = b.shape
    along = _blocks(depth)
    return {"rows": (1, columns), "1x128": (along, columns), "128x128": (along, _blocks(columns))}


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


# --- the unfused programs, with the ops' argument lists ----------------------------------------------------
class Mover(Protocol):
    """Collectives of a group on a wire of its own, complete when they return; None where it has none for a call."""

    def gather(self, shard: Tensor, numbers: Tensor | None = None) -> tuple[Tensor, Tensor | None] | None:
        """All ranks' shards, and float32 numbers: [world, *shape] each."""

    def scatter(self, blocks: Tensor, reduce_op: str) -> Tensor | None:
        """This rank's part of the sum of `blocks` [world, *shape]."""

    def all_reduce(self, partial: Tensor, reduce_op: str) -> Tensor | None:
        """The sum, on every rank."""


def unfused_all_gather_matmul(
    a_shard: Tensor,
    bs: list[Tensor],
    biases: Sequence[Tensor | None],
    gather_dim: int,
    return_a_full: bool,
    group_size: int,
    group_name: Any,
    *,
    mover: Mover | None = None,
) -> list[Tensor]:
    """`asynctp::all_gather_matmul` without overlap; the arguments are checked already."""
    a_full, _ = _gather_with(a_shard, None, gather_dim, group_size, group_name, mover)
    outs = [product(a_full, b, bias) for b, bias in zip(bs, biases, strict=True)]
    return [*outs, a_full] if return_a_full else outs


def unfused_all_gather_scaled_matmul(
    a_shard: Tensor,
    a_scale: Tensor,
    bs: list[Tensor],
    b_scales: list[Tensor],
    biases: Sequence[Tensor | None],
    gather_dim: int,
    gather_a_scale: bool,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    return_a_full: bool,
    group_size: int,
    group_name: Any,
    along_shard: Tensor | None = None,
    *,
    mover: Mover | None = None,
) -> list[Tensor]:
    """`asynctp::all_gather_scaled_matmul` without overlap; the arguments are checked already.

    `along_shard`: fp32 numbers, one per row of the shard (`[*, M/W, *, 1]`), that are gathered too and returned last.
    """
    numbers = a_scale if gather_a_scale else along_shard
    a_full, all_numbers = _gather_with(a_shard, numbers, gather_dim, group_size, group_name, mover)
    scale = all_numbers if gather_a_scale and all_numbers is not None else a_scale
    outs = [
        scaled_product(a_full, b, scale, b_scale, bias, out_dtype, use_fast_accum)
        for b, b_scale, bias in zip(bs, b_scales, biases, strict=True)
    ]
    outs += [a_full] if return_a_full else []
    return [*outs, all_numbers] if along_shard is not None and all_numbers is not None else outs


def unfused_matmul_reduce_scatter(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    biases: Sequence[Tensor | None],
    reduce_op: str,
    scatter_dim: int,
    group_size: int,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: Sequence[float] | None = None,
    *,
    mover: Mover | None = None,
) -> Tensor:
    """`asynctp::matmul_reduce_scatter` without overlap; the arguments are checked already."""
    total = _summed_products(a_parts, b_parts, biases, sum_dtype, added, factors)
    return reduce_scatter(total, reduce_op, scatter_dim, group_size, group_name, mover)


def unfused_scaled_matmul_reduce_scatter(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    a_scales: list[Tensor],
    b_scales: list[Tensor],
    biases: Sequence[Tensor | None],
    reduce_op: str,
    scatter_dim: int,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    group_size: int,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: Sequence[float] | None = None,
    *,
    mover: Mover | None = None,
) -> Tensor:
    """`asynctp::scaled_matmul_reduce_scatter` without overlap; the arguments are checked already."""
    parts = (a_parts, b_parts, a_scales, b_scales, biases)
    total = _summed_scaled_products(*parts, out_dtype, use_fast_accum, sum_dtype, added, factors)
    return reduce_scatter(total, reduce_op, scatter_dim, group_size, group_name, mover)


def unfused_matmul_all_reduce(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    biases: Sequence[Tensor | None],
    reduce_op: str,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: Sequence[float] | None = None,
    *,
    mover: Mover | None = None,
) -> Tensor:
    """`asynctp::matmul_all_reduce` without overlap; the arguments are checked already."""
    total = _summed_products(a_parts, b_parts, biases, sum_dtype, added, factors)
    return all_reduce(total, reduce_op, group_name, mover, in_place=True)


def unfused_scaled_matmul_all_reduce(
    a_parts: list[Tensor],
    b_parts: list[Tensor],
    a_scales: list[Tensor],
    b_scales: list[Tensor],
    biases: Sequence[Tensor | None],
    reduce_op: str,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    group_name: Any,
    sum_dtype: torch.dtype | None = None,
    added: Tensor | None = None,
    factors: Sequence[float] | None = None,
    *,
    mover: Mover | None = None,
) -> Tensor:
    """`asynctp::scaled_matmul_all_reduce` without overlap; the arguments are checked already."""
    parts = (a_parts, b_parts, a_scales, b_scales, biases)
    total = _summed_scaled_products(*parts, out_dtype, use_fast_accum, sum_dtype, added, factors)
    return all_reduce(total, reduce_op, group_name, mover, in_place=True)


# --- collectives -----------------------------------------------------------------------------------------
def gathered_shape(shape: Sequence[int], dim: int, group_size: int) -> tuple[int, ...]:
    """A shard's shape, `group_size` times as long in `dim`."""
    dim = normalize_dim(dim, len(shape))
    return (*shape[:dim], shape[dim] * group_size, *shape[dim + 1 :])


def _gather_with(
    shard: Tensor, numbers: Tensor | None, dim: int, group_size: int, group_name: Any, mover: Mover | None
) -> tuple[Tensor, Tensor | None]:
    """All ranks' shards, and numbers, joined along `dim`: by the mover, if there is one and it can."""
    dim = normalize_dim(dim, shard.ndim)
    found = None if mover is None else mover.gather(shard.contiguous(), numbers)
    if found is not None:
        pieces, of_numbers = found
        return _joined(pieces, dim), None if of_numbers is None else _joined(of_numbers, dim)
    whole = gather(shard, dim, group_size, group_name)
    return whole, None if numbers is None else gather(numbers, dim, group_size, group_name)


def _joined(pieces: Tensor, dim: int) -> Tensor:
    """[ranks, *shape] as the ranks' tensors one after the other along `dim`: contiguous."""
    ranks, *shape = pieces.shape
    return pieces.movedim(0, dim).reshape(gathered_shape(shape, dim, ranks)).contiguous()


def gather(shard: Tensor, dim: int, group_size: int, group_name: Any) -> Tensor:
    """All ranks' shards, joined along `dim` in rank order: contiguous, ordinary memory.

    fp8 travels as bytes (gloo has no fp8 type), which is exact: a gather only moves data.
    """
    fp8 = shard.dtype in FP8_DTYPES
    wire = (shard.view(torch.uint8) if fp8 else shard).contiguous()
    c10d = torch.ops._c10d_functional
    stacked = c10d.wait_tensor(c10d.all_gather_into_tensor(wire, group_size, compat.group_name_of(group_name)))
    full = _joined(stacked.view(group_size, *shard.shape), normalize_dim(dim, shard.ndim))
    return full.view(shard.dtype) if fp8 else full


def reduce_scatter(
    full: Tensor, reduce_op: str, dim: int, group_size: int, group_name: Any, mover: Mover | None = None
) -> Tensor:
    """This rank's block along `dim` of the ranks' sum or average: by the mover, if there is one and it can.

    gloo's average is spelled out as sum, then division, both rounded to the tensor's dtype (of integers, cut off).
    """
    dim = normalize_dim(dim, full.ndim)
    sizes = (*full.shape[:dim], group_size, full.shape[dim] // group_size, *full.shape[dim + 1 :])
    blocks = full.reshape(sizes).movedim(dim, 0).contiguous()
    if mover is not None and (part := mover.scatter(blocks, reduce_op)) is not None:
        return part
    divide = reduce_op == "avg" and full.device.type == "cpu"
    c10d = torch.ops._c10d_functional
    op = "sum" if divide else reduce_op
    block = c10d.wait_tensor(c10d.reduce_scatter_tensor(blocks, op, group_size, compat.group_name_of(group_name)))
    shard: Tensor = block.view(blocks.shape[1:])
    return (shard / group_size).to(shard.dtype) if divide else shard


def all_reduce(
    partial: Tensor, reduce_op: str, group_name: Any, mover: Mover | None = None, *, in_place: bool = False
) -> Tensor:
    """The ranks' sum or average, on every rank; gloo's average, and a mover, as in `reduce_scatter`.

    in_place: `partial` is the caller's own and may become the result, which saves a copy.
    """
    if mover is not None and (total := mover.all_reduce(partial.contiguous(), reduce_op)) is not None:
        return total
    divide = reduce_op == "avg" and partial.device.type == "cpu"
    if in_place:
        op = ReduceOp.AVG if reduce_op == "avg" and not divide else ReduceOp.SUM
        total = partial.contiguous()
        torch.distributed.all_reduce(total, op, group=compat.process_group(group_name))
    else:
        c10d, name = torch.ops._c10d_functional, "sum" if divide else reduce_op
        total = c10d.wait_tensor(c10d.all_reduce(partial, name, compat.group_name_of(group_name)))
    return total / group_and_size(group_name)[1] if divide else total


# --- matmuls ---------------------------------------------------------------------------------------------
def _rows(a: Tensor) -> Tensor:
    return a.flatten(0, -2)


def _summed_products(
    a_parts: Sequence[Tensor],
    b_parts: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    sum_dtype: torch.dtype | None,
    added: Tensor | None,
    factors: Sequence[float] | None,
) -> Tensor:
    products = [product(a, b, bias) for a, b, bias in zip(a_parts, b_parts, biases, strict=True)]
    return _sum(products, sum_dtype, added, factors)


def _summed_scaled_products(
    a_parts: Sequence[Tensor],
    b_parts: Sequence[Tensor],
    a_scales: Sequence[Tensor],
    b_scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    sum_dtype: torch.dtype | None,
    added: Tensor | None,
    factors: Sequence[float] | None,
) -> Tensor:
    parts = zip(a_parts, b_parts, a_scales, b_scales, biases, strict=True)
    products = [
        scaled_product(a, b, a_scale, b_scale, bias, out_dtype, use_fast_accum)
        for a, b, a_scale, b_scale, bias in parts
    ]
    return _sum(products, sum_dtype, added, factors)


def _sum(
    products: list[Tensor], dtype: torch.dtype | None, added: Tensor | None, factors: Sequence[float] | None
) -> Tensor:
    """The sum in list order, `added` last, in `dtype`, to which the products are converted first; None: their own."""
    terms = products if dtype is None else [product.to(dtype) for product in products]
    each, of_sum = split_factors(factors, len(products))
    total, *others = [multiplied(*pair) for pair in zip(terms, each, strict=True)]
    for term in [*others, *([] if added is None else [added])]:
        total = total + term
    return multiplied(total, of_sum)


def split_factors(factors: Sequence[float] | None, count: int) -> tuple[list[float], float]:
    """The factors of so many products, and that of their sum."""
    if factors is None:
        return [1.0] * count, 1.0
    return list(factors[:count]), factors[count] if len(factors) > count else 1.0


def multiplied(tensor: Tensor, factor: float) -> Tensor:
    """The tensor times a number, in its dtype; the tensor itself if that is 1."""
    return tensor if factor == 1 else tensor * factor


def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`a @ b + bias`, rounded once."""
    flat = torch.mm(_rows(a), b) if bias is None else torch.addmm(bias, _rows(a), b)
    return flat.view(*a.shape[:-1], b.shape[1])


def scaled_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """`(a × a_scale) @ (b × b_scale) + bias`, rounded once to `out_dtype`."""
    rows = _rows(a)
    recipe = _scaling((a_scale, a.shape), (b_scale, b))
    if recipe is not None and BLOCKWISE.issuperset(recipe):
        flat = _product_in_blocks(rows, b, _rows(a_scale), b_scale, recipe, bias, out_dtype, use_fast_accum)
        return flat.view(*a.shape[:-1], b.shape[1])
    row_scale = a_scale.reshape(()) if a_scale.numel() == 1 else a_scale.reshape(-1, 1)
    column_scale = b_scale.reshape(()) if b_scale.numel() == 1 else b_scale
    flat = _scaled_mm(rows, b, row_scale, column_scale, bias, out_dtype, use_fast_accum)
    return flat.view(*a.shape[:-1], b.shape[1])


def _product_in_blocks(
    rows: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    recipe: tuple[str, str],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """`scaled_product` of matrices with scales of blocks: cuBLAS's on CUDA, in fp32 on CPU."""
    if rows.device.type == "cpu":
        product = (rows.float() * _each(a_scale, rows.shape)) @ (b.float() * _each(b_scale, b.shape))
        return (product if bias is None else product + bias.float()).to(out_dtype)
    if b.stride(0) != 1:
        b = b.t().contiguous().t()
    of_a = _columns_first(a_scale) if recipe[0] == "1x128" else _padded_columns(a_scale.t())
    of_b = _columns_first(b_scale.t()) if recipe[1] == "1x128" else _padded_columns(b_scale)
    operands, fits = (rows, b, of_a, of_b, recipe), bias is None or bias.dtype == out_dtype != torch.float32
    if fits:
        row = None if bias is None else bias.reshape(-1)
        return compat.scaled_mm_in_blocks(*operands, row, out_dtype, use_fast_accum)
    assert bias is not None
    return (compat.scaled_mm_in_blocks(*operands, None, torch.float32, use_fast_accum) + bias.float()).to(out_dtype)


def _each(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Scales of blocks, one for each element of a matrix."""
    for dim in (0, 1):
        if scale.shape[dim] != shape[dim]:
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, shape[dim])
    return scale


def _columns_first(scale: Tensor) -> Tensor:
    """Scales of 1x128 blocks as torch wants them: [M or N, K/128], strides (1, M or N)."""
    return torch.empty_strided(scale.shape, (1, scale.shape[0]), dtype=scale.dtype, device=scale.device).copy_(scale)


def _padded_columns(scale: Tensor) -> Tensor:
    """Scales of 128x128 blocks as torch wants them: [K/128, *], columns contiguous, padded to a multiple of 4 rows."""
    depth, columns = scale.shape
    padded = scale.new_zeros((columns, -(-depth // 4) * 4)).t()
    padded[:depth].copy_(scale)
    return padded


def _finish(
    product: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    scaled = product * row_scale * column_scale
    return (scaled if bias is None else scaled + bias.float()).to(out_dtype)


def _scaled_mm(
    rows: Tensor,
    b: Tensor,
    row_scale: Tensor,
    column_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """`torch._scaled_mm` where it takes the scales, bias and dtype; else the same product in fp32, scaled after it."""
    if b.stride(0) != 1:
        b = b.t().contiguous().t()
    tensorwise = row_scale.ndim == 0 and column_scale.ndim == 0
    rowwise = row_scale.ndim == 2 and column_scale.ndim == 2 and out_dtype == torch.bfloat16 and rows.is_cuda
    bias_fits = bias is None or (bias.dtype == out_dtype and out_dtype != torch.float32)
    if (tensorwise or rowwise) and bias_fits:
        row = None if bias is None else bias.reshape(-1)
        return compat.scaled_mm(rows, b, row_scale, column_scale, row, out_dtype, use_fast_accum)
    one = row_scale.new_ones(())
    product = compat.scaled_mm(rows, b, one, one, None, torch.float32, use_fast_accum)
    return _finish(product, row_scale, column_scale, bias, out_dtype)


# --- the functions of this module ------------------------------------------------------------------------
UNFUSED = types.SimpleNamespace(
    all_gather_matmul=unfused_all_gather_matmul,
    all_gather_scaled_matmul=unfused_all_gather_scaled_matmul,
    matmul_reduce_scatter=unfused_matmul_reduce_scatter,
    scaled_matmul_reduce_scatter=unfused_scaled_matmul_reduce_scatter,
    matmul_all_reduce=unfused_matmul_all_reduce,
    scaled_matmul_all_reduce=unfused_scaled_matmul_all_reduce,
)
"""The unfused programs, by the names of the ops."""

_callers = Callers(UNFUSED, checks=True)
all_gather_matmul = _callers.all_gather_matmul
all_gather_scaled_matmul = _callers.all_gather_scaled_matmul
matmul_reduce_scatter = _callers.matmul_reduce_scatter
scaled_matmul_reduce_scatter = _callers.scaled_matmul_reduce_scatter
matmul_all_reduce = _callers.matmul_all_reduce
scaled_matmul_all_reduce = _callers.scaled_matmul_all_reduce
