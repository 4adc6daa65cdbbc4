"""Triton's interpreter: whether it works with the NumPy that is installed, and launches that cost less."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OF_KERNELS = ("asynctp_kernels.", "triton.language")
KERNELS = str(Path(__file__).parents[2] / "kernels")


@functools.cache
def interpreter_fault() -> str:
    """Why the interpreter does not work here, asked of a fresh process; empty when it does."""
    question = "from asynctp_kernels.interpreter import interpreter_fault; print(interpreter_fault() or '')"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": KERNELS}
    answer = subprocess.run(
        [sys.executable, "-c", question], env=environment, capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()


def interpret_quickly() -> None:
    """Let launches of this process look only once for what the interpreter replaces in Triton's modules.

    It looks through all members of these modules at each launch, and at each call of a function in a kernel, and makes
    a table of dtypes, the name of a type and the numbers of a shape for each value: half of the time that kernels take.
    Of the rest, a quarter goes to whether sums and products of integers overflow, which the thorough profile asks. Does
    nothing where kernels are not interpreted.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton.runtime import interpreter

        if isinstance(interpreter.inspect, _Inspect):
            return
        interpreter.inspect = _Inspect()  # type: ignore[attr-defined]
        thorough, builder = os.environ.get("HYPOTHESIS_PROFILE") == "thorough", interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=thorough)
        interpreter._get_np_dtype = _looked_up_once(interpreter)
        _make_types_once(interpreter.tl.core)
        if hasattr(interpreter, "_LangPatchScope"):  # of Triton that can undo what it replaced
            interpreter._patch_lang = _replacing_once(interpreter)


def rewrite_kernels() -> None:
    """Let the interpreter rewrite all functions of kernels now: else each rank does when it first calls them."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from asynctp_kernels.cuda import gemm
        from triton.runtime.interpreter import InterpretedFunction

        for module in pkgutil.iter_modules(gemm.__path__, f"{gemm.__name__}."):
            importlib.import_module(module.name)
        for name, module in list(sys.modules.items()):
            members = list(vars(module).values()) if name.startswith(_OF_KERNELS) else []
            for function in (each for each in members if type(each) is InterpretedFunction):
                function.rewrite()


def _looked_up_once(interpreter: Any) -> Callable[[Any], Any]:
    """NumPy's dtype for one of Triton's, of which pointers have no hash; for a block, that of its elements."""
    of_numbers, pointer = functools.cache(interpreter._get_np_dtype), interpreter.tl.pointer_type

    def look_up(of: Any) -> Any:
        return interpreter.np.dtype("uint64") if isinstance(of.scalar, pointer) else of_numbers(of.scalar)

    return look_up


def _make_types_once(core: Any) -> None:
    """Let types of blocks of one size, and tensors of one type, share what is computed from size and type."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        known = vars(element_ty).setdefault("_made_blocks", {})
        if sizes in known:
            vars(self).update(known[sizes])
        else:
            make_type(self, element_ty, shape)
            known[sizes] = vars(self)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = vars(type).get("_made_tensor")
        if known is None:
            make_tensor(self, handle, type)
            vars(type)["_made_tensor"] = {key: value for key, value in vars(self).items() if key != "handle"}
        else:
            vars(self).update(known)
            self.handle, self.type = handle, type

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor


def _replacing_once(interpreter: Any) -> Callable[[Any], Any]:
    """What replaces members of Triton's modules for a kernel; nothing is left to do for functions that it calls."""
    replace, language = interpreter._patch_lang, interpreter.tl
    modules, replaced = {id(language), id(language.core)}, set[int]()
    modules_of = functools.cache(lambda fn: modules.intersection(map(id, fn.__globals__.values())))

    class Outermost(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            replaced.clear()
            super().restore()

    def replace_once(fn: Any) -> Any:
        used = modules_of(fn)
        if replaced and used <= replaced:
            return interpreter._LangPatchScope()
        scope = Outermost()
        scope._changes = replace(fn)._changes
        replaced.update(used)
        return scope

    return replace_once


class _Inspect:
    """The module `inspect`, which remembers which members of an object are builtins of Triton."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getmembers(self, of: Any) -> list[tuple[str, Any]]:
        return [(name, getattr(of, name)) for name in _builtins(of)]


@functools.cache
def _builtins(of: Any) -> list[str]:
    from triton.language import core

    return [name for name, member in inspect.getmembers(of) if core.is_builtin(member)]
