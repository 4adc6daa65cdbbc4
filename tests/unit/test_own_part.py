"""All-reduces of which the rank uses its own part alone become reduce-scatters: when, when not, and into what."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, aten, c10d, show
from passes import before_and_after, outcomes, run_pass
from torch.fx import Node

from asynctp_passes import Config, run
from asynctp_passes.ir.records import Answer, Question
from asynctp_passes.planning.plan import planned, questions_of
from asynctp_passes.ranks import undo
from asynctp_passes.torch_private import process_groups


@contextmanager
def as_rank(rank: int | None, ranks: int = 2) -> Iterator[None]:
    """A group of so many ranks, of which this is one; None: there is no such group."""
    sizes = mock.patch.object(process_groups, "size_of_group", return_value=0 if rank is None else ranks)
    with sizes, mock.patch.object(process_groups, "rank_in_group", return_value=rank):
        yield


@pytest.fixture(autouse=True)
def second_of_two() -> Iterator[None]:
    with as_rank(1):
        yield


def summed(b: GraphBuilder, op: str = "sum") -> Node:
    """An all-reduced product [8, 6]."""
    return b.all_reduce(b.mm(b.input("a", [8, 4]), b.input("w", [4, 6])), op)


def rows(b: GraphBuilder, whole: Node, start: int, end: int, dim: int = 0) -> Node:
    return b.call(aten.slice.Tensor, whole, dim, start, end)


# --- what the graph becomes ------------------------------------------------------------------------------------
def test_a_sum_of_matmuls_is_scattered() -> None:
    b = GraphBuilder(ranks=2)
    text, report = before_and_after(b.returns(b.relu(rows(b, summed(b), 4, 8))), strict="all", expect=1)
    assert_expected_inline(
        text,
        """\
a: f32[8, 4]
w: f32[4, 6]
mm = mm(a, w)  # f32[8, 6]
all_reduce = all_reduce(mm, 'sum', 'tp')  # f32[8, 6]
wait_tensor = wait_tensor(all_reduce)  # f32[8, 6]
slice_1 = slice(wait_tensor, 0, 4, 8)  # f32[4, 6]
relu = relu(slice_1)  # f32[4, 6]
return (relu)

=== becomes ===

a: f32[8, 4]
w: f32[4, 6]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[a], b_parts=[w], biases=[None],
    reduce_op='sum', scatter_dim=0, group_size=2, group_name='tp')  # f32[4, 6]
relu = relu(matmul_reduce_scatter_default)  # f32[4, 6]
return (relu)
""",
    )
    assert [(one.kind, one.op) for one in report.fused] == [("matmul_reduce_scatter", "asynctp::matmul_reduce_scatter")]
    assert "each rank uses its own part of the sum alone" in report.fused[0].message


def test_a_sum_without_a_matmul_is_scattered() -> None:
    b = GraphBuilder(ranks=2)
    text, report = before_and_after(b.returns(b.relu(rows(b, b.all_reduce(b.input("x", [8, 6])), 4, 8))))
    assert_expected_inline(
        text,
        """\
x: f32[8, 6]
all_reduce = all_reduce(x, 'sum', 'tp')  # f32[8, 6]
wait_tensor = wait_tensor(all_reduce)  # f32[8, 6]
slice_1 = slice(wait_tensor, 0, 4, 8)  # f32[4, 6]
relu = relu(slice_1)  # f32[4, 6]
return (relu)

=== becomes ===

