"""The only file that touches private torch APIs. It probes for features and does not compare versions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import operator
import os
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeGuard, get_origin

import sympy
import torch
from torch import Tensor, fx


# --- used by reference and ops ------------------------------------------------------------------------
def _c10d() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d


def process_group(group: Any) -> Any:
    """The ProcessGroup registered under a name; what is one already, as it is.

    Raises:
        RuntimeError: No group has this name (torch's own message).
    """
    return _group_resolver()(group) if isinstance(group, str) else group


@functools.cache
def _group_resolver() -> Callable[[str], Any]:
    """Looked up once: an import statement takes most of a microsecond, in every call of an op."""
    resolver: Callable[[str], Any] = _c10d()._resolve_process_group
    return resolver


def process_group_size(group: Any) -> int:
    """Ranks in a group given by name or as ProcessGroup; torch.compile can trace this call."""
    size: int = _c10d()._get_group_size_by_name(group)
    return size


def scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    """`torch._scaled_mm` of 2-D operands: `b` column-major, fast accumulation if `fast`."""
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, bias=bias, out_dtype=out_dtype, use_fast_accum=fast)


_SCALING_TYPES = {"1x128": 4, "128x128": 5}
"""`torch.nn.functional.ScalingType`, by its values."""


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of int8 in int32.

    CUDA's takes more than 16 rows, and sizes that are multiples of 8: operands of others are padded. The CPU's reads
    operands that overlap themselves, as expanded ones do, beyond their memory: they are copied.
    """
    if not a.is_cuda:
        return torch._int_mm(a.contiguous(), b.contiguous())
    rows, depth, columns = a.shape[0], a.shape[1], b.shape[1]
    more = (max(17, rows) - rows, -depth % 8, -columns % 8)
    if any(more):
        a = torch.nn.functional.pad(a, (0, more[1], 0, more[0]))
        b = torch.nn.functional.pad(b.t(), (0, more[1], 0, more[2])).t()
    return torch._int_mm(a, b)[:rows, :columns].contiguous()


def scaled_mm_in_blocks(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    recipe: tuple[str, str],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """`torch.nn.functional.scaled_mm` with scales of 1x128 or 128x128 blocks of A and of B, as it wants them."""
    of_a, of_b = (_SCALING_TYPES[name] for name in recipe)
    scales: tuple[Any, ...] = ([a_scale], [of_a], [], [b_scale], [of_b], [])
    result: Tensor = torch.ops.aten._scaled_mm_v2.default(a, b, *scales, bias, out_dtype, [], fast)
    return result


def autograd_kernel(op: torch._ops.OpOverload, backward: Callable[..., Any], setup_context: Any) -> Callable[..., Any]:
    """The kernel that `torch.library.register_autograd` registers: it takes the dispatch keys and the arguments."""
    from torch._library import autograd

    return autograd.make_autograd_impl(op, autograd.Info(backward, setup_context))


def register_intree_ops() -> None:
    """Make `torch.ops.symm_mem` complete: torch's own fused ops are registered when this module is imported."""
    import torch.distributed._symmetric_memory  # noqa: F401


def goes_to_backend(keyset: Any) -> bool:
    """Whether an autograd kernel's dispatch keys hand its call on to an implementation on CPU or CUDA.

    Not so with tensors of a class that dispatches itself, or while something watches every op: fake tensors, tracing,
    functorch, and the like.
    """
    return _goes_to_backend(keyset.raw_repr())


@functools.cache
def _goes_to_backend(keys: int) -> bool:
    below = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_autograd_keyset
    return below.highestPriorityTypeId() in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def any_requires_grad(*args: Any) -> bool:
    """Whether torch.library's autograd kernel would record a call: some tensor, alone or in a list, requires grad."""
    return torch._C._any_requires_grad(*args)


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Ops called inside pass autograd's kernels by, as those do that an op's implementation calls."""
    guard: contextlib.AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return guard


# --- ops ----------------------------------------------------------------------------------------------


def is_op(target: object) -> TypeGuard[torch._ops.OpOverload]:
    """True for an overload of an op, such as `torch.ops.aten.mm.default`."""
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order(target: object) -> bool:
    """True for an op that runs others, such as `torch.cond`."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def overload_of(target: object) -> torch._ops.OpOverload | None:
    """The overload that a target calls: an op without one named, as Inductor writes it, has one alone; or None."""
    if isinstance(target, torch._ops.OpOverloadPacket) and target.overloads() == ["default"]:  # type: ignore[no-untyped-call]
        target = target.default
    return target if is_op(target) else None


# --- graphs -------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of an op, with nodes for tensors."""

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_made_by(function: Callable[..., Any], args: Any, kwargs: Any, like: Tensor) -> Call | None:
    """The one op that a function of nodes calls, if its result is like a tensor; None for several or another result."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[tuple[Any, Any, Any]] = []
    nodes: dict[int, fx.Node] = {}

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    def value_of(node: fx.Node) -> Any:
        nodes[id(node.meta["val"])] = node
        return node.meta["val"]

    values, named = fx.map_arg((args, kwargs), value_of)
    try:
        with without_guards(like), Recorder():  # type: ignore[no-untyped-call]
            found = function(*values, **named)
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    if len(calls) != 1 or not isinstance(found, Tensor) or _layout_of(found) != _layout_of(like):
        return None
    op, values, named = torch.utils._pytree.tree_map(lambda value: nodes.get(id(value), value), calls[0])
    return Call(op, tuple(values), named)


def _layout_of(tensor: Tensor) -> tuple[str, ...]:
    return str(tensor.dtype), str(tensor.device), str(list(tensor.shape)), str(list(tensor.stride()))


class GraphRecord:
    """All of a graph that passes edit, recorded so that it can be put back: the same nodes, with the same values.

    Public functions make new nodes in place of erased ones. Inductor and others that hold the old ones would not know
    them, so erased nodes are taken into the graph again.

    Args:
        graph: The graph. Its nodes' values themselves are not copied.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes = [_NodeRecord(node) for node in graph.nodes]
        self._submodules = set(_submodules(graph))

    def restore(self) -> None:
        """Make the graph what it was: its nodes and their order, arguments, users, names and metadata."""
        recorded = {one.node for one in self._nodes}
        added = [node for node in self._graph.nodes if node not in recorded]
        for one in self._nodes:
            _revive(one.node)
        for before, after in itertools.pairwise(self._nodes):
            before.node.append(after.node)
        for one in self._nodes:
            one.restore()
        for node in added:
            node.args, node.kwargs = (), {}
        for node in added:
            self._graph.erase_node(node)
        for one in self._nodes:
            one.restore_users()
        for name in set(_submodules(self._graph)) - self._submodules:
            delattr(self._graph.owning_module, name)


class _NodeRecord:
    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.target, self.args, self.kwargs = node.target, node.args, node.kwargs
        self.name, self.meta, self.users = node.name, dict(node.meta), dict(node.users)

    def restore(self) -> None:
        node = self.node
        for name in ("target", "args", "kwargs", "name"):
            if getattr(node, name) is not getattr(self, name):
                setattr(node, name, getattr(self, name))
        node.meta.clear()
        node.meta.update(self.meta)

    def restore_users(self) -> None:
        self.node.users.clear()
        self.node.users.update(self.users)


def _revive(node: fx.Node) -> None:
    """Take a node that was erased into its graph again, at any place."""
    if node._erased:
        node._erased = False
        node._prev = node._next = node  # it still points to its former neighbours
        node.graph._find_nodes_lookup_table.insert(node)
        node.graph._len += 1


def _submodules(graph: fx.Graph) -> list[str]:
    module = graph.owning_module
    return [] if module is None else [name for name, _ in module.named_children()]


# --- symbolic sizes -----------------------------------------------------------------------------------


def expression(size: torch.SymInt) -> sympy.Expr:
    """The sympy expression of a SymInt, with what its shape environment has replaced since."""
    node = size.node
    shape_env = getattr(node, "shape_env", None)
    return node.expr if shape_env is None else shape_env.replace(node.expr)


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a fake tensor is row-major; False where only some values of an unbacked size make it so."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        return tensor.is_contiguous()
    except GuardOnDataDependentSymNode:
        return False


def axes_by_stride(tensor: torch.Tensor) -> list[int] | None:
    """The dimensions of a fake tensor from the largest stride to the smallest; None where that is not known yet."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    strides = tensor.stride()

    def known(first: int, second: int) -> bool:
        return bool(statically_known_true(strides[first] >= strides[second]))

    def compared(first: int, second: int) -> int:
        return known(second, first) - known(first, second)

    axes = range(tensor.dim())
    if not all(known(first, second) or known(second, first) for first, second in itertools.combinations(axes, 2)):
        return None
    return sorted(axes, key=functools.cmp_to_key(compared))


def statically_known_multiple(size: int | torch.SymInt, count: int) -> bool:
    """True when guards that exist already establish `size % count == 0`; adds none."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(size % count == 0))


def guards_of(size: torch.SymInt) -> list[sympy.Basic]:
    """The conditions that existing guards state, of all sizes of this one's graph; adds none."""
    shape_env = getattr(size.node, "shape_env", None)
    return [] if shape_env is None else [shape_env.replace(guard.expr) for guard in shape_env.guards]


def is_floor_division(expr: sympy.Expr) -> bool:
    """True for torch's own `a // b` in sympy."""
    return type(expr).__name__ in ("FloorDiv", "CleanDiv")


def floor_division(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    """Torch's own `a // b` in sympy; it may come out simpler."""
    from torch.utils._sympy.functions import FloorDiv

    division: sympy.Expr = FloorDiv(base, divisor)
    return division


def is_remainder(expr: sympy.Expr) -> bool:
    """True for torch's own `a % b` in sympy."""
    return type(expr).__name__ in ("Mod", "PythonMod")


def fake_mode_of(tensor: object) -> Any:
    """The fake mode that a tensor belongs to; None for other tensors."""
    return getattr(tensor, "fake_mode", None)


@contextlib.contextmanager
def without_guards(fake: torch.Tensor) -> Iterator[None]:
    """Compute with fake tensors of the mode `fake` belongs to, recording no guard.

    Ops that are decomposed take symbolic sizes only by their decompositions in Python.
    """
    from torch._dispatch.python import enable_python_dispatcher

    mode = fake_mode_of(fake)
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(enable_python_dispatcher())
        yield


# --- Inductor -----------------------------------------------------------------------------------------


def custom_graph_pass_base() -> type:
    """Inductor's base class of custom graph passes."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def custom_partitioner_base() -> type:
    """Inductor's base class of custom partitioners."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    return CustomPartitionerFn


def default_partition(
    gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Divide a joint graph into forward and backward, as Inductor does without a custom partitioner."""
    from torch._inductor import compile_fx

    partition: Any = getattr(compile_fx, "min_cut_rematerialization_partition")  # noqa: B009  (mypy: not exported)
    halves: tuple[fx.GraphModule, fx.GraphModule] = partition(gm, joint_inputs, **options)
    return halves


def inference_aware_pass_base() -> type:
    """Inductor's base class of passes that are also told whether the graph is for inference; the plain one without."""
    from torch._inductor import custom_graph_pass

    base: type = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)
    return base


def call_graph_pass(graph_pass: Callable[..., None], graph: fx.Graph, is_inference: bool) -> None:
    """Run a custom graph pass of any kind, as Inductor does."""
    from torch._inductor import custom_graph_pass

    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if aware is not None and isinstance(graph_pass, aware):
        graph_pass(graph, is_inference)
    else:
        graph_pass(graph)


def nodes_hidden_by(node: fx.Node) -> Sequence[fx.Node]:
    """The nodes in whose place Inductor put a function that lowers them all (`woq_int8`); erased, they know their ops.

    None for a node that calls an op, or another function.
    """
    match = node.target.args[0] if isinstance(node.target, functools.partial) and node.target.args else None
    nodes: Sequence[fx.Node] = getattr(match, "nodes", ())
    return nodes


def packed_constants(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node that are constants in mkldnn's own layout: weights that Inductor froze and packed."""
    module = node.graph.owning_module
    constants = (one for one in node.all_input_nodes if one.op == "get_attr" and module is not None)
    return [one for one in constants if getattr(getattr(module, str(one.target), None), "is_mkldnn", False)]


def has_folded_output_scale(node: fx.Node) -> bool:
    """True for a scaled matmul into which torch 2.15 has folded a multiplication of its output."""
    return bool(node.meta.get("inductor_folded_scaled_mm_output_scale"))


def inductor_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: dict[str, Any],
    stands: Callable[[bool, bool], bool],
    further: dict[str, Any],
) -> Callable[..., Any]:
    """Compile a graph with Inductor under configuration patches (the backward graph too, which may come later).

    Args:
        gm: What dynamo captured.
        example_inputs: Its inputs.
        patches: Inductor options.
        stands: Called after each graph that Inductor compiled or found in its cache, with False, and at the end, when
            a whole program may have come from AOTAutograd's cache, with True. What does not stand is compiled again,
            without caches. Its second argument tells that this is the second time: then it raises.
        further: Other arguments of `compile_fx`, as the caller gave them.
    """
    from torch._guards import TracingContext
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_one(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_fx_inner(*args, **kwargs)
        if stands(False, False):
            return compiled
        context = TracingContext.try_get()
        if context is not None and context.output_strides is not None:
            context.output_strides.clear()  # of the graph that does not stand; Inductor asserts that there are none
        with config.patch(_NO_CACHES), _caches_off():
            compiled = compile_fx_inner(*args, **kwargs)
        stands(False, True)
        return compiled

    inputs = list(example_inputs)
    with _not_routed():
        compiled = compile_fx(gm, inputs, compile_one, patches, **further)
        if not stands(True, False):
            with _caches_off():
                compiled = compile_fx(gm, inputs, compile_one, {**patches, **_NO_CACHES}, **further)
            stands(True, True)
    return compiled  # type: ignore[return-value]


_routed: ContextVar[bool] = ContextVar("asynctp_routed", default=True)


@contextlib.contextmanager
def _not_routed() -> Iterator[None]:
    token = _routed.set(False)
    try:
        yield
    finally:
        _routed.reset(token)


def route_inductor(
    compile_graph: Callable[[fx.GraphModule, Sequence[Any], dict[str, Any], dict[str, Any]], Any],
    add_passes: Callable[[dict[str, Any]], dict[str, Any]],
    leave_alone: Callable[[dict[str, Any]], bool],
    has_passes: Callable[[], bool],
) -> Callable[[], None]:
    """Route all that this process compiles with Inductor, in any thread, through asynctp.

    Inductor's options are no way: since torch 2.12 each thread has its own, and a GPU's backward is compiled in
    autograd's. A backend that imported `compile_fx` or `compile_fx_inner` before calls the originals. They call
    functions of their module in turn, which get the passes as options where none are there yet.

    Args:
        compile_graph: Compiles a graph, given its inputs, Inductor options, and other arguments of `compile_fx`.
        add_passes: Adds passes to Inductor options, for callers with a compiler of their own inside, as AOTInductor.
        leave_alone: True for Inductor options under which asynctp can do nothing.
        has_passes: True where the thread's Inductor options have passes of asynctp's.

    Returns:
        A function that ends it.
    """
    from torch._inductor import compile_fx as module
    from torch._inductor import config

    original, inner = module.compile_fx, module.compile_fx_inner
    whole: Any = getattr(module, "_compile_fx_main", None)
    one: Any = getattr(module, "_compile_fx_inner", None)
    signature, active = inspect.signature(original), True

    @functools.wraps(original)
    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        further = signature.bind(*args, **kwargs).arguments
        patches = dict(further.get("config_patches") or {})
        if not active or not _routed.get():
            return original(*args, **kwargs)
        if leave_alone(patches):
            with _not_routed():
                return original(*args, **kwargs)
        if further.get("inner_compile", inner) is not inner:
            with _not_routed():
                return original(**{**further, "config_patches": add_passes(patches)})
        for name in ("inner_compile", "config_patches"):
            further.pop(name, None)
        return compile_graph(further.pop("model_"), further.pop("example_inputs_"), patches, further)

    def is_covered() -> bool:
        return not active or not _routed.get() or has_passes() or leave_alone({})

    def compile_whole(*args: Any, **kwargs: Any) -> Any:
        if is_covered():
            return whole(*args, **kwargs)
        given, patches = inspect.signature(whole).bind(*args, **kwargs), add_passes({})
        given.arguments["inner_compile"] = config.patch(patches)(given.arguments["inner_compile"])  # for the backward
        with config.patch(patches):
            return whole(*given.args, **given.kwargs)

    def compile_one(*args: Any, **kwargs: Any) -> Any:
        if is_covered():
            return one(*args, **kwargs)
        with config.patch(add_passes({})):
            return one(*args, **kwargs)

    routes: dict[str, Any] = {"compile_fx": compile_fx}
    if whole is not None and one is not None:  # both, or another version's backends are not reached
        routes |= {
            "_compile_fx_main": functools.wraps(whole)(compile_whole),
            "_compile_fx_inner": functools.wraps(one)(compile_one),
        }
    originals = {name: getattr(module, name) for name in routes}

    def end() -> None:
        nonlocal active
        active = False
        for name, route in routes.items():
            if getattr(module, name) is route:
                setattr(module, name, originals[name])

    for name, route in routes.items():
        setattr(module, name, route)
    return end


_NO_CACHES = {"force_disable_caches": True, "fx_graph_cache": False, "fx_graph_remote_cache": False}

_cached: ContextVar[bool] = ContextVar("asynctp_cached", default=True)


def uses_caches() -> bool:
    """False while a graph is compiled without caches: a pass without an identifier keeps Inductor from using any.

    `_NO_CACHES` alone does not: environment variables outrank patches (`TORCHINDUCTOR_FORCE_DISABLE_CACHES=0`).
    """
    return _cached.get()


@contextlib.contextmanager
def _caches_off() -> Iterator[None]:
    token = _cached.set(False)
    try:
        yield
    finally:
        _cached.reset(token)


_UNCHECKED = "saved_tensor_with_no_vc_check"


def is_saved_unchecked(node: fx.Node) -> bool:
    """True for a tensor that is saved for the backward without a check of its version: such ones come last."""
    return bool(node.meta.get(_UNCHECKED))


def replace_outputs(graph: fx.Graph, outputs: Sequence[Any], first: int) -> None:
    """Give a forward graph other outputs, and what torch notes of each.

    Args:
        graph: The graph.
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


def mark_of_backward(node: fx.Node) -> None:
    """Mark a node that was put into a backward graph as the partitioner marks those of its own."""
    node.meta["autograd_backward"] = True


def expected_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a fake tensor, where a size is symbolic those of the values that it was traced with; 0 unknown."""
    sizes: list[Any] = list(tensor.shape)
    known = [size if isinstance(size, int) else size.node.hint if size.node.has_hint() else 0 for size in sizes]
    return math.prod(map(int, known)) * tensor.dtype.itemsize


def free_symbols(tensor: object) -> set[Any]:
    """The symbols in the sizes, strides and offset of a fake tensor, or in a symbolic number."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return set(free_symbols(tensor))


def is_of_backward(node: fx.Node) -> bool:
    """True for a node that was traced for a backward, wherever the partitioner has put it."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


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
    described = ((node, node.meta.get("desc")) for node in graph.nodes if node.op == "placeholder")
    return {node: number for node, one in described if (number := _number(one, "PlainAOTInput")) is not None}


def program_outputs(graph: fx.Graph) -> dict[int, fx.Node]:
    """The tensors among a graph's results, or their parts, that the compiled function returns, by number there."""
    output = graph.output_node()
    results, descriptions = output.args[0], output.meta.get("desc") or ()
    results = list(results) if isinstance(results, list | tuple) else [results]
    if len(results) != len(descriptions):
        return {}
    found: dict[int, fx.Node] = {}
    for node, description in zip(results, descriptions, strict=True):
        number = _number(description, "PlainAOTOutput")
        if number is not None and isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
            found[number] = node
    return found


def _number(description: Any, kind: str) -> int | None:
    whole = _whole(description)
    return whole.idx if type(whole).__name__ == kind else None


def given_tensors(gm: fx.GraphModule) -> dict[int, torch.Tensor]:
    """The tensors with which Dynamo calls a function that it compiles just now, by number, as far as it has them."""
    found: dict[int, torch.Tensor] = {}
    for number, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        example = getattr(node.meta.get("grapharg"), "example", None)
        if isinstance(example, torch.Tensor):
            found[number] = example
    return found


def input_sources(gm: fx.GraphModule) -> dict[int, str]:
    """The expressions by which Dynamo finds the inputs of a function that it compiles, by number, as far as it has one.

    `"L['self']._modules['up']._parameters['weight']"` of a module's weight, `"L['x']"` of an argument.
    """
    found: dict[int, str] = {}
    for number, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        name = getattr(getattr(node, "_dynamo_source", None), "name", None)
        if name := name() if callable(name) else name:  # a method in torch 2.11
            found[number] = str(name)
    return found


def graph_break_of(gm: fx.GraphModule) -> str:
    """The place and the reason for which Dynamo ended a graph; empty for one that ends where its function returns."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    first = str(reason.reason).strip().partition("\n")[0]
    frames = list(reason.user_stack or ())
    return f"{frames[-1].filename}:{frames[-1].lineno}: {first}" if frames else first


def is_cut_for_ddp() -> bool:
    """True while pieces are compiled into which Dynamo has cut a graph for DistributedDataParallel."""
    from torch._guards import TracingContext

    return getattr(TracingContext.try_get(), "ddp_optimizer_ctx", None) is not None


def is_distributed_tensor(tensor: torch.Tensor) -> bool:
    """True for a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The one tensor in a tensor subclass, a DTensor's local one; else the tensor itself."""
    flatten: Callable[[], tuple[list[str], Any]] | None = getattr(tensor, "__tensor_flatten__", None)
    names = [] if flatten is None else flatten()[0]
    return _local(getattr(tensor, names[0])) if len(names) == 1 else tensor


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None in inference mode, where nobody counts that."""
    local = _local(tensor)
    return None if local.is_inference() else local._version


def is_precompiled(compiled: object) -> bool:
    """True for a compiled function that torch can store in a file; it has to stay as it is."""
    from torch._dynamo import aot_compile_types

    return isinstance(compiled, getattr(aot_compile_types, "SerializableCallable", ()))


_RECOMPUTE = "recompute"


def recompute_tag(node: fx.Node) -> Any:
    """The tag that activation checkpointing gives a node of a joint graph for the partitioner; None without one."""
    return node.meta.get(_RECOMPUTE)


def may_alias(node: fx.Node) -> bool:
    """True for an op whose result may lie in the memory of what it takes, by its schema."""
    return is_op(node.target) and any(one.alias_info is not None for one in node.target._schema.returns)


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


def is_compiled(graph: fx.Graph) -> bool:
    """True for a graph that is being compiled; of others nothing is reordered."""
    return graph.owning_module is not None and _compile_id() is not None


def keep_order(graph: fx.Graph, after: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
    """Make Inductor run each node after the nodes listed for it; its scheduler reorders what does not depend.

    Outside a compile, where nothing reorders, the graph stays as it is. Of a node with several results a tensor is
    named, and moved next to it: Inductor passes over dependencies that are no tensors, or fails on a number. A number
    is made a tensor, to be named. A node's inputs are named too, since Inductor computes what is named at once; it
    would put what it computes only for the node after the others as well, and could make it together with nothing that
    comes before those.

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
            with next((mode for one in tensors if (mode := fake_mode_of(one))), contextlib.nullcontext()):
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


def keep_unused(op: torch._ops.OpOverload) -> None:
    """Have FX and Inductor keep calls of an op whose results nothing uses: other ranks wait for them."""
    from torch.fx.node import has_side_effect

    has_side_effect(op)


_IN_ORDER = "asynctp_in_order"


def mark_in_order(graph: fx.Graph) -> None:
    """Mark a graph, and those that it runs, in which the ops of `lower_in_order` keep their order; in others not."""
    if graph.owning_module is not None:
        graph.owning_module.meta[_IN_ORDER] = True


def _is_in_order() -> bool:
    """True while Inductor lowers a graph that is marked, or one that such a graph runs."""
    from torch._inductor.virtualized import V

    lowering: Any = V.graph
    while lowering is not None:
        if getattr(lowering.module, "meta", {}).get(_IN_ORDER):
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
    if inductor_option("fallback_by_default", False):
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
    """A subclass of Inductor's kernel of a collective; None where there is none."""
    if not torch.distributed.is_available():
        return None
    from torch._inductor import ir

    collective = getattr(ir, "_CollectiveKernel", None)
    return None if collective is None else type("AsyncTPCollectiveKernel", (collective,), {})


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
        made = create if _is_in_order() else ir.FallbackKernel.create
        return pytree.tree_map(tensor, made(op, *args, **kwargs))

    constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op))
    make_fallback: Any = lowering.make_fallback
    make_fallback(op, layout_constraint=constraint, warn=False, override_decomp=True)
    lowered._is_fallback_handler = True  # type: ignore[attr-defined]
    lowering.register_lowering(op, type_promotion_kind=None)(lowered)
    _lowered.add(op)
    return True


def stored_op() -> Any:
    """`op(tensor, strides)`: Inductor stores the tensor; elsewhere it gives the tensor, if it has these strides."""
    from torch._inductor.inductor_prims import force_stride_order

    return force_stride_order


def cached_counters() -> Counter[str]:
    """Inductor's counters. What a compile adds to them is stored in its cache entry, and added again on every hit."""
    from torch._dynamo.utils import counters

    return counters["inductor"]


def graph_breaks() -> list[str]:
    """Why dynamo broke graphs in this process, or gave a frame up, a text for each time."""
    if "torch._dynamo" not in sys.modules:
        return []
    from torch._dynamo.utils import counters

    return [text for kind in ("graph_break", "unimplemented") for text in Counter(counters[kind]).elements()]


def compiled_functions() -> int:
    """How many graphs the backends of torch.compile have compiled in this process; not the one under way."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def has_peers() -> bool:
    """Whether there is a process group of more than one rank."""
    return any(size_of_group(name) > 1 for name in process_group_names())


def had_process_group() -> bool:
    """There is a process group, or was one, for which torch puts its own hook for uncaught exceptions in place."""
    return bool(process_group_names()) or sys.excepthook.__module__ == "torch.distributed.distributed_c10d"


def inductor_mode_options(mode: str | None) -> dict[str, Any]:
    """The Inductor options that a torch.compile mode stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode)) if mode and mode != "default" else {}


