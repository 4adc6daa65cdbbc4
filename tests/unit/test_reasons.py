"""A table of small graphs, at least one for each reason, and what the pass says about each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import reason_rows_of_limits  # noqa: F401  (adds its rows)
import reason_rows_of_own_ops  # noqa: F401
import reason_rows_of_scope  # noqa: F401
import reason_rows_of_structure  # noqa: F401
import serving_ops
import torch
from graph_builder import snapshot
from lockstep import op_name
from passes import run_pass
from reason_rows import ROWS, Row
from torch.fx import Graph, Node

from asynctp_passes import Remark, register_collective, register_local, register_matmul, register_rowwise, unregister
from asynctp_passes.ir.registry import collective_op, matmul_op
from asynctp_passes.reasons import CATALOGUE
from asynctp_passes.torch_private import process_groups


# --- the tests -------------------------------------------------------------------------------------------------
def remarks_of(line: Row, graph: Graph) -> tuple[Remark, ...]:
    places = {"mesh_dimension_of": line.mesh_dim, "rank_in_group": line.rank}
    with mock.patch.multiple(process_groups, **{name: mock.Mock(return_value=place) for name, place in places.items()}):
        return run_pass(graph, **line.config).remarks


@pytest.mark.parametrize("line", ROWS, ids=[line.id for line in ROWS])
def test_reason(line: Row) -> None:
    graph = line.graph()
    before = snapshot(graph)
    parted = any(op_name(node.target).endswith("_coalesced") for node in graph.nodes)  # its tensors go one by one
    remarks = remarks_of(line, graph)
    graph.lint()
    reason, remark = CATALOGUE[line.name], remarks[-1]
    assert (remark.name, remark.code) == (line.name, reason.code), remark
    assert remark.outcome == reason.outcome
    assert line.fact in remark.message
    assert remark.hint == reason.hint_for(remark.kind)
    apart = line.name == "RESULT_UNUSED" and "coalesced" in remark.kind  # its tensors are communicated one by one
    erased = line.name == "RESULT_DROPPED" or apart
    assert (remark.collective in {node.name for node in graph.nodes}) != erased
    assert len([remark for remark in remarks if remark.outcome == "FUSED"]) == line.fused
    own = any(node.target is torch.ops.asynctp.wait.default for node in graph.nodes)  # the program calls our gather
    if not line.fused and not erased and not parted and not own and not any(remark.op for remark in remarks):
        assert snapshot(graph) == before


def test_the_table_reaches_every_reason() -> None:
    elsewhere = {"INTERNAL_ERROR"}  # test_internal
    assert {line.name for line in ROWS} | elsewhere == set(CATALOGUE)


def test_the_catalogue_is_well_formed() -> None:
    codes = [reason.code for reason in CATALOGUE.values()]
    assert len(set(codes)) == len(codes)
    for name, reason in CATALOGUE.items():
        assert name == reason.name
        assert reason.text
        assert reason.hint
        assert not reason.text.endswith(".")
        assert reason.in_scope == (reason.code[3] not in "04")
        assert reason.outcome in ("MISSED", "SKIPPED", "ERASED", "OVERLAPPED")


def test_no_two_reasons_share_a_rank_of_near_misses() -> None:
    """But for rank 1, where the first matmul is told of: else a graph's order would choose between the reasons."""
    ranks = sorted(reason.rank for reason in CATALOGUE.values() if reason.rank != 1)
    assert ranks == [0, *range(2, len(ranks) + 1)]


@pytest.mark.parametrize("line", ROWS, ids=[line.id for line in ROWS])
def test_remarks_name_the_place(line: Row) -> None:
    """The nodes of a remark are in the graph, its collective among them; and each collective has one."""
    graph = line.graph()
    names = {node.name for node in graph.nodes}
    expected = [node.name for call in graph.nodes if communicates(call) for node in results(call)]
    remarks = remarks_of(line, graph)
    for remark in remarks:
        assert remark.collective in remark.nodes
        assert set(remark.nodes) <= names
    assert [remark.collective for remark in remarks] == expected


def communicates(node: Node) -> bool:
    """True for a collective of torch's by its name, and for an op that takes a group; neither a wait nor ours."""
    op = node.args[0] if op_name(node.target).startswith("auto_functionalized") else node.target
    name, words = op_name(op), ("gather", "reduce_scatter", "all_reduce", "allreduce", "all_to_all", "broadcast")
    if name.startswith("own_like::"):
        return "group_name" in str(op._schema)
    return not name.startswith(("aten::", "asynctp::")) and any(word in name for word in words)


