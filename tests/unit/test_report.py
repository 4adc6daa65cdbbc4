"""Reports: what they print, and that they outlive the graph. `EXPECTTEST_ACCEPT=1` writes the expectations anew."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from graph_builder import GraphBuilder
from passes import run_pass

from asynctp_passes import Bucketed, Config, Remark, Report, run, steps
from asynctp_passes.planning.cost_model import Cost, Machine
from asynctp_passes.reporting.report import SCHEMA, Note
from asynctp_passes.torch_private import inductor_options

FUSED = Remark(
    "FUSED",
    "all_gather_matmul",
    "all_gather_into_tensor",
    nodes=("all_gather_into_tensor", "wait_tensor", "mm"),
    source="model.py:12",
    group="tp",
    group_size=4,
    shapes={"input": "bf16[1024, 4096]", "output": "bf16[4096, 4096]"},
    op="asynctp::all_gather_matmul",
    implementation="sequential",
    comm_bytes=25165824,
    flops=34359738368,
    estimate_us={"comm": 68.0, "matmul": 45.2, "serial": 113.2, "overlapped": 68.0},
)
MISSED = Remark(
    "MISSED",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "ATP110",
    "SUM_HAS_OTHER_TERM",
    "a term is not a matmul [add]",
    "add it after the reduce-scatter",
    nodes=("mm_1", "add", "reduce_scatter_tensor"),
    shapes={"input": "bf16[4096, 4096]"},
)
SKIPPED = Remark(
    "SKIPPED", "all_reduce", "all_reduce", "ATP002", "NO_MATMUL", "no matmul [a]", "nothing to do", ("all_reduce",)
)
OTHER_SKIPPED = dataclasses.replace(SKIPPED, collective="all_reduce_1", message="no matmul [b]")
REPORT = Report("graph 0/0", "forward", (FUSED, MISSED, SKIPPED, OTHER_SKIPPED), "2.13.0", "c0ffee", "deca")


@pytest.mark.parametrize("tensors", ["primals_1 primals_2", "primals_1 tangents_1", "x w"])
def test_a_graph_without_collectives_gets_at_once_what_the_steps_say(tensors: str) -> None:
    b = GraphBuilder()
    x, w = (b.input(name, [8, 8]) for name in tensors.split())
    graph = b.returns(b.relu(b.mm(x, w)), b.mm(b.relu(x), w))
    before, config = list(graph.nodes), Config(strict="all")
    with mock.patch.object(steps, "run", side_effect=AssertionError("it is not asked")):
        at_once = run(graph, config)
    assert at_once == steps.run(graph, inductor_options.obeyed(config))
    assert at_once.matmuls == 2
    assert list(graph.nodes) == before


def real_report() -> Report:
    """One fused, one missed and two skipped collectives, from a graph whose matmul knows its line."""
    b = GraphBuilder()
    x, w, a, norm = (
        b.input(name, shape) for name, shape in {"x": [4, 8], "w": [8, 12], "a": [16, 8], "n": [4]}.items()
    )
    out = b.mm(b.gather(x), w)
    out.meta["stack_trace"] = (
        '  File "train.py", line 3, in step\n  File "model.py", line 12, in forward\n    return x @ w'
    )
    missed = b.scatter(b.mm(a, w), "max")
    sums = [b.call(torch.ops._c10d_functional.all_reduce.default, norm, "sum", "tp") for _ in range(2)]
    return run_pass(b.returns(out, missed, *sums))


# --- what people read ------------------------------------------------------------------------------------------
def test_print() -> None:
    assert_expected_inline(
        str(REPORT),
        """\
asynctp: graph 0/0 (forward): 1 of 2 chains fused, 1 missed, 2 other collectives skipped
+ FUSED   model.py:12: all_gather_matmul over 'tp', 4 ranks
    all_gather_into_tensor -> wait_tensor -> mm
    input bf16[1024, 4096], output bf16[4096, 4096]
    runs sequential; 24 MiB, 34.4 GFLOP, model: 113 us one after the other, at best 68 us overlapped
! MISSED  reduce_scatter
    mm_1 -> add -> reduce_scatter_tensor
    ATP110 SUM_HAS_OTHER_TERM: a term is not a matmul [add]
    remedy: add it after the reduce-scatter
. SKIPPED 2 x ATP002 NO_MATMUL: no matmul
note: sequential: the collective, then the matmul; nothing overlaps on a CPU, or without triton""",
    )


def test_print_of_a_graph() -> None:
    assert_expected_inline(
        str(real_report()),
        """\
asynctp: graph (inference): 1 of 2 chains fused, 1 missed, 2 other collectives skipped
+ FUSED   model.py:12: all_gather_matmul over 'tp', 4 ranks
    all_gather_into_tensor -> wait_tensor -> mm
    input f32[4, 8], output f32[16, 8], matmul f32[16, 8] @ f32[8, 12]
    runs sequential; 384 B, 3.07 kFLOP
