"""Programs with several dynamic sizes: each is decided as its static twin is, and computes the same at other sizes.

What is proven of sizes is proven of symbols, so that nothing may depend on how many there are, on two sizes being one
symbol (which torch makes of equal ones), or on sizes that are sums or products of them.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import sympy
import torch
from graph_builder import GraphBuilder, aten, c10d
from lockstep import differences, evaluate
from passes import copied, outcomes, run_pass
from serving_ops import registered
from torch._dynamo.source import ConstantSource
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from asynctp_passes.ir.sizes import Sizes, express, is_within, quotient
from asynctp_passes.matching.cut_rows import _is_most


@dataclass(frozen=True)
class Choices:
    """A program: sequences are gathered, multiplied, and perhaps multiplied again, summed and reduced.

    `batch`, `sequence` and `columns` say which sizes are dynamic; `alike` that batch and sequence are the same number.
    """

    ranks: int
    batch: bool
    sequence: bool
    columns: bool
    alike: bool
    longer: tuple[int, ...]
    axis: int
    transposed: bool
    in_a_list: bool
    relu: bool
    products: int
    reduction: str
    kept: bool

    @classmethod
    def of(cls, seed: int) -> Choices:
        choose = random.Random(seed).choice
        return cls(
            ranks=choose([2, 3]),
            batch=choose([False, True, True]),
            sequence=choose([False, True, True]),
            columns=choose([False, False, True]),
            alike=choose([False, True]),
            longer=choose([(), (), (0,), (1,), (0, 1)]),
            axis=choose([0, 1]),
            transposed=choose([False, False, True]),
            in_a_list=choose([False, False, True]),
            relu=choose([False, False, True]),
            products=choose([1, 2]),
            reduction=choose(["none", "scatter", "scatter", "all_reduce"]),
            kept=choose([False, False, True]),
        )


class Builder(GraphBuilder):
    """Notes, for each input, its shape at the traced sizes, and which of them are dynamic."""

    def __init__(self, choices: Choices, dynamic: bool) -> None:
        super().__init__(ranks=choices.ranks)
        self.choices, self.dynamic = choices, dynamic
        self.makers: list[tuple[str | int, ...]] = []

    def sized(self, name: str, *sizes: str | int) -> Node:
        """An input whose sizes are numbers, or names of sizes."""
        self.makers.append(sizes)
        traced = numbers(self.choices, 6, 5, 4)
        shape = [size if isinstance(size, int) else traced[size] for size in sizes]
        names = ("batch", "sequence", "columns")
        axes = [axis for axis, size in enumerate(sizes) if size in names and getattr(self.choices, str(size))]
        return self.input(name, shape, dynamic=axes if self.dynamic else None)

    def size(self, x: Node, axis: int) -> Any:
        size = x.meta["val"].shape[axis]
        return size if isinstance(size, int) else self.call(aten.sym_size.int, x, axis)

    def times(self, a: Any, b: Any) -> Any:
        return a * b if isinstance(a, int) and isinstance(b, int) else self.call(operator.mul, a, b)

    def rows(self, x: Node) -> Node:
        """[a, b, c] as [a * b, c]."""
        return self.reshape(x, [self.times(self.size(x, 0), self.size(x, 1)), self.size(x, 2)])

    def like(self, x: Node, whole: Node) -> Node:
        """[a * b, c] as [a, b, c]."""
        return self.reshape(x, [self.size(whole, 0), self.size(whole, 1), self.size(x, 1)])

    def moved(self, x: Node, source: int, dest: int, piece: Any) -> Node:
        """The ranks' blocks of `piece` along one dimension, joined along another."""
        if source == dest:
            return x
        split = self.call(aten.split.Tensor, x, piece, source)
        return self.cat([self.call(operator.getitem, split, index) for index in range(self.ranks)], dest)


def numbers(choices: Choices, batch: int, sequence: int, columns: int) -> dict[str, int]:
    return {"batch": batch, "sequence": batch if choices.alike else sequence, "columns": columns}


