"""Facts about ops that schemas do not tell: of torch's own ops, of libraries', and of those that programs register.

    register_collective(torch.ops.vllm.all_gather, kind="all_gather", input="x", dim="dim", size="world_size",
                        group="group_name")

A descriptor names the arguments of an op's schema by their roles, and promises what the op computes. Names decide
nothing: an op without a descriptor and without a promise may communicate.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from asynctp_passes.ir.local_ops import (
    COMMUNICATING,
    CONTRACTING,
    LIBRARIES,
    MULTIPLYING,
    NORMALIZING,
    OTHER_KINDS,
    TORCH,
)
from asynctp_passes.torch_private import process_groups, torch_ops, triton_kernels

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "other"]

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")

Promise = Literal["local", "rowwise"]
"""Promises of an op: what `register_local` and `register_rowwise` give."""


class RegistryError(ValueError):
    """A descriptor does not fit its op; the message names the argument, what is wrong and what would be right."""


@dataclass(frozen=True)
class CollectiveOp:
    """A collective op: which of its arguments is what.

    The op promises to be functional. An all-gather returns the ranks' tensors concatenated along `dim` in rank order,
    a reduce-scatter this rank's block along `dim` of the reduction, an all-reduce the reduction. The attributes are the
    arguments of `register_collective`, `groups` in pairs.
    """

    kind: CollectiveKind
    input: str
    group: str
    size: str | int | None = None
    dim: str | int = 0
    reduce_op: str = "sum"
    groups: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class MatmulOp:
    """A matmul op: which of its arguments is what.

    The op promises to compute `a[..., M, K] @ b[..., K, N] (+ bias[N])` in a fresh contiguous tensor, after
    multiplying `a` and `b` by their scales, if it has such: float32, one number each, or one a row of `a` and one a
    column of `b`. An op that writes its result into an argument (`out`) reads nothing of what was there. A Triton
    kernel may add to that. It reads and writes by the sizes and strides that a call passes, and by no other number. The
    attributes are the arguments of `register_matmul`, `strides` and `constants` in pairs.
    """

    a: str
    b: str
    bias: str | None = None
    a_scale: str | None = None
    b_scale: str | None = None
    out: str | None = None
    b_transposed: bool = False
    sizes: tuple[str, ...] = ()
    strides: tuple[tuple[str, tuple[str | int, ...]], ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()


MATMUL_ROLES = ("a", "b", "bias", "a_scale", "b_scale", "out")
"""The fields of a `MatmulOp` that name a tensor."""


# --- torch's own --------------------------------------------------------------------------------------------
_GATHER = CollectiveOp("all_gather", "input", "group_name", "group_size")
_SCATTER = CollectiveOp("reduce_scatter", "input", "group_name", "group_size", reduce_op="reduce_op")
_REDUCE = CollectiveOp("all_reduce", "input", "group_name", reduce_op="reduce_op")

_COLLECTIVES: dict[str, CollectiveOp] = {
    "_c10d_functional.all_gather_into_tensor.default": _GATHER,
    "_c10d_functional_autograd.all_gather_into_tensor.default": _GATHER,
    "_c10d_functional.all_gather_into_tensor_coalesced.default": dataclasses.replace(_GATHER, input="inputs"),
    "_c10d_functional.reduce_scatter_tensor.default": _SCATTER,
    "_c10d_functional_autograd.reduce_scatter_tensor.default": _SCATTER,
    "_c10d_functional.reduce_scatter_tensor_coalesced.default": dataclasses.replace(_SCATTER, input="inputs"),
    "_c10d_functional.all_reduce.default": _REDUCE,
    "_c10d_functional.all_reduce_.default": _REDUCE,
    "_c10d_functional.all_reduce_coalesced.default": dataclasses.replace(_REDUCE, input="inputs"),
}

_MM = MatmulOp("self", "mat2")
_ADDMM = MatmulOp("mat1", "mat2", bias="self")
_BADDBMM = MatmulOp("batch1", "batch2", bias="self")
_SCALED = MatmulOp("self", "mat2", bias="bias", a_scale="scale_a", b_scale="scale_b")

ADDMM = "aten.addmm.default"
SCALED_MM = "aten._scaled_mm.default"
_MATMULS: dict[str, MatmulOp] = {
    "aten.mm.default": _MM,
    "aten.mm.dtype": _MM,
    "aten._int_mm.default": _MM,
    "aten.bmm.default": _MM,
    "aten.bmm.dtype": _MM,
    ADDMM: _ADDMM,
    "aten.addmm.dtype": _ADDMM,
    "aten.baddbmm.default": _BADDBMM,
    "aten.baddbmm.dtype": _BADDBMM,
    "aten.matmul.default": MatmulOp("self", "other"),
    "mkl._mkl_linear.default": MatmulOp("X", "ORI_W", bias="B", b_transposed=True),  # the packed weight goes
    "aten.linear.default": MatmulOp("input", "weight", bias="bias", b_transposed=True),
    SCALED_MM: _SCALED,
    "aten._scaled_mm_v2.default": _SCALED,
}


# --- those of programs --------------------------------------------------------------------------------------
_registered_collectives: dict[str, CollectiveOp] = {}
_registered_matmuls: dict[str, MatmulOp] = {}
_registered_promises: dict[str, Promise] = {}
"""By a name or pattern (`"mylib::norm"`, `"mylib::*"`)."""


def collective_op(name: str) -> CollectiveOp | None:
    """The descriptor of a collective, by the name of its overload (`"vllm.all_gather.default"`)."""
    return _COLLECTIVES.get(name) or _registered_collectives.get(name)


def is_registered(name: str) -> bool:
    """Whether a collective, by the name of its overload, is one that the program registered."""
    return name in _registered_collectives


def matmul_op(name: str) -> MatmulOp | None:
    """The descriptor of a matmul, by the name of its overload."""
    return _MATMULS.get(name) or _registered_matmuls.get(name)


def schema_name(name: str) -> str:
    """The name of an op's schema, as it is registered: `"mylib::norm"` for the overload `"mylib.norm.default"`."""
    return _overload(name).partition(".")[0]