! MISSED  matmul_reduce_scatter over 'tp', 4 ranks
    mm_1 -> reduce_scatter_tensor -> wait_tensor_1
    ATP201 REDUCE_OP_UNSUPPORTED: the collective's reduction is neither 'sum' nor 'avg' ['max']
    remedy: only sums commute with the matmul's accumulation; use 'sum' or 'avg'
. SKIPPED 2 x ATP013 OUTSIDE_GRAPH: the op that takes the gathered tensor, or makes the reduced one,
    is not in this graph
note: sequential: the collective, then the matmul; nothing overlaps on a CPU, or without triton""",
    )


def test_print_of_an_all_reduce() -> None:
    """No group exists here, and the graph does not say how many ranks it would have."""
    b = GraphBuilder()
    graph = b.returns(b.all_reduce(b.mm(b.input("a", [6, 8]), b.input("w", [8, 12]))))
    report = run(graph, Config(strict="all"))
    assert_expected_inline(
        str(report),
        """\
asynctp: graph (inference): 1 of 1 chains fused, 0 missed, 0 other collectives skipped
+ FUSED   matmul_all_reduce over 'tp'
    mm -> all_reduce -> wait_tensor
    input f32[6, 12], output f32[6, 12], matmul f32[6, 8] @ f32[8, 12]
    runs sequential; 1.15 kFLOP
    note: at best the sum overlaps with the matmul, and sending it to all ranks does not; shard
      activations over the sequence (SequenceParallel, Shard(1) outputs) to overlap that too
note: sequential: the collective, then the matmul; nothing overlaps on a CPU, or without triton""",
    )
    assert report.remarks[0].group_size == 0
    assert report.remarks[0].comm_bytes is None


def test_print_of_collectives_to_which_something_else_is_done() -> None:
    """They are counted by outcome, and told by reason and outcome."""
    others = [dataclasses.replace(SKIPPED, outcome=one) for one in ("BUCKETED", "SKIPPED", "ACCELERATED", "BUCKETED")]
    dropped = Remark("ERASED", "all_gather", "gather", "ATP014", "RESULT_DROPPED", "nothing uses it", "nothing to do")
    assert_expected_inline(
        str(dataclasses.replace(REPORT, remarks=(*others, dropped))),
        """\
asynctp: graph 0/0 (forward): 0 of 0 chains fused, 0 missed, 5 other collectives: 1 accelerated, 2
    bucketed, 1 erased, 1 skipped
> ACCELERATED 1 x ATP002 NO_MATMUL: no matmul
= BUCKETED 2 x ATP002 NO_MATMUL: no matmul
. SKIPPED 1 x ATP002 NO_MATMUL: no matmul
- ERASED 1 x ATP014 RESULT_DROPPED: nothing uses it""",
    )


def test_print_of_a_skipped_remark() -> None:
    assert_expected_inline(
        str(SKIPPED),
        """\
