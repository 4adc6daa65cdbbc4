"""Facts about one node: its op and arguments by name, its tensor, its effects, and where it comes from."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.op_traits import OpTraits, traits_named
from asynctp_passes.torch_private import torch_ops, triton_kernels

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
#: What dynamo's paths to modules have besides names: the root, functions that close over a module, a dict.
_DETOURS = re.compile(
    r"^[LG]\['\w+'\]|(\.forward)?(\.__closure__\[\d+\]|\.cell_contents|\.__self__)+"
    r"|(?<=\.)_(modules|parameters|buffers)(?=\[)|\.__dict__\['_(modules|parameters|buffers)'\]"
)
_ITEM = re.compile(r"\.?\['([^']+)'\]")
_TORCH = str(Path(torch.__file__).parent)
_FUNCTIONALIZED = {"auto_functionalized", "auto_functionalized_v2"}
_IN_PLACE_FUNCTIONS = {"iadd", "iand", "imatmul", "imul", "ior", "ipow", "isub", "itruediv", "ixor", "setitem"}
_PROCESS_GROUPS = "c10d."  # what `torch.distributed` calls: such ops write, and their schemas do not say so
_SHORT_DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
}


def op_name(node: fx.Node) -> str:
    """`"aten.mm.default"` for a call of that overload, `"getitem"` for the builtin; empty for other nodes."""
    if node.op != "call_function":
        return ""
    if (op := torch_ops.overload_of(node.target)) is not None:
        return name_of(op)
    return str(getattr(node.target, "__name__", node.target))


@functools.cache
def name_of(op: Any) -> str:
    """The name of an overload, kept: it puts that together whenever it is asked, and passes ask many times a node."""
    return str(op)


def traits_of(node: fx.Node) -> OpTraits:
    """The facts about the op that a node calls (`op_traits`)."""
    return traits_named(op_name(node))


def called_op(node: fx.Node) -> Any:
    """The op that a node calls, also inside of `auto_functionalized`, which stands for an op that writes; or None."""
    return torch_ops.overload_of(node.args[0] if op_name(node) in _FUNCTIONALIZED and node.args else node.target)


def calls_op(node: fx.Node) -> bool:
    """True for a call of an op, be it inside of `auto_functionalized`, or of a Triton kernel of the program."""
    return called_op(node) is not None or triton_kernels.called_by(node) is not None


def called_name(node: fx.Node) -> str:
    """The name of the op that a node calls, be it inside of `auto_functionalized`; empty for other nodes.

    Of a Triton kernel that the program calls it is `"triton."` and the kernel's.
    """
    op = called_op(node)
    if op is not None:
        return name_of(op)
    kernel = triton_kernels.called_by(node)
    return op_name(node) if kernel is None else triton_kernels.name_of(kernel)


def short_name(node: fx.Node) -> str:
    """The name of the op that a node calls, without its namespace and overload."""
    name = called_name(node)
    return name.split(".")[1] if "." in name else name


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op call by their schema names, defaults included; of a Triton kernel those in the graph."""
    if op_name(node) in _FUNCTIONALIZED:
        return dict(node.kwargs)
    if triton_kernels.called_by(node) is not None:
        return triton_kernels.tensors_of(node)
    op = torch_ops.overload_of(node.target)
    assert op is not None
    values: dict[str, Any] = {}
    for index, argument in enumerate(op._schema.arguments):
        if index < len(node.args) and not argument.kwarg_only:
            values[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            values[argument.name] = node.kwargs[argument.name]
        else:
            values[argument.name] = argument.default_value
    return values


def order_of(node: fx.Node, rank: int) -> list[int]:
    """The order in which a permutation takes the dimensions of a tensor of this rank."""
    values, order = arguments(node), list(range(rank))
    if "dims" in values:
        return [axis % rank for axis in values["dims"]]
    if "dim0" not in values:  # the transposition of a matrix
        return order[::-1]
    first, second = values["dim0"] % rank, values["dim1"] % rank
    order[first], order[second] = second, first
    return order


def first_tensor(node: fx.Node) -> fx.Node | None:
    return next((argument for argument in node.all_input_nodes if tensor_of(argument) is not None), None)


def items_of(call: fx.Node, places: Container[Any]) -> dict[Any, fx.Node] | None:
    """The items of a list or dictionary that an op returns, by their places; None when it is used in other ways."""
    items: dict[Any, fx.Node] = {}
    for user in call.users:
        index = user.args[1] if op_name(user) == "getitem" else None
        if index not in places or index in items:
            return None
        items[index] = user
    return items


def is_size(node: fx.Node) -> bool:
    """True for reading a size of a tensor, which is no use of its values."""
    return traits_of(node).size


def is_number(node: fx.Node) -> bool:
    """True for a size, or another number that is computed from sizes."""
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def tensor_of(node: object) -> torch.Tensor | None:
    """The fake tensor a node stands for, or None when it carries none."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def carried(argument: Any) -> Any:
    """A node's value in its `meta`; anything else as it is."""
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def values_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that an op returns."""
    value = node.meta.get("val")
    found = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else [value]
    return [one for one in found if isinstance(one, torch.Tensor)]


def dtype_of(node: fx.Node | None) -> torch.dtype | None:
    """The dtype of a node's tensor, or None when it carries none."""
    value = tensor_of(node)
    return None if value is None else value.dtype


def value_of(node: object) -> torch.Tensor:
    """The fake tensor of a node that is known to carry one."""
    value = tensor_of(node)
    assert value is not None, f"{node} is known to carry a tensor"
    return value


def is_pointwise(node: fx.Node) -> bool:
    """True for an op that makes each element of its result from the elements at that place."""
    return torch_ops.is_op(node.target) and torch.Tag.pointwise in node.target.tags


def subgraphs_of(node: fx.Node) -> list[fx.Graph]:
    """The graphs that a higher-order op runs: of a region that is compiled once, of branches, of a loop's body."""
    if node.op != "call_function" or torch_ops.is_op(node.target):
        return []
    names = (source.target for source in node.all_input_nodes if source.op == "get_attr")
    modules = (getattr(node.graph.owning_module, str(name), None) for name in names)
    return [module.graph for module in modules if isinstance(module, fx.GraphModule)]


def ops_run_by(node: fx.Node) -> list[Any]:
    """The op that a node calls; of a higher-order op those among its arguments, as of `run_and_save_rng_state`."""
    return [node.target] if torch_ops.is_op(node.target) else list(filter(torch_ops.is_op, node.args))


def _does_inside(node: fx.Node, does: Callable[[fx.Node], bool]) -> bool:
    """True for a higher-order op that runs a node for which `does` holds."""
    inner = (step for graph in subgraphs_of(node) for step in graph.nodes)
    return any(does(step) for step in inner if step.op not in ("placeholder", "output"))


def is_random(node: fx.Node) -> bool:
    """True for an op that draws random numbers, or runs one that does: its place among such ops counts."""
    drawn = any(torch.Tag.nondeterministic_seeded in op.tags for op in ops_run_by(node))
    return drawn or _does_inside(node, is_random)


def mutates(node: fx.Node) -> bool:
    """True for an in-place operation, for an op that runs one, and for a call that could be one."""
    if node.op in ("call_module", "call_method"):
        return True
    target = node.target
    if torch_ops.is_op(target):
        return bool(target._schema.is_mutable) or name_of(target).startswith(_PROCESS_GROUPS)
    in_place = op_name(node).endswith("_mutation") or op_name(node) in _IN_PLACE_FUNCTIONS
    return in_place or _does_inside(node, mutates)


def orders_streams(node: fx.Node) -> bool:
    """True for an op that orders streams of the program, as a wait for an event, alone or in torch's `control_deps`.

    The order of the graph alone may say that a later node waits for it: there need be no data dependency.
    """
    if torch_ops.is_op(node.target):
        return name_of(node.target).startswith("streams.")
    return _does_inside(node, orders_streams)


def hands_on_in_order(node: fx.Node) -> bool:
    """True for torch's `control_deps` around an op that orders streams. Item `i + 1` of its result is tensor `i`."""
    return op_name(node) == "control_deps" and orders_streams(node)


def handed_on_by(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is, where a call hands that on once streams are ordered; None for other nodes."""
    call = node.args[0] if op_name(node) == "getitem" else None
    if not isinstance(call, fx.Node) or not hands_on_in_order(call):
        return None
    source = call.args[int(node.args[1]) + 1] if node.args[1] else None  # type: ignore[arg-type]  # the first: no tensor
    return source if isinstance(source, fx.Node) else None


def users_past(user: fx.Node, node: fx.Node) -> list[fx.Node]:
    """A user of a tensor; where it is what orders streams, the items by which it hands that on, if it does."""
    items = [item for item in user.users if handed_on_by(item) is node] if hands_on_in_order(user) else []
    return items or [user]


def written_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that an in-place operation changes; all that it takes, where its schema does not say."""
    if not torch_ops.is_op(node.target) or not node.target._schema.is_mutable:
        return node.all_input_nodes if mutates(node) else []
    values = arguments(node)
    return nodes_in([values[name] for name in writes(node.target)])


def writes(op: Any) -> list[str]:
    """The names of the arguments that an op writes to."""
    return [one.name for one in op._schema.arguments if one.alias_info is not None and one.alias_info.is_write]


def nodes_in(values: Any) -> list[fx.Node]:
    """The nodes among arguments, in lists and dictionaries too, in order; one as often as it is there."""
    found: list[fx.Node] = []
    fx.map_arg(values, found.append)
    return found


def filling_of(node: fx.Node) -> Any:
    """The argument or number with which a node's op fills its tensor; None where it does something else."""
    constant = traits_of(node).constant
    return arguments(node)[constant] if isinstance(constant, str) else constant


def is_known_collective(node: fx.Node) -> bool:
    """True for ops of torch's functional collectives, their waits included, and for asynctp's."""
    return op_name(node).startswith(("_c10d_functional.", "asynctp."))


def has_side_effect(node: fx.Node) -> bool:
    """True for what does something besides computing its result: in place, with other ranks, by chance, or at all."""
    return (
        is_known_collective(node)
        or node.is_impure()
        or mutates(node)
        or is_random(node)
        or _does_inside(node, has_side_effect)
    )


def source_of(node: fx.Node) -> str | None:
    """`file:line` of the innermost frame of the user's that made the node, when tracing recorded it.

    Frames inside torch (DTensor's hooks, `nn.Linear`) are passed over.
    """
    trace = node.meta.get("stack_trace")
    frames = _FRAME.findall(trace) if isinstance(trace, str) else []
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return f"{own[-1][0]}:{own[-1][1]}" if own else None


def module_of(node: fx.Node) -> str | None:
    """Path, in what was compiled, of the innermost module that made the node, or whose backward it is of, if known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not isinstance(stack, dict) or not stack:
        return None
    *_, (path, *_) = stack.values()
    return path_of(path) or None


def path_of(source: str) -> str:
    """Dynamo's expression for a module, or for a tensor that one holds, as a path: `up.weight`; empty for the root."""
    return _ITEM.sub(r".\1", _DETOURS.sub("", source)).lstrip(".")


def describe(node: object) -> str:
    """A tensor's dtype and shape in short: `bf16[2, 4*s0, 64]`."""
    value = tensor_of(node)
    return "?" if value is None else describe_tensor(value)


def describe_tensor(value: torch.Tensor) -> str:
    """The same of a tensor itself."""
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{_SHORT_DTYPES.get(dtype, dtype)}[{', '.join(str(size) for size in value.shape)}]"


def call_of(node: fx.Node) -> dict[str, Any]:
    """An op's arguments by their schema names, fake tensors for nodes; without its group, its accord and defaults."""
    op = torch_ops.overload_of(node.target)
    assert op is not None
    defaults = {one.name: one.default_value for one in op._schema.arguments if one.has_default_value()}
    given = {name: value for name, value in arguments(node).items() if value is not defaults.get(name, node)}
    found = {name: value for name, value in given.items() if name not in ("group_name", "accord")}
    return {name: fx.map_arg(value, lambda source: source.meta["val"]) for name, value in found.items()}


def call_as_json(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call in plain values: of a tensor its dtype, shape and strides. Empty where one of these is symbolic.

    `{"a_shard": {"dtype": "bfloat16", "shape": [4, 8], "stride": [8, 1]}, "gather_dim": 0, ...}`
    """
    values = {name: _as_json(value) for name, value in call.items()}
    return {} if _holds_symbols(list(values.values())) else values


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        return {"dtype": _as_json(value.dtype), "shape": list(value.shape), "stride": list(value.stride())}
    return value


def _holds_symbols(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, torch.SymInt) or any(map(_holds_symbols, items))
