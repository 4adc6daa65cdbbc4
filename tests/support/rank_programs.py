"""Random programs of which every rank has its own: they share their collectives, and differ in all that is local.

    Program = stages, the same on all ranks          gather ─▶ reduce ─▶ gather
            + a variation for each rank and stage    rank 0:  multiply    partial     later
                                                     rank 1:  relu        residual    multiply

A stage is a collective: its kind, group, dtype and dimension. A variation (`rank_variations`) writes what one rank
computes around it. Everything follows from a seed; numbers of a stage do not change when others go, which `smaller`
relies on.

    print(focused("rows_permuted", seed=3, world=2))
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rank_variations import NAMES, VARIATIONS, Variation
from rank_writer import LATER, Outline, Stage, Value, Writer
from torch import Tensor

__all__ = ["DYNAMIC", "HELPERS", "KINDS", "PLAIN", "Program", "focused", "mixed", "of_own_parts", "smaller"]

PLAIN = {"gather": "multiply", "scatter": "partial", "reduce": "partial", "maximum": "largest"}
"""What a rank does that does nothing unusual, by kind of stage."""

DYNAMIC = "dynamic"
"""The kind of programs that some ranks compile for sizes that may change, and others do not."""

KINDS = (*(name for name in NAMES if name not in PLAIN.values()), DYNAMIC)
"""All kinds of local differences."""

_NARROW = ("bfloat16", "float16", "float8")
_WRITTEN = {"gather": "gather({sent}, {dim}, {group})", "scatter": "scatter({sent}, {dim}, {group})"}
_WRITTEN |= {"reduce": "reduce({sent}, 'sum', {group})", "maximum": "reduce({sent}, 'max', {group})"}
_STEMS = {"gather": "h", "scatter": "r", "reduce": "r", "maximum": "m"}


@dataclass(frozen=True)
class Program:
    """One program for each rank.

    Attributes:
        origin: The call that made it, as `"focused('later', 3, 2)"`.
        outline: Seed, ranks and sizes.
        stages: The collectives, in order.
        variations: By rank and stage, the names of variations.
        dynamic: By rank, whether it compiles for sizes that may change.
    """

    origin: str
    outline: Outline
    stages: tuple[Stage, ...]
    variations: tuple[tuple[str, ...], ...]
    dynamic: tuple[bool, ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.outline.world

    def kinds(self) -> set[str]:
        """The variations that are not plain, and `DYNAMIC`."""
        used = {name for names in self.variations for name in names}
        return (used | ({DYNAMIC} if any(self.dynamic) else set())) - set(PLAIN.values())

    def tolerance(self) -> float:
        """Allowed error relative to a result's largest element: that of the narrowest dtype."""
        texts = [self.text(rank) for rank in range(self.world)]
        return 5e-2 if any(name in text for name in _NARROW for text in texts) else 1e-4

    def make_inputs(self, rank: int) -> list[Tensor]:
        """The arguments of a rank's program, which differ from rank to rank."""
        return [one.make(f"{self.outline.seed}/{rank}") for one in self._written(rank).inputs]

    def text(self, rank: int) -> str:
        """A rank's program, as Python."""
        return self._written(rank).text()

    def function(self, rank: int, groups: Mapping[str, tuple[str, int]]) -> Callable[..., tuple[Tensor, ...]]:
        """A rank's program, given the names and sizes of its groups."""
        text, file = self.text(rank), f"<{self.origin}>"  # one function to all ranks, which are asked about it
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        names: dict[str, Any] = {**HELPERS, **groups}
        exec(compile(text, file, "exec"), names)
        found: Callable[..., tuple[Tensor, ...]] = names["program"]
        return found

    def _written(self, rank: int) -> Writer:
        """All stages, each with this rank's variation."""
        writer = Writer(self.outline, rank)
        waiting: list[tuple[Stage, Any]] = []
        for stage, name in zip(self.stages, self.variations[rank], strict=True):
            writer.enter(stage)
            steps = VARIATIONS[stage.table][name].write(writer, stage)
            result = _communicate(writer, stage, next(steps))
            resumed, waiting = waiting, []
            if _go_on(steps, result) == LATER:
                waiting.append((stage, steps))
            for earlier, others in resumed:
                writer.enter(earlier, "later")
                _go_on(others, result)
        for stage, steps in waiting:
            writer.enter(stage, "later")
            _go_on(steps, None)
        return writer

    def __str__(self) -> str:
        """How to make it again, and the text of all ranks, equal ones once."""
        texts: dict[str, list[int]] = {}
        for rank in range(self.world):
            texts.setdefault(self.text(rank), []).append(rank)
        lines = [f"# {self.origin}", f"# {self!r}", f"# groups: {self.outline.groups()}"]
        lines += [f"# rank {rank} compiles for dynamic sizes" for rank, on in enumerate(self.dynamic) if on]
        for text, ranks in texts.items():
            lines.append(f"# rank {', '.join(map(str, ranks))}\n{text}")
        return "\n".join(lines)


