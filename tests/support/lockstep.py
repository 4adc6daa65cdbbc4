"""Evaluate one FX graph for all ranks of a group in one process, node by node.

Ordinary ops run once per rank on that rank's tensors. Collectives, and the fused `asynctp::*` ops, are evaluated across
the ranks, straight from their definitions: plain torch, float inputs in float64, one final rounding. Nothing here is
shared with the package under test. A collective is complete as soon as its node is evaluated; `wait_tensor` returns
its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor

__all__ = [
    "GROUP_OPS",
    "TOLERANCE",
    "Groups",
    "alone",
    "bind",
    "concatenated",
    "differences",
    "evaluate",
    "local_op",
    "op_name",
    "scaled_mm_v2",
]

_C10D = torch.ops._c10d_functional
if not hasattr(_C10D, "wait_tensors"):  # torch 2.15 has it
    _NEWER = torch.library.Library("_c10d_functional", "FRAGMENT")
    _NEWER.define("wait_tensors(Tensor[] tensors) -> Tensor[]")
    _NEWER.impl(
        "wait_tensors", lambda tensors: [_C10D.wait_tensor(each) for each in tensors], "CompositeExplicitAutograd"
    )

#: Tuples of ranks by group name. A rank is in exactly one tuple of each group name that the graph uses.
Groups = Mapping[str, Sequence[tuple[int, ...]]]

#: One value for each rank of a group, in group order.
Ranks = Sequence[Any]

#: Evaluates an op for one group: positional arguments of each of its ranks to the result on each of its ranks.
GroupOp = Callable[[Sequence[tuple[Any, ...]]], list[Any]]


def evaluate(
    graph: torch.fx.Graph | torch.fx.GraphModule,
    inputs_per_rank: Sequence[Sequence[Any]],
    groups: Groups | None = None,
) -> list[Any]:
    """Run a graph on every rank at once.

    Args:
        graph: The graph that all ranks run.
        inputs_per_rank: The placeholders' values, in order, for each rank. In-place ops of the graph change them.
        groups: Tuples of ranks by group name. A name that is not listed is the group of all ranks.

    Returns:
        What the graph returns on each rank.
    """
    module, nodes = _module_and_nodes(graph)
    world_size = len(inputs_per_rank)
    environments: list[dict[torch.fx.Node, Any]] = [{} for _ in range(world_size)]
    inputs = [iter(values) for values in inputs_per_rank]
    for node in nodes:
        if node.op == "output":
            return [_resolve(node.args[0], environment) for environment in environments]
        results = _evaluate_node(node, module, inputs, environments, groups or {})
        for environment, result in zip(environments, results, strict=True):
            environment[node] = result
    raise ValueError("the graph has no output")


def op_name(target: Any) -> str:
    """The qualified name of an op (`"aten::mm"`), or the name of a function."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return str(getattr(target, "__name__", target))


