"""Gathers made again in the backward: which are worth it, what the forward keeps then, and where they stand."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from graph_builder import GraphBuilder, aten, c10d
from joint_graphs import Divided, divided, marked, outputs_of
from passes import run_pass
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from asynctp_passes import Config, StrictError
from asynctp_passes.config import Rematerialize
from asynctp_passes.ir.order import REMATERIALIZED, joint_questions
from asynctp_passes.ir.records import Answer, Question
from asynctp_passes.ranks import undo
from asynctp_passes.remat import partition
from asynctp_passes.remat.joint import LEAST_BYTES, run_joint
from asynctp_passes.torch_private import partitioner

Build = Callable[[GraphBuilder], tuple[Node, ...]]


# --- joint graphs by hand --------------------------------------------------------------------------------------
class Layer:
    """`y = all_gather(relu(x)) @ w` and the gradient of its input; `rows` are a rank's."""

    def __init__(self, b: GraphBuilder, rows: int = 4, width: int = 8, columns: int = 6, name: str = "") -> None:
        self.b = b
        self.x = b.input(f"primals_x{name}", [rows, width], torch.bfloat16)
        self.w = b.input(f"primals_w{name}", [width, columns], torch.bfloat16)
        self.dy = b.input(f"tangents_{name or 1}", [rows * b.ranks, columns], torch.bfloat16)
        self.full = b.gather(b.relu(self.x))
        self.y = b.mm(self.full, self.w)
        gradient = b.scatter(b.mm(self.dy, b.permute(self.w, [1, 0])))
        self.dx = b.call(aten.threshold_backward.default, gradient, self.x, 0)

    def dw(self, of: Node | None = None) -> Node:
        """The weight's gradient: the products of what was gathered, or of what was computed from it, and of `dy`."""
        return self.b.mm(self.b.permute(of or self.full, [1, 0]), self.dy)

    @property
    def gather(self) -> Node:
        return self.full.all_input_nodes[0]


def needed(b: GraphBuilder) -> tuple[Node, ...]:
    layer = Layer(b)
    return layer.y, layer.dx, layer.dw()


def needed_through_views(b: GraphBuilder) -> tuple[Node, ...]:
    layer = Layer(b)
    whole = b.reshape(b.reshape(layer.full, [2, 4, 8]), [8, 8])
    return layer.y, layer.dx, layer.dw(whole)


def needed_quantized(b: GraphBuilder) -> tuple[Node, ...]:
    """The weight's gradient takes what is computed from all gathered rows, as in fp8 with rowwise scales."""
    layer = Layer(b)
    scale = b.call(aten.amax.default, b.call(aten.abs.default, layer.full), [0], True)
    return layer.y, layer.dx, layer.dw(b.call(aten.div.Tensor, layer.full, scale))


def needed_twice(b: GraphBuilder) -> tuple[Node, ...]:
    """Two layers, each with a gather."""
    one, two = Layer(b), Layer(b, name="two")
    return one.y, two.y, one.dx, two.dx, one.dw(), two.dw()


def needed_in_two_groups(b: GraphBuilder) -> tuple[Node, ...]:
    """Each group has one gather, so that both are the first of their group."""
    one = Layer(b)
    b.group = "other"
    two = Layer(b, name="two")
    return one.y, two.y, one.dx, two.dx, one.dw(), two.dw()


def silent_backward(b: GraphBuilder) -> tuple[Node, ...]:
    """The backward communicates nothing, so that another rank need not run one."""
    full = b.gather(b.relu(b.input("primals_x", [4, 8], torch.bfloat16)))
    y = b.mm(full, b.input("primals_w", [8, 6], torch.bfloat16))
    return y, b.mm(b.permute(full, [1, 0]), b.input("tangents_1", [8, 6], torch.bfloat16))


def frozen_weight(b: GraphBuilder) -> tuple[Node, ...]:
    layer = Layer(b)
    return layer.y, layer.dx


def product_is_needed(b: GraphBuilder) -> tuple[Node, ...]:
    """The backward wants what the matmul made, not what it took."""
    layer = Layer(b)
    return layer.y, layer.dx, b.mul(b.relu(layer.y), layer.dy)


