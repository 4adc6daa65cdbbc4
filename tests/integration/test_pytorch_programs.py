"""PyTorch's own tests of async TP, form by form: each collective that torch's pass fuses is fused by asynctp too.

    program ─▶ torch.compile ─▶ graph ┬▶ asynctp
                                      └▶ micro_pipeline_tp, the pass in Inductor ("in-tree")

The forms are those of `test/distributed/tensor/parallel/test_micro_pipeline_tp.py`, and of `AsyncTPTest` in
`test/distributed/test_symmetric_memory.py`, with programs of ours. Both passes run on copies of one graph. Ranks are
imagined: what they compute together is evaluated in this process, before and after the rewrite.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled_training import NEWER_THAN_2_11, QUICK, start
from dumps import dump_paths, example_inputs, load
from lockstep import Groups, differences, evaluate, op_name
from passes import copied, outcomes, run_pass
from ranks import imagined_ranks
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import Graph, GraphModule

import asynctp_passes
from asynctp_passes import Report

FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
RANKS = 2


@pytest.fixture(autouse=True)
def caches_of_this_test(tmp_path: Path) -> Iterator[None]:
    with mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=str(tmp_path)):
        yield
    torch._dynamo.reset()


# --- both passes on one graph -----------------------------------------------------------------------------------
class Kept(CustomGraphPass):
    """Copies of the graphs that come to the passes after Inductor's own."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []

    def __call__(self, graph: Graph) -> None:
        self.graphs.append(copied(graph))

    def uuid(self) -> None:
        return None


def compiled(program: Callable[..., Any], *inputs: Any, train: bool = False) -> list[tuple[Graph, Report]]:
    """The graphs that a compiled program gives to asynctp, each with its report."""
    start()
    kept = Kept()
    options = {"strict": "off", "post_grad_custom_post_pass": kept, **QUICK}
    function = torch.compile(program, backend="asynctp", dynamic=False, fullgraph=True, options=options)
    try:
        out = function(*inputs)
    except torch._dynamo.exc.Unsupported:
        pytest.skip("this torch does not trace the program, without asynctp neither")
    if train:
        out.sum().backward()
    return list(zip(kept.graphs, asynctp_passes.reports(), strict=True))


