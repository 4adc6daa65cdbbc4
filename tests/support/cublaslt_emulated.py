"""cuBLASLt's part played here, on CPU memory: for `asynctp_kernels.cuda.gemm.cublaslt`, and for C code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from asynctp_kernels.cuda.gemm import cublaslt
from asynctp_kernels.cuda.runtime import driver
from cuda_emulated import at

DTYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16, 28: torch.float8_e4m3fn, 29: torch.float8_e5m2}
TRANSPOSED, EPILOGUE, BIAS, B_SCALE, A_SCALE, FAST, BIAS_TYPE = 3, 7, 8, 17, 18, 25, 26
MODES, OF_ROWS = (31, 32), 3
_PLAIN = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_MATMUL = (*[ctypes.c_void_p] * 14, ctypes.c_size_t, ctypes.c_void_p)


@dataclass(frozen=True)
class Algorithm:
    """parts: of K. scheme: how they are added up. error: of what it makes, relative. rounds: sums are not exact."""

    number: int
    parts: int = 1
    scheme: int = 0
    workspace: int = 0
    error: float = 0.0
    rounds: bool = False


@dataclass
class CublasLt:
    """libcublasLt.

    able: algorithms for a workspace and schemes. objects: descriptions, layouts and preferences, as attributes by
    number. log: addresses of each matmul: of B, A, the result, scales and bias. codes: what functions give, if not 0.
    """

    able: Callable[[int, int], list[Algorithm]] = lambda workspace, schemes: [Algorithm(1), Algorithm(2)]
    codes: dict[str, int] = field(default_factory=dict)
    objects: dict[int, dict[Any, int]] = field(default_factory=dict)
    log: list[tuple[int, ...]] = field(default_factory=list)
    asked: list[dict[Any, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seen: dict[int, Algorithm] = {}
        self.errors = list[BaseException]()
        self.cublasLtMatmul = ctypes.CFUNCTYPE(ctypes.c_int, *_MATMUL)(self._guarded(self._matmul))
        set_attribute = ctypes.CFUNCTYPE(ctypes.c_int, *_PLAIN)(self._guarded(self._set))
        self.cublasLtMatmulDescSetAttribute = self.cublasLtMatmulPreferenceSetAttribute = set_attribute

    def _guarded(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            try:
                return function(*args)
            except BaseException as error:  # ctypes would print it, and go on
                self.errors.append(error)
                return 999

        return call

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cublasLt"):
            raise AttributeError(name)
        return lambda *args: self.codes.get(name, 0) or self._object(name, *args)

    def _object(self, name: str, made: Any, *args: Any) -> int:
        if name.endswith("Create"):
            made._obj.value = 100 + len(self.objects)
            self.objects[made._obj.value] = dict(enumerate(getattr(arg, "value", arg) for arg in args))
        else:
            assert name.endswith("Destroy"), name
            self.objects[made.value]["destroyed"] = 1
        return 0

    def _set(self, made: int, attribute: int, value: int, size: int) -> int:
        self.objects[made]["attribute", attribute] = int.from_bytes(ctypes.string_at(value, size), "little")
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *args: Any) -> int:
        preference, most, found, count = args[6:]
        asked = self.objects[preference.value]
        self.asked.append(dict(asked))
        able = self.able(asked["attribute", 1], asked["attribute", 3])[:most]
        for place, each in zip(found, able, strict=False):
            place.algorithm[0], place.workspace, self._seen[each.number] = each.number, each.workspace, each
        count._obj.value = len(able)
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm: Any, attribute: int, value: Any, *_: Any) -> int:
        each = self._seen[algorithm._obj[0]]
        value._obj.value = {2: each.parts, 3: each.scheme}[attribute]
        return 0

    def _matmul(self, *args: int) -> int:
        _, description, one, b, b_layout, a, a_layout, zero, c, c_layout, out, out_layout, algorithm, *rest = args
        if "cublasLtMatmul" in self.codes:
            return self.codes["cublasLtMatmul"]
        assert (c, c_layout, rest[:2]) == (out, out_layout, [None, 0])
        assert [ctypes.c_float.from_address(number).value for number in (one, zero)] == [1, 0]
        told = self.objects[description]
        scales, bias = (
            [told.get(("attribute", each), 0) for each in (B_SCALE, A_SCALE)],
            told.get(("attribute", BIAS), 0),
        )
        self.log.append((b, a, out, *scales, bias))
        assert not any(address % 16 for address in self.log[-1])
        left, right = self._at(b, b_layout), self._at(a, a_layout)
        left = left.t() if told["attribute", TRANSPOSED] else left
        taken = self._seen[ctypes.c_uint64.from_address(algorithm).value]
        made = left.float() @ right.float() if taken.rounds else (left.double() @ right.double()).float()
        if scales[0]:
            by_rows = {told.get(("attribute", mode), 0) for mode in MODES}
            (b_rows, a_rows) = made.shape if by_rows == {OF_ROWS} else (1, 1)
            assert len(by_rows) == 1
            b_scale, a_scale = at(scales[0], (b_rows, 1), torch.float32), at(scales[1], (1, a_rows), torch.float32)
            made = made * a_scale * b_scale if by_rows == {OF_ROWS} else made * (a_scale * b_scale)
        if told.get(("attribute", EPILOGUE)) == 4:
            made += at(bias, (made.shape[0], 1), DTYPES[told["attribute", BIAS_TYPE]]).float()
        place = self._at(out, out_layout)
        place.copy_((made * (1 + taken.error)).to(place.dtype))
        return 0

    def _at(self, address: int, layout: int) -> torch.Tensor:
        dtype, rows, columns, pitch = (self.objects[layout][place] for place in range(4))
        return at(address, (rows, columns), DTYPES[dtype], (1, pitch))


def emulate(patch: pytest.MonkeyPatch, **options: Any) -> Iterator[CublasLt]:
    """Have it in the place of libcublasLt."""
    made = CublasLt(**options)
    patch.setattr(cublaslt, "library", lambda: made)
    patch.setattr(cublaslt, "_alike", {})
    patch.setattr(cublaslt, "_told", set())
    for name, given in (("exchange_capture_mode", 0), ("capturing", False), ("current_stream", 0)):
        patch.setattr(driver, name, lambda *_, given=given: given)
    cublaslt._handle.cache_clear()
    yield made
    cublaslt._handle.cache_clear()
    for error in made.errors:
        raise error
