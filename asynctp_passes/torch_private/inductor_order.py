"""Keep the order of nodes through Inductor, whose scheduler reorders what does not depend on one another."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from asynctp_passes.torch_private import dynamo, inductor_options, symbolic_sizes


def is_compiled(graph: fx.Graph) -> bool:
    """True for a graph that is being compiled; of others nothing is reordered."""
    return graph.owning_module is not None and dynamo.compile_id() is not None


def is_called(op: Any) -> bool:
    """True for an op that Inductor calls as it is: it has no lowering to a kernel of Inductor's, or runs a graph."""
    from torch._inductor import lowering

    if isinstance(op, torch._ops.HigherOrderOperator):
        return True
    return isinstance(op, torch._ops.OpOverload) and (op in lowering.fallbacks or op not in lowering.lowerings)


def keep_order(graph: fx.Graph, after: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
    """Make Inductor run each node after the nodes listed for it; its scheduler reorders what does not depend.

    Outside a compile, where nothing reorders, the graph stays as it is. Of a node with several results a tensor is
    named, and moved next to it: Inductor passes over dependencies that are no tensors, or fails on a number. A number
    is made a tensor, to be named. A node's inputs are named too: otherwise Inductor would also delay them, and could
    not fuse them with earlier work.

    Returns:
        The nodes without a result, for which Inductor cannot be told to wait.
    """
    if not after or not is_compiled(graph):
        return []
    from torch._inductor import lowering
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    def named(node: fx.Node, earlier: list[fx.Node]) -> OrderedSet[fx.Node]:
        inputs = (source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor))
        return OrderedSet([*(made for one in earlier if (made := tensors[one]) is not None), *inputs])

    tensors = {one: _tensor_of_result(one) for one in dict.fromkeys(itertools.chain.from_iterable(after.values()))}
    left = set[fx.Node]()
    if not hasattr(lowering, "_MISSING"):  # torch 2.11 can lower no wrapper of an op without a result
        left = {node for node in after if node.meta.get("val") is None}
    found = {node: named(node, earlier) for node, earlier in after.items() if node not in left}
    preserve_node_ordering(graph, {node: awaited for node, awaited in found.items() if awaited})
    _lower_wrapped_subgraphs()
    return [node for node in (*tensors, *left) if tensors.get(node) is None]