def by_torch(graph: Graph) -> Graph:
    """A copy after torch's pass, which asks for NCCL and for groups with symmetric memory."""
    copy = copied(graph)
    with (
        _symmetric_memory._test_mode(),
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        micro_pipeline_tp_pass(copy)
    return copy


def fused_by_torch(graph: Graph, rewritten: Graph) -> set[str]:
    """The collectives that became part of one of torch's fused ops."""
    found = {name for name in collectives(graph) if name not in collectives(rewritten)}
    assert len(found) == sum(op_name(node.target).startswith("symm_mem::fused") for node in rewritten.nodes)
    return found


def collectives(graph: Graph) -> list[str]:
    kinds = ("_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor")
    return [node.name for node in graph.nodes if op_name(node.target) in kinds]


def matmuls(graph: Graph) -> int:
    """How many matmuls are no part of a fused op."""
    kinds = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm")
    return sum(op_name(node.target) in kinds for node in graph.nodes)


def judge(
    graph: Graph,
    report: Report,
    expected: Sequence[str],
    *,
    stay: int = 0,
    by_both: bool = False,
    ranks: int = RANKS,
    groups: Groups | None = None,
) -> None:
    """A graph's outcomes, next to those of torch's pass, and its values on all ranks.

    Args:
        graph: The graph before both passes.
        report: What asynctp said when it was compiled.
        expected: What becomes of each collective: "F", or a code.
        stay: How many matmuls stay beside the fused ops.
        by_both: Whether torch's pass fuses the same collectives, and not fewer.
        ranks: The number of ranks.
        groups: Tuples of ranks by group name.
    """
    rewritten, theirs = copied(graph), by_torch(graph)
    assert outcomes(report) == outcomes(run_pass(rewritten)) == list(expected)
    ours, in_tree = {remark.collective for remark in report.fused}, fused_by_torch(graph, theirs)
    assert in_tree == ours if by_both else in_tree <= ours
    assert matmuls(rewritten) == stay
    module = GraphModule(graph.owning_module or nn.Module(), graph)
    inputs = [example_inputs(module, seed=rank) for rank in range(ranks)]
    assert differences(evaluate(graph, inputs, groups), evaluate(rewritten, inputs, groups)) == []


# --- parts of programs ------------------------------------------------------------------------------------------
def whole(x: Tensor, dim: int = 0) -> Tensor:
    return funcol.all_gather_tensor(x, dim, dist.group.WORLD)


def whole_by_bytes(x: Tensor, dim: int = 0) -> Tensor:
    """The shards are joined as bytes, as DTensor's are in fp8 where `cat` does not know the dtype."""
    pieces = whole(x)
    if dim == 0:
        return pieces.view(x.dtype)
    return torch.cat([piece.view(torch.uint8) for piece in pieces.chunk(RANKS)], dim).view(x.dtype)


def whole_by_slices(x: Tensor, dim: int) -> Tensor:
    pieces, size = whole(x), x.shape[0]
    return torch.cat([pieces[rank * size : (rank + 1) * size] for rank in range(RANKS)], dim)


def part(x: Tensor, dim: int = 0, op: str = "avg") -> Tensor:
    return funcol.reduce_scatter_tensor(x, op, dim, dist.group.WORLD)


def scaled(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype | None = BF16) -> Tensor:
    """A product of fp8 tensors: all dimensions of `a` but the last are rows, and those of its scales."""
    rows, row_scales = (each.flatten(0, -2) if each.dim() > 2 else each for each in (a, a_scale))
    return torch._scaled_mm(rows, b, row_scales, b_scale, out_dtype=dtype).view(*a.shape[:-1], b.shape[1])


def numbers(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.rand(shape).to(dtype)


def weight(rows: int, columns: int) -> Tensor:
    """In fp8, column-major."""
    return numbers(columns, rows, dtype=FP8).t()


def shard_of(shape: Sequence[int], dim: int, dtype: torch.dtype = FP32) -> Tensor:
    return numbers(*(size // RANKS if axis == dim else size for axis, size in enumerate(shape)), dtype=dtype)


# --- the forms --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Form:
    """A program of this rank's tensors, with its inputs; the rest is for `judge`."""

    program: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    expected: tuple[str, ...] = ("F",)
    stay: int = 0
    by_both: bool = False


SHAPES = {2: (64, 32), 3: (2, 64, 32)}


def gathers() -> Iterator[tuple[str, Form]]:
    """Gathers along each dimension, whose result is returned or not; the last dimension is the contraction."""
    for dims, dim in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):
        for returned in (False, True):

            def plain(x: Tensor, w: Tensor, *, dim: int = dim, returned: bool = returned) -> Any:
                full = whole(x, dim)
                return (full, full @ w) if returned else full @ w

            def fp8(x: Tensor, w: Tensor, *scales: Tensor, dim: int = dim, returned: bool = returned) -> Any:
                full = whole_by_bytes(x, dim)
                product = scaled(full, w, *scales)
                return (full, product) if returned else product

            name = f"gather of {dims}-D along {dim}{', returned' if returned else ''}"
            one, rows = numbers(1)[0], dim < dims - 1
            yield name, Form(plain, (shard_of(SHAPES[dims], dim), numbers(32, 16)), by_both=rows)
            yield f"fp8: {name}", Form(fp8, (shard_of(SHAPES[dims], dim, FP8), weight(32, 16), one, one), by_both=rows)


def scatters() -> Iterator[tuple[str, Form]]:
    """Reduce-scatters along each dimension, the last one being that of the columns."""
    for dims, dim in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):

        def plain(a: Tensor, w: Tensor, *, dim: int = dim) -> Tensor:
            return part(a @ w, dim)

        def fp8(a: Tensor, w: Tensor, *scales: Tensor, dim: int = dim) -> Tensor:
            return part(scaled(a, w, *scales), dim)

        name, one = f"scatter of {dims}-D along {dim}", numbers(1)[0]
        yield name, Form(plain, (numbers(*SHAPES[dims]), numbers(32, 16)), by_both=True)
        given = (numbers(*SHAPES[dims], dtype=FP8), weight(32, 16), one, one)
        yield f"fp8: {name}", Form(fp8, given, by_both=dim < dims - 1)


def rows_with_scales() -> Iterator[tuple[str, Form]]:
    """fp8 with a scale for each row, along both dimensions of rows."""
    for dim in (0, 1):

        def scattered(a: Tensor, w: Tensor, a_scale: Tensor, b_scale: Tensor, *, dim: int = dim) -> Tensor:
            return part(scaled(a, w, a_scale.reciprocal(), b_scale), dim, "sum")

        def mean(a: Tensor, w: Tensor, a_scale: Tensor, b_scale: Tensor, *, dim: int = dim) -> Tensor:
            return part(scaled(a, w, a_scale, b_scale), dim)

        def with_scales_of_all(
            x: Tensor, a_scale: Tensor, *others: Tensor, dim: int = dim, dtypes: Any = (BF16,) * 3
        ) -> list[Tensor]:
            full, weights = whole_by_bytes(x, dim), zip(others[:3], others[3:], dtypes, strict=True)
            return [scaled(full, w, a_scale, w_scale, dtype) for w, w_scale, dtype in weights]

        def with_scales_of_the_shard(x: Tensor, a_scale: Tensor, *others: Tensor, dim: int = dim) -> list[Tensor]:
            return with_scales_of_all(x, whole(a_scale, dim), *others, dim=dim)

        def of_several_dtypes(x: Tensor, a_scale: Tensor, *others: Tensor, dim: int = dim) -> list[Tensor]:
            return with_scales_of_all(x, a_scale, *others, dim=dim, dtypes=(None, BF16, FP32))

        rows = (numbers(2, 16, 32, dtype=FP8), weight(32, 64), numbers(2, 16, 1) + 1, numbers(1, 64))
        yield f"fp8: scatter of rows with scales along {dim}", Form(scattered, rows, by_both=True)
        yield f"fp8: mean of rows with scales along {dim}", Form(mean, rows, by_both=True)
        weights, x = [weight(32, 16) for _ in range(3)], shard_of((8, 64, 32), dim, FP8)
        each, one = [numbers(1, 16) for _ in weights], numbers(1)[0]
        given = (x, numbers(8, 64, 1), *weights, *each)
        yield f"fp8: gather along {dim}, scales of all rows", Form(with_scales_of_all, given, by_both=True)
        given = (x, shard_of((8, 64, 1), dim), *weights, *each)
        yield f"fp8: gather along {dim}, scales of the shard", Form(with_scales_of_the_shard, given, ("F", "F"))
        # an op has one dtype: of three products with one each, two stay matmuls
        given = (x, one, *weights, one, one, one)
        yield f"fp8: gather along {dim} to several dtypes", Form(of_several_dtypes, given, stay=2, by_both=True)


def several_and_large() -> Iterator[tuple[str, Form]]:
    """Gathers for three matmuls, and reductions of longer sums."""
    for dim in (0, 1, 2):

        def three(x: Tensor, *weights: Tensor, dim: int = dim) -> list[Tensor]:
            full = whole(x, dim)
            return [full, *(full @ w for w in weights)]

        def long(a: Tensor, w: Tensor, *, dim: int = dim) -> Tensor:
            return part(a @ w, dim)

        x, weights = shard_of((8, 64, 32), dim), [numbers(32, 16) for _ in range(3)]
        yield f"gather along {dim} for three", Form(three, (x, *weights), by_both=dim < 2)
        yield f"scatter along {dim} of a long sum", Form(long, (numbers(8, 64, 1024), numbers(1024, 16)), by_both=True)


def gathered_four_times(x: Tensor, *weights: Tensor) -> list[Tensor]:
    full = [whole(x), whole(x, 1), whole_by_bytes(x), whole_by_bytes(x, 1)]
    return [each @ w for each, w in zip(full, weights, strict=True)] if weights else full


def scattered_twice(x: Tensor, *weights: Tensor) -> list[Tensor]:
    products = [x @ w for w in weights] or [x, x]
    return [part(products[0], 0, "sum"), part(products[1], 1)]


def hidden_by_matmuls(x: Tensor) -> list[Tensor]:
    """Three collectives, the first two beside matmuls that do not need them."""
    square, full = x @ x.t(), whole(x)
    return [square, full @ x.t(), whole(part(full))]


def sliced(x: Tensor, w: Tensor) -> Tensor:
    return whole_by_slices(x, 1) @ w


def sliced_and_cut(x: Tensor, w: Tensor) -> Tensor:
    """One step is padding."""
    full = whole_by_slices(x, 1)
    return full[:, : full.shape[1] - 1] @ w


def scattered_by_slices(a: Tensor, w: Tensor) -> Tensor:
    product = a @ w
    return part(torch.cat([product[:, :16], product[:, 16:]]), 0, "sum")


def product_returned_too(a: Tensor, w: Tensor) -> list[Tensor]:
    product = a @ w
    return [product, part(product)]


def by_its_transpose(x: Tensor) -> Tensor:
    full = whole(x)
    return full @ full.t()


def by_its_transpose_and_a_weight(x: Tensor, w: Tensor) -> list[Tensor]:
    full = whole(x)
    return [full @ full.t(), full @ w]


def bytes_of_a_sequence(x: Tensor, w: Tensor) -> Tensor:
    return whole_by_bytes(x, 1) @ w


FORMS = {
    **dict(gathers()),
    **dict(scatters()),
    **dict(rows_with_scales()),
    **dict(several_and_large()),
    "gathers without matmuls": Form(gathered_four_times, (numbers(64, 32),), ("ATP013",) * 4),
    "gathers with matmuls": Form(
        gathered_four_times,
        (numbers(64, 32), numbers(32, 16), numbers(64, 16), numbers(32, 16), numbers(64, 16)),
        ("F",) * 4,
    ),
    "scatters without matmuls": Form(scattered_twice, (numbers(64, 32),), ("ATP013",) * 2),
    "scatters with matmuls": Form(
        scattered_twice, (numbers(64, 32), numbers(32, 16), numbers(32, 16)), ("F", "F"), by_both=True
    ),
    "collectives beside matmuls": Form(hidden_by_matmuls, (numbers(64, 32),), ("F", "ATP002", "ATP013"), stay=1),
    "gather of a batch of one": Form(lambda x, w: whole(x, 1) @ w, (numbers(1, 32, 32), numbers(32, 16))),
    "gather of a wide contraction": Form(
        lambda x, w: whole(x, 1) @ w, (numbers(64, 1024), numbers(2048, 16)), by_both=True
    ),
    "gather of a wide contraction, returned": Form(
        lambda x, w: [whole(x, 1) @ w, whole(x, 1)], (numbers(64, 1024), numbers(2048, 16)), ("F", "ATP013")
    ),
    "gather by slices": Form(sliced, (numbers(8, 16, 32), numbers(32, 16))),
    "gather by slices of a batch of one": Form(sliced, (numbers(1, 16, 32), numbers(32, 16))),
    "gather by slices, cut": Form(sliced_and_cut, (numbers(8, 16, 32), numbers(32, 16))),
    "gather by slices of a batch of one, cut": Form(sliced_and_cut, (numbers(1, 16, 32), numbers(32, 16))),
    "scatter by slices": Form(scattered_by_slices, (numbers(8, 32, 32), numbers(32, 16))),
    "gather by bytes of fp32": Form(bytes_of_a_sequence, (numbers(2, 32, 32), numbers(32, 16)), by_both=True),
    "gather by bytes of bf16": Form(
        bytes_of_a_sequence, (numbers(2, 32, 32, dtype=BF16), numbers(32, 16, dtype=BF16)), by_both=True
    ),
    "gather by bytes of a wide contraction": Form(
        bytes_of_a_sequence, (numbers(64, 1024), numbers(2048, 16)), by_both=True
    ),
    "scatter of bf16": Form(
        lambda a, w: part(a @ w), (numbers(64, 1024, dtype=BF16), numbers(1024, 32, dtype=BF16)), by_both=True
    ),
    "scatter of a product that is returned": Form(
        product_returned_too, (numbers(64, 32), numbers(32, 16)), ("ATP202",), stay=1, by_both=True
    ),
    "gather times itself": Form(by_its_transpose, (numbers(32, 32),), ("ATP203",), stay=1, by_both=True),
    "gather times itself and a weight": Form(
        by_its_transpose_and_a_weight, (numbers(32, 32), numbers(32, 16)), stay=1, by_both=True
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    form = FORMS[name]
    with imagined_ranks(RANKS):
        ((graph, report),) = compiled(form.program, *form.inputs)
        judge(graph, report, form.expected, stay=form.stay, by_both=form.by_both)


# --- DTensor, and meshes ----------------------------------------------------------------------------------------
class Layer(nn.Module):
    """Two linear layers without biases, `x[..., 10]` to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((10, 16), (16, 10)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.relu(self.up(x)))
        return result


def sequence_parallel(mesh: DeviceMesh, dim: int, layers: int, local: bool = True) -> nn.Module:
    plan = {
        "*.up": ColwiseParallel(input_layouts=Shard(dim)),
        "*.down": RowwiseParallel(output_layouts=Shard(dim), use_local_output=local),
    }
    return parallelize_module(nn.Sequential(*(Layer() for _ in range(layers))), mesh, plan)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("dim", "shape"), [(0, (8, 10)), (1, (2, 8, 10))])
def test_layers_of_dtensor(dim: int, shape: tuple[int, ...], layers: int) -> None:
    """Sequence parallel layers in training: in each graph a gather and a scatter for each layer."""
    with imagined_ranks(RANKS):
        module = sequence_parallel(init_device_mesh("cpu", (RANKS,)), dim, layers)
        graphs = compiled(module, numbers(*shape).requires_grad_(), train=True)
        assert [report.phase for _, report in graphs] == ["forward", "backward"]
        for graph, report in graphs:  # backward, each gradient of a weight is a matmul of its own
            stay = 2 * layers if report.phase == "backward" else 0
            judge(graph, report, ["F", "F"] * layers, stay=stay, by_both=True)


@pytest.mark.parametrize(("dim", "shape"), [(0, (15, 10)), (1, (1, 15, 10)), (1, (2, 15, 10))])
def test_layer_of_dtensor_whose_sequence_the_ranks_do_not_divide(dim: int, shape: tuple[int, ...]) -> None:
    """Torch's pass leaves all of it alone."""
    if shape[0] == 2 and not NEWER_THAN_2_11:
        pytest.skip("DTensor of torch 2.11 takes the cut sequences for contiguous")
    with imagined_ranks(4):
        mesh = init_device_mesh("cpu", (4,))
        module, local = sequence_parallel(mesh, dim, 1, local=False), list(shape)
        local[dim] = 4
        shard = DTensor.from_local(
            numbers(*local), mesh, [Shard(dim)], shape=torch.Size(shape), stride=numbers(*shape).stride()
        )
        graphs = compiled(lambda x: module(x).to_local(), shard.requires_grad_(), train=True)
        assert [report.phase for _, report in graphs] == ["forward", "backward"]
        for graph, report in graphs:
            assert fused_by_torch(graph, by_torch(graph)) == set()
            judge(graph, report, ["F", "F"], stay=2 if report.phase == "backward" else 0, ranks=4)


def test_collectives_of_another_mesh_dimension() -> None:
    """A normalization over the other dimension, between two chains."""
    with imagined_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "other"))

        def program(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
            hidden = funcol.all_gather_tensor(funcol.all_gather_tensor(x, 0, (mesh, 0)) @ up.t(), 0, (mesh, 1))
            hidden = hidden / hidden.square().sum().sqrt()
            hidden = funcol.reduce_scatter_tensor(hidden, "avg", 0, (mesh, 1))
            return funcol.reduce_scatter_tensor(hidden @ down.t(), "avg", 0, (mesh, 0))

        ((graph, report),) = compiled(program, numbers(8, 10), numbers(7, 10), numbers(10, 7))
        names = [mesh.get_group(dim).group_name for dim in ("tp", "other")]
        groups: Groups = dict(zip(names, ([(0, 2), (1, 3)], [(0, 1), (2, 3)]), strict=True))
        judge(graph, report, ["F", "ATP012", "ATP002", "F"], by_both=True, ranks=4, groups=groups)


# --- graphs of whole models -------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", dump_paths(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_graphs_of_the_corpus(path: Path) -> None:
    """Each collective that torch's pass fuses is fused, and no matmul that it takes in stays."""
    graph = load(path).graph
    rewritten, theirs = copied(graph), by_torch(graph)
    report = run_pass(rewritten)
    assert fused_by_torch(graph, theirs) <= {remark.collective for remark in report.fused}
    assert matmuls(rewritten) <= matmuls(theirs)
