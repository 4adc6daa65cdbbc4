"""Rules of every rewrite, and how groups are named. `EXPECTTEST_ACCEPT=1` writes the expectations anew."""

from __future__ import annotations

import copy

import pytest
from dumps import CORPUS, load
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder, show
from passes import before_and_after, run_pass
from rewritten import fuse, rewritten
from torch.fx import Node

from asynctp_passes import Config, run


# --- both, and how groups are named ----------------------------------------------------------------------------
def test_matmul_between_goes_to_the_scatter_when_the_gather_has_another() -> None:
    b = GraphBuilder()
    x, w, v = b.input("x", [4, 8]), b.input("w", [8, 12]), b.input("v", [8, 6])
    whole = b.gather(x)
    assert_expected_inline(
        rewritten(b.returns(b.scatter(b.mm(whole, w)), b.mm(whole, v))),
        """\
x: f32[4, 8]
w: f32[8, 12]
v: f32[8, 6]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f32[16, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[16, 8]
mm = mm(wait_tensor, w)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(mm, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor_1 = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
mm_1 = mm(wait_tensor, v)  # f32[16, 6]
return (wait_tensor_1, mm_1)

=== becomes ===

x: f32[4, 8]
w: f32[8, 12]
v: f32[8, 6]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[v], biases=[None], gather_dim=0,
    return_a_full=True, group_size=4, group_name='tp')  # (f32[16, 6], f32[16, 8])
getitem = getitem(all_gather_matmul_default, 0)  # f32[16, 6]
getitem_1 = getitem(all_gather_matmul_default, 1)  # f32[16, 8]
reshape_default = reshape(getitem_1, [4, 4, 8])  # f32[4, 4, 8]
reshape_default_1 = reshape(reshape_default, [16, 8])  # f32[16, 8]
matmul_reduce_scatter_default = asynctp::matmul_reduce_scatter(a_parts=[reshape_default_1], b_parts=[w],
    biases=[None], reduce_op='sum', scatter_dim=0, group_size=4, group_name='tp')  # f32[4, 12]
return (matmul_reduce_scatter_default, getitem)
""",
    )


def test_matmul_between_goes_to_the_gather_when_it_is_the_only_one() -> None:
    b = GraphBuilder()
    x, w = b.input("x", [4, 8]), b.input("w", [8, 12])
    graph = b.returns(b.scatter(b.mm(b.gather(x), w)))
    text, report = before_and_after(graph)
    assert [(remark.outcome, remark.name) for remark in report.remarks] == [("FUSED", ""), ("SKIPPED", "MATMUL_TAKEN")]
    assert_expected_inline(
        text,
        """\
x: f32[4, 8]
w: f32[8, 12]
all_gather_into_tensor = all_gather_into_tensor(x, 4, 'tp')  # f32[16, 8]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[16, 8]
mm = mm(wait_tensor, w)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(mm, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor_1 = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor_1)

=== becomes ===

x: f32[4, 8]
w: f32[8, 12]
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=x, bs=[w], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name='tp')  # (f32[16, 12])
getitem = getitem(all_gather_matmul_default, 0)  # f32[16, 12]
reduce_scatter_tensor = reduce_scatter_tensor(getitem, 'sum', 4, 'tp')  # f32[4, 12]
wait_tensor_1 = wait_tensor(reduce_scatter_tensor)  # f32[4, 12]
return (wait_tensor_1)
""",
    )


def test_group_as_a_node() -> None:
    """Under compile_on_one_rank a graph carries the process group as an object."""
    module = load(CORPUS / "torch2.13_compile_on_one_rank" / "funcol_ag_2d_dim0__0.txt")
    assert_expected_inline(
        rewritten(module.graph),
        """\
arg0_1: Opaque
arg1_1: f32[8, 32]
arg2_1: f32[32, 16]
_opaque_obj0: NoneType
all_gather_into_tensor = all_gather_into_tensor(arg1_1, 4, _opaque_obj0)  # f32[32, 32]
wait_tensor = wait_tensor(all_gather_into_tensor)  # f32[32, 32]
mm = mm(wait_tensor, arg2_1)  # f32[32, 16]
return (mm)

=== becomes ===

arg0_1: Opaque
arg1_1: f32[8, 32]
arg2_1: f32[32, 16]
_opaque_obj0: NoneType
all_gather_matmul_default = asynctp::all_gather_matmul(a_shard=arg1_1, bs=[arg2_1], biases=[None], gather_dim=0,
    return_a_full=False, group_size=4, group_name=_opaque_obj0)  # (f32[32, 16])
getitem = getitem(all_gather_matmul_default, 0)  # f32[32, 16]
return (getitem)
""",
    )


# --- what holds for every rewrite ------------------------------------------------------------------------------
def test_new_nodes_say_where_they_come_from() -> None:
    b = GraphBuilder()
    x, w = b.input("x", [4, 8]), b.input("w", [8, 16])
    out = b.mm(b.gather(x), w)
    for node in b.graph.nodes:
        node.meta["stack_trace"] = f'File "model.py", line {len(node.name)}, in forward'
    graph = b.returns(b.relu(out))
    made = {node.name for node in graph.nodes}
    fuse(graph)
    for node in graph.nodes:
        assert node.name in made or node.meta["stack_trace"].startswith('File "model.py"')


def test_a_second_run_changes_nothing() -> None:
    b = GraphBuilder()
    x, w = b.input("x", [4, 8]), b.input("w", [8, 16])
    graph = b.returns(b.mm(b.gather(x), w))
    fuse(graph)
    after = show(graph)
    assert run(graph, Config(strict="all")).remarks == ()
    assert show(graph) == after


def test_the_rewrite_adds_no_guard() -> None:
    b = GraphBuilder(ranks=2)
    x, w = b.input("x", [3, 24, 8], dynamic=1), b.input("w", [8, 16])
    rows = b.reshape(b.cat(b.chunks(b.gather(x)), dim=1), [-1, 8])
    graph = b.returns(b.scatter(b.reshape(b.relu(b.mm(rows, w)), [-1, 16])))
    shape_env = b.mode.shape_env
    guards, replacements = list(shape_env.guards), copy.copy(shape_env.replacements)
    run_pass(graph)
    assert shape_env.guards == guards
    assert shape_env.replacements == replacements


@pytest.mark.parametrize("name", ["block_sp_2dmesh_tp2__0", "mlp_sp_dim1_3d_B2__1"])
def test_groups_as_nodes_reach_the_fused_ops(name: str) -> None:
    graph = load(CORPUS / "torch2.13_compile_on_one_rank" / f"{name}.txt").graph
    groups = {node.args[-1] for node in graph.nodes if "all_gather_into" in str(node.target)}
    fuse(graph)
    fused = [node for node in graph.nodes if str(node.target).startswith("asynctp.")]
    assert fused
    assert {node.args[-1] for node in fused} == groups
    assert all(isinstance(group, Node) for group in groups)