def _tensor_of_result(node: fx.Node) -> fx.Node | None:
    """A node right after this one, or the node itself, with a tensor of its result, or one made of a number of it.

    None for a node without a result.
    """
    if isinstance(node.meta.get("val"), torch.Tensor):
        return node
    items = [user for user in node.users if user.target is operator.getitem]
    for item in items:
        if isinstance(item.meta.get("val"), torch.Tensor):
            node.append(item)
            return item
    for number in (node, *items):
        if isinstance(number.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
            if number is not node:
                node.append(number)
            with node.graph.inserting_after(number):
                made = node.graph.call_function(torch.ops.aten.scalar_tensor.default, (number,))
            tensors = (one.meta.get("val") for one in node.graph.nodes)
            with next(
                (mode for one in tensors if (mode := symbolic_sizes.fake_mode_of(one))), contextlib.nullcontext()
            ):
                made.meta["val"] = torch.empty(())
            return made
    return None


def _lower_wrapped_subgraphs() -> None:
    """Let what wraps a node take a subgraph, return numbers and None of it, and wait for calls with unused results.

    Inductor 2.14 and 2.15 realize all that a wrapper takes and returns, and ask for its name. These have neither, and
    need neither.
    """
    from torch._inductor import lowering
    from torch._inductor.fx_passes.control_dependencies import control_deps

    original = lowering.lowerings[control_deps]
    if getattr(original, "asynctp", False):
        return

    @functools.wraps(original)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        with _constants_realized():
            result = original(*args, **kwargs)
        _wait_for_calls()
        return result

    lowered.asynctp = True  # type: ignore[attr-defined]
    lowering.lowerings[control_deps] = lowered


def _wait_for_calls() -> None:
    """Let what waits for a call's result wait for the call: Inductor forgets a result that nothing uses."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    for awaited in V.graph.additional_buffer_deps.values():
        results = (V.graph.name_to_buffer.get(name) for name in awaited)
        calls = [one.inputs[0] for one in results if isinstance(one, ir.MultiOutput)]
        awaited.update([call.get_name() for call in calls if isinstance(call, ir.IRNode)])


_lowering_wrapped = threading.RLock()
"""Held while Inductor's classes have methods of ours: a backward may be compiled in another thread."""


@contextlib.contextmanager
def _constants_realized() -> Iterator[None]:
    """Let Inductor's subgraphs, numbers and None be realized, also in a box, and have a name, another one each time."""
    from torch._inductor import ir

    kinds, count = (ir.Subgraph, ir.ShapeAsConstantBuffer, ir.NoneAsConstantBuffer), itertools.count()
    methods = {"realize": lambda one: None, "get_name": lambda one: f"asynctp constant {next(count)}"}
    with _lowering_wrapped, contextlib.ExitStack() as stack:
        realize_box = ir.StorageBox.realize

        def realize(box: Any) -> Any:
            return None if isinstance(box.data, kinds) else realize_box(box)

        for kind, name in itertools.product(kinds, methods):
            if name not in vars(kind):
                setattr(kind, name, methods[name])
                stack.callback(delattr, kind, name)
        stack.callback(setattr, ir.StorageBox, "realize", realize_box)
        setattr(ir.StorageBox, "realize", realize)  # noqa: B010  (mypy lets no method be assigned)
        yield


_IN_ORDER = "asynctp_in_order"


def mark_in_order(graph: fx.Graph) -> None:
    """Mark a graph, and those that it runs, in which the ops of `lower_in_order` keep their order; in others not."""
    mark(graph, _IN_ORDER)


def mark(graph: fx.Graph, name: str) -> None:
    """Mark a graph, and those that it runs, by a name (`is_marked`)."""
    if graph.owning_module is not None:
        graph.owning_module.meta[name] = True


def is_marked(name: str) -> bool:
    """True while Inductor lowers, or generates code for, a graph that is marked, or one that such a graph runs."""
    from torch._inductor.virtualized import V

    lowering: Any = V.graph
    while lowering is not None:
        if getattr(lowering.module, "meta", {}).get(name):
            return True
        lowering = getattr(lowering, "parent", None)
    return False


def lower_in_order(ops: Iterable[torch._ops.OpOverload]) -> bool:
    """Have Inductor keep calls of these ops in a marked graph's order, with one another and torch's collectives.

    Its scheduler does so with what it takes for collectives.

    Returns:
        False where that cannot be had of all: without such a kernel, where torch lowers one in a way of its own, or
        where the user has all ops called as they are, torch's collectives too.
    """
    if inductor_options.current("fallback_by_default"):
        return False
    called, kernel = list(ops), _ordered_kernel()
    if not called:
        return True
    if kernel is None:
        return False
    lowered = [_lower_as(kernel, op) for op in called]
    return all(lowered)


@functools.cache
def _ordered_kernel() -> Any:
    """A subclass of Inductor's kernel of a collective; None where torch is built without any."""
    if not torch.distributed.is_available():
        return None
    from torch._inductor import ir

    return type("AsyncTPCollectiveKernel", (ir._CollectiveKernel,), {})


_lowered: set[torch._ops.OpOverload] = set()


def _lower_as(kernel: Any, op: torch._ops.OpOverload) -> bool:
    """Lower an op to a kernel of this class, as `make_fallback` lowers it to a plain one.

    Returns:
        False for an op that torch lowers in a way of its own.
    """
    from torch._inductor import ir, lowering
    from torch._library.utils import get_layout_constraint_tag
    from torch.utils import _pytree as pytree

    present = lowering.lowerings.get(op)
    if op in _lowered or (present is not None and not getattr(present, "_is_fallback_handler", False)):
        return op in _lowered
    returns = [str(one.type) for one in op._schema.returns]
    plain = not op._schema.is_mutable and returns in (["Tensor"], ["List[Tensor]"])
    create = kernel.create_out_of_place if plain else kernel.create

    def tensor(result: Any) -> Any:
        return ir.TensorBox.create(result) if isinstance(result, ir.IRNode) else result

    def lowered(*args: Any, **kwargs: Any) -> Any:
        made = create if is_marked(_IN_ORDER) else ir.FallbackKernel.create
        return pytree.tree_map(tensor, made(op, *args, **kwargs))

    _register(op, lowered, lowering.tag_to_layout_constraint(get_layout_constraint_tag(op)))
    return True


def _register(op: torch._ops.OpOverload, lowered: Any, constraint: Any = None) -> None:
    """Have Inductor lower an op by a function, where torch has no way of its own. constraint: Of operands' layouts."""
    from torch._inductor import lowering

    make_fallback: Any = lowering.make_fallback
    make_fallback(op, layout_constraint=constraint, warn=False, override_decomp=True)
    lowered._is_fallback_handler = True
    lowering.register_lowering(op, type_promotion_kind=None)(lowered)
    _lowered.add(op)


def lower_wait(op: torch._ops.OpOverload) -> None:
    """Have Inductor's calls of `op(result, source)` read what the call that gave `result` reads, in place of `source`.

    That may be a copy of `source` in a layout that a call can read, which Inductor makes anew for each call. A wait for
    what no call gave, as another pass may make one, reads `source`.
    """
    from torch._inductor import ir

    def lowered(result: Any, source: Any) -> Any:
        call = result
        while isinstance(call, ir.TensorBox | ir.StorageBox):
            call = call.data
        while isinstance(call, ir.MultiOutput):
            call = call.inputs[0]
        read: Any = source
        if isinstance(call, ir.ExternKernel) and call.inputs:
            read = call.inputs[0]
            read = ir.TensorBox(read) if isinstance(read, ir.BaseView) else ir.TensorBox.create(read)
        return ir.TensorBox.create(ir.FallbackKernel.create(op, result, read))

    if op not in _lowered:
        _register(op, lowered)


def stored_op() -> Any:
    """`op(tensor, strides)`: Inductor stores the tensor; elsewhere it gives the tensor, if it has these strides."""
    from torch._inductor.inductor_prims import force_stride_order

    return force_stride_order