. SKIPPED all_reduce
    all_reduce
    ATP002 NO_MATMUL: no matmul [a]
    remedy: nothing to do""",
    )


def test_print_from_the_cache() -> None:
    head = str(Report("graph 0/0", "backward", (), from_cache=True))
    assert head.startswith("asynctp: graph 0/0 (backward, from Inductor's cache): 0 of 0 chains fused")


def test_costs_that_are_unknown_are_not_printed() -> None:
    unknown = dataclasses.replace(FUSED, comm_bytes=None, flops=None, estimate_us={})
    assert str(unknown).splitlines()[-1] == "    runs sequential"


@pytest.mark.parametrize(
    ("comm_bytes", "flops", "text"),
    [
        (0, 12, "0 B, 12 FLOP"),
        (1023, 1_000, "1023 B, 1 kFLOP"),
        (384 * 1024, 3_072_000, "384 KiB, 3.07 MFLOP"),
        (5 * 2**30, 5_400 * 10**12, "5 GiB, 5400 TFLOP"),
    ],
)
def test_quantities_have_a_fitting_unit(comm_bytes: int, flops: int, text: str) -> None:
    remark = dataclasses.replace(FUSED, comm_bytes=comm_bytes, flops=flops, estimate_us={})
    assert str(remark).splitlines()[-1] == f"    runs sequential; {text}"


def test_long_reports_stay_short_where_nothing_is_to_do() -> None:
    report = dataclasses.replace(REPORT, remarks=(SKIPPED,) * 100)
    assert len(str(report).splitlines()) == 2


# --- what programs read ----------------------------------------------------------------------------------------
def test_outcomes() -> None:
    assert REPORT.fused == (FUSED,)
    assert REPORT.missed == (MISSED,)
    assert REPORT.skipped == REPORT.others == (SKIPPED, OTHER_SKIPPED)
    bucketed = dataclasses.replace(SKIPPED, outcome="BUCKETED")
    report = dataclasses.replace(REPORT, remarks=(bucketed, FUSED, MISSED, SKIPPED))
    assert (report.fused, report.missed, report.skipped) == ((FUSED,), (MISSED,), (SKIPPED,))
    assert report.others == (bucketed, SKIPPED)
    assert report.with_outcome("MISSED", "BUCKETED") == (bucketed, MISSED)


@pytest.mark.parametrize(
    "report", [REPORT, real_report(), Report("graph", "inference", ())], ids=["all", "real", "empty"]
)
def test_reports_outlive_the_graph(report: Report) -> None:
    """JSON and pickle give the same report again."""
    assert Report.from_json(report.to_json()) == report
    assert Report.from_json(report.to_json(indent=2)) == report
    assert pickle.loads(pickle.dumps(report)) == report


def test_json_says_its_schema_first() -> None:
    assert next(iter(json.loads(REPORT.to_json()).items())) == ("schema", SCHEMA)
    assert REPORT.to_json().startswith('{"schema": 3, "graph": ')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            2,
            r"the report has schema 2, and this asynctp reads schema 3: read it with the version of asynctp",
        ),
        (
            4,
            r"the report has schema 4, and this asynctp reads schema 3: read it with the version of asynctp",
        ),
        ("2", 'the report\'s schema is "2"; it must be an integer'),
        (True, "the report's schema is true; it must be an integer"),
        (None, "the report's schema is null; it must be an integer"),
    ],
)
def test_json_of_another_schema_is_refused(schema: object, message: str) -> None:
    values = {**json.loads(REPORT.to_json()), "schema": schema}
    with pytest.raises(ValueError, match=message):
        Report.from_json(json.dumps(values))


def test_json_without_some_fields_is_read() -> None:
    """They have their defaults; without a schema it is no report."""
    values = json.loads(REPORT.to_json())
    for left_out in ("buckets", "questions", "notes"):
        del values[left_out]
    for remark in values["remarks"]:
        del remark["call"]
    assert Report.from_json(json.dumps(values)) == REPORT
    del values["schema"]
    with pytest.raises(ValueError, match="the report's schema is null"):
        Report.from_json(json.dumps(values))


def test_bucketed_all_reduces_survive_and_are_printed() -> None:
    entry = Bucketed(("all_reduce", "all_reduce_1"), "tp", "max", "float64", 16)
    report = dataclasses.replace(REPORT, buckets=(entry,))
    assert Report.from_json(report.to_json()) == report
    assert str(entry) in str(report)
    assert str(entry) == "= BUCKETED 2 all_reduce(max) over group 'tp' into one of 16 B: all_reduce, all_reduce_1"


def test_a_note_is_read_as_its_text() -> None:
    """Programs look for words in notes, which once were texts."""
    note = Note("bits", "results depend on the number of ranks")
    assert "number of ranks" in note
    assert "tiles" not in note
    assert str(note) == note.text


def test_json_has_one_line_unless_indented() -> None:
    assert "\n" not in REPORT.to_json()
    assert json.loads(REPORT.to_json())["remarks"][1]["code"] == "ATP110"


def test_reports_hold_plain_values() -> None:
    plain = (str, int, float, bool, type(None))
    assert all(isinstance(value, plain) for value in leaves(dataclasses.asdict(real_report())))


def leaves(value: Any) -> list[Any]:
    """Everything in nested containers that is no container itself."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_the_call_of_a_fused_op() -> None:
    """By argument name, as `torch.ops.asynctp` has them, but for defaults; the group has a field of its own."""
    fused, *others = real_report().remarks
    assert fused.call == {
        "a_shard": {"dtype": "float32", "shape": [4, 8], "stride": [8, 1]},
        "bs": [{"dtype": "float32", "shape": [8, 12], "stride": [12, 1]}],
        "biases": [None],
        "gather_dim": 0,
        "return_a_full": False,
        "group_size": 4,
    }
    assert [remark.call for remark in others] == [{}] * 3


def test_remarks_are_in_graph_order() -> None:
    assert [remark.collective for remark in real_report().remarks] == [
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_reduce",
        "all_reduce_1",
    ]


def test_the_source_is_the_innermost_line() -> None:
    assert real_report().fused[0].source == "model.py:12"


