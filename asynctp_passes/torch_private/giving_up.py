"""Functions that Dynamo gives up: they run as they are written, though asynctp has compiled graphs of them.

torch.compile's callback (`CatchErrorsWrapper`) is asked for the code of each frame that has none that fits. Where it
gives none, the frame runs as it is written: at the recompile limit, where the frame is skipped, where an error is
suppressed. Under some stances it is not asked (`_callback_from_stance`).

Eager collectives of any kind, those of a backward too, come to a `c10d` op. Once a function was given up, Python
kernels stand in front of these.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from asynctp_passes.torch_private import dynamo

AT_LIMIT = (
    "raise {}, or give what differs between the calls as a tensor or mark it dynamic; TORCH_LOGS=recompiles names it"
)


@dataclass(frozen=True)
class GivenUp:
    """A function that runs as it is written, though asynctp has compiled graphs of it.

    Attributes:
        name: As `CompiledFunction.name`.
        reason: Why, in Dynamo's words or ours.
        remedy: What ends that, on every rank.
    """

    name: str
    reason: str
    remedy: str


@dataclass
class _Noted:
    """A function with graphs of asynctp's.

    groups: of these. left, communicates: as for `note_groups`. at_limit: `_limits` when these ended it.
    """

    name: str
    groups: frozenset[str]
    left: Callable[[GivenUp], None]
    communicates: Communicates
    at_limit: tuple[int, ...] = ()

    def given_up(self, reason: str, remedy: str) -> GivenUp:
        return GivenUp(self.name, reason, remedy)


@dataclass
class _Call:
    """A call of a function that is given up. first, end: the range of its autograd nodes' numbers, once it is over.

    code: What runs: the function's own, or Dynamo's, if `compiled` by another backend.
    """

    code: CodeType
    given_up: GivenUp
    communicates: Communicates
    first: int
    compiled: bool
    end: int | None = None


Communicates = Callable[[GivenUp, str, torch.device, bool], bool]

_calls: dict[tuple[str, CodeType], _Call] = {}  # by group: the last one of a function, until its first collective there
_Frame = tuple["weakref.ref[Any]", CodeType]  # Dynamo's callback for a function under compilation, and its code
_frames: weakref.WeakKeyDictionary[Any, _Frame] = weakref.WeakKeyDictionary()  # by the context of a compile
_noted: dict[Any, MutableMapping[CodeType, _Noted]] = {}  # by compiler


def note_groups(groups: Iterable[str], left: Callable[[GivenUp], None], communicates: Communicates) -> None:
    """Note groups of a graph that is compiled, for the function that it is of: its backward may be compiled later.

    Does nothing outside of torch.compile.

    Args:
        groups: Names of process groups; none for a graph that concerns nobody else.
        left: Called before each call of this function that runs as it is written, if no stance is why. It may raise.
        communicates: Called before the collectives of such a call, and of its backward, in one of its groups, until it
            gives True; with the name of that group, the device of the collective's tensors, and whether asynctp has
            such calls on its wire. It may raise.
    """
    from torch._guards import CompileContext

    context, found, function = CompileContext.try_get(), frozenset(groups), dynamo.compiled_function()
    if context is None or function is None:
        return
    if (call := callback_on_stack()) is not None:
        _frames[context] = weakref.ref(call.f_locals["self"]), call.f_locals["frame"].f_code
    if context not in _frames or not found:
        return
    reference, own = _frames[context]
    if (callback := reference()) is None:
        return
    _ask_of_frames()
    codes = _noted_by(callback)
    for code in {own, dynamo.original_code(own)}:
        known = codes[code].groups if code in codes else frozenset()
        codes[code] = _Noted(function.base, known | found, left, communicates)


def callback_on_stack() -> FrameType | None:
    """The call of Dynamo's callback for a frame, under way in this thread: its locals have `self` and `frame`."""
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "__call__" and isinstance(frame.f_locals.get("self"), CatchErrorsWrapper):
            return frame
        frame = frame.f_back
    return None


