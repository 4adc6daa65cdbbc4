"""The lines by which the code that Inductor generates calls ops: of a marked graph's, calls of objects bound to them.

    lib_op_12ac = lib_bind(1, "...all that is constant...")    where the module is imported
    buf0 = lib_op_12ac(arg0_1, [arg1_1])                       in place of torch.ops.lib.op.default(...)

Inductor has a table of ops that write their own line (`CUSTOM_EXTERN_KERNEL_CODEGEN`). Only the line differs: to
Inductor the node stays what it is, so aliasing, order, memory and sizes are as without it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd import profiler

from asynctp_passes.torch_private import inductor_order

log = logging.getLogger(__name__)

#: which each call asks
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_grad_enabled = torch.is_grad_enabled
_MARK = "asynctp_bound_calls"
_TENSORS = ("Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]")


class Unwritable(Exception):
    """A call that keeps the op's own line."""


def mark(graph: fx.Graph) -> None:
    """Have calls in a graph, and in those that it runs, be written as calls of bound objects (`write_calls`)."""
    inductor_order.mark(graph, _MARK)


def hindrance() -> str | None:
    """The option of Inductor by which every call keeps the op's line; None where there is none."""
    from torch._inductor import config

    wanted = {"cpp_wrapper": False, "fx_wrapper": False, "generate_intermediate_hooks": False, "size_asserts": True}
    # without size_asserts nobody has looked whether tensors have the strides that they were compiled for
    found = {name: getattr(config, name, value) for name, value in wanted.items()}
    return next((f"{name}={found[name]}" for name, value in wanted.items() if found[name] != value), None)


def write_calls(ops: Iterable[torch._ops.OpOverload], binder: str, version: int) -> bool:
    """Let Inductor write calls of these ops in marked graphs as calls of what `binder(version, text)` gives.

    Other graphs keep the ops' lines, and so do calls with something else than tensors and constants.

    Args:
        ops: The ops. Of their arguments, tensors and lists of such are given in the call, all others in `text`.
        binder: Where the function is: `module.name`.
        version: Of what `text` says: `(op, constants by name, names of tensors, whether sizes are given first)`, as
            Python writes it. A dtype is written as `("dtype", name)`, and a number that a graph does not know as
            `("size", place)`: its place among the sizes.

    Returns:
        False where this torch has no such table, and every call keeps the op's line.
    """
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
        from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    except ImportError:
        return False

    def write(node: Any, writeline: Callable[[Any], None]) -> None:
        from torch._inductor.virtualized import V

        try:
            writeline(_line(node, binder, version))
        except Unwritable:
            writeline(ExternKernelAllocLine(V.graph.wrapper_code, node))
        except Exception:  # nothing that a compile should fail of: the op's line is always right
            log.warning("asynctp: %s is called by torch.ops, for want of a line of its own", node, exc_info=True)
            writeline(ExternKernelAllocLine(V.graph.wrapper_code, node))

    for op in ops:
        CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{op}"] = CustomCodegen(python=write)
    return True


@dataclasses.dataclass
class _Reference:
    """The name of a tensor in the generated code, or an expression that makes a view of one."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _line(node: Any, binder: str, version: int) -> str:
    """The line of a call, once the object that it calls is bound where the module is imported.

    Raises:
        Unwritable: It has to be the op's.
    """
    from torch._inductor.codegen import wrapper as codegen
    from torch._inductor.virtualized import V

    wrapper: Any = V.graph.wrapper_code
    plain = type(wrapper) in (codegen.PythonWrapperCodegen, codegen.SubgraphPythonWrapperCodegen)
    if not plain or hindrance() is not None or not inductor_order.is_marked(_MARK):
        raise Unwritable
    references = [_Reference(each.codegen_reference()) for each in node.inputs]
    args, kwargs = node.unflatten_args(references, node.constant_args)
    schema = node.op_overload._schema
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    tensors = [argument.name for argument in schema.arguments if str(argument.type) in _TENSORS]
    while tensors and given.get(tensors[-1]) is None:
        tensors.pop()
    sizes = _sizes(node.inputs, wrapper)
    constants: dict[str, Any] = {}
    for name, value in given.items():
        if name not in tensors and value is not None:
            constants[name] = _constant(value) if (text := _size(value, wrapper)) is None else ("size", len(sizes))
            sizes += [] if text is None else [text]
    namespace, _, op = schema.name.partition("::")
    text = repr((op, constants, tuple(tensors), bool(sizes)))
    layouts = node.unflatten_args(list(map(_layout, node.inputs)), node.constant_args)
    facts = f"{version} {text} {layouts}"  # one object makes calls with tensors of one layout
    name = f"{namespace}_{op}_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    module, _, function = binder.rpartition(".")
    wrapper.add_import_once(f"from {module} import {function} as {namespace}_{function}")
    wrapper.add_import_once(f"{name} = {namespace}_{function}({version}, {text!r})")
    operands = [wrapper.val_to_arg_str(given.get(each)) for each in tensors]
    first = [f"({', '.join(sizes)},)"] if sizes else []
    return f"{node.get_name()} = {name}({', '.join([*first, *operands])})"


def _constant(value: Any) -> Any:
    """An argument as the text says it."""
    if isinstance(value, torch.dtype):
        return ("dtype", str(value).removeprefix("torch."))
    if isinstance(value, (list, tuple)):
        return [_constant(each) for each in value]
    if getattr(value, "is_Integer", False):
        return int(value)
    if isinstance(value, (bool, int, float, str)):
        return value
    raise Unwritable


def _size(value: Any, wrapper: Any) -> str | None:
    """A number that depends on sizes, as the generated code computes it; None for anything else."""
    expression = value.node.expr if isinstance(value, torch.SymInt) else value
    return wrapper.codegen_sizevar(expression) if getattr(expression, "free_symbols", None) else None


def _layout(tensor: Any) -> str:
    """The dtype, device, shape and strides of a tensor, as far as they are known before a call."""
    return f"{tensor.get_dtype()} {tensor.get_device()} {list(tensor.get_size())} {list(tensor.get_stride())}"


def _sizes(inputs: Sequence[Any], wrapper: Any) -> list[str]:
    """All that sizes and strides of the tensors depend on, as the generated code names it."""
    found = set[Any]()
    for each in inputs:
        if not hasattr(each, "get_size") or not hasattr(each, "get_stride"):
            raise Unwritable
        for size in (*each.get_size(), *each.get_stride()):
            found |= getattr(size, "free_symbols", set())
    return [wrapper.codegen_sizevar(symbol) for symbol in sorted(found, key=str)]


def is_watched() -> bool:
    """Whether a call should be one of the op, since somebody looks at ops: a profiler, a dispatch mode, autograd."""
    return profiler._is_profiler_enabled or _dispatch_modes() > 0 or _grad_enabled() or _profiler_enabled()