def computed_is_returned(b: GraphBuilder) -> tuple[Node, ...]:
    """What is computed from the gathered tensor leaves the forward, and the backward needs none of it."""
    layer = Layer(b)
    return layer.y, b.relu(layer.full), layer.dx


def gathered_is_returned(b: GraphBuilder) -> tuple[Node, ...]:
    layer = Layer(b)
    return layer.y, layer.full, layer.dx, layer.dw()


def view_is_returned(b: GraphBuilder) -> tuple[Node, ...]:
    layer = Layer(b)
    return layer.y, b.reshape(layer.full, [64]), layer.dx, layer.dw()


def gradient_is_gathered(b: GraphBuilder) -> tuple[Node, ...]:
    """The gather belongs to the backward as it is."""
    dy, saved = b.input("tangents_1", [4, 6]), b.input("primals_1", [8, 8])
    full = b.gather(dy)
    return b.mm(full, b.input("primals_w", [6, 8])), b.mm(b.permute(saved, [1, 0]), full)


def weight_is_gathered(b: GraphBuilder) -> tuple[Node, ...]:
    """FSDP's: whether to keep weights is for it to say."""
    x, dy = b.input("primals_1", [16, 8]), b.input("tangents_1", [16, 6])
    w = b.gather(b.input("primals_w", [4, 6]))
    return b.mm(x, w), b.mm(dy, b.permute(w, [1, 0])), b.mm(b.permute(x, [1, 0]), dy)


def shard_is_written(b: GraphBuilder) -> tuple[Node, ...]:
    """After the forward the input holds something else."""
    layer = Layer(b)
    b.call(aten.copy_.default, layer.x, b.mul(layer.x, layer.x))
    return layer.y, layer.dx, layer.dw()


def no_matmul_takes_it(b: GraphBuilder) -> tuple[Node, ...]:
    """No fused op of the forward has it, so that nothing of it is hidden there."""
    layer = Layer(b)
    other = b.gather(b.input("primals_3", [4, 8], torch.bfloat16))
    return layer.y, b.relu(other), layer.dx, layer.dw(other)


def joined_in_the_forward(b: GraphBuilder) -> tuple[Node, ...]:
    """The joined tensor is kept, and not the buffer, which may hold something else by then."""
    layer, buffer = Layer(b), b.input("primals_buffer", [8, 8], torch.bfloat16)
    joined = b.cat([layer.full, buffer])
    y = b.mm(joined, b.permute(b.input("primals_v", [6, 8], torch.bfloat16), [1, 0]))
    return layer.y, y, layer.dx, b.mm(b.permute(joined, [1, 0]), b.input("tangents_2", [16, 6], torch.bfloat16))


def sum_is_needed(b: GraphBuilder) -> tuple[Node, ...]:
    """A sum may be rounded in another way when it is done again, and is kept; it is small."""
    layer = Layer(b)
    total = b.call(aten.sum.dim_IntList, layer.full, [1], True)
    return layer.y, layer.dx, layer.dw(), b.mul(layer.dy, total)


def computed_by_an_op_of_its_own(b: GraphBuilder) -> tuple[Node, ...]:
    """Nothing is known of such an op: a cumulative sum here."""
    layer = Layer(b)
    rows = b.call(aten.cumsum.default, b.input("primals_rows", [8, 8], torch.bfloat16), 0)
    scaled = b.mul(layer.full, rows)
    return layer.y, layer.dx, layer.dw(scaled)


def part_of_a_product(b: GraphBuilder) -> tuple[Node, ...]:
    """The shard is a part of a larger tensor, which would be kept."""
    layer, other = Layer(b), b.input("primals_other", [4, 8], torch.bfloat16)
    made = b.mm(other, b.input("primals_wide", [8, 24], torch.bfloat16))
    full = b.gather(b.call(aten.slice.Tensor, made, 1, 0, 8))
    return b.mm(full, layer.w), layer.dx, b.mm(b.permute(full, [1, 0]), layer.dy)


