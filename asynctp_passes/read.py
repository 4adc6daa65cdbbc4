"""Read collectives and matmuls off a graph: each op's arguments by name, once, as a frozen value."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from asynctp_passes import compat, reasons
from asynctp_passes.chain import Collective, CollectiveKind, Matmul, ScaledOptions
from asynctp_passes.fxview import arguments, op_name, tensor_of
from asynctp_passes.reasons import Refusal
from asynctp_passes.shapes import same

__all__ = ["identical", "is_matmul", "read_collectives", "read_matmul"]

_COLLECTIVES: dict[str, CollectiveKind] = {
    "_c10d_functional.all_gather_into_tensor.default": "all_gather",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce_scatter",
    "_c10d_functional.all_reduce.default": "all_reduce",
    "_c10d_functional.all_reduce_.default": "all_reduce",
}
_WAIT = "_c10d_functional.wait_tensor.default"
_MATMULS = {"aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default"}
_OTHER_MATMULS = {
    "aten.mm.dtype",
    "aten.addmm.dtype",
    "aten.bmm.default",
    "aten.bmm.dtype",
    "aten.baddbmm.default",
    "aten.matmul.default",
    "aten.linear.default",
    "aten._int_mm.default",
    "aten._addmm_activation.default",
    "aten._scaled_mm_v2.default",
    "aten._grouped_mm.default",
    "aten._scaled_grouped_mm.default",
    "aten._scaled_grouped_mm_v2.default",
    "aten._weight_int8pack_mm.default",
    "aten.einsum.default",
}


def is_matmul(node: fx.Node) -> bool:
    """True for every op that multiplies matrices, whether asynctp rewrites it or not."""
    return op_name(node) in _MATMULS or op_name(node) in _OTHER_MATMULS


def read_collectives(graph: fx.Graph) -> list[Collective]:
    """Every collective of the graph, in order; custom ops that look like one included (kind `"other"`)."""
    return [collective for node in graph.nodes if (collective := _read_collective(node)) is not None]


def _read_collective(node: fx.Node) -> Collective | None:
    name = op_name(node)
    if name in _COLLECTIVES:
        values = arguments(node)
        group = values["group_name"]
        return Collective(
            node=node,
            kind=_COLLECTIVES[name],
            input=values.get("input", values.get("self")),
            waits=tuple(user for user in node.users if op_name(user) == _WAIT),
            group=group,
            group_key=_group_key(group),
            group_size=values.get("group_size", 0),
            reduce_op=values.get("reduce_op", ""),
        )
    return Collective(node, "other", _first_tensor(node)) if _looks_collective(name) else None


def _looks_collective(name: str) -> bool:
    if name == _WAIT or name.startswith(("aten.", "prims.", "asynctp.")):
        return False
    words = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "allgather", "allreduce", "reducescatter")
    return name.startswith("_c10d_functional.") or any(word in name for word in words)


def _group_key(group: Any) -> str:
    if isinstance(group, fx.Node):
        return compat.group_name_of(group.meta.get("val")) or f"%{group.name}"
    return compat.group_name_of(group)


def _first_tensor(node: fx.Node) -> fx.Node | None:
    return next((argument for argument in node.all_input_nodes if tensor_of(argument) is not None), None)


def read_matmul(node: fx.Node) -> Matmul | Refusal:
    """Read a matmul node by its schema, or say why its form is not rewritten."""
    name = op_name(node)
    if name not in _MATMULS:
        return Refusal(reasons.MATMUL_NOT_UNDERSTOOD, f"{name} {node.name}")
    values = arguments(node)
    if name == "aten.addmm.default":
        return _read_addmm(node, values)
    if name == "aten._scaled_mm.default":
        return _read_scaled(node, values)
    return Matmul(node, values["self"], values["mat2"])


def _read_addmm(node: fx.Node, values: dict[str, Any]) -> Matmul | Refusal:
    bias, out = tensor_of(values["self"]), tensor_of(node)
    if values["alpha"] != 1 or values["beta"] != 1:
        return Refusal(reasons.ADDMM_SCALED, f"{node.name}: alpha={values['alpha']}, beta={values['beta']}")
    if bias is None or out is None:
        return Refusal(reasons.SHAPE_UNKNOWN, node.name)
    if not _is_row(bias, out):
        return Refusal(reasons.ADDMM_SCALED, f"{node.name}: the bias has shape {list(bias.shape)}")
    return Matmul(node, values["mat1"], values["mat2"], bias=values["self"])


def _is_row(bias: torch.Tensor, out: torch.Tensor) -> bool:
    """True for a bias [N] or [1, N] of an output [M, N]."""
    width = bias.shape[-1] if bias.dim() in (1, 2) else None
    lines = bias.shape[0] if bias.dim() == 2 else 1
    return isinstance(lines, int) and lines == 1 and width is not None and identical(width, out.shape[-1])


def identical(a: Any, b: Any) -> bool:
    """True for two sizes, integers or symbolic, that are provably equal."""
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(same(compat.expression(a), compat.expression(b)))
    return isinstance(a, int) and isinstance(b, int) and a == b


def _read_scaled(node: fx.Node, values: dict[str, Any]) -> Matmul | Refusal:
    out = tensor_of(node)
    if out is None:
        return Refusal(reasons.SHAPE_UNKNOWN, node.name)
    if values["scale_result"] is not None or compat.has_folded_output_scale(node):
        return Refusal(reasons.RESULT_SCALED, node.name)
    bias = tensor_of(values["bias"])
    if bias is not None and not _is_row(bias, out):
        return Refusal(reasons.ADDMM_SCALED, f"{node.name}: the bias has shape {list(bias.shape)}")
    scaled = ScaledOptions(values["scale_a"], values["scale_b"], out.dtype, bool(values["use_fast_accum"]))
    return Matmul(node, values["self"], values["mat2"], values["bias"], scaled)
