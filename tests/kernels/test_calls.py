"""From the arguments of a call come the key of its plan, and the facts that decide how it is run."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from asynctp_kernels import cuda
from asynctp_kernels.cuda.facts import facts_of
from asynctp_kernels.cuda.plans.sequential import SequentialProgram
from cuda_stubs import Machine, machine
from plan_runs import RANK, WORLD

from asynctp_passes.ops.calls import OPS, SIGNATURES, GatherCall, ReduceCall

BF16, FP8, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
A, B, ONE = torch.zeros(2, 8, 16, dtype=FP8), torch.zeros(16, 16, dtype=FP8).t(), torch.ones(())
GATHER = GatherCall(A, [B], [None], 1, False, WORLD, "", ONE, [ONE], False, BF16)
SUM = ReduceCall([A], [B], [None], "sum", 1, WORLD, "", [ONE], [ONE], BF16)
OTHERS: dict[str, Any] = {
    "a_shard": A.repeat(1, 2, 1), "a_parts": [A.repeat(1, 2, 1)], "bs": [B, B], "b_parts": [B.t()],
    "biases": [torch.zeros(16, dtype=BF16)], "a_scale": torch.ones(2, 8 * WORLD, 1), "b_scales": [torch.ones(1, 16)],
    "a_scales": [torch.ones(2, 8, 1)], "along_shard": torch.ones(2, 8, 1), "added": torch.zeros(2, 8, 16, dtype=BF16),
    "factors": [2.0], "op": "another", "gather_dim": -2, "scatter_dim": -2, "group_size": 3, "reduce_op": "avg",
    "return_a_full": True, "gather_a_scale": True, "out_dtype": torch.float16, "use_fast_accum": True,
    "all_keep": True, "sum_dtype": FP32, "real_rows": 7, "accord": 7,
    "b_rows": [0, 4, 8],
}  # fmt: skip


def run(here: Machine, call: GatherCall | ReduceCall) -> Any:
    """The call as its op makes it; "its own program" where that runs."""
    return cuda.run(call._replace(group_name=here.group), lambda call: None, lambda call, mover: "its own program")


class Asked(dict[Any, Any]):
    """Plans that were all made before, and the keys that they were asked for by."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_asked: list[Any] = []

    def get(self, key: Any, default: Any = None) -> Any:
        hash(key)
        self.keys_asked.append(key)
        return SequentialProgram()


@pytest.mark.parametrize("call", [GATHER, SUM], ids=["gather", "sum"])
def test_every_argument_is_in_the_key_of_a_plan(call: GatherCall | ReduceCall) -> None:
    """A call that differs in one argument does not run the plan of another; one on other memory does."""
    with machine(RANK, WORLD) as here:
        here.memory.plans = asked = Asked()
        for other in (call, call._replace(biases=[None])):
            assert run(here, other) == "its own program"
        key, again = asked.keys_asked
        assert key == again
        for name in set(call._fields) - {"group_name"}:
            run(here, call._replace(**{name: OTHERS[name]}))
            assert asked.keys_asked.pop() != key, name


class Stop(Exception):
    """In place of a plan."""


class Stopping(Asked):
    def get(self, key: Any, default: Any = None) -> Any:
        super().get(key, default)
        raise Stop


def test_a_call_without_a_matmul_has_its_accord_in_the_key_of_its_plan() -> None:
    """In flight, or complete when it returns."""
    rows = torch.zeros(WORLD * 8, 16)
    with machine(RANK, WORLD) as here:
        here.memory.plans = asked = Stopping()
        group, check = here.group, lambda: None
        calls: list[Any] = [
            lambda accord: cuda.run_bulk_gather(rows, WORLD, group, check, accord=accord),
            lambda accord: cuda.run_bulk_scatter(rows, "sum", WORLD, group, check, accord=accord),
            lambda accord: cuda.run_bulk_all_reduce(rows, "max", group, check, accord=accord),
            lambda accord: cuda.Mover(group, accord=accord).gather(rows),
            lambda accord: cuda.Mover(group, accord=accord).scatter(rows.view(WORLD, 8, 16), "sum"),
            lambda accord: cuda.Mover(group, accord=accord).all_reduce(rows, "sum"),
        ]
        for call in calls:
            for accord in (0, 7, 7):
                with pytest.raises(Stop):
                    call(accord)
            none, seven, again = asked.keys_asked[-3:]
            assert none != seven == again
    assert len(set(asked.keys_asked)) == 2 * len(calls)


def test_optional_arguments_with_their_defaults_are_not_given() -> None:
    for op, signature in SIGNATURES.items():
        assert signature.defaults["accord"] == 0
        call = signature.call(*signature.names[: signature.needed])
        assert (call.accord, signature.given(call)) == (0, set())
        assert signature.call(*signature.names[: signature.needed], *signature.defaults.values()) == call
        given = signature.named({**dict.fromkeys(signature.names[: signature.needed]), "accord": 7})
        assert (given.op, signature.given(given)) == (op, {"accord"})
        assert signature.in_order({"accord": 7})[signature.needed :] == [*[*signature.defaults.values()][:-1], 7]


@pytest.mark.parametrize("op", OPS)
def test_a_signature_makes_the_same_call_of_arguments_in_order_and_by_name(op: str) -> None:
    signature, given = SIGNATURES[op], dict(enumerate(SIGNATURES[op].names))
    for count in range(signature.needed, len(given) + 1):
        arguments = [given[place] for place in range(count)]
        call = signature.call(*arguments)
        assert call == signature.named(dict(zip(signature.names, arguments, strict=False)))
        assert (type(call), call.op) == (GatherCall if "gather" in op else ReduceCall, op)
        assert [getattr(call, name) for name in signature.names[:count]] == arguments
        assert signature.given(call) == set(arguments[signature.needed :])
        assert signature.in_order(dict(zip(signature.names, arguments, strict=False))) == arguments


@pytest.mark.parametrize("call", [GATHER, SUM], ids=["gather", "sum"])
def test_kernels_know_every_optional_argument(call: GatherCall | ReduceCall) -> None:
    """Each that the ops have is a field of what the kernels make of a call."""
    optional = SIGNATURES[call.op].defaults.keys()
    given = call._replace(**{name: OTHERS[name] for name in optional})
    assert SIGNATURES[call.op].given(given) == set(optional)
    assert optional <= {field.name for field in fields(facts_of(given, WORLD))}
