"""Chains that meet: random programs whose products, sums and collectives take what others made, in any order.

The programs of `test_property` have one chain of each kind, and look hard at its views. These have up to a dozen
collectives and plain views, so that a tensor may be an operand here, a term there and one of a list elsewhere.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from lockstep import differences, evaluate, op_name
from passes import copied, run_pass
from profiles import thorough
from programs import Builder
from torch.fx import Node

from asynctp_passes import Report
from asynctp_passes.planning import overlap

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
COLUMNS, GROUP = 4, "tp"
PER_TEST = 100


class Pool:
    """The tensors that a program has so far, [rows, columns]; most steps prefer what nothing uses yet."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks = self.random.choice([1, 2, 2, 3])
        self.b = Builder(self.random.choice, self.ranks)
        self.tensors = [self.input(2 * self.ranks) for _ in range(2)]

    def input(self, rows: int, columns: int = COLUMNS) -> Node:
        return self.b.placeholder((rows, columns), torch.float64)

    def one_of(self, rows: int | None = None) -> Node:
        """Any of them, or any that has so many rows."""
        found = [node for node in self.tensors if rows in (None, rows_of(node))]
        unused = [node for node in found if not node.users]
        return self.random.choice(unused if unused and self.random.random() < 0.6 else found)

    def pair(self) -> tuple[Node, Node]:
        first = self.one_of()
        return first, self.one_of(rows_of(first))

    def waited(self, collective: Node) -> Node:
        return self.b.call(c10d.wait_tensor.default, collective)

    def reduced(self, full: Node) -> Node:
        if rows_of(full) % self.ranks or self.random.random() < 0.6:
            return self.waited(self.b.call(c10d.all_reduce.default, full, self.random.choice(["sum", "avg"]), GROUP))
        return self.waited(self.b.call(c10d.reduce_scatter_tensor.default, full, "sum", self.ranks, GROUP))


def rows_of(node: Node) -> int:
    return int(node.meta["val"].shape[0])


# --- steps: what they add to the pool ------------------------------------------------------------------------
def _product(pool: Pool) -> list[Node]:
    return [pool.b.call(aten.mm.default, pool.one_of(), pool.input(COLUMNS))]


def _product_of_inputs(pool: Pool) -> list[Node]:
    return [pool.b.call(aten.mm.default, pool.input(2 * pool.ranks, 3), pool.input(3))]


def _product_added(pool: Pool) -> list[Node]:
    added, operand = pool.pair()
    return [pool.b.call(aten.addmm.default, added, operand, pool.input(COLUMNS))]


def _sum(pool: Pool) -> list[Node]:
    return [pool.b.call(pool.random.choice([aten.add.Tensor] * 3 + [aten.sub.Tensor]), *pool.pair())]


def _computed(pool: Pool) -> list[Node]:
    op, *numbers = pool.random.choice([(aten.relu.default,), (aten.neg.default,), (aten.mul.Tensor, 0.5)])
    return [pool.b.call(op, pool.one_of(), *numbers)]


def _turned(pool: Pool) -> list[Node]:
    """Another order of the rows."""
    x = pool.one_of()
    turned = pool.b.call(aten.permute.default, pool.b.reshape(x, [-1, 1, rows_of(x), COLUMNS]), [2, 1, 0, 3])
    return [pool.b.call(aten.reshape.default, turned, [rows_of(x), COLUMNS])]


def _reduction(pool: Pool) -> list[Node]:
    return [pool.reduced(pool.one_of())]


def _sum_of_reductions(pool: Pool) -> list[Node]:
    """Of products of two layers, and what else the pool's sums make of it."""
    both = [pool.reduced(_product_of_inputs(pool)[0]) for _ in range(2)]
    alike = rows_of(both[0]) == rows_of(both[1])
    return [pool.b.call(aten.add.Tensor, *both)] if alike else both


