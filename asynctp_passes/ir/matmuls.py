"""Read matmuls off a graph: each op's arguments by name, once, as a frozen value.

An op of another library counts as a matmul if its shapes are those of one, and so does a program's Triton kernel.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from asynctp_passes import reasons
from asynctp_passes.ir.nodes import (
    arguments,
    called_name,
    called_op,
    calls_op,
    filling_of,
    first_tensor,
    items_of,
    nodes_in,
    op_name,
    order_of,
    short_name,
    tensor_of,
    traits_of,
    value_of,
    values_of,
    writes,
)
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.operations import Matmul
from asynctp_passes.ir.registry import ADDMM, MATMUL_ROLES, MatmulOp, can_promise, matmul_op, multiplies, promise_of
from asynctp_passes.ir.scales import read_scales
from asynctp_passes.ir.sizes import Size, are_one, as_size, differ, identical, product, same, same_sizes
from asynctp_passes.reasons import Refusal
from asynctp_passes.torch_private import fx_graphs, symbolic_sizes, torch_ops, triton_kernels


def _left_operand(matmul: fx.Node) -> fx.Node | None:
    """The left operand; of an op that is not known what has the shape of it, or the first input."""
    op = _described(matmul)
    if op is None:
        shaped = _shaped_as_operands(matmul)
        return next(iter(matmul.all_input_nodes), None) if shaped is None else shaped[0]
    node = arguments(matmul).get(op.a)
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
        node = first_tensor(node) if traits.converts or (traits.copies and traits.view is View.SAME) else None
    return False


def _is_transposed(value: torch.Tensor) -> bool:
    """True when the last but one dimension is the contiguous one. Sizes of 1 say nothing; symbols are not asked."""
    sizes, (outer, inner) = value.shape[-2:], value.stride()[-2:]
    return identical(outer, 1) and not any(identical(one, 1) for one in (inner, *sizes))


def is_matmul(node: fx.Node) -> bool:
    """True for every op that multiplies matrices, or by its shapes may, whether asynctp rewrites it or not."""
    if node.op != "call_function":
        return False
    if _described(node) is not None or multiplies(called_name(node)):
        return True
    return _shaped_as_operands(node) is not None or any(map(is_matmul, fx_graphs.nodes_hidden_by(node)))


def _described(node: fx.Node) -> MatmulOp | None:
    """The descriptor of what a node calls, where it is a matmul that is known or registered."""
    kernel = triton_kernels.called_by(node)
    return matmul_op(called_name(node) if kernel is None else triton_kernels.key_of(kernel))


def _shaped_as_operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The inputs `[..., M, K]` and `[K, N]`, or `[N, K]`, of another library's op that returns `[..., M, N]`."""
    name = called_name(node)
    if not calls_op(node) or not can_promise(name) or promise_of(name) == "rowwise":
        return None
    for out, into in _results(node):
        if out.dim() < 2 or not out.is_floating_point():
            continue
        operands = ((one, tensor_of(one)) for one in node.all_input_nodes if one not in into)
        inputs = [(one, value) for one, value in operands if value is not None]
        pairs = ((a, b) for a, left in inputs for b, right in inputs if a is not b and _is_product(left, right, out))
        if (found := next(pairs, None)) is not None:
            return found
    return None


def _results(node: fx.Node) -> Iterator[tuple[torch.Tensor, list[fx.Node]]]:
    """The results of a call, each with the inputs that it is written into, which are no operands of it."""
    if triton_kernels.called_by(node) is not None:
        for user in node.users:  # of what a kernel may write to, it writes to what is used
            if op_name(user) == "getitem" and (one := tensor_of(user)) is not None:
                yield one, nodes_in(triton_kernels.tensors_of(node).get(str(user.args[1])))
        return
    op = called_op(node)
    written = [] if op is None or op is node.target else writes(op)
    into = nodes_in([node.kwargs.get(name) for name in (*written, "_all_bases")])
    yield from ((one, into) for one in values_of(node))


