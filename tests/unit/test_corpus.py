"""What becomes of every collective in the corpus of real graphs.

The custom ops of `serving_ops` are registered.
One line a graph: the outcomes of its all-gathers, reduce-scatters and all-reduces, each in graph order.
`F` is FUSED, `M` MISSED, `S` neither (with the number of its ATP code where it is pinned, `M106`), `*n` repeats.
A name stands for the graph in every torch version, unless a line names the folder too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dumps import CORPUS, dump_paths, example_inputs, load
from lockstep import differences, evaluate, op_name
from passes import copied, run_pass
from serving_ops import registered

from asynctp_passes import Report
from asynctp_passes.torch_private import inductor_order

EXPECTED = """
# graph                                   all-gather  reduce-scatter  all-reduce
allreduce_funcol_3d__0                    -           -               F
block_sp_2dmesh_tp2__0                    F*2         F*2             -
block_sp_2dmesh_tp2__1                    F*2         F*2             -
block_sp_B1__0                            F*2         F*2             -
block_sp_B1__1                            F*2         F*2             -
block_sp_B2__0                            F*2         F*2             -
block_sp_B2__1                            F*2         F*2             -
block_sp_B2_dyn_seq__0                    F*2         F*2             -
block_sp_B2_dyn_seq__1                    F*2         F*2             -
block_sp_full_ac__0                       F*2         F*2             -
block_sp_full_ac__1                       F*4         F*3             -
c10d_all_gather_into_tensor_out__0        F           -               -
c10d_all_gather_list__0                   F           -               -
c10d_matmul_all_reduce__0                 -           -               F
c10d_reduce_scatter_tensor_out__0         -           F               -
custom_op_vllm_style__0                   F           F               -
fp8_F_scaled_mm_v2__0                     F*2         -               -
fp8_F_scaled_mm_v2_rs__0                  -           F               -
fp8_F_scaled_mm_v2_tensorwise__0          F           -               -
torch2.11/fp8_F_scaled_mm_v2__1           -           -               -
fp8_bf16_gather_then_quant_rowwise__0     F           -               -
fp8_rowwise_ag_3d_dim1_bothgathered__0    F*2         -               -
fp8_rowwise_rs_3d_dim1__0                 -           F               -
fp8_tensorwise_ag_2d__0                   F           -               -
fp8_tensorwise_ag_3d_dim1__0              F           -               -
fp8_uint8_erased_ag_dim0__0               F           -               -
funcol_ag_2d_dim0__0                      F           -               -
funcol_ag_2d_dim1__0                      F           -               -
funcol_ag_2d_localrow1_dim1__0            F           -               -
funcol_ag_3d_dim0__0                      F           -               -
funcol_ag_3d_dim1_B1__0                   F           -               -
funcol_ag_3d_dim1__0                      F           -               -
funcol_ag_3d_dim2__0                      F           -               -
funcol_ag_bmm__0                          M115        -               -
funcol_ag_bmm_shared__0                   F           -               -
funcol_ag_bmm_shared__1                   -           F               -
funcol_ag_coalesced__0                    F,S013      -               -
funcol_ag_dyn_2d_dim0__0                  F           -               -
funcol_ag_dyn_3d_dim1__0                  F           -               -
funcol_ag_einsum_3d__0                    F           -               -
funcol_ag_einsum_3d__1                    -           F               -
funcol_ag_einsum_heads__0                 F           -               -
funcol_ag_einsum_heads__1                 -           F               -
funcol_ag_linear_bias__0                  F           -               -
funcol_autograd_mlp_2d__0                 F           F               -
funcol_autograd_mlp_2d__1                 F           F               -
funcol_autograd_mlp_3d_dim1__0            F           F               -
funcol_autograd_mlp_3d_dim1__1            F           F               -
funcol_linear_bias_rs__0                  -           F               -
funcol_rs_2d_dim0_avg__0                  -           F               -
funcol_rs_2d_dim0_sum__0                  -           F               -
funcol_rs_2d_dim1_sum__0                  -           F               -
funcol_rs_3d_dim0_sum__0                  -           F               -
funcol_rs_3d_dim1_B1_avg__0               -           F               -
funcol_rs_3d_dim1_sum__0                  -           F               -
funcol_rs_3d_dim2_sum__0                  -           F               -
funcol_rs_bmm_shared__0                   -           F               -
funcol_rs_coalesced__0                    -           F*2             -
funcol_rs_einsum_heads__0                 -           F               -
funcol_rs_einsum_heads__1                 F           -               -
mlp_lastdim_shard_3d__0                   F           F               -
mlp_lastdim_shard_3d__1                   F           F               -
mlp_nosp_allreduce_3d__0                  -           -               F
mlp_nosp_allreduce_3d__1                  -           -               F
mlp_nosp_bias_allreduce_3d__0             -           -               F
mlp_nosp_bias_allreduce_3d__1             -           -               F
mlp_sp_bias_dim1_3d__0                    F           F               -
mlp_sp_bias_dim1_3d__1                    F           F               -
mlp_sp_dim0_2d__0                         F           F               -
mlp_sp_dim0_2d__1                         F           F               -
mlp_sp_dim0_2d_dyn__0                     F           F               -
mlp_sp_dim0_2d_dyn__1                     F           F               -
mlp_sp_dim0_3d__0                         F           F               -
mlp_sp_dim0_3d__1                         F           F               -
mlp_sp_dim1_3d_B1__0                      F           F               -
mlp_sp_dim1_3d_B1__1                      F           F               -
mlp_sp_dim1_3d_B2__0                      F           F               -
mlp_sp_dim1_3d_B2__1                      F           F               -
mlp_sp_uneven_seq__0                      M114        F               -
mlp_sp_uneven_seq__1                      F           -               -
swiglu_sp_B2__0                           F           F               -
swiglu_sp_B2__1                           F           F               -
torchao_rowwise_block__0                  F*2         F*2             S002*9
torchao_rowwise_block__1                  F*2         F*2             S002*3,S014,S002,S014,S002,S014
torch2.11/torchao_rowwise_block__1        F*2         F*2             S002,S014,S002,S014,S002,S014,S002,S014,S002,S014
torchao_rowwise_block_full_ac__0          F*2         F*2             S002*9
torchao_rowwise_block_full_ac__1          F*4         F*3       S002*3,S014,S002,S014,S002,S014,S002,S014,S002,S014
torchao_rowwise_swiglu_B1__0              F           F               S002*4
torchao_rowwise_swiglu_B1__1              F           F               S002,S014,S002,S014
torchao_rowwise_swiglu__0                 F           F               S002*4
torchao_rowwise_swiglu__1                 F           F               S002,S014,S002,S014
torchao_rowwise_with_gw_hp_block__0       F*2         F*2             S002*11
torchao_rowwise_with_gw_hp_block__1       F*2         F*2             S002*3,S014,S002,S014,S002,S014
torchao_rowwise_with_gw_hp_swiglu__0      F           F               S002*5
torchao_rowwise_with_gw_hp_swiglu__1      F           F               S002,S014,S002,S014
torchao_tensorwise_block__0               F*2         F*2             S002*11
torchao_tensorwise_block__1               F*2         F*2             S002*7
torchao_tensorwise_swiglu_B1__0           F           F               S002*5
torchao_tensorwise_swiglu_B1__1           F           F               S002*3
torchao_tensorwise_swiglu__0              F           F               S002*5
torchao_tensorwise_swiglu__1              F           F               S002*3
# torch 2.11 breaks these graphs: after their collectives, or before
torch2.11/fp8_F_scaled_mm_v2__0                   S013*2  -               -
torch2.11/fp8_bf16_gather_then_quant_rowwise__0   -   -               -
torch2.11/fp8_rowwise_ag_3d_dim1_bothgathered__0  -   -               -
torch2.11/fp8_tensorwise_ag_3d_dim1__0            -   -               -
"""

#: How far outputs of the corpus' graphs may be apart: some quantize to fp8 after products that round differently.
ROUNDING = 0.15

SIDES = ("all_gather", "reduce_scatter", "all_reduce")
LETTERS = {"FUSED": "F", "MISSED": "M"}


def parse_expected(text: str) -> dict[str, tuple[list[str], ...]]:
    """Read the table: for each graph, the outcomes of each side, repetitions spelled out."""
    rows = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {name: tuple(_expand(cell) for cell in cells) for name, *cells in rows}


def _expand(cell: str) -> list[str]:
    outcomes: list[str] = []
    for part in cell.split(",") if cell != "-" else []:
        letter, _, count = part.partition("*")
        outcomes += [letter] * int(count or 1)
    return outcomes


TABLE = parse_expected(EXPECTED)


def expected_for(path: Path) -> tuple[list[str], ...]:
    """The row of a dump: its own, or that of its name."""
    return TABLE.get(f"{path.parent.name}/{path.stem}") or TABLE[path.stem]


def collectives(graph: torch.fx.Graph) -> tuple[list[str], ...]:
    """The names of the all-gathers, reduce-scatters and all-reduces, each in graph order."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    found = [[node for node in calls if side in op_name(node.target)] for side in SIDES]
    return tuple([result.name for node in nodes for result in results(node)] for nodes in found)


