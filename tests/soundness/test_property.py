"""The property that everything rests on: a rewritten program computes what the program computed.

Random programs, honest and adversarial, are evaluated in lockstep on all ranks before and after `asynctp_passes.run`,
on fresh random data. `HYPOTHESIS_PROFILE=thorough` looks much longer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
from hypothesis import given, note
from hypothesis import strategies as st
from lockstep import differences, evaluate, op_name
from passes import copied, run_pass
from programs import Program, Wishes, programs
from serving_ops import registered

from asynctp_passes.planning import overlap

SEEDS = st.integers(0, 2**16)
LISTS = (
    "_c10d_functional::all_gather_into_tensor_coalesced",
    "_c10d_functional::reduce_scatter_tensor_coalesced",
    "_c10d_functional::all_reduce_coalesced",
)
COLLECTIVES = (
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
    "vllm_like::all_gather",
    "_c10d_functional_autograd::all_gather_into_tensor",
    "vllm_like::reduce_scatter",
    "vllm_like::all_reduce",
    *LISTS,
)
APART = ("asynctp::all_gather", "asynctp::reduce_scatter")
GATHER, REDUCTIONS = "asynctp::all_gather_matmul", ("asynctp::matmul_reduce_scatter", "asynctp::matmul_all_reduce")


@given(program=programs(Wishes(honest=False)), seed=SEEDS)
def test_adversarial_programs_compute_the_same(program: Program, seed: int) -> None:
    check(program, seed)


@given(program=programs(Wishes(honest=True)), seed=SEEDS)
def test_honest_programs_are_fused_and_compute_the_same(program: Program, seed: int) -> None:
    rewritten = check(program, seed)
    counts = op_counts(rewritten)
    fused = counts[GATHER], sum(counts[name] for name in REDUCTIONS)
    assert fused == (program.gathers, program.scatters)
    assert sum(counts[name] for name in (*COLLECTIVES, *APART)) <= program.beside + program.apart


def check(program: Program, seed: int) -> torch.fx.Graph:
    """Rewrite a copy of a program and compare the two; returns the rewritten graph."""
    rewritten = copied(program.graph)
    with registered(), mock.patch.object(overlap, "LEAST_BYTES", 0):
        report = run_pass(rewritten)
    rewritten.lint()
    note(f"rewritten:\n{rewritten}")
    for remark in report.remarks:
        note(str(remark))
    assert sorted(collective_names(program.graph)) == sorted(remark.collective for remark in report.remarks)
    assert_same_results(program, rewritten, seed)
    assert_fake_values_hold(rewritten)
    return rewritten


def assert_same_results(program: Program, rewritten: torch.fx.Graph, seed: int) -> None:
    """Outputs agree on all ranks, and so do the inputs afterwards (programs may change them)."""
    inputs, rewritten_inputs = program.make_inputs(seed), program.make_inputs(seed)
    outs = evaluate(program.graph, inputs, program.groups)
    rewritten_outs = evaluate(rewritten, rewritten_inputs, program.groups)
    assert differences(outs, rewritten_outs) == []
    assert differences(inputs, rewritten_inputs) == []


def assert_fake_values_hold(graph: torch.fx.Graph) -> None:
    """Every node has a value, and that of a new node is what its op's fake implementation says."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        assert "val" in node.meta, f"{node} has no value"
        if op_name(node.target).startswith("asynctp::"):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
            with mode_of(node):
                expected = node.target(*args, **kwargs)
            assert layouts(node.meta["val"]) == layouts(expected)


def mode_of(node: torch.fx.Node) -> Any:
    """The fake mode of a node's inputs."""
    return node.all_input_nodes[0].meta["val"].fake_mode


def layouts(value: Any) -> list[tuple[Any, ...]]:
    """Shape, strides and dtype of a tensor or of each in a list."""
    values = value if isinstance(value, list | tuple) else [value]
    return [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in values]


def collective_names(graph: torch.fx.Graph) -> list[str]:
    """The nodes that hold a collective's result: its own, or the items of its list; itself for items nothing takes."""
    found = [node for node in graph.nodes if op_name(node.target) in COLLECTIVES]
    names = [node.name for node in found if op_name(node.target) not in LISTS]
    for call in [node for node in found if op_name(node.target) in LISTS]:
        items = [user.name for user in call.users]
        names += items + [call.name] * (len(call.args[0]) - len(items))
    return names


def op_counts(graph: torch.fx.Graph) -> Counter[str]:
    return Counter(op_name(node.target) for node in graph.nodes if node.op == "call_function")
