"""Read collectives and matmuls off a graph: each op's arguments by name, once, as a frozen value.

What an op's arguments mean is in `registry`; what is read here is the same vocabulary for every spelling.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from asynctp_passes import compat, reasons
from asynctp_passes.ir.calls import Blocks, Collective, Matmul, ScaledOptions
from asynctp_passes.ir.nodes import (
    Sizes,
    arguments,
    as_size,
    called_op,
    name_of,
    op_name,
    tensor_of,
    traits_of,
    value_of,
)
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.registry import (
    ADDMM,
    SCALED_MM,
    CollectiveKind,
    CollectiveOp,
    MatmulOp,
    collective_op,
    is_registered,
    matmul_op,
)
from asynctp_passes.ir.sizes import Size, product, same
from asynctp_passes.reasons import Refusal

__all__ = [
    "WAIT",
    "added_matrix",
    "are_one",
    "awaited_item",
    "called_name",
    "contracts_rows",
    "feeds_left_operand",
    "identical",
    "is_matmul",
    "is_only_awaited",
    "left_items",
    "looks_collective",
    "operands_that_are",
    "read_collectives",
    "read_matmul",
    "read_sizes",
    "read_term",
    "rows_of",
    "same_strides",
    "scales_mismatch",
    "short_name",
    "unknown_group",
    "waits_for_several",
]

WAIT = "_c10d_functional.wait_tensor.default"
_WAIT_FOR_LIST = "_c10d_functional.wait_tensors.default"
"""From torch 2.15 on, the results of a collective of several tensors are waited for together."""
_MATMUL_WORDS = re.compile(
    r"(^|_)(((int\d)?mm|bmm|addmm|baddbmm|einsum)(_|$)|linear$|q?linear_(pointwise|dynamic))|gemm|matmul"
)
_COLLECTIVE_WORDS = re.compile(
    r"all_gather|reduce_scatter|all_reduce|all_to_all|allgather|allreduce|reducescatter|alltoall"
)


def called_name(node: fx.Node) -> str:
    """The name of the op that a node calls, be it inside of `auto_functionalized`; empty for other nodes."""
    op = called_op(node)
    return op_name(node) if op is None else name_of(op)


def short_name(node: fx.Node) -> str:
    """The name of the op that a node calls, without its namespace and overload."""
    name = called_name(node)
    return name.split(".")[1] if "." in name else name


def _left_operand(matmul: fx.Node) -> fx.Node | None:
    """The left operand; the first input of an op that is not known."""
    op = matmul_op(called_name(matmul))
    node = next(iter(matmul.all_input_nodes), None) if op is None else arguments(matmul).get(op.a)
    return node if isinstance(node, fx.Node) else None


def contracts_rows(matmul: fx.Node) -> bool:
    """True for a product of a transposed matrix, `dYᵀ @ X`: its contraction runs over rows, as a weight's gradient's.

    A copy or cast of a transposed matrix counts (scaled products want the contraction contiguous). Looks at strides
    only, so it tells what a product most likely is, and proves nothing.
    """
    node = _left_operand(matmul)
    while node is not None:
        value = tensor_of(node)
        if value is None or value.dim() < 2:
            return False
        if _is_transposed(value):
            return True
        traits = traits_of(node)
        node = _first_tensor(node) if traits.converts or (traits.copies and traits.view is View.SAME) else None
    return False


def _is_transposed(value: torch.Tensor) -> bool:
    """True when the last but one dimension is the contiguous one. Sizes of 1 say nothing; symbols are not asked."""
    sizes, (outer, inner) = value.shape[-2:], value.stride()[-2:]
    return identical(outer, 1) and not any(identical(one, 1) for one in (inner, *sizes))


# --- collectives ----------------------------------------------------------------------------------------------
_OWN = ("_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.reduce_scatter_tensor.default")


def is_only_awaited(collective: Collective) -> bool:
    """True for torch's own all-gather or reduce-scatter, whose result nothing looks at before it is waited for."""
    waits = collective.waits
    return op_name(collective.node) in _OWN and bool(waits) and all(user in waits for user in collective.node.users)