def inductor_option_names() -> set[str]:
    """The names of all Inductor options."""
    from torch._inductor import config

    return set(config.get_config_copy())


def inductor_option_type(name: str) -> type | None:
    """The type that torch.compile asks a value of this Inductor option to have; None where it asks for none."""
    from torch._inductor import config

    wanted = config.get_type(name)  # type: ignore[attr-defined]
    return wanted if get_origin(wanted) is None and isinstance(wanted, type) else None


def inductor_option(name: str, default: Any = None) -> Any:
    """The current value of an Inductor option; `default` when this torch does not have it."""
    from torch._inductor import config

    return getattr(config, name, default)


def intree_options(group: str) -> dict[str, Any]:
    """The Inductor options that switch on torch's own async TP, with the group made ready for it."""
    from torch.distributed import _symmetric_memory

    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)  # newer ones need no call
    if enable is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(group)
    return {"_micro_pipeline_tp": True}


def intree_shared_bytes(group: str) -> int:
    """Bytes of symmetric memory that torch's own async TP has made for the group."""
    from torch.distributed import _symmetric_memory

    workspace = getattr(_symmetric_memory, "_group_name_to_workspace_tensor", {}).get(group)
    return 0 if workspace is None else workspace.numel() * workspace.element_size()


def forget_intree_workspace(group: str) -> None:
    """Drop that memory, as torch itself does when a call needs more: the next call makes it anew (collective)."""
    from torch.distributed import _symmetric_memory

    getattr(_symmetric_memory, "_group_name_to_workspace_tensor", {}).pop(group, None)


