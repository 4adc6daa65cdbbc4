"""Dynamo: the compile under way, the function that is compiled, its inputs, graph breaks, and structured traces."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx


def compile_id() -> Any:
    """Dynamo's name of the compile under way; None outside one."""
    from torch._guards import CompileContext

    return CompileContext.current_compile_id()


def compile_name() -> str:
    """The name of the compile under way (`"graph 0/0"`), or `"graph"` outside one."""
    current = compile_id()
    return f"graph {current}" if current is not None else "graph"


@dataclass(frozen=True)
class CompiledFunction:
    """The function that Dynamo compiles, in words that all ranks of one program share.

    Attributes:
        name: `"lib/model.py:forward:12"`, its file with its folder, its name and its first line.
        base: The function's name in the program; for the rest after a graph break, that of the whole.
    """

    name: str
    base: str


@dataclass
class _Compile:
    """One compile of Dynamo's, with the backward that is compiled later. module: The number of the compiled module."""

    number: int
    function: CompiledFunction | None = None
    module: int = 0


_compiles: weakref.WeakKeyDictionary[Any, _Compile] = weakref.WeakKeyDictionary()
_modules: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)


def _under_way() -> tuple[Any, _Compile | None]:
    """The context of Dynamo's compile under way, and what is known of it; None outside one."""
    from torch._guards import CompileContext

    context = CompileContext.try_get()
    if context is None or context.compile_id is None:
        return None, None
    if context not in _compiles:
        _compiles[context] = _Compile(next(_numbers))
    return context, _compiles[context]


def compile_under_way() -> tuple[int, int] | None:
    """The number of Dynamo's compile under way, and of its attempt at that; None outside one.

    All graphs into which torch cuts one function have the same numbers, and a backward that is compiled later has its
    forward's. Dynamo's own name of a compile comes again after `torch._dynamo.reset()`, and this number does not.
    """
    context, found = _under_way()
    return None if found is None else (found.number, context.attempt)


def compiled_function() -> CompiledFunction | None:
    """The function that is compiled, its backward included; None outside of Dynamo's compiles."""
    _, found = _under_way()
    frame_id = getattr(compile_id(), "frame_id", None)
    if found is None or frame_id is None:
        return None
    found.function = _function_on_stack() or found.function
    return found.function or CompiledFunction(f"function {frame_id}", f"function {frame_id}")


def compiled_module() -> int:
    """A number of the module whose method is compiled, its backward included; 0 for a function of no module."""
    _, found = _under_way()
    output = _output_on_stack()
    if found is None:
        return 0
    if output is not None:  # not of a backward
        scope = getattr(output, "local_scope", {})
        module = next((scope[name] for name in ("self", "fn") if isinstance(scope.get(name), torch.nn.Module)), None)
        found.module = 0 if module is None else _modules.setdefault(module, next(_numbers))
    return found.module


def _function_on_stack() -> CompiledFunction | None:
    """The function whose graph Dynamo gives to its backend just now."""
    output = _output_on_stack()
    code = _wrapped_code(output) or getattr(getattr(output, "root_tx", None), "f_code", None)
    return None if code is None else CompiledFunction(name_of(code), name_of(original_code(code)))


def _output_on_stack() -> Any:
    """The output graph that Dynamo gives to its backend just now; None without one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_subgraph" and "reason" in frame.f_locals:
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def _wrapped_code(output: Any) -> CodeType | None:
    """The code in Dynamo's own wrapper, in which partials, decorated functions and torch's modules are compiled."""
    from torch._dynamo.external_utils import wrap_inline

    wrapper = getattr(wrap_inline(len), "__code__", None)
    if getattr(getattr(output, "root_tx", None), "f_code", None) is not wrapper:
        return None
    found, code = getattr(output, "local_scope", {}).get("fn"), None
    while found is not None:
        code = getattr(found, "__code__", None)
        inner = type(found).forward if isinstance(found, torch.nn.Module) else getattr(found, "func", None)
        found = getattr(found, "__wrapped__", None) or inner
    return code


def name_of(code: CodeType) -> str:
    """A function's name, as `CompiledFunction.name`."""
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_name}:{code.co_firstlineno}"


