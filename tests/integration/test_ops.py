"""The fused ops and the reference: against fp64 truth on real ranks, and as citizens of torch.library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreter import interpreter_fault
from profiles import THOROUGH
from ranks import imagined_ranks, run_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from asynctp_passes import compat, ops
from asynctp_passes.ops import collectives, reference

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
        full = reference.gathered_shape(shape, dim, world_size)
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
    if not case.scale:
        return torch.ops.asynctp.all_gather_matmul, (
            x["a_shard"],
            x["bs"],
            x["biases"],
            case.dim,
            case.full,
            size,
            group,
        )
    operands = (x["a_shard"], x["a_scale"], x["bs"], x["b_scales"], x["biases"], case.dim, case.scale == "sharded")
    options = (case.out_dtype, False, case.full, size, group, *([x["along"]] if case.along else []))
    return torch.ops.asynctp.all_gather_scaled_matmul, (*operands, *options)


def _scatter_call(case: Scatter, x: dict[str, Any], size: int, group: Any) -> tuple[Any, tuple[Any, ...]]:
    where = (case.reduce_op,) if case.dim is None else (case.reduce_op, case.dim)
    given = (case.sum_dtype, x.get("term"), list(case.factors) or None)
    given = given[: max((index for index, value in enumerate(given, 1) if value is not None), default=0)]
    ending = ((group,) if case.dim is None else (size, group)) + given
    kind = "all_reduce" if case.dim is None else "reduce_scatter"
    if not case.scale:
        op = getattr(torch.ops.asynctp, f"matmul_{kind}")
        return op, (x["a_parts"], x["b_parts"], x["biases"], *where, *ending)
    operands = (x["a_parts"], x["b_parts"], x["a_scales"], x["b_scales"], x["biases"], *where)
    return getattr(torch.ops.asynctp, f"scaled_matmul_{kind}"), (*operands, case.out_dtype, False, *ending)


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


# --- one program per world size, judged case by case --------------------------------------------------------------
def _reference_ranks(rank: int, world_size: int) -> dict[str, Any]:
    world = dist.group.WORLD
    results: dict[str, Any] = _all_problems(rank, world_size, [*GATHERS, *REDUCTIONS], world.group_name)
    results["hand"] = _hand_problems(rank, world_size)
    results["alone"] = _alone_problems(rank, world_size)
    results["gradients"] = _gradient_problems(rank, world_size)
    results["summed in fp32"] = _summed_problems(rank, world_size)
    return results


def _summed_problems(rank: int, world_size: int) -> list[str]:
    """With a `sum_dtype`, bit for bit what a program does that converts each product: round, convert, add, reduce."""
    found = []
    for case in (case for case in SUMMED_IN_FP32 if not case.scale):
        x = _scatter_inputs(case, rank)
        biases = [torch.zeros(case.n) if bias is None else bias for bias in x["biases"]]
        terms = zip(x["a_parts"], x["b_parts"], biases, strict=True)
        products = [torch.addmm(bias.to(a.dtype), a.flatten(0, -2), b) for a, b, bias in terms]
        each, rest = case.factors[: len(products)] or [1.0] * len(products), case.factors[len(products) :]
        terms = [product.float() * factor for product, factor in zip(products, each, strict=True)]
        total = sum(terms[1:], terms[0]).view(*case.lead, case.n)
        total = (total + x["term"] if case.added else total) * (rest[0] if rest else 1)
        dist.all_reduce(total)
        total = total / world_size if case.reduce_op == "avg" else total
        wanted = total if case.dim is None else total.chunk(world_size, case.dim)[rank]
        op, args = _call(case, rank, world_size, dist.group.WORLD.group_name)
        error = _relative_error(op(*args), wanted)
        if error > 2**-22:  # of fp32 sums in another order, and far less than a product's rounding
            found.append(f"{case}: relative error {error:.2g}")
    return found


def _hand_problems(rank: int, world_size: int) -> list[str]:
    """The Python functions of `ops` and `reference`, under every spelling of a group, equal the ops bit for bit."""
    mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    world = dist.group.WORLD
    found = []
    for spelling in (world.group_name, world, mesh, mesh["tp"], (mesh, 0), (mesh, "tp")):
        for module in (ops, reference):
            for case in (*ONE_OF_EACH, *WITH_OPTIONS):
                op, args = _call(case, rank, world_size, world.group_name)
                expected, actual = (
                    _flat_tensors(op(*args)),
                    _flat_tensors(_by_hand(module, case, rank, world_size, spelling)),
                )
                if not all(torch.equal(x, y) for x, y in zip(expected, actual, strict=True)):
                    found.append(f"{module.__name__} with group {spelling}: {case} differs")
    return found


def _by_hand(module: Any, case: Gather | Scatter, rank: int, size: int, group: Any) -> Any:
    inputs = _gather_inputs(case, rank, size) if isinstance(case, Gather) else _scatter_inputs(case, rank)
    return _by_hand_with(module, case, inputs, group)


def _by_hand_with(module: Any, case: Gather | Scatter, x: dict[str, Any], group: Any) -> Any:
    scaled = {"out_dtype": case.out_dtype} if case.scale else {}
    if isinstance(case, Gather):
        options = {"gather_dim": case.dim, "group": group, "biases": x["biases"], "return_a_full": case.full, **scaled}
        if not case.scale:
            return module.all_gather_matmul(x["a_shard"], x["bs"], **options)
        options["gather_a_scale"] = case.scale == "sharded"
        return module.all_gather_scaled_matmul(x["a_shard"], x["a_scale"], x["bs"], x["b_scales"], **options)
    options = {
        "group": group,
        "biases": x["biases"],
        "reduce_op": case.reduce_op,
        "sum_dtype": case.sum_dtype,
        "added": x.get("term"),
        "factors": case.factors or None,
        **scaled,
    }
    if case.dim is None:
        scales = (x["a_scales"], x["b_scales"]) if case.scale else ()
        function = module.scaled_matmul_all_reduce if case.scale else module.matmul_all_reduce
        return function(x["a_parts"], x["b_parts"], *scales, **options)
    options["scatter_dim"] = case.dim
    if not case.scale:
        return module.matmul_reduce_scatter(x["a_parts"], x["b_parts"], **options)
    return module.scaled_matmul_reduce_scatter(x["a_parts"], x["b_parts"], x["a_scales"], x["b_scales"], **options)


def _alone_problems(rank: int, world_size: int) -> list[str]:
    """A group of one rank: nothing to communicate, and still fresh memory."""
    groups = [dist.new_group([other]) for other in range(world_size)]
    cases = [GATHERS[2], GATHERS[6], GATHERS[12], SCATTERS[3], SCATTERS[5], ALL_REDUCES[2]]
    found: list[str] = []
    for case in cases:
        op, args = _call(case, 0, 1, groups[rank])  # the object: what compile_on_one_rank passes
        found += _problems(case, op, args, _truth(case, 0, 1))
    single, matrix = torch.randn(4, 8), torch.randn(8, 6)
    out = ops.matmul_reduce_scatter(single, matrix, scatter_dim=0, group=groups[rank], biases=matrix[0, :6])
    return found if torch.allclose(out, single @ matrix + matrix[0, :6], atol=1e-5) else [*found, "single tensors"]


# --- gradients -----------------------------------------------------------------------------------------------------
GRADIENT_GATHERS = [
    Gather((4,), 8, (6,), 0, FP64),
    Gather((4,), 8, (6, 10, 4), 0, FP64, "vrv", full=True),
    Gather((2, 4), 8, (6, 10), 1, FP64, full=True),
    Gather((2, 4), 8, (6, 10), 2, FP64, "rr"),
]
GRADIENT_SCATTERS = [
    Scatter((8,), (4,), 12, 0, FP64),
    Scatter((8,), (4, 6), 12, 1, FP64, "vr"),
    Scatter((2, 8), (4, 6), 12, 1, FP64, "vv", "avg"),
    Scatter((2, 8), (4,), 12, 2, FP64, reduce_op="avg"),
    Scatter((3,), (4,), 12, None, FP64),
    Scatter((2, 3), (4, 6), 12, None, FP64, "vr", "avg"),
    Scatter((2, 8), (4, 6), 12, 1, BF16, "vv", "avg", sum_dtype=FP32),
    Scatter((2, 3), (4,), 12, None, FP16, sum_dtype=FP32),
    Scatter((2, 8), (4, 6), 12, 1, FP64, "vv", "avg", added=True),
    Scatter((8,), (4,), 12, 0, BF16, sum_dtype=FP32, added=True),
    Scatter((2, 3), (4,), 12, None, FP64, added=True),
    Scatter((2, 3), (4,), 12, None, BF16, reduce_op="avg", sum_dtype=FP32, added=True),
    Scatter((2, 8), (4,), 12, 1, FP64, "v", factors=(-0.5,)),
    Scatter((2, 8), (4, 6), 12, 1, FP64, "vv", "avg", factors=(2.0, -1.0)),
    Scatter((8,), (4, 6), 12, 0, BF16, sum_dtype=FP32, added=True, factors=(0.5, 0.5, -2.0)),
    Scatter((2, 3), (4, 6), 12, None, FP64, added=True, factors=(1.0, 0.5, 2.0)),
]


def _leaves(inputs: dict[str, Any], kinds: str = "abt") -> list[Tensor]:
    """Make the inputs whose names begin with these letters require gradients ("b": weights, biases; "t": the term)."""
    return [leaf.requires_grad_() for name in inputs if name[0] in kinds for leaf in _flat_tensors(inputs[name])]


def _loss(outs: list[Tensor], rank: int) -> Tensor:
    """A different weight for every element, on every rank; of many results only every second has a gradient."""
    used = outs[::2] if len(outs) > 2 else outs
    return torch.stack(
        [(out * _random((rank, 9, i), tuple(out.shape), FP64)).sum() for i, out in enumerate(used)]
    ).sum()


def _true_gradients(case: Gather | Scatter, rank: int, world_size: int) -> list[Tensor]:
    """Differentiate the whole program of all ranks in one process."""
    gathers = isinstance(case, Gather)
    everyone = [_gather_inputs(case, r, world_size) if gathers else _scatter_inputs(case, r) for r in range(world_size)]
    leaves = [_leaves(inputs) for inputs in everyone]
    if gathers:
        a_full = torch.cat([inputs["a_shard"] for inputs in everyone], case.dim)
        results = [[_exact(a_full, b, bias) for b, bias in zip(x["bs"], x["biases"], strict=True)] for x in everyone]
        results = [[*outs, a_full] if case.full else outs for outs in results]
    else:
        parts = [zip(x["a_parts"], x["b_parts"], x["biases"], strict=True) for x in everyone]
        products = [[_exact(*part) for part in rank_parts] for rank_parts in parts]
        sums = [_true_sum(case, mine, x.get("term")) for mine, x in zip(products, everyone, strict=True)]
        total = sum(sums, torch.zeros((), dtype=FP64))
        total = total / world_size if case.reduce_op == "avg" else total
        shards = [total] * world_size if case.dim is None else total.chunk(world_size, case.dim)
        results = [[shard] for shard in shards]
    torch.stack([_loss(outs, r) for r, outs in enumerate(results)]).sum().backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves[rank]]


def _gradients(case: Gather | Scatter, rank: int, world_size: int, kinds: str) -> list[Tensor]:
    group = dist.group.WORLD.group_name
    inputs = _gather_inputs(case, rank, world_size) if isinstance(case, Gather) else _scatter_inputs(case, rank)
    leaves = _leaves(inputs, kinds)
    make_call: Any = _gather_call if isinstance(case, Gather) else _scatter_call
    op, args = make_call(case, inputs, world_size, group)
    outs = op(*args)
    _loss(outs if isinstance(outs, list) else [outs], rank).backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def _gradient_problems(rank: int, world_size: int) -> list[str]:
    found = []
    for case in (*GRADIENT_GATHERS, *GRADIENT_SCATTERS):
        truth = _true_gradients(case, rank, world_size)
        count_a = 1 if isinstance(case, Gather) else len(case.ks)
        end = len(truth) - (isinstance(case, Scatter) and case.added)
        of_kinds = {"abt": truth, "a": truth[:count_a], "b": truth[count_a:end], "t": truth[end:]}
        for kinds, expected in of_kinds.items():
            if not expected:
                continue
            actual = _gradients(case, rank, world_size, kinds)
            errors = [(x - y).abs().max().item() for x, y in zip(actual, expected, strict=True)]
            largest = max(gradient.abs().max().item() for gradient in truth)
            if max(errors) > (1e-10 if case.dtype is FP64 else 2e-2 * largest):
                found.append(f"{case}: gradients of {kinds} are off by {errors}")
    return found


@pytest.fixture(scope="module", params=[2, 4], ids=["2ranks", "4ranks"])
def reference_results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, _reference_ranks)


@pytest.mark.ranks
@pytest.mark.parametrize("case", [*GATHERS, *REDUCTIONS], ids=str)
def test_op_equals_fp64_truth_and_its_fake(reference_results: list[dict[str, Any]], case: Gather | Scatter) -> None:
    assert [result[str(case)] for result in reference_results] == [[]] * len(reference_results)


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["hand", "alone", "gradients", "summed in fp32"])
def test_programs_of_all_ranks(reference_results: list[dict[str, Any]], what: str) -> None:
    assert [result[what] for result in reference_results] == [[]] * len(reference_results)


# --- torch.library ------------------------------------------------------------------------------------------------
# torch's schema test compares inputs with allclose, which has no fp8; `_problems` finds changed inputs instead.
FP8_TESTS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


#: In the default profile: each form, each option, and each option of each form beside another one.
OF_LIBRARY = range(6, len(GRADIENT_SCATTERS)) if THOROUGH else (6, 8, 11, 13, 15)


def _library_ranks(rank: int, world_size: int) -> dict[str, Any]:
    group = dist.group.WORLD.group_name
    results = {}
    for case in (*ONE_OF_EACH, *WITH_OPTIONS):
        op, args = _call(case, rank, world_size, group)
        tests: dict[str, Any] = {"test_utils": FP8_TESTS} if case.scale else {}
        results[str(case)] = torch.library.opcheck(op.default, args, **tests)
    for case in (GRADIENT_GATHERS[1], *(GRADIENT_SCATTERS[number] for number in (2, 5, *OF_LIBRARY))):
        inputs = _gather_inputs(case, rank, world_size) if isinstance(case, Gather) else _scatter_inputs(case, rank)
        _leaves(inputs)
        make_call: Any = _gather_call if isinstance(case, Gather) else _scatter_call
        op, args = make_call(case, inputs, world_size, group)
        results[f"gradient of {case}"] = torch.library.opcheck(op.default, args)
        results[f"compiled {case}"] = {"gradients": _compiled_gradients(case, rank, world_size)}
    return results


def _compiled_gradients(case: Gather | Scatter, rank: int, world_size: int) -> str:
    """Forward and backward through torch.compile equal eager."""
    inputs = _gather_inputs(case, rank, world_size) if isinstance(case, Gather) else _scatter_inputs(case, rank)
    leaves = _leaves(inputs)
    torch._dynamo.reset()
    compiled = torch.compile(_by_hand_with, backend="aot_eager", fullgraph=True)
    outs = _flat_tensors(compiled(ops, case, inputs, dist.group.WORLD.group_name))
    _loss(outs, rank).backward()
    eager = _gradients(case, rank, world_size, "abt")
    same = [torch.allclose(leaf.grad, grad) for leaf, grad in zip(leaves, eager, strict=True) if leaf.grad is not None]
    return "SUCCESS" if all(same) and len(same) >= len(leaves) - 2 else f"differ: {same}"


@pytest.mark.ranks
def test_opcheck_and_compiled_gradients() -> None:
    for result in run_ranks(2, _library_ranks):
        assert {(name, test): "SUCCESS" for name, tests in result.items() for test in tests} == {
            (name, test): outcome for name, tests in result.items() for test, outcome in tests.items()
        }


def test_tags_keep_strides() -> None:
    for name in ops.OPS:
        assert torch.Tag.needs_exact_strides in getattr(torch.ops.asynctp, name).default.tags


# --- one process, a fake group of four ranks ------------------------------------------------------------------------
@pytest.fixture
def fake_group() -> Iterator[str]:
    with imagined_ranks(4):
        yield dist.group.WORLD.group_name


def _dynamic_program(a: Tensor, b: Tensor, group: str) -> Tensor:
    """Up and down projection: `[batch, seq/4, k]` to the same shape."""
    (full,), _ = ops.all_gather_matmul(a, [b], gather_dim=1, group=group)
    again = ops.matmul_all_reduce(full, b.t() @ b, group=group)
    return ops.matmul_reduce_scatter([full, again], [b.t(), b.t()], scatter_dim=1, group=group, reduce_op="avg")


def _dynamic_scaled_program(a: Tensor, b: Tensor, group: str) -> Tensor:
    one = torch.ones((), dtype=FP32)
    quantized, weight = a.to(E4M3), b.to(E4M3)
    rows = a.float().abs().amax(-1, keepdim=True)
    options = {"group": group, "gather_a_scale": True, "return_a_full": True}
    (_,), full = ops.all_gather_scaled_matmul(quantized, rows, [weight], [one], gather_dim=1, **options)
    assert full is not None
    return ops.scaled_matmul_reduce_scatter(full, weight, one, one, scatter_dim=2, group=group)


@pytest.mark.parametrize("program", [_dynamic_program, _dynamic_scaled_program])
def test_dynamic_shapes_add_no_guard(fake_group: str, program: Callable[..., Tensor]) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def remember(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(program, backend=remember, fullgraph=True, dynamic=True)
    for batch, seq, k, n in ((2, 8, 32, 16), (3, 7, 24, 8), (5, 40, 64, 128)):
        a, b = torch.randn(batch, seq, k, dtype=BF16), torch.randn(k, n, dtype=BF16)
        for tensor in (a, b):
            for dim in range(tensor.ndim):
                torch._dynamo.mark_dynamic(tensor, dim)
        expected = (batch, seq, k) if program is _dynamic_program else (batch, 4 * seq, n // 4)
        assert compiled(a, b, fake_group).shape == expected
    assert len(graphs) == 1


def _gather_then_scatter(module: Any, group: str) -> Callable[[Tensor, Tensor], Any]:
    def program(a: Tensor, b: Tensor) -> Any:
        (full,), _ = module.all_gather_matmul(a, [b], gather_dim=-2, group=group)
        return full, module.matmul_reduce_scatter(a, b, scatter_dim=0, group=group)

    return program


def test_symbolic_trace_adds_no_guard_that_the_unfused_program_has_not(fake_group: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    guards, sizes = {}, {}
    for module in (ops, reference):
        program = _gather_then_scatter(module, fake_group)
        traced = make_fx(program, tracing_mode="symbolic")(torch.randn(8, 10, 34), torch.randn(34, 22))
        inputs = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
        sizes[module] = {str(size) for value in inputs for size in value.shape}
        guards[module] = {str(guard.expr) for guard in inputs[0].fake_mode.shape_env.guards}
    assert guards[ops] <= guards[reference]
    assert len(sizes[ops]) == 4, "8, 10, 34 and 22 stay four unknowns"
    assert not any(size.isdigit() for size in sizes[ops])


def _refusal(make: Callable[[str], Any], group: str) -> str:
    with pytest.raises(ValueError, match="asynctp") as caught:
        make(group)
    return str(caught.value)


X, W, V, FULL = torch.zeros(3, 8, 16), torch.zeros(16, 12), torch.zeros(12), torch.zeros(3, 8, 12)
XQ, WQ, ONE = X.to(E4M3), W.to(E4M3), torch.ones(())


def _gather(a: Tensor = X, bs: Any = (W,), dim: int = 1, **options: Any) -> Callable[[Any], Callable[[str], Any]]:
    return lambda module: lambda g: module.all_gather_matmul(a, bs, gather_dim=dim, **{"group": g, **options})


def _scatter(a: Any = X, b: Any = W, dim: int = 1, **options: Any) -> Callable[[Any], Callable[[str], Any]]:
    return lambda module: lambda g: module.matmul_reduce_scatter(a, b, scatter_dim=dim, **{"group": g, **options})


def _all_reduce(a: Any = X, b: Any = W, **options: Any) -> Callable[[Any], Callable[[str], Any]]:
    return lambda module: lambda g: module.matmul_all_reduce(a, b, **{"group": g, **options})


def _scaled_gather(a_scale: Tensor = ONE, b_scale: Tensor = ONE, a: Tensor = XQ, dim: int = 1, **options: Any) -> Any:
    return lambda module: (
        lambda g: module.all_gather_scaled_matmul(a, a_scale, [WQ], [b_scale], gather_dim=dim, group=g, **options)
    )


def _in_blocks(a_scale: Tensor, b_scale: Tensor, rows: int = 8) -> Any:
    """A gather of fp8 [3, rows, 256], and a product with 144 columns."""
    a, b = torch.zeros(3, rows, 256, dtype=E4M3), torch.zeros(256, 144, dtype=E4M3)
    return lambda module: (
        lambda g: module.all_gather_scaled_matmul(
            a, a_scale, [b], [b_scale], gather_dim=1, gather_a_scale=True, group=g
        )
    )


def _scaled_scatter(a_scale: Any = ONE, b_scale: Any = ONE, **options: Any) -> Any:
    return lambda module: (
        lambda g: module.scaled_matmul_reduce_scatter(XQ, WQ, a_scale, b_scale, scatter_dim=1, group=g, **options)
    )


def _in_mesh(dim: Any) -> Any:
    return lambda module: (
        lambda g: _gather(group=(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), dim))(module)(g)
    )


def _distributed(x: Tensor) -> Callable[[Any], Callable[[str], Any]]:
    return lambda module: (
        lambda group: _gather(a=DTensor.from_local(x, dist.init_device_mesh("cpu", (4,))), group=group)(module)(group)
    )


BAD_CALLS = {
    "a DTensor": (_distributed(X), "DTensor'> is not valid; it must be a tensor, or a list of tensors, of this rank"),
    "text for a tensor": (_gather(a="a"), "a_shard=<class 'str'> is not valid; it must be a tensor"),
    "None for operands": (_gather(bs=None), "bs=<class 'NoneType'> is not valid; it must be a tensor"),
    "None for an operand": (_gather(bs=[W, None]), "bs=<class 'NoneType'> is not valid; it must be a tensor"),
    "text for a dim": (_gather(dim="0"), "gather_dim='0' is not valid; it must be an int"),
    "text for a dtype": (_scaled_gather(out_dtype="bfloat16"), "out_dtype='bfloat16' is not valid; it must be a torch"),
    "dim too large": (_gather(dim=3), "gather_dim=3 is not valid; it must be between -3 and 2"),
    "dim too small": (_scatter(dim=-4), "scatter_dim=-4 is not valid; it must be between -3 and 2"),
    "a vector": (_gather(a=torch.zeros(16), dim=0), "dimensions of A=1 is not valid; it must be at least 2"),
    "no operands": (_gather(bs=[]), "number of operands=0"),
    "3-D operand": (_gather(bs=[X]), "bs[0]='float32[3, 8, 16] on cpu' is not valid; it must be a matrix"),
    "inner sizes": (_gather(bs=[W, W.t()]), "bs[1]='float32[12, 16] on cpu' is not valid; it must be of 16 rows"),
    "inner sizes when the contraction is gathered": (_gather(dim=2), "of 64 rows"),
    "mixed dtypes": (_gather(bs=[W.half()]), "of the dtype of a_shard, torch.float32; cast one of them"),
    "integers": (_gather(a=X.int(), bs=[W.int()]), "a_shard='int32[3, 8, 16] on cpu'"),
    "fp8 without scales": (_gather(a=XQ, bs=[WQ]), "a_shard='float8_e4m3fn[3, 8, 16] on cpu'"),
    "devices": (_gather(bs=[W.to("meta")]), "on the device of a_shard, cpu"),
    "too few biases": (_gather(bs=[W, W], biases=[V]), "len(biases)=1 is not valid; it must be 2"),
    "bias size": (_gather(biases=[torch.zeros(16)]), "of shape [12] or [1, 12]"),
    "bias of rows": (_gather(biases=[torch.zeros(8, 12)]), "of shape [12] or [1, 12]"),
    "bias dtype": (_gather(biases=[V.half()]), "a vector [N] or a row [1, N] of a dtype in (torch.float32,)"),
    "unknown group": (_gather(group="nobody"), "group='nobody' is not valid; it must be the name of an existing"),
    "no dimension of the mesh": (
        _in_mesh("pp"),
        "'pp') is not valid; it must be a mesh with the name or the number of",
    ),
    "no such number of dimensions": (_in_mesh(2), "2) is not valid; it must be a mesh with the name or the number of"),
    "no group": (_gather(group=7), "group=7 is not valid; it must be a group name, a ProcessGroup, a DeviceMesh or"),
    "no products": (_scatter(a=[], b=[]), "matmul_reduce_scatter: number of operands=0 is not valid"),
    "no all-reduced products": (_all_reduce(a=[], b=[]), "matmul_all_reduce: number of operands=0 is not valid"),
    "lists of different lengths": (_scatter(a=[X, X], b=[W]), "len(b_parts)=1 is not valid; it must be 2"),
    "products of different shapes": (_scatter(a=[X, X[:, :4]], b=[W, W]), "since the products are added"),
    "products of different ranks": (_scatter(a=[X, X[0]], b=[W, W]), "of the rank and dtype of a_parts[0]"),
    "reduce_op": (_scatter(reduce_op="max"), "reduce_op='max' is not valid; it must be one of ('sum', 'avg')"),
    "sum of narrower numbers": (_scatter(sum_dtype=torch.bfloat16), "sum_dtype=torch.bfloat16 is not valid"),
    "sum of much wider numbers": (_all_reduce(sum_dtype=FP64), "None, the products' torch.float32, or torch.float32"),
    "sum of scaled products as bf16": (_scaled_scatter(out_dtype=FP16, sum_dtype=BF16), "sum_dtype=torch.bfloat16"),
    "added in another dtype": (
        _scatter(added=FULL.half()),
        "added='float16[3, 8, 12] on cpu' is not valid; it must be",
    ),
    "added rows": (_scatter(added=FULL[..., 0]), "a tensor of the result's torch.float32 on cpu, where A is"),
    "added to a sum in fp32": (
        _all_reduce(X.to(BF16), W.to(BF16), sum_dtype=FP32, added=FULL.to(BF16)),
        "of the result's torch.float32",
    ),
    "a factor for no product": (
        _scatter(factors=[1.0, 2.0, 4.0]),
        "len(factors)=3 is not valid; it must be 1, one for",
    ),
    "no factors": (_all_reduce(factors=[]), "len(factors)=0 is not valid; it must be 1, one for each product, or 2"),
    "a factor that rounds": (_all_reduce(factors=[0.3]), "factors[0]=0.3 is not valid; it must be a power of two from"),
    "a factor for the sum that is 0": (_scatter(factors=[2.0, 0.0]), "factors[1]=0.0 is not valid"),
    "a factor without end": (_scaled_scatter(factors=[math.inf]), "factors[0]=inf is not valid"),
    "a large factor": (_all_reduce(factors=[2.0**61]), "from 2^-60 to 2^60, or the negative of one"),
    "one number for factors": (
        _scatter(factors=2.0),
        "factors=2.0 is not valid; it must be a list of numbers, or None",
    ),
    "added in another shape": (_scatter(added=FULL[:1]), "of the products' shape [3, 8, 12]; expand it first"),
    "not divisible": (_scatter(dim=0), "size of dimension 0 of the product=3"),
    "columns not divisible": (_scatter(b=W[:, :10], dim=2), "a multiple of the group's 4 ranks; pad"),
    "bf16 with scales": (_scaled_gather(a=X), "a_shard='float32[3, 8, 16] on cpu' is not valid"),
    "half scale": (_scaled_gather(a_scale=ONE.half()), "a_scale='float16[] on cpu' is not valid; it must be float32"),
    "scale of the shard not gathered": (_scaled_gather(torch.ones(3, 8, 1)), "of shape [3, 32, 1]"),
    "tensorwise scale gathered": (_scaled_gather(gather_a_scale=True), "float32, of shape [3, 8, 1]"),
    "scale gathered along the contraction": (
        _scaled_gather(torch.ones(3, 8, 1), dim=-1, gather_a_scale=True),
        "gather_a_scale=True is not valid; it must be False when the last dimension is gathered",
    ),
    "scales of blocks that are none": (
        _scaled_gather(b_scale=torch.ones(4, 3)),
        "float32, one number, or of shape [1, 12] (rows)",
    ),
    "scales of blocks of A alone": (
        _in_blocks(torch.ones(3, 8, 2), torch.ones(1, 144)),
        "a_scale and b_scales[0]=[[3, 8, 2], [1, 144]] is not valid; it must be scaled in one of these ways: one x one",
    ),
    "scales of large blocks on both sides": (
        _in_blocks(torch.ones(3, 1, 2), torch.ones(2, 2), rows=128),
        "a_scale and b_scales[0]=[[3, 1, 2], [2, 2]] is not valid",
    ),
    "large blocks across rows of two ranks": (
        _in_blocks(torch.ones(3, 1, 2), torch.ones(2, 144)),
        "of shape [3, 8, 1] (rows) or [3, 8, 2] (1x128)",
    ),
    "too few blocks": (_in_blocks(torch.ones(3, 8, 1), torch.ones(1, 2)), "[2, 2] (128x128)"),
    "reduce_op of an all-reduce": (_all_reduce(reduce_op="max"), "it must be one of ('sum', 'avg')"),
    "all-reduced products of different shapes": (
        _all_reduce(a=[X, X[:, :4]], b=[W, W]),
        "since the products are added",
    ),
    "an all-reduced vector": (_all_reduce(a=torch.zeros(16)), "dimensions of A=1 is not valid"),
    "all-reduced over no group": (_all_reduce(group="nobody"), "group='nobody' is not valid"),
    "integer result": (_scaled_gather(out_dtype=torch.int32), "out_dtype=torch.int32"),
    "missing scale": (_scaled_scatter(a_scale=[]), "len(a_scales)=0 is not valid; it must be 1"),
    "scatter scale rows": (_scaled_scatter(a_scale=torch.ones(3, 4, 1)), "of shape [3, 8, 1]"),
    "scatter scale columns": (_scaled_scatter(b_scale=torch.ones(12, 1)), "of shape [1, 12]"),
}


@pytest.mark.parametrize("module", [ops, reference], ids=["ops", "reference"])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call_is_explained(fake_group: str, module: Any, name: str) -> None:
    call, fragment = BAD_CALLS[name]
    assert fragment in _refusal(call(module), fake_group)


@pytest.mark.parametrize("module", [ops, reference], ids=["ops", "reference"])
def test_iterators_and_whatever_counts(fake_group: str, module: Any) -> None:
    (first, second), _ = module.all_gather_matmul(X, iter([W, W]), gather_dim=torch.tensor(1), group=fake_group)
    assert first.shape == second.shape == (3, 32, 12)


@pytest.mark.parametrize("module", [ops, reference], ids=["ops", "reference"])
def test_one_operand_needs_no_list(fake_group: str, module: Any) -> None:
    (out,), _ = module.all_gather_matmul(X, W, gather_dim=1, group=fake_group, biases=V)
    (scaled,), _ = module.all_gather_scaled_matmul(XQ, ONE, WQ, ONE, gather_dim=1, group=fake_group)
    assert out.shape == scaled.shape == (3, 32, 12)


def test_group_size_must_be_the_groups(fake_group: str) -> None:
    op = torch.ops.asynctp.all_gather_matmul
    message = _refusal(lambda group: op(X, [W], [None], 1, False, 2, group), fake_group)
    assert "group_size=2 is not valid; it must be the size of group" in message


def test_a_group_of_another_rank_is_explained(fake_group: str) -> None:
    """A graph out of a cache that ranks share may name one."""
    a, b = torch.ones(2, 4), torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"group='7' is not valid.*TORCHINDUCTOR_CACHE_DIR of its own"):
        torch.ops.asynctp.all_gather_matmul(a, [b], [None], 0, False, 2, "7")


def test_scaled_gradient_raises(fake_group: str) -> None:
    bias = torch.zeros(12, requires_grad=True)
    outs, _ = ops.all_gather_scaled_matmul(XQ, ONE, [WQ], [ONE], gather_dim=1, group=fake_group, biases=[bias])
    with pytest.raises(NotImplementedError, match="no gradient, since quantization has none"):
        outs[0].sum().backward()


def test_gradient_of_a_bias_beside_none_raises(fake_group: str) -> None:
    biases = [torch.zeros(12, requires_grad=True), None]
    for weight in (W, W.clone().requires_grad_()):
        with pytest.raises(NotImplementedError, match="zeros change nothing"):
            ops.all_gather_matmul(X, [W, weight], gather_dim=1, group=fake_group, biases=biases)
        with pytest.raises(NotImplementedError, match="zeros change nothing"):
            ops.matmul_reduce_scatter([X, X], [W, weight], scatter_dim=1, group=fake_group, biases=biases)
    with torch.no_grad():
        ops.all_gather_matmul(X, [W, W], gather_dim=1, group=fake_group, biases=biases)


@pytest.mark.parametrize("dtype", [FP32, torch.int64])
def test_an_average_has_the_dtype_of_what_is_averaged(fake_group: str, dtype: torch.dtype) -> None:
    whole = torch.ones(8, 3, dtype=dtype)
    fake = torch.ops.asynctp.reduce_scatter(whole.to("meta"), "avg", 4, fake_group)
    shard = collectives.reduce_scatter(whole, group=fake_group, reduce_op="avg")
    assert (shard.dtype, shard.shape) == (fake.dtype, fake.shape) == (dtype, (2, 3))


# --- the autograd kernel on CUDA, here on CPU -----------------------------------------------------------------------
@pytest.fixture
def taken() -> Iterator[list[str]]:
    """`torch.ops.asynctp_test.total(a, bs, *, twice=False)` with that kernel; which ways its calls took."""
    ways: list[str] = []

    def real(a: Tensor, bs: list[Tensor], twice: bool = False) -> Tensor:
        ways.append("real")
        return sum(bs, a) * (1 + twice)

    def through(keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        ways.append("dispatcher")
        result: Tensor = generic(keyset, *args, **kwargs)
        return result

    library: Any = torch.library.Library("asynctp_test", "FRAGMENT")
    library.define("total(Tensor a, Tensor[] bs, *, bool twice=False) -> Tensor")
    generic = compat.autograd_kernel(
        torch.ops.asynctp_test.total.default, lambda ctx, grad: (grad, [grad] * ctx.count), _remember_count
    )
    library.impl("total", real, "CPU")
    library.impl("total", ops.short_cut(real, through), "AutogradCPU", with_keyset=True)
    torch.library.register_fake("asynctp_test::total", lambda a, bs, twice=False: a.clone(), lib=library)
    yield ways
    library._destroy()


def _remember_count(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Tensor) -> None:
    ctx.count = len(inputs[1])


class _Watch(TorchDispatchMode):
    """Sees ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.asynctp_test.total.default
        return args[0]