def reset_cudagraphs() -> None:
    """Forget the CUDA graphs that Inductor recorded."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


def cudagraph_skips() -> int:
    """How many graphs Inductor was asked to record as CUDA graphs, and did not."""
    return int(cached_counters()["cudagraph_skips"])


def recomputed(module: Any, context_fn: Callable[[], Any] | None = None) -> Any:
    """The module, recomputed in the backward; of what `context_fn` lets it keep, nothing. Names of parameters stay."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module) if context_fn is None else checkpoint_wrapper(module, context_fn=context_fn)


def _compile_id() -> Any:
    """Dynamo's name of the compile under way; None outside one."""
    from torch._guards import CompileContext

    return CompileContext.current_compile_id()


_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count()


def compile_under_way() -> tuple[int, int] | None:
    """The number of Dynamo's compile under way, and of its attempt at that; None outside one.

    All graphs into which torch cuts one function have the same numbers, and a backward that is compiled later has its
    forward's. Dynamo's own name of a compile comes again after `torch._dynamo.reset()`, and this number does not.
    """
    from torch._guards import CompileContext

    context = CompileContext.try_get()
    if context is None or context.compile_id is None:
        return None
    if context not in _numbers:
        _numbers[context] = next(_next_number)
    return _numbers[context], context.attempt


