"""Matmuls by cuBLASLt's C API: the algorithm is chosen once a plan, does not cut K, and needs no workspace.

`torch.mm` has cuBLAS choose in each call. With few rows or columns that cuts K, and adds the parts up: a row's bits
depend on what is beside it. Algorithms without that make each element in one sum, in an order that is in their code.
Without a workspace, calls on several streams and in CUDA graphs have nothing in common.

Source: the cuBLAS documentation, "Using the cuBLASLt API". Numbers are those of `cublasLt.h`, of cuBLAS 12 and 13.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.runtime import driver as gpu

log = logging.getLogger(__name__)

_SUM_IN_FP32 = 68
_TYPES = {
    torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29,
}  # fmt: skip
#: attributes of a description of a matmul; an epilogue; an address for a choice that looks whether there is one
_TRANSPOSED, _EPILOGUE, _BIAS, _B_SCALE, _A_SCALE, _FAST, _BIAS_TYPE = 3, 7, 8, 17, 18, 25, 26
_WITH_BIAS, _ANY_ADDRESS = 4, 1 << 20
#: attributes that say how scales are read, and the value for those of rows: since cuBLAS 12.9, on compute capability 9
_B_SCALES, _A_SCALES, _OF_ROWS = 31, 32, 3
#: attributes of a preference, and of an algorithm
_WORKSPACE, _SCHEMES, _ALIGNMENTS, _PARTS, _SCHEME = 1, 3, (5, 6, 7, 8), 2, 3
#: a workspace as PyTorch has it, all ways to add up parts of K, bytes that addresses are multiples of, algorithms
_ROOM, _ALL_SCHEMES, _ALIGNED, _ALGORITHMS = 32 << 20, 7, 16, 8


class Refused(RuntimeError):
    """cuBLASLt makes no such matmul."""


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Call(ctypes.Structure):
    """One call, as `site.c` makes it: functions, what stays, and addresses. To cuBLASLt, B is the first operand."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("matmul", "set_attribute", "handle", "description", "one", "b_layout")),
        *((name, ctypes.c_void_p) for name in ("a_layout", "zero", "out_layout", "algorithm")),
        *((name, ctypes.c_uint64) for name in ("b", "a", "out", "b_scale", "a_scale", "bias")),
    )


@functools.cache
def library() -> Any:
    """The libcublasLt that torch has loaded.

    Raises:
        Refused: There is none.
    """
    try:
        found = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError as error:
        raise Refused(f"no libcublasLt: {error}") from error
    found.cublasLtMatmul.argtypes = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p]
    return found


def _call(name: str, *args: Any) -> None:
    if code := getattr(library(), name)(*args):
        raise Refused(f"{name}: status {code}")


def _made(kind: str, *args: Any) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _call(f"cublasLt{kind}Create", ctypes.byref(made), *args)
    return made