@functools.cache
def _ask_of_frames() -> None:
    """Have Dynamo's callbacks tell of the functions that they give up."""
    from torch._dynamo import convert_frame, eval_frame
    from torch._dynamo.types import ConvertFrameReturn

    actions, strategy_of = torch._C._dynamo.eval_frame._FrameAction, torch._C._dynamo.eval_frame._FrameExecStrategy
    original: Any = convert_frame.CatchErrorsWrapper.__call__
    from_stance: Any = eval_frame._callback_from_stance

    @functools.wraps(original)
    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        noted = _noted_by(self).get(frame.f_code)
        if noted and noted.at_limit == _limits(frame.f_code):  # Dynamo would say so again, with a warning
            result = ConvertFrameReturn(frame_exec_strategy=strategy_of(actions.RUN_ONLY, actions.DEFAULT))
            settle(self, frame, noted, result)
            return result
        result = original(self, frame, *args, **kwargs)
        if result.guarded_code is None and _noted_by(self):
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
            why = getattr(result, "skip_reason", None)  # torch 2.11 gives none
            skipped = noted.given_up(f"Dynamo skips it{f' ({why})' if why else ''}", _ALIKE)
            found = _at_limit(callback, code, noted) if noted.at_limit else skipped
            noted.left(found)
            _await_collectives(code, noted, found)

    @functools.wraps(from_stance)
    def callback_from_stance(callback: Any) -> Any:
        chosen = from_stance(callback)
        if not callable(callback) or not _noted_by(callback):
            return chosen
        if chosen is None or chosen is False:
            return _asking(callback, chosen is False)
        return _delaying(callback, chosen) if eval_frame._stance.stance.endswith("eager_then_compile") else chosen

    convert_frame.CatchErrorsWrapper.__call__ = call  # type: ignore[method-assign]
    eval_frame._callback_from_stance = callback_from_stance


def _noted_by(callback: Any) -> MutableMapping[CodeType, _Noted]:
    """The noted functions of all compiles by one compiler, whatever its options: Dynamo's limits are of a code."""
    compiler = compiler_of(callback)
    return _noted.setdefault(getattr(compiler, "compiler_fn", type(compiler)), weakref.WeakKeyDictionary())


def compiler_of(callback: Any) -> Any:
    """The backend with its options, as `torch.compile` wrapped them, out of Dynamo's callback for frames."""
    compiler = callback
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    return compiler


def is_noted(callback: Any, code: CodeType) -> bool:
    """Whether a function has graphs for whose groups `note_groups` was called."""
    return code in _noted_by(callback)


def _delaying(callback: Any, chosen: Callable[..., Any]) -> Callable[..., Any]:
    """The callback of a stance by which a function's first call is not compiled by its backend."""
    from torch._dynamo import convert_frame, eval_frame

    stance = eval_frame._stance.stance

    def delay(frame: Any, *args: Any, **kwargs: Any) -> Any:
        result, code = chosen(frame, *args, **kwargs), frame.f_code
        noted = _noted_by(callback).get(code)
        seen = eval_frame.get_example_inputs(code.co_filename + str(code.co_firstlineno))
        if noted and len(seen) == 1 and convert_frame.has_tensor_in_frame(frame):
            found = noted.given_up(f"torch.compiler.set_stance({stance!r}) is in force", _ONE_STANCE)
            compiled = result.guarded_code
            _await_collectives(code if compiled is None else compiled.code, noted, found, compiled is not None)
        return result

    delay._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]  # by which Dynamo knows its code
    return delay


def _asking(callback: Any, compiled: bool) -> Callable[..., Any]:
    """A callback that gives no code, for a stance without one. compiled: code that there is runs, if it fits."""
    from torch._dynamo import convert_frame, eval_frame, trace_rules
    from torch._dynamo.types import ConvertFrameReturn

    stance = str(eval_frame._stance.stance)

    def ask(frame: Any, *_: Any, **__: Any) -> Any:
        if trace_rules.check(frame.f_code):
            return ConvertFrameReturn()
        actions = torch._C._dynamo.eval_frame._FrameAction
        strategy, noted = torch._C._dynamo.eval_frame._FrameExecStrategy, _noted_by(callback).get(frame.f_code)
        if noted and convert_frame.has_tensor_in_frame(frame):
            reason = f"torch.compiler.set_stance({stance!r}) is in force"
            _await_collectives(frame.f_code, noted, noted.given_up(reason, _ONE_STANCE))
        return ConvertFrameReturn(frame_exec_strategy=strategy(actions.SKIP, actions.DEFAULT), apply_to_code=False)

    if compiled:
        ask._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]  # by which Dynamo knows its code
    return ask


_ONE_STANCE = "set one stance on every rank"
_ALIKE = "let this function be compiled on every rank, or on none (TORCH_LOGS=+dynamo has more)"


