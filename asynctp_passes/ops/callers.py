"""The programs as functions to call by hand: keyword arguments, any spelling of a group, and of lists.

Each of the three ops has two: one without scales, and one with.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, SupportsIndex, TypeVar

import torch
from torch import Tensor

from asynctp_passes.ops.arguments import (
    as_list,
    group_and_size,
    numbers,
    operands_of,
    optional_list,
    require,
    split_a_full,
)
from asynctp_passes.ops.calls import SIGNATURES
from asynctp_passes.ops.checks import REDUCE_OPS, check

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
        require(isinstance(value, kind), op, name, value, words)
    elif name in _TENSORS:
        if isinstance(value, Iterator):  # which can be looked at once only
            return
        several = isinstance(value, Iterable) and not isinstance(value, Tensor | str)
        for item in value if several else [value]:
            fits = isinstance(item, Tensor) and not hasattr(item, "to_local")
            limit = "a tensor, or a list of tensors, of this rank; give to_local() of a DTensor"
            require(fits or (item is None and name in _OPTIONAL), op, name, type(item), limit)


class Callers:
    """The programs with keyword arguments and any spelling of a process group.

    `reference` has them as sequential programs, `asynctp_passes.ops` as the fused ops. These are traceable by
    torch.compile, and differentiable but for the scaled ones, whose gradient raises.

    Args:
        programs: What has each program as an attribute, with the fused op's name and argument list.
        checks: Whether arguments are checked here; the ops check them themselves.
    """

    def __init__(self, programs: Any, *, checks: bool) -> None:
        self._programs, self._checks = programs, checks

    def _run(self, op: str, **arguments: Any) -> Any:
        if self._checks:
            check(SIGNATURES[op].named(arguments))
        return getattr(self._programs, op)(*SIGNATURES[op].in_order(arguments))

    def _gather(
        self, bs: Any, biases: Any, group: Any, return_a_full: bool, **arguments: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        """Run the op of a gather: with lists of operands, and its group's name and size."""
        name, size = group_and_size(group)
        lists: dict[str, Any] = {"bs": (b_parts := as_list(bs)), "biases": optional_list(biases, len(b_parts))}
        where = {"return_a_full": return_a_full, "group_size": size, "group_name": name}
        return split_a_full(self._run("all_gather_matmul", **lists, **where, **arguments), return_a_full)

    def _reduce(self, op: str, a: Any, b: Any, biases: Any, group: Any, factors: Any, **arguments: Any) -> Tensor:
        """Run an op that reduces, in the same way."""
        name, size = group_and_size(group)
        lists: dict[str, Any] = {"a_parts": (a_parts := operands_of(op, a)), "b_parts": as_list(b)}
        lists |= {"biases": optional_list(biases, len(a_parts)), "factors": numbers(factors)}
        where = {"group_size": size} if "scatter_dim" in arguments else {}
        out: Tensor = self._run(op, **lists, **where, group_name=name, **arguments)
        return out

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
        return self._gather(bs, biases, group, return_a_full, a_shard=a_shard, gather_dim=gather_dim)

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
        scales: dict[str, Any] = {"a_scale": a_scale, "b_scales": as_list(b_scales), "gather_a_scale": gather_a_scale}
        scales |= {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
        return self._gather(bs, biases, group, return_a_full, a_shard=a_shard, gather_dim=gather_dim, **scales)

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
        given: dict[str, Any] = {
            "reduce_op": reduce_op,
            "scatter_dim": scatter_dim,
            "sum_dtype": sum_dtype,
            "added": added,
        }
        return self._reduce("matmul_reduce_scatter", a, b, biases, group, factors, **given)

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
        given: dict[str, Any] = {
            "reduce_op": reduce_op,
            "scatter_dim": scatter_dim,
            "sum_dtype": sum_dtype,
            "added": added,
        }
        given |= {"a_scales": as_list(a_scales), "b_scales": as_list(b_scales)}
        given |= {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
        return self._reduce("matmul_reduce_scatter", a, b, biases, group, factors, **given)

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
        given: dict[str, Any] = {"reduce_op": reduce_op, "sum_dtype": sum_dtype, "added": added}
        return self._reduce("matmul_all_reduce", a, b, biases, group, factors, **given)

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
        given: dict[str, Any] = {"reduce_op": reduce_op, "sum_dtype": sum_dtype, "added": added}
        given |= {"a_scales": as_list(a_scales), "b_scales": as_list(b_scales)}
        given |= {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
        return self._reduce("matmul_all_reduce", a, b, biases, group, factors, **given)