def _set(kind: str, made: ctypes.c_void_p, number: int, value: Any) -> None:
    _call(f"cublasLt{kind}SetAttribute", made, number, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


@functools.cache
def _handle(index: int) -> ctypes.c_void_p:
    """The handle for the current GPU, which has this index. Threads share it."""
    with gpu.relaxed_captures():
        return _made("")


def _layout(dtype: torch.dtype, rows: int, columns: int, pitch: int) -> ctypes.c_void_p:
    """A matrix, columns first."""
    return _made("MatrixLayout", _TYPES[dtype], *map(ctypes.c_uint64, (rows, columns)), ctypes.c_int64(pitch))


class Kind(NamedTuple):
    """Matmuls that an algorithm is chosen for: A [m, k] contiguous, B [k, n] of these strides, out [m, n] contiguous.

    scaled: A and B have a scale each; by_rows: each row of A and each column of B has one, by which bits are those of
    `torch._scaled_mm` (`docs/results/2026-11-30-h200x1/rowwise-cublaslt.txt`). bias: its dtype. fast: fp8 sums may be.
    """

    device: int
    m: int
    k: int
    n: int
    strides: tuple[int, ...]
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    scaled: bool
    bias: torch.dtype | None
    fast: bool
    by_rows: bool = False


class Matmul:
    """`a @ b`, with a scale for each and a bias if the kind has them: rounded once.

    Attributes:
        algorithms: Some that do not cut K, the one first that is likely to be fastest.
        algorithm: The one that calls take.
        is_free: cuBLAS by itself would not cut K either.

    Raises:
        Refused: cuBLASLt makes no such matmul.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind, self._lock, self._numbers = kind, threading.Lock(), (ctypes.c_float * 2)(1, 0)
        self._kept = list[Callable[[], Any]]()
        k_first = kind.strides[0] == 1 and (kind.strides[1] != 1 or kind.k > 1)
        self._description = self._keep("MatmulDesc", _made("MatmulDesc", _SUM_IN_FP32, _TYPES[torch.float32]))
        self._describe(_TRANSPOSED, ctypes.c_int(k_first))
        if kind.a.itemsize == 1:
            self._describe(_FAST, ctypes.c_int8(kind.fast))
        if kind.by_rows:
            for attribute in (_B_SCALES, _A_SCALES):
                self._describe(attribute, ctypes.c_int32(_OF_ROWS))
        if kind.bias is not None:
            self._describe(_EPILOGUE, ctypes.c_int(_WITH_BIAS))
            self._describe(_BIAS_TYPE, ctypes.c_int(_TYPES[kind.bias]))
        of_scale = _ANY_ADDRESS * kind.scaled
        self._describe_addresses(of_scale, of_scale, _ANY_ADDRESS * (kind.bias is not None))
        of_b = (kind.k, kind.n, kind.strides[1]) if k_first else (kind.n, kind.k, kind.strides[0])
        self._layouts = [
            self._keep("MatrixLayout", _layout(*each))
            for each in ((kind.b, *of_b), (kind.a, kind.k, kind.m, kind.k), (kind.out, kind.n, kind.m, kind.n))
        ]
        free = self._found(_ROOM, _ALL_SCHEMES)[:1]
        self.is_free = bool(free) and not _cuts(free[0])
        first = [each for each in free if self.is_free and each.workspace == 0]
        uncut = [each for each in self._found(0, 0) if each.workspace == 0 and not _cuts(each)]
        self.algorithms = [(ctypes.c_uint64 * 8)(*each.algorithm) for each in [*first, *uncut]]
        if not self.algorithms:
            raise Refused("cuBLASLt has no algorithm without a workspace, which does not cut K")
        self.algorithm = self.algorithms[0]

    def _keep(self, what: str, made: ctypes.c_void_p) -> ctypes.c_void_p:
        self._kept.append(functools.partial(getattr(library(), f"cublasLt{what}Destroy"), made))
        return made

    def _describe(self, attribute: int, value: Any) -> None:
        _set("MatmulDesc", self._description, attribute, value)

    def _describe_addresses(self, b_scale: int, a_scale: int, bias: int) -> None:
        for attribute, address in ((_B_SCALE, b_scale), (_A_SCALE, a_scale), (_BIAS, bias)):
            if address:
                self._describe(attribute, ctypes.c_void_p(address))

    def _found(self, workspace: int, schemes: int) -> list[Any]:
        """Algorithms, the fastest first as cuBLASLt has it, of such a workspace and such ways to add up parts of K."""
        preference = _made("MatmulPreference")
        try:
            _set("MatmulPreference", preference, _WORKSPACE, ctypes.c_size_t(workspace))
            for attribute, value in ((_SCHEMES, schemes), *((each, _ALIGNED) for each in _ALIGNMENTS)):
                _set("MatmulPreference", preference, attribute, ctypes.c_uint32(value))
            found, count = (_Found * _ALGORITHMS)(), ctypes.c_int()
            b, a, out = self._layouts
            _call("cublasLtMatmulAlgoGetHeuristic", _handle(self.kind.device), self._description, b, a, out, out,
                  preference, _ALGORITHMS, found, ctypes.byref(count))  # fmt: skip
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        return [each for each in found[: count.value] if each.status == 0]

    def by(self, algorithm: Any) -> Matmul:
        """Have calls take an algorithm."""
        self.algorithm = algorithm
        return self

    def call(self) -> Call:
        """The call as `site.c` has it, without addresses."""
        functions = (library().cublasLtMatmul, library().cublasLtMatmulDescSetAttribute)
        one, (b, a, out) = ctypes.addressof(self._numbers), (each.value for each in self._layouts)
        pointers = (_handle(self.kind.device).value, self._description.value, one, b, a, one + 4, out)
        return Call(
            *(ctypes.cast(each, ctypes.c_void_p) for each in functions), *pointers, ctypes.addressof(self.algorithm)
        )

    def __call__(self, stream: int, b: int, a: int, out: int, b_scale: int, a_scale: int, bias: int) -> None:
        """Enqueue it, of tensors at these addresses: multiples of 16 bytes, or 0. A capture of ours notes it.

        Raises:
            Refused: cuBLASLt does not take it.
        """
        if gpu.note_beside(self, (b, a, out, b_scale, a_scale, bias)):
            return
        of_b, of_a, of_out = self._layouts
        one = ctypes.addressof(self._numbers)
        with self._lock:
            self._describe_addresses(b_scale, a_scale, bias)
            _call("cublasLtMatmul", _handle(self.kind.device), self._description, one, b, of_b, a, of_a, one + 4, out,
                  of_out, out, of_out, ctypes.addressof(self.algorithm), None, 0, stream)  # fmt: skip

    def __del__(self) -> None:
        for destroy in self._kept:
            destroy()


def _cuts(found: Any) -> bool:
    """Whether an algorithm cuts K."""
    return _of(found.algorithm, _SCHEME) != 0 or _of(found.algorithm, _PARTS) > 1


def _of(algorithm: Any, attribute: int) -> int:
    value, size = ctypes.c_int(), ctypes.c_size_t()
    where = (ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)), ctypes.byref(size))
    _call("cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(algorithm), attribute, *where)
    return value.value


class Matmuls:
    """`a @ b` for each B, one after the other, as `FewRows` has them."""

    def __init__(self, matmuls: Sequence[Matmul]) -> None:
        self.matmuls = matmuls

    def __call__(self, stream: int, call: Matrices) -> None:
        """Enqueue them, of operands that lie `as_read`."""
        a, bs, outs, a_scale, b_scales, biases = call
        for i, (made, b, out, bias) in enumerate(zip(self.matmuls, bs, outs, biases, strict=True)):
            b_scale = b_scales[i] if b_scales else None
            made(stream, *map(_address, (b, a, out, b_scale, a_scale, bias)))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def kinds(call: Matrices, fast: bool) -> list[Kind]:
    """The kind of each matmul of such a call.

    Raises:
        Refused: Scales are neither one number each nor one for each row of A and column of B. Or operands are no fp8,
            bfloat16 or float16.
    """
    a, bs, outs, a_scale, b_scales, biases = call
    scales = [scale for scale in (a_scale, *b_scales) if scale is not None]
    counts, of_rows = [scale.numel() for scale in scales], [a.shape[0], *(b.shape[1] for b in bs)]
    by_rows = any(count != 1 for count in counts)
    if by_rows and (counts != of_rows or scales[0].shape[-1:].numel() != 1):
        raise Refused("scales of rows of one operand alone, or of blocks")
    if bool(scales) != (a.itemsize == 1):
        raise Refused("fp8 without scales, or scales of another dtype")
    if a.dtype == torch.float32 or any(tensor.dtype not in _TYPES for tensor in (a, *bs, *outs)):
        raise Refused(f"a matmul of {a.dtype}")
    if any(1 not in b.stride() for b in bs):
        raise Refused("a B without a stride of 1")
    (m, k), index, scaled = a.shape, a.device.index, bool(scales)
    return [
        Kind(index, m, k, b.shape[1], b.stride(), a.dtype, b.dtype, out.dtype, scaled, bias, fast, by_rows)
        for b, out, bias in zip(bs, outs, [bias if bias is None else bias.dtype for bias in biases], strict=True)
    ]


def free_matmuls(call: Matrices, fast: bool) -> Matmuls | None:
    """The matmuls of a call of these examples, where cuBLAS by itself makes them so; else None: PyTorch makes them."""
    try:
        made = [Matmul(kind) for kind in kinds(call, fast) if kind.a != torch.float16]  # which may be summed in float16
    except Refused as error:
        log.debug("PyTorch makes the matmuls: %s", error)
        return None
    return Matmuls(made) if made and all(each.is_free for each in made) else None


#: the algorithm that has our kernels' bits; None where there is none
_alike: dict[Kind, Any] = {}

#: why calls may take longer, as it was told; a program of any number of rows has a plan for each number
_told: set[str] = set()


def alike_matmuls(call: Matrices, fast: bool, is_alike: Callable[[int, Matmul], bool]) -> Matmuls | None:
    """The same with the bits of our kernels, whatever cuBLAS does by itself. One warning says why, where it has others.

    is_alike: Compares the matmul of B number `i` with ours, once a kind. The host waits for that.
    """
    try:
        wanted = kinds(call, fast)
    except Refused:
        return None
    try:
        if any(kind.by_rows for kind in wanted):
            raise Refused(
                "cuBLAS's bits are not compared where scales are of rows; a kernel of asynctp makes the matmul"
            )
        made = [_alike_matmul(kind, functools.partial(is_alike, i)) for i, kind in enumerate(wanted)]
    except (Refused, torch.OutOfMemoryError) as error:
        _tell(error)
        return None
    return Matmuls(made)


def _tell(error: Refused | torch.OutOfMemoryError) -> None:
    """Warn of the first call of a process that is refused so; of others, with what details ever, in the debug log."""
    reason = str(error).partition(":")[0] if isinstance(error, Refused) else type(error).__name__
    level = logging.DEBUG if reason in _told else logging.WARNING
    _told.add(reason)
    log.log(level, "batch-invariant calls may take longer: %s", error)


def _alike_matmul(kind: Kind, is_alike: Callable[[Matmul], bool]) -> Matmul:
    made = Matmul(kind)
    if kind not in _alike:
        if gpu.capturing():
            raise Refused("it was first made in the capture of a CUDA graph, where the host cannot wait")
        _alike[kind] = next((each for each in made.algorithms if is_alike(made.by(each))), None)
    if _alike[kind] is None:
        raise Refused(f"cuBLAS has other bits: {kind}")
    return made.by(_alike[kind])
