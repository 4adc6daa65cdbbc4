"""Calls of the ops from the code that Inductor generates: each is an object that is bound to one place there.

    asynctp_all_gather_matmul_12ac = asynctp_bind(2, "('all_gather_matmul', {'gather_dim': 0, ...}, ...)")
    ...
    buf3 = asynctp_all_gather_matmul_12ac(arg0_1, [arg2_1])

The first call is the op's. Where kernels made it, the site has its plan from then on (`asynctp_kernels.cuda.bind`), and
calls do without torch's dispatcher, arguments that do not change, and the look-up of the plan. What may change is
looked at in each call. Where anything is otherwise, the call is one of the op: the same kernels run, in the same order.
`docs/internals/protocol.md` has more ("Calls from generated code").

The code may come out of Inductor's caches, in another process; binding touches no group and no GPU.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from asynctp_passes.ops.calls import COLLECTIVES, OPS, SIGNATURES, first_of
from asynctp_passes.ops.choice import kernels_for, kernels_or_none
from asynctp_passes.torch_private import inductor_calls, inductor_order
from asynctp_passes.torch_private.inductor_calls import is_watched
from asynctp_passes.torch_private.process_groups import nothing_to_wait_for

__all__ = ["VERSION", "CallSite", "bind", "mark"]

log = logging.getLogger("asynctp_passes.ops")

VERSION = 2
"""The version of the text that a site is bound with. Graphs in Inductor's caches hold such texts."""
MOST_SIZES = 64
"""The number of sizes for which one site knows plans at a time."""


def _not_bound(*tensors: Any) -> None:
    """In place of a bound call, where the op makes all calls."""


def mark(graph: fx.Graph, groups: Sequence[object], direct: bool) -> str:
    """Have the ops of a graph called from places that they are bound to, if `direct` and if that can be.

    groups: Of the fused ops, as the graph gives them: names, or nodes for objects.

    Returns:
        Why they are called by `torch.ops` all the same; empty where nothing keeps them from being bound, where that was
        not asked for, or where there are no calls of them.
    """
    if not direct or not groups or not inductor_order.is_compiled(graph):
        return ""
    ops = [getattr(torch.ops.asynctp, name).default for name in (*OPS, *COLLECTIVES, "wait")]
    reason = inductor_calls.hindrance()
    if reason is None and not all(isinstance(group, str) for group in groups):
        reason = "process groups are inputs of the graph"
    if reason is None and not inductor_calls.write_calls(ops, f"{__name__}.bind", VERSION):
        reason = f"Inductor of torch {torch.__version__} has no lines of an op's own"
    if reason is not None:
        return reason
    inductor_calls.mark(graph)
    return ""


def bind(version: int, text: str) -> Callable[..., Any]:
    """Give the object that a line of generated code calls, for the version and the text that the code has.

    Of another version it calls the op each time, and a warning says so.

    Raises:
        ValueError: The text is damaged, or is none of asynctp's.
    """
    try:
        op, constants, tensors, sized = ast.literal_eval(text)
        constants = {name: _value(constant) for name, constant in constants.items()}
        if version == VERSION:
            return _site(op, constants, tensors, sized)
    except Exception as error:
        raise ValueError(
            f"asynctp: generated code has the text {text!r} of version {version}, which says no call "
            f"({type(error).__name__}: {error}). Remedy: empty Inductor's caches (TORCHINDUCTOR_CACHE_DIR)"
        ) from error
    log.warning(
        "asynctp: code that another version of asynctp has generated calls %s, which takes the host longer. Remedy: "
        "empty Inductor's caches (TORCHINDUCTOR_CACHE_DIR), or run that version",
        op,
    )

    def call(*given: Any) -> Any:
        numbers = {name: given[0][place] for name, place in _places_of_sizes(constants)}
        values = {**constants, **numbers, **dict(zip(tensors, given[sized:], strict=True))}
        return getattr(torch.ops.asynctp, op)(**values)

    return call


def _site(op: str, constants: dict[str, Any], tensors: tuple[str, ...], sized: bool) -> Callable[..., Any]:
    if op == "wait":
        return WaitSite(bool(sized))
    unknown = {*constants, *tensors} - {*(SIGNATURES | COLLECTIVES)[op].names}
    if unknown:
        raise ValueError(f"{op} has no {', '.join(sorted(unknown))}")
    return SizedCallSite(op, constants, tensors) if sized else CallSite(op, constants, tensors)


