"""Ranks whose programs differ: random ones, rewritten and run in lockstep in one process, and compiled on real ranks.

`HYPOTHESIS_PROFILE=thorough` judges 5,000 programs in lockstep and 200 on ranks. `judge_program.py` runs one by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import rank_lockstep
import torch
from interpreter import interpreter_fault
from judge_program import report
from passes import run_pass
from profiles import THOROUGH, thorough
from rank_lockstep import OWN_TRANSPORT, RIGHT, Setting, Verdict, accord_of, check
from rank_pool import SABOTAGES, WAIT_S, judge_on_ranks
from rank_programs import KINDS, PLAIN, Program, focused, mixed, of_own_parts, smaller
from rank_variations import VARIATIONS
from rank_writer import Outline, Stage
from ranks import PATIENCE
from torch.fx import Graph, Node

from asynctp_passes import Report, ops
from asynctp_passes.ir.records import Question

FOUND: dict[str, tuple[tuple[int, int], ...]] = {
    "no_matmul": ((3, 4),),
    "gathered_dropped": ((2, 2),),
    "products_beside": ((1, 2), (5, 2)),
    "later": ((0, 2), (2, 2), (7, 4)),
    "needs_a_later_collective": ((0, 2), (2, 2), (3, 4)),
    "extreme_factor": ((3, 4),),
    "converted_between": ((1, 2),),
    "scaled_mm": ((1, 2),),
    "summed_with_the_next": ((1, 2),),
}
"""Seeds and numbers of ranks that showed a fault of a kind, where seed 0 does not: they are judged ever since."""

GROUPS = {"ALL": ((0, 1),), "SIDE": ((0, 1),)}
PER_KIND, MIXED = (80, 1_000) if THOROUGH else (1, 8)
ON_RANKS_PER_KIND, ON_RANKS_MIXED = (3, 50) if THOROUGH else (0, 3)


# --- in lockstep ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_in_lockstep(kind: str) -> None:
    assert_right(of_kind(kind, PER_KIND), check)


@pytest.mark.parametrize("part", range(8))
def test_many_differences_in_lockstep(part: int) -> None:
    """All kinds together."""
    assert_right((mixed(seed, 4 if seed % 4 == 3 else 2) for seed in range(part, MIXED, 8)), check)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_by_own_transport_in_lockstep(kind: str) -> None:
    """As on GPUs."""
    assert_right(of_kind(kind, PER_KIND), partial(check, setting=OWN_TRANSPORT))


@pytest.mark.parametrize("own_transport", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_what_is_refused_in_lockstep(part: int, own_transport: bool) -> None:
    """Groups leave out what all of their ranks would do, each by itself."""
    for seed in range(part, MIXED, 4):
        judge = partial(check, setting=Setting(own_transport, refusing=seed))
        assert_right([mixed(seed, 4 if seed % 4 == 3 else 2)], judge)


@pytest.mark.parametrize(
    ("kind", "own_transport"),
    [
        (kind, own) if number % 4 == 2 * own or (kind in FOUND and number % 2 == own) else thorough((kind, own))
        for number, kind in enumerate(KINDS)
        for own in (False, True)
    ],
)
def test_a_kind_whose_forms_ranks_run_apart_in_lockstep(kind: str, own_transport: bool) -> None:
    """All ranks have compiled each form, and have agreed on it; then a rank runs another one than its peers."""
    assert_right(of_kind(kind, PER_KIND), partial(check, setting=Setting(own_transport, apart=True)))


@pytest.mark.parametrize("own_transport", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_forms_that_ranks_run_apart_in_lockstep(part: int, own_transport: bool) -> None:
    for seed in range(part, MIXED, 4):
        judge = partial(check, setting=Setting(own_transport, apart=True, refusing=seed if seed % 2 else None))
        assert_right([mixed(seed, 4 if seed % 4 == 3 else 2)], judge)


@pytest.mark.parametrize("setting", [Setting(), OWN_TRANSPORT, Setting(apart=True), Setting(True, apart=True)])
@pytest.mark.parametrize("part", range(2))
def test_own_parts_of_sums_in_lockstep(part: int, setting: Setting) -> None:
    """All-reduces that become reduce-scatters where all ranks use their own parts alone, and others."""
    for seed in range(part, MIXED, 2):
        judge = partial(check, setting=replace(setting, refusing=seed if seed % 5 == 4 else None))
        assert_right([of_own_parts(seed, 4 if seed % 4 == 3 else 2)], judge)


def test_own_parts_of_sums_are_scattered() -> None:
    """So that the programs above are about something."""
    found = []
    for seed in range(12):
        program = of_own_parts(seed)
        _, reports, _ = rank_lockstep.rewrite_all([rank_lockstep.trace(program, rank) for rank in range(2)], GROUPS)
        found += [
            text for one in reports for question in one.questions if question.done for text in question.deviations
        ]
    assert sum(text.startswith("own: ") for text in found) > 8


def of_kind(kind: str, count: int) -> list[Program]:
    """Programs of a kind: those that showed a fault once, and others, every fourth on four ranks."""
    found = FOUND.get(kind, ())
    return [focused(kind, *one) for one in (*found, *((seed, 4 if seed % 4 == 3 else 2) for seed in range(count)))]


def assert_right(programs: Iterable[Program], judge: Callable[[Program], Verdict]) -> None:
    """Fail with the smallest part of the first program that has a fault."""
    for program in programs:
        verdict = judge(program)
        assert not verdict, report(program, verdict, judge)


# --- on real ranks ----------------------------------------------------------------------------------------------
@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_on_ranks(kind: str) -> None:
    assert_right_on_ranks(of_kind(kind, ON_RANKS_PER_KIND))


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_many_differences_on_ranks(world: int) -> None:
    count = ON_RANKS_MIXED if world == 2 else max(1, ON_RANKS_MIXED // 5)
    first = 0 if THOROUGH or world == 2 else 2  # plain Inductor does not run (0, 4)
    assert_right_on_ranks([mixed(seed, world) for seed in range(first, first + count)])


@pytest.mark.ranks
def test_a_rank_that_fuses_nothing_keeps_the_order() -> None:
    """Without kernels of Inductor's, as here, its scheduler moves a gather, and on the other rank it does not."""
    (verdict,) = judge_on_ranks([mixed(70007)], kernels=False)
    assert not verdict, verdict