def results(call: Node) -> list[Node]:
    """The items of a list that a collective returns, or the call itself; that too for an item that nothing takes."""
    items = {user.args[1]: user for user in call.users if op_name(user.target) == "getitem"}
    is_list = op_name(call.target).endswith("_coalesced") and len(items) == len(call.users)
    return [items.get(index, call) for index in range(len(call.args[0]))] if is_list else [call]  # type: ignore[arg-type]


# --- names decide nothing ----------------------------------------------------------------------------------------
NAMES = (
    "all_reduce",
    "gather",
    "gemm",
    "matmul_rows",
    "rms_norm",
    "quantize",
    "attention",
    "moe",
    "finish",
    "dispatch",
)
OWN = ("own_like", "registry_like", "vllm_like")
_libraries: list[torch.library.Library] = []  # an op lives as long as its library


def with_other_names(graph: Graph, seed: int) -> dict[str, str]:
    """Give the program's own ops other names, which tell of anything; the old names by the new ones."""
    choose, renamed = random.Random(seed), dict[Any, Any]()
    library = torch.library.Library(f"other_{len(_libraries)}", "FRAGMENT")
    _libraries.append(library)

    def other(op: Any) -> Any:
        if not isinstance(op, torch._ops.OpOverload) or op.namespace not in OWN:
            return op
        if op not in renamed:
            name = f"{choose.choice(NAMES)}_{len(renamed)}"
            schema = re.sub(r"\(\$(\d+)! -> \)", r"(a\1!)", str(op._schema))  # what it writes to, as `define` has it
            library.define(schema.replace(f"{op._schema.name}(", f"{name}(", 1))
            if op is torch.ops.own_like.normalize.default:  # the one that has a fake implementation
                torch.library.register_fake(f"{library.ns}::{name}", torch.empty_like, lib=library)
            renamed[op] = getattr(getattr(torch.ops, library.ns), name).default
        return renamed[op]

    for node in graph.nodes:
        if node.op == "call_function":
            node.target = other(node.target)
            node.args = tuple(map(other, node.args))
    return {new._schema.name: old._schema.name for old, new in renamed.items()}


@pytest.mark.parametrize("seed", range(3))
def test_names_decide_nothing(seed: int) -> None:
    """Reports are equal, but for the names, whatever the ops of the program are called."""
    compared = 0
    for line in ROWS:
        graph = line.graph()
        if names := with_other_names(graph, seed):
            found = [told(remark, names) for remark in remarks_of(line, graph)]
            assert found == [told(remark, {}) for remark in remarks_of(line, line.graph())]
            compared += 1
    assert compared > 25


@contextlib.contextmanager
def known_alike(names: dict[str, str], promise: Callable[[str], None]) -> Iterator[None]:
    """Ops are described by their new names as by the old ones; of those that are not, the same is promised."""
    with serving_ops.registered(), contextlib.ExitStack() as known:
        for new, old in names.items():
            op, name = getattr(getattr(torch.ops, new.partition("::")[0]), new.partition("::")[2]), f"{old}.default"
            forgotten: list[Any] = [op]
            if (collective := collective_op(name.replace("::", "."))) is not None:
                described = {**dataclasses.asdict(collective), "groups": dict(collective.groups)}
                register_collective(op, **described)
            elif (matmul := matmul_op(name.replace("::", "."))) is not None:
                register_matmul(op, **dataclasses.asdict(matmul))
            else:
                forgotten = [new, old]
                for one in forgotten:
                    (register_local if op.default._schema.is_mutable else promise)(one)
            for one in forgotten:
                known.callback(unregister, one)
        yield


@pytest.mark.parametrize("promise", [register_local, register_rowwise])
def test_names_decide_nothing_of_what_is_registered(promise: Callable[[str], None]) -> None:
    fused = set[str]()
    for line in ROWS:
        graph = line.graph()
        if names := with_other_names(graph, 0):
            with known_alike(names, promise):
                remarks = remarks_of(line, graph)
                before = [told(one, {}) for one in remarks_of(line, line.graph())]
            assert [told(one, names) for one in remarks] == before
            fused.update(names.values() if any(one.outcome == "FUSED" for one in remarks) else ())
    described = {"vllm_like::all_gather", "vllm_like::reduce_scatter", "vllm_like::cutlass_scaled_mm"}
    assert described <= fused


def told(remark: Remark, names: dict[str, str]) -> tuple[str, str, str]:
    """What a remark says, with the names as they were."""
    text = remark.message
    for new, old in names.items():
        text = text.replace(new, old).replace(new.replace("::", "."), old.replace("::", "."))
        text = text.replace(new.partition("::")[2], old.partition("::")[2])
    return remark.outcome, remark.code, text
