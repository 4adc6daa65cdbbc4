"""The programs as functions to call by hand: keyword arguments, any spelling of a group, and of lists."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, SupportsIndex, TypeVar

import torch
from torch import Tensor

from asynctp_passes.ops.arguments import as_list, group_and_size, operands_of, optional_list, require
from asynctp_passes.ops.calls import SIGNATURES
from asynctp_passes.ops.checks import REDUCE_OPS, check

_KINDS: dict[str, tuple[Any, str]] = {
    "gather_dim": (SupportsIndex, "an int"),
    "scatter_dim": (SupportsIndex, "an int"),
    "reduce_op": (str, f"one of {REDUCE_OPS}"),
    "out_dtype": (torch.dtype | None, "a torch.dtype or None"),
    "sum_dtype": (torch.dtype | None, "a torch.dtype or None"),
    "factors": (Sequence | None, "a list of numbers, or None"),
}
_TENSORS = ("a_shard", "a", "bs", "b", "a_scale", "a_scales", "b_scales", "biases", "added")
_OPTIONAL = ("a_scale", "a_scales", "b_scales", "biases", "added")
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


def _scales(names: tuple[str, str], of_a: Any, of_b: Any, out_dtype: torch.dtype | None) -> dict[str, Any]:
    """The op's arguments for the scales that a caller gave; products are bfloat16 if it named no dtype."""
    given = dict(zip(names, (of_a, None if of_b is None else as_list(of_b)), strict=True))
    scaled = of_a is not None or of_b is not None
    return given | {"out_dtype": torch.bfloat16 if scaled and out_dtype is None else out_dtype}


