"""Every remedy of the catalogue is a promise: each is followed on a row of the table of reasons, and then it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import remedies_of_limits  # noqa: F401  (adds its remedies)
import remedies_of_scope  # noqa: F401
import remedies_of_structure  # noqa: F401
import torch
from lockstep import differences, evaluate
from reason_rows import REMEDIES, Remedy
from test_reasons import remarks_of
from torch import Tensor
from torch.fx import Graph, Node

from asynctp_passes import Remark
from asynctp_passes.reasons import CATALOGUE

NOTHING_TO_DO = {
    "ALL_TO_ALL",
    "BEHIND_PRODUCTS",
    "MATMUL_TAKEN",
    "NO_ELEMENTS",
    "NO_MATMUL",
    "OPERAND_DEPENDS_ON_GATHER",
    "OTHER_COLLECTIVE",
    "RESULT_DROPPED",
    "SCATTER_BEHIND_PRODUCTS",
    "SINGLE_RANK",
}
"""The reasons whose hints say so."""

NO_PAIR = {
    "INTERNAL_ERROR": "it is a bug of asynctp, and its hint says what to send",
    "PRODUCT_GATHERED": "its hint says how to do without the collective, of which nothing is reported then",
}
"""Other reasons that no program mends, and why."""


def remark_before(remedy: Remedy) -> Remark:
    return remarks_of(remedy.row, remedy.row.graph())[-1]


@pytest.mark.parametrize("remedy", REMEDIES, ids=[remedy.id for remedy in REMEDIES])
def test_remedy(remedy: Remedy) -> None:
    """The row has the reason. With its hint followed the collective is fused, and nothing is missed."""
    before = remark_before(remedy)
    assert before.name == remedy.row.name
    followed = replace(remedy.row, build=remedy.build, config={**remedy.row.config, **remedy.config})
    with remedy.using():
        remarks = remarks_of(followed, followed.graph())
    gathers = "gather" in before.kind
    outcomes = {remark.outcome for remark in remarks if ("gather" in remark.kind) == gathers}
    assert remedy.outcome in outcomes, [str(remark) for remark in remarks]
    assert not [str(remark) for remark in remarks if remark.outcome == "MISSED"]


SAME = [remedy for remedy in REMEDIES if not remedy.differs and remedy.build is not remedy.row.build]


@pytest.mark.parametrize("remedy", SAME, ids=[remedy.id for remedy in SAME])
def test_remedy_computes_the_same(remedy: Remedy) -> None:
    """Values are compared, not how they lie in memory; the mended program may return more."""
    before, after = remedy.row.graph(), replace(remedy.row, build=remedy.build).graph()
    values = [values_of([*inputs_of(before), *inputs_of(after)], rank, remedy.equal) for rank in range(4)]
    expected, found = returned(before, values), returned(after, values)
    count = len(expected[0])
    assert not differences(expected, [outs[:count] for outs in found])


def inputs_of(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def values_of(inputs: list[Node], rank: int, equal: tuple[str, ...]) -> dict[str, Tensor]:
    """A value for each input, another one on each rank but for those that are `equal`; integers are below 15."""
    found: dict[str, Tensor] = {}
    for place, node in enumerate(inputs):
        fake, seed = node.meta["val"], place if node.name in equal else place + 100 * rank
        generator, sizes = torch.Generator().manual_seed(seed), [int(size) for size in fake.shape]
        made = torch.rand(sizes, generator=generator) + 0.5
        made = made if fake.dtype.is_floating_point else torch.randint(0, 15, sizes, generator=generator)
        strides = [int(stride) for stride in fake.stride()]
        found.setdefault(node.name, torch.empty_strided(sizes, strides, dtype=fake.dtype).copy_(made))
    return found


def returned(graph: Graph, values: list[dict[str, Tensor]]) -> list[list[Tensor]]:
    """What a graph returns on each rank, in contiguous tensors."""
    inputs = [[of_rank[node.name].clone() for node in inputs_of(graph)] for of_rank in values]
    return [[out.contiguous() for out in outs] for outs in evaluate(graph, inputs)]


def test_every_hint_is_followed_or_says_that_there_is_nothing_to_do() -> None:
    followed = {(one.row.name, CATALOGUE[one.row.name].hint_for(remark_before(one).kind)) for one in REMEDIES}
    hints = {(name, hint) for name, reason in CATALOGUE.items() for hint in reason.remedies().values()}
    left = hints - followed
    assert {name for name, _ in left} <= NOTHING_TO_DO | NO_PAIR.keys()
    assert all(hint.startswith("nothing to do") for name, hint in left if name in NOTHING_TO_DO)
    assert not (NOTHING_TO_DO | NO_PAIR.keys()) & {name for name, _ in followed}
