"""Torch's partitioner: the tags it reads, the marks it leaves, and the inputs and outputs that autograd describes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn


def default_partition(
    gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Divide a joint graph into forward and backward, as Inductor does without a custom partitioner."""
    from torch._inductor import compile_fx

    partition: Any = getattr(compile_fx, "min_cut_rematerialization_partition")  # noqa: B009  (mypy: not exported)
    halves: tuple[fx.GraphModule, fx.GraphModule] = partition(gm, joint_inputs, **options)
    return halves


def is_of_backward(node: fx.Node) -> bool:
    """True for a node that was traced for a backward, wherever the partitioner has put it."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def mark_of_backward(node: fx.Node) -> None:
    """Mark a node that was put into a backward graph as the partitioner marks those of its own."""
    node.meta["autograd_backward"] = True


_UNCHECKED = "saved_tensor_with_no_vc_check"


def is_saved_unchecked(node: fx.Node) -> bool:
    """True for a tensor that is saved for the backward without a check of its version: such ones come last."""
    return bool(node.meta.get(_UNCHECKED))


def replace_outputs(graph: fx.Graph, outputs: Sequence[Any], first: int) -> None:
    """Give a forward graph other outputs, and what torch notes of each.

    Args:
        outputs: All of its outputs. Those before `first` are as they were.
        first: The number of the first output that is saved for the backward.
    """
    output = graph.output_node()
    before = list(output.args[0])  # type: ignore[arg-type]
    known = {node: index for index, node in reversed(list(enumerate(before))) if index >= first}
    descriptions, traces = output.meta.get("desc"), output.meta.get("output_stack_traces")
    if descriptions is not None and len(descriptions) == len(before):
        from torch._functorch._aot_autograd import descriptors

        plain, unchecked = descriptors.SavedForBackwardsAOTOutput, descriptors.SavedForBackwardsNoVcCheckAOTOutput
        tensors = [isinstance(node.meta.get("val"), torch.Tensor) for node in outputs[first:]]
        kinds = [
            unchecked if tensor and is_saved_unchecked(node) else plain
            for node, tensor in zip(outputs[first:], tensors, strict=True)
        ]
        output.meta["desc"] = [*descriptions[:first], *(kind(index) for index, kind in enumerate(kinds))]
    if traces is not None and len(traces) == len(before):
        saved = [traces[known[node]] if node in known else node.meta.get("stack_trace") for node in outputs[first:]]
        output.meta["output_stack_traces"] = [*traces[:first], *saved]
    output.args = (tuple(outputs),)


_RECOMPUTE = "recompute"


def recompute_tag(node: fx.Node) -> Any:
    """The tag that activation checkpointing gives a node of a joint graph for the partitioner; None without one."""
    return node.meta.get(_RECOMPUTE)


def is_saved(node: fx.Node) -> bool:
    """True for a node of a joint graph that activation checkpointing saves for the backward."""
    from torch.utils.checkpoint import CheckpointPolicy

    return recompute_tag(node) is CheckpointPolicy.MUST_SAVE


def save_instead(results: Sequence[fx.Node], unreduced: Sequence[fx.Node]) -> None:
    """Have the partitioner save `results` for the backward, and compute what led to them again if it needs that."""
    from torch.utils.checkpoint import CheckpointPolicy

    for nodes, tag in ((unreduced, CheckpointPolicy.PREFER_RECOMPUTE), (results, CheckpointPolicy.MUST_SAVE)):
        for node in nodes:
            node.meta[_RECOMPUTE] = tag


def recomputed(module: Any, context_fn: Callable[[], Any] | None = None) -> Any:
    """The module, recomputed in the backward; of what `context_fn` lets it keep, nothing. Names of parameters stay."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module) if context_fn is None else checkpoint_wrapper(module, context_fn=context_fn)


def inputs_written_after(graph: fx.Graph) -> set[fx.Node]:
    """The inputs of a joint graph that get new values when its forward is done.

    Where autograd records that, the graph does not write: it returns the values, and they are copied after it. Of a
    tensor's parts (a DTensor's local one) all count as written.
    """
    descriptions = graph.output_node().meta.get("desc") or ()
    written = {_described(getattr(_whole(one), "mutated_input", None)) for one in descriptions} - {""}
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    return {node for node in inputs if _described(node.meta.get("desc")) in written}


def _whole(description: Any) -> Any:
    """A tensor's description by autograd's tracing (`_aot_autograd.descriptors`); for a part, that of its whole."""
    return _whole(description.base) if hasattr(description, "base") else description


def _described(description: Any) -> str:
    return "" if description is None else repr(_whole(description))


def program_inputs(graph: fx.Graph) -> dict[fx.Node, int]:
    """The inputs of a graph, or parts of them (a DTensor's local tensor), that the compiled function takes, by number.

    Empty where autograd's tracing describes none: a graph that torch.compile did not make.
    """
    described = ((node, _whole(node.meta.get("desc"))) for node in graph.nodes if node.op == "placeholder")
    return {node: one.idx for node, one in described if type(one).__name__ == "PlainAOTInput"}


_frozen: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def note_frozen(numbers: Iterable[int]) -> None:
    """Keep which inputs of the function that is compiled just now are parameters of modules that want no gradient."""
    from torch._guards import TracingContext

    if (context := TracingContext.try_get()) is not None:
        _frozen[context] = frozenset(numbers)


def frozen() -> frozenset[int]:
    """The inputs that were noted for the function that is compiled just now, by number."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return frozenset() if context is None else _frozen.get(context, frozenset())


def parameters(graph: fx.Graph, is_backward: bool) -> set[fx.Node]:
    """The inputs of a graph that are parameters as far as torch knows, or their gradients, which a backward returns.

    Those stay in their place, and want gradients: a buffer wants none, nor does a tensor whose address is marked as
    static. Frozen ones want none either, and are those that were noted (`note_frozen`). Empty for a graph that Dynamo
    did not trace, and for a part of one.
    """
    from torch._guards import TracingContext

    metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
    static, infos = getattr(metadata, "static_input_indices", ()), getattr(metadata, "input_info", ())
    inputs, output = graph.find_nodes(op="placeholder"), graph.output_node()
    nodes = output.args[0] if is_backward else inputs
    if not static or not isinstance(nodes, list | tuple) or not output.meta.get("desc"):
        return set()
    trained = {number for number in static if number < len(infos) and infos[number].requires_grad}
    found = {node for number, node in enumerate(nodes) if number in trained and isinstance(node, fx.Node)}
    if not is_backward and (noted := frozen()):
        found |= {node for node, number in program_inputs(graph).items() if number in noted}
    return found


def program_outputs(graph: fx.Graph) -> dict[int, fx.Node]:
    """The tensors among a graph's results, or their parts, that the compiled function returns, by number there."""
    output = graph.output_node()
    results, descriptions = output.args[0], output.meta.get("desc") or ()
    results = list(results) if isinstance(results, list | tuple) else [results]
    if len(results) != len(descriptions):
        return {}
    found: dict[int, fx.Node] = {}
    for node, description in zip(results, map(_whole, descriptions), strict=True):
        is_plain = type(description).__name__ == "PlainAOTOutput"
        if is_plain and isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
            found[description.idx] = node
    return found