def _gather(pool: Pool) -> list[Node]:
    small = [node for node in pool.tensors if rows_of(node) <= 2 * pool.ranks]
    call = (c10d.all_gather_into_tensor.default, pool.random.choice(small), pool.ranks, GROUP)
    return [pool.waited(pool.b.call(*call))]


def _list(pool: Pool) -> list[Node]:
    results = pool.b.call(c10d.all_reduce_coalesced.default, [pool.one_of() for _ in range(2)], "sum", GROUP)
    return [pool.waited(item) for item in pool.b.items(results)]


def _largest(pool: Pool) -> list[Node]:
    """What a small all-reduce makes scales a tensor."""
    x, scaled = pool.one_of(), pool.one_of()
    largest = pool.b.call(c10d.all_reduce.default, pool.b.call(aten.amax.default, x), "max", GROUP)
    return [pool.b.call(aten.mul.Tensor, scaled, pool.b.call(aten.sigmoid.default, pool.waited(largest)))]


STEPS: Sequence[tuple[Callable[[Pool], list[Node]], int]] = (
    *((_product, 4), (_product_of_inputs, 4), (_product_added, 2), (_sum, 5), (_computed, 2), (_turned, 1)),
    *((_reduction, 6), (_sum_of_reductions, 2), (_gather, 3), (_list, 1), (_largest, 1)),
)


# --- programs ------------------------------------------------------------------------------------------------
def program(seed: int) -> Pool:
    """The program of a seed: 4 to 16 steps; all that nothing uses is returned, and some of what is used."""
    pool = Pool(seed)
    steps, weights = zip(*STEPS, strict=True)
    for step in pool.random.choices(steps, weights, k=pool.random.randint(4, 16)):
        pool.tensors += step(pool)
    made = [node for node in pool.tensors if node.op == "call_function"]
    pool.b.graph.output(tuple(node for node in made if not node.users or pool.random.random() < 0.1))
    return pool


@functools.cache
def check(seed: int) -> Report:
    """Rewritten, a program computes the same, and what is FUSED is in a fused op: one each, but for sums."""
    pool = program(seed)
    graph = copied(pool.b.graph)
    with mock.patch.object(overlap, "LEAST_BYTES", 0 if seed % 2 else overlap.LEAST_BYTES):
        report = run_pass(graph, min_flops=pool.random.choice([0, 0, 0, 200]))
    graph.lint()

    def inputs() -> list[list[torch.Tensor]]:
        generators = [torch.Generator().manual_seed(seed * 8 + rank) for rank in range(pool.ranks)]
        return [[value.make(generator) for value in pool.b.inputs] for generator in generators]

    assert differences(evaluate(pool.b.graph, inputs()), evaluate(graph, inputs())) == []
    left = {node.name for node in graph.nodes if op_name(node.target).startswith("_c10d_functional::")}
    assert not left & {remark.collective for remark in report.fused}
    ops = [
        node for node in graph.nodes if op_name(node.target).startswith("asynctp::") and "matmul" in str(node.target)
    ]
    assert len(ops) == len(report.fused) - sum(map(is_joined, report.fused))
    return report


def is_joined(remark: object) -> bool:
    return "only a sum is used" in " ".join(str(remark).split())


@pytest.mark.parametrize("first", [0, PER_TEST, *map(thorough, range(2 * PER_TEST, 8 * PER_TEST, PER_TEST))])
def test_chains_that_meet_compute_the_same(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}:\n{program(seed).b.graph}") from error


def test_programs_have_chains_that_meet() -> None:
    """Sums that become one, terms that are no products, products with other users, collectives beside products."""
    remarks = [remark for seed in range(2 * PER_TEST) for remark in check(seed).remarks]
    codes = Counter(remark.code for remark in remarks)
    assert min(codes[code] for code in ("ATP202", "ATP401", "ATP404")) >= 5
    assert min(sum(text in str(one) for one in remarks) for text in ("only a sum is used", "computed before, and")) >= 5