def original_code(code: CodeType) -> CodeType:
    """The code in the program, where Dynamo made this for the rest of it after a graph break; else this."""
    from torch._dynamo.resume_execution import ContinueExecutionCache

    made: Any = ContinueExecutionCache.generated_code_metadata
    while code in made:
        code = made[code].code
    return code


def given_tensors(gm: fx.GraphModule) -> dict[int, torch.Tensor]:
    """The tensors with which Dynamo calls a function that it compiles just now, by number, as far as it has them."""
    found: dict[int, torch.Tensor] = {}
    for number, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        example = getattr(node.meta.get("grapharg"), "example", None)
        if isinstance(example, torch.Tensor):
            found[number] = example
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The one tensor in a tensor subclass, a DTensor's local one; else the tensor itself."""
    flatten: Callable[[], tuple[list[str], Any]] | None = getattr(tensor, "__tensor_flatten__", None)
    names = [] if flatten is None else flatten()[0]
    return _local(getattr(tensor, names[0])) if len(names) == 1 else tensor


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None in inference mode, where nobody counts that."""
    local = _local(tensor)
    return None if local.is_inference() else local._version


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


def frozen_parameters(gm: fx.GraphModule) -> list[int]:
    """The inputs of a function that Dynamo compiles just now that are a module's parameters, and want no gradient."""
    sources = input_sources(gm)
    return [
        number
        for number, tensor in given_tensors(gm).items()
        if isinstance(tensor, torch.nn.Parameter)
        and not tensor.requires_grad
        and "._parameters[" in sources.get(number, "")
    ]


def graph_break_of(gm: fx.GraphModule) -> str:
    """The place and the reason for which Dynamo ended a graph; empty for one that ends where its function returns."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    first = str(reason.reason).strip().partition("\n")[0]
    frames = list(reason.user_stack or ())
    return f"{frames[-1].filename}:{frames[-1].lineno}: {first}" if frames else first


def graph_breaks() -> list[str]:
    """Why dynamo broke graphs in this process, or gave a frame up, a text for each time."""
    if "torch._dynamo" not in sys.modules:
        return []
    from torch._dynamo.utils import counters

    return [text for kind in ("graph_break", "unimplemented") for text in Counter(counters[kind]).elements()]


def functions_with_graphs() -> list[str]:
    """The names of the functions that have compiled code, whatever backend made it."""
    if "torch._dynamo" not in sys.modules:
        return []
    from torch._dynamo import convert_frame, eval_frame

    seen = (reference() for reference in getattr(getattr(convert_frame, "input_codes", None), "seen", ()))
    codes = [code for code in seen if code is not None and eval_frame._debug_get_cache_entry_list(code)]
    return list(dict.fromkeys(name_of(original_code(code)) for code in codes))


def is_cut_for_ddp() -> bool:
    """True while pieces are compiled into which Dynamo has cut a graph for DistributedDataParallel."""
    from torch._guards import TracingContext

    return getattr(TracingContext.try_get(), "ddp_optimizer_ctx", None) is not None


def is_precompiled(compiled: object) -> bool:
    """True for a compiled function that torch can store in a file; it has to stay as it is."""
    from torch._dynamo.aot_compile_types import SerializableCallable

    return isinstance(compiled, SerializableCallable)


def suppresses_errors() -> bool:
    """True where a function whose compile fails runs without a compiler."""
    config = sys.modules.get("torch._dynamo.config")  # nothing is compiled before it is imported
    return config is not None and bool(config.suppress_errors)


def trace(name: str, payload: Callable[[], str], encoding: str = "json") -> None:
    """Emit a structured-trace artifact of JSON, or a `"string"`, which TORCH_TRACE records and tlparse shows."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload, expect_trace_id=False
    )