def whole_graph() -> tuple[fx.GraphModule, bool] | None:
    """The graph that Inductor compiles just now, with its subgraphs; None outside of its post-grad passes.

    The second value is False while the passes run on a subgraph, as on a branch of `torch.cond`. They run on all
    subgraphs first.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _runs_passes(frame):
        frame = frame.f_back
    inner = frame
    while frame is not None and frame.f_back is not None and _runs_passes(frame.f_back):
        frame = frame.f_back
    return None if frame is None else (frame.f_locals["gm"], frame is inner)


def _runs_passes(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_recursive_post_grad_passes" and "gm" in frame.f_locals


def compile_name() -> str:
    """The name of the compile under way (`"graph 0/0"`), or `"graph"` outside one."""
    compile_id = _compile_id()
    return f"graph {compile_id}" if compile_id is not None else "graph"


@dataclass(frozen=True)
class CompiledFunction:
    """The function that Dynamo compiles, in words that all ranks of one program share.

    Attributes:
        name: `"lib/model.py:forward:12"`, its file with its folder, its name and its first line.
        resumes: Of the rest of a function after a graph break, the name of that function; else empty.
        breaks: Its graph ends at a graph break.
    """

    name: str
    resumes: str = ""
    breaks: bool = False

    @property
    def base(self) -> str:
        """The name of the function in the program."""
        return self.resumes or self.name


_functions: dict[int, CompiledFunction] = {}  # by Dynamo's number of a frame: a backward may be compiled later


def compiled_function() -> CompiledFunction | None:
    """The function that is compiled, its backward included; None outside of Dynamo's compiles."""
    frame_id = getattr(_compile_id(), "frame_id", None)
    if frame_id is None:
        return None
    found = _function_on_stack()
    if found is not None:
        _functions[frame_id] = found
    return _functions.get(frame_id) or CompiledFunction(f"function {frame_id}")


