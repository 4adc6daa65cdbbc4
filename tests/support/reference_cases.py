"""Calls of the fused ops: every rank's inputs, and their truth in fp64. See `test_ops`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from asynctp_passes.ops import plain_collectives

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Largest error relative to the largest element. gloo adds 16-bit numbers in 16 bits, one rank after another.
TOLERANCE = {FP64: 1e-13, FP32: 1e-5, FP16: 4e-3, BF16: 3e-2}


# Tensor cores of the Hopper generation add fp8 products with fewer bits than fp32 has, whatever use_fast_accum says.
FP8_CUDA_TOLERANCE = 5e-4


# --- cases ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gather:
    """One call of a gather op; `lead` and `k` are sizes of the shard."""

    lead: tuple[int, ...]
    k: int
    ns: tuple[int, ...]
    dim: int
    dtype: torch.dtype = BF16
    bias: str = ""  # one letter per product: v vector, r row, - none
    full: bool = False
    scale: str = ""  # "", tensorwise, sharded, replicated, mixed
    out_dtype: torch.dtype = BF16
    along: bool = False  # numbers travel along that are only returned
    blocks: str = ""  # instead of rows and columns: 1x128 x 128x128, ...


@dataclass(frozen=True)
class Scatter:
    """One call of a scatter op; of an all-reduce op when there is no dim to scatter."""

    lead: tuple[int, ...]
    ks: tuple[int, ...]
    n: int
    dim: int | None
    dtype: torch.dtype = BF16
    bias: str = ""
    reduce_op: str = "sum"
    scale: str = ""  # "", tensorwise, rowwise, mixed
    out_dtype: torch.dtype = BF16
    blocks: str = ""
    sum_dtype: torch.dtype | None = None
    added: bool = False
    factors: tuple[float, ...] = ()

    @property
    def result_dtype(self) -> torch.dtype:
        return self.sum_dtype or (self.out_dtype if self.scale else self.dtype)


GATHERS = [
    Gather((8,), 32, (16,), 0),
    Gather((8,), 32, (16,), -2, FP16, "v"),
    Gather((8,), 32, (16, 24), 0, FP32, "vr", full=True),
    Gather((8,), 32, (16,), 1, FP64, full=True),
    Gather((3, 8), 32, (16, 8, 4), 0, bias="-v-"),
    Gather((3, 8), 32, (16, 8), 1, full=True),
    Gather((3, 8), 16, (16, 8), 2, bias="rr", full=True),
    Gather((2, 3, 4), 16, (5,), 1, FP64, "v"),
    Gather((2, 3, 4), 16, (5,), -1, FP32),
    Gather((1,), 32, (16,), 0, FP32),
    Gather((8,), 32, (16,), 0, E4M3, scale="tensorwise"),
    Gather((3, 8), 32, (16, 24), 1, E4M3, "v-", True, "tensorwise"),
    Gather((3, 8), 32, (16, 24), 1, E4M3, "rv", True, "sharded", FP32),
    Gather((3, 8), 32, (16,), 1, E4M3, scale="replicated"),
    Gather((3, 8), 32, (16,), 0, E5M2, scale="sharded", out_dtype=FP16),
    Gather((3, 8), 32, (16,), 2, E4M3, "v", scale="replicated", out_dtype=FP32),
    Gather((1,), 32, (16,), 0, E4M3, scale="sharded"),
    Gather((8,), 32, (16, 16), 0, E4M3, scale="mixed"),
    Gather((8,), 32, (16,), 0, E4M3, scale="tensorwise", along=True),
    Gather((3, 8), 32, (16, 24), 1, E4M3, "v-", True, "replicated", along=True),
    Gather((8,), 256, (16, 144), 0, E4M3, "v-", True, "sharded", blocks="1x128 x 128x128"),
    Gather((3, 8), 160, (144,), 1, E4M3, scale="sharded", out_dtype=FP32, blocks="1x128 x 128x128"),
    Gather((3, 8), 256, (16,), 0, E5M2, "v", False, "sharded", FP16, blocks="1x128 x 1x128"),
    Gather((3, 8), 128, (144,), 1, E4M3, scale="replicated", blocks="1x128 x 128x128"),
    Gather((8,), 128, (144,), 1, E4M3, scale="replicated", blocks="1x128 x 128x128"),
    Gather((2, 128), 256, (16,), 1, E4M3, scale="sharded", blocks="128x128 x 1x128"),
    Gather((256,), 160, (16, 8), 0, E4M3, scale="sharded", blocks="128x128 x 1x128"),
    Gather((128,), 256, (16,), 0, E4M3, scale="replicated", blocks="128x128 x 1x128"),
    Gather((8,), 256, (144,), 0, E4M3, scale="replicated", along=True, blocks="1x128 x 128x128"),
]
SCATTERS = [
    Scatter((8,), (32,), 16, 0),
    Scatter((8,), (32,), 16, 1, FP16, "v"),
    Scatter((8,), (32, 16, 8), 16, -2, FP32, "v-r"),
    Scatter((8,), (32, 16), 16, -1, FP64, reduce_op="avg"),
    Scatter((3, 8), (32,), 16, 1),
    Scatter((4, 3), (32, 32), 16, 0, bias="r-", reduce_op="avg"),
    Scatter((3, 8), (32,), 16, 2, FP32, "r"),
    Scatter((2, 8, 3), (16, 8), 5, 1, FP64, "vv", "avg"),
    Scatter((8,), (32,), 16, 0, E4M3, scale="tensorwise"),
    Scatter((3, 8), (32,), 16, 1, E4M3, scale="tensorwise"),
    Scatter((3, 8), (32, 16), 16, 1, E4M3, "v-", "avg", "rowwise"),
    Scatter((4, 8, 2), (32,), 16, 1, E4M3, scale="rowwise", out_dtype=FP32),
    Scatter((3, 8), (32,), 16, 2, E5M2, "r", "sum", "rowwise", FP16),
    Scatter((4, 3), (32, 16), 16, 0, E4M3, scale="mixed", out_dtype=FP32),
    Scatter((8,), (256, 160), 144, 0, E4M3, "v-", "avg", "rowwise", blocks="1x128 x 128x128"),
    Scatter((3, 8), (256,), 16, 1, E4M3, scale="rowwise", out_dtype=FP32, blocks="1x128 x 1x128"),
    Scatter((3, 8), (128,), 144, 2, E5M2, scale="rowwise", blocks="1x128 x 128x128"),
    Scatter((512,), (160,), 16, 0, E4M3, scale="rowwise", blocks="128x128 x 1x128"),
    Scatter((3, 8), (32,), 16, 1, bias="v", sum_dtype=FP32),
    Scatter((8,), (32, 16, 8), 16, 0, FP16, "v-r", "avg", sum_dtype=FP32),
    Scatter((3, 8), (32, 16), 16, 2, E4M3, scale="rowwise", sum_dtype=FP32),
    Scatter((3, 8), (32,), 16, 1, added=True),
    Scatter((8,), (32, 16), 16, -2, FP16, "v-", "avg", added=True),
    Scatter((3, 8), (32,), 16, 2, E4M3, scale="rowwise", added=True),
    Scatter((8,), (32,), 16, 0, sum_dtype=FP32, added=True),
    Scatter((3, 8), (32,), 16, 1, bias="v", factors=(-0.5,)),
    Scatter((8,), (32, 16), 16, -2, FP16, "v-", "avg", factors=(2.0, -1.0)),
    Scatter((3, 8), (32,), 16, 2, E4M3, scale="rowwise", sum_dtype=FP32, factors=(2.0**-20,)),
    Scatter((8,), (32, 16), 16, 0, FP32, added=True, factors=(1.0, 4.0, 0.25)),
]
# Of 4 ranks, not all divide the rows of all.
ALL_REDUCES = [
    Scatter((8,), (32,), 16, None),
    Scatter((3,), (32, 16), 16, None, FP32, "vr"),
    Scatter((2, 5), (32, 16, 8), 5, None, FP64, "v-r", "avg"),
    Scatter((4, 2), (32,), 16, None, FP16, "v", "avg"),
    Scatter((8,), (32,), 16, None, E4M3, scale="tensorwise"),
    Scatter((3, 4), (32, 16), 16, None, E4M3, "v-", "avg", "rowwise", FP32),
    Scatter((7,), (32,), 16, None, E5M2, "r", "sum", "mixed", FP16),
    Scatter((2, 6), (256, 160), 144, None, E4M3, scale="rowwise", blocks="1x128 x 128x128"),
    Scatter((3, 128), (256,), 16, None, E4M3, scale="rowwise", blocks="128x128 x 1x128"),
    Scatter((3,), (32, 16), 16, None, bias="v-", reduce_op="avg", sum_dtype=FP32),
    Scatter((2, 4), (32,), 16, None, E4M3, scale="tensorwise", out_dtype=FP16, sum_dtype=FP32),
    Scatter((2, 4), (32, 16), 16, None, FP32, "-r", added=True),
    Scatter((3,), (32,), 16, None, E4M3, "v", "avg", "rowwise", sum_dtype=FP32, added=True),
    Scatter((2, 4), (32, 16), 16, None, FP64, "vr", factors=(-1.0, 2.0**-40)),
    Scatter((3,), (32,), 16, None, BF16, reduce_op="avg", sum_dtype=FP32, added=True, factors=(-1.0, 8.0)),
    Scatter((2, 4), (32, 16), 16, None, E4M3, scale="mixed", out_dtype=FP32, factors=(0.5, 0.5)),
]


REDUCTIONS = [*SCATTERS, *ALL_REDUCES]
ONE_OF_EACH = [GATHERS[6], GATHERS[12], SCATTERS[5], SCATTERS[10], ALL_REDUCES[1], ALL_REDUCES[5]]
SUMMED_IN_FP32 = [case for case in REDUCTIONS if case.sum_dtype is not None]
WITH_OPTIONS = [case for case in REDUCTIONS if case.sum_dtype is not None or case.added or case.factors]


# --- inputs: every rank can make every rank's -------------------------------------------------------------
def _random(seed: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randn(shape, generator=generator, dtype=FP64).to(dtype)


def _positive(seed: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    return _random(seed, shape, FP32).abs() + 0.25


def _scale_shape(blocks: str, side: int, shape: tuple[int, ...], rows: int, depth: int) -> tuple[int, ...]:
    """The shape of the scales of a matrix, of which dimensions `rows` and `depth` are the rows (or columns) and K.

    One for each row, or for each block of those that `blocks` has for this side.
    """
    sizes, kind = list(shape), blocks.split(" x ")[side] if blocks else "rows"
    sizes[depth] = -(-shape[depth] // 128) if blocks else 1
    sizes[rows] = -(-shape[rows] // 128) if kind == "128x128" else shape[rows]
    return tuple(sizes)


def _weight(seed: tuple[int, ...], k: int, n: int, dtype: torch.dtype) -> Tensor:
    """Column-major, as a transposed `nn.Linear` weight is."""
    return _random(seed, (n, k), dtype).t()


def _biases(seed: int, kinds: str, ns: tuple[int, ...], dtype: torch.dtype) -> list[Tensor | None]:
    shapes = {"v": lambda n: (n,), "r": lambda n: (1, n)}
    kinds = kinds or "-" * len(ns)
    return [
        None if kind == "-" else _random((seed, 7, i), shapes[kind](n), dtype)
        for i, (kind, n) in enumerate(zip(kinds, ns, strict=True))
    ]


def _gather_inputs(case: Gather, rank: int, world_size: int) -> dict[str, Any]:
    """The op's arguments on one rank. A shard is a slice, so that its strides are not contiguous."""
    shape = (*case.lead, case.k)
    dim = case.dim % len(shape)
    inner = case.k * (world_size if dim == len(shape) - 1 else 1)
    inputs: dict[str, Any] = {
        "a_shard": _random((rank, 1), (*case.lead, 2 * case.k), case.dtype)[..., : case.k],
        "bs": [_weight((rank, 2, i), inner, n, case.dtype) for i, n in enumerate(case.ns)],
        "biases": _biases(rank, case.bias, case.ns, case.out_dtype if case.scale else case.dtype),
    }
    if case.scale:
        full = plain_collectives.gathered_shape(shape, dim, world_size)
        a_scales = {
            "tensorwise": lambda: _positive((0, 3), ()),
            "sharded": lambda: _positive((rank, 3), _scale_shape(case.blocks, 0, shape, -2, -1)),
            "replicated": lambda: _positive((0, 3), _scale_shape(case.blocks, 0, full, -2, -1)),
            "mixed": lambda: _positive((0, 3), (1,)),
        }
        rowwise = [
            case.scale in ("sharded", "replicated") or (case.scale == "mixed" and i) for i in range(len(case.ns))
        ]
        inputs["a_scale"] = a_scales[case.scale]()
        inputs["b_scales"] = [
            _positive((rank, 4, i), _scale_shape(case.blocks, 1, (inner, n), 1, 0) if wide else (1,))
            for i, (n, wide) in enumerate(zip(case.ns, rowwise, strict=True))
        ]
        inputs["along"] = _positive((rank, 5), (*case.lead, 2))[..., :1]
    return inputs