def read_collectives(graph: fx.Graph) -> list[Collective]:
    """Every collective of the graph, in order; ops that look like one included (kind `"other"`)."""
    return [collective for node in graph.nodes for collective in _read_collective(node)]


def _read_collective(node: fx.Node) -> Sequence[Collective]:
    """The collectives of a node: none, one, or one for each of several tensors."""
    op = collective_op(op_name(node))
    members = [] if op is None else _members(node, op)
    read = [member for member in members if member is not None]
    if read and len(read) == len(members):
        return read
    known = op is not None or looks_collective(called_name(node))
    return [Collective(node, "other", _first_tensor(node))] if known else []


def _members(call: fx.Node, op: CollectiveOp) -> list[Collective | None]:
    """The collective of each tensor of a call; None where an argument is none that can be read."""
    values = arguments(call)
    tensors = values.get(op.input, next(iter(values.values())))
    if isinstance(tensors, fx.Node):
        return [_member(call, op, values, tensors)]
    items = _items(call, len(tensors)) if isinstance(tensors, list | tuple) else None
    if items is None:
        return []
    return [_item(call, op, values, tensor, items.get(index)) for index, tensor in enumerate(tensors)]


_CHECKED = {
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional_autograd.reduce_scatter_tensor.default",
}
"""Reduce-scatters that raise on a rank, before it sends, unless the ranks divide the first size of its input."""


def read_sizes(graph: fx.Graph, collectives: Sequence[Collective], erased: Container[fx.Node] = ()) -> Sizes:
    """The reader of a graph's sizes. It takes a size that is reduced and scattered for a multiple of the ranks.

    A run in which it is none ends with an error: of the collective, or of the op that stands for it, which checks the
    same. Not so a collective that may be `erased`, one of a list of tensors, which NCCL does not check, and a
    registered one, which may do anything with the rest.
    """
    checked = (one for one in collectives if op_name(one.node) in _CHECKED and one.node not in erased)
    inputs = ((tensor_of(one.input), one.group_size) for one in checked if one.group_size > 1)
    divided = [(value.shape[0], ranks) for value, ranks in inputs if value is not None and value.dim()]
    return Sizes(graph, (collective.group_size for collective in collectives), divided)


def left_items(call: fx.Node) -> dict[int, Collective]:
    """The tensors of a collective of several that are communicated, and that nothing takes, by their place in it."""
    read = enumerate(_read_collective(call))
    return {place: replace(one, kind=sent_kind(one)) for place, one in read if one.call is not None and one.is_unused}


def sent_kind(collective: Collective) -> CollectiveKind:
    """The kind of a collective, also of a list's tensor that nothing takes on this rank, and is read as `"other"`."""
    op = collective_op(op_name(collective.call)) if collective.call is not None else None
    return collective.kind if op is None else op.kind


def _items(call: fx.Node, count: int) -> dict[int, fx.Node] | None:
    """The items of a list that an op returns, by their place; None when the list is used in other ways."""
    items: dict[int, fx.Node] = {}
    for user in call.users:
        index = user.args[1] if op_name(user) == "getitem" else None
        if not isinstance(index, int) or not 0 <= index < count or index in items:
            return None
        items[index] = user
    return items


def _item(
    call: fx.Node, op: CollectiveOp, values: dict[str, Any], tensor: Any, item: fx.Node | None
) -> Collective | None:
    """The collective of one tensor of several."""
    member = _member(item or call, op, values, tensor, call)
    return member if item is not None or member is None else replace(member, kind="other")