def _is_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> bool:
    """True where sizes are those of a matmul; not for two inputs of one shape, as of a sum."""
    if left.dim() != out.dim() or right.dim() != 2 or same_sizes(right.shape, left.shape):
        return False
    sizes = (left.shape[-1], out.shape[-1])
    fits = any(same_sizes(right.shape, order) for order in (sizes, sizes[::-1]))
    return fits and same_sizes(left.shape[:-1], out.shape[:-1])


def operands_that_are(matmul: fx.Node, nodes: Container[fx.Node]) -> set[str]:
    """Which of a matmul's operands are among some nodes: `"left"`, `"right"`, `"other"` (a bias, a scale).

    Of an op that is not known, what has the shape of the left operand is it, or the first input; of one inside of
    `auto_functionalized`, any may be.
    """
    op, sources = _described(matmul), matmul.all_input_nodes
    roles: dict[Any, str]
    if op is None and (shaped := _shaped_as_operands(matmul)) is not None:
        roles = dict.fromkeys(sources, "other") | {shaped[1]: "right", shaped[0]: "left"}
    elif op is None:
        left = sources[:1] if torch_ops.is_op(matmul.target) or fx_graphs.nodes_hidden_by(matmul) else sources
        roles = {source: "left" if source in left else "right" for source in sources}
    else:
        values = arguments(matmul)
        roles = dict.fromkeys(sources, "other") | {values.get(op.b): "right", values.get(op.a): "left"}
    return {role for source, role in roles.items() if source in nodes}


def feeds_left_operand(matmul: fx.Node, before: fx.Node) -> bool:
    """True when the node `before` is a left operand of the node `matmul`."""
    return "left" in operands_that_are(matmul, (before,))


def read_matmul(node: fx.Node) -> Matmul | Refusal:
    """Read a matmul node by its schema, or say why its form is not rewritten."""
    name, op = called_name(node), _described(node)
    if op is None:
        hidden = " -> ".join(map(short_name, fx_graphs.nodes_hidden_by(node)))
        facts = f"{name} {node.name}" + (f", which Inductor put in the place of {hidden}" if hidden else "")
        packed = ", ".join(one.name for one in fx_graphs.packed_constants(node))
        facts += f", whose weight {packed} is packed: freezing did that" if packed else _line_of_kernel(node)
        return Refusal(reasons.MATMUL_NOT_UNDERSTOOD, facts)
    values, result = arguments(node), _result(node, op)
    if isinstance(result, Refusal):
        return result
    a, right, out = tensor_of(values.get(op.a)), tensor_of(values.get(op.b)), tensor_of(result)
    if a is None or right is None or out is None:
        return Refusal(reasons.SHAPE_UNKNOWN, node.name)
    is_kernel = triton_kernels.called_by(node) is not None
    if is_kernel and (other := _computes_more(op, values) or _passes_other(node, op, a, out)):
        return Refusal(reasons.MATMUL_NOT_UNDERSTOOD, f"{name} {node.name} {other}")
    b, b_transposed = _one_matrix(values[op.b], op.b_transposed)
    facts = f"{name} {node.name}: {list(a.shape)} @ {list(right.shape)}"
    if b is None or a.dim() < 2 or not same(rows_of(a), rows_of(out)):
        return Refusal(reasons.MATMUL_NOT_UNDERSTOOD, facts)
    depth, columns = reversed(right.shape[-2:]) if op.b_transposed else right.shape[-2:]
    if differ(a.shape[-1], depth) or differ(out.shape[-1], columns):  # than the op was described to have
        return Refusal(reasons.MATMUL_NOT_UNDERSTOOD, facts)
    bias = values.get(op.bias) if op.bias is not None else None
    problem = _added(node, values, bias, out)
    scaled = read_scales(node, op, values, a, right, out)
    if problem is not None or isinstance(scaled, Refusal):
        return problem or scaled  # type: ignore[return-value]
    if scaled is None and out.dtype != (torch.int32 if a.dtype == torch.int8 else a.dtype):
        return Refusal(reasons.DTYPE_UNSUPPORTED, f"{node.name}: {a.dtype} -> {out.dtype}")
    return Matmul(result, values[op.a], b, bias, scaled, b_transposed, None if result is node else node)