def _function_on_stack() -> CompiledFunction | None:
    """The function whose graph Dynamo gives to its backend just now."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_subgraph" and "reason" in frame.f_locals:
            output, reason = frame.f_locals.get("self"), frame.f_locals["reason"]
            code = _wrapped_code(output) or getattr(getattr(output, "root_tx", None), "f_code", None)
            if code is not None:
                original = _original(code)
                resumes = "" if original is code else _name_of(original)
                return CompiledFunction(_name_of(code), resumes, bool(getattr(reason, "graph_break", False)))
        frame = frame.f_back
    return None


def _wrapped_code(output: Any) -> CodeType | None:
    """The code in Dynamo's own wrapper, in which partials, decorated functions and torch's modules are compiled."""
    if getattr(getattr(output, "root_tx", None), "f_code", None) is not _wrapper_code():
        return None
    found, code = getattr(output, "local_scope", {}).get("fn"), None
    while found is not None:
        code = getattr(found, "__code__", None)
        inner = type(found).forward if isinstance(found, torch.nn.Module) else getattr(found, "func", None)
        found = getattr(found, "__wrapped__", None) or inner
    return code


def _wrapper_code() -> CodeType | None:
    from torch._dynamo.external_utils import wrap_inline

    return getattr(wrap_inline(len), "__code__", None)


def _name_of(code: CodeType) -> str:
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_name}:{code.co_firstlineno}"


def _original(code: CodeType) -> CodeType:
    """The code in the program, where Dynamo made this for the rest of it after a graph break; else this."""
    from torch._dynamo.resume_execution import ContinueExecutionCache

    made: Any = getattr(ContinueExecutionCache, "generated_code_metadata", {})
    while code in made:
        code = made[code].code
    return code


# --- functions that Dynamo gives up -------------------------------------------------------------------
# torch.compile's callback (`CatchErrorsWrapper`) is asked for the code of each frame that has none that fits. Where it
# gives none, the frame runs as it is written: at the recompile limit, where the frame is skipped, where an error is
# suppressed. Under some stances it is not asked (`_callback_from_stance`).


@dataclass(frozen=True)
class GivenUp:
    """A function that runs as it is written, though asynctp has compiled graphs of it.

    Attributes:
        name: As `CompiledFunction.name`.
        groups: The process groups of its graphs, as they were noted.
        reason: Why, in Dynamo's words or ours.
        remedy: What ends that, on every rank.
    """

    name: str
    groups: frozenset[str]
    reason: str
    remedy: str


@dataclass(frozen=True)
class _Frame:
    """A function under compilation: Dynamo's callback for it, held weakly, and its code."""

    callback: weakref.ref[Any]
    code: CodeType