def _scatter_inputs(case: Scatter, rank: int) -> dict[str, Any]:
    ns = (case.n,) * len(case.ks)
    inputs: dict[str, Any] = {
        "a_parts": [_random((rank, 1, i), (*case.lead, 2 * k), case.dtype)[..., :k] for i, k in enumerate(case.ks)],
        "b_parts": [_weight((rank, 2, i), k, case.n, case.dtype) for i, k in enumerate(case.ks)],
        "biases": _biases(rank, case.bias, ns, case.out_dtype if case.scale else case.dtype),
    }
    if case.added:  # with other strides
        inputs["term"] = _random((rank, 6), (case.n, *case.lead), case.result_dtype).movedim(0, -1)
    if case.scale:
        rowwise = [case.scale == "rowwise" or (case.scale == "mixed" and i > 0) for i in range(len(case.ks))]
        inputs["a_scales"] = [
            _positive((rank, 3, i), _scale_shape(case.blocks, 0, (*case.lead, k), -2, -1) if wide else ())
            for i, (k, wide) in enumerate(zip(case.ks, rowwise, strict=True))
        ]
        inputs["b_scales"] = [
            _positive((rank, 4, i), _scale_shape(case.blocks, 1, (k, case.n), 1, 0)) for i, k in enumerate(case.ks)
        ]
    return inputs


