"""The matmuls of batch-invariant calls by themselves on one GPU, beside cuBLAS: bits, and times.

    python tests/gpu/few_rows.py [KIND ...]        (bf16, fp8, fp8-rowwise; all by default)

Bits: of rows alone, and among more, by each of the tiles, all equal to the same rows of the GEMM of `fused`. Then of
each case that is timed: `unlike`, elements that differ from those of a GEMM of all rows; and of two streams at once.

Time: weights of Llama 3 8B and 70B as one of 4 and of 8 ranks has them. They are read from memory: each call of a CUDA
graph takes another copy, and all copies are many times as large as L2. In turns, medians. One JSON line a case:
microseconds of cuBLAS as PyTorch calls it, of `few` (`FewRows`), of `gemm` (the GEMM of `fused` alone), and of what a
batch-invariant call takes (`invariant`, of the kind `takes`); `ratio`, cuBLAS' time / that of `invariant`; `bound`, the
time of reading the weight / that; `chosen`, whether other calls take `few` too. Last of each kind and number of rows:
geometric mean and least of the ratios, mean of the bounds.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import gemm
import torch
from asynctp_kernels.cuda.choose.tiles import FewRowsTiles, few_rows_is_faster, few_rows_tiles
from asynctp_kernels.cuda.gemm import few_rows
from asynctp_kernels.cuda.gemm.arguments import Matrices
from asynctp_kernels.cuda.gemm.cublas import Scaling, matmul
from asynctp_kernels.cuda.gemm.few_rows import FewRows
from asynctp_kernels.cuda.gemm.own_matmul import WholeGemm, own_matmul
from torch import Tensor

#: (K, N): qkv, output, gate and up, down, of 8B and 70B, over 4 ranks and over 8
SHAPES = (
    (4096, 1536), (1024, 4096), (4096, 7168), (3584, 4096), (4096, 768), (512, 4096), (4096, 3584), (1792, 4096),
    (8192, 2560), (2048, 8192), (8192, 14336), (7168, 8192), (8192, 1280), (1024, 8192), (8192, 7168), (3584, 8192),
)  # fmt: skip
ROWS = (1, 4, 16, 32, 64, 96, 128, 200, 256, 384, 512, 1024, 2048, 4096, 8192)
#: numbers of rows that both kinds of ours are measured with
BOTH = range(65, 2049)
KINDS = ("bf16", "fp8", "fp8-rowwise")
COPIES_BYTES, ROUNDS = 400 << 20, 7
#: bytes a microsecond. Source: a copy of 8.6 GB within one H200, read and written
MEMORY = 4.3e6
SMS = 132

Call = Callable[[int], Any]


Operands = tuple[Tensor, list[Tensor], Tensor | None, list[Tensor]]


def operands(kind: str, m: int, k: int, n: int, copies: int) -> Operands:
    """(A, copies of B, scale of A, scales of B)"""
    dtype = torch.bfloat16 if kind == "bf16" else gemm.FP8
    a = torch.randn(m, k, device="cuda").to(dtype)
    bs = [(torch.randn(n, k, device="cuda") / k**0.5).to(dtype).t() for _ in range(copies)]
    if kind == "bf16":
        return a, bs, None, []
    rows, cols = ((m, 1), (1, n)) if kind == "fp8-rowwise" else ((1,), (1,))
    return a, bs, torch.rand(rows, device="cuda") + 0.5, [torch.rand(cols, device="cuda") + 0.5]


def ours(
    a: Tensor, bs: list[Tensor], out: Tensor, a_scale: Tensor | None, b_scales: list[Tensor], kind: Any = FewRows
) -> Call:
    example = Matrices(a, bs[:1], [out], a_scale, b_scales)
    made = kind(example)

    def call(i: int) -> str:
        stream = torch.cuda.current_stream().cuda_stream
        made(stream, example._replace(bs=[bs[i % len(bs)]]))
        return type(made).__name__

    return call


def cublas(a: Tensor, bs: list[Tensor], out: Tensor, a_scale: Tensor | None, b_scales: list[Tensor]) -> Call:
    scaling = Scaling(torch.bfloat16, fast=True) if b_scales else None
    b_scale = b_scales[0] if b_scales else None
    return lambda i: matmul(a, bs[i % len(bs)], None, a_scale, b_scale, scaling, out=out)


# --- bits ----------------------------------------------------------------------------------------------------------
def all_tiles(itemsize: int) -> set[FewRowsTiles]:
    return {few_rows_tiles(itemsize, m, n, SMS) for m in (1, 32, 64, 128, 256) for n in (64, 2560, 4096, 8192, 14336)}


def check_bits(kind: str, k: int, n: int) -> dict[str, Any]:
    """How many elements of rows by each of the tiles, and of each number of rows, differ from the GEMM of `fused`."""
    most = 256
    a, bs, a_scale, b_scales = operands(kind, most, k, n, 1)
    scales = None if a_scale is None else (a_scale, b_scales[0])
    made = gemm.make(gemm.Case("gather", kind, most, k, n), 4, a, bs[0], scales)
    made.run()
    torch.cuda.synchronize()
    assert made.out.isfinite().all()
    wanted, unlike, count = made.out.view(most, n), 0, 0

    def compare(rows: int, tiles: FewRowsTiles) -> int:
        scale = a_scale[:rows] if kind == "fp8-rowwise" and a_scale is not None else a_scale
        out = torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        with mock.patch.object(few_rows, "few_rows_tiles", return_value=tiles):
            ours(a[:rows], bs, out, scale, b_scales)(0)
        torch.cuda.synchronize()
        return int((out.view(torch.int16) != wanted[:rows].view(torch.int16)).sum())

    for tiles in sorted(all_tiles(a.itemsize), key=str):
        for rows in (1, 8, 16, 33, 64, 100, 200, 256):
            found = compare(rows, tiles)
            unlike, count = unlike + found, count + rows * n
            if found:
                print(json.dumps({"tiles": str(tiles), "rows": rows, "unlike": found}), flush=True)
    return {"bits": f"{kind} {k} x {n}", "elements": count, "unlike": unlike}


def check_streams(kind: str, k: int, n: int) -> dict[str, Any]:
    """How many elements differ where two streams make matmuls of cuBLASLt at once: each of its own A, B and scales.

    Both share the matmul, as calls of one plan do.
    """
    rows, streams, calls = 2048, [torch.cuda.Stream(), torch.cuda.Stream()], 100
    given = [operands(kind, rows, k, n, 1) for _ in streams]
    a, bs, *scales = given[0]
    made = own_matmul(Matrices(a, bs, [torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")], *scales))
    wanted = [torch.empty(rows, n, dtype=torch.bfloat16, device="cuda") for _ in streams]
    for (a, bs, *scales), out in zip(given, wanted, strict=True):
        made(torch.cuda.current_stream().cuda_stream, Matrices(a, bs, [out], *scales))
    torch.cuda.synchronize()
    outs = [torch.zeros(calls, rows, n, dtype=torch.bfloat16, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for i in range(calls):
        for stream, (a, bs, *scales), out in zip(streams, given, outs, strict=True):
            made(stream.cuda_stream, Matrices(a, bs, [out[i]], *scales))
    torch.cuda.synchronize()
    unlike = sum(int((out != each).sum()) for out, each in zip(outs, wanted, strict=True))
    return {
        "streams": f"{kind} {k} x {n}",
        "takes": type(made).__name__,
        "elements": 2 * calls * rows * n,
        "unlike": unlike,
    }


# --- time ----------------------------------------------------------------------------------------------------------
def compare(kind: str, bs: list[Tensor], a: Tensor, scales: tuple[Any, Any], whole: Tensor) -> dict[str, Any]:
    """One case; `whole` is the matmul of as many rows as `a` has, and more."""
    (m, k), n = a.shape, whole.shape[1]
    makes: dict[str, Callable[..., Call]] = {"cublas": cublas, "invariant": functools.partial(ours, kind=own_matmul)}
    if m in BOTH:
        makes |= {"few": ours, "gemm": functools.partial(ours, kind=WholeGemm)}
    outs = {name: torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda") for name in makes}
    calls = {name: make(a, bs, outs[name], *scales) for name, make in makes.items()}
    takes = calls["invariant"](0)
    unlike = int((outs["invariant"].view(torch.int16) != whole[:m].view(torch.int16)).sum())
    found = gemm.measure(calls, max(len(bs), 16) if m <= 512 else 6, ROUNDS)
    error = ((outs["invariant"].float() - outs["cublas"].float()).norm() / outs["cublas"].float().norm()).item()
    if not error < 0.01:
        raise SystemExit(f"{kind} {m} x {k} x {n} is wrong: error {error:g}")
    bound = k * n * bs[0].itemsize / MEMORY
    return {
        **{name: round(time, 2) for name, time in found.items()},
        "takes": takes,
        "unlike": unlike,
        "ratio": round(found["cublas"] / found["invariant"], 3),
        "bound": round(bound / found["invariant"], 3),
        "error": round(error, 5),
        "chosen": few_rows_is_faster(m, k, n, bs[0].itemsize, kind == "fp8-rowwise"),
    }


def main() -> None:
    print(json.dumps({"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}), flush=True)
    kinds, ok = sys.argv[1:] or KINDS, True
    for kind in kinds:
        for k, n in ((4096, 1536), (8192, 2560), (1792, 4096)):
            found = check_bits(kind, k, n)
            ok &= found["unlike"] == 0
            print(json.dumps(found), flush=True)
        found = check_streams(kind, 1024, 512)
        ok &= found["unlike"] == 0
        print(json.dumps(found), flush=True)
    for kind in kinds:
        found_by_rows: dict[int, list[dict[str, Any]]] = {}
        for k, n in SHAPES:
            copies = max(4, -(-COPIES_BYTES // (k * n * (2 if kind == "bf16" else 1))))
            a, bs, a_scale, b_scales = operands(kind, max(ROWS), k, n, copies)
            whole = torch.empty(max(ROWS), n, dtype=torch.bfloat16, device="cuda")
            ours(a, bs[:1], whole, a_scale, b_scales, WholeGemm)(0)
            for m in ROWS:
                scale = a_scale[:m] if kind == "fp8-rowwise" and a_scale is not None else a_scale
                try:
                    found = compare(kind, bs, a[:m], (scale, b_scales), whole)
                except RuntimeError as error:  # cuBLAS takes no such matmul
                    print(json.dumps({"case": f"{kind} {m} x {k} x {n}", "refused": str(error)[:200]}), flush=True)
                    continue
                print(json.dumps({"case": f"{kind} {m} x {k} x {n}", **found}), flush=True)
                found_by_rows.setdefault(m, []).append(found)
                ok &= found["unlike"] == 0
            del bs
        for m, rows in found_by_rows.items():
            mean = statistics.geometric_mean
            ratios, bounds = [row["ratio"] for row in rows], [row["bound"] for row in rows]
            chosen = [row["ratio"] for row in rows if row["chosen"]] or [1.0]
            summary = {"mean": round(mean(ratios), 3), "least": min(ratios), "bound": round(mean(bounds), 3)}
            print(json.dumps({"kind": kind, "rows": m, **summary, "least_chosen": min(chosen)}), flush=True)
    raise SystemExit(not ok)


if __name__ == "__main__":
    main()
