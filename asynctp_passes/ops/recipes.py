"""Recipes of scales: the part of A and of B that one scale covers, and for which operands.

A new recipe is a row of `RECIPES`, which checks, reference programs, and the pass's reading of scales take their facts
from. How scales lie in memory is told where they are read and used: torch's spellings (`ir.scales`), torch's matmul
(`reference`), and cuBLAS (`asynctp_kernels.cuda.gemm.cublas`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALED_AFTER_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)
"""Dtypes besides fp8 that are scaled: a matmul is made in its own dtype (int32 of int8), then scaled."""
SCALE_DTYPE = torch.float32


@dataclass(frozen=True)
class Cover:
    """The part of an operand that one scale covers.

    Attributes:
        name: For people.
        lines: Rows of A, or columns of B; 0: all of them.
        depth: Elements of such a line along K; 0: all of them.
        scaling_type: Torch's name of it, as a value of `torch.nn.functional.ScalingType`.
    """

    name: str
    lines: int
    depth: int
    scaling_type: int

    def shape_of_a(self, a: Sequence[int]) -> tuple[int, ...] | None:
        """The shape of the scales of an A [*, M, K], [*, M/lines, K/depth]; None where rows are no whole blocks."""
        *lead, rows, depth = a
        if self.lines > 1 and rows % self.lines:
            return None
        return (*lead, rows // self.lines if self.lines > 1 else rows, self._along(depth))

    def shape_of_b(self, b: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales of a B [K, N], [K/depth, N/lines], sizes rounded up."""
        depth, columns = b
        return (self._along(depth), blocks_in(columns, self.lines) if self.lines > 1 else columns)

    def _along(self, depth: int) -> int:
        return blocks_in(depth, self.depth) if self.depth else 1


@dataclass(frozen=True)
class Recipe:
    """How A and B are scaled together.

    Attributes:
        a, b: The part of each that a scale covers.
        dtypes: Of the operands.
    """

    a: Cover
    b: Cover
    dtypes: tuple[torch.dtype, ...] = (*FP8_DTYPES, *SCALED_AFTER_DTYPES)

    @property
    def names(self) -> tuple[str, str]:
        """The names of both."""
        return self.a.name, self.b.name

    @property
    def scaling_types(self) -> tuple[int, int]:
        """The values of `torch.nn.functional.ScalingType`."""
        return self.a.scaling_type, self.b.scaling_type

    @property
    def in_blocks(self) -> bool:
        """A sum over K has several scales."""
        return self.a.depth > 0


ONE, ROWS = Cover("one", 0, 0, 0), Cover("rows", 1, 0, 1)
LINES, SQUARES = Cover("1x128", 1, BLOCK, 4), Cover("128x128", BLOCK, BLOCK, 5)
RECIPES = (
    Recipe(ONE, ONE),
    Recipe(ONE, ROWS),
    Recipe(ROWS, ONE),
    Recipe(ROWS, ROWS),
    Recipe(LINES, SQUARES, FP8_DTYPES),
    Recipe(LINES, LINES, FP8_DTYPES),
    Recipe(SQUARES, LINES, FP8_DTYPES),
)
"""All of them; where scales may be of two, they are of the first. `rows` of B are its columns."""
IN_BLOCKS = tuple(recipe for recipe in RECIPES if recipe.in_blocks)


def recipe_of(of_a: tuple[Tensor, Sequence[int]], of_b: tuple[Tensor, Sequence[int]]) -> Recipe | None:
    """The recipe of the scales of an A and of a B, each given with the operand's shape; None if they are of none."""
    return next((each for each in RECIPES if _covers_a(each.a, *of_a) and _covers_b(each.b, *of_b)), None)


def _covers_a(cover: Cover, scale: Tensor, a: Sequence[int]) -> bool:
    return tuple(scale.shape) == cover.shape_of_a(a) if cover.lines else scale.numel() == 1


def _covers_b(cover: Cover, scale: Tensor, b: Sequence[int]) -> bool:
    return tuple(scale.shape) == cover.shape_of_b(b) if cover.lines else scale.numel() == 1


def blocks_in(size: int, block: int = BLOCK) -> int:
    """Blocks in a size, the last maybe not whole."""
    return -(-size // block)


def padded(blocks: int) -> int:
    """So many 128x128 blocks along K, with those that pad their scales: cuBLAS reads four at a time."""
    return 4 * blocks_in(blocks, 4)
