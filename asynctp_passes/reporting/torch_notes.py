"""Notes on what a report would not show: bugs of this torch that a program meets, and breaks of its graphs.

`asynctp doctor` tells the bugs by version.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from asynctp_passes.ir.nodes import tensor_of
from asynctp_passes.ir.order import opaque_ops
from asynctp_passes.reporting.report import Note
from asynctp_passes.torch_private import dynamo, process_groups

_NAMED = 8
"""How many ops a note names."""

_GATHER_HELPER = "_maybe_view_chunk_cat"
"""What `all_gather_tensor` calls for a dimension but the first; dynamo of torch 2.11 and 2.12 does not trace it."""

_SCALED_MM = (
    "torch.nn.functional.scaled_mm",
    "torch 2.11 and 2.12 do not trace it",
    "use torch._scaled_mm or torch.ops.aten._scaled_mm_v2, or a newer torch",
)

_IN_NO_GRAPH = "what is called there runs outside every graph and is in no report"
_IN_ANOTHER_GRAPH = "what is called there is in another graph than what is around it, or in none and in no report"

_HIDING = {
    _GATHER_HELPER: (
        "all_gather_tensor(gather_dim != 0)",
        "torch 2.11 and 2.12, pytorch issue 179722",
        "use DTensor or gather_dim=0, or a newer torch",
    ),
    "async_op=True for distributed collectives": (
        "async_op=True",
        "torch.compile does not trace handles",
        "leave async_op out where the program is compiled: Inductor starts a collective early and waits for it late by "
        "itself",
    ),
    "torch.distributed.nn.functional": (
        "torch.distributed.nn.functional",
        "torch.compile does not trace it",
        "use the collectives of torch.distributed._functional_collectives that end in _autograd, or DTensor",
    ),
    "the function `checkpoint_sequential`": (
        "torch.utils.checkpoint.checkpoint_sequential",
        "torch.compile does not trace it",
        "call checkpoint for each part, or compile the parts",
    ),
    "Module-level backwards hooks require compiled autograd": (
        "a module with a backward hook",
        "torch.compile traces such a module with compiled autograd alone",
        "register the hook on a tensor, such as the module's output (Tensor.register_hook)",
    ),
    "torch._VariableFunctionsClass._scaled_mm_v2": _SCALED_MM,
    "wrap <class 'torch.nn.functional._ScalingType'>": _SCALED_MM,  # 2.12, where the frame itself names the recipe
}
"""For what dynamo says when it breaks a graph, or gives a frame up: at which call, why, and what to do."""

_CALLING_MODULES = ("the function `checkpoint_sequential`", "Module-level backwards hooks require compiled autograd")
"""Those of them whose calls run modules, which dynamo may compile by themselves."""


def notes(graph: fx.Graph, phase: str) -> tuple[Note, ...]:
    """The notes on a graph; most graphs have none."""
    found = [Note("breaks", hidden_calls()), Note("opaque", _opaque(graph))]
    if phase == "forward":
        found.append(Note("torch", _checkpoint_of_dtensors(graph, str(torch.__version__))))
    return tuple(note for note in found if note.text)


def _opaque(graph: fx.Graph) -> str:
    """The note on ops that may communicate, where there is anybody to communicate with."""
    found = (
        dict.fromkeys(name for node in graph.nodes for name in opaque_ops(node)) if process_groups.has_peers() else {}
    )
    if not found:
        return ""
    names = [*list(found)[:_NAMED], *(["..."] if len(found) > _NAMED else [])]
    return (
        f"nothing tells whether these ops communicate, so each keeps its place: {', '.join(names)}; register a "
        "collective with register_collective, a matmul with register_matmul, and others that stay on one rank with "
        "register_local or register_rowwise"
    )


def from_another_process(notes: Sequence[Note]) -> tuple[Note, ...]:
    """The notes of a graph from a cache, with the breaks of this process instead of those of the one that filled it."""
    own = [note for note in notes if note.kind != "breaks"]
    return (*([Note("breaks", hidden)] if (hidden := hidden_calls()) else []), *own)


def hidden_calls() -> str:
    """The note on collectives and matmuls that run outside every graph, where no pass sees them; empty without any."""
    texts = dynamo.graph_breaks()
    counts = {mark: sum(mark in text for text in texts) for mark in _HIDING}
    return "; ".join(_hidden(mark, count) for mark, count in counts.items() if count)


def _hidden(mark: str, count: int) -> str:
    call, why, remedy = _HIDING[mark]
    times = f"{count} time{'s' if count > 1 else ''}"
    effect = _IN_ANOTHER_GRAPH if mark in _CALLING_MODULES else _IN_NO_GRAPH
    return f"torch broke a graph at {call}, {times} in this process: {effect} ({why}); {remedy}"


def _checkpoint_of_dtensors(graph: fx.Graph, version: str) -> str:
    """A note on a graph that torch 2.12 cannot run: a saved random state, a tensor, comes after saved objects."""
    if not version.startswith(("2.12.", "2.13.0")):
        return ""
    (results,) = next(node.args for node in reversed(graph.nodes) if node.op == "output")
    flat = [result for result in (results if isinstance(results, list | tuple) else [results]) if result is not None]
    tensors = [index for index, result in enumerate(flat) if tensor_of(result) is not None]
    objects = [index for index, result in enumerate(flat) if _is_object(result)]
    if not objects or not tensors or objects[-1] > tensors[-1]:
        return ""
    return (
        f"torch {version} will fail when this graph runs (AssertionError: expected all tensors_saved_with_vc_check to "
        "be Tensors): activation checkpointing saves a random state after a device mesh; use torch 2.11, or 2.14 and "
        "newer, or do not recompute compiled DTensor attention"
    )


def _is_object(result: object) -> bool:
    """True for a node that is neither a tensor nor a number, such as a device mesh."""
    value = result.meta.get("val") if isinstance(result, fx.Node) else 0
    return not isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | int | float | None)