def test_plain_tensors_go_straight_to_the_implementation(taken: list[str]) -> None:
    one, weight = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    total = torch.ops.asynctp_test.total
    assert total(one, [one, one]).tolist() == [3, 3]
    assert total(one, [], twice=True).tolist() == [2, 2]
    with torch.no_grad():
        assert not total(one, [one, weight]).requires_grad
    with torch.inference_mode():
        total(one, [weight])
    assert taken == ["real"] * 4


def test_what_needs_a_gradient_goes_through_the_dispatcher(taken: list[str]) -> None:
    one, weight = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    torch.ops.asynctp_test.total(one, [one, weight]).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]
    assert taken == ["dispatcher", "real"]


def test_what_is_watched_goes_through_the_dispatcher(taken: list[str]) -> None:
    """By a mode, or by a class of tensors that dispatches itself, wherever there is one."""
    one, total = torch.ones(2), torch.ops.asynctp_test.total
    with FakeTensorMode():
        fake = torch.ones(2)
        assert isinstance(total(fake, [fake]), FakeTensor)
    assert isinstance(total(fake, [fake]), FakeTensor)
    with _Watch():
        total(one, [one])
    assert taken == ["dispatcher"] * 3
    taken.clear()
    traced = make_fx(lambda x: total(x, [x]))(one)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [total.default]
    assert taken == ["dispatcher", "real"]
    taken.clear()
    assert isinstance(total(one, [one, TwoTensor(one.clone(), one.clone())]), TwoTensor)
    assert taken == ["dispatcher", "real", "real"], "of both halves"