def awaited_input(b: GraphBuilder) -> tuple[Node, ...]:
    """A wait gives the memory that it takes, though its schema does not say so."""
    layer, x = Layer(b), b.input("primals_other", [4, 8], torch.bfloat16)
    full = b.gather(b.call(c10d.wait_tensor.default, x))
    return b.mm(full, layer.w), layer.dx, b.mm(b.permute(full, [1, 0]), layer.dy)


def shard_is_a_view_of_what_is_computed(b: GraphBuilder) -> tuple[Node, ...]:
    layer, x = Layer(b), b.input("primals_other", [2, 2, 8], torch.bfloat16)
    full = b.gather(b.reshape(b.relu(x), [4, 8]))
    return b.mm(full, layer.w), layer.dx, b.mm(b.permute(full, [1, 0]), layer.dy)


def only_the_backward_multiplies(b: GraphBuilder) -> tuple[Node, ...]:
    """A product that the backward alone needs is computed there by plain, of an input that it keeps anyway."""
    layer, x = Layer(b), b.input("primals_other", [8, 8], torch.bfloat16)
    factor = b.mm(x, b.input("primals_square", [8, 8], torch.bfloat16))
    return layer.y, layer.dx, layer.dw(b.mul(layer.full, factor))


def view_of_what_is_written(b: GraphBuilder) -> tuple[Node, ...]:
    """Joined with a buffer that holds something else afterwards: the backward reads it then anyway."""
    layer, buffer = Layer(b), b.input("primals_buffer", [8, 8], torch.bfloat16)
    joined = b.cat([layer.full, buffer])
    b.call(aten.copy_.default, buffer, b.mul(buffer, buffer))
    return layer.y, layer.dx, b.mm(b.permute(joined, [1, 0]), b.cat([layer.dy, layer.dy]))


def joined_with_another(b: GraphBuilder) -> tuple[Node, ...]:
    """The other tensor is kept as it is: the backward joins them anyway."""
    layer, other = Layer(b), b.input("primals_other", [8, 8], torch.bfloat16)
    joined = b.cat([layer.full, other])
    return layer.y, layer.dx, b.mm(b.permute(joined, [1, 0]), b.cat([layer.dy, layer.dy]))


def scatter_is_needed(b: GraphBuilder) -> tuple[Node, ...]:
    """A reduce-scatter has nothing to gather again."""
    layer = Layer(b)
    scattered = b.scatter(b.mm(b.input("primals_3", [8, 6]), b.input("primals_4", [6, 6])))
    return layer.y, layer.dx, b.mm(b.permute(scattered, [1, 0]), b.input("tangents_2", [4, 3]))


def input_is_gathered(b: GraphBuilder, needed: bool = False) -> tuple[Node, ...]:
    """Where the backward needs no input, the program may write to it before: a buffer that it receives in, say."""
    layer = Layer(b)
    x = b.input("primals_other", [4, 8], torch.bfloat16)
    full = b.gather(b.reshape(x, [4, 8]))
    y, dw = b.mm(full, layer.w), b.mm(b.permute(full, [1, 0]), layer.dy)
    gradient = b.scatter(b.mm(layer.dy, b.permute(layer.w, [1, 0])))
    return y, b.mul(gradient, x) if needed else gradient, dw


def input_is_needed_anyway(b: GraphBuilder) -> tuple[Node, ...]:
    return input_is_gathered(b, needed=True)


def cheaply_computed_from_an_input(b: GraphBuilder) -> tuple[Node, ...]:
    """The partitioner would keep the input, and compute the shard again: the shard is saved."""
    layer = Layer(b)
    full = b.gather(b.relu(b.mul(b.relu(b.input("primals_other", [4, 8], torch.bfloat16)), layer.x)))
    return b.mm(full, layer.w), layer.dx, b.mm(b.permute(full, [1, 0]), layer.dy)


def part_of_an_input(b: GraphBuilder, op: Any = aten.unbind.int, arguments: tuple[Any, ...] = (0,)) -> tuple[Node, ...]:
    """A view, though the partitioner does not repeat it."""
    layer, x = Layer(b), b.input("primals_other", [2, 4, 8], torch.bfloat16)
    full = b.gather(b.reshape(b.call(operator.getitem, b.call(op, x, *arguments), 1), [4, 8]))
    return b.mm(full, layer.w), layer.dx, b.mm(b.permute(full, [1, 0]), layer.dy)


