"""Write one rank's program as Python: stages, values, and the writer that variations call.

A program is text, which can be read, traced, compiled and pasted into a report. All numbers come from a random source
of this rank and stage, so that leaving another stage out does not change them.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["GROUPS", "LATER", "Input", "Outline", "Stage", "Value", "Writer"]

LATER = "later"
"""A variation yields it to go on after the next collective; it is given that one's result, or None at the end."""

GROUPS = ("ALL", "SIDE")
"""All ranks; and pairs of neighbours, which of two ranks is another group of the same ranks."""


@dataclass(frozen=True)
class Stage:
    """A collective that all ranks call.

    Attributes:
        key: Tells it from the other stages, also when some are left out.
        kind: `"gather"`, `"scatter"`, `"reduce"` (sums), or `"maximum"` (a small all-reduce).
        group: One of `GROUPS`.
        dtype: Of the elements that travel, as `"bfloat16"`.
        dim: Dimension of the gather or scatter, 0 or 1.
    """

    key: int
    kind: str
    group: str = "ALL"
    dtype: str = "float32"
    dim: int = 0

    @property
    def table(self) -> str:
        """The table of variations that fit."""
        return "reduction" if self.kind in ("scatter", "reduce") else self.kind


@dataclass(frozen=True)
class Input:
    """An argument of a rank's program: normally distributed elements, times `2 ** power`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    power: int = 0

    def make(self, seed: str) -> Tensor:
        """The elements that belong to a seed."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{self.name}".encode()))
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64) * 2.0**self.power
        return values.to(getattr(torch, self.dtype))