def _overload(name: str) -> str:
    """`"mylib::norm.default"` for `"mylib.norm.default"`."""
    return name.replace(".", "::", 1)


def promise_of(name: str) -> Promise | None:
    """The promise that an op keeps, by the name of its overload; None for a collective, and for what may communicate.

    A registered collective communicates, whatever namespace is promised to be local. Of several promises that fit, that
    of rows counts, which is the stronger one.
    """
    if collective_op(name) is not None:
        return None
    own = _overload(name)
    found = {promise for pattern, promise in _registered_promises.items() if _fits(own, pattern)}
    if found:
        return "rowwise" if "rowwise" in found else "local"
    return "local" if name in _registered_matmuls or _is_known_local(own) else None


def can_promise(name: str) -> bool:
    """True for an overload that users may register as local: neither torch nor asynctp owns its namespace."""
    return name.partition(".")[0] not in _KNOWN_NAMESPACES and collective_op(name) is None


@functools.cache
def _is_known_local(name: str) -> bool:
    return any(_fits(name, pattern) for pattern in (*TORCH, *LIBRARIES, "asynctp::wait"))


@functools.cache
def multiplies(name: str) -> bool:
    """True for a matmul, by the name of its overload, that is known and not rewritten."""
    return _is_among(name, MULTIPLYING)


@functools.cache
def normalizes(name: str) -> bool:
    """True for an op that is known to work between a collective and a matmul, by the name of its overload."""
    return _is_among(name, NORMALIZING)


@functools.cache
def contracts(name: str) -> bool:
    """True for attention, a convolution or a recurrent layer, by the name of its overload."""
    return _is_among(name, CONTRACTING)


def kind_of_other(name: str) -> CollectiveKind:
    """The kind of a collective that is known and not rewritten; `"other"` for another one."""
    found = (kind for pattern, kind in OTHER_KINDS.items() if _fits(_overload(name), pattern))
    return cast(CollectiveKind, next(found, "other"))


def _is_among(name: str, patterns: Iterable[str]) -> bool:
    return any(_fits(_overload(name), pattern) for pattern in patterns)


def _fits(name: str, pattern: str) -> bool:
    """True for the overload of a name, and for each of them where the pattern names none."""
    if "*" in pattern:
        return fnmatch.fnmatchcase(name, pattern if pattern.endswith("*") else f"{pattern}.*")
    return name == pattern or name.startswith(f"{pattern}.")


def surely_communicates(name: str) -> bool:
    """True for a collective, by the name of its overload: torch's or asynctp's, or one that is registered."""
    known = collective_op(name) is not None or name.partition(".")[0] in ("asynctp", *COMMUNICATING)
    return known and promise_of(name) is None


def digest() -> str:
    """A hash of what is registered: a part of the key that graphs are cached under."""
    entries = sorted({**_registered_collectives, **_registered_matmuls, **_registered_promises}.items())
    return hashlib.sha256(repr(entries).encode()).hexdigest()[:16]