@dataclass
class _Noted:
    """A function with graphs of asynctp's, and the groups of these. at_limit: `_limits` when these ended it."""

    name: str
    groups: frozenset[str]
    at_limit: tuple[int, ...] = ()

    def given_up(self, reason: str, remedy: str) -> GivenUp:
        return GivenUp(self.name, self.groups, reason, remedy)


_frames: weakref.WeakKeyDictionary[Any, _Frame] = weakref.WeakKeyDictionary()  # by the context of a compile
_noted: weakref.WeakKeyDictionary[Any, dict[CodeType, _Noted]] = weakref.WeakKeyDictionary()  # by callback


def note_groups(
    groups: Iterable[str], given_up: Callable[[GivenUp], None], failed: Callable[[GivenUp], object]
) -> None:
    """Note groups of a graph that is compiled, for the function that it is of: its backward may be compiled later.

    Does nothing outside of torch.compile.

    Args:
        groups: Names of process groups; none for a graph that concerns nobody else.
        given_up: Called on each call of such a function that runs as it is written, before that. It may raise.
        failed: Called where such a call raises instead, as with `fullgraph=True` at the recompile limit.
    """
    from torch._guards import CompileContext

    context, found, function = CompileContext.try_get(), frozenset(groups), compiled_function()
    if context is None or function is None:
        return
    if (under_way := _frame_on_stack()) is not None:
        _frames[context] = under_way
    frame = _frames.get(context)
    callback = None if frame is None else frame.callback()
    if frame is None or callback is None or not found:
        return
    _ask_of_frames(given_up, failed)
    codes = _noted.setdefault(callback, {})
    for code in {frame.code, _original(frame.code)}:
        known = codes[code].groups if code in codes else frozenset()
        codes[code] = _Noted(function.base, known | found)