def _computes_more(op: MatmulOp, values: Mapping[str, Any]) -> str:
    """Why a registered Triton kernel may compute more in a call than was described, in words; else empty.

    What is added to nothing, or to zeros, is the matmul.
    """
    roles, into = (op.a, op.b, op.bias, op.a_scale, op.b_scale, op.out), values.get(op.out or "")
    others = [name for name, value in values.items() if tensor_of(value) is not None and name not in roles]
    if others:
        return f"takes {', '.join(others)} too, which register_matmul was told nothing about"
    if isinstance(into, fx.Node) and not traits_of(into).undefined and filling_of(into) != 0:
        return f"may add to {into.name}: let it write into a tensor of torch.empty or torch.zeros"
    return ""


def _passes_other(node: fx.Node, op: MatmulOp, a: torch.Tensor, out: torch.Tensor) -> str:
    """Which number of a Triton kernel's call is not the size or stride that it was described as; empty if all are."""
    given, strides = _numbers_of(node), dict(op.strides)
    known = {*op.sizes, *(name for names in strides.values() for name in names)}
    others = [
        name for name in triton_kernels.arguments_of(triton_kernels.called_by(node)) if name in given.keys() - known
    ]
    if others:
        return f"takes {', '.join(others)} too: tell register_matmul by sizes= and strides= what each number is"
    if constant := _other_constant(node, op, known):
        return constant
    if described := triton_kernels.described_by_sizes(node):
        return f"takes {', '.join(described)} by descriptors with sizes of their own: use TensorDescriptor.from_tensor"
    sizes = zip(op.sizes, (rows_of(out), out.shape[-1], a.shape[-1]), "MNK", strict=False)
    wanted: list[tuple[str | int, Any, str]] = [*sizes]
    for role in MATMUL_ROLES:
        tensor = tensor_of(arguments(node).get(getattr(op, role)))
        if tensor is None:
            continue
        names = strides.get(role)
        if names is None and not symbolic_sizes.is_contiguous(tensor):
            return f"takes {role}, which is not contiguous: tell register_matmul by strides= where its strides go"
        if names is not None and len(names) != tensor.dim():
            return f"takes {role} with {tensor.dim()} dimensions, and strides= has {len(names)}: reshape it before"
        for axis, name in enumerate(names or ()):
            if not identical(tensor.shape[axis], 1):
                wanted.append((name, tensor.stride(axis), f"stride {axis} of {role}"))
    for name, value, meaning in wanted:
        number = given.get(name) if isinstance(name, str) else name
        if not isinstance(number, int | torch.SymInt) or not same(as_size(number), as_size(value)):
            return f"passes {number} for {name}, and {meaning} is {value}: pass sizes and strides as they are"
    return ""


def _other_constant(node: fx.Node, op: MatmulOp, known: Container[str | int]) -> str:
    """Which constant of a Triton kernel's call is not as described; empty if all are. `known`: sizes and strides."""
    told = dict(op.constants)
    given = {name: values for name, values in triton_kernels.constants_of(node).items() if name not in known}
    if others := [name for name in given if name not in told]:
        return f"is compiled for {', '.join(others)} too: tell register_matmul by constants={_as_told(node, others)}"
    for name, values in given.items():
        for value in values:
            if told[name] is not ... and value != told[name]:
                return f"has {value!r} for {name}, and constants= has {told[name]!r}: tell ... if any computes the same"
    return ""


def _as_told(node: fx.Node, names: Container[str]) -> str:
    """The `constants=` that describes a call; `...` for a constant whose tuning tries several values."""
    given = [(name, values) for name, values in triton_kernels.constants_of(node).items() if name in names]
    shown = (f'"{name}": ' + ("..." if any(one != of[0] for one in of) else f"{of[0]!r}") for name, of in given)
    return f"{{{', '.join(shown)}}}".replace("'", '"')


def _numbers_of(node: fx.Node) -> dict[str, Any]:
    """The numbers and flags that a call of a Triton kernel passes, by their names; of a node its value."""
    values = {name: getattr(one, "meta", {}).get("val", one) for name, one in triton_kernels.values_of(node).items()}
    return {name: one for name, one in values.items() if one is not None and not isinstance(one, torch.Tensor)}