def build(choices: Choices, dynamic: bool) -> tuple[Graph, list[tuple[str | int, ...]]]:
    b = Builder(choices, dynamic)
    leading = ("sequence", "batch") if choices.transposed else ("batch", "sequence")
    shard = b.sized("x", *leading, 8)
    for axis in choices.longer:  # one more row, as a class token, or what a cache holds
        shard = b.cat([b.call(aten.slice.Tensor, shard, axis, 0, 1), shard], axis)
    if choices.in_a_list:
        whole, other = b.gather_list(shard, b.sized("other", 3, 2))
    else:
        whole = b.gather(shard)
    whole = b.moved(whole, 0, choices.axis, b.size(shard, 0))
    taken = b.relu(whole) if choices.relu else whole
    results = []
    for index in range(choices.products):
        product = b.mm(b.rows(taken), b.sized(f"w{index}", 8, "columns"))
        results.append(b.relu(b.like(product, whole)))
    if choices.reduction != "none":
        terms = [b.mm(b.rows(one), b.sized(f"v{i}", "columns", 8)) for i, one in enumerate(results)]
        total = b.like(terms[0], whole)
        for term in terms[1:]:
            total = b.add(total, b.like(term, whole))
        if choices.reduction == "scatter":
            results = [b.scatter(b.moved(total, choices.axis, 0, b.size(shard, choices.axis)))]
        else:
            results = [b.all_reduce(total)]
    results += [b.relu(whole)] if choices.kept else []
    results += [other] if choices.in_a_list else []
    return b.returns(*results), b.makers


def values(choices: Choices, makers: list[tuple[str | int, ...]]) -> list[list[torch.Tensor]]:
    """Inputs of all ranks, at sizes that were not traced where they are dynamic."""
    traced, other = numbers(choices, 6, 5, 4), numbers(choices, 3, 7, 5)
    both = choices.batch and choices.sequence
    changes = {name for name in traced if getattr(choices, name) and (both or not choices.alike or name == "columns")}
    sizes = {name: other[name] if name in changes else traced[name] for name in traced}
    shapes = [[size if isinstance(size, int) else sizes[size] for size in maker] for maker in makers]
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(choices.ranks)]


@pytest.mark.parametrize("seed", range(30))
def test_dynamic_sizes_are_decided_as_static_ones(seed: int) -> None:
    choices = Choices.of(seed)
    graph, makers = build(choices, dynamic=True)
    static, _ = build(choices, dynamic=False)
    rewritten = copied(graph)
    report, expected = run_pass(rewritten), run_pass(static)
    decided = [(one.kind, one.outcome, one.code) for one in report.remarks]
    assert decided == [(one.kind, one.outcome, one.code) for one in expected.remarks], f"{choices}\n{report}"
    inputs = values(choices, makers)
    assert differences(evaluate(graph, inputs), evaluate(rewritten, inputs)) == []


def test_a_sum_of_products_whose_rows_went_two_ways() -> None:
    """Equal layouts of sequences that are one token longer, transposed with their rows joined and apart, and back."""
    b = GraphBuilder()
    x = b.input("x", [6, 5, 8], dynamic=[0, 1])
    x = b.cat([b.call(aten.slice.Tensor, x, 1, 0, 1), x], 1)
    batch, sequence = (b.call(aten.sym_size.int, x, axis) for axis in (0, 1))
    rows = b.call(operator.mul, batch, sequence)
    one, other = (b.mm(b.reshape(x, [rows, 8]), b.input(name, [8, 4])) for name in ("w", "v"))
    apart = b.permute(b.reshape(other, [batch, sequence, 4]), [2, 0, 1])
    total = b.add(b.permute(one, [1, 0]), b.reshape(apart, [4, rows]))
    assert outcomes(run_pass(b.returns(b.all_reduce(b.permute(total, [1, 0]))))) == ["F"]