def _frame_on_stack() -> _Frame | None:
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "__call__" and isinstance(frame.f_locals.get("self"), CatchErrorsWrapper):
            return _Frame(weakref.ref(frame.f_locals["self"]), frame.f_locals["frame"].f_code)
        frame = frame.f_back
    return None


@functools.cache
def _ask_of_frames(given_up: Callable[[GivenUp], None], failed: Callable[[GivenUp], object]) -> None:
    """Have Dynamo's callbacks tell of the functions that they give up."""
    from torch._dynamo import convert_frame, eval_frame
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch._dynamo.types import ConvertFrameReturn

    actions, strategy_of = torch._C._dynamo.eval_frame._FrameAction, torch._C._dynamo.eval_frame._FrameExecStrategy
    original: Any = convert_frame.CatchErrorsWrapper.__call__
    from_stance: Any = eval_frame._callback_from_stance

    @functools.wraps(original)
    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        noted = _noted.get(self, {}).get(frame.f_code)
        if noted and noted.at_limit == _limits(frame.f_code):  # Dynamo would say so again, with a warning
            result = ConvertFrameReturn(frame_exec_strategy=strategy_of(actions.RUN_ONLY, actions.DEFAULT))
            settle(self, frame, noted, result)
            return result
        try:
            result = original(self, frame, *args, **kwargs)
        except FailOnRecompileLimitHit:
            if noted:
                failed(_at_limit(self, frame.f_code, noted))
            raise
        if result.guarded_code is None and self in _noted:
            settle(self, frame, noted, result)
        return result

    def settle(callback: Any, frame: Any, noted: _Noted | None, result: Any) -> None:
        strategy, code = result.frame_exec_strategy, frame.f_code
        if strategy.recursive_action == actions.RUN_ONLY:  # what it calls may have graphs, too, and is asked of
            result.frame_exec_strategy = strategy_of(strategy.cur_action, actions.DEFAULT)
        if noted is None:
            return
        result.apply_to_code = False  # ask again at the next call
        noted.at_limit = _limits(code) if strategy.cur_action == actions.RUN_ONLY else ()
        if convert_frame.has_tensor_in_frame(frame):
            given_up(_at_limit(callback, code, noted) if noted.at_limit else _skipped(noted, result))

    @functools.wraps(from_stance)
    def callback_from_stance(callback: Any) -> Any:
        chosen = from_stance(callback)
        if (chosen is None or chosen is False) and callable(callback) and _noted.get(callback):
            return _asking(callback, given_up, chosen is False)
        return chosen

    convert_frame.CatchErrorsWrapper.__call__ = call  # type: ignore[method-assign]
    eval_frame._callback_from_stance = callback_from_stance


def _asking(callback: Any, given_up: Callable[[GivenUp], None], compiled: bool) -> Callable[..., Any]:
    """A callback that gives no code, for a stance without one. compiled: code that there is runs, if it fits."""
    from torch._dynamo import convert_frame, eval_frame, trace_rules
    from torch._dynamo.types import ConvertFrameReturn

    stance = str(eval_frame._stance.stance)

    def ask(frame: Any, *_: Any, **__: Any) -> Any:
        if trace_rules.check(frame.f_code):
            return ConvertFrameReturn()
        actions = torch._C._dynamo.eval_frame._FrameAction
        strategy, noted = torch._C._dynamo.eval_frame._FrameExecStrategy, _noted.get(callback, {}).get(frame.f_code)
        if noted and convert_frame.has_tensor_in_frame(frame):
            reason = f"torch.compiler.set_stance({stance!r}) is in force"
            given_up(noted.given_up(reason, "set one stance on every rank"))
        return ConvertFrameReturn(frame_exec_strategy=strategy(actions.SKIP, actions.DEFAULT), apply_to_code=False)

    if compiled:
        ask._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]  # by which Dynamo knows its code
    return ask


def _limits(code: CodeType) -> tuple[int, ...]:
    """Dynamo's limits, and how many forms of a function it has compiled."""
    from torch._dynamo import config, eval_frame

    compiled = len(eval_frame._debug_get_cache_entry_list(code))
    return config.recompile_limit, config.accumulated_recompile_limit, compiled


def _at_limit(callback: Any, code: CodeType, noted: _Noted) -> GivenUp:
    value, most, compiled = _limits(code)
    name = "torch._dynamo.config.recompile_limit"
    if (own := getattr(callback._torchdynamo_orig_backend, "_recompile_limit", None)) is not None:
        name, value = "torch.compile's recompile_limit", own
    if not value <= compiled < most:
        name, value = "torch._dynamo.config.accumulated_recompile_limit", most
    remedy = (
        f"raise {name}, or give what differs between the calls as a tensor or mark it dynamic "
        "(TORCH_LOGS=recompiles names it)"
    )
    return noted.given_up(f"{name}={value} is reached, with {compiled} compiled forms", remedy)


def _skipped(noted: _Noted, result: Any) -> GivenUp:
    reason = getattr(result, "skip_reason", None)  # torch 2.11 gives none
    remedy = "let this function be compiled on every rank, or on none (TORCH_LOGS=+dynamo has more)"
    return noted.given_up(f"Dynamo skips it{f' ({reason})' if reason else ''}", remedy)


def suppresses_errors() -> bool:
    """True where a function whose compile fails runs without a compiler."""
    config = sys.modules.get("torch._dynamo.config")  # nothing is compiled before it is imported
    return config is not None and bool(config.suppress_errors)