# --- fp64 truth from all ranks' inputs, without any collective ----------------------------------------------
def _exact(
    a: Tensor, b: Tensor, bias: Tensor | None, a_scale: Tensor | None = None, b_scale: Tensor | None = None
) -> Tensor:
    if a_scale is not None and b_scale is not None:
        a, b = a.double() * _for_each(a_scale, a.shape), b.double() * _for_each(b_scale, b.shape)
    product = a.double() @ b.double()
    return product if bias is None else product + bias.double()


def _for_each(scale: Tensor, shape: torch.Size) -> Tensor:
    """fp64 scales, one for each element: those of blocks repeated 128 times, others broadcast."""
    scale = scale.double()
    for dim in (-2, -1) if scale.ndim > 1 else ():
        if scale.shape[dim] not in (1, shape[dim]):
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, shape[dim])
    return scale


def _gather_truth(case: Gather, rank: int, world_size: int) -> list[Tensor]:
    everyone = [_gather_inputs(case, other, world_size) for other in range(world_size)]
    mine = everyone[rank]
    a_full = torch.cat([inputs["a_shard"].double() for inputs in everyone], case.dim)
    a_scale, b_scales = mine.get("a_scale"), mine.get("b_scales", [None] * len(case.ns))
    if case.scale == "sharded":
        a_scale = torch.cat([inputs["a_scale"] for inputs in everyone], case.dim)
    outs = [
        _exact(a_full, b, bias, a_scale, b_scale)
        for b, bias, b_scale in zip(mine["bs"], mine["biases"], b_scales, strict=True)
    ]
    along = [torch.cat([inputs["along"].double() for inputs in everyone], case.dim)] if case.along else []
    return [*outs, *([a_full] if case.full else []), *along]