def _member(
    node: fx.Node, op: CollectiveOp, values: dict[str, Any], tensor: Any, call: fx.Node | None = None
) -> Collective | None:
    """One tensor's collective; None when an argument is none that can be read."""
    value, group = tensor_of(node), values[op.group]
    dim = values[op.dim] if isinstance(op.dim, str) else op.dim
    size = values[op.size] if isinstance(op.size, str) else op.size
    if not (isinstance(dim, int) and isinstance(size, int | None)) or unknown_group(call or node) is not None:
        return None
    if value is not None and not compat.is_contiguous(value) and op.kind != "all_reduce":
        return None
    if dim and (value is None or not -value.dim() <= dim < value.dim()):
        return None
    if not _keeps_promise(op, tensor_of(tensor), value):
        return None
    group = dict(op.groups).get(group, group) if isinstance(group, str) else group
    return Collective(
        node=node,
        kind=op.kind,
        input=tensor,
        waits=tuple(_waits(node)),
        group=group,
        group_key=_group_key(group),
        group_size=_group_size(group) if size is None else size,
        reduce_op=values.get(op.reduce_op, op.reduce_op),
        dim=dim % value.dim() if dim and value is not None else 0,
        call=call,
        mesh_dim=compat.mesh_dimension_of(group.meta.get("val") if isinstance(group, fx.Node) else group),
    )


def unknown_group(call: fx.Node) -> str | None:
    """The name that a registered collective gives its group by, if torch knows no group of that name here."""
    op = collective_op(op_name(call)) if is_registered(op_name(call)) else None
    group = None if op is None else arguments(call).get(op.group)
    if op is None or not isinstance(group, str):
        return None
    known = compat.process_group_names()
    return group if known and dict(op.groups).get(group, group) not in known else None


def _keeps_promise(op: CollectiveOp, before: torch.Tensor | None, after: torch.Tensor | None) -> bool:
    """False for a result of another dtype, and for an all-reduce's of another shape; lengths are looked at later."""
    if before is None or after is None:
        return True
    alike = before.dim() == after.dim() and all(map(identical, before.shape, after.shape))
    return before.dtype == after.dtype and (op.kind != "all_reduce" or alike)


def waits_for_several(node: fx.Node) -> bool:
    """True for the wait for a list of tensors."""
    return op_name(node) == _WAIT_FOR_LIST


def awaited_item(node: fx.Node) -> fx.Node | None:
    """The tensor that an item of several, which were waited for together, is; None for other nodes."""
    if op_name(node) != "getitem" or not waits_for_several(node.args[0]):  # type: ignore[arg-type]
        return None
    tensors, index = node.args[0].args[0], node.args[1]  # type: ignore[union-attr]
    item = tensors[index] if isinstance(tensors, list | tuple) and isinstance(index, int) else None
    return item if isinstance(item, fx.Node) else None