def register_collective(
    op: Any,
    *,
    kind: CollectiveKind,
    input: str,
    group: str,
    size: str | int | None = None,
    dim: str | int = 0,
    reduce_op: str = "sum",
    groups: Mapping[str, Any] | None = None,
) -> CollectiveOp:
    """Let the pass understand a custom collective, in this process and from now on.

    Args:
        op: The op: an overload, or a packet that has one only (`torch.ops.vllm.all_gather`).
        kind: `"all_gather"`, `"reduce_scatter"` or `"all_reduce"`; `CollectiveOp` says what that promises.
        input: Name of the argument that is the tensor.
        group: Name of the argument that names the process group.
        size: Name of the argument that is the number of ranks, or that number. Not for an all-reduce.
        dim: Name of the argument that is the dimension of the ranks' blocks, or that dimension.
        reduce_op: Name of the argument that is the reduction, or that reduction: `"sum"` or `"avg"`.
        groups: The process groups (or their `group_name`) by the names that the op is given, where these are not
            torch's names.

    Returns:
        The descriptor. Registering an op again replaces it.

    Raises:
        RegistryError: The op has no such argument, or one of another type, or is torch's own.
    """
    found = _Schema(op)
    descriptor = CollectiveOp(kind, input, group, size, dim, reduce_op, _group_pairs(found, groups))
    found.require(kind in _KINDS, f"kind={kind!r} is not one of {', '.join(_KINDS)}")
    found.require(not found.writes, "it writes to its arguments; only functional collectives can be registered")
    found.require(found.returns == ["Tensor"], f"it returns {found.returns}, and not one tensor")
    found.argument("input", input, ("Tensor",))
    found.argument("group", group, ("str", "Any"))
    if kind == "all_reduce":
        found.require(size is None, "size has no meaning for an all-reduce; leave it out")
    else:
        problem = f"size must name the argument that is the number of ranks of an {kind}, or be it"
        found.require(size is not None, problem)
        if isinstance(size, str):
            found.argument("size", size, ("int", "SymInt"))
        else:
            found.require(type(size) is int and size > 0, f"size={size!r} is no number of ranks")
    if isinstance(dim, str):
        found.argument("dim", dim, ("int",))
    else:
        found.require(isinstance(dim, int), f"dim={dim!r} is neither the name of an argument nor a dimension")
    if reduce_op not in ("sum", "avg"):
        found.argument("reduce_op", reduce_op, ("str",))
    _registered_collectives[found.new_name(_COLLECTIVES)] = descriptor
    return descriptor


