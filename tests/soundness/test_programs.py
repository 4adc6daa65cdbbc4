"""The random programs are what they say: honest chains gather and scatter, adversarial ones mostly do not."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from lockstep import differences, evaluate, op_name
from programs import Builder, Wishes, gather_views, scatter_views, seeded_program
from torch import Tensor
from torch.fx import Node

SEEDS = range(80)
COUNT = 2
generated = functools.cache(seeded_program)
Views = Callable[[Builder, Node, int, int, bool], Node]


def _moved(views: Views, seed: int, attack: bool) -> tuple[Tensor, Tensor, int]:
    """What a random chain of views makes of distinct numbers, the numbers, and the dimension that is moved."""
    choose = random.Random(seed).choice
    b = Builder(choose, COUNT)
    shape = [choose([1, 2, 3]) for _ in range(choose([2, 3, 4]))]
    shape[-1] = choose([2, 3])
    dim = choose(range(len(shape)))
    shape[0 if views is gather_views else dim] *= COUNT
    x = b.placeholder(shape, torch.float64)
    b.graph.output((views(b, x, dim, COUNT, attack),))
    values = torch.arange(1, x.meta["val"].numel() + 1, dtype=torch.float64).reshape(shape)
    ((moved,),) = evaluate(b.graph, [[values]])
    return moved, values, dim


def _definition(views: Views, x: Tensor, dim: int) -> Tensor:
    if views is gather_views:
        return torch.cat(x.chunk(COUNT, 0), dim)
    return torch.cat(x.chunk(COUNT, dim), 0)


@pytest.mark.parametrize("views", [gather_views, scatter_views])
def test_honest_views_move_blocks(views: Views) -> None:
    for seed in SEEDS:
        moved, x, dim = _moved(views, seed, attack=False)
        assert torch.equal(moved, _definition(views, x, dim)), f"seed {seed}"


@pytest.mark.parametrize("views", [gather_views, scatter_views])
def test_attacked_views_mostly_differ(views: Views) -> None:
    differ = 0
    for seed in SEEDS:
        moved, x, dim = _moved(views, seed, attack=True)
        expected = _definition(views, x, dim)
        differ += moved.shape != expected.shape or not torch.equal(moved, expected)
    assert differ > 0.7 * len(SEEDS)


def test_attacks_often_keep_the_shape() -> None:
    """Look-alikes are what tells a proof from a guess: same shape, other elements."""
    alike = 0
    for seed in SEEDS:
        moved, x, dim = _moved(gather_views, seed, attack=True)
        expected = _definition(gather_views, x, dim)
        alike += moved.shape == expected.shape and not torch.equal(moved, expected)
    assert alike > 0.25 * len(SEEDS)


def test_programs_are_reproducible() -> None:
    first, second = seeded_program(7), seeded_program(7)
    assert str(first.graph) == str(second.graph)
    assert not differences(first.make_inputs(1), second.make_inputs(1))
    assert differences(first.make_inputs(1), first.make_inputs(2))


def test_ranks_hold_different_data() -> None:
    program = seeded_program(3, Wishes(dtypes=(torch.float32,)))
    inputs = program.make_inputs(0)
    assert all(not torch.equal(inputs[0][index], inputs[1][index]) for index in range(len(program.inputs)))


@pytest.mark.parametrize("honest", [True, False])
def test_programs_run_as_their_fake_values_say(honest: bool) -> None:
    for seed in SEEDS:
        program = generated(seed, Wishes(honest=honest))
        program.graph.lint()
        assert program.honest == honest
        (results,) = program.graph.output_node().args
        assert isinstance(results, tuple)
        for outs in evaluate(program.graph, program.make_inputs(seed), program.groups):
            for node, out in zip(results, outs, strict=True):
                fake = node.meta["val"]
                assert (fake.dtype, fake.shape) == (out.dtype, out.shape), f"seed {seed}: {node}"


def test_honest_counts_match_collectives() -> None:
    """A scatter chain has one reduce-scatter or all-reduce, a gather chain one all-gather, or two with numbers."""
    for seed in SEEDS:
        program = generated(seed, Wishes(honest=True))
        names = Counter(op_name(node.target) for node in program.graph.nodes)
        sides = ("reduce_scatter", "all_reduce", "all_gather")
        counts = {side: sum(names[name] for name in names if side in name) for side in sides}
        counts["reduce_scatter"] += counts.pop("all_reduce")
        extra = sum(note.startswith(("scale gathered too", "numbers gathered apart")) for note in program.notes)
        gathers = program.gathers + extra + program.apart
        assert counts == {"reduce_scatter": program.scatters, "all_gather": gathers}


def test_variety() -> None:
    """Every form, matmul, attack and spelling of views turns up."""
    programs = [seeded_program(seed) for seed in range(400)]
    ops = Counter(op_name(node.target) for program in programs for node in program.graph.nodes)
    notes = Counter(note.split(" of ")[0] for program in programs for note in program.notes)
    wanted_ops = (
        "mm addmm bmm baddbmm linear matmul _scaled_mm "
        "split split_with_sizes chunk slice narrow select unbind stack cat permute clone flip"
    )
    assert not [name for name in wanted_ops.split() if not ops[f"aten::{name}"]]
    attacks = ["lossy", "reorder", "reverse", "repeat", "drop", "trim", "wrong_dim", "permute", "finer", "not_moved"]
    assert not [name for name in attacks if not notes[f"attack {name}"]]
    leaks = [note for note in notes if note.startswith(("leaks", "mutates"))]
    assert len(leaks) >= 7
    assert notes["2 x 2 mesh"]
    assert notes["scales behind the product"]
    assert len([note for note in notes if note.startswith("scale attack")]) >= 3
    assert ops["_c10d_functional::all_reduce"] > 10
    assert 0.2 < sum(program.honest for program in programs) / len(programs) < 0.6