# --- which implementation runs --------------------------------------------------------------------------------------
@pytest.fixture
def fresh_config() -> Iterator[None]:
    ops.refresh()
    yield
    ops.refresh()


def test_implementation_is_named(fresh_config: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCTP_CPU_IMPLEMENTATION", raising=False)
    assert (ops.implementation("cpu"), ops.implementation("cuda")) == ("sequential", "chosen per call")
    monkeypatch.setenv("ASYNCTP_CPU_IMPLEMENTATION", "interpreted")
    assert ops.implementation("cpu") == "sequential", "the environment is read once"
    ops.refresh()
    assert (ops.implementation("cpu"), ops.implementation("cuda")) == ("interpreted", "chosen per call")
    with pytest.raises(ValueError, match="device_type='xpu'"):
        ops.implementation("xpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "number of arguments=0 is not valid; there must be at least the first 7 of a_parts, b_parts, biases"),
        ([X, W], "number of arguments=2 is not valid"),
        ([[], [], [], "sum", 0, 4, "tp"], "number of operands=0 is not valid; it must be at least 1"),
    ],
)
def test_a_call_that_cannot_be_explained(arguments: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.explain("matmul_reduce_scatter", *arguments)


def _interpreted_ranks(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {"implementation": ops.implementation("cpu")}
    return results | _all_problems(rank, world_size, [*GATHERS, *REDUCTIONS], dist.group.WORLD.group_name)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are spawned now run the Triton kernels in the interpreter."""
    pytest.importorskip("asynctp_kernels", reason="asynctp_kernels is not importable (is triton installed?)")
    if fault := interpreter_fault():
        pytest.skip(fault)
    monkeypatch.setenv("ASYNCTP_CPU_IMPLEMENTATION", "interpreted")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.ranks
def test_interpreted_kernels_equal_fp64_truth(interpreted: None) -> None:
    for result in run_ranks(2, _interpreted_ranks):
        assert result.pop("implementation") == "interpreted"
        assert {case: found for case, found in result.items() if found} == {}


# --- CUDA: the unfused program over NCCL ------------------------------------------------------------------------------
# torch._scaled_mm wants multiples of 16.
CUDA_SCALED: list[Gather | Scatter] = [
    Gather((16,), 32, (16,), 0, E4M3, "v", scale="tensorwise"),
    Gather((3, 16), 32, (16, 48), 1, E4M3, "rv", True, "sharded"),
    Gather((3, 16), 32, (16,), 1, E4M3, "v", scale="replicated", out_dtype=FP32),
    Gather((3, 16), 32, (16,), 2, E4M3, scale="tensorwise", out_dtype=FP16),
    Gather((16,), 32, (16, 32), 0, E4M3, scale="mixed"),
    Scatter((16,), (32,), 16, 0, E4M3, "r", scale="tensorwise", out_dtype=FP16),
    Scatter((3, 16), (32, 64), 32, 1, E4M3, "v-", "avg", "rowwise"),
    Scatter((4, 16), (32, 64), 32, 1, E4M3, scale="mixed", out_dtype=FP32),
    Scatter((3, 16), (32,), 32, 2, E4M3, "v", "sum", "rowwise", FP32),
    Scatter((3, 16), (32, 64), 32, None, E4M3, "v-", "avg", "rowwise"),
    Scatter((7,), (32,), 16, None, E4M3, scale="tensorwise"),
    Gather((16,), 640, (16, 144), 0, E4M3, "v-", True, "sharded", blocks="1x128 x 128x128"),
    Gather((2, 128), 256, (16,), 1, E4M3, "v", scale="replicated", out_dtype=FP32, blocks="128x128 x 1x128"),
    Scatter((3, 16), (256, 640), 144, 1, E4M3, "v-", "avg", "rowwise", blocks="1x128 x 128x128"),
    Scatter((3, 16), (256,), 32, None, E4M3, scale="rowwise", blocks="1x128 x 1x128"),
]


def _cuda_ranks(rank: int, world_size: int) -> dict[str, list[str]]:
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl").group_name
    results = {}
    for case in [case for case in (*GATHERS, *REDUCTIONS) if not case.scale] + CUDA_SCALED:
        op, args = _call(case, rank, world_size, group)
        args = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.cuda(), args)
        results[str(case)] = _problems(case, op, args, _truth(case, rank, world_size))
    return results


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_fp64_truth() -> None:
    for result in run_ranks(min(torch.cuda.device_count(), 4), _cuda_ranks):
        assert {case: found for case, found in result.items() if found} == {}