x: f32[8, 6]
reshape_default = reshape(x, [2, 4, 6])  # f32[2, 4, 6]
reduce_scatter_tensor_default = reduce_scatter_tensor(reshape_default, 'sum', 2, 'tp')  # f32[1, 4, 6]
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default)  # f32[1, 4, 6]
reshape_default_1 = reshape(wait_tensor_default, [4, 6])  # f32[4, 6]
relu = relu(reshape_default_1)  # f32[4, 6]
return (relu)
""",
    )
    assert outcomes(report) == ["ATP013"]
    assert [note.kind for note in report.notes] == ["own"]


def through_reshapes(b: GraphBuilder) -> Node:
    return b.call(aten.select.int, b.reshape(summed(b), [2, 2, 2, 6]), 0, 1)


def through_two_slices(b: GraphBuilder) -> Node:
    return rows(b, rows(b, summed(b), 2, 8), 2, 6)


def through_chunks(b: GraphBuilder) -> Node:
    return b.chunks(summed(b))[1]


def of_joined_halves(b: GraphBuilder) -> Node:
    whole = summed(b)
    return b.cat([rows(b, whole, 4, 6), rows(b, whole, 6, 8)])


def twice(b: GraphBuilder) -> Node:
    whole = summed(b)
    return b.mul(rows(b, whole, 4, 8), b.call(aten.select.int, b.reshape(whole, [2, 4, 6]), 0, 1))


def as_average(b: GraphBuilder) -> Node:
    return rows(b, summed(b, "avg"), 4, 8)


def rows_turned(b: GraphBuilder) -> Node:
    return rows(b, b.permute(summed(b), [1, 0]), 4, 8, dim=1)


def converted_before(b: GraphBuilder) -> Node:
    return rows(b, b.call(torch.ops.prims.convert_element_type.default, summed(b), torch.float64), 4, 8)


def with_a_residual(b: GraphBuilder) -> Node:
    """A residual, an activation and a factor of each row come first, and the sum is used twice."""
    whole = summed(b)
    added = b.add(whole, b.input("residual", [8, 6]))
    return rows(b, b.mul(b.mul(b.relu(added), whole), b.input("factors", [8, 1])), 4, 8)


def computed_many_times(b: GraphBuilder) -> Node:
    """Each addition has its operand twice: 2^24 ways through the graph."""
    node = summed(b)
    for _ in range(24):
        node = b.add(node, b.relu(node))
    return rows(b, node, 4, 8)


@pytest.mark.parametrize(
    "spelled",
    [rows_turned, converted_before, with_a_residual, computed_many_times],
)
def test_pointwise_ops_and_turned_rows_see_zeros_in_other_places(spelled: Callable[[GraphBuilder], Node]) -> None:
    b = GraphBuilder(ranks=2)
    report = run_pass(b.returns(b.relu(spelled(b))))
    assert [one.kind for one in report.fused] == ["matmul_reduce_scatter"]
    assert "constant_pad_nd" in show(b.graph)


@pytest.mark.parametrize(
    "spelled", [through_reshapes, through_two_slices, through_chunks, of_joined_halves, twice, as_average]
)
def test_spellings(spelled: Callable[[GraphBuilder], Node]) -> None:
    b = GraphBuilder(ranks=2)
    report = run_pass(b.returns(b.relu(spelled(b))))
    assert [one.kind for one in report.fused] == ["matmul_reduce_scatter"]
    assert "all_reduce" not in show(b.graph)


# --- what only looks like it -----------------------------------------------------------------------------------
def of_another_rank(b: GraphBuilder) -> Node:
    return rows(b, summed(b), 0, 4)


def overlapping(b: GraphBuilder) -> Node:
    return rows(b, summed(b), 3, 8)


def shorter(b: GraphBuilder) -> Node:
    return rows(b, summed(b), 4, 7)


def of_columns(b: GraphBuilder) -> Node:
    return rows(b, summed(b), 3, 6, dim=1)


def every_other_row(b: GraphBuilder) -> Node:
    return b.call(aten.slice.Tensor, summed(b), 0, 1, 8, 2)


def whole_used_too(b: GraphBuilder) -> Node:
    whole = summed(b)
    return b.add(rows(b, whole, 4, 8), b.call(aten.sum.default, whole))


def other_part_used_too(b: GraphBuilder) -> Node:
    whole = summed(b)
    return b.add(rows(b, whole, 4, 8), rows(b, whole, 0, 4))


def turned_and_added(b: GraphBuilder) -> Node:
    """The other operand has other rows in the place of the own ones."""
    whole = b.all_reduce(b.mm(b.input("a", [8, 4]), b.input("w", [4, 8])))
    return rows(b, b.add(b.permute(whole, [1, 0]), whole), 4, 8)


def added_and_turned(b: GraphBuilder) -> Node:
    whole = b.all_reduce(b.mm(b.input("a", [8, 4]), b.input("w", [4, 8])))
    return rows(b, b.add(whole, b.permute(b.relu(whole), [1, 0])), 4, 8)


def added_by_columns(b: GraphBuilder) -> Node:
    """Each row of the result has the first one's elements in it."""
    whole = summed(b)
    return rows(b, b.add(whole, rows(b, whole, 4, 5)), 4, 8)


def normalized(b: GraphBuilder) -> Node:
    whole = summed(b)
    return rows(b, b.mul(whole, b.call(aten.mean.dim, whole, [-1], True)), 4, 8)


def computed_and_used_whole(b: GraphBuilder) -> Node:
    whole = b.relu(summed(b))
    return b.add(rows(b, whole, 4, 8), b.call(aten.sum.default, whole))


def masked_by_chance(b: GraphBuilder) -> Node:
    return rows(b, b.call(aten.bernoulli.default, b.call(aten.sigmoid.default, summed(b))), 4, 8)


def by_storage(b: GraphBuilder) -> Node:
    return b.call(aten.as_strided.default, rows(b, summed(b), 4, 8), [4, 6], [6, 1], 24)


def as_maximum(b: GraphBuilder) -> Node:
    return rows(b, b.all_reduce(b.input("x", [8, 6]), "max"), 4, 8)


def written_after(b: GraphBuilder) -> Node:
    whole = summed(b)
    b.call(aten.copy_.default, b.input("y", [4]), b.input("z", [4]))
    return rows(b, whole, 4, 8)