def _waits(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that are a collective's result, waited for."""
    for user in node.users:
        if op_name(user) == WAIT:
            yield user
        elif waits_for_several(user):
            yield from (item for item in user.users if awaited_item(item) is node)


@functools.cache
def looks_collective(name: str) -> bool:
    """True for the name of an op that looks as if it communicated, whether asynctp knows it or not; no wait."""
    if name in (WAIT, _WAIT_FOR_LIST) or name.startswith(("aten.", "prims.", "asynctp.")):
        return False
    return name.startswith(("_c10d_functional.", "c10d.")) or bool(_COLLECTIVE_WORDS.search(name))


def _group_key(group: Any) -> str:
    if isinstance(group, fx.Node):
        return compat.group_name_of(group.meta.get("val")) or f"%{group.name}"
    return compat.group_name_of(group)


def _group_size(group: Any) -> int:
    """Ranks of a group that exists; 0 for another one."""
    return compat.size_of_group(group.meta.get("val") if isinstance(group, fx.Node) else group)


def _first_tensor(node: fx.Node) -> fx.Node | None:
    return next((argument for argument in node.all_input_nodes if tensor_of(argument) is not None), None)


# --- matmuls --------------------------------------------------------------------------------------------------
def is_matmul(node: fx.Node) -> bool:
    """True for every op that multiplies matrices, or looks as if, whether asynctp rewrites it or not."""
    name = called_name(node)
    return matmul_op(name) is not None or _looks_matmul(name) or any(map(is_matmul, compat.nodes_hidden_by(node)))


@functools.cache
def _looks_matmul(name: str) -> bool:
    namespace, _, rest = name.partition(".")
    if namespace in ("asynctp", "symm_mem") or looks_collective(name):
        return False
    return bool(_MATMUL_WORDS.search(rest.partition(".")[0]))


def operands_that_are(matmul: fx.Node, nodes: Container[fx.Node]) -> set[str]:
    """Which of a matmul's operands are among some nodes: `"left"`, `"right"`, `"other"` (a bias, a scale).

    Of an op that is not known, the first input is the left operand; of one inside of `auto_functionalized`, any may be.
    """
    op, sources = matmul_op(called_name(matmul)), matmul.all_input_nodes
    roles: dict[Any, str]
    if op is None:
        left = sources[:1] if compat.is_op(matmul.target) or compat.nodes_hidden_by(matmul) else sources
        roles = {source: "left" if source in left else "right" for source in sources}
    else:
        values = arguments(matmul)
        roles = dict.fromkeys(sources, "other") | {values.get(op.b): "right", values.get(op.a): "left"}
    return {role for source, role in roles.items() if source in nodes}


def feeds_left_operand(matmul: fx.Node, before: fx.Node) -> bool:
    """True when `before` is the matmul's left operand."""
    return "left" in operands_that_are(matmul, (before,))


def read_matmul(node: fx.Node) -> Matmul | Refusal:
    """Read a matmul node by its schema, or say why its form is not rewritten."""
    name = called_name(node)
    op = matmul_op(name)
    if op is None:
        hidden = " -> ".join(map(short_name, compat.nodes_hidden_by(node)))
        facts = f"{name} {node.name}" + (f", which Inductor put in the place of {hidden}" if hidden else "")
        return Refusal(reasons.MATMUL_NOT_UNDERSTOOD, facts)
    values, result = arguments(node), _result(node, op)
    if isinstance(result, Refusal):
        return result
    a, right, out = tensor_of(values.get(op.a)), tensor_of(values.get(op.b)), tensor_of(result)
    if a is None or right is None or out is None:
        return Refusal(reasons.SHAPE_UNKNOWN, node.name)
    b, b_transposed = _one_matrix(values[op.b], op.b_transposed)
    if b is None or a.dim() < 2 or not same(rows_of(a), rows_of(out)) or not _fit(a, right, out, op.b_transposed):
        return Refusal(reasons.MATMUL_NOT_UNDERSTOOD, f"{name} {node.name}: {list(a.shape)} @ {list(right.shape)}")
    bias = values.get(op.bias) if op.bias is not None else None
    problem = _added(node, values, bias, out)
    scaled = _scaled(node, op, values, a, right, out)
    if problem is not None or isinstance(scaled, Refusal):
        return problem or scaled  # type: ignore[return-value]
    if scaled is None and out.dtype != (torch.int32 if a.dtype == torch.int8 else a.dtype):
        return Refusal(reasons.DTYPE_UNSUPPORTED, f"{node.name}: {a.dtype} -> {out.dtype}")
    return Matmul(result, values[op.a], b, bias, scaled, b_transposed, None if result is node else node)


def _result(node: fx.Node, op: MatmulOp) -> fx.Node | Refusal:
    """The node that is the product: the op's, or the item of what `auto_functionalized` returns that is `op.out`."""
    if op.out is None:
        return node
    name = f"{called_name(node)} {node.name}"
    items = _items(node, 2) if not compat.is_op(node.target) else None
    whole = {f"_{op.out}_base_index", f"_{op.out}_alias"}
    parts = {key for key in node.kwargs if key.startswith(f"_{op.out}_")} - whole
    bases = node.kwargs.get("_all_bases")
    if items is None or list(items) != [1] or parts or (isinstance(bases, list | tuple) and len(bases) != 1):
        return Refusal(reasons.MATMUL_NOT_UNDERSTOOD, f"{name} writes in place, or into a part of a tensor")
    value = tensor_of(items[1])
    if value is not None and not compat.is_contiguous(value):
        return Refusal(reasons.MATMUL_NOT_UNDERSTOOD, f"{name}: the result is not contiguous")
    return items[1]


def _one_matrix(node: fx.Node, transposed: bool) -> tuple[fx.Node | None, bool]:
    """The one matrix that all matrices of a right operand are, and whether it is transposed; None if they differ."""
    while (value := tensor_of(node)) is not None and value.dim() >= 2:
        if are_one(value.shape[:-2]):
            return node, transposed
        source = tensor_of(node.args[0]) if node.args else None
        if source is None or source.dim() < 2:
            break
        traits = traits_of(node)
        if traits.view in (View.EXPAND, View.RESHAPE):  # may repeat or regroup the matrices of a batch
            if not all(identical(x, y) for x, y in zip(source.shape[-2:], value.shape[-2:], strict=True)):
                break
        elif _swaps_last_two(node, value.dim()):
            transposed = not transposed
        elif traits.view is not View.SAME or traits.copies:
            break
        node = node.args[0]  # type: ignore[assignment]
    return None, transposed


def _swaps_last_two(node: fx.Node, rank: int) -> bool:
    view = traits_of(node).view
    if view is View.PERMUTE:
        order = [axis % rank for axis in arguments(node)["dims"]]
        return order == [*range(rank - 2), rank - 1, rank - 2]
    if view is View.TRANSPOSE:
        values = arguments(node)
        return {values["dim0"] % rank, values["dim1"] % rank} == {rank - 2, rank - 1}
    return False


def _fit(a: torch.Tensor, right: torch.Tensor, out: torch.Tensor, b_transposed: bool) -> bool:
    """False for sizes of which a registered matmul, as it was described, would not make these columns."""
    depth, columns = reversed(right.shape[-2:]) if b_transposed else right.shape[-2:]
    return not _differ(a.shape[-1], depth) and not _differ(out.shape[-1], columns)


def rows_of(tensor: torch.Tensor) -> Size:
    """The rows of a tensor: all dimensions but the last."""
    return product(map(as_size, tensor.shape[:-1]))


def _added(node: fx.Node, values: dict[str, Any], bias: fx.Node | None, out: torch.Tensor) -> Refusal | None:
    """Why what the matmul adds is not one row, unscaled."""
    alpha, beta = values.get("alpha", 1), values.get("beta", 1)
    if alpha != 1 or beta != 1:
        return Refusal(reasons.ADDMM_SCALED, f"{node.name}: alpha={alpha}, beta={beta}")
    if bias is None:
        return None
    value = tensor_of(bias)
    if value is None:
        return Refusal(reasons.SHAPE_UNKNOWN, node.name)
    if _is_row(value, out):
        return None
    return Refusal(reasons.ADDMM_SCALED, f"{node.name}: the bias has shape {list(value.shape)}")


def added_matrix(node: fx.Node) -> fx.Node | None:
    """The `c` of `c + a @ b`, all of the result's shape: Inductor makes one addmm of such a sum."""
    if op_name(node) != ADDMM:
        return None
    values = arguments(node)
    added, out = tensor_of(values["self"]), tensor_of(node)
    if added is None or out is None or added.dim() != 2 or (values["alpha"], values["beta"]) != (1, 1):
        return None
    whole = all(identical(a, b) for a, b in zip(added.shape, out.shape, strict=True)) and not _is_row(added, out)
    return values["self"] if whole and added.dtype == out.dtype else None


def read_term(node: fx.Node) -> Matmul | Refusal:
    """Read a matmul as a term of a sum: `a @ b` of `c + a @ b`, where `c` is another term; others as `read_matmul`."""
    if added_matrix(node) is None:
        return read_matmul(node)
    values = arguments(node)
    return Matmul(node, values["mat1"], values["mat2"])


def _is_row(bias: torch.Tensor, out: torch.Tensor) -> bool:
    """True for a bias [N], [1, N], ... of an output [..., N]."""
    return bias.dim() >= 1 and are_one(bias.shape[:-1]) and identical(bias.shape[-1], out.shape[-1])


def identical(a: Any, b: Any) -> bool:
    """True for two sizes, integers or symbolic, that are provably equal."""
    if not (isinstance(a, int | torch.SymInt) and isinstance(b, int | torch.SymInt)):
        return False
    return same(as_size(a), as_size(b))


def same_strides(a: fx.Node, b: fx.Node) -> bool:
    """True for tensors of one shape that provably have the same strides."""
    return all(map(identical, value_of(a).stride(), value_of(b).stride()))


def are_one(sizes: Iterable[Any]) -> bool:
    """True for sizes that are provably 1."""
    return all(identical(size, 1) for size in sizes)


def _differ(a: Any, b: Any) -> bool:
    """True for two sizes that are known and not the same."""
    return isinstance(a, int) and isinstance(b, int) and a != b


# --- scales ---------------------------------------------------------------------------------------------------
_SCALINGS = ("TensorWise", "RowWise", "BlockWise1x16", "BlockWise1x32", "BlockWise1x128", "BlockWise128x128")
"""`torch.nn.functional.ScalingType`, by its values."""
_Pair = tuple[str, str]
_BLOCKS: tuple[_Pair, ...] = (("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128"))
"""Scales of blocks of A and of B that torch takes; those of one row are of 1x128, and of 128x128 blocks as well."""
_TOGETHER = 4
"""cuBLAS reads the scales of 128x128 blocks in so many at a time: along K, they are padded to a multiple."""


def _scaled(
    node: fx.Node, op: MatmulOp, values: dict[str, Any], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> ScaledOptions | Refusal | None:
    if op.a_scale is None or op.b_scale is None:
        return None
    if values.get("scale_result") is not None or compat.has_folded_output_scale(node):
        return Refusal(reasons.RESULT_SCALED, node.name)
    a_scale: Any = values.get(op.a_scale)
    b_scale: Any = values.get(op.b_scale)
    pairs = _BLOCKS if called_name(node) == SCALED_MM else ()
    recipe = _recipe(values) if isinstance(a_scale, list | tuple) else ""
    if recipe:
        pairs = tuple(pair for pair in _BLOCKS if recipe == "BlockWise{} x BlockWise{}".format(*pair))
        if not pairs and recipe not in ("TensorWise x TensorWise", "RowWise x RowWise"):
            return Refusal(reasons.SCALES_UNSUPPORTED, f"{node.name}: {recipe}")
        a_scale, b_scale = a_scale[0], b_scale[0]
    of_a, of_b = tensor_of(a_scale), tensor_of(b_scale)
    if of_a is None or of_b is None:
        return Refusal(reasons.SHAPE_UNKNOWN, node.name)
    blocks = _blocks(pairs, (a, b, of_a, of_b), by_name=bool(recipe))
    if recipe and pairs and blocks is None:
        shapes = [list(value.shape) for value in (a, b, of_a, of_b)]
        facts = f"{recipe}, {shapes[0]} @ {shapes[1]} with scales {shapes[2]} and {shapes[3]}"
        return Refusal(reasons.SCALES_BLOCKWISE, f"{node.name}: {facts}")
    return ScaledOptions(a_scale, b_scale, out.dtype, bool(values.get("use_fast_accum")), blocks)


def scales_mismatch(matmul: Matmul, scaled: ScaledOptions) -> Refusal:
    """Why scales are not fused: told by their shapes, as torch's kernels do."""
    values = [tensor_of(node) for node in (matmul.a, matmul.b, scaled.a_scale, scaled.b_scale)]
    shapes = [[] if value is None else list(value.shape) for value in values]
    facts = f"{matmul.node.name}: scales {shapes[2]} and {shapes[3]}"
    like = not matmul.b_transposed and all(len(shape) == 2 for shape in shapes) and _are_blocks(*shapes)
    in_blocks = like or scaled.blocks is not None
    return Refusal(reasons.SCALES_BLOCKWISE if in_blocks else reasons.SCALES_UNSUPPORTED, facts)


def _are_blocks(a: list[Any], b: list[Any], a_scale: list[Any], b_scale: list[Any]) -> bool:
    """True for scales of 1x128 or 128x128 blocks of `a[M, K]` and `b[K, N]`; those of `b` may be padded along K."""
    (rows, depth), columns = a, b[1]
    if not isinstance(depth, int) or not isinstance(columns, int):
        return False
    blocks = -(-depth // 128)

    def one_of(size: Any, *sizes: Any) -> bool:
        return any(identical(size, other) for other in sizes)

    a_fits = identical(a_scale[1], blocks) and one_of(a_scale[0], rows, _in_blocks(rows))
    return a_fits and one_of(b_scale[0], blocks, _padded(blocks)) and one_of(b_scale[1], columns, _in_blocks(columns))


def _blocks(pairs: Iterable[_Pair], operands: tuple[torch.Tensor, ...], *, by_name: bool) -> Blocks | None:
    """The blocks of scales, of those that `pairs` allows; None where scales are one number, by rows, or others.

    `scaled_mm` is told by name, and has the scales of `b[K, N]` as of its transpose, those of 128x128 blocks transposed
    and padded. `_scaled_mm` tells by shapes.
    """
    a, b, a_scale, b_scale = operands
    rows, depth, columns = a.shape[0], a.shape[-1], b.shape[-1]
    if not isinstance(depth, int) or a.dim() != 2 or b.dim() != 2 or a_scale.dim() != 2 or b_scale.dim() != 2:
        return None
    along = -(-depth // 128)
    if not by_name and _are_plain((rows, columns), a_scale, b_scale):
        return None
    for of_a, of_b in pairs:
        if by_name:
            a_fits = _named_fit(a_scale, of_a, rows, along)
            b_fits = _named_fit(b_scale, of_b, columns, along)
        else:
            a_fits = _shaped_fit(a_scale, of_a, rows, along)
            b_fits = _shaped_fit(b_scale.t(), of_b, columns, along)
        if a_fits and b_fits:
            sides = [int(kind.partition("x")[0]) for kind in (of_a, of_b)]
            return Blocks(sides[0], sides[1], along, by_name and sides[0] == 128, by_name and sides[1] == 1)
    return None


def _are_plain(sizes: tuple[Any, Any], a_scale: torch.Tensor, b_scale: torch.Tensor) -> bool:
    """True for scales of `_scaled_mm` that are tensorwise or rowwise."""
    wanted = ((a_scale, (sizes[0], 1)), (b_scale, (1, sizes[1])))
    return all(_has_shape(scale, (1, 1)) or _has_shape(scale, shape) for scale, shape in wanted)


def _has_shape(value: torch.Tensor, shape: tuple[Any, Any]) -> bool:
    return all(identical(own, size) for own, size in zip(value.shape, shape, strict=True))


def _shaped_fit(scale: torch.Tensor, kind: str, outer: Any, along: int) -> bool:
    """True for the scales of a matrix `[outer, K]` as `_scaled_mm` has them: `[outer, along]`, or in blocks of 128.

    Of those torch passes on the address, and cuBLAS takes them as padded.
    """
    if not identical(scale.shape[1], along):
        return False
    if kind == "1x128":
        return identical(scale.shape[0], outer)
    padded = along == _padded(along) or identical(scale.shape[0], 1) or identical(scale.stride(0), _padded(along))
    return padded and identical(scale.shape[0], _in_blocks(outer))


def _named_fit(scale: torch.Tensor, kind: str, outer: Any, along: int) -> bool:
    """True for the scales of a matrix `[outer, K]` as `scaled_mm` has them: so too, or padded and transposed."""
    if kind == "1x128":
        return identical(scale.shape[0], outer) and identical(scale.shape[1], along)
    return identical(scale.shape[0], _padded(along)) and identical(scale.shape[1], _in_blocks(outer))


def _in_blocks(size: Any) -> int | None:
    """Blocks of 128 in a size; None for a symbolic one."""
    return -(-size // 128) if isinstance(size, int) else None


def _padded(blocks: int) -> int:
    return -(-blocks // _TOGETHER) * _TOGETHER


def _recipe(values: dict[str, Any]) -> str:
    """How `_scaled_mm_v2` is told to scale, for people: `RowWise x RowWise`."""
    sides = (" and ".join(map(_scaling, values[f"recipe_{side}"])) for side in "ab")
    swizzled = any((*values["swizzle_a"], *values["swizzle_b"]))
    contracted = tuple(axis % 2 for axis in values["contraction_dim"])
    odd = "" if contracted in ((), (1, 0)) else f", contracted over {values['contraction_dim']}"
    return " x ".join(sides) + (", swizzled" if swizzled else "") + odd


def _scaling(value: int) -> str:
    return _SCALINGS[value] if 0 <= value < len(_SCALINGS) else f"ScalingType({value})"
