"""Facts about ops: one row an op, and every stage reads that row.

No other module names an op of aten or prims, but `registry`, which has the matmuls, and those that write calls of such
ops into a graph. Whether an op is pointwise, draws random numbers or writes to its arguments is said by torch itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class View(enum.Enum):
    """Ways in which an op rearranges its first argument. `layout.propagation` has the index map of each."""

    SAME = enum.auto()  # every element stays in its place, in the same memory or in a copy
    RESHAPE = enum.auto()  # the same elements in row-major order, under other sizes
    PERMUTE = enum.auto()  # in the `nodes.order_of` dimensions
    EXPAND = enum.auto()
    SLICE = enum.auto()
    SELECT = enum.auto()
    SPLIT = enum.auto()  # into several tensors
    UNBIND = enum.auto()
    ITEM = enum.auto()  # one of several tensors
    AWAIT_LIST = enum.auto()  # several tensors, each as it is
    CAT = enum.auto()
    STACK = enum.auto()
    CAST = enum.auto()  # to another dtype or device, or to the same one
    BITCAST = enum.auto()  # the same bits, seen as another dtype
    PICK = enum.auto()  # rows or elements by their numbers, which are a tensor: a lookup
    PAD = enum.auto()
    WRITE = enum.auto()  # one tensor into a part of another
    OVERWRITE = enum.auto()  # the elements of another tensor, where its own were
    REORDER = enum.auto()
    REPEAT = enum.auto()
    OPAQUE = enum.auto()  # no index map describes it


_REARRANGES = {View.SAME, View.RESHAPE, View.PERMUTE}
_KEEPS_VALUES = _REARRANGES | {View.EXPAND, View.CAT, View.STACK, View.CAST}
_WHOLE = _KEEPS_VALUES | {View.BITCAST}
_PIECES = {View.SPLIT, View.UNBIND, View.ITEM, View.AWAIT_LIST}


class Reduction(enum.Enum):
    """Ways in which an op reduces a tensor over dimensions. Maxima and minima have the same bits in any order."""

    MAX = enum.auto()
    MIN = enum.auto()
    SUM = enum.auto()
    ROUNDED = enum.auto()


@dataclass(frozen=True)
class OpTraits:
    """The facts about an op that the stages ask for.

    Attributes:
        view: How it rearranges its first argument, if that is all it does.
        copies: Its result lies in memory of its own.
        needs_strides: It fails for a tensor whose strides do not allow its result to be a view.
        sign: 1 for an addition, -1 for a subtraction.
        multiplies: 1 for a multiplication by its argument `other`, -1 for a division by it.
        negates: It multiplies by -1.
        at_most_one: Its result is between -1 and 1.
        reduces: How it reduces its first argument over dimensions.
        constant: The number that fills its result, or the name of the argument that is this number.
        undefined: Its result is memory that holds any values.
        size: It reads a size or stride, which is no use of a tensor's values.
    """

    view: View | None = None
    copies: bool = False
    needs_strides: bool = False
    sign: int = 0
    multiplies: int = 0
    negates: bool = False
    at_most_one: bool = False
    reduces: Reduction | None = None
    constant: str | float | None = None
    undefined: bool = False
    size: bool = False

    @property
    def casts(self) -> bool:
        """True for a conversion of a tensor's values to a dtype."""
        return self.view is View.CAST

    @property
    def converts(self) -> bool:
        """True for an op that changes a tensor's dtype, or could have: of its values, or of how its bits are seen."""
        return self.view in (View.CAST, View.BITCAST)

    @property
    def rearranges(self) -> bool:
        """True for a view that has each element of its argument once, and nothing else."""
        return self.view in _REARRANGES

    @property
    def keeps_values(self) -> bool:
        """True for a view that has no other values than its arguments do, but for rounding, and drops none of them."""
        return self.view in _KEEPS_VALUES

    @property
    def is_whole_or_piece(self) -> bool:
        """True for a view that drops no elements, and for one that has all of them in several tensors."""
        return self.view in _WHOLE | _PIECES

    @property
    def takes_part(self) -> bool:
        """True for a view that takes some elements, or moves them: which ones may depend on the rank.

        DTensor's `redistribute` from replicated to sharded takes such views.
        """
        return self.view is not None and self.view not in _WHOLE

    @property
    def is_exact_reduction(self) -> bool:
        """True for a reduction that has the same bits in whatever order it is done."""
        return self.reduces in (Reduction.MAX, Reduction.MIN)