class Callers:
    """The programs with keyword arguments and any spelling of a process group.

    `reference` has them as sequential programs, `asynctp_passes.ops` as the fused ops. These are traceable by
    torch.compile, and differentiable but for matmuls with scales, whose gradient raises.

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

    def _reduce(self, op: str, a: Any, b: Any, a_scales: Any, b_scales: Any, **given: Any) -> Tensor:
        """Run an op that reduces: with lists of operands, and its group's name and size."""
        name, size = group_and_size(given.pop("group"))
        given |= {"a_parts": (a_parts := operands_of(op, a)), "b_parts": as_list(b), "group_name": name}
        given["biases"] = optional_list(given["biases"], len(a_parts))
        given["factors"] = None if given["factors"] is None else [float(factor) for factor in given["factors"]]
        of_a = None if a_scales is None else as_list(a_scales)
        given |= _scales(("a_scales", "b_scales"), of_a, b_scales, given["out_dtype"])
        out: Tensor = self._run(op, **given, **({"group_size": size} if "scatter_dim" in given else {}))
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
        a_scale: Tensor | None = None,
        b_scales: Tensor | Sequence[Tensor] | None = None,
        gather_a_scale: bool = False,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Gather `a_shard` over the ranks, then multiply by each of `bs`: `shard → all_gather → mm, mm, …`.

        Differentiable as far as torch's own collectives are, without scales.

        Args:
            a_shard: This rank's piece of A; fp8, if there are scales.
            bs: Right-hand operands, or the one there is. On CUDA, fp8 that is not column-major is copied.
            gather_dim: Dimension of A to gather along, negative from the end; the last is the contraction.
            group: Group name, ProcessGroup, one-dimensional DeviceMesh, or `(DeviceMesh, dim)`.
            biases: One per operand, added to its product; None adds none.
            return_a_full: Whether to return the gathered A too.
            a_scale: fp32 factor of A: one number, one per row, or one per block of 1x128 or 128x128. None for none.
            b_scales: fp32 factor of each operand: one number, one per column, or one per block, not of 128x128 too.
            gather_a_scale: True if `a_scale` holds the rows of the shard and is to be gathered with it; False if it is
                the same on all ranks: one number, or all rows of the gathered A.
            out_dtype: Dtype of products with scales; None: bfloat16.
            use_fast_accum: Whether CUDA may accumulate with less than fp32's precision.

        Shapes:
            a_shard: `[*, M/W, *, K]` over W ranks (`[*, K/W]` if the last dimension is gathered); bs: `[K, N_i]`;
            biases: `[N_i]` or `[1, N_i]`; products: `[*, M, *, N_i]`; a_full: `[*, M, *, K]`. a_scale: one element, or
            rows of A and a 1 (`[*, M/W, *, 1]` if gathered, else `[*, M, *, 1]`); b_scales: one element, or `[1, N_i]`.
            Of blocks: `[*, rows, K/128]` for 1x128 and, if the rows are a multiple of 128, `[*, rows/128, K/128]`;
            b_scales `[K/128, N_i]` or `[K/128, N_i/128]`, sizes rounded up.

        Units:
            Scales multiply: the value is `fp8 number × scale`.

        Returns:
            The products, and the gathered A or None. All contiguous, none an alias of an input.

        Raises:
            ValueError: Shapes, dtypes, dims or lists that do not fit together, or a group that does not exist.

        Source:
            torch.distributed._functional_collectives (all_gather_single), torch.addmm and torch._scaled_mm.
        """
        name, size = group_and_size(group)
        b_parts = as_list(bs)
        outs = self._run(
            "all_gather_matmul",
            a_shard=a_shard,
            bs=b_parts,
            biases=optional_list(biases, len(b_parts)),
            gather_dim=gather_dim,
            return_a_full=return_a_full,
            group_size=size,
            group_name=name,
            **_scales(("a_scale", "b_scales"), a_scale, b_scales, out_dtype),
            gather_a_scale=gather_a_scale,
            use_fast_accum=use_fast_accum,
        )
        return (outs[:-1], outs[-1]) if return_a_full else (outs, None)

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
        a_scales: Tensor | Sequence[Tensor] | None = None,
        b_scales: Tensor | Sequence[Tensor] | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
        sum_dtype: torch.dtype | None = None,
        added: Tensor | None = None,
        factors: Sequence[float] | None = None,
    ) -> Tensor:
        """Multiply, add up the products, then reduce-scatter the sum: `mm + mm + … → reduce_scatter → out_shard`.

        Differentiable as far as torch's own collectives are, without scales.

        Args:
            a: Left-hand operand, or one per product; fp8, if there are scales.
            b: Right-hand operand, or one per product. On CUDA, fp8 that is not column-major is copied.
            scatter_dim: Dimension of the product to scatter along, negative from the end; the last is its columns.
            group: Group name, ProcessGroup, one-dimensional DeviceMesh, or `(DeviceMesh, dim)`.
            reduce_op: `"sum"` or `"avg"` over the ranks (the products of one rank are always summed).
            biases: One, or one per product, added on every rank; None adds none.
            a_scales: fp32 factor of each left-hand operand: one number, one per row or per block. None for none.
            b_scales: fp32 factor of each right-hand operand: one number, one per column or per block.
            out_dtype: Dtype of products with scales, and of their sum if that has no other; None: bfloat16.
            use_fast_accum: Whether CUDA may accumulate with less than fp32's precision.
            sum_dtype: float32: products of 16 bits, once rounded, are converted to it before anything is added, and
                the result has it. None converts nothing.
            added: What this rank adds to its products, in the result's dtype; None adds nothing.
            factors: What this rank multiplies its products by, once rounded and converted: a number for each, and one
                more for the whole sum, if that is multiplied too. Powers of two, or negatives of such; None
                multiplies nothing.

        Shapes:
            a: `[*, M, *, K_i]`; b: `[K_i, N]`; biases: `[N]` or `[1, N]`; added: `[*, M, *, N]`; result over W ranks:
            `[*, M/W, *, N]`, or `[*, M, *, N/W]` if the last dimension is scattered. a_scales: one element, or
            `[*, M, *, 1]`; b_scales: one element, or `[1, N]`. Blocks as in `all_gather_matmul`.

        Units:
            Scales multiply: the value is `fp8 number × scale`.

        Returns:
            This rank's piece, contiguous.

        Raises:
            ValueError: Shapes, dtypes, dims or lists that do not fit together, or a group that does not exist.

        Source:
            torch.distributed._functional_collectives (reduce_scatter_single), torch.addmm and torch._scaled_mm.
        """
        return self._reduce(
            "matmul_reduce_scatter",
            a,
            b,
            a_scales,
            b_scales,
            scatter_dim=scatter_dim,
            group=group,
            reduce_op=reduce_op,
            biases=biases,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
            sum_dtype=sum_dtype,
            added=added,
            factors=factors,
        )

    @_of_kinds
    def matmul_all_reduce(
        self,
        a: Tensor | Sequence[Tensor],
        b: Tensor | Sequence[Tensor],
        *,
        group: Any,
        reduce_op: str = "sum",
        biases: Tensor | Sequence[Tensor | None] | None = None,
        a_scales: Tensor | Sequence[Tensor] | None = None,
        b_scales: Tensor | Sequence[Tensor] | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
        sum_dtype: torch.dtype | None = None,
        added: Tensor | None = None,
        factors: Sequence[float] | None = None,
    ) -> Tensor:
        """Multiply, add up the products, then all-reduce the sum: `mm + mm + … → all_reduce → out`.

        Differentiable as far as torch's own collectives are, without scales.

        Args:
            a, b: As in `matmul_reduce_scatter`, and so are all arguments but the dimension, which there is none of.
            group: Group name, ProcessGroup, one-dimensional DeviceMesh, or `(DeviceMesh, dim)`.
            reduce_op, biases, a_scales, b_scales, out_dtype, use_fast_accum, sum_dtype, added, factors: As there.

        Shapes:
            a: `[*, M, K_i]`; b: `[K_i, N]`; biases: `[N]` or `[1, N]`; added and result: `[*, M, N]`, on every rank.
            a_scales: one element, or `[*, M, 1]`; b_scales: one element, or `[1, N]`. Blocks as in `all_gather_matmul`.

        Units:
            Scales multiply: the value is `fp8 number × scale`.

        Returns:
            The sum, contiguous, the same on all ranks.

        Raises:
            ValueError: Shapes, dtypes or lists that do not fit together, or a group that does not exist.

        Source:
            torch.distributed._functional_collectives (all_reduce), torch.addmm and torch._scaled_mm.
        """
        return self._reduce(
            "matmul_all_reduce",
            a,
            b,
            a_scales,
            b_scales,
            group=group,
            reduce_op=reduce_op,
            biases=biases,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
            sum_dtype=sum_dtype,
            added=added,
            factors=factors,
        )
