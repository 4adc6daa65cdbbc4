"""Make and run plans on one rank without a GPU: see `cuda_stubs` and `cuda_emulated`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import cuda_emulated
from asynctp_kernels import cuda
from asynctp_kernels.cuda.choose.tiles import Tiles
from asynctp_kernels.cuda.choose.wire import PUSH
from asynctp_kernels.cuda.facts import GatherFacts, ReduceFacts
from asynctp_kernels.cuda.plans import decomposed, direct, fused, gather, scatter, sequential
from asynctp_kernels.cuda.plans.gather_transports import GatherPush
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS, MAX_WORLD, GroupMemory, Words
from cuda_stubs import (
    FP8,
    SMS,
    Copied,
    Machine,
    Waited,
    Wrote,
    gather_call,
    result_dtype,
    scatter_call,
    tensor,
    whole,
)
from torch import Tensor

from asynctp_passes.ops import calls

RANK, WORLD = 1, 4
ROWWISE: dict[str, Any] = {"dtype": FP8, "scales": "row"}
TENSORWISE: dict[str, Any] = {"dtype": FP8, "scales": "tensor"}


def tiles_of(dtype: torch.dtype) -> Tiles:
    return Tiles(128, 128, 128 if dtype.itemsize == 1 else 64, warps=4, stages=4, split=2)


def bits(tensor: Tensor) -> Tensor:
    return cuda_emulated.raw(tensor)


def own_counts(here: Machine) -> Tensor:
    """This rank's own words up to the constant: progress and arrivals, which a call leaves cleared."""
    memory = here.memory
    return memory.local[: (memory.one - memory.local.data_ptr()) // 4]


def own_words(here: Machine) -> Tensor:
    """This rank's signal words: FULL, FREE and LANDED, by peer."""
    return words_of(here, RANK)


def words_of(here: Machine, rank: int) -> Tensor:
    """[3, MAX_WORLD]"""
    return cuda_emulated.at(here.memory.signals.peers[rank], (3, MAX_WORLD), torch.int32)


GATHERS: dict[str, dict[str, Any]] = {
    "rows": {"shard": (500,), "k": 64, "ns": (72,)},
    "one row": {"shard": (1,), "k": 8, "ns": (8,)},
    "ragged": {"shard": (130,), "k": 72, "ns": (264,)},
    "several": {"shard": (192,), "k": 64, "ns": (136, 72, 8)},
    "four": {"shard": (192,), "k": 64, "ns": (136, 72, 8, 264), "bias": True},
    "outer": {"shard": (3, 140), "k": 64, "ns": (72,), "dim": 1},
    "outer, several": {"shard": (5, 3, 2), "k": 64, "ns": (72, 136), "dim": 1, "bias": True},
    "inner": {"shard": (5, 30), "k": 64, "ns": (72,), "dim": 0},
    "n-major": {"shard": (192,), "k": 64, "ns": (72,), "k_major": False},
    "fp16": {"shard": (192,), "k": 64, "ns": (72,), "dtype": torch.float16},
    "fp8": {"shard": (192,), "k": 64, "ns": (72, 136), **TENSORWISE},
    "fp8 to fp16": {"shard": (192,), "k": 64, "ns": (72,), **TENSORWISE, "out_dtype": torch.float16, "bias": True},
    "rows of scales": {"shard": (300,), "k": 80, "ns": (72, 136), **ROWWISE, "travels": True},
    "one row and its scale": {"shard": (1,), "k": 64, "ns": (72,), **ROWWISE, "travels": True},
    "rows of scales, outer": {"shard": (2, 100), "k": 64, "ns": (72,), "dim": 1, **ROWWISE, "travels": True},
    "numbers along": {"shard": (300,), "k": 80, "ns": (72, 136), **TENSORWISE, "along": True},
    "numbers along, outer": {"shard": (2, 100), "k": 64, "ns": (72,), "dim": 1, **TENSORWISE, "along": True},
    "numbers along scales that stay": {"shard": (192,), "k": 64, "ns": (72,), **ROWWISE, "along": True},
    "rows of scales that stay": {"shard": (192,), "k": 64, "ns": (72,), **ROWWISE},
    "rows of scales that stay, outer": {"shard": (2, 100), "k": 64, "ns": (72,), "dim": 1, **ROWWISE},
    "columns": {"shard": (50,), "k": 40, "ns": (72, 8), "dim": 1},
    "odd": {"shard": (3, 5), "k": 7, "ns": (9, 1), "dim": 1},
    "odd, in one piece": {"shard": (3, 4), "k": 7, "ns": (9, 1)},
    "ranges": {"shard": (50,), "k": 64, "ns": (72, 8), "bias": True, "rows": (0, 70, 200, 70, 200, 200)},
    "ranges at borders of shards": {"shard": (50,), "k": 64, "ns": (72, 8), "rows": (0, 100, 200, 100, 200, 200)},
    "ranges of some rows, that overlap": {
        "shard": (3, 20), "k": 64, "ns": (72, 8, 24), "dim": 1, "rows": (1, 33, 80, 20, 78, 80, 79, 79, 80),
    },
    "ranges across the shards": {"shard": (5, 30), "k": 64, "ns": (72, 8), "rows": (0, 11, 30, 11, 30, 30)},
}  # fmt: skip


#: whose rows are longer than a chunk, so that no tile would know what to wait for
LONG_ROWS = ("one row and its scale",)


def gather_implementations(kept: bool = False) -> Iterator[Any]:
    """(case, implementation) for all that can run it; `kept`: where every rank keeps the gathered A."""
    for case, options in GATHERS.items():
        outer, along_last = gather_call(**options).outer, case == "columns"
        aligned, ranges = not case.startswith("odd"), case.startswith("ranges")
        for implementation, able in (
            ("fused", aligned and not ranges and not along_last and (kept or case not in LONG_ROWS)),
            ("decomposed", outer <= MAX_CHUNKS and not along_last),
            ("sequential", outer == 1 and not along_last and not ranges),
            ("direct", not ranges),
        ):
            if able:
                yield pytest.param(case, implementation, id=f"{case}-{implementation}")


def returned() -> Iterator[Any]:
    """(case, implementation, kept) where the gathered A is returned: by this rank, or by every rank."""
    for kept, name in ((False, "pushed"), (True, "pulled")):
        for param in gather_implementations(kept):
            yield pytest.param(*param.values, kept, id=f"{param.id}-{name}")


def gather_plan(call: GatherFacts, here: Machine, implementation: str, chunks: int = 3) -> gather.GatherPlan:
    if implementation == "fused":
        return fused.FusedGather(call, here.memory, tiles_of(call.a_shard.dtype), chunks, SMS)
    made: dict[str, Callable[[GatherFacts, GroupMemory], gather.GatherPlan]] = {
        "decomposed": decomposed.DecomposedGather,
        "direct": direct.DirectGather,
        "sequential": sequential.SequentialGather,
    }
    return made[implementation](call, here.memory)


def others(call: GatherFacts) -> tuple[list[Tensor], list[Tensor]]:
    """All ranks' shards and row scales; ours are those of the call."""
    shards = [tensor(*call.a_shard.shape, dtype=call.a_shard.dtype) for _ in range(WORLD)]
    shards[RANK] = call.a_shard
    scales = []
    if call.row_numbers is not None:
        scales = [torch.rand_like(call.row_numbers) + 0.5 for _ in range(WORLD)]
        scales[RANK] = call.row_numbers
    return shards, scales


def fill_outboxes(here: Machine, shards: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
    """What the other ranks' staging kernels do."""
    for rank, outbox in enumerate(here.parts("box")):
        if rank != RANK:
            data = bits(shards[rank])
            outbox[: len(data)] = data
            if scales:
                start = -(-len(data) // 256) * 256
                outbox[start : start + scales[rank].numel() * 4] = bits(scales[rank])


def fill_inbox(
    here: Machine, push: GatherPush, shards: Sequence[Tensor], scales: Sequence[Tensor], signature: int
) -> None:
    """The other ranks have taken part, and have pushed theirs to us; scales behind all shards."""
    data = [bits(shard) for shard in shards]
    parts = [torch.cat([each, each.new_zeros(-len(each) % 16)]) for each in data]
    peers_come(here, here.memory.landed, parts, signature)
    for rank in (set(range(WORLD)) - {RANK}) if scales else ():
        size = scales[rank].numel() * 4
        start = push.scale_offset + (rank - (rank > RANK)) * size
        here.parts("box")[RANK][start : start + size] = bits(scales[rank])


def peers_give(
    here: Machine, plan: gather.GatherPlan, call: GatherFacts, shards: Sequence[Tensor], scales: Sequence[Tensor]
) -> None:
    """What a plan takes from the other ranks lies where it does."""
    transport = getattr(plan, "transport", None)
    if isinstance(transport, GatherPush):
        fill_inbox(here, transport, shards, scales, call.wire.signature(PUSH))
    elif "box" in here.memory.areas:
        fill_outboxes(here, shards, scales)
    here.kernels["push_gather_kernel"] = functools.partial(cuda_emulated.landed, parts=shards, scales=scales)
    here.gathered = [shards, scales] if scales else [shards]


def run_gather(call: GatherFacts, here: Machine, plan: gather.GatherPlan) -> tuple[list[Tensor], Tensor, Any]:
    """Run the plan on data of its own; gives its results, the gathered A and the scale of that.

    Numbers that travel along are the last result; they are checked here.
    """
    fresh = replace(call, a_shard=tensor(*call.a_shard.shape, dtype=call.a_shard.dtype))
    shards, scales = others(fresh)
    peers_give(here, plan, call, shards, scales)
    outs = plan.run(fresh.a_shard, fresh.bs, fresh.biases, fresh.a_scale, fresh.b_scales, fresh.along_shard)
    full = torch.cat([shard.float() for shard in shards], call.gather_dim).to(call.a_shard.dtype)
    if call.along_shard is not None:
        assert torch.equal(outs.pop(), torch.cat(scales, call.gather_dim))
    return outs, full, torch.cat(scales, call.gather_dim) if call.gather_a_scale else fresh.a_scale


RETURNED = pytest.mark.parametrize("kept", [False, True], ids=["pushed", "pulled"])


CONVERTED, AVERAGE, ADDED = {"sum_dtype": torch.float32}, {"reduce_op": "avg"}, {"added": True}
SCATTERS: dict[str, dict[str, Any]] = {
    "rows": {"rows": (2000,), "ks": (64,), "n": 72},
    "few rows": {"rows": (4,), "ks": (8,), "n": 8},
    "ragged": {"rows": (520,), "ks": (72,), "n": 264},
    "average": {"rows": (520,), "ks": (64,), "n": 72, "reduce_op": "avg"},
    "several": {"rows": (768,), "ks": (64, 72, 8), "n": 136},
    "four": {"rows": (768,), "ks": (64, 72, 8, 136), "n": 136},
    "bias": {"rows": (768,), "ks": (64,), "n": 72, "bias": True},
    "outer": {"rows": (3, 520), "ks": (64,), "n": 72, "dim": 1},
    "outer, several": {"rows": (5, 12, 2), "ks": (64, 72), "n": 136, "dim": 1},
    "inner": {"rows": (8, 30), "ks": (64,), "n": 72, "dim": 0},
    "n-major": {"rows": (768,), "ks": (64,), "n": 72, "k_major": False},
    "fp16": {"rows": (768,), "ks": (64,), "n": 72, "dtype": torch.float16},
    "fp8": {"rows": (768,), "ks": (64,), "n": 72, **TENSORWISE},
    "rows of scales": {"rows": (768,), "ks": (64,), "n": 72, **ROWWISE, "bias": True},
    "rows of scales, outer": {"rows": (2, 400), "ks": (64,), "n": 72, "dim": 1, **ROWWISE},
    "several scaled": {"rows": (768,), "ks": (64, 80), "n": 72, **ROWWISE},
    "four scaled": {"rows": (520,), "ks": (64, 96, 96, 16), "n": 264, **TENSORWISE, "reduce_op": "avg"},
    "four scaled, precise": {"rows": (520,), "ks": (64, 96, 96, 16), "n": 264, **TENSORWISE, "fast": False},
    "several scaled, bias": {"rows": (768,), "ks": (80, 64), "n": 72, **TENSORWISE, "bias": True},
    "several scaled, bias, outer": {
        "rows": (2, 400),
        "ks": (64, 16, 80),
        "n": 72,
        "dim": 1,
        **ROWWISE,
        "bias": True,
    },
    "several scaled, outer": {"rows": (2, 400), "ks": (64, 16, 80), "n": 72, "dim": 1, **ROWWISE},
    "columns": {"rows": (50,), "ks": (40, 8), "n": 72, "dim": 1},
    "odd": {"rows": (3, 20), "ks": (7,), "n": 9, "dim": 1},
    "odd rows": {"rows": (12,), "ks": (7,), "n": 9},
    "converted": {"rows": (768,), "ks": (64,), "n": 72, "bias": True, **CONVERTED},
    "converted fp16, average": {"rows": (520,), "ks": (64,), "n": 72, "dtype": torch.float16, **CONVERTED, **AVERAGE},
    "converted, outer": {"rows": (3, 520), "ks": (64,), "n": 72, "dim": 1, **CONVERTED},
    "converted, several": {"rows": (768,), "ks": (64, 72, 8), "n": 136, **CONVERTED},
    "converted, outer, several": {"rows": (5, 12, 2), "ks": (64, 72), "n": 136, "dim": 1, **CONVERTED},
    "converted columns": {"rows": (50,), "ks": (40, 8), "n": 72, "dim": 1, **CONVERTED},
    "converted rows of scales": {"rows": (768,), "ks": (64,), "n": 72, **ROWWISE, **CONVERTED},
    "converted, several scaled": {"rows": (768,), "ks": (64, 80), "n": 72, **ROWWISE, **CONVERTED},
    "odd converted": {"rows": (12,), "ks": (7, 3), "n": 9, **CONVERTED},
    "added": {"rows": (768,), "ks": (64,), "n": 72, "bias": True, **ADDED},
    "added, outer, several": {"rows": (5, 12, 2), "ks": (64, 72), "n": 136, "dim": 1, **ADDED},
    "added rows of scales": {"rows": (768,), "ks": (64,), "n": 72, **ROWWISE, **ADDED},
    "added, converted": {"rows": (768,), "ks": (64,), "n": 72, **CONVERTED, **AVERAGE, **ADDED},
    "added columns": {"rows": (50,), "ks": (40,), "n": 72, "dim": 1, **ADDED},
    "multiplied": {"rows": (768,), "ks": (64,), "n": 72, "factors": (-0.25,)},
    "multiplied, bias": {"rows": (768,), "ks": (64,), "n": 72, "bias": True, "factors": (8.0,)},
    "multiplied fp16, average": {
        "rows": (520,),
        "ks": (64,),
        "n": 72,
        "dtype": torch.float16,
        "factors": (0.125,),
        **AVERAGE,
    },
    "multiplied rows of scales": {"rows": (768,), "ks": (64,), "n": 72, **ROWWISE, "factors": (2.0,)},
    "multiplied, converted": {"rows": (768,), "ks": (64,), "n": 72, **CONVERTED, "factors": (2.0**-30,)},
    "multiplied sum": {"rows": (5, 12, 2), "ks": (64, 72), "n": 136, "dim": 1, "factors": (1.0, 1.0, 4.0)},
    "multiplied sum, scaled": {"rows": (768,), "ks": (64, 80), "n": 72, **TENSORWISE, "factors": (1.0, 1.0, 0.5)},
    "multiplied apart": {"rows": (768,), "ks": (64, 72, 8), "n": 136, "factors": (1.0, -1.0, 0.5)},
    "multiplied apart fp16": {"rows": (768,), "ks": (64, 8), "n": 72, "dtype": torch.float16, "factors": (2.0, 0.5)},
    "multiplied apart, converted": {"rows": (768,), "ks": (64, 8), "n": 72, **CONVERTED, "factors": (0.5, -2.0)},
    "multiplied apart, scaled": {"rows": (768,), "ks": (64, 80), "n": 72, **ROWWISE, "factors": (-1.0, 0.25)},
    "multiplied apart, added": {
        "rows": (768,),
        "ks": (64, 8),
        "n": 72,
        **ADDED,
        "factors": (1.0, 0.5, 0.25),
        "bias": True,
    },
    "multiplied apart, and in all": {"rows": (768,), "ks": (64, 8), "n": 72, "factors": (0.5, 2.0, 4.0)},
    "padded": {"rows": (768,), "ks": (64,), "n": 72, "real_rows": 767},
    "padded, parts of three ranks": {"rows": (768,), "ks": (64,), "n": 72, "real_rows": 100, "bias": True},
    "padded to be divided by nothing": {"rows": (768,), "ks": (64,), "n": 72, "real_rows": 768},
    "padded rows of scales": {"rows": (768,), "ks": (64,), "n": 72, **ROWWISE, "real_rows": 700, "bias": True},
    "padded, outer, several": {"rows": (5, 12, 2), "ks": (64, 72), "n": 136, "dim": 1, "real_rows": 10},
    "padded, converted, multiplied": {
        "rows": (768,),
        "ks": (64,),
        "n": 72,
        **CONVERTED,
        "factors": (-2.0,),
        "real_rows": 761,
    },
    "padded, several scaled": {"rows": (768,), "ks": (64, 80), "n": 72, **ROWWISE, "real_rows": 700},
    "multiplied columns": {"rows": (50,), "ks": (40, 8), "n": 72, "dim": 1, "factors": (2.0, -4.0, 0.5)},
}


def scatter_implementations() -> Iterator[Any]:
    """(case, implementation) for all that can run it."""
    for case, options in SCATTERS.items():
        outer, along_last = scatter_call(**options).outer, case.endswith("columns")
        in_gemm = not case.startswith(("odd", "added", "several scaled, bias", "multiplied apart"))
        in_gemm &= "sum_dtype" not in options or len(options["ks"]) == 1
        for implementation, able in (
            ("fused", in_gemm and not along_last),
            ("decomposed", outer <= MAX_CHUNKS and not along_last),
            ("sequential", outer == 1 and not along_last),
            ("direct", True),
        ):
            if able:
                yield pytest.param(case, implementation, id=f"{case}-{implementation}")


def scatter_plan(call: ReduceFacts, here: Machine, implementation: str, chunks: int = 3) -> scatter.ScatterPlan:
    if implementation == "fused":
        return fused.FusedScatter(call, here.memory, tiles_of(call.a_parts[0].dtype), chunks, SMS)
    made = {
        "decomposed": decomposed.DecomposedScatter,
        "direct": direct.DirectScatter,
        "sequential": sequential.SequentialScatter,
    }
    return made[implementation](call, here.memory)


def peers_come(here: Machine, full: Words, parts: Sequence[Tensor], signature: int) -> None:
    """The other ranks have come to the call, and have pushed what they have for us, as the words `full` say."""
    size = parts[RANK].numel() * parts[RANK].itemsize
    for rank in set(range(WORLD)) - {RANK}:
        cuda_emulated.int32(here.memory.free.at(RANK, rank)).value = signature
        cuda_emulated.int32(full.at(RANK, rank)).value = MAX_CHUNKS
        slot = rank - (rank > RANK)
        here.parts("box")[RANK][slot * size : (slot + 1) * size] = bits(parts[rank])


def run_scatter(call: ReduceFacts, here: Machine, plan: scatter.ScatterPlan) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run the plan on data of its own; gives its result, what it must be, and our parts for all ranks."""
    fresh = replace(call, a_parts=[tensor(*a.shape, dtype=a.dtype) for a in call.a_parts])
    if call.added is not None:
        fresh = replace(fresh, added=tensor(*call.added.shape, dtype=call.added.dtype))
    mine = whole(fresh, plan.name).chunk(WORLD, call.dim)  # type: ignore[attr-defined]
    for_us = [tensor(*mine[RANK].shape, dtype=mine[RANK].dtype) for _ in range(WORLD)]
    for_us[RANK] = mine[RANK].contiguous()
    if "box" in here.memory.areas:
        peers_come(here, here.memory.full, for_us, call.wire.signature(PUSH))
    here.kernels["push_reduce_kernel"] = functools.partial(cuda_emulated.landed, parts=for_us)
    here.scattered = for_us
    out = plan.run(fresh.a_parts, fresh.b_parts, fresh.biases, fresh.a_scales, fresh.b_scales, fresh.added)
    total = sum((part.float() for part in for_us), torch.zeros(()))
    return out, (total * (1 / WORLD if call.reduce_op == "avg" else 1)).to(result_dtype(call)), list(mine)


def check_pushes(here: Machine, implementation: str, mine: Sequence[Tensor]) -> None:
    """Every other rank's inbox has our part for it, where the reduction there looks for it."""
    if implementation in ("direct", "sequential"):
        assert here.of(Copied) == []
        return
    for rank in set(range(WORLD)) - {RANK}:
        part = bits(mine[rank])
        slot = RANK - (rank < RANK)
        assert torch.equal(here.parts("box")[rank][slot * len(part) : (slot + 1) * len(part)], part)


def check_words(here: Machine, implementation: str, call: ReduceFacts) -> None:
    """Every wait of a stream is for a word that says so, exactly where it is the call's; none is left over."""
    signature = call.wire.signature(PUSH)
    for wait in here.of(Waited):
        assert wait.found == wait.value if wait.exactly else wait.found >= wait.value
        assert wait.exactly == (wait.value == signature)
    assert own_counts(here).count_nonzero() == 0
    assert own_words(here).count_nonzero() == 0
    for rank in set(range(WORLD)) - {RANK} if implementation in ("fused", "decomposed") else ():
        theirs, full = words_of(here, rank), here.memory.full.at(rank, RANK)
        posted = [write.value for write in here.of(Wrote) if write.address == full]
        assert posted == sorted(set(posted))
        assert theirs[:2, RANK].tolist() == [MAX_CHUNKS, signature]
        theirs[:2, RANK] = 0
        assert theirs.count_nonzero() == 0


def at_the_same_place(plan: Any, names: Sequence[str]) -> None:
    """From its first call on, the plan has its tensors where that call had them, with what each call brings."""
    make, kept = plan.tensors, []

    def tensors(*args: Any) -> Any:
        call = make(*args)
        kept.append(call)
        for name in names:
            pairs = zip(several(getattr(kept[0], name)), several(getattr(call, name)), strict=True)
            for old, new in pairs:
                bits(old).copy_(bits(new))
        return kept[0]

    plan.tensors = tensors


def several(found: Tensor | Sequence[Tensor] | None) -> Sequence[Tensor]:
    return [] if found is None else [found] if isinstance(found, Tensor) else found


OPS = {"gather": "all_gather_matmul", "scatter": "matmul_reduce_scatter", "all_reduce": "matmul_all_reduce"}
"""By `kind`."""


def arguments_of(call: GatherFacts | ReduceFacts, group: Any, world: int = WORLD) -> calls.Call:
    """The call of an op that is run so; of an all-reduce, of rows."""
    arguments = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    del arguments["world"]
    if not call.b_scales:  # then no other argument of scales is there
        arguments |= {name: None for name in ("a_scale", "a_scales", "b_scales", "out_dtype") if name in arguments}
        arguments["use_fast_accum"] = False
    if call.kind == "all_reduce":
        del arguments["scatter_dim"]
    else:
        arguments["group_size"] = world
    return calls.signature(OPS[call.kind]).named({**arguments, "group_name": group})


def op(here: Machine, call: GatherFacts | ReduceFacts, check: Callable[[], None] = lambda: None) -> Any:
    """The call as the op makes it; None where its own program is to run."""
    return cuda.run(arguments_of(call, here.group, call.world), lambda _: check(), lambda call, mover: None)


IMPLEMENTATIONS = ("fused", "decomposed", "direct")


SMALL: dict[str, Callable[[], Any]] = {
    "gather": lambda: gather_call((192,), 64, (72,), kept=True),
    "scatter": lambda: scatter_call((768,), (64,), 72),
}