def register_matmul(
    op: Any,
    *,
    a: str,
    b: str,
    bias: str | None = None,
    a_scale: str | None = None,
    b_scale: str | None = None,
    out: str | None = None,
    b_transposed: bool = False,
    sizes: Sequence[str] = (),
    strides: Mapping[str, Sequence[str | int]] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> MatmulOp:
    """Let the pass understand a custom matmul, in this process and from now on; `MatmulOp` says what that promises.

    Args:
        op: The op: an overload, or a packet that has one only (`torch.ops._C.cutlass_scaled_mm`). Or a Triton kernel
            (`@triton.jit`) that the program calls itself.
        a: Name of the argument that is the left operand.
        b: Name of the argument that is the right operand.
        bias: Name of the argument that is the bias.
        a_scale: Name of the argument that is the scale of `a`; given with `b_scale`, or not at all.
        b_scale: Name of the argument that is the scale of `b`.
        out: Name of the argument that the op writes its result to, when it returns none. Such an op is understood as
            functionalization leaves it in a compiled graph: inside of `auto_functionalized`.
        b_transposed: `b` is `[N, K]`, as in a linear layer.
        sizes: Names of the arguments of a Triton kernel that are M, N and K. A call that passes another size,
            or a number that is described neither here nor in `strides`, is missed.
        strides: Names of the arguments that are strides, by the tensor's role: `{"a": ("stride_am", "stride_ak")}`. A
            number in the place of a name is the stride itself. A tensor that is not here has to be contiguous.
        constants: Values of the constants of a Triton kernel: `{"ACTIVATION": "", "BLOCK": ...}`. Three dots say that
            it computes the matmul with any value, as with any size of a tile. A call that passes another value, or
            a constant that is not described here, is missed.

    Returns:
        The descriptor. Registering an op again replaces it.

    Raises:
        RegistryError: The op has no such argument, or one of another type, or is torch's own.
    """
    found = _Schema(op, triton_kernels.compiled(op), out)
    told = tuple((role, tuple(names)) for role, names in dict(strides or ()).items())
    descriptor = MatmulOp(
        a, b, bias, a_scale, b_scale, out, b_transposed, tuple(sizes), told, tuple(dict(constants or {}).items())
    )
    found.require((a_scale is None) == (b_scale is None), "a_scale and b_scale must both be given, or none of them")
    for role in MATMUL_ROLES:
        name = getattr(descriptor, role)
        if name is not None:
            found.argument(role, name, ("Tensor", "Optional[Tensor]"))
    found.numbers(descriptor)
    if out is None:
        found.require(not found.writes, f"it writes to {found.writes}; name the argument of the result with out=")
        found.require(found.returns == ["Tensor"], f"it returns {found.returns}, and not one tensor")
    else:
        found.require(found.writes == [out], f"it writes to {found.writes}, and not to {out!r} alone")
        found.require(not found.returns, f"it returns {found.returns}; out= is for an op that returns nothing")
    _registered_matmuls[found.new_name(_MATMULS)] = descriptor
    return descriptor


def register_local(op: Any) -> None:
    """Promise that an op communicates with no other rank, in this process and from now on.

    asynctp and Inductor may then move collectives past it. An unregistered op keeps its place among them.

    Args:
        op: The op: an overload, a packet (which stands for all its overloads), or a name or namespace as text, of ops
            that need not exist yet: `"mylib::norm"`, `"mylib::*"`.

    Raises:
        RegistryError: It is no op and no such name, or a collective.
    """
    _promise(op, "local")


def register_rowwise(op: Any) -> None:
    """Promise that an op works row by row, and communicates with no other rank.

    A row is what the last dimension holds. Tensor arguments that have all sizes of a result but the last one have its
    rows. Each row of a result depends on theirs at the same place, and has the same bits whatever the other rows are,
    and however many. All other arguments (weights, numbers) are the same on all ranks, in every call. The op has no
    effect.

    asynctp may then do it on each rank's rows before an all-gather in place of after it. That takes an op with one
    result, whose other tensors have one dimension at most.

    Args:
        op: As for `register_local`.

    Raises:
        RegistryError: It is no op and no such name, or a collective.
    """
    _promise(op, "rowwise")


def unregister(op: Any) -> None:
    """Forget an op that was registered, in whichever ways; or a name or namespace as text.

    Raises:
        RegistryError: It was not.
    """
    pattern, kernel = _pattern(op), triton_kernels.compiled(op)
    names = [str(one) for one in _overloads(op)] if kernel is None else [triton_kernels.key_of(kernel)]
    tables: tuple[dict[str, Any], ...] = (_registered_collectives, _registered_matmuls, _registered_promises)
    found = [(table, key) for table in tables for key in {pattern, *names, *map(_overload, names)} if key in table]
    if not found:
        raise RegistryError(f"asynctp: {pattern} cannot be unregistered: it is not registered")
    for table, key in found:
        del table[key]


# --- checking a promise ---------------------------------------------------------------------------------------
_NAME = re.compile(r"[A-Za-z_]\w*::(\w+(\.\w+)?|\w*\*)")
_KNOWN_NAMESPACES = {"asynctp", *COMMUNICATING, *(name.partition("::")[0] for name in TORCH)}


def _promise(op: Any, promise: Promise) -> None:
    pattern = _pattern(op)
    problem, namespace = None, pattern.partition("::")[0]
    if promise == "rowwise" and namespace == triton_kernels.NAMESPACE:
        problem = "it is a Triton kernel; put its call into an op (torch.library.custom_op), and register that"
    elif namespace in _KNOWN_NAMESPACES:
        problem = "the pass knows the ops of this namespace already; give an op of another one"
    elif any(str(one) in _registered_collectives for one in _overloads(op)):
        problem = "it is registered as a collective, which communicates; unregister it first"
    elif promise == "rowwise" and any(_Schema(one).writes for one in _overloads(op)):
        problem = "it writes to its arguments; use register_local for it"
    if problem is not None:
        raise RegistryError(f"asynctp: {pattern} cannot be registered: {problem}")
    _registered_promises[pattern] = promise


def _overloads(op: Any) -> list[Any]:
    """The overloads that are meant by an op; none for text, and for a Triton kernel."""
    if isinstance(op, str) or triton_kernels.compiled(op) is not None:
        return []
    return [op] if torch_ops.is_op(op) else [getattr(op, name) for name in op.overloads()]


def _pattern(op: Any) -> str:
    """The name by which a promise is kept: of an overload, of all of a packet, or what was given as text."""
    if isinstance(op, str):
        if _NAME.fullmatch(op):
            return op
        how = 'it is not a name; give namespace::name, namespace::beginning* or namespace::*, as "mylib::norm"'
        raise RegistryError(f"asynctp: {op!r} cannot be registered: {how}")
    if torch_ops.is_op(op):
        return _overload(str(op))
    if (kernel := triton_kernels.compiled(op)) is not None:
        return _overload(triton_kernels.name_of(kernel))
    if getattr(op, "overloads", None) is None:
        how = 'it is not an op; give an overload such as torch.ops.mylib.norm.default, or its name, as "mylib::norm"'
        raise RegistryError(f"asynctp: {op} cannot be registered: {how}")
    return _overload(str(op))


# --- checking a descriptor ------------------------------------------------------------------------------------
class _Schema:
    """The arguments of an op with their types, or of a Triton kernel; what it writes and returns; errors that name it.

    Of a kernel the one argument that it writes to is given, as `out`.
    """

    def __init__(self, op: Any, kernel: Any = None, out: str | None = None) -> None:
        self._all_arguments: Sequence[str] = ()  # of a kernel, constants too
        if kernel is not None:
            self.name, self._told = triton_kernels.key_of(kernel), _overload(triton_kernels.name_of(kernel))
            self._types: dict[str, str | None] = dict.fromkeys(triton_kernels.arguments_of(kernel))
            self._all_arguments = triton_kernels.arguments_of(kernel, constants=True)
            self.writes, self.returns = [out], list[str]()
            self.require(out is not None, "a Triton kernel returns nothing; name the argument of the result with out=")
            return
        overloads: Callable[[], list[str]] | None = getattr(op, "overloads", None)
        if overloads is not None and len(overloads()) == 1:
            op = getattr(op, overloads()[0])
        elif overloads is not None:
            names = ", ".join(f"{op}.{name}" for name in overloads())
            raise RegistryError(f"asynctp: {op} cannot be registered: it has several overloads; give one of {names}")
        self.name = self._told = str(op)
        self.require(torch_ops.is_op(op), "it is not an op; give an overload such as torch.ops.vllm.all_gather.default")
        told = op._schema.arguments
        self._types = {argument.name: str(argument.type) for argument in told}
        self.writes = [one.name for one in told if one.alias_info is not None and one.alias_info.is_write]
        self.returns = [str(value.type) for value in op._schema.returns]

    def require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise RegistryError(f"asynctp: {self._told} cannot be registered: {problem}")

    def argument(self, role: str, name: str, types: tuple[str, ...]) -> None:
        """Require an argument of this name whose type is one of `types`, or not known."""
        self.require(name in self._types, f"{role}={name!r} is no argument; it has {', '.join(self._types)}")
        own = self._types[name]
        self.require(own in (None, *types), f"{role}={name!r} is of type {own}, and not {' or '.join(types)}")

    def numbers(self, matmul: MatmulOp) -> None:
        """Require that sizes, strides and constants, if described at all, are those of a Triton kernel."""
        names = [*matmul.sizes, *(name for _, names in matmul.strides for name in names if isinstance(name, str))]
        names += dict(matmul.constants)
        is_kernel = bool(self._all_arguments)
        of_op = "sizes, strides and constants are for a Triton kernel; an op knows those of its tensors"
        self.require(is_kernel or not (names or matmul.strides), of_op)
        given = [role for role in MATMUL_ROLES if getattr(matmul, role) is not None]
        other = [role for role, _ in matmul.strides if role not in given]
        self.require(not other, f"strides has {other}, which are not among its tensors: {', '.join(given)}")
        self.require(len(matmul.sizes) in (0, 3), f"sizes={matmul.sizes} are not the names of M, N and K")
        unknown = [name for name in names if name not in self._all_arguments]
        self.require(not unknown, f"{unknown} are none of its arguments: {', '.join(self._all_arguments)}")

    def new_name(self, own: Mapping[str, object]) -> str:
        """The overload's name, which must not be one of torch's ops."""
        self.require(self.name not in own, "the pass knows this op already")
        return self.name


def _group_pairs(found: _Schema, groups: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    pairs = {name: process_groups.group_name_of(group) for name, group in (groups or {}).items()}
    unknown = [name for name, group in pairs.items() if not group]
    found.require(not unknown, f"groups has {unknown}, which are neither process groups nor names of such")
    return tuple(sorted(pairs.items()))
