"""Compile with Inductor: its passes, its caches, and the route of all that a process compiles through asynctp."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any

from torch import fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass

InferenceAwareGraphPass: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)
"""Inductor's base class of passes that are also told whether the graph is for inference; torch 2.11 has none."""


def call_graph_pass(graph_pass: Callable[..., None], graph: fx.Graph, is_inference: bool) -> None:
    """Run a custom graph pass of any kind, as Inductor does."""
    if InferenceAwareGraphPass is not CustomGraphPass and isinstance(graph_pass, InferenceAwareGraphPass):
        graph_pass(graph, is_inference)
    else:
        graph_pass(graph)


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


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: dict[str, Any],
    accepts_reports: Callable[[bool, bool], bool],
    further: dict[str, Any],
) -> Callable[..., Any]:
    """Compile a graph with Inductor under configuration patches (the backward graph too, which may come later).

    Args:
        patches: Inductor options.
        accepts_reports: Called after each graph that Inductor compiled or found in its cache, with False, and at the
            end, when a whole program may have come from AOTAutograd's cache, with True. What it does not accept is
            compiled again, without caches. Its second argument tells that this is the second time: then it raises.
        further: Other arguments of `compile_fx`, as the caller gave them.
    """
    from torch._guards import TracingContext
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_one(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_fx_inner(*args, **kwargs)
        if accepts_reports(False, False):
            return compiled
        context = TracingContext.try_get()
        if context is not None and context.output_strides is not None:
            context.output_strides.clear()  # of the graph that was not accepted; Inductor asserts that there are none
        with config.patch(_NO_CACHES), _off(_cached):
            compiled = compile_fx_inner(*args, **kwargs)
        accepts_reports(False, True)
        return compiled

    inputs = list(example_inputs)
    with _off(_routed):
        compiled = compile_fx(gm, inputs, compile_one, patches, **further)
        if not accepts_reports(True, False):
            with _off(_cached):
                compiled = compile_fx(gm, inputs, compile_one, {**patches, **_NO_CACHES}, **further)
            accepts_reports(True, True)
    return compiled  # type: ignore[return-value]


_routed: ContextVar[bool] = ContextVar("asynctp_routed", default=True)
_cached: ContextVar[bool] = ContextVar("asynctp_cached", default=True)


@contextlib.contextmanager
def _off(switch: ContextVar[bool]) -> Iterator[None]:
    token = switch.set(False)
    try:
        yield
    finally:
        switch.reset(token)


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
    whole, one = module._compile_fx_main, module._compile_fx_inner
    signature, active = inspect.signature(original), True

    @functools.wraps(original)
    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        further = signature.bind(*args, **kwargs).arguments
        patches = dict(further.get("config_patches") or {})
        if not active or not _routed.get():
            return original(*args, **kwargs)
        if leave_alone(patches):
            with _off(_routed):
                return original(*args, **kwargs)
        if further.get("inner_compile", inner) is not inner:
            with _off(_routed):
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

    routes: dict[str, Any] = {
        "compile_fx": compile_fx,
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


def uses_caches() -> bool:
    """False while a graph is compiled without caches: a pass without an identifier keeps Inductor from using any.

    `_NO_CACHES` alone does not: environment variables outrank patches (`TORCHINDUCTOR_FORCE_DISABLE_CACHES=0`).
    """
    return _cached.get()


def cached_counters() -> Counter[str]:
    """Inductor's counters. What a compile adds to them is stored in its cache entry, and added again on every hit."""
    from torch._dynamo.utils import counters

    return counters["inductor"]


def cudagraph_skips() -> int:
    """How many graphs Inductor was asked to record as CUDA graphs, and did not."""
    return int(cached_counters()["cudagraph_skips"])


def reset_cudagraphs() -> None:
    """Forget the CUDA graphs that Inductor recorded."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()