def test_a_size_that_two_numbers_of_ranks_divide() -> None:
    b = GraphBuilder()
    a, w = b.input("a", [12, 8], dynamic=0), b.input("w", [8, 4])
    results = []
    for b.ranks, b.group in ((2, "two"), (3, "three")):
        assert a.meta["val"].shape[0] % b.ranks == 0  # a guard
        results.append(b.scatter(b.mm(a, w)))
    assert outcomes(run_pass(b.returns(*results))) == ["F", "F"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rounded_up", [0, 1])
def test_pieces_that_are_equal_by_a_guard(ranks: int, rounded_up: int) -> None:
    """`cat(product.chunk(ranks, 1))`, and with `split(size // ranks, 1)`: torch joins pieces that are equal."""
    b = GraphBuilder(ranks=ranks)
    a, w = b.input("a", [4, 8]), b.input("w", [8, 24], dynamic=1)
    size = b.call(operator.add, b.call(aten.sym_size.int, w, 1), rounded_up * (ranks - 1))
    split = b.call(aten.split.Tensor, b.mm(a, w), b.call(operator.floordiv, size, ranks), 1)
    blocks = b.cat([b.call(operator.getitem, split, index) for index in range(ranks)])
    assert outcomes(run_pass(b.returns(b.scatter(blocks)))) == ["F"]


@pytest.mark.parametrize(("excluded", "outcome"), [((1, 2), "F"), ((1,), "ATP108")])
def test_a_size_of_which_guards_exclude_remainders(excluded: tuple[int, ...], outcome: str) -> None:
    b = GraphBuilder(ranks=3)
    a, w = b.input("a", [12, 8], dynamic=0), b.input("w", [8, 4])
    for remainder in excluded:
        assert a.meta["val"].shape[0] % b.ranks != remainder  # a guard
    with registered():  # its own op could do anything with rows that are left: torch's would raise
        scattered = b.call(torch.ops.vllm_like.reduce_scatter.default, b.mm(a, w), 0, b.ranks, "tp:0")
        assert outcomes(run_pass(b.returns(scattered))) == [outcome]


# --- a reduce-scatter divides what it scatters, or raises --------------------------------------------------------
def rows_of(b: GraphBuilder, times: int = 1, more: int = 0) -> Node:
    """A product whose rows are dynamic: `times` as many as a symbol, and `more`."""
    a = b.input("a", [12, 8], dynamic=0)
    pieces = [a] * times + ([b.input("more", [more, 8])] if more else [])
    return b.mm(b.cat(pieces) if len(pieces) > 1 else a, b.input("w", [8, 4]))


@pytest.mark.parametrize(("ranks", "times"), [(2, 1), (3, 1), (4, 2), (4, 6), (8, 4)])
def test_a_scatter_of_rows_that_no_guard_says_to_be_a_multiple(ranks: int, times: int) -> None:
    b = GraphBuilder(ranks=ranks)
    product = rows_of(b, times)
    env = product.meta["val"].shape[0].node.shape_env
    graph, guards = b.returns(b.scatter(product)), len(env.guards)
    assert outcomes(run_pass(graph)) == ["F"]
    assert len(env.guards) == guards


def test_rows_that_two_scatters_divide() -> None:
    b = GraphBuilder()
    a, w = b.input("a", [12, 8], dynamic=0), b.input("w", [8, 4])
    results = []
    for b.ranks, b.group in ((4, "four"), (6, "six")):
        results.append(b.scatter(b.mm(a, w)))
    assert outcomes(run_pass(b.returns(*results))) == ["F", "F"]


def listed(b: GraphBuilder) -> Node:
    """NCCL scatters a list without a look at its sizes."""
    scattered = b.call(c10d.reduce_scatter_tensor_coalesced.default, [rows_of(b)], "sum", b.ranks, b.group)
    return b.wait_list(scattered, 1)[0]


def of_two_sizes(b: GraphBuilder) -> Node:
    """The ranks divide `s0 * s1`, and nothing says which of the two."""
    x = b.input("x", [6, 5, 8], dynamic=[0, 1])
    rows = b.call(operator.mul, *(b.call(aten.sym_size.int, x, axis) for axis in (0, 1)))
    return b.scatter(b.mm(b.reshape(x, [rows, 8]), b.input("w", [8, 4])))


def elsewhere(b: GraphBuilder) -> Node:
    """Other rows are divided than those of the product."""
    product = rows_of(b)
    half = b.call(operator.floordiv, b.call(aten.sym_size.int, product, 0), b.ranks)
    with b.mode:
        value = torch.empty(half.meta["val"], 4)
    scattered = b.call_like(value, torch.ops.vllm_like.reduce_scatter.default, product, 0, b.ranks, "tp:0")
    return b.add(scattered, b.call(aten.sum.default, b.scatter(b.relu(b.input("other", [12, 4], dynamic=0)))))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda b: b.scatter(rows_of(b, more=1)), ["ATP108"]),
        (listed, ["ATP108"]),
        (of_two_sizes, ["ATP108"]),
        (elsewhere, ["ATP108", "ATP002"]),
    ],
)
def test_what_looks_like_rows_that_a_scatter_divides(
    build: Callable[[GraphBuilder], Node], expected: list[str]
) -> None:
    b = GraphBuilder(ranks=2)
    with registered():
        assert outcomes(run_pass(b.returns(build(b)))) == expected