def _communicate(writer: Writer, stage: Stage, sent: Value) -> Value:
    call = _WRITTEN[stage.kind].format(sent=sent, dim=stage.dim, group=stage.group)
    return writer.let(_STEMS[stage.kind], call, writer.outline.result(stage), stage.dtype)


def _go_on(steps: Any, value: Value | None) -> Any:
    """Send a value to a variation; what it yields then, or None at its end."""
    try:
        return steps.send(value)
    except StopIteration:
        return None


# --- what programs call -------------------------------------------------------------------------------------
_C10D = torch.ops._c10d_functional
Group = tuple[str, int]


def gather(shard: Tensor, dim: int, group: Group) -> Tensor:
    """All ranks' shards, joined along a dimension, as torch's functional collectives do it."""
    whole: Tensor = _C10D.wait_tensor(_C10D.all_gather_into_tensor(shard.contiguous(), group[1], group[0]))
    return torch.cat(whole.chunk(group[1]), dim) if dim else whole


def scatter(whole: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's block of the sum, along a dimension."""
    rows = torch.cat(whole.chunk(group[1], dim)) if dim else whole
    block: Tensor = _C10D.wait_tensor(_C10D.reduce_scatter_tensor(rows.contiguous(), "sum", group[1], group[0]))
    return block


def reduce(part: Tensor, op: str, group: Group) -> Tensor:
    """The sum or the maximum over the ranks."""
    total: Tensor = _C10D.wait_tensor(_C10D.all_reduce(part.contiguous(), op, group[0]))
    return total


HELPERS: dict[str, Any] = {"torch": torch, "gather": gather, "scatter": scatter, "reduce": reduce}


# --- generating ---------------------------------------------------------------------------------------------
_OWN_PARTS = ("own_part", "own_part_of_turned")
_KINDS = ("gather", "gather", "scatter", "scatter", "reduce", "maximum")
_DTYPES = ("float32", "float32", "bfloat16", "float16")


def focused(kind: str, seed: int, world: int = 2) -> Program:
    """A program in which some ranks have one variation, in one stage, and all else is plain.

    Args:
        kind: The variation's name, or `DYNAMIC`.
        seed: Of all choices.
        world: Number of ranks, even.
    """
    draw = random.Random(f"focused/{kind}/{seed}/{world}")
    if kind == DYNAMIC:
        stages, place = [_stage(draw, key) for key in range(draw.randint(1, 3))], -1
    else:
        table = next(table for table, names in VARIATIONS.items() if kind in names)
        stages, place = _stages_around(draw, table, VARIATIONS[table][kind])
    chosen = [rank for rank in range(world) if draw.random() < 0.5] or [draw.randrange(world)]
    if len(chosen) == world and draw.random() < 0.7:
        chosen.pop(draw.randrange(world))
    variations = tuple(
        tuple(kind if index == place and rank in chosen else PLAIN[stage.kind] for index, stage in enumerate(stages))
        for rank in range(world)
    )
    dynamic = tuple(kind == DYNAMIC and rank in chosen for rank in range(world))
    origin = f"focused({kind!r}, {seed}, {world})"
    return Program(origin, _outline(draw, seed, world), tuple(stages), variations, dynamic)


def mixed(seed: int, world: int = 2, without: Sequence[str] = ()) -> Program:
    """A program in which every rank has any variation in every stage.

    Args:
        seed: Of all choices.
        world: Number of ranks, even.
        without: Kinds to leave out.
    """
    draw = random.Random(f"mixed/{seed}/{world}/{','.join(sorted(without))}")
    stages = [_stage(draw, 0)]
    for key in range(1, draw.randint(1, 4)):
        stages.append(replace(stages[-1], key=key) if draw.random() < 0.3 else _stage(draw, key))
    variations = []
    for _ in range(world):
        names = [_any_of(draw, stage, stages[index + 1 :], without) for index, stage in enumerate(stages)]
        variations.append(tuple(names))
    dynamic = tuple(DYNAMIC not in without and draw.random() < 0.15 for _ in range(world))
    origin = f"mixed({seed}, {world}{f', {tuple(sorted(without))}' if without else ''})"
    return Program(origin, _outline(draw, seed, world), tuple(stages), tuple(variations), dynamic)


def of_own_parts(seed: int, world: int = 2) -> Program:
    """A program with all-reduces of which mostly all ranks use their own parts alone.

    Args:
        seed: Of all choices.
        world: Number of ranks, even.
    """
    draw = random.Random(f"own parts/{seed}/{world}")
    kinds = [draw.choice(("reduce", "reduce", "reduce", "gather", "scatter")) for _ in range(draw.randint(1, 3))]
    stages = [replace(_stage(draw, key, kind), dim=0) for key, kind in enumerate(kinds)]
    looks = [*_OWN_PARTS, "part_of_the_next", "more_than_its_part", "other_parts", "partial", "nothing_multiplied"]
    by_stage = []
    for stage in stages:
        names = _OWN_PARTS if draw.random() < 0.6 else looks
        reduces = stage.kind == "reduce"
        by_stage.append([draw.choice(names) if reduces else PLAIN[stage.kind] for _ in range(world)])
    dynamic = tuple(draw.random() < 0.1 for _ in range(world))
    variations = tuple(zip(*by_stage, strict=True))
    origin = f"of_own_parts({seed}, {world})"
    return Program(origin, _outline(draw, seed, world), tuple(stages), variations, dynamic)


def _any_of(draw: random.Random, stage: Stage, later: Sequence[Stage], without: Sequence[str]) -> str:
    """A variation that fits a stage; nearly every other one is plain."""
    table = VARIATIONS[stage.table]
    fitting = [name for name, one in table.items() if name not in without and one.fits(stage, later[:1])]
    return draw.choice(fitting) if fitting and draw.random() < 0.6 else PLAIN[stage.kind]


def _stage(draw: random.Random, key: int, kind: str | None = None) -> Stage:
    kind = kind or draw.choice(_KINDS)
    dtype = "float32" if kind == "maximum" else draw.choice(_DTYPES)
    dim = draw.choice((0, 0, 1)) if kind in ("gather", "scatter") else 0
    return Stage(key, kind, draw.choice(("ALL", "ALL", "SIDE")), dtype, dim)


def _stages_around(draw: random.Random, table: str, variation: Variation) -> tuple[list[Stage], int]:
    """One to three stages, and the place of one that the variation fits."""
    before = [_stage(draw, 0)] if draw.random() < 0.4 else []
    kind = draw.choice(("scatter", "reduce")) if table == "reduction" else table
    stage = replace(_stage(draw, 1, kind), **variation.wants)
    after = [_stage(draw, 2)] if draw.random() < 0.4 else []
    if variation.followed_by == "the same":
        after = [replace(stage, key=2)]
    elif variation.followed_by == "any" and not after:
        after = [_stage(draw, 2)]
    return [*before, stage, *after], len(before)


def _outline(draw: random.Random, seed: int, world: int) -> Outline:
    return Outline(seed, world, draw.choice((4, 6, 8)), draw.choice((8, 16, 16, 32)))


# --- shrinking ----------------------------------------------------------------------------------------------
def smaller(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The smallest program that still fails and is made of this one by leaving out what is unusual."""
    shrunk = True
    while shrunk:
        shrunk = False
        for one in _parts(program):
            if fails(one):
                program, shrunk = one, True
                break
    return program


def _parts(program: Program) -> Iterator[Program]:
    """Programs with one thing less, those with the fewest things first."""
    stages = program.stages
    if not program.origin.startswith("part of"):
        program = replace(program, origin=f"part of {program.origin}")
    if program.world > 2:
        outline = replace(program.outline, world=2)
        yield replace(program, outline=outline, variations=program.variations[:2], dynamic=program.dynamic[:2])
    for index in range(len(stages) if len(stages) > 1 else 0):
        kept = tuple(names[:index] + names[index + 1 :] for names in program.variations)
        yield replace(program, stages=stages[:index] + stages[index + 1 :], variations=kept)
    for rank, names in enumerate(program.variations):
        for index, name in enumerate(names):
            if name != (plain := PLAIN[stages[index].kind]):
                ranks = list(program.variations)
                ranks[rank] = (*names[:index], plain, *names[index + 1 :])
                yield replace(program, variations=tuple(ranks))
    for rank, on in enumerate(program.dynamic):
        if on:
            yield replace(program, dynamic=(*program.dynamic[:rank], False, *program.dynamic[rank + 1 :]))
    for index, stage in enumerate(stages):
        for change in ({"group": "ALL"}, {"dim": 0}):
            if (other := replace(stage, **change)) != stage:  # type: ignore[arg-type]
                yield replace(program, stages=(*stages[:index], other, *stages[index + 1 :]))