def assert_right_on_ranks(programs: Sequence[Program]) -> None:
    """Fail with all faults; they are not made smaller, since that takes long."""
    faults, excused = [], []
    for world in {program.world for program in programs}:
        own = [program for program in programs if program.world == world]
        verdicts = judge_on_ranks(own, kernels=not interpreter_fault())
        for program, verdict in zip(own, verdicts, strict=True):
            if verdict:
                (excused if verdict.fault == "inductor" else faults).append(report(program, verdict, None))
    assert not faults, "\n\n".join(faults)
    if len(excused) == len(programs):
        pytest.skip(f"plain Inductor does not run them either: {excused[0]}")


# --- the checks can fail ----------------------------------------------------------------------------------------
TWO_STAGES = Program(
    "two stages",
    Outline(seed=0, world=2, rows=4, width=8),
    (Stage(0, "gather", "ALL"), Stage(1, "scatter", "SIDE")),
    (("multiply", "nothing_multiplied"),) * 2,
    (False, False),
)
ONE_GROUP = replace(TWO_STAGES, stages=(Stage(0, "gather"), Stage(1, "scatter")))


def calls(graph: Graph) -> list[Node]:
    """The communicating ops of a rewritten graph."""
    return [node for node in graph.nodes if any(name in str(node.target) for name in ("asynctp", "reduce_scatter"))]


def between(node: Node, function: Callable[..., Any], *args: Any) -> None:
    """Compute something of what an op sends, in front of it."""
    source = node.all_input_nodes[0]
    with node.graph.inserting_before(node):
        made = node.graph.call_function(function, (source, *args))
    made.meta["val"] = source.meta["val"]
    node.replace_input_with(source, made)


def swap_calls(graph: Graph) -> None:
    """The other order."""
    first, second = calls(graph)
    for node in (second.all_input_nodes[0], second):
        first.prepend(node)


def another_group(graph: Graph) -> None:
    """A call of another group."""
    node = calls(graph)[0]
    node.args = tuple("SIDE" if argument == "ALL" else argument for argument in node.args)


def no_call(graph: Graph) -> None:
    """One call less."""
    node = calls(graph)[-1]
    wait = next(iter(node.users))
    with graph.inserting_before(node):
        wait.replace_all_uses_with(graph.call_function(torch.ops.aten.slice.Tensor, (node.args[0], 0, 0, 4)))
    graph.erase_node(wait)
    graph.erase_node(node)


def fail(graph: Graph) -> None:
    raise ValueError("a fault of the pass")


WRONG_REWRITES: dict[str, tuple[Callable[[Graph], None], tuple[int, ...], Program, str]] = {
    "calls in another order": (swap_calls, (1,), ONE_GROUP, "unlike calls"),
    "groups in another order": (swap_calls, (1,), TWO_STAGES, "no peer"),
    "groups in another order on all ranks": (swap_calls, (0, 1), TWO_STAGES, "order"),
    "a call of another group": (another_group, (1,), TWO_STAGES, "no peer"),
    "a call less": (no_call, (1,), ONE_GROUP, "no peer"),
    "another dtype": (lambda g: between(calls(g)[-1], torch.Tensor.half), (1,), ONE_GROUP, "unlike calls"),
    "fewer elements": (lambda g: between(calls(g)[-1], lambda x: x[:4]), (1,), ONE_GROUP, "unlike calls"),
    "rows in another order": (lambda g: between(calls(g)[0], torch.flip, [0]), (1,), ONE_GROUP, "values"),
    "other numbers": (lambda g: between(calls(g)[-1], torch.mul, 1.01), (0, 1), ONE_GROUP, "values"),
    "an exception": (fail, (1,), ONE_GROUP, "crash"),
}