def written_after_what_no_product_makes(b: GraphBuilder) -> Node:
    whole = b.all_reduce(b.input("x", [8, 6]))
    b.call(aten.copy_.default, b.input("y", [4]), b.input("z", [4]))
    return rows(b, whole, 4, 8)


LOOK_ALIKES = (
    *(of_another_rank, overlapping, shorter, of_columns, every_other_row, whole_used_too, other_part_used_too),
    *(turned_and_added, added_and_turned, added_by_columns, normalized, computed_and_used_whole, masked_by_chance),
    *(by_storage, as_maximum, written_after, written_after_what_no_product_makes),
)


@pytest.mark.parametrize("alike", LOOK_ALIKES)
def test_look_alikes_are_all_reduced(alike: Callable[[GraphBuilder], Node]) -> None:
    b = GraphBuilder(ranks=2)
    report = run_pass(b.returns(b.relu(alike(b))))
    assert "scatter" not in show(b.graph)
    assert all(not one.deviations for one in report.questions)


@pytest.mark.parametrize("rank", [None, 0])
def test_another_rank_or_none(rank: int | None) -> None:
    b = GraphBuilder(ranks=2)
    b.returns(b.relu(rows(b, summed(b), 4, 8)))
    with as_rank(rank):
        run_pass(b.graph)
    assert "scatter" not in show(b.graph)


def test_parts_of_a_size_that_the_ranks_may_not_divide() -> None:
    """Of 9 rows each of two ranks would take 4, and leave one."""
    b = GraphBuilder(ranks=2)
    a = b.input("a", [8, 4], dynamic=0)
    whole = b.all_reduce(b.mm(a, b.input("w", [4, 6])))
    half = b.call(operator.floordiv, b.call(aten.sym_size.int, a, 0), 2)
    run_pass(b.returns(b.relu(b.call(aten.slice.Tensor, whole, 0, half, b.call(operator.mul, half, 2)))))
    assert "scatter" not in show(b.graph)


@pytest.mark.parametrize("multiplies", [False, True])
def test_rows_that_are_a_multiple_of_the_ranks(multiplies: bool) -> None:
    """After a gather there are so many times as many rows as there are ranks, whatever their number is."""
    b = GraphBuilder(ranks=2)
    x = b.input("x", [4, 4], dynamic=0)
    full = b.relu(b.gather(x))
    whole = b.all_reduce(b.mm(full, b.input("w", [4, 6])) if multiplies else full)
    count, size = b.call(aten.sym_size.int, x, 0), b.call(aten.sym_size.int, whole, 0)
    part = b.call(aten.slice.Tensor, whole, 0, count, size)
    run_pass(b.returns(b.relu(part)))
    assert "all_reduce" not in show(b.graph)


# --- all ranks or none -----------------------------------------------------------------------------------------
def test_a_refused_part_leaves_the_fused_all_reduce() -> None:
    b = GraphBuilder(ranks=2)
    b.returns(b.relu(rows(b, summed(b), 4, 8)))

    def refuse(questions: list[Question], config: Config) -> list[Answer]:
        return [Answer(refused=dict.fromkeys(one.deviations, "rank 0 does not")) for one in questions]

    with mock.patch.object(undo, "ask", refuse):
        report = run(b.graph, Config(strict="all", expect=1))
    assert [one.kind for one in report.fused] == ["matmul_all_reduce"]
    assert "rank 0 does not" in report.notes[-1].text


def test_the_question_has_the_rank_and_a_text_that_ranks_share() -> None:
    def question(rank: int, rows_of: tuple[int, int], multiplies: bool) -> Question:
        b = GraphBuilder(ranks=2)
        whole = summed(b) if multiplies else b.all_reduce(b.input("x", [8, 6]))
        graph = b.returns(b.relu(rows(b, whole, *rows_of)))
        with as_rank(rank):
            (asked,) = questions_of(planned(graph, Config()))
        return asked

    first, second = question(0, (0, 4), True), question(1, (4, 8), False)
    assert first.deviations == second.deviations == ("own: reduce_scatter(sum) in place of all_reduce 0",)
    assert (first.rank, second.rank) == (0, 1)
    assert question(0, (4, 8), True).rank == -1


def test_deviate_off_leaves_the_all_reduce() -> None:
    b = GraphBuilder(ranks=2)
    b.returns(b.relu(rows(b, summed(b), 4, 8)))
    run_pass(b.graph, deviate=False)
    assert "reduce_scatter" not in show(b.graph)


def test_collectives_of_several_tensors_stay() -> None:
    b = GraphBuilder(ranks=2)
    parts = [b.mm(b.input(f"a{i}", [8, 4]), b.input(f"w{i}", [4, 6])) for i in range(2)]
    sums = b.wait_list(b.call(c10d.all_reduce_coalesced.default, parts, "sum", "tp"), 2)
    b.returns(*(b.relu(rows(b, one, 4, 8)) for one in sums))
    run_pass(b.graph)
    assert "scatter" not in show(b.graph)