def part_by_its_size(b: GraphBuilder) -> tuple[Node, ...]:
    return part_of_an_input(b, aten.split_with_sizes.default, ([1, 1],))


def other_part_is_needed(b: GraphBuilder) -> tuple[Node, ...]:
    """The backward needs one half of an input, and gathers the other."""
    layer, x = Layer(b), b.input("primals_other", [8, 8], torch.bfloat16)
    first, second = (b.call(aten.slice.Tensor, x, 0, begin, begin + 4) for begin in (0, 4))
    full = b.gather(second)
    return b.mm(full, layer.w), b.mul(layer.dx, first), b.mm(b.permute(full, [1, 0]), layer.dy)


def computed_by_a_matmul(b: GraphBuilder, returned: bool = False) -> tuple[Node, ...]:
    """Matmuls are not computed again, so that their result is kept, which only the graph has."""
    layer, other = Layer(b), b.input("primals_other", [4, 8], torch.bfloat16)
    shard = b.relu(b.mm(other, b.input("primals_square", [8, 8], torch.bfloat16)))
    full = b.gather(shard)
    y, *gradients = b.mm(full, layer.w), layer.dx, b.mm(b.permute(full, [1, 0]), layer.dy)
    return (y, *([b.reshape(shard, [32])] if returned else []), *gradients)


def shard_is_returned(b: GraphBuilder) -> tuple[Node, ...]:
    return computed_by_a_matmul(b, returned=True)


def joined_with_what_is_needed_anyway(b: GraphBuilder) -> tuple[Node, ...]:
    layer, other = Layer(b), b.input("primals_other", [8, 8], torch.bfloat16)
    joined = b.cat([layer.full, other])
    dw = b.mm(b.permute(joined, [1, 0]), b.cat([layer.dy, layer.dy]))
    return layer.y, layer.dx, dw, b.mm(b.permute(other, [1, 0]), layer.dy)


def nothing_to_gather_for(b: GraphBuilder) -> tuple[Node, ...]:
    """Inference: no gradient comes in."""
    full = b.gather(b.input("primals_1", [4, 8]))
    return b.mm(full, b.input("primals_w", [8, 6])), b.relu(full)


def joint(build: Build, rematerialize: Rematerialize = "always") -> Graph:
    b = GraphBuilder(ranks=2)
    graph = b.returns(*build(b))
    run_joint(graph, Config(rematerialize=rematerialize))
    return graph


def halves(build: Build, rematerialize: Rematerialize = "always", **options: Any) -> Divided:
    b = GraphBuilder(ranks=2)
    graph = b.returns(*build(b))
    return divided(graph, Config(rematerialize=rematerialize, **options))