@pytest.mark.parametrize("name", WRONG_REWRITES)
def test_a_wrong_rewrite_is_found_in_lockstep(name: str) -> None:
    spoil, ranks, program, fault = WRONG_REWRITES[name]

    def rewrite(rank: int, graph: Graph) -> Report:
        done = run_pass(graph)
        if rank in ranks:
            spoil(graph)
        return done

    assert check(program, lambda rank, graph: run_pass(graph)) == RIGHT
    assert check(program, rewrite).fault == fault


@pytest.mark.parametrize("ranks", [(0, 1), (0,), ()])
def test_unlike_transports_are_found_in_lockstep(ranks: tuple[int, ...]) -> None:
    """A rank that is not of `ranks` leaves to torch what it does not multiply."""

    def rewrite(rank: int, graph: Graph) -> Report:
        with mock.patch.object(ops, "on_wire", return_value=rank in ranks):
            return run_pass(graph)

    fault = "unlike calls" if ranks == (0,) else ""
    assert check(ONE_GROUP, rewrite, OWN_TRANSPORT).fault == fault


@pytest.mark.parametrize("own_transport", [False, True])
def test_unlike_forms_that_carry_no_accord_are_found_in_lockstep(own_transport: bool) -> None:
    """The accord is what stands between two forms and a wrong value: without it they are joined without a word."""
    setting = Setting(own_transport, apart=True)
    programs = of_kind("summed_with_the_next", 4)
    assert [check(one, setting=setting) for one in programs] == [RIGHT] * len(programs)
    with mock.patch.object(rank_lockstep, "accord_of", return_value=0):
        assert {check(one, setting=setting).fault for one in programs} & {"values", "no peer", "unlike calls"}


@pytest.mark.ranks
@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_wrong_rewrite_is_found_on_ranks(sabotage: str) -> None:
    """Unlike calls that gloo pairs make a hang or wrong values, as they come in time. A hang need not last."""
    programs = [replace(ONE_GROUP, stages=ONE_GROUP.stages[:1], variations=(("multiply",),) * 2)]
    wait_s = 10 * PATIENCE if sabotage == "another call" else WAIT_S
    (verdict,) = judge_on_ranks(programs, kernels=False, sabotage=sabotage, wait_s=wait_s)
    assert verdict.fault in {"wrong values": ["values"], "another call": ["hang", "values"]}[sabotage], verdict


# --- the generator ----------------------------------------------------------------------------------------------
def test_every_kind_is_generated() -> None:
    assert all(kind in focused(kind, seed, world).kinds() for kind in KINDS for seed in range(3) for world in (2, 4))
    together = {kind for seed in range(600) for kind in mixed(seed).kinds()}
    assert together == set(KINDS)


def test_a_kind_can_be_left_out() -> None:
    assert all("later" not in mixed(seed, without=("later",)).kinds() for seed in range(100))


def test_a_seed_gives_the_same_program() -> None:
    assert str(mixed(5, 4)) == str(mixed(5, 4)) != str(mixed(6, 4))
    first, second = (focused("residual", 1).make_inputs(1) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert not torch.equal(focused("residual", 1).make_inputs(0)[0], first[0])


def test_variations_say_what_they_are() -> None:
    assert all(one.write.__doc__ for table in VARIATIONS.values() for one in table.values())


def test_the_smallest_part_keeps_what_matters() -> None:
    program = next(one for one in map(partial(mixed, world=4), range(99)) if "relu_between" in one.kinds())
    small = smaller(program, lambda one: "relu_between" in one.kinds())
    assert [stage.kind for stage in small.stages] == ["gather"]
    assert [names for names in small.variations if names != (PLAIN["gather"],)] == [("relu_between",)]
    assert small.text(0) in str(small)


def test_what_stays_of_a_smaller_program_is_as_it_was() -> None:
    program = mixed(3, 2)
    last = replace(program, stages=program.stages[-1:], variations=tuple(one[-1:] for one in program.variations))
    assert set(last.text(0).splitlines()[1:2]) <= set(program.text(0).splitlines())


def test_ranks_agree_on_all_deviations_of_a_group_or_on_none() -> None:
    groups = {"ALL": ((0, 1),)}

    def answered(own: Question, other: Question, **setting: Any) -> tuple[set[str], bool]:
        answer = Setting(**setting).answer(0, own, {0: [own], 1: [other]}, groups)
        return set(answer.agreed), answer.accord == accord_of(own)

    own = Question("ALL", "inference", "k", ("a", "b"), ("keep",))
    assert answered(own, own) == ({"a", "b", "keep"}, True)
    assert answered(own, replace(own, keeps=())) == ({"a", "b"}, True)
    for other in (replace(own, deviations=("b",)), replace(own, deviations=())):
        assert answered(own, other) == ({"keep"}, False)
        assert answered(own, other, apart=True) == ({"a", "b", "keep"}, True)
    for other in (replace(own, communicates="other"), replace(own, group="SIDE"), replace(own, phase="backward")):
        assert answered(own, other) == (set(), False)
    refused = {len(answered(own, own, refusing=seed)[0]) for seed in range(20)}
    assert refused == {0, 1, 2, 3}