# --- collectives of what is given up ------------------------------------------------------------------------------
_ON_WIRE = (
    *("allreduce_", "allreduce_coalesced_", "_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"),
    *("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
)
_COLLECTIVES = (*_ON_WIRE, "broadcast_", "alltoall_base_")
"""The `c10d` ops of collectives that Dynamo takes into graphs; of these those that may go by asynctp's wire there."""


def _await_collectives(code: CodeType, noted: _Noted, given_up: GivenUp, compiled: bool = False) -> None:
    """Have the first collective of a call that begins now told of, in each of the function's groups."""
    _hook_collectives()
    call = _Call(code, given_up, noted.communicates, torch._C._autograd._get_sequence_nr(), compiled)
    for group in noted.groups:
        _calls.pop((group, code), None)
        _calls[group, code] = call  # the last, on all ranks that give the same functions up


@functools.cache
def _hook_collectives() -> Any:
    """Put `_collective` in front of the ops of collectives, as long as the returned library lives.

    What torch.compile wraps ends, as it begins, with `set_eval_frame(None)`.
    """
    from torch._dynamo import eval_frame as frames

    eval_frame: Any = frames
    set_eval_frame = eval_frame.set_eval_frame

    def ended(callback: Any) -> Any:
        if callback is None:
            for call in list(_calls.values()):
                if call.end is None and not _way_to(call.code, sys._getframe()):
                    call.end = torch._C._autograd._get_sequence_nr()
        return set_eval_frame(callback)

    eval_frame.set_eval_frame = ended
    for own in (ended, _way_to, _collective):  # they are called where frames are compiled
        eval_frame.skip_code(own.__code__)
    tell = torch.compiler.disable(_tell_of_collective)  # type: ignore[no-untyped-call]
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name in _COLLECTIVES:
        if (op := getattr(torch.ops.c10d, name, None)) is not None:
            kernel = functools.partial(_collective, op.default, functools.partial(tell, name in _ON_WIRE))
            library.impl(name, kernel, "BackendSelect", with_keyset=True)  # which every call passes, in all threads
    return library


def _collective(op: Any, tell: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    if _calls:
        tell(sys._getframe().f_back, args)
    return op.redispatch(keyset.remove(torch._C.DispatchKey.BackendSelect), *args, **kwargs)


def _tell_of_collective(may_be_on_wire: bool, frame: FrameType | None, args: Any) -> None:
    """Tell of a collective, called in this frame, if it is the first of a call that was given up."""
    from torch.utils import _pytree as pytree

    group = next(torch.distributed.ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject))
    name, device = group.group_name, next(one.device for one in pytree.tree_leaves(args) if torch.is_tensor(one))
    calls = {at: call for at, call in _calls.items() if at[0] == name and _belongs_to(call, frame)}
    for call in list(calls.values())[-1:]:
        if call.communicates(call.given_up, name, device, may_be_on_wire):
            for at in calls:
                del _calls[at]


def _belongs_to(call: _Call, frame: FrameType | None) -> bool:
    """Whether a frame is part of a call or of its backward, and not of what the program has torch.compile leave out."""
    node: Any = torch._C._current_autograd_node()
    if node is not None and call.first <= node._sequence_nr() and (call.end is None or node._sequence_nr() < call.end):
        return True  # of its backward; the call itself may be in another function's
    way = _way_to(call.code, frame)
    return call.end is None and bool(way) and (call.compiled or not any(map(_is_disabled, way)))


def _way_to(code: CodeType, frame: FrameType | None) -> list[FrameType]:
    """The frames from one up to that of a function; none where that is not on the stack."""
    way = []
    while frame is not None:
        way.append(frame)
        if frame.f_code is code:
            return way
        frame = frame.f_back
    return []


def _is_disabled(frame: FrameType) -> bool:
    """Whether a frame is the wrapper of `torch.compiler.disable`, by the program.

    What torch wraps itself (`torch._compile`) is taken into graphs all the same, as `checkpoint` is.
    """
    from torch import _compile
    from torch._dynamo import eval_frame

    is_wrapper = frame.f_code.co_name == "_fn" and frame.f_code.co_filename == eval_frame.__file__
    return is_wrapper and (frame.f_back is None or frame.f_back.f_code.co_filename != _compile.__file__)


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
    return noted.given_up(f"{name}={value} is reached, with {compiled} compiled forms", AT_LIMIT.format(name))