MINE = "lies in memory of the program's"
#: By program: the gathers that are marked, the tensors that plain alone keeps, those that are kept instead, and why a
#: gather is left, if something of it is kept for its sake.
Case = tuple[list[str], list[str], list[str], str]
GATHER, SECOND = ["all_gather_into_tensor"], ["all_gather_into_tensor_1"]
CASES: dict[Build, Case] = {
    needed: (GATHER, ["permute_1"], ["relu"], ""),
    needed_through_views: (GATHER, ["permute_1"], ["relu"], ""),
    needed_quantized: (GATHER, ["permute_1"], ["relu"], ""),
    needed_twice: ([*GATHER, *SECOND], ["permute_2", "permute_3"], ["relu", "relu_1"], ""),
    needed_in_two_groups: ([*GATHER, *SECOND], ["permute_2", "permute_3"], ["relu", "relu_1"], ""),
    silent_backward: ([], [], [], ""),
    frozen_weight: ([], [], [], ""),
    product_is_needed: ([], [], [], ""),
    computed_is_returned: ([], [], [], ""),
    gathered_is_returned: (GATHER, [], [], ""),
    view_is_returned: (GATHER, [], [], ""),
    gradient_is_gathered: ([], [], [], ""),
    weight_is_gathered: ([], [], [], ""),
    shard_is_written: (GATHER, ["permute_1"], ["relu"], ""),
    no_matmul_takes_it: ([], [], [], ""),
    view_of_what_is_written: (GATHER, ["wait_tensor"], ["relu"], ""),
    joined_with_another: (GATHER, ["wait_tensor"], ["relu"], ""),
    joined_with_what_is_needed_anyway: (GATHER, ["wait_tensor"], ["relu"], ""),
    joined_in_the_forward: (GATHER, [], [], "primals_buffer is an input"),
    sum_is_needed: (GATHER, ["wait_tensor"], ["relu"], ""),
    computed_by_an_op_of_its_own: (GATHER, [], [], "cumsum is aten.cumsum.default"),
    only_the_backward_multiplies: (GATHER, [], [], "mm_2 is aten.mm.default"),
    part_of_a_product: (SECOND, [], [], "is a part of mm_2, which would be kept"),
    awaited_input: (SECOND, [], [], MINE),
    shard_is_a_view_of_what_is_computed: (SECOND, ["permute_1"], ["reshape"], ""),
    input_is_gathered: (SECOND, [], [], MINE),
    input_is_needed_anyway: (SECOND, [], [], MINE),
    cheaply_computed_from_an_input: (SECOND, ["permute_1"], ["relu_2"], ""),
    part_of_an_input: (SECOND, [], [], MINE),
    part_by_its_size: (SECOND, [], [], MINE),
    other_part_is_needed: (SECOND, [], [], MINE),
    computed_by_a_matmul: (SECOND, ["permute_1"], ["relu_1"], ""),
    shard_is_returned: (SECOND, [], [], MINE),
    scatter_is_needed: ([], [], [], ""),
    nothing_to_gather_for: ([], [], [], ""),
}


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_what_is_kept(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worth, plain, kept, why = CASES[build]
    never, always = halves(build, "never"), halves(build)
    assert marked(joint(build)) == worth
    assert (sorted(set(never.kept) - set(always.kept)), sorted(set(always.kept) - set(never.kept))) == (plain, kept)
    assert sorted(always.given) == sorted(always.kept)
    assert (always.kept_bytes < never.kept_bytes) == bool(plain)
    assert len(always.again) == (len(worth) if plain else 0)
    told = [text for text in caplog.messages if "not made again" in text]
    assert (len(told), all(why in text for text in told)) == (bool(why), True), told


def test_no_input_is_read_for_it() -> None:
    """The backward uses each input of the program as often as plain's does, and for the same."""
    for build in CASES:
        never, always = halves(build, "never"), halves(build)
        uses = [
            {node.name: len(node.users) for node in half.backward.nodes if node.name.startswith("primals_")}
            for half in (never, always)
        ]
        assert uses[0] == uses[1], build


def test_what_is_not_fused_is_kept() -> None:
    """Below the configured size the gather stays as it is, and what it gathered with it."""
    b = GraphBuilder(ranks=2)
    graph = b.returns(*needed(b))
    run_joint(graph, Config(rematerialize="always", min_bytes=10**9))
    assert marked(graph) == []


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_never_marks_nothing(build: Build) -> None:
    assert marked(joint(build, "never")) == []


@pytest.mark.parametrize("policy", CheckpointPolicy)
@pytest.mark.parametrize("place", ["gather", "full"])
def test_activation_checkpointing_comes_first(place: str, policy: CheckpointPolicy) -> None:
    """Its tags stay as they are, whatever they say."""
    b = GraphBuilder(ranks=2)
    layer = Layer(b)
    graph = b.returns(layer.y, layer.dx, layer.dw())
    getattr(layer, place).meta["recompute"] = policy
    before = [partitioner.recompute_tag(node) for node in graph.nodes]
    run_joint(graph, Config(rematerialize="always"))
    assert [partitioner.recompute_tag(node) for node in graph.nodes] == before
    assert marked(graph) == []


def test_checkpointing_decides_on_the_shard_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    b = GraphBuilder(ranks=2)
    graph = b.returns(*computed_by_a_matmul(b))
    for node in graph.nodes:
        if node.name == "mm_2":
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if node.name == "relu_1":
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    assert divided(graph, Config(rematerialize="always")).again == []
    assert "activation checkpointing decides on" in caplog.text


# --- where it stands -------------------------------------------------------------------------------------------
def texts_of(build: Build) -> list[str]:
    """The deviations that ranks are asked about after the partition."""
    with mock.patch.object(undo, "ask", wraps=undo.ask) as ask:
        halves(build)
    questions, _ = ask.call_args.args
    assert {one.phase for one in questions} <= {"partition"}
    return [text for one in questions for text in one.deviations]


def needed_early(b: GraphBuilder) -> tuple[Node, ...]:
    """The backward needs it before it communicates."""
    full = b.gather(b.relu(b.input("primals_x", [4, 8], torch.bfloat16)))
    y = b.mm(full, b.input("primals_w", [8, 6], torch.bfloat16))
    dy = b.input("tangents_1", [8, 6], torch.bfloat16)
    dw = b.mm(b.permute(full, [1, 0]), dy)
    return y, b.scatter(b.mm(dy, b.permute(dw, [1, 0]))), dw


def test_ranks_are_asked_about_the_place_in_the_backward() -> None:
    (late,) = texts_of(needed)
    assert late.startswith("again: all_gather 0 after 1 collective (1 of the group, ")
    assert texts_of(needed_early) == ["again: all_gather 0 before all collectives of the backward"]
    assert halves(needed_early).communications == ["all_gather_into_tensor", "reduce_scatter_tensor"]
    assert halves(needed).communications == ["reduce_scatter_tensor", "all_gather_into_tensor"]
    assert texts_of(silent_backward) == texts_of(frozen_weight) == []


def refusing(group: str) -> Any:
    """Lets a rank refuse what a group is asked about the halves."""

    def answered(questions: list[Question], config: Config) -> list[Answer]:
        answers = []
        for one in questions:
            refused = {text: "rank 1 does not" for text in one.deviations if one.group == group}
            answers.append(Answer(frozenset(one.deviations) - set(refused), refused))
        return answers

    return mock.patch.object(undo, "ask", answered)


@pytest.mark.parametrize(
    ("build", "kept"), [(needed_twice, {"permute_2", "permute_3"}), (needed_in_two_groups, {"permute_2"})]
)
def test_what_a_rank_refuses_is_kept(build: Build, kept: set[str], caplog: pytest.LogCaptureFixture) -> None:
    """A group makes all of its gathers again, or none, whatever another group does."""
    texts = texts_of(build)
    both = halves(build)
    with refusing("tp"):
        one = halves(build)
    assert f"{texts[0]} is left out, since a rank does not do it: rank 1 does not" in caplog.text
    assert (len(both.again), len(one.again)) == (2, 2 - len(kept))
    assert set(one.kept) - set(both.kept) == kept


def test_both_halves_know_what_was_agreed_on_them() -> None:
    """The accord of each is of that too, so that ranks which divide otherwise meet in unlike calls."""
    for refused in (False, True):
        with refusing("tp" if refused else ""):
            found = halves(needed_in_two_groups)
        for half in (found.forward, found.backward):
            told = {group: [one.done for one in asked] for group, asked in joint_questions(half).items()}
            assert told == {"tp": [not refused], "other": [True]}


def test_gathers_keep_the_programs_order() -> None:
    """The backward needs the second one first, and nothing communicates in between."""

    def build(b: GraphBuilder) -> tuple[Node, ...]:
        one, two = Layer(b), Layer(b, name="two")
        return one.y, two.y, one.dx, two.dx, two.dw(), one.dw()

    found = halves(build)
    sources = [node for node in found.backward.nodes if node.name in found.again]
    assert [node.args[0].name for node in sources] == ["relu", "relu_1"]  # type: ignore[union-attr]


# --- what goes wrong -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["rematerialize", "find_rematerializations", "communicated", "tangents_of"])
def test_an_error_leaves_what_the_partitioner_made(where: str, internal_errors: None) -> None:
    """Whether it comes before the graph is divided, or after."""
    plain = halves(needed, "never")
    b = GraphBuilder(ranks=2)
    graph = b.returns(*needed(b))
    config = Config(rematerialize="always", strict="off")
    run_joint(graph, config)
    gm = GraphModule(torch.nn.Module(), graph)

    def divide() -> tuple[GraphModule, GraphModule]:
        return partitioner.default_partition(gm, [], compiler="inductor", num_fwd_outputs=1)

    with mock.patch.object(partition, where, side_effect=RuntimeError("no such thing")):
        forward, backward, report = partition.run_partition(gm, divide, 1, config)
    assert report is not None
    assert len(report.internal_errors) == 1
    assert [node.name for node in outputs_of(forward.graph)] == [node.name for node in outputs_of(plain.forward)]
    assert not any(REMATERIALIZED in node.meta for node in backward.graph.nodes)


def test_an_error_raises_if_strict(internal_errors: None) -> None:
    with (
        mock.patch.object(partition, "find_rematerializations", side_effect=RuntimeError("no such thing")),
        pytest.raises(StrictError),
    ):
        halves(needed, strict="all")


def test_a_partitioner_that_names_things_in_its_own_way(caplog: pytest.LogCaptureFixture) -> None:
    """As one that quantizes what it keeps."""
    caplog.set_level(logging.INFO)

    def other(gm: GraphModule, inputs: list[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
        forward, backward = partitioner.default_partition(gm, inputs, **options)
        next(iter(backward.graph.nodes)).name = "unpacked"
        return forward, backward

    b = GraphBuilder(ranks=2)
    assert divided(b.returns(*needed(b)), Config(rematerialize="always"), other).again == []
    assert "what is saved is not what the backward takes" in caplog.text


# --- what is worth it ------------------------------------------------------------------------------------------
def layers(*sizes: tuple[int, int, int]) -> Build:
    """A layer of so many rows a rank, columns of the input and of the weight, for each."""

    def build(b: GraphBuilder) -> tuple[Node, ...]:
        made = [Layer(b, *size, name=f"_{index}") for index, size in enumerate(sizes)]
        return *(one.y for one in made), *(one.dx for one in made), *(one.dw() for one in made)

    return build


LARGE = (4096, 4096, 4096)  # of two ranks each receives 32 MiB


def quantized_by_rows_and_by_columns(rows: int, width: int, columns: int) -> Build:
    """As in fp8 with rowwise scales: quantized by rows for the product, and by columns for the weight's gradient."""

    def build(b: GraphBuilder) -> tuple[Node, ...]:
        x = b.input("primals_x", [rows, width], torch.bfloat16)
        full = b.gather(b.relu(x))
        scale = b.call(aten.amax.default, b.call(aten.abs.default, full), [1], True)
        scale = b.call(torch.ops.prims.convert_element_type.default, scale, torch.float32)
        fp8 = torch.ops.prims.convert_element_type.default
        by_rows = b.call(fp8, b.call(aten.div.Tensor, full, scale), torch.float8_e4m3fn)
        w = b.input("primals_w", [width, columns], torch.float8_e4m3fn, column_major=True)
        y = b.scaled_mm(by_rows, w, scale, b.input("primals_s", [1, columns]))
        largest = b.call(aten.amax.default, b.call(aten.abs.default, full), [0], True)
        by_columns = b.call(aten.div.Tensor, full, largest)
        dy = b.input("tangents_1", [rows * b.ranks, columns], torch.bfloat16)
        return y, b.mm(b.permute(by_columns, [1, 0]), dy), b.mm(b.permute(x, [1, 0]), b.scatter(dy))

    return build


def test_auto_beside_a_gather_of_what_is_computed() -> None:
    """The fused op gathers fp8; the gather of bf16, which stays for the backward only, is made there."""
    assert marked(joint(quantized_by_rows_and_by_columns(*LARGE), "auto")) == GATHER
    assert marked(joint(quantized_by_rows_and_by_columns(4, 8, 8), "always")) == GATHER
    assert marked(joint(quantized_by_rows_and_by_columns(4, 4, 8), "always")) == GATHER, "ATP403 as long as both are"
    assert marked(joint(quantized_by_rows_and_by_columns(4, 8, 8), "auto")) == []


def test_a_maximum_is_found_again_too() -> None:
    """The forward need not gather bf16 for the scale, which is small, and would be kept."""
    never, always = (halves(quantized_by_rows_and_by_columns(4, 8, 8), mode) for mode in ("never", "always"))
    assert "amax_1" in "".join(node.name for node in always.backward.nodes)
    assert always.kept_bytes < never.kept_bytes
    assert not any("amax_1" in node.name for node in always.forward.nodes)


@pytest.mark.parametrize(
    ("sizes", "made_again"),
    [
        ([LARGE], 1),
        ([(4095, 4096, 4096)], 0),  # too few bytes for a call
        ([(4096, 4096, 512)], 0),  # the products of weights' gradients take less time than the gather
        ([LARGE, (64, 4096, 4096)], 1),
        ([LARGE, LARGE], 2),
        ([LARGE, (4096, 4096, 512)], 2),  # together they take more than both gathers
        ([(4096, 4096, 700), (4096, 4096, 700)], 0),  # together more than one of them
    ],
)
def test_auto(sizes: list[tuple[int, int, int]], made_again: int) -> None:
    assert LEAST_BYTES == 4096 * 4096 * 2
    graph = joint(layers(*sizes), "auto")
    assert len(marked(graph)) == made_again
    assert len(marked(joint(layers(*sizes), "always"))) == len(sizes)


def test_auto_leaves_symbolic_sizes() -> None:
    """How much it moves is not known, so neither is whether it is worth a call."""
    found = {}
    for rematerialize in ("auto", "always"):
        b = GraphBuilder(ranks=2)
        x = b.input("primals_1", [1 << 14, 4096], dynamic=0)
        full = b.gather(x)
        y = b.mm(full, b.input("primals_2", [4096, 6]))
        dy = b.mul(y, b.input("tangents_1", [6]))
        graph = b.returns(y, b.mm(b.permute(full, [1, 0]), dy), b.mm(b.permute(x, [1, 0]), b.scatter(dy)))
        run_joint(graph, Config(rematerialize=rematerialize))
        found[rematerialize] = len(marked(graph))
    assert found == {"auto": 0, "always": 1}


def test_views_of_computed_sizes() -> None:
    """Sizes are numbers: what is laid out by them is made again too, of sizes that the backward reads off tensors."""
    b = GraphBuilder(ranks=2)
    x = b.mm(b.input("primals_1", [6, 8], dynamic=0), b.input("primals_3", [8, 8]))
    full = b.gather(x)
    rows = b.call(operator.mul, b.call(aten.sym_size.int, x, 0), 2 * 2)
    view = b.reshape(full, [rows, 4])
    y = b.mm(view, b.input("primals_2", [4, 6]))
    dy = b.mul(y, b.input("tangents_1", [6]))
    graph = b.returns(y, b.mm(b.permute(view, [1, 0]), dy), b.scatter(dy), b.mul(x, b.call(aten.sum.default, dy)))
    found = divided(graph, Config(rematerialize="always"))
    assert (found.again, found.kept) == (GATHER, ["mm", "mm_1"])


# --- what becomes of it ----------------------------------------------------------------------------------------
def test_what_runs_of_it() -> None:
    """The pass on the backward graph: the gather that is made again goes beside the matmuls that overlap it."""
    b = GraphBuilder(ranks=2)
    layer = Layer(b)
    graph = b.returns(layer.dx, layer.dw())
    graph.erase_node(layer.y)
    layer.gather.meta[REMATERIALIZED] = 128
    report = run_pass(graph)
    (gather,) = report.with_outcome("OVERLAPPED")
    assert report.others == (gather,)
    assert (gather.code, gather.rematerialized_bytes) == ("ATP404", 128)
    assert gather.message.endswith("[beside mm_1: 1 product]")
    assert c10d.all_gather_into_tensor.default not in {node.target for node in graph.nodes}