def results(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that stand for the tensors that a collective returns."""
    return list(node.users) if "coalesced" in op_name(node.target) else [node]


def id_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", dump_paths(), ids=id_of)
def test_outcomes_and_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcomes of a graph, and what is kept in order of it.

    What Inductor is told to keep in order is so in the graph already, and nothing is told to follow itself.
    """
    told: list[dict[torch.fx.Node, list[torch.fx.Node]]] = []
    monkeypatch.setattr(inductor_order, "keep_order", lambda graph, after: told.append(after))
    module = load(path)
    names = collectives(module.graph)
    assert [len(side) for side in names] == [len(side) for side in expected_for(path)]
    with registered():
        report = run_pass(module.graph)
    module.graph.lint()
    remarks = {remark.collective: remark for remark in report.remarks}
    actual = tuple([_outcome(remarks.get(name)) for name in side] for side in names)
    assert _readable(names, actual, pinned=expected_for(path)) == _readable(names, expected_for(path))
    left = {node.name for node in module.graph.nodes}
    assert left & {remark.collective for remark in report.fused} == _kept(report)
    fused_ops = [node for node in module.graph.nodes if op_name(node.target).startswith("asynctp::")]
    assert bool(fused_ops) == bool(report.fused)
    place = {node: index for index, node in enumerate(module.graph.nodes)}
    assert len(told) == bool(report.remarks), "a graph that does not communicate is left alone"
    ordered = [(later, node) for after in told for later, nodes in after.items() for node in nodes]
    assert [(later, node) for later, node in ordered if place[node] >= place[later]] == []


def test_every_row_is_used() -> None:
    used = {id_of(path) if id_of(path) in TABLE else path.stem for path in dump_paths()}
    assert used == set(TABLE)


@pytest.mark.parametrize("path", [path for path in dump_paths() if path.parent.name != "torch2.11"], ids=id_of)
def test_rewritten_graphs_compute_the_same(path: Path) -> None:
    original = load(path)
    rewritten = copied(original.graph)
    with registered():
        run_pass(rewritten)
    ranks = range(group_size(original.graph))
    outs, rewritten_outs = (
        evaluate(graph, [example_inputs(original, seed=rank) for rank in ranks]) for graph in (original, rewritten)
    )
    assert differences(outs, rewritten_outs, ROUNDING) == []


def test_group_size() -> None:
    assert group_size(load(CORPUS / "torch2.13/block_sp_B2__0.txt").graph) == 4
    assert group_size(load(CORPUS / "torch2.13_compile_on_one_rank/block_sp_2dmesh_tp2__0.txt").graph) == 2


def group_size(graph: torch.fx.Graph) -> int:
    """The number of ranks that a graph's collectives span; 4 where none says."""
    sizes = {
        node.args[_SIZE_ARGUMENT[name]] for node in graph.nodes if (name := op_name(node.target)) in _SIZE_ARGUMENT
    }
    return sizes.pop() if len(sizes) == 1 else 4


_SIZE_ARGUMENT = {"_c10d_functional::all_gather_into_tensor": 1, "_c10d_functional::reduce_scatter_tensor": 2}


def _kept(report: Report) -> set[str]:
    """The gathers that stay beside a fused op, for other users of what they gather."""
    return {remark.collective for remark in report.fused if remark.keeps_gather}


def _outcome(remark: object | None) -> str:
    """A remark as in the table: its letter, and the number of its code."""
    if remark is None:
        return "no remark"
    letter = LETTERS.get(remark.outcome, "S")  # type: ignore[attr-defined]
    return letter + remark.code.removeprefix("ATP")  # type: ignore[attr-defined]


def _readable(
    names: tuple[list[str], ...], outcomes: tuple[list[str], ...], pinned: tuple[list[str], ...] | None = None
) -> list[str]:
    """One line a collective. Codes that the table does not pin are left out."""
    lines = []
    for side, side_outcomes, side_pinned in zip(names, outcomes, pinned or outcomes, strict=True):
        for name, outcome, pin in zip(side, side_outcomes, side_pinned, strict=True):
            lines.append(f"{name}: {pin if len(pin) == 1 and outcome.startswith(pin) else outcome}")
    return lines


@pytest.mark.parametrize("path", [path for path in dump_paths() if "rowwise_block" in path.name], ids=id_of)
def test_inductor_is_told_of_tensors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes over a dependency on a node with several results, as a fused op with several products is."""
    monkeypatch.setattr(torch._guards.CompileContext, "current_compile_id", staticmethod(lambda: "0/0"))
    module = load(path)
    report = run_pass(module.graph)
    ordered = [node for node in module.graph.nodes if str(node.target) == "control_deps"]
    assert all(isinstance(before.meta["val"], torch.Tensor) for node in ordered for before in node.args[0])
    assert len(ordered) >= (2 if path.name == "torchao_rowwise_block__0.txt" else 0)
    fused = {node.meta["asynctp_collective"] for node in module.graph.nodes if "asynctp_collective" in node.meta}
    assert {remark.collective for remark in report.fused if remark.call} == fused, "of ops that are wrapped, too"
    module.graph.lint()
