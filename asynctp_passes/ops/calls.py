"""The calls of the ops: the arguments of one call by their names, and the ops' schemas, made of these.

A fused op's arguments become a `GatherCall` or a `ReduceCall` where it is called. The call goes through everything:
checks (`checks`), fake results (`register`), the reference program (`reference`), gradients (`autograd`), and the
kernels of `asynctp_kernels`, which read it by attribute. A new argument is a field; its place among the fields is that
in the schema.

Scales are optional: those of A, those of the Bs and `out_dtype` are there together, or none of them.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asynctp_passes.torch_private import process_groups


class GatherCall(NamedTuple):
    """The arguments of a gather and its matmuls.

    A named tuple is made in a fifth of the time that a frozen dataclass takes, and every eager call makes one. Kernels
    make a plan for its `values` and the layouts of its tensors.

    Attributes:
        a_scale: float32: one number, or numbers of rows or blocks of A; of the shard's if `gather_a_scale`.
        b_scales: float32: for each B one number, or numbers of columns or blocks.
        gather_a_scale: `a_scale` is gathered with the shard.
        out_dtype: Of the matmuls, with scales; None: that of A.
        use_fast_accum: fp8 matmuls may be summed with less than float32's precision.
        along_shard: float32, one number per row of the shard (`[*, M/W, *, 1]`), with scales that are not gathered:
            gathered too, and returned last.
        all_keep: Every rank keeps the gathered A, so that it is pulled to its place; the same on all ranks. None: as
            `return_a_full`.
        b_rows: For each B `first`, `end` and `every`, without scales: of each run of `every` rows of the gathered A it
            multiplies those from `first` to `end`, and its result is a matrix of these. None: each takes all rows.
        accord: What all ranks have agreed that this graph does otherwise than its program, as a number; 0: nothing.
            And `INVARIANT`, where the matmuls of the graph are batch-invariant on all of them.
        op: The op's name, which is no argument.
    """

    a_shard: Tensor
    bs: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    gather_dim: int
    return_a_full: bool
    group_size: int
    group_name: Any
    a_scale: Tensor | None = None
    b_scales: Sequence[Tensor] | None = None
    gather_a_scale: bool = False
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    along_shard: Tensor | None = None
    all_keep: bool | None = None
    b_rows: Sequence[int | torch.SymInt] | None = None
    accord: int = 0
    op: str = "all_gather_matmul"

    @property
    def values(self) -> tuple[Any, ...]:
        """The arguments that are no tensors, lists or groups: hashable."""
        return _gather_values(self)

    @property
    def matmul_dtype(self) -> torch.dtype:
        """The dtype of the matmuls: without scales that of A, but int32 of int8."""
        return self.out_dtype or (torch.int32 if self.a_shard.dtype == torch.int8 else self.a_shard.dtype)

    @property
    def row_numbers(self) -> Tensor | None:
        """Numbers that are gathered with the shard: its scales, or others that are only returned."""
        return self.a_scale if self.gather_a_scale else self.along_shard

    @property
    def kept_by_all(self) -> bool:
        """Every rank keeps the gathered A."""
        return self.return_a_full if self.all_keep is None else self.all_keep

    def rows_of(self, i: int) -> tuple[Any, Any, Any] | None:
        """`first`, `end` and `every` of operand `i`; None: it takes all rows."""
        return None if self.b_rows is None else tuple(self.b_rows[3 * i : 3 * i + 3])  # type: ignore[return-value]


class ReduceCall(NamedTuple):
    """The arguments of matmuls whose sum is reduce-scattered or all-reduced.

    A named tuple as `GatherCall`, whose arguments it shares.

    Attributes:
        scatter_dim, group_size: None of an all-reduce, whose op does not have them.
        a_scales, b_scales: float32: for each matmul one number each, or numbers of rows, columns or blocks.
        sum_dtype: Matmuls, once rounded, are converted to it before anything is added; None: not at all.
        added: A term of the sum, after the matmuls.
        factors: A number for each matmul, which multiplies it, and maybe one more for the sum.
        real_rows: How many indices of the scattered dimension this rank has; its sum is zeros at those after them,
            whatever the operands have there. None: all. An all-reduce does not have it.
    """

    a_parts: Sequence[Tensor]
    b_parts: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    reduce_op: str
    scatter_dim: int | None
    group_size: int | None
    group_name: Any
    a_scales: Sequence[Tensor] | None = None
    b_scales: Sequence[Tensor] | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    sum_dtype: torch.dtype | None = None
    added: Tensor | None = None
    factors: Sequence[float] | None = None
    real_rows: int | torch.SymInt | None = None
    accord: int = 0
    op: str = "matmul_reduce_scatter"

    @property
    def values(self) -> tuple[Any, ...]:
        """The arguments that are no tensors, lists or groups: hashable."""
        return _reduce_values(self)


class AllGatherCall(NamedTuple):
    """The arguments of an all-gather along dim 0, without a matmul.

    Attributes:
        copy: The shard may be written to once the op has returned.
        all_keep: Every rank keeps what is gathered, the same on all ranks.
        accord: As of a `GatherCall`.
        op: The op's name, which is no argument.
    """

    shard: Tensor
    group_size: int
    group_name: Any
    copy: bool = True
    all_keep: bool = True
    accord: int = 0
    op: str = "all_gather"


class ReduceScatterCall(NamedTuple):
    """The arguments of a reduce-scatter along dim 0, without a matmul, as of an `AllGatherCall`."""

    whole: Tensor
    reduce_op: str
    group_size: int
    group_name: Any
    copy: bool = True
    accord: int = 0
    op: str = "reduce_scatter"


class AllReduceCall(NamedTuple):
    """The arguments of an all-reduce without a matmul, as of an `AllGatherCall`."""

    input: Tensor
    reduce_op: str
    group_name: Any
    accord: int = 0
    op: str = "all_reduce"


Call = GatherCall | ReduceCall
CollectiveCall = AllGatherCall | ReduceScatterCall | AllReduceCall
INVARIANT = 1 << 31
"""A flag in an accord: a row has the same bits for any number of rows, by any implementation. The kernels' is equal."""
SCALES = frozenset({"a_scale", "a_scales", "b_scales", "gather_a_scale", "out_dtype", "use_fast_accum"})
"""The arguments of a call with scales, and of no other."""
_OF_A_SCATTER = ("scatter_dim", "group_size", "real_rows")

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
    Sequence[Tensor] | None: "Tensor[]?",
    Sequence[Tensor | None]: "Tensor?[]",
    Sequence[float] | None: "float[]?",
    torch.dtype | None: "ScalarType?",
    bool | None: "bool?",
    bool: "bool",
    int: "int",
    int | None: "int",  # an all-reduce does not have it, and a reduce-scatter always
    int | torch.SymInt | None: "SymInt?",
    Sequence[int | torch.SymInt] | None: "SymInt[]?",
    str: "str",
    Any: process_groups.schema_type(),
}
_VALUES = {torch.dtype | None, bool | None, bool, int, int | None, int | torch.SymInt | None, str}