def test_a_scatter_that_may_be_erased_divides_nothing() -> None:
    """Nothing would check the rows: the partitioner left it behind in a backward, and the other is registered."""
    b = GraphBuilder(ranks=2)
    a, w = b.input("a", [12, 8], dynamic=0), b.input("w", [8, 4])
    b.scatter(b.relu(a))
    with registered():
        out = b.call(torch.ops.vllm_like.reduce_scatter.default, b.mm(a, w), 0, b.ranks, "tp:0")
        graph = b.returns(b.add(out, b.input("tangents_1", [1, 4])))
        assert outcomes(run_pass(graph)) == ["ATP014", "ATP108"]


@pytest.mark.parametrize("rows", [12, 18, 6])
def test_other_rows_than_the_traced_ones_compute_the_same(rows: int) -> None:
    b = GraphBuilder(ranks=3)
    graph = b.returns(b.scatter(rows_of(b, 2)))
    rewritten = copied(graph)
    assert outcomes(run_pass(rewritten)) == ["F"]
    inputs = [[torch.randn(rows, 8), torch.randn(8, 4)] for _ in range(b.ranks)]
    assert differences(evaluate(graph, inputs), evaluate(rewritten, inputs)) == []


def test_a_size_that_turned_out_to_be_a_number() -> None:
    """Tensors that were traced before keep a symbol for it."""
    b = GraphBuilder()
    x, w, added = b.input("x", [4, 8]), b.input("w", [8, 16]), b.input("added", [16, 16], dynamic=0)
    assert added.meta["val"].shape[0] == 16  # a guard
    assert isinstance(added.meta["val"].shape[0], torch.SymInt)
    assert outcomes(run_pass(b.returns(b.call(aten.addmm.default, added, b.gather(x), w)))) == ["F"]


def test_a_number_that_turned_out_to_be_one_is_no_source() -> None:
    """Any size is as many times one, and would be looked for without end."""
    env, graph = ShapeEnv(specialize_zero_one=False), Graph()
    one, many = (graph.placeholder(name) for name in ("one", "many"))
    for node, value in ((one, 1), (many, 8)):
        symbol = env.create_symbol(value, ConstantSource(node.name), dynamic_dim=DimDynamic.DYNAMIC)
        node.meta["val"] = env.create_symintnode(symbol, hint=value)
    assert one.meta["val"] == 1  # a guard
    sources = Sizes(graph).sources([])
    assert [source.node for source in sources] == [many]
    assert express(sympy.Symbol("t", integer=True, positive=True), sources) is None


