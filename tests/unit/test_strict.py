"""When a graph with missed chains raises, what the error says, and that the graph is then as it was."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from graph_builder import GraphBuilder, aten, snapshot
from torch.fx import Graph

from asynctp_passes import AsyncTPError, Config, ExpectError, GroupError, Report, StrictError, run
from asynctp_passes.torch_private import dynamo


def graph_of(*, fused: int = 0, reordered: int = 0, computed: int = 0, returned: int = 0) -> Graph:
    """A graph with so many chains that are fused, missed for two reasons (ATP101, ATP208), and skipped."""
    b = GraphBuilder()
    count = fused + reordered + computed + returned
    shards = [b.input(f"x{index}", [4, 8]) for index in range(count)]
    w, whole = b.input("w", [8, 12]), [b.gather(shard) for shard in shards]
    operands = whole[:fused]
    operands += [b.cat(b.chunks(x)[::-1]) for x in whole[fused : fused + reordered]]
    operands += [b.call(aten.mul.Tensor, x, 0.5) for x in whole[fused + reordered : count - returned]]
    return b.returns(*(b.mm(x, w) for x in operands), *whole[count - returned :])


def config(**fields: object) -> Config:
    return Config(**fields)  # type: ignore[arg-type]


RAISES = [
    # strict, expect, chains, what is raised
    ("off", 0, {"reordered": 2}, None),
    ("off", 0, {}, None),
    ("zero", 0, {"fused": 1, "reordered": 1}, None),
    ("zero", 0, {"reordered": 1}, StrictError),
    ("zero", 0, {"returned": 1}, None),
    ("all", 0, {"fused": 2}, None),
    ("all", 0, {"returned": 2}, None),
    ("all", 0, {"fused": 1, "reordered": 1}, StrictError),
    ("off", 2, {"fused": 2}, None),
    ("off", 2, {"fused": 1, "reordered": 1}, ExpectError),
    ("off", 2, {"fused": 1}, ExpectError),
    ("off", 1, {"returned": 1}, None),
    ("off", 1, {}, None),
    ("all", 1, {"reordered": 1}, StrictError),
]


@pytest.mark.parametrize(("strict", "expect", "chains", "error"), RAISES)
def test_levels(strict: str, expect: int, chains: dict[str, int], error: type[AsyncTPError] | None) -> None:
    graph = graph_of(**chains)
    before = snapshot(graph)
    if error is None:
        assert len(run(graph, config(strict=strict, expect=expect)).fused) == chains.get("fused", 0)
        return
    with pytest.raises(error) as raised:
        run(graph, config(strict=strict, expect=expect))
    assert type(raised.value) is error
    assert snapshot(graph) == before
    graph.lint()


def test_zero_waits_for_later_pieces_of_a_graph_that_is_cut_for_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "is_cut_for_ddp", lambda: True)
    assert run(graph_of(reordered=1), config(strict="zero")).missed
    with pytest.raises(StrictError):
        run(graph_of(reordered=1), config(strict="all"))


def test_the_default_is_zero() -> None:
    with pytest.raises(StrictError):
        run(graph_of(reordered=1), config())


def missed_in_two_ways() -> StrictError:
    with pytest.raises(StrictError) as raised:
        run(graph_of(fused=1, computed=1, reordered=2, returned=1), config(strict="all"))
    return raised.value


def test_one_error_holds_all_misses() -> None:
    error = missed_in_two_ways()
    assert str(error).startswith("ATP101, ATP208: asynctp fused 1 of 4 chains of graph (inference) and strict=")
    assert error.report is not None
    assert [remark.code for remark in error.report.missed] == ["ATP101", "ATP101", "ATP208"]
    text = " ".join(str(error).split())
    for remark in error.report.missed:
        assert remark.collective in text
        assert remark.message in text
        assert remark.hint in text


def test_the_report_of_an_error_is_what_off_would_say() -> None:
    """Under "off" the same chains are fused; the plan is the same, and so is its digest."""
    error = missed_in_two_ways()
    report = run(graph_of(fused=1, computed=1, reordered=2, returned=1), config(strict="off"))
    assert error.report is not None
    assert error.report.remarks == tuple(replace(remark, call={}) for remark in report.remarks), "nothing is called"
    assert error.report.plan_digest == report.plan_digest


def test_expect_error_says_what_was_expected() -> None:
    with pytest.raises(
        ExpectError,
        match=r"expect=3, but 1 of the 2 chains of graph \(inference\) are fused. Remedy: expect=1 or less, or 2 once",
    ) as raised:
        run(graph_of(fused=1, reordered=1), config(strict="off", expect=3))
    assert "ATP101" in str(raised.value)
    assert raised.value.report is not None


@pytest.mark.parametrize(
    ("graph", "expect", "remedy"),
    [
        ({"fused": 1}, 2, "expect=1 or less: no more chains of this graph are in scope"),
        ({"fused": 1, "reordered": 1}, 2, "mend what is missed"),
    ],
)
def test_the_remedy_of_expect_can_be_followed(graph: dict[str, int], expect: int, remedy: str) -> None:
    with pytest.raises(ExpectError, match=f"Remedy: {remedy}"):
        run(graph_of(**graph), config(strict="off", expect=expect))


@pytest.mark.parametrize("kind", [AsyncTPError, StrictError, ExpectError, GroupError])
@pytest.mark.parametrize("report", [None, Report("graph", "forward", ())])
def test_errors_pickle_with_their_report(kind: type[AsyncTPError], report: Report | None) -> None:
    """Torch compiles in worker processes, and test runners send errors between processes."""
    copy = pickle.loads(pickle.dumps(kind("ATP101: a message", report)))
    assert type(copy) is kind
    assert str(copy) == "ATP101: a message"
    assert copy.report == report


def test_a_raised_error_pickles() -> None:
    error = missed_in_two_ways()
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.report) == (str(error), error.report)


@pytest.mark.parametrize("kind", [StrictError, ExpectError, GroupError])
def test_one_class_catches_all(kind: type[AsyncTPError]) -> None:
    assert issubclass(kind, AsyncTPError)
    assert issubclass(AsyncTPError, RuntimeError)
