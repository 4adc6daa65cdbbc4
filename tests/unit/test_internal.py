"""Errors of asynctp that nobody foresaw: the graph stays as it was, one log tells all, and nothing ends but strict."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from dumps import CORPUS, load
from graph_builder import GraphBuilder, aten, snapshot
from passes import run_pass
from serving_ops import registered
from torch.fx import Graph, Node

from asynctp_passes import (
    Config,
    ConfigError,
    DisagreementError,
    ExpectError,
    GroupError,
    Report,
    StrictError,
    run,
    steps,
)
from asynctp_passes.ir.records import Answer, Question
from asynctp_passes.planning import plan
from asynctp_passes.ranks import accord, undo
from asynctp_passes.remat import joint
from asynctp_passes.reporting import build, internal
from asynctp_passes.rewriting import ordering, rewrite
from asynctp_passes.torch_private import dynamo, process_groups
from asynctp_passes.torch_private.fx_graphs import GraphRecord

pytestmark = pytest.mark.usefixtures("internal_errors")

STEPS = (steps, joint, undo, plan, ordering, rewrite)
"""Modules that call the steps of the pass."""
STAGES = [
    # what fails, of the pipeline
    "toposort.sort",
    "decide_graph",
    "plan_overlap",
    "find_buckets",
    "report_of",
    "ask",
    "raise_if_strict",
    "rewrite",
    "store",
    "scales_to_store",
]


def program(*, joint: bool = False) -> Graph:
    """Two chains and an all-reduce of a maximum."""
    b = GraphBuilder()
    x, w = b.input("primals_1", [4, 8]), b.input("primals_2", [8, 8])
    extra = [b.input("tangents_1", [4, 8])] if joint else []
    h = b.relu(b.mm(b.gather(x), w))
    y = b.scatter(b.mm(h, w))
    return b.returns(y, b.all_reduce(b.call(aten.amax.default, y), "max"), *map(b.relu, extra))


def quiet(**fields: Any) -> Config:
    return Config(**{"strict": "off", **fields})


class Surprise(Exception):
    """What nobody foresaw."""


def failing(name: str, error: type[BaseException] = Surprise) -> Any:
    """Let a function that one of the `STEPS` calls fail, after it did what it does."""
    *path, last = name.split(".")
    owners: list[Any] = [owner for owner in STEPS if hasattr(owner, (*path, last)[0])]
    for part in path:
        owners = [getattr(owner, part) for owner in owners]
    does: Callable[..., Any] = getattr(owners[0], last)
    first = {"raise_if_strict": iter([True])}.get(last)  # it is asked for the report of the failure too

    def fails(*args: Any, **kwargs: Any) -> Any:
        result = does(*args, **kwargs)
        if first is not None and not next(first, False):
            return result
        raise error("no such thing")

    patches = ExitStack()
    for owner in owners:
        patches.enter_context(mock.patch.object(owner, last, fails))
    return patches


# --- the graph -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", STAGES)
def test_the_graph_stays_as_it_was(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    graph = program()
    before = snapshot(graph)
    with failing(stage):
        report = run(graph, quiet())
    assert snapshot(graph) == before
    graph.lint()
    assert len(graph.nodes) == len(before)
    (error,) = report.internal_errors
    assert "Surprise: no such thing (" in error
    assert [(r.outcome, r.code) for r in report.remarks] == [("MISSED", "ATP901")] * 3
    assert not report.fused
    assert "INTERNAL ERROR" in str(report)
    assert Report.from_json(report.to_json()) == report
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "internal error ATP901" in record.getMessage()


def test_and_can_be_worked_on_again() -> None:
    graph, twin = program(), program()
    with failing("rewrite"):
        run(graph, quiet())
    assert len(run_pass(graph).fused) == len(run_pass(twin).fused) == 2
    assert [(node.op, node.target) for node in graph.nodes] == [(node.op, node.target) for node in twin.nodes]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_and_leaves_the_graph(error: type[BaseException]) -> None:
    graph = program()
    before = snapshot(graph)
    with failing("rewrite", error), pytest.raises(error):
        run(graph, quiet())
    assert snapshot(graph) == before


@pytest.mark.parametrize("error", [GroupError, ConfigError, StrictError, MemoryError, torch.OutOfMemoryError])
def test_what_is_foreseen_is_raised_as_it_is(error: type[Exception]) -> None:
    graph = program()
    before = snapshot(graph)
    with failing("rewrite", error), pytest.raises(error, match="no such thing"):
        run(graph, quiet())
    assert snapshot(graph) == before


def test_a_joint_graph_is_left_without_its_marks(caplog: pytest.LogCaptureFixture) -> None:
    graph = program(joint=True)
    before = snapshot(graph)
    with failing("rematerialization_candidates"):
        report = joint.run_joint(graph, quiet(rematerialize="always"))
    assert report is not None
    assert (report.phase, report.remarks, len(report.internal_errors)) == ("joint", (), 1)
    assert snapshot(graph) == before
    assert "work on graph (joint)" in caplog.text
    with failing("rematerialization_candidates"), pytest.raises(StrictError):
        joint.run_joint(graph, quiet(strict="all"))


def test_a_graph_with_a_cycle_stays(caplog: pytest.LogCaptureFixture) -> None:
    graph = program()
    relu, scatter = (next(node for node in graph.nodes if word in node.name) for word in ("relu", "reduce_scatter"))
    relu.args = (scatter,)
    before = snapshot(graph)
    report = run(graph, quiet())
    assert "CannotSort" in report.internal_errors[0]
    assert snapshot(graph) == before


# --- the record ------------------------------------------------------------------------------------------------
def test_everything_is_put_back() -> None:
    """Nodes that are erased, made, moved, renamed, retargeted, given other arguments or other metadata."""
    module = load(CORPUS / "torch2.13" / "block_sp_B2__0.txt")
    graph = module.graph
    before, children = snapshot(graph), dict(module.named_children())
    found = {target: list(graph.find_nodes(op="call_function", target=target)) for target in (aten.mm.default,)}
    record = GraphRecord(graph)
    with registered():
        assert run_pass(graph).fused
    module.add_module("ordered_0", torch.nn.Module())
    node = next(node for node in graph.nodes if node.op == "call_function")
    node.name, node.target, node.meta["tag"] = "other", torch.ops.aten.abs.default, 1
    node.meta.pop("val")
    assert snapshot(graph) != before
    record.restore()
    graph.lint()
    assert snapshot(graph) == before
    assert dict(module.named_children()) == children
    assert len(graph.nodes) == len(before)
    nodes = list(graph.nodes)
    assert all(one < other for one, other in pairwise(nodes)), "nodes know where they stand"
    for target, same in found.items():
        assert set(graph.find_nodes(op="call_function", target=target)) == set(same)
    node = graph.call_function(aten.abs.default, (nodes[0],))
    graph.erase_node(node)


def test_a_record_that_is_not_used_changes_nothing() -> None:
    graph = program()
    before = snapshot(graph)
    GraphRecord(graph)
    assert snapshot(graph) == before


# --- strict ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "raised"),
    [
        ({"strict": "off"}, None),
        ({"strict": "zero"}, StrictError),
        ({"strict": "all"}, StrictError),
        ({"strict": "off", "expect": 1}, ExpectError),
    ],
)
def test_it_raises_only_where_that_is_asked_for(fields: dict[str, Any], raised: type[Exception] | None) -> None:
    graph = program()
    before = snapshot(graph)
    with failing("rewrite"):
        if raised is None:
            run(graph, quiet(**fields))
        else:
            with pytest.raises(raised) as error:
                run(graph, quiet(**fields))
            assert "ATP901" in str(error.value)
            assert "Surprise: no such thing" in str(error.value)
            assert isinstance(error.value.__cause__, Surprise)
            assert error.value.report.internal_errors  # type: ignore[attr-defined]
    assert snapshot(graph) == before


def test_out_of_scope_is_no_miss() -> None:
    """Without a matmul there is nothing to fuse, so that `zero` raises nothing; `all` does."""
    b = GraphBuilder()
    graph = b.returns(b.all_reduce(b.input("x", [4, 8])))
    with failing("decide_graph"):
        report = run(graph, quiet(strict="zero"))
        assert [remark.code for remark in report.remarks] == ["ATP002"]
        assert len(report.internal_errors) == 1
        with pytest.raises(StrictError, match=r"^ATP901"):
            run(graph, quiet(strict="all"))


@pytest.mark.parametrize(
    ("fields", "code"), [({}, "ATP901"), ({"groups": "other"}, "ATP001"), ({"groups": "tp"}, "ATP901")]
)
def test_other_groups_are_no_miss(fields: dict[str, Any], code: str) -> None:
    with failing("rewrite"):
        report = run(program(), quiet(**fields))
    assert {remark.code for remark in report.remarks} == {code}


# --- the log ---------------------------------------------------------------------------------------------------
def test_one_kind_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with failing("rewrite"):
        for _ in range(3):
            run(program(), quiet())
    with failing("decide_graph"):
        run(program(), quiet())
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2, "kinds are told apart by the place where they come up"
    for wanted in ("ATP901", "Surprise: no such thing", "TORCH_TRACE=", "torch " + str(torch.__version__), "python "):
        assert wanted in errors[0]
    assert "asynctp " in errors[0]
    assert "triton " in errors[0]
    assert "Traceback" in errors[0]


def test_the_trace_gets_the_graph() -> None:
    sent: dict[str, Callable[[], str]] = {}
    with failing("rewrite"), mock.patch.object(dynamo, "trace", lambda name, text, kind: sent.update({name: text()})):
        run(program(), quiet())
    text = sent["asynctp_internal_error"]
    assert "Surprise" in str(text)
    assert "all_gather_into_tensor" in str(text)


def test_the_place_is_that_in_our_sources() -> None:
    def broken(node: Node) -> str:
        return {}[node.name]  # type: ignore[no-any-return]

    with mock.patch.object(build, "describe", broken):
        report = run(program(), quiet())
    assert "build.py:" in report.internal_errors[0]
    assert "in _shapes" in report.internal_errors[0]


def test_a_report_that_cannot_be_made_either() -> None:
    """Nothing is left that works: the graph stays, and the report says so."""
    graph = program()
    before = snapshot(graph)
    broken = mock.Mock(side_effect=Surprise("no such thing"))
    with mock.patch.object(build, "read_collectives", broken), failing("decide_graph"):
        report = run(graph, quiet())
    assert (report.remarks, len(report.internal_errors)) == ((), 1)
    assert snapshot(graph) == before


# --- other ranks -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", ["toposort.sort", "decide_graph", "ask", "rewrite"])
def test_the_other_ranks_are_told_once(stage: str) -> None:
    """A rank that fails before the question asks for nothing, and one that fails after it not again."""
    with mock.patch.object(undo, "ask", wraps=undo.ask) as ask, failing(stage):
        run(program(), quiet())
    ((question,),) = [call.args[0] for call in ask.call_args_list]
    assert question.deviations == ()


def test_what_was_agreed_cannot_be_left_out() -> None:
    """A rank that fails after the question stops where all have agreed on something, or may have."""
    text, keep = "drop: all_reduce 0", "keep: all_gather 0"
    question = Question("group", "inference", "key", (text,), (keep,))
    kept = Answer(frozenset([keep]), {text: "rank 1 does not"})
    with mock.patch.object(process_groups, "peers_of", return_value=object()):
        accord.refuse([question], [kept])  # any graph can do that, also as it was
        for answers in (None, [Answer(frozenset([text, keep]))]):
            with pytest.raises(DisagreementError, match=text):
                accord.refuse([question], answers)
        with pytest.raises(DisagreementError, match=keep):
            accord.refuse([replace(question, deviations=())], None)
        accord.refuse([replace(question, deviations=(), keeps=())], None)
    accord.refuse([question], None)  # this group has no store here: nobody was asked


@pytest.mark.parametrize("refused", [False, True])
def test_a_graph_that_failed_after_the_question_does_what_any_graph_can(refused: bool) -> None:
    """Its peers pull the gather that all keep, and its calls have the accord that theirs have."""
    text = "keep: all_gather 0"
    answer = Answer(refused={text: "rank 1 does not"}, accord=7) if refused else Answer(frozenset([text]), accord=7)
    tried = undo.UndoOnError(program(), quiet(), "inference")
    with mock.patch.object(plan, "on_wire", return_value=True), mock.patch.object(undo, "ask", return_value=[answer]):
        tried.ask([Question("tp", "inference", "key", keeps=(text,))])
        left = tried._all_alone()
        assert left is not None
        assert [one.kind for one in left.kept_by_all] == ([] if refused else ["all_gather"])
        assert (left.wire, left.accord("tp")) == ({"tp"}, 7)


def test_sources_have_one_digest_in_a_checkout_and_in_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks compare it. There the kernels' folder comes after ours, here before."""
    found = []
    for layout in ("kernels/asynctp_kernels", "asynctp_kernels"):
        root = tmp_path / layout.replace("/", "-")
        for folder in ("asynctp_passes", layout):
            (root / folder / "ir").mkdir(parents=True)
            (root / folder / "ir" / "a.py").write_text(folder.rpartition("/")[2])
        monkeypatch.setattr(internal, "_OWN", root / "asynctp_passes")
        found.append(internal.sources_digest.__wrapped__())
    assert found[0] == found[1]


# --- what is beside a compile ----------------------------------------------------------------------------------
def test_contained() -> None:
    with internal.contained("do it"):
        raise Surprise
    with pytest.raises(ConfigError), internal.contained("do it"):
        raise ConfigError("bad value")
    with pytest.raises(KeyboardInterrupt), internal.contained("do it"):
        raise KeyboardInterrupt