def uses_gpus() -> bool:
    """True once this process has done something on a GPU; asking does nothing on one."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def group_timeout_s(group: Any) -> float:
    """Seconds after which the collectives of a process group run out; endless for None, or where it does not say."""
    for device in ("cuda", "cpu") if group is not None else ():
        try:
            return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return math.inf


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Emit a structured-trace artifact of JSON, which TORCH_TRACE records and tlparse shows."""
    _trace(name, "json", payload)


def trace_text(name: str, payload: Callable[[], str]) -> None:
    """Emit a structured-trace artifact that is text."""
    _trace(name, "string", payload)


def _trace(name: str, encoding: str, payload: Callable[[], str]) -> None:
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload, expect_trace_id=False
    )


# --- process groups -----------------------------------------------------------------------------------


def group_name_of(value: Any) -> str:
    """The name of a process group given as a name, a ProcessGroup, or a fake script object around one."""
    if isinstance(value, str):
        return value
    real = getattr(value, "real_obj", value)
    try:
        return str(real.group_name)
    except (AttributeError, RuntimeError):
        return ""


def size_of_group(value: Any) -> int:
    """Ranks of a process group given as a name, a ProcessGroup, or a fake script object around one; 0 if unknown."""
    real = getattr(value, "real_obj", value)
    try:
        return process_group_size(real) if isinstance(real, str) else int(real.size())
    except (AttributeError, RuntimeError, ValueError):
        return 0


def rank_in_group(value: Any) -> int | None:
    """This process's rank in a process group (as for `size_of_group`); None where it is not in one."""
    real = getattr(value, "real_obj", value)
    try:
        rank = int(process_group(real).rank())
    except (AttributeError, RuntimeError, ValueError):
        return None
    return rank if rank >= 0 else None


_MESH = "mesh_"
"""How a DeviceMesh describes the group of a dimension, before that dimension's name."""


def mesh_dimension_of(value: Any) -> str:
    """The name of the DeviceMesh dimension that a process group (as for `size_of_group`) was made for; "" if unknown.

    The default group, which a mesh of one dimension takes as it is, has none.
    """
    real = getattr(value, "real_obj", value)
    try:
        described = str(process_group(real).group_desc)
    except (AttributeError, RuntimeError, ValueError):
        return ""
    return described.removeprefix(_MESH) if described.startswith(_MESH) else ""


def mesh_dimensions() -> dict[str, str]:
    """This process's groups by name, each with its dimension of a DeviceMesh, as `mesh_dimension_of` tells it."""
    return {name: mesh_dimension_of(name) for name in sorted(process_group_names())}


def process_group_names() -> set[str]:
    """The names of this process's process groups; empty before the first is made."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    from torch.distributed.distributed_c10d import _world

    return {str(name) for name in _world.pg_names.values()}


@dataclass(frozen=True)
class Peers:
    """The ranks of a process group, this one's among them (both in the default group's numbers), and their store.

    `group` is the group itself, and `life` tells groups apart that were made with the same store one after the other:
    torchrun keeps one store for all of them. It is None where the store has failed.
    """

    rank: int
    ranks: tuple[int, ...]
    store: Any
    group: Any = None
    life: str | None = ""


def peers_of(name: str) -> Peers | None:
    """The peers in a process group, given by name.

    None if there is no such group here, if it has one rank, or if it only pretends to communicate (the fake backend).
    """
    if name not in process_group_names():
        return None
    group = process_group(name)
    rank, ranks = torch.distributed.get_rank(), tuple(torch.distributed.get_process_group_ranks(group))
    if len(ranks) == 1 or rank not in ranks or torch.distributed.get_backend(group) == "fake":
        return None
    try:
        life = group_generation(name)
    except (RuntimeError, OSError):  # the store is gone: whoever uses it next is told so
        life = None
    return Peers(rank, ranks, _c10d()._get_process_group_store(group), group, life)


# --- lives of process groups --------------------------------------------------------------------------
# A process group can be destroyed and made again, with the same name and the same store: torchrun keeps one store for
# all groups of a run, and for its restarts. Torch gives both groups the same prefix in it, and has no number that tells
# them apart (`_world.group_count` starts anew). So what a rank writes for its peers has to say of which group it is.


@dataclass
class _Life:
    """A group of this process, and which of those of its name it is."""

    store: Any
    number: int
    end: Any = None


_lives: weakref.WeakKeyDictionary[Any, _Life] = weakref.WeakKeyDictionary()
_newest: dict[str, weakref.ref[Any]] = {}


def group_generation(name: str) -> str:
    """Which one a process group is, of those of its name that are made with one store: a part of keys in that.

    The same on all ranks, also where some never asked about an earlier group. Nothing waits: who asked about a group
    writes into the store that it has ended, when it is destroyed, or when this is asked about the next one. A restart
    by torchrun, which may follow a crash, counts by itself. While all other ranks still hold their earlier group, as
    NCCL allows, a rank with a new one gets the number of the earlier one, and its own when it asks again.

    Args:
        name: The name of a group that there is here.
    """
    group = process_group(name)
    store = _c10d()._get_process_group_store(group)
    former = _newest.get(name, lambda: None)()
    if former is not None and former is not group and former in _lives:
        _lives[former].end()
    _newest[name] = weakref.ref(group)
    life = _lives.setdefault(group, _Life(store, 0))
    if life.end is None or store.check([_ended(life.number)]):
        life.number = next(number for number in itertools.count(life.number) if not store.check([_ended(number)]))
        if life.end is not None:
            life.end.detach()
        life.end = weakref.finalize(group, _end_life, store, life.number)
        life.end.atexit = False  # whoever serves the store may be gone by then
    return f"{_restarts()}.{life.number}"


def _end_life(store: Any, number: int) -> None:
    with contextlib.suppress(Exception):  # the store may have gone with the group
        store.set(_ended(number), "1")


def _ended(number: int) -> str:
    return f"asynctp/ended/{_restarts()}.{number}"


def _restarts() -> str:
    """How often torchrun has started this run's processes again; the same in all of them."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