def test_rows_that_the_ranks_do_not_divide_raise() -> None:
    """As the collective does."""
    b = GraphBuilder(ranks=2)
    product = rows_of(b)
    graph = b.returns(b.scatter(product))
    rewritten = copied(graph)
    assert outcomes(run_pass(rewritten)) == ["F"]
    inputs = [[torch.randn(7, 8), torch.randn(8, 4)] for _ in range(b.ranks)]
    for each in (graph, rewritten):
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            evaluate(each, inputs)


@pytest.mark.filterwarnings("ignore:Raw SymInt")
def test_a_size_that_is_no_node() -> None:
    """Inductor's passes write symbolic sizes among arguments, too; torch gives them no hash."""
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [6, 8], torch.float8_e4m3fn, dynamic=0), b.input("w", [8, 16], torch.float8_e4m3fn)
    other = b.reshape(x, [x.meta["val"].shape[0], 2, 4])
    scale = b.reshape(b.input("scale", [1]), [])
    assert outcomes(run_pass(b.returns(b.scaled_mm(b.gather(x), w, scale, b.one()), other))) == ["F"]


@pytest.mark.parametrize(
    ("left", "values"),
    [
        (lambda n: -n % 4, (0, 3)),
        (lambda n: 4 - n % 4, (1, 4)),
        (lambda n: n % 2 + n % 3, (0, 3)),
        (lambda n: n // 2 - n // 4 * 2, (0, 1)),
        (lambda n: n - n // 4, None),
        (lambda n: n, None),
    ],
)
def test_what_divisions_leave_is_bounded(left: Callable[[Any], Any], values: tuple[int, int] | None) -> None:
    b = GraphBuilder()
    size = Sizes(b.graph).read(left(b.input("x", [15, 8], dynamic=0).meta["val"].shape[0]))
    assert is_within(size, *(values or (0, 1000))) == (values is not None)
    assert not (values and is_within(size, values[0], values[1] - 1))


@pytest.mark.parametrize(
    "rows",
    [
        lambda x, y: x,
        lambda x, y: x + y,
        lambda x, y: x * y,
        lambda x, y: (x + y + 1) // 2,
    ],
)
@pytest.mark.parametrize(
    ("padded", "is_padding"),
    [
        (lambda n: (n + 3) // 4 * 4, True),
        (lambda n: n + -n % 4, True),
        (lambda n: n + 4, True),
        (lambda n: 2 * n, False),
        (lambda n: n + 9, False),
    ],
)
def test_most_rows_are_kept_where_a_padding_is_cut(
    padded: Callable[[Any], Any], is_padding: bool, rows: Callable[[Any, Any], Any]
) -> None:
    """However many sizes make up the number of rows."""
    b = GraphBuilder()
    x, y = (b.input(name, [size, 8], dynamic=0).meta["val"].shape[0] for name, size in (("x", 15), ("y", 14)))
    sizes, number = Sizes(b.graph), rows(x, y)
    assert _is_most(sizes.read(number), sizes.read(padded(number)), 4) == is_padding


@pytest.mark.parametrize(
    "spelling",
    [
        lambda n: n + -n % 4,
        lambda n: n + (4 - n % 4) % 4,
        lambda n: (n + 3) // 4 * 4,
        lambda n: -(-n // 4) * 4,
        lambda n: n + 3 - (n + 3) % 4,
    ],
)
def test_a_size_that_is_rounded_up_has_one_form(spelling: Callable[[Any], Any]) -> None:
    """A multiple of the ranks, whoever wrote it; it is the number that the program's is."""
    b = GraphBuilder()
    rows = b.input("x", [15, 8], dynamic=0)
    number_of_rows = rows.meta["val"].shape[0]
    (symbol,) = number_of_rows.node.expr.free_symbols
    sizes = Sizes(b.graph)
    found = sizes.read(spelling(number_of_rows))
    assert found == sizes.read((number_of_rows + 3) // 4 * 4)
    assert quotient(found, 4) is not None
    assert all(found.subs(symbol, number) == spelling(number) for number in range(1, 30))  # type: ignore[union-attr]
