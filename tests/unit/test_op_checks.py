"""The fused ops in one process: shapes, refusals, and their autograd kernel."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import imagined_ranks
from reference_cases import BF16, E4M3, FP16, FP32, FP64
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from asynctp_passes import ops
from asynctp_passes.ops import reference
from asynctp_passes.ops.register import short_cut
from asynctp_passes.torch_private import torch_ops


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
    (_,), full = ops.all_gather_matmul(quantized, [weight], gather_dim=1, a_scale=rows, b_scales=[one], **options)
    assert full is not None
    return ops.matmul_reduce_scatter(full, weight, scatter_dim=2, group=group, a_scales=one, b_scales=one)


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


def _every_program(module: Any, group: str) -> Callable[[Tensor, Tensor, Tensor], Any]:
    def program(a: Tensor, b: Tensor, added: Tensor) -> Any:
        one, (aq, bq) = torch.ones(()), (x.to(E4M3) for x in (a, b))
        (rows,), full = module.all_gather_matmul(a, [b], gather_dim=0, group=group, return_a_full=True)
        (scaled,), _ = module.all_gather_matmul(aq, bq, gather_dim=0, group=group, a_scale=one, b_scales=one)
        options: dict[str, Any] = {"added": added, "factors": [2.0, 1.0, 0.5]}
        part = module.matmul_reduce_scatter([rows] * 2, [b.t()] * 2, scatter_dim=0, group=group, **options)
        scales = {"a_scales": one, "b_scales": one}
        parts = module.matmul_reduce_scatter(aq, bq, scatter_dim=0, group=group, sum_dtype=FP32, **scales)
        whole = module.matmul_all_reduce(a, b, group=group, reduce_op="avg")
        return full, scaled, part, parts, whole, module.matmul_all_reduce(aq, bq, group=group, **scales)

    return program


@pytest.mark.parametrize("module", [ops, reference], ids=["ops", "reference"])
def test_programs_called_by_hand_are_traced_whole(fake_group: str, module: Any) -> None:
    inputs = (torch.randn(8, 16), torch.randn(16, 32), torch.randn(32, 16))
    program = _every_program(module, fake_group)
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    with torch.no_grad():
        pairs = zip(compiled(*inputs), program(*inputs), strict=True)
        assert all(one.shape == other.shape and one.dtype == other.dtype for one, other in pairs)


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
    return _gather(a, [WQ], dim, a_scale=a_scale, b_scales=[b_scale], **options)


def _in_blocks(a_scale: Tensor, b_scale: Tensor, rows: int = 8) -> Any:
    """A gather of fp8 [3, rows, 256], and a product with 144 columns."""
    a, b = torch.zeros(3, rows, 256, dtype=E4M3), torch.zeros(256, 144, dtype=E4M3)
    return _gather(a, [b], a_scale=a_scale, b_scales=[b_scale], gather_a_scale=True)


def _scaled_scatter(a_scale: Any = ONE, b_scale: Any = ONE, **options: Any) -> Any:
    return _scatter(XQ, WQ, a_scales=a_scale, b_scales=b_scale, **options)


def _given_rows(rows: int, dim: int = 1) -> Any:
    call = torch.ops.asynctp.matmul_reduce_scatter
    return lambda module: lambda group: call([X], [W], [None], "sum", dim, 4, group, real_rows=rows)


def _given_ranges(rows: list[int], dim: int = 1, **scales: Any) -> Any:
    call = torch.ops.asynctp.all_gather_matmul
    return lambda module: (
        lambda group: call(
            [X, XQ][bool(scales)], [[W, WQ][bool(scales)]], [None], dim, False, 4, group, b_rows=rows, **scales
        )
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
    "more rows than there are": (
        _given_rows(9),
        "real_rows=9 is not valid; it must be from 0 to 8, the size of dimension 1",
    ),
    "rows of columns": (
        _given_rows(3, dim=2),
        "real_rows=3 is not valid; it must be from 0 to 12, the size of dimension 2",
    ),
    "ranges of two operands for one": (
        _given_ranges([0, 8, 32, 8, 32, 32]),
        "b_rows=[0, 8, 32, 8, 32, 32] is not valid; it must be 3 numbers: first, end and every for each operand",
    ),
    "a range that ends too late": (
        _given_ranges([8, 33, 32]),
        "b_rows of bs[0]=(8, 33, 32) is not valid; it must be 0 <= first <= end <= every, a divisor of 96",
    ),
    "a range of no whole number": (_given_ranges([0, 8, 36]), "b_rows of bs[0]=(0, 8, 36) is not valid"),
    "a range of a contraction": (
        _given_ranges([0, 1, 3], dim=2),
        "b_rows=[0, 1, 3] is not valid; it must be absent with scales, or where the last dimension is gathered",
    ),
    "a range with scales": (
        _given_ranges([0, 8, 32], a_scale=ONE, b_scales=[ONE], out_dtype=BF16),
        "b_rows=[0, 8, 32] is not valid; it must be absent with scales",
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
    "fp64 with scales": (_scaled_gather(a=X.double()), "a_shard='float64[3, 8, 16] on cpu' is not valid"),
    "scales for fp32 and fp8": (_scaled_gather(a=X), "of the dtype of a_shard, torch.float32; only fp8 dtypes mix"),
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
    (scaled,), _ = module.all_gather_matmul(XQ, WQ, gather_dim=1, group=fake_group, a_scale=ONE, b_scales=ONE)
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
    options: dict[str, Any] = {"group": fake_group, "biases": [bias], "b_scales": [ONE]}
    (gathered,), _ = ops.all_gather_matmul(XQ, [WQ], gather_dim=1, a_scale=ONE, **options)
    scattered = ops.matmul_reduce_scatter(XQ, WQ, scatter_dim=1, a_scales=ONE, **options)
    reduced = ops.matmul_all_reduce(XQ, WQ, a_scales=ONE, **options)
    for out in (gathered, scattered, reduced):
        with pytest.raises(NotImplementedError, match="no gradient, since quantization has none"):
            out.sum().backward()


def test_a_padded_gradient_raises(fake_group: str) -> None:
    x, given = X.clone().requires_grad_(), ([W], [None], "sum", 1, 4, fake_group)
    out = torch.ops.asynctp.matmul_reduce_scatter([x], *given, real_rows=7)
    with pytest.raises(NotImplementedError, match="a call with real_rows has no gradient; pad the rows of A"):
        out.sum().backward()


def test_a_gradient_of_ranges_raises(fake_group: str) -> None:
    x, given = X.clone().requires_grad_(), ([W], [None], 1, False, 4, fake_group)
    (out,) = torch.ops.asynctp.all_gather_matmul(x, *given, b_rows=[0, 8, 32])
    with pytest.raises(NotImplementedError, match="a call with b_rows has no gradient; gather A, and multiply slices"):
        out.sum().backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a_scale": ONE}, "given=['a_scale'] is not valid; it must be all of a_scale, b_scales, out_dtype, or none"),
        ({"b_scales": [ONE], "out_dtype": BF16}, "given=['b_scales', 'out_dtype'] is not valid"),
        ({"out_dtype": BF16}, "given=['out_dtype'] is not valid"),
        ({"gather_a_scale": True}, "gather_a_scale=True is not valid; it must be False without scales"),
        ({"use_fast_accum": True}, "use_fast_accum=True is not valid; it must be False without scales"),
        ({"along_shard": torch.ones(3, 8, 1)}, "it must be absent without scales"),
    ],
)
def test_scales_are_all_there_or_none(fake_group: str, device: str, given: dict[str, Any], message: str) -> None:
    x, w = X.to(device), W.to(device)
    with pytest.raises(ValueError, match=re.escape(message)):
        torch.ops.asynctp.all_gather_matmul(x, [w], [None], 1, False, 4, fake_group, **given)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_scales_of_a_sum_are_all_there_or_none(fake_group: str, op: str) -> None:
    where = (1, 4) if op.endswith("scatter") else ()
    call = functools.partial(getattr(torch.ops.asynctp, op), [XQ], [WQ], [None], "sum", *where, fake_group)
    scales = {"a_scales": [ONE], "b_scales": [ONE], "out_dtype": BF16}
    assert call(**scales).dtype == BF16
    for left_out in scales:
        with pytest.raises(ValueError, match="must be all of a_scales, b_scales, out_dtype, or none of them"):
            call(**{name: value for name, value in scales.items() if name != left_out})


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
    shard = torch.ops.asynctp.reduce_scatter(whole, "avg", 4, fake_group)
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
    generic = torch_ops.autograd_kernel(
        torch.ops.asynctp_test.total.default, lambda ctx, grad: (grad, [grad] * ctx.count), _remember_count
    )
    library.impl("total", real, "CPU")
    library.impl("total", short_cut(real, through), "AutogradCPU", with_keyset=True)
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