def _line_of_kernel(node: fx.Node) -> str:
    """The `register_matmul` line for an unregistered Triton kernel with a matmul's shapes; empty for other nodes."""
    kernel, shaped = triton_kernels.called_by(node), _shaped_as_operands(node)
    if kernel is None or shaped is None:
        return ""
    names = {value: name for name, value in arguments(node).items() if tensor_of(value) is not None}
    a, b = (names[operand] for operand in shaped)
    outs = sorted({str(user.args[1]) for user in node.users if op_name(user) == "getitem"})
    if len(outs) > 1:
        return f", a Triton kernel with the shapes of one, which may write to {', '.join(outs)}"
    others = [name for name in names.values() if name not in (a, b, *outs)]
    line = f'register_matmul({kernel.__name__}, a="{a}", b="{b}", out="{outs[0]}"'
    numbers = [name for name in triton_kernels.arguments_of(kernel) if name in _numbers_of(node)]
    told = _told_numbers(node, {"a": a, "b": b, "out": outs[0]}, numbers)
    constants = _as_told(node, triton_kernels.constants_of(node))
    line += told + (f", constants={constants}" if constants != "{}" else "") + ")"
    line += f", and which sizes and strides {', '.join(numbers)} are" if numbers and not told else ""
    line += f", and what of a bias and scales {', '.join(others)} is" if others else ""
    return f", a Triton kernel with the shapes of one: if it computes a @ b, and nothing else, {line}"


def _told_numbers(node: fx.Node, tensors: Mapping[str, str], numbers: Sequence[str]) -> str:
    """The `sizes` and `strides` of a call that passes M, N and K, and then all strides or none; empty for another.

    tensors: The names of `"a"`, `"b"` and `"out"`. numbers: Those of what the call passes besides.
    """
    values = {role: value_of(arguments(node)[name]) for role, name in tensors.items()}
    columns, depth = (as_size(values[role].shape[-1]) for role in ("out", "a"))
    wanted = [rows_of(values["out"]), columns, depth, *(as_size(one) for of in values.values() for one in of.stride())]
    given = [_numbers_of(node)[name] for name in numbers]
    if len(given) not in (3, len(wanted)) or not all(isinstance(one, int | torch.SymInt) for one in given):
        return ""
    if not all(map(same, map(as_size, given), wanted)):
        return ""
    left = iter(numbers[3:])
    strides = {role: tuple(next(left) for _ in value.stride()) for role, value in values.items()} if numbers[3:] else {}
    return f", sizes={tuple(numbers[:3])}{f', strides={strides}' if strides else ''}".replace("'", '"')


def _result(node: fx.Node, op: MatmulOp) -> fx.Node | Refusal:
    """The node that is the product: the op's, or the item that is `op.out` of what writes into its arguments."""
    if op.out is None:
        return node
    name = f"{called_name(node)} {node.name}"
    whole = {f"_{op.out}_base_index", f"_{op.out}_alias"}
    parts = {key for key in node.kwargs if key.startswith(f"_{op.out}_")} - whole
    bases = node.kwargs.get("_all_bases")
    places, place = ((0, 1), 1) if triton_kernels.called_by(node) is None else (list(arguments(node)), op.out)
    items = items_of(node, places) if not torch_ops.is_op(node.target) else None
    if items is None or list(items) != [place] or parts or (isinstance(bases, list | tuple) and len(bases) != 1):
        return Refusal(reasons.MATMUL_NOT_UNDERSTOOD, f"{name} writes in place, or into more or less than one tensor")
    value = tensor_of(items[place])
    if value is not None and not symbolic_sizes.is_contiguous(value):
        return Refusal(reasons.MATMUL_NOT_UNDERSTOOD, f"{name}: the result is not contiguous")
    return items[place]


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
            if not same_sizes(source.shape[-2:], value.shape[-2:]):
                break
        elif traits.view is View.PERMUTE:
            *batch, rows, columns = range(value.dim())
            if order_of(node, value.dim()) != [*batch, columns, rows]:
                break
            transposed = not transposed
        elif traits.view is not View.SAME or traits.copies:
            break
        node = node.args[0]  # type: ignore[assignment]
    return None, transposed


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
    whole = same_sizes(added.shape, out.shape) and not _is_row(added, out)
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