def _true_sum(case: Scatter, products: list[Tensor], term: Tensor | None) -> Tensor:
    """What a rank adds up."""
    each, whole = list(case.factors or [1.0] * len(products)), 1.0
    if len(each) > len(products):
        whole = each.pop()
    others = [] if term is None else [term.double()]
    return torch.stack([*(x * factor for x, factor in zip(products, each, strict=True)), *others]).sum(0) * whole


def _scatter_truth(case: Scatter, rank: int, world_size: int) -> Tensor:
    total = torch.zeros((), dtype=FP64)
    for other in range(world_size):
        inputs = _scatter_inputs(case, other)
        none = [None] * len(case.ks)
        columns = (inputs["a_parts"], inputs["b_parts"], inputs["biases"])
        scales = (inputs.get("a_scales", none), inputs.get("b_scales", none))
        total = total + _true_sum(
            case, [_exact(*one) for one in zip(*columns, *scales, strict=True)], inputs.get("term")
        )
    shard = total if case.dim is None else total.chunk(world_size, case.dim)[rank]
    return shard / world_size if case.reduce_op == "avg" else shard


# --- calls -----------------------------------------------------------------------------------------------------
def _gather_call(case: Gather, x: dict[str, Any], size: int, group: Any) -> tuple[Any, tuple[Any, ...]]:
    """The op and its positional arguments."""
    operands = (x["a_shard"], x["bs"], x["biases"], case.dim, case.full, size, group)
    if not case.scale:
        return torch.ops.asynctp.all_gather_matmul, operands
    scales = (x["a_scale"], x["b_scales"], case.scale == "sharded", case.out_dtype, False)
    return torch.ops.asynctp.all_gather_matmul, (*operands, *scales, *([x["along"]] if case.along else []))