def bind(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a communicating op by name, defaults filled in; the group is `group_name`."""
    values = _bind(target, tuple(args), kwargs)
    return dict(zip((argument.name for argument in target._schema.arguments), values, strict=True))


def alone(target: Any, arguments: Mapping[str, Any]) -> Any:
    """What a communicating op gives in a group of one rank. `arguments` are all of them, as from `bind`."""
    names = [argument.name for argument in target._schema.arguments]
    return GROUP_OPS[op_name(target)]([tuple(arguments[name] for name in names)])[0]


def local_op(target: Any) -> Callable[..., Any]:
    """What evaluates an op that does not communicate."""
    function: Callable[..., Any] = _RANK_OPS.get(op_name(target), target)
    return function


def _module_and_nodes(
    graph: torch.fx.Graph | torch.fx.GraphModule,
) -> tuple[torch.nn.Module | None, list[torch.fx.Node]]:
    if isinstance(graph, torch.fx.GraphModule):
        return graph, _nodes_once(graph.graph)
    return graph.owning_module, _nodes_once(graph)


def _nodes_once(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes in order. A rewrite that corrupts the graph's linked list shall fail here, not loop forever."""
    nodes: dict[torch.fx.Node, None] = {}
    for node in graph.nodes:
        if node in nodes:
            raise ValueError(f"the graph lists {node} twice")
        nodes[node] = None
    return list(nodes)


def _resolve(argument: Any, environment: Mapping[torch.fx.Node, Any]) -> Any:
    """Replace nodes by values."""
    return torch.fx.node.map_arg(argument, lambda node: environment[node])


def _evaluate_node(
    node: torch.fx.Node,
    module: torch.nn.Module | None,
    inputs: list[Any],
    environments: list[dict[torch.fx.Node, Any]],
    groups: Groups,
) -> list[Any]:
    if node.op == "placeholder":
        return [next(values) for values in inputs]
    if node.op == "get_attr":
        value = getattr(module, str(node.target))
        return [value] * len(environments)
    if node.op != "call_function":
        raise NotImplementedError(f"{node.op} {node.target}")
    name = op_name(node.target)
    calls = [(_resolve(node.args, env), _resolve(node.kwargs, env)) for env in environments]
    group_op = GROUP_OPS.get(name)
    if group_op is not None:
        bound = [_bind(node.target, args, kwargs) for args, kwargs in calls]
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        place = names.index("group_name") if "group_name" in names else len(names) - 1
        return _across_groups(group_op, bound, groups, place)
    assert callable(node.target)
    function = local_op(node.target)
    return [function(*args, **kwargs) for args, kwargs in calls]


def _bind(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments by position, defaults filled in."""
    values = list(args)
    for argument in target._schema.arguments[len(args) :]:
        values.append(kwargs.get(argument.name, argument.default_value))
    return tuple(values)


def _across_groups(op: GroupOp, calls: Sequence[tuple[Any, ...]], groups: Groups, place: int) -> list[Any]:
    """Evaluate an op, whose argument number `place` is the group, once for every tuple of ranks of that group."""
    group_names = {call[place] for call in calls}
    if len(group_names) != 1:
        raise ValueError(f"ranks disagree on the group: {group_names}")
    everyone = tuple(range(len(calls)))
    results: dict[int, Any] = {}
    for ranks in groups.get(next(iter(group_names)), [everyone]):
        results.update(zip(ranks, op([calls[rank] for rank in ranks]), strict=True))
    if set(results) != set(everyone):
        raise ValueError(f"a group must cover all ranks: {sorted(results)} of {len(calls)}")
    return [results[rank] for rank in everyone]


# --- collectives -------------------------------------------------------------------------------------


def _all_gather_into_tensor(calls: Sequence[tuple[Tensor, int, Any]]) -> list[Tensor]:
    """Every rank gets the concatenation over the first dimension."""
    _check_group_size(calls, calls[0][1])
    return _gathered([call[0] for call in calls], dim=0)


def _reduce_scatter_tensor(calls: Sequence[tuple[Tensor, str, int, Any]]) -> list[Tensor]:
    """Rank i gets block i, over the first dimension, of the reduction."""
    _check_group_size(calls, calls[0][2])
    dtype = calls[0][0].dtype
    return _scattered(_reduced([_wide(call[0]) for call in calls], calls[0][1]), len(calls), 0, dtype)


def _each(op: GroupOp) -> GroupOp:
    """A collective of a list of tensors: that of each."""

    def several(calls: Sequence[tuple[Any, ...]]) -> list[list[Tensor]]:
        count = len(calls[0][0])
        results = [op([(call[0][index], *call[1:]) for call in calls]) for index in range(count)]
        return [list(items) for items in zip(*results, strict=True)]

    return several


def _all_reduce(calls: Sequence[tuple[Tensor, str, Any]]) -> list[Tensor]:
    """Every rank gets the reduction."""
    total = _reduced([_wide(call[0]) for call in calls], calls[0][1])
    return [total.to(call[0].dtype, copy=True) for call in calls]


def _all_reduce_in_place(calls: Sequence[tuple[Tensor, str, Any]]) -> list[Tensor]:
    """As `_all_reduce`, into each rank's own tensor."""
    return [call[0].copy_(total) for call, total in zip(calls, _all_reduce(calls), strict=True)]


def _custom_all_gather(calls: Sequence[tuple[Tensor, int, int, Any]]) -> list[Tensor]:
    """The all-gather of serving frameworks: along any dimension."""
    _check_group_size(calls, calls[0][2])
    return _gathered([call[0] for call in calls], calls[0][1])


def _custom_reduce_scatter(calls: Sequence[tuple[Tensor, int, int, Any]]) -> list[Tensor]:
    """The reduce-scatter of serving frameworks: a sum, along any dimension."""
    _check_group_size(calls, calls[0][2])
    total = _reduced([_wide(call[0]) for call in calls], "sum")
    return _scattered(total, len(calls), calls[0][1], calls[0][0].dtype)


def _custom_all_reduce(calls: Sequence[tuple[Tensor, Any]]) -> list[Tensor]:
    """The all-reduce of serving frameworks: a sum."""
    return _all_reduce([(tensor, "sum", group) for tensor, group in calls])


def _check_group_size(calls: Sequence[tuple[Any, ...]], group_size: int) -> None:
    if group_size != len(calls):
        raise ValueError(f"the graph says {group_size} ranks, the group has {len(calls)}")


def _gathered(shards: Sequence[Tensor], dim: int) -> list[Tensor]:
    return [concatenated(shards, dim) for _ in shards]


def concatenated(shards: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat` of raw elements, which keeps every bit and knows all dtypes; contiguous."""
    integer = {1: torch.uint8, 2: torch.int16}.get(shards[0].element_size())
    if integer is None or not shards[0].is_floating_point():
        return torch.cat([shard.contiguous() for shard in shards], dim)
    return torch.cat([shard.contiguous().view(integer) for shard in shards], dim).view(shards[0].dtype)


def _reduced(values: Sequence[Tensor], reduce_op: str) -> Tensor:
    stacked = torch.stack(list(values))
    if reduce_op == "sum":
        return stacked.sum(0)
    if reduce_op == "avg":
        return stacked.sum(0) / len(values)
    if reduce_op in ("max", "min"):
        return getattr(stacked, f"a{reduce_op}")(0)
    if reduce_op == "product":
        return stacked.prod(0)
    raise NotImplementedError(reduce_op)


def _scattered(total: Tensor, count: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    if total.shape[dim] % count:
        raise ValueError(f"{tuple(total.shape)} cannot be scattered over {count} ranks along {dim}")
    return [block.to(dtype).clone(memory_format=torch.contiguous_format) for block in total.chunk(count, dim)]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


# --- matmuls -----------------------------------------------------------------------------------------


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """`aten._scaled_mm` for scales of any kind (its CPU kernel knows tensorwise ones only)."""
    if scale_result is not None:
        raise NotImplementedError("scale_result")
    product = _product(_scaled_rows(a, scale_a), _scaled_columns(b, scale_b), bias)
    return product.to(out_dtype or a.dtype)


def scaled_mm_v2(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """`aten._scaled_mm_v2` for scales without swizzle; those of blocks as it has them."""
    pair, (of_a, of_b) = (recipe_a, recipe_b), (scale_a[0], scale_b[0])
    if pair not in (([0], [0]), ([1], [1]), ([4], [5]), ([5], [4]), ([4], [4])) or swizzle_a or swizzle_b:
        raise NotImplementedError(f"recipes {recipe_a} and {recipe_b}")
    if contraction_dim:
        raise NotImplementedError(f"contraction over {contraction_dim}")
    blocks = -(-a.shape[1] // 128)
    if recipe_a == [5]:
        of_a = _unpadded(of_a, blocks).t()
    if recipe_b in ([4], [5]):
        of_b = of_b.t() if recipe_b == [4] else _unpadded(of_b, blocks)
    return _scaled_mm(a, b, of_a, of_b, bias, None, out_dtype)


def _unpadded(scale: Tensor, blocks: int) -> Tensor:
    """Scales [K/128, *] of 128x128 blocks, without the rows that make those a multiple of 4."""
    if scale.shape[0] != -(-blocks // 4) * 4:
        raise ValueError(f"{scale.shape[0]} scales along K for {blocks} blocks")
    return scale[:blocks]


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.matmul(*(x.double() if x.dtype == torch.int8 else _wide(x) for x in (a, b)))
    return product if bias is None else product + _wide(bias)


def _scaled_rows(a: Tensor, scale: Tensor) -> Tensor:
    """Dequantize: one scale, one per row (all dimensions but the last, in any shape), or one per block of 128 of K."""
    if scale.ndim == a.ndim and scale.shape[-1] == -(-a.shape[-1] // 128):
        return a.double() * _spread(_spread(scale, a, -1), a, -2)
    shape = () if scale.numel() == 1 else (*a.shape[:-1], 1)
    return a.double() * scale.double().reshape(shape)


def _scaled_columns(b: Tensor, scale: Tensor) -> Tensor:
    """Dequantize: one scale, one per column, or one per block of 128 of K."""
    if scale.ndim == 2 and scale.shape[0] == -(-b.shape[0] // 128):
        return b.double() * _spread(_spread(scale, b, -1), b, -2)
    shape = () if scale.numel() == 1 else (1, -1)
    return b.double() * scale.double().reshape(shape)


def _spread(scale: Tensor, like: Tensor, dim: int) -> Tensor:
    """Scales of blocks of 128, one for each index of a dimension."""
    if scale.shape[dim] == like.shape[dim]:
        return scale.double()
    if scale.shape[dim] != -(-like.shape[dim] // 128):
        raise ValueError(f"scales {list(scale.shape)} of {list(like.shape)}")
    return scale.double().repeat_interleave(128, dim).narrow(dim, 0, like.shape[dim])


# --- fused ops ---------------------------------------------------------------------------------------


def _all_gather_matmul(calls: Sequence[tuple[Any, ...]]) -> list[list[Tensor]]:
    """outs[i] = all_gather(a_shard, gather_dim) @ bs[i] + biases[i]; then a_full, if asked for.

    With scales, of dequantized operands; the row scales may be gathered too. Then numbers that travel, if there are.
    With `b_rows`, of some rows for each operand.
    """
    _, _, _, gather_dim, _, group_size, _, _, _, gather_a_scale, *_ = calls[0]
    _check_group_size(calls, group_size)
    a_fulls = _gathered([call[0] for call in calls], gather_dim)
    a_scales = [call[7] for call in calls]
    if gather_a_scale:
        a_scales = _gathered(a_scales, gather_dim)
    along = [call[12] for call in calls if call[12] is not None]
    along_full = _gathered(along, gather_dim)[:1] if along else []
    results = []
    for call, a_full, a_scale in zip(calls, a_fulls, a_scales, strict=True):
        _, bs, biases, _, return_a_full, _, _, _, b_scales, _, out_dtype, *_ = call
        a_wide, dtype = a_full, torch.int32 if a_full.dtype == torch.int8 else a_full.dtype
        if b_scales is not None:
            a_wide, dtype = _scaled_rows(a_full, a_scale), out_dtype
            bs = [_scaled_columns(b, scale) for b, scale in zip(bs, b_scales, strict=True)]
        taken = [a_wide] * len(bs)
        if call[14] is not None:
            numbers = iter(call[14])
            rows, ends = a_wide.flatten(0, -2), zip(numbers, numbers, numbers, strict=True)
            taken = [torch.cat([run[first:end] for run in rows.split(every)]) for first, end, every in ends]
        operands = zip(taken, bs, _padded(biases, len(bs)), strict=True)
        outs = [_product(a, b, bias).to(dtype) for a, b, bias in operands]
        results.append([*outs, *([a_full] if return_a_full else []), *(part.clone() for part in along_full)])
    return results


def _matmul_reduce_scatter(calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """reduce_scatter((sum_i (a_parts[i] @ b_parts[i] + biases[i]) * factors[i] + added) * factor, scatter_dim).

    A rank's sum is zeros from its `real_rows` on.
    """
    a_parts, _, _, reduce_op, scatter_dim, group_size, _, *optional = calls[0]
    _check_group_size(calls, group_size)
    parts = [_partial(*call[:3], *call[7:-2], call[-1]) for call in calls]
    for part, (*_, real_rows, _) in zip(parts, calls, strict=True):
        if real_rows is not None:
            part.narrow(scatter_dim, real_rows, part.shape[scatter_dim] - real_rows).zero_()
    total = _reduced(parts, reduce_op)
    return _scattered(total, len(calls), scatter_dim, _result_dtype(a_parts, *optional))


def _matmul_all_reduce(calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """all_reduce((sum_i (a_parts[i] @ b_parts[i] + biases[i]) * factors[i] + added) * factor)."""
    _, _, _, reduce_op, *_ = calls[0]
    total = _reduced([_partial(*call[:3], *call[5:]) for call in calls], reduce_op)
    return [total.to(_result_dtype(call[0], *call[5:]), copy=True) for call in calls]


def _result_dtype(
    a_parts: Sequence[Tensor],
    a_scales: object,
    b_scales: object,
    out_dtype: torch.dtype | None,
    fast: bool,
    sum_dtype: torch.dtype | None,
    *_: object,
) -> torch.dtype:
    return sum_dtype or out_dtype or a_parts[0].dtype


def _partial(
    a_parts: Sequence[Tensor],
    b_parts: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    a_scales: Sequence[Tensor] | None,
    b_scales: Sequence[Tensor] | None,
    out_dtype: torch.dtype | None,
    fast: bool,
    sum_dtype: torch.dtype | None,
    added: Tensor | None,
    factors: Sequence[float] | None,
    accord: int,
) -> Tensor:
    """One rank's term of the sum over ranks; with a `sum_dtype`, of products that are rounded as aten's are.

    With scales, of dequantized operands.
    """
    if a_scales is not None and b_scales is not None:
        wide_as = [_scaled_rows(a, scale) for a, scale in zip(a_parts, a_scales, strict=True)]
        wide_bs = [_scaled_columns(b, scale) for b, scale in zip(b_parts, b_scales, strict=True)]
        products = [_product(*term) for term in zip(wide_as, wide_bs, _padded(biases, len(wide_as)), strict=True)]
        products = products if sum_dtype is None else [one.to(out_dtype).double() for one in products]
        return _sum_of_terms(products, added, factors)
    terms = zip(a_parts, b_parts, _padded(biases, len(a_parts)), strict=True)
    make = _product if sum_dtype is None else _rounded_product
    return _sum_of_terms([make(*term).double() for term in terms], added, factors)


def _sum_of_terms(products: Sequence[Tensor], added: Tensor | None, factors: Sequence[float] | None) -> Tensor:
    each, whole = list(factors or [1.0] * len(products)), 1.0
    if len(each) > len(products):
        whole = each.pop()
    return _sum([*(x * factor for x, factor in zip(products, each, strict=True)), *_widened(added)]) * whole


def _widened(added: Tensor | None) -> list[Tensor]:
    return [] if added is None else [added.double()]


def _rounded_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    rows = a.flatten(0, -2)
    product = torch.mm(rows, b) if bias is None else torch.addmm(bias, rows, b)
    return product.unflatten(0, a.shape[:-1])


def _padded(biases: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
    """One bias or None for each operand; an empty list means none."""
    return list(biases) if biases else [None] * count


def _sum(terms: Any) -> Tensor:
    return torch.stack(list(terms)).sum(0)


# --- the tables --------------------------------------------------------------------------------------

#: The communicating ops.
GROUP_OPS: dict[str, GroupOp] = {
    "_c10d_functional::all_gather_into_tensor": _all_gather_into_tensor,
    "_c10d_functional::reduce_scatter_tensor": _reduce_scatter_tensor,
    "_c10d_functional::all_reduce": _all_reduce,
    "_c10d_functional::all_gather_into_tensor_coalesced": _each(_all_gather_into_tensor),
    "_c10d_functional::reduce_scatter_tensor_coalesced": _each(_reduce_scatter_tensor),
    "_c10d_functional::all_reduce_coalesced": _each(_all_reduce),
    "_c10d_functional_autograd::all_gather_into_tensor": _all_gather_into_tensor,
    "_c10d_functional_autograd::reduce_scatter_tensor": _reduce_scatter_tensor,
    "asynctp::all_gather": _all_gather_into_tensor,
    "asynctp::reduce_scatter": _reduce_scatter_tensor,
    "asynctp::all_reduce": _all_reduce,
    "_c10d_functional::all_reduce_": _all_reduce_in_place,
    "vllm_like::all_gather": _custom_all_gather,
    "vllm_like::reduce_scatter": _custom_reduce_scatter,
    "vllm_like::all_reduce": _custom_all_reduce,
    "asynctp::all_gather_matmul": _all_gather_matmul,
    "asynctp::matmul_reduce_scatter": _matmul_reduce_scatter,
    "asynctp::matmul_all_reduce": _matmul_all_reduce,
}


_RANK_OPS: dict[str, Callable[..., Any]] = {
    "asynctp::wait": lambda result, source: result,
    "_c10d_functional::wait_tensor": lambda tensor: tensor,
    "_c10d_functional::wait_tensors": lambda tensors: list(tensors),
    "_dtensor::mesh_get_process_group": lambda mesh, dim: (mesh, dim),
    "aten::_scaled_mm": _scaled_mm,
    "aten::_scaled_mm_v2": scaled_mm_v2,
}


# --- comparing ---------------------------------------------------------------------------------------

#: Largest allowed difference of two results that round in different places, relative to the largest element (at least
#: 1). Narrow dtypes are for telling programs apart, not for judging rounding.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def differences(expected: Sequence[Any], actual: Sequence[Any], tolerance: float | None = None) -> list[str]:
    """What distinguishes the outputs of two graphs on all ranks, in words; empty when they agree.

    Shape, dtype and strides are compared exactly (but for the strides of dimensions of one element, which mean
    nothing), values up to `TOLERANCE`, integers and fp8 bit by bit. A `tolerance` replaces that of every float dtype,
    for graphs that compute in a narrower dtype than they return.
    """
    found = []
    for rank, (expected_outs, actual_outs) in enumerate(zip(expected, actual, strict=True)):
        if len(expected_outs) != len(actual_outs):
            found.append(f"rank {rank}: {len(actual_outs)} outputs instead of {len(expected_outs)}")
        for index, (left, right) in enumerate(zip(expected_outs, actual_outs, strict=False)):
            text = _difference(left, right, tolerance)
            if text:
                found.append(f"rank {rank}, output {index}: {text}")
    return found


def _difference(expected: Any, actual: Any, tolerance: float | None) -> str:
    """What distinguishes two values, or nothing."""
    if not isinstance(expected, Tensor):
        same = expected == actual or (isinstance(expected, dist.ProcessGroup) and isinstance(actual, dist.ProcessGroup))
        return "" if same else f"{actual!r} instead of {expected!r}"
    if _layout(expected) != _layout(actual):
        return f"layout {_layout(actual)} instead of {_layout(expected)}"
    if tolerance is None or not expected.is_floating_point():
        tolerance = TOLERANCE.get(expected.dtype)
    if tolerance is None:
        return "" if torch.equal(_bits(expected), _bits(actual)) else "other elements"
    if expected.numel() == 0:
        return ""
    left, right = expected.double(), actual.double()
    if not torch.equal(left.isnan(), right.isnan()):
        return "NaN at other places"
    error = (left - right).nan_to_num().abs().max().item()
    limit = tolerance * max(1.0, left.nan_to_num().abs().max().item())
    return "" if error <= limit else f"differs by {error:.3g} (limit {limit:.3g})"


def _layout(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    strides = tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.dtype, tuple(tensor.shape), strides


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor
