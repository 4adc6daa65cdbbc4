"""The calls of the six fused ops: their schemas, and the arguments of one call by their names in these.

An op's arguments become a `GatherCall` or a `ReduceCall` where it is called. The call goes through everything: checks
(`checks`), fake results (`fake`), the reference program (`reference`), gradients (`autograd`), and the kernels of
`asynctp_kernels`, which read it by attribute. In calls of the ops without scales, the arguments of scales are absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["OPS", "SIGNATURES", "Call", "GatherCall", "ReduceCall", "Signature", "signature"]

OPS = {
    "all_gather_matmul": (
        "(Tensor a_shard, Tensor[] bs, Tensor?[] biases, int gather_dim, bool return_a_full, int group_size, "
        "Any group_name, bool? all_keep=None, int accord=0) -> Tensor[]"
    ),
    "all_gather_scaled_matmul": (
        "(Tensor a_shard, Tensor a_scale, Tensor[] bs, Tensor[] b_scales, Tensor?[] biases, int gather_dim, "
        "bool gather_a_scale, ScalarType out_dtype, bool use_fast_accum, bool return_a_full, int group_size, "
        "Any group_name, Tensor? along_shard=None, bool? all_keep=None, int accord=0) -> Tensor[]"
    ),
    "matmul_reduce_scatter": (
        "(Tensor[] a_parts, Tensor[] b_parts, Tensor?[] biases, str reduce_op, int scatter_dim, int group_size, "
        "Any group_name, ScalarType? sum_dtype=None, Tensor? added=None, float[]? factors=None, int accord=0) -> Tensor"
    ),
    "scaled_matmul_reduce_scatter": (
        "(Tensor[] a_parts, Tensor[] b_parts, Tensor[] a_scales, Tensor[] b_scales, Tensor?[] biases, "
        "str reduce_op, int scatter_dim, ScalarType out_dtype, bool use_fast_accum, int group_size, "
        "Any group_name, ScalarType? sum_dtype=None, Tensor? added=None, float[]? factors=None, int accord=0) -> Tensor"
    ),
    "matmul_all_reduce": (
        "(Tensor[] a_parts, Tensor[] b_parts, Tensor?[] biases, str reduce_op, Any group_name, "
        "ScalarType? sum_dtype=None, Tensor? added=None, float[]? factors=None, int accord=0) -> Tensor"
    ),
    "scaled_matmul_all_reduce": (
        "(Tensor[] a_parts, Tensor[] b_parts, Tensor[] a_scales, Tensor[] b_scales, Tensor?[] biases, "
        "str reduce_op, ScalarType out_dtype, bool use_fast_accum, Any group_name, ScalarType? sum_dtype=None, "
        "Tensor? added=None, float[]? factors=None, int accord=0) -> Tensor"
    ),
}


class GatherCall(NamedTuple):
    """The arguments of a gather and its matmuls, with or without scales.

    A named tuple is made in a fifth of the time that a frozen dataclass takes, and every eager call makes one. Kernels
    make a plan for its `values` and the layouts of its tensors.

    Attributes:
        op: The op's name.
        a_scale, b_scales, gather_a_scale, out_dtype, use_fast_accum: Of the op with scales; else absent.
        along_shard: float32, one number per row of the shard (`[*, M/W, *, 1]`): gathered too, and returned last.
        all_keep: Every rank keeps the gathered A, the same on all ranks; None: as `return_a_full`.
        accord: What all ranks have agreed that this graph does otherwise than its program, as a number; 0: nothing.
    """

    a_shard: Tensor
    bs: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    group_name: Any
    op: str
    gather_dim: int
    return_a_full: bool
    group_size: int
    gather_a_scale: bool = False
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    all_keep: bool | None = None
    accord: int = 0
    a_scale: Tensor | None = None
    b_scales: Sequence[Tensor] = ()
    along_shard: Tensor | None = None

    @property
    def values(self) -> tuple[Any, ...]:
        """The arguments from `op` on that are no tensors: hashable."""
        return self[4:-3]

    def given(self) -> set[str]:
        """The optional arguments that do not have their defaults."""
        return SIGNATURES[self.op].given(self)

    @property
    def first(self) -> Tensor | None:
        """A tensor that tells where the call runs."""
        return self.a_shard

    @property
    def matmul_dtype(self) -> torch.dtype:
        """The dtype of the matmuls: without scales that of A, but int32 of int8."""
        return self.out_dtype or (torch.int32 if self.a_shard.dtype == torch.int8 else self.a_shard.dtype)

    @property
    def travels(self) -> Tensor | None:
        """Numbers that are gathered with the shard: its scales, or others that are only returned."""
        return self.a_scale if self.gather_a_scale else self.along_shard

    @property
    def kept(self) -> bool:
        """Every rank keeps the gathered A."""
        return self.return_a_full if self.all_keep is None else self.all_keep


class ReduceCall(NamedTuple):
    """The arguments of matmuls whose sum is reduce-scattered or all-reduced, with or without scales.

    A named tuple as `GatherCall`.

    Attributes:
        op: The op's name.
        scatter_dim, group_size: None of an all-reduce.
        out_dtype: Of the matmuls, with scales; None: that of the As.
        a_scales, b_scales, use_fast_accum: Of the op with scales; else absent.
        sum_dtype: Matmuls, once rounded, are converted to it before anything is added; None: not at all.
        accord: As of a `GatherCall`.
        added: A term of the sum, after the matmuls.
        factors: A number for each matmul, which multiplies it, and maybe one more for the sum.
    """

    a_parts: Sequence[Tensor]
    b_parts: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    group_name: Any
    op: str
    reduce_op: str
    scatter_dim: int | None = None
    group_size: int | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    sum_dtype: torch.dtype | None = None
    accord: int = 0
    a_scales: Sequence[Tensor] = ()
    b_scales: Sequence[Tensor] = ()
    added: Tensor | None = None
    factors: Sequence[float] | None = None

    @property
    def values(self) -> tuple[Any, ...]:
        """The arguments from `op` on that are no tensors and no list: hashable."""
        return self[4:-4]

    def given(self) -> set[str]:
        """The optional arguments that do not have their defaults."""
        return SIGNATURES[self.op].given(self)

    @property
    def first(self) -> Tensor | None:
        """A tensor that tells where the call runs; None: there is no operand, which the checks refuse."""
        return self.a_parts[0] if self.a_parts else None


Call = GatherCall | ReduceCall


class Signature:
    """The arguments of an op, in its schema's order.

    Attributes:
        names: Of all arguments.
        needed: How many of them have no default.
        defaults: Of the others, None or an integer.
    """

    def __init__(self, op: str, kind: type[GatherCall] | type[ReduceCall]) -> None:
        self.op, self.kind = op, kind
        arguments = OPS[op].partition("(")[2].partition(") -> ")[0].split(", ")
        self.names = tuple(argument.split()[-1].partition("=")[0] for argument in arguments)
        self.needed = sum("=" not in argument for argument in arguments)
        texts = [argument.partition("=")[2] for argument in arguments[self.needed :]]
        values = [None if text == "None" else int(text) for text in texts]
        self.defaults: dict[str, int | None] = dict(zip(self.names[self.needed :], values, strict=True))
        absent = [name for name in kind._fields if name not in (*self.names, "op")]
        rest = (op, *(kind._field_defaults[name] for name in absent))
        counts = range(self.needed, len(self.names) + 1)
        self._rest = {count: (*values[count - self.needed :], *rest) for count in counts}
        known = [*self.names, "op", *absent]
        self._fields = itemgetter(*(known.index(name) for name in kind._fields))

    def call(self, *args: Any) -> Any:
        """The call with these arguments, as torch gives them to the op: those at the end may be left out.

        C code makes it, for the host time of eager calls. torch.compile cannot trace that, but traces `named`.
        """
        return tuple.__new__(self.kind, self._fields(args + self._rest[len(args)]))

    def named(self, arguments: Mapping[str, Any]) -> Any:
        """The call with these arguments; those that have a default may be left out."""
        return self.kind(op=self.op, **arguments)

    def given(self, call: Call) -> set[str]:
        """Those that have a default, and another value in a call."""
        return {name for name, default in self.defaults.items() if getattr(call, name) is not default}

    def in_order(self, values: Mapping[str, Any]) -> list[Any]:
        """Values of arguments as the schema orders them, up to the last that is there; defaults for those before."""
        count = len(self.names)
        while self.names[count - 1] not in values:
            count -= 1
        return [values.get(name, self.defaults.get(name)) for name in self.names[:count]]


SIGNATURES: dict[str, Signature] = {
    op: Signature(op, GatherCall if op.startswith("all_gather") else ReduceCall) for op in OPS
}


def signature(op: str) -> Signature:
    """The arguments of an op.

    Raises:
        ValueError: There is no such op.
    """
    if op not in OPS:
        raise ValueError(f"asynctp: op={op!r} is not valid; it must be one of {', '.join(OPS)}")
    return SIGNATURES[op]