def _values_of(kind: type[Call]) -> Callable[[Call], tuple[Any, ...]]:
    types = typing.get_type_hints(kind)
    return itemgetter(*(place for place, name in enumerate(kind._fields) if types[name] in _VALUES))


_gather_values, _reduce_values = _values_of(GatherCall), _values_of(ReduceCall)


class Signature:
    """The arguments of an op, in its schema's order.

    Attributes:
        names: Of all arguments.
        needed: How many of them have no default.
        defaults: Of the others, by name.
        schema: The op's, as torch.library takes it.
    """

    def __init__(
        self, op: str, kind: type[Call] | type[CollectiveCall], results: str, absent: Sequence[str] = ()
    ) -> None:
        """absent: Fields of the call that the op does not have; None there."""
        self.op, self.kind = op, kind
        types, defaults = typing.get_type_hints(kind), kind._field_defaults
        self.names = tuple(name for name in kind._fields if name not in (*absent, "op"))
        self.defaults: dict[str, Any] = {name: defaults[name] for name in self.names if name in defaults}
        self.needed = len(self.names) - len(self.defaults)
        rest = {name: f"={value}" for name, value in self.defaults.items()}
        listed = ", ".join(f"{_SCHEMA_TYPES[types[name]]} {name}{rest.get(name, '')}" for name in self.names)
        self.schema = f"({listed}) -> {results}"
        values, fixed = list(self.defaults.values()), (*[None] * len(absent), op)
        counts = range(self.needed, len(self.names) + 1)
        self._rest = {count: (*values[count - self.needed :], *fixed) for count in counts}
        known = [*self.names, *absent, "op"]
        self._fields = itemgetter(*(known.index(name) for name in kind._fields))
        self._named = {**dict.fromkeys(absent), "op": op}

    def call(self, *args: Any) -> Any:
        """The call with these arguments, as torch gives them to the op: those at the end may be left out.

        C code makes it, for the host time of eager calls. torch.compile cannot trace that, but traces `named`.
        """
        return tuple.__new__(self.kind, self._fields(args + self._rest[len(args)]))

    def named(self, arguments: Mapping[str, Any]) -> Any:
        """The call with these arguments; those that have a default may be left out."""
        return self.kind(**{**self._named, **arguments})

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
    one.op: one
    for one in (
        Signature("all_gather_matmul", GatherCall, "Tensor[]"),
        Signature("matmul_reduce_scatter", ReduceCall, "Tensor"),
        Signature("matmul_all_reduce", ReduceCall, "Tensor", absent=_OF_A_SCATTER),
    )
}
OPS = {op: one.schema for op, one in SIGNATURES.items()}
"""The schemas of the fused ops, by their names."""
COLLECTIVES: dict[str, Signature] = {
    one.op: one
    for one in (
        Signature("all_gather", AllGatherCall, "Tensor"),
        Signature("reduce_scatter", ReduceScatterCall, "Tensor"),
        Signature("all_reduce", AllReduceCall, "Tensor"),
    )
}
"""The same of the ops without a matmul."""


def first_of(call: Call | CollectiveCall) -> Tensor | None:
    """A tensor that tells where a call runs; None: there is no operand, which the checks refuse."""
    if isinstance(call, ReduceCall):
        return call.a_parts[0] if call.a_parts else None
    return call[0]


def signature(op: str) -> Signature:
    """The arguments of an op.

    Raises:
        ValueError: There is no such op.
    """
    if op not in OPS:
        raise ValueError(f"asynctp: op={op!r} is not valid; it must be one of {', '.join(OPS)}")
    return SIGNATURES[op]