def _value(constant: Any) -> Any:
    is_dtype = isinstance(constant, tuple) and constant[0] == "dtype"
    return getattr(torch, constant[1]) if is_dtype else constant


def _places_of_sizes(constants: dict[str, Any]) -> list[tuple[str, int]]:
    """The arguments that come with the sizes, each with its place there."""
    return [(name, value[1]) for name, value in constants.items() if isinstance(value, tuple) and value[0] == "size"]


class CallSite:
    """A call of an op that is made again and again, with tensors of the same shapes, strides and dtypes.

    Args:
        op: The op's name.
        constants: Its arguments that are no tensors, by name.
        tensors: The names of those that are given in each call.

    Attributes:
        direct: How many calls were not made by the op.
    """

    def __init__(self, op: str, constants: dict[str, Any], tensors: tuple[str, ...]) -> None:
        self.op, self.direct = op, 0
        signature = (SIGNATURES | COLLECTIVES)[op]
        self._overload, self._call = getattr(torch.ops.asynctp, op).default, signature.call
        values = {**dict.fromkeys(tensors), **constants}
        self._arguments = signature.in_order(values)
        self._places = [signature.names.index(name) for name in tensors]
        self._numbers = [(signature.names.index(name), place) for name, place in _places_of_sizes(constants)]
        self._bound: dict[tuple[int, ...], Any] = {}

    def __call__(self, *tensors: Any) -> Any:
        """Make the call, with the tensors in the schema's order."""
        bound = self._bound.get(())
        if bound is None or is_watched() or (found := bound(*tensors)) is None:
            return self._by_op((), tensors)
        self.direct += 1
        return found

    def _by_op(self, sizes: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        """Make the call by its op; sizes: all that the tensors' shapes and strides depend on."""
        bound, arguments = self._bound.get(sizes), self._filled(sizes, tensors)
        results = self._overload(*arguments)
        if not is_watched() and (bound is None or not (bound is _not_bound or bound.holds())):
            self._bind(sizes, arguments)
        return results

    def _filled(self, sizes: tuple[int, ...], tensors: tuple[Any, ...]) -> list[Any]:
        """The op's arguments."""
        arguments = self._arguments.copy()
        for place, size in self._numbers:
            arguments[place] = sizes[size]
        for place, tensor in zip(self._places, tensors, strict=True):
            arguments[place] = tensor
        return arguments

    def _bind(self, sizes: tuple[int, ...], arguments: list[Any]) -> None:
        """Have the plan of the call that the op has just made."""
        call = self._call(*arguments)
        kernels = kernels_for(first_of(call))
        if len(self._bound) >= MOST_SIZES:
            self._bound.clear()
        make = getattr(kernels, "bind", None)
        self._bound[sizes] = _not_bound if make is None else make(call) or _not_bound


class SizedCallSite(CallSite):
    """A call site whose tensors' shapes, or numbers, depend on sizes, which are given first."""

    def __call__(self, sizes: tuple[int, ...], *tensors: Any) -> Any:
        """Make the call, with the tensors in the schema's order."""
        bound = self._bound.get(sizes)
        if bound is None or is_watched() or (found := bound(*tensors)) is None:
            return self._by_op(sizes, tensors)
        self.direct += 1
        return found


class WaitSite:
    """A wait for a collective's result.

    Args:
        sized: The tensors' shapes depend on sizes, which are given first.
    """

    def __init__(self, sized: bool) -> None:
        self._sized = sized
        self._land: Callable[[Any], bool] = self._bind

    def __call__(self, *given: Any) -> Any:
        """Complete a result on the current stream, and give it. given: The result, and what was communicated."""
        result, source = given[self._sized :]
        if not is_watched() and (self._land(result) or nothing_to_wait_for()):
            return result
        return torch.ops.asynctp.wait.default(result, source)

    def _bind(self, result: Any) -> bool:
        """Complete a result as kernels do it, and have them asked no more; False where torch's `wait_tensor` has to."""
        kernels = kernels_or_none(result)
        if kernels is None:
            return False
        self._land = kernels.bound_land()
        return self._land(result)