def _scatter_call(case: Scatter, x: dict[str, Any], size: int, group: Any) -> tuple[Any, tuple[Any, ...]]:
    where = (case.reduce_op,) if case.dim is None else (case.reduce_op, case.dim)
    scales = (x["a_scales"], x["b_scales"], case.out_dtype, False) if case.scale else (None, None, None, False)
    given = (*scales, case.sum_dtype, x.get("term"), list(case.factors) or None)
    given = given[
        : max((index for index, value in enumerate(given, 1) if value is not None and value is not False), default=0)
    ]
    ending = ((group,) if case.dim is None else (size, group)) + given
    op = getattr(torch.ops.asynctp, f"matmul_{'all_reduce' if case.dim is None else 'reduce_scatter'}")
    return op, (x["a_parts"], x["b_parts"], x["biases"], *where, *ending)


def _call(case: Gather | Scatter, rank: int, size: int, group: Any) -> tuple[Any, tuple[Any, ...]]:
    if isinstance(case, Gather):
        return _gather_call(case, _gather_inputs(case, rank, size), size, group)
    return _scatter_call(case, _scatter_inputs(case, rank), size, group)


def _truth(case: Gather | Scatter, rank: int, size: int) -> list[Tensor]:
    if isinstance(case, Gather):
        return _gather_truth(case, rank, size)
    return [_scatter_truth(case, rank, size)]


def _flat_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    actual = actual.cpu()
    if actual.shape != expected.shape:
        return math.inf
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def _problems(case: Gather | Scatter, op: Any, args: tuple[Any, ...], truth: list[Tensor]) -> list[str]:
    """What is wrong with one call: values, layout, aliasing, or a fake implementation that disagrees."""
    before = [tensor.clone() for tensor in _flat_tensors(args)]
    outs = _flat_tensors(op(*args))
    tolerance = TOLERANCE[case.out_dtype if case.scale else case.dtype]
    if case.scale and outs[0].is_cuda:
        tolerance = max(tolerance, FP8_CUDA_TOLERANCE)
    found = []
    for i, (out, expected) in enumerate(zip(outs, truth, strict=True)):
        error = _relative_error(out, expected)
        if not error <= tolerance:
            found.append(f"result {i}: relative error {error:.2g} > {tolerance:.2g}")
        if not out.is_contiguous():
            found.append(f"result {i} is not contiguous: strides {out.stride()}")
    if not all(torch.equal(x.float(), y.float()) for x, y in zip(before, _flat_tensors(args), strict=True)):
        found.append("an input was changed")
    inputs = {tensor.untyped_storage().data_ptr() for tensor in _flat_tensors(args)}
    storages = [out.untyped_storage().data_ptr() for out in outs]
    if inputs & set(storages) or len(set(storages)) != len(storages):
        found.append("a result shares memory with an input or another result")
    return found + _fake_problems(op, args, outs)


def _fake_problems(op: Any, args: tuple[Any, ...], outs: list[Tensor]) -> list[str]:
    with FakeTensorMode() as mode:
        fakes = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, args)
        fake_outs = _flat_tensors(op(*fakes))
    metas = _flat_tensors(op(*torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to("meta"), args)))
    return [
        f"{kind} result {i} is {fake.dtype}{fake.shape}{fake.stride()}, not {out.dtype}{out.shape}{out.stride()}"
        for kind, imagined in (("fake", fake_outs), ("meta", metas))
        for i, (fake, out) in enumerate(zip(imagined, outs, strict=True))
        if (fake.shape, fake.stride(), fake.dtype) != (out.shape, out.stride(), out.dtype)
    ]


def _all_problems(rank: int, size: int, cases: list[Gather | Scatter], group: Any) -> dict[str, list[str]]:
    return {str(case): _problems(case, *_call(case, rank, size, group), _truth(case, rank, size)) for case in cases}