@pytest.mark.parametrize(
    ("key", "path", "shown"),
    [
        ("nn_module_stack", "L['self'].attention.wo", "attention.wo: "),
        ("fwd_nn_module_stack", "L['model'].layers._modules['3'].ffn", "layers.3.ffn: "),
        ("nn_module_stack", "L['self'].moe.forward.__closure__[0].cell_contents.__self__.router", "moe.router: "),
        ("nn_module_stack", "L['fn'].__closure__[0].cell_contents.up", "up: "),
        ("nn_module_stack", "L['self']", ""),
    ],
)
def test_the_module_is_the_innermost_one(key: str, path: str, shown: str) -> None:
    """Its path in what was compiled; of the compiled module itself, nothing."""
    b = GraphBuilder()
    product = b.mm(b.gather(b.input("x", [4, 8])), b.input("w", [8, 12]))
    product.meta[key] = {"outer": ("L['self'].outer", torch.nn.Module), "inner": (path, torch.nn.Linear)}
    (remark,) = run(b.returns(product), Config()).remarks
    assert str(remark).splitlines()[0] == f"+ FUSED   {shown}all_gather_matmul over 'tp', 4 ranks"


def test_the_plan_digest_tells_plans_apart() -> None:
    """Equal for the same program; another one for the same program in another configuration."""
    assert real_report().plan_digest == real_report().plan_digest
    b = GraphBuilder()
    graph = b.returns(b.mm(b.gather(b.input("x", [4, 8])), b.input("w", [8, 12])))
    skipped = run(graph, Config(min_bytes=10**9))
    fused = run(graph, Config())
    assert skipped.plan_digest != fused.plan_digest


@pytest.mark.parametrize(
    ("names", "phase"),
    [
        (["primals_1", "primals_2"], "forward"),
        (["primals_1", "tangents_1"], "backward"),
        (["arg0_1", "arg1_1"], "inference"),
    ],
)
def test_phase(names: list[str], phase: str) -> None:
    b = GraphBuilder()
    x, w = b.input(names[0], [4, 8]), b.input(names[1], [8, 12])
    assert run(b.returns(b.mm(b.gather(x), w)), Config()).phase == phase


# --- costs -----------------------------------------------------------------------------------------------------
def test_costs_of_a_gather_and_a_scatter() -> None:
    """A gather receives, and a scatter sends, one shard for each of the three peers."""
    b = GraphBuilder()
    gathered = b.mm(b.gather(b.input("x", [4, 8])), b.input("w", [8, 12]))
    scattered = b.scatter(b.mm(b.input("a", [16, 8]), b.input("v", [8, 12])))
    report = run(b.returns(gathered, scattered), Config())
    assert [(remark.comm_bytes, remark.flops) for remark in report.remarks] == [
        (3 * 4 * 8 * 4, 2 * 16 * 12 * 8),
        (3 * 4 * 12 * 4, 2 * 16 * 12 * 8),
    ]


def test_symbolic_costs_are_unknown() -> None:
    b = GraphBuilder()
    graph = b.returns(b.mm(b.gather(b.input("x", [6, 8], dynamic=0)), b.input("w", [8, 12])))
    (remark,) = run(graph, Config(min_bytes=10**9)).remarks
    assert (remark.outcome, remark.comm_bytes, remark.flops) == ("FUSED", None, None)


def test_roofline() -> None:
    machine = Machine("some GPU", link_bytes_per_us=100.0, flops_per_us=1000.0)
    assert Cost(500, 2000).estimate_us(machine) == {"comm": 5.0, "matmul": 2.0, "serial": 7.0, "overlapped": 5.0}
    assert Cost(500, 2000).estimate_us(None) == {}
    assert Cost(None, 2000).estimate_us(machine) == {}


def test_half_of_an_all_reduce_overlaps_with_nothing() -> None:
    machine = Machine("a machine", link_bytes_per_us=1.0, flops_per_us=10.0)
    assert Cost(200, 1000).estimate_us(machine)["overlapped"] == 200
    assert Cost(200, 3000, exposed_bytes=100).estimate_us(machine) == {
        "comm": 200,
        "matmul": 300,
        "serial": 500,
        "overlapped": 400,
    }


def test_a_remark_is_at_most_100_columns_wide_and_its_place_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nodes of one op in a row are folded, and a path below the current folder is shown from there."""
    monkeypatch.chdir(tmp_path)
    nodes = ("all_gather", "wait", "split", "getitem", "getitem_1", "getitem_2", "cat_1", "mm_2", "mm_3")
    facts = {"message": "because " * 30, "hint": "remedy " * 30, "code": "ATP101", "name": "PIECES_REORDERED"}
    where = {"source": f"{tmp_path}/model/layers.py:12", "module": "layers.0.wo", "group": "tp", "group_size": 8}
    lines = str(Remark("MISSED", "all_gather", "all_gather", nodes=nodes, **facts, **where)).splitlines()
    assert lines[0] == "! MISSED  layers.0.wo (model/layers.py:12): all_gather over 'tp', 8 ranks"
    assert lines[1] == "    all_gather -> wait -> split -> getitem x 3 -> cat_1 -> mm x 2"
    assert max(map(len, lines)) <= 100