_COPY = OpTraits(View.SAME, copies=True)
_ALIAS = OpTraits(View.SAME)
_RESHAPE = OpTraits(View.RESHAPE)
_STRICT = OpTraits(View.RESHAPE, needs_strides=True)
_CAST = OpTraits(View.CAST, copies=True)
_SUM = OpTraits(reduces=Reduction.SUM)
_ROUNDED = OpTraits(reduces=Reduction.ROUNDED)
_MAX = OpTraits(reduces=Reduction.MAX)
_MIN = OpTraits(reduces=Reduction.MIN)
_SIZE = OpTraits(size=True)

UNKNOWN = OpTraits()
"""The row of an op that is not listed: nothing is known of it."""

TRAITS: dict[str, OpTraits] = {
    # every element in its place
    "_c10d_functional.wait_tensor.default": _ALIAS,
    "_c10d_functional.wait_tensors.default": OpTraits(View.AWAIT_LIST),  # torch 2.15 waits for a list at once
    "aten.alias.default": _ALIAS,
    "aten.detach.default": _ALIAS,
    "aten.clone.default": _COPY,
    "aten.contiguous.default": _COPY,
    "aten.lift_fresh_copy.default": _COPY,
    # other sizes, or another order of dimensions
    "aten.view.default": _STRICT,
    "aten._unsafe_view.default": _STRICT,
    "aten._reshape_alias.default": _STRICT,
    "aten.view_copy.default": OpTraits(View.RESHAPE, copies=True, needs_strides=True),
    "aten.reshape.default": _RESHAPE,
    "aten.flatten.using_ints": _RESHAPE,
    "aten.unflatten.int": _RESHAPE,
    "aten.unsqueeze.default": _RESHAPE,
    "aten.squeeze.default": _RESHAPE,
    "aten.squeeze.dim": _RESHAPE,
    "aten.squeeze.dims": _RESHAPE,
    "aten.permute.default": OpTraits(View.PERMUTE),
    "aten.transpose.int": OpTraits(View.PERMUTE),
    "aten.t.default": OpTraits(View.PERMUTE),
    "aten.expand.default": OpTraits(View.EXPAND),
    # parts of a tensor
    "aten.slice.Tensor": OpTraits(View.SLICE),
    "aten.narrow.default": OpTraits(View.SLICE),
    "aten.select.int": OpTraits(View.SELECT),
    "aten.split.Tensor": OpTraits(View.SPLIT),
    "aten.split_with_sizes.default": OpTraits(View.SPLIT),
    "aten.chunk.default": OpTraits(View.SPLIT),
    "aten.unbind.int": OpTraits(View.UNBIND),
    "getitem": OpTraits(View.ITEM),
    # several tensors as one
    "aten.cat.default": OpTraits(View.CAT, copies=True),
    "aten.stack.default": OpTraits(View.STACK, copies=True),
    # dtypes
    "aten.view.dtype": OpTraits(View.BITCAST),
    "prims.convert_element_type.default": _CAST,
    "aten._to_copy.default": _CAST,
    "aten.to.dtype": _CAST,
    # rearrangements that no index map describes: listed, so that their refusal is exact
    "aten.flip.default": OpTraits(View.REORDER, copies=True),
    "prims.rev.default": OpTraits(View.REORDER, copies=True),  # a flip, as Inductor writes it
    "aten.roll.default": OpTraits(View.REORDER, copies=True),
    "aten.repeat.default": OpTraits(View.REPEAT, copies=True),
    "aten.index_select.default": OpTraits(View.PICK, copies=True),
    "aten.index.Tensor": OpTraits(View.PICK, copies=True),
    "aten._unsafe_index.Tensor": OpTraits(View.PICK, copies=True),
    "aten.embedding.default": OpTraits(View.PICK, copies=True),
    "aten.gather.default": OpTraits(View.PICK, copies=True),
    "aten.take_along_dim.default": OpTraits(View.PICK, copies=True),
    "aten.constant_pad_nd.default": OpTraits(View.PAD, copies=True),
    "aten.copy.default": OpTraits(View.OVERWRITE, copies=True),
    "aten.slice_scatter.default": OpTraits(View.WRITE, copies=True),
    "aten.select_scatter.default": OpTraits(View.WRITE, copies=True),
    "aten.split_with_sizes_copy.default": OpTraits(View.OPAQUE, copies=True),
    "aten.as_strided.default": OpTraits(View.OPAQUE),
    "aten.view_as_complex.default": OpTraits(View.OPAQUE),
    "aten.view_as_real.default": OpTraits(View.OPAQUE),
    # sums and scalings
    "aten.add.Tensor": OpTraits(sign=1),
    "aten.sub.Tensor": OpTraits(sign=-1),
    "aten.mul.Tensor": OpTraits(multiplies=1),
    "aten.mul.Scalar": OpTraits(multiplies=1),
    "aten.div.Tensor": OpTraits(multiplies=-1),
    "aten.div.Scalar": OpTraits(multiplies=-1),
    "aten.neg.default": OpTraits(negates=True),
    "aten.sigmoid.default": OpTraits(at_most_one=True),
    # reductions over dimensions
    "aten.amax.default": _MAX,
    "aten.max.default": _MAX,
    "aten.max.dim": _MAX,
    "aten.amin.default": _MIN,
    "aten.min.default": _MIN,
    "aten.min.dim": _MIN,
    "aten.sum.default": _SUM,
    "aten.sum.dim_IntList": _SUM,
    "aten.mean.default": _ROUNDED,
    "aten.mean.dim": _ROUNDED,
    "aten.var.default": _ROUNDED,
    "aten.var.dim": _ROUNDED,
    "aten.var.correction": _ROUNDED,
    "aten.var_mean.default": _ROUNDED,
    "aten.var_mean.dim": _ROUNDED,
    "aten.var_mean.correction": _ROUNDED,
    "aten.norm.Scalar": _ROUNDED,
    "aten.norm.ScalarOpt_dim": _ROUNDED,
    "aten.norm.ScalarOpt_dim_dtype": _ROUNDED,
    "aten.norm.ScalarOpt_dtype": _ROUNDED,
    "aten.linalg_vector_norm.default": _ROUNDED,
    # constants
    "aten.full.default": OpTraits(constant="fill_value"),
    "aten.scalar_tensor.default": OpTraits(constant="s"),
    "aten.zeros.default": OpTraits(constant=0),
    "aten.ones.default": OpTraits(constant=1),
    "aten.full_like.default": OpTraits(constant="fill_value"),
    "aten.zeros_like.default": OpTraits(constant=0),
    "aten.ones_like.default": OpTraits(constant=1),
    # memory
    "aten.empty.memory_format": OpTraits(undefined=True),
    "aten.empty_like.default": OpTraits(undefined=True),
    "aten.empty_permuted.default": OpTraits(undefined=True),
    "aten.empty_strided.default": OpTraits(undefined=True),
    "aten.new_empty.default": OpTraits(undefined=True),
    "aten.new_empty_strided.default": OpTraits(undefined=True),
    # sizes
    "aten.sym_size.int": _SIZE,
    "aten.sym_numel.default": _SIZE,
    "aten.sym_stride.int": _SIZE,
}


def traits_named(name: str) -> OpTraits:
    """The row of an op, by the name of its overload (`"aten.view.default"`)."""
    return TRAITS.get(name, UNKNOWN)
