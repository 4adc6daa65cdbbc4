"""Functions that Dynamo fails to compile: it says nothing, and they run as they are written, wholly or from a line on.

A failure calls `format_error_msg`, which writes Dynamo's log entry. Where Dynamo cannot resume after a graph break, it
compiles the beginning alone, and calls `step_graph_break`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any

import torch

from asynctp_passes.torch_private import dynamo, giving_up

CHANGE = (
    "if the function neither multiplies nor communicates, mark it with torch.compiler.disable, and call it outside of "
    "loops, try and with. Otherwise change what is named there, or compile only functions that do not have it, as the "
    "body of a loop; TORCH_LOGS=graph_breaks has more"
)
_WITHOUT_NAMES = compile("0", "", "eval")
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class Uncompiled:
    """A function with tensors that Dynamo fails to compile.

    Attributes:
        name: As `CompiledFunction.base`.
        reason: Why, with the place.
        remedy: What ends that.
        backend: What was to compile it, without what torch wraps it in; torch's wrapper, if it is Inductor.
        options: The options that `torch.compile` has for it.
        is_inductor: It is Inductor.
        is_judged: asynctp has graphs of it, and `giving_up` has ranks agree that they leave them.
    """

    name: str
    reason: str
    remedy: str
    backend: Any
    options: Mapping[str, Any]
    is_inductor: bool
    is_judged: bool


_listeners: list[Callable[[Uncompiled], None]] = []


def listen(listener: Callable[[Uncompiled], None]) -> Callable[[], None]:
    """Have a function called with each function that Dynamo fails to compile, in the call that would compile it.

    Without Dynamo's functions that are named above, it is never called.

    Args:
        listener: It may raise, which ends that call.

    Returns:
        A function that ends it.
    """
    _install()
    _listeners.append(listener)
    return functools.partial(_listeners.remove, listener)


@functools.cache
def _install() -> None:
    from torch._dynamo import convert_frame, symbolic_convert
    from torch._dynamo.exc import BackendCompilerFailed, Unsupported, UserError

    frames: Any = convert_frame
    translator: Any = symbolic_convert.InstructionTranslatorBase
    format_error_msg = getattr(frames, "format_error_msg", None)
    step_graph_break = getattr(translator, "step_graph_break", None)
    if format_error_msg is None or step_graph_break is None:
        return

    @functools.wraps(format_error_msg)
    def failed(error: Exception, *args: Any, **kwargs: Any) -> Any:
        at_limit = getattr(error, "frame_exec_strategy", None) is not None
        if isinstance(error, Unsupported | UserError):
            stack = getattr(error, "real_stack", None)
            remedy = giving_up.AT_LIMIT.format("torch._dynamo.config.recompile_limit") if at_limit else CHANGE
            _tell(stack[-1] if stack else None, str(error).strip().partition("\n")[0], remedy)
        return format_error_msg(error, *args, **kwargs)

    @functools.wraps(step_graph_break)
    def stepped(self: Any, continue_inst: Any) -> Any:
        try:
            _tell(self.frame_summary(), "a graph break from here on, after which torch cannot resume", CHANGE)
        except Exception as error:  # Dynamo takes others for its own
            raise BackendCompilerFailed(self.output.compiler_fn, error, None) from error
        return step_graph_break(self, continue_inst)

    frames.format_error_msg = failed
    translator.step_graph_break = stepped


def _tell(place: Any, reason: str, remedy: str) -> None:
    """Tell of the function that Dynamo compiles just now. place: Where it fails, with `filename` and `lineno`."""
    call = giving_up.callback_on_stack()
    if call is None or not _matters(call):
        return
    callback, code = call.f_locals["self"], call.f_locals["frame"].f_code
    where = f"{place.filename}:{place.lineno}: " if place is not None else ""
    found = Uncompiled(
        dynamo.name_of(dynamo.original_code(code)),
        where + reason,
        remedy,
        *_unwrapped(giving_up.compiler_of(callback)),
        giving_up.is_noted(callback, code),
    )
    for listener in tuple(_listeners):
        listener(found)


def _matters(call: FrameType) -> bool:
    """Whether a function has tensors or modules, and is no generator, unless torch.compile was given that itself.

    A generator that compiled code does not take in runs apart, as those of comprehensions do.
    """
    from torch._dynamo.convert_frame import has_tensor_in_frame

    frame, caller = call.f_locals["frame"], call.f_back
    while caller is not None and caller.f_locals.get("self") is call.f_locals["self"]:
        caller = caller.f_back  # what `giving_up` puts around the callback
    is_given = caller is not None and caller.f_code.co_name == "compile_wrapper"
    if frame.f_code.co_flags & _GENERATORS and not is_given:
        return False
    values: Any = SimpleNamespace(f_code=_WITHOUT_NAMES, f_globals={}, f_locals=frame.f_locals)
    return bool(has_tensor_in_frame(values))  # of a frame that names torch it is true, too


def _unwrapped(compiler: Any) -> tuple[Any, Mapping[str, Any], bool]:
    """The backend without what torch wraps it in, its options, and whether it is Inductor."""
    if isinstance(compiler, torch._TorchCompileInductorWrapper):
        return compiler, compiler.config, True
    options: dict[str, Any] = {}
    while True:  # torch's wrapper, and partials
        given = getattr(compiler, "kwargs", None) or getattr(compiler, "keywords", None) or {}
        inner = getattr(compiler, "compiler_fn", None) or getattr(compiler, "func", None)
        if inner is None:
            return compiler, options, False
        options, compiler = {**(given.get("options") or {}), **options}, inner