@dataclass(frozen=True)
class Value:
    """A tensor of a rank's program: the name of its variable, its shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        """The name, as it appears in expressions."""
        return self.name


@dataclass(frozen=True)
class Outline:
    """Sizes that the ranks share.

    Attributes:
        seed: Of all numbers and inputs.
        world: Number of ranks, even.
        rows: Rows of one rank's shard, even.
        width: Columns of what is gathered or reduced; a multiple of 8.
    """

    seed: int
    world: int
    rows: int
    width: int

    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Tuples of ranks by group name."""
        return {"ALL": (tuple(range(self.world)),), "SIDE": tuple((i, i + 1) for i in range(0, self.world, 2))}

    def size(self, group: str) -> int:
        """The number of ranks of a group."""
        return len(self.groups()[group][0])

    def whole(self, stage: Stage) -> tuple[int, int]:
        """The shape of what is whole: a gather's result, or what is reduced."""
        ranks = self.size(stage.group)
        return (self.rows * ranks if stage.kind in ("gather", "scatter") and stage.dim == 0 else self.rows, self.width)

    def result(self, stage: Stage) -> tuple[int, ...]:
        """The shape of a stage's result."""
        whole, ranks = self.whole(stage), self.size(stage.group)
        if stage.kind == "maximum":
            return (self.width,)
        if stage.kind == "scatter":
            return tuple(size // ranks if axis == stage.dim else size for axis, size in enumerate(whole))
        return whole


@dataclass
class Writer:
    """Writes one rank's program: variations call it.

    Attributes:
        outline: Sizes that the ranks share.
        rank: For which rank.
        random: Numbers of this rank and stage.
        hidden: Products of gathered tensors, which later products may be made of.
        carried: A result that the next fresh operand is multiplied by, so that this depends on it.
        absorbed: Results that are not returned by themselves.
        scattered: Results of this rank's own rows, which later gathers may send.
    """

    outline: Outline
    rank: int
    random: random.Random = field(default_factory=random.Random)
    inputs: list[Input] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    hidden: list[Value] = field(default_factory=list)
    scattered: list[Value] = field(default_factory=list)
    carried: Value | None = None
    absorbed: set[str] = field(default_factory=set)
    _stage: Stage | None = None

    def text(self) -> str:
        """What has been written."""
        results = [name for name in dict.fromkeys(self.returned) if name not in self.absorbed]
        notes = [f"    # {one.name}: {one.dtype}{list(one.shape)}{_times(one.power)}" for one in self.inputs]
        head = f"def program({', '.join(one.name for one in self.inputs)}):"
        body = [f"    {line}" for line in self.lines]
        return "\n".join([head, *notes, *body, f"    return ({''.join(f'{name}, ' for name in results)})", ""])

    # --- what variations use ---
    def place(self, group: str) -> int:
        """The rank's number in a group."""
        return next(ranks.index(self.rank) for ranks in self.outline.groups()[group] if self.rank in ranks)

    def input(self, stem: str, shape: Sequence[int], dtype: str, power: int = 0) -> Value:
        """A new argument."""
        self.inputs.append(Input(self._name(stem), tuple(shape), dtype, power))
        return Value(self.inputs[-1].name, tuple(shape), dtype)

    def let(self, stem: str, expression: str, shape: Sequence[int] = (), dtype: str = "float32") -> Value:
        """A new variable."""
        name = self._name(stem)
        self.lines.append(f"{name} = {expression}")
        return Value(name, tuple(shape), dtype)

    def returns(self, *values: Value) -> None:
        """Return these too."""
        self.returned += [value.name for value in values]

    def fresh(self, shape: Sequence[int], dtype: str, power: int = 0) -> Value:
        """An operand that depends on nothing but what is `carried`."""
        value = self.input("x", shape, dtype, power)
        if self.carried is None:
            return value
        carried, self.carried = self.carried, None
        return self.let("x", f"{value} * {carried}.float().mean().to({value}.dtype)", shape, dtype)

    def shard(self, stage: Stage) -> Value:
        """What this rank sends to a gather: an earlier result of that shape, or a new argument."""
        rows, width = self.outline.rows, self.outline.width
        shape = (rows, width) if stage.dim == 0 else (rows, width // self.outline.size(stage.group))
        fitting = [one for one in self.scattered if (one.shape, one.dtype) == (shape, stage.dtype)]
        return fitting[-1] if fitting and self.carried is None else self.fresh(shape, stage.dtype)

    def left(self, stage: Stage, depth: int | None = None, dtype: str | None = None) -> Value:
        """The left operand of a product that is reduced: what was computed before, if it fits, or a new argument."""
        rows, dtype = self.outline.whole(stage)[0], dtype or stage.dtype
        fitting = [one for one in self.hidden if one.shape[0] == rows and one.dtype == dtype]
        if depth is None and fitting and self.carried is None and self.random.random() < 0.6:
            return fitting[-1]
        return self.fresh((rows, depth if depth is not None else self.random.choice((8, 16))), dtype)

    def product(self, left: Value, columns: int | None = None, *, power: int = 0, stem: str = "p") -> Value:
        """A product with a new weight; a small one, so that products are about as large as what they are made of."""
        columns = self.random.choice((8, 16)) if columns is None else columns
        weight = self.input("w", (left.shape[-1], columns), left.dtype, power - 1)
        return self.let(stem, f"{left} @ {weight}", (*left.shape[:-1], columns), left.dtype)

    def _name(self, stem: str) -> str:
        stage = "" if self._stage is None else self._stage.key
        taken = {one.name for one in self.inputs} | {line.split(" = ")[0] for line in self.lines}
        return next(name for name in (f"{stem}{stage}{letter}" for letter in _letters()) if name not in taken)

    def enter(self, stage: Stage, part: str = "") -> None:
        """Go on with a stage, or with a later part of it."""
        self._stage = stage
        self.random = random.Random(f"{self.outline.seed}/{self.rank}/{stage.key}/{part}")


def _letters() -> Iterator[str]:
    yield ""
    for number in range(1, 100):
        yield f"_{number}"


def _times(power: int) -> str:
    return f" * 2**{power}" if power else ""
