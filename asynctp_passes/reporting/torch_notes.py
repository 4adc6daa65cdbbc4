"""Notes on what a report would not show: breaks of a program's graphs, and ops that may communicate."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from asynctp_passes.ir.order import opaque_ops
from asynctp_passes.reporting.report import Note
from asynctp_passes.torch_private import dynamo, process_groups

_NAMED = 8
"""How many ops a note names."""

_SCALED_MM = (
    "torch.nn.functional.scaled_mm",
    "torch 2.11 and 2.12 do not trace it",
    "use torch._scaled_mm or torch.ops.aten._scaled_mm_v2, or a newer torch",
)

_OUTSIDE = "what is called there is in another graph than what is around it, or in none and in no report"

_HIDING = {
    "_maybe_view_chunk_cat": (
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


def notes(graph: fx.Graph) -> tuple[Note, ...]:
    """The notes on a graph; most graphs have none."""
    nodes = graph.nodes if process_groups.has_peers() else ()
    found = list(dict.fromkeys(name for node in nodes for name in opaque_ops(node)))
    if not found:
        return with_own_breaks(())
    names = [*found[:_NAMED], *(["..."] if len(found) > _NAMED else [])]
    told = (
        f"nothing tells whether these ops communicate, so each keeps its place: {', '.join(names)}; register a "
        "collective with register_collective, a matmul with register_matmul, and others that stay on one rank with "
        "register_local or register_rowwise"
    )
    return with_own_breaks([Note("opaque", told)])


def with_own_breaks(notes: Sequence[Note]) -> tuple[Note, ...]:
    """The notes with the breaks of this process, in place of those of the process that filled the cache."""
    own = [note for note in notes if note.kind != "breaks"]
    return (*([Note("breaks", hidden)] if (hidden := hidden_calls()) else []), *own)


def hidden_calls() -> str:
    """The note on collectives and matmuls that run outside every graph, where no pass sees them; empty without any."""
    texts, told = dynamo.graph_breaks(), []
    for mark, (call, why, remedy) in _HIDING.items():
        if count := sum(mark in text for text in texts):
            times = f"{count} time{'s' if count > 1 else ''}"
            told.append(f"torch broke a graph at {call}, {times} in this process: {_OUTSIDE} ({why}); {remedy}")
    return "; ".join(told)
