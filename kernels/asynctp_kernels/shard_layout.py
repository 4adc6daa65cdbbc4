"""Where rows and columns go: N-D shapes and a dim, reduced to (outer P, world W, inner Q) and a flag.

A gather (scatter) along any dim but the last makes every rank own, for each of the P leading indices, Q
consecutive rows of the flattened 2-D operand:

    row of the full matrix = p * (W * Q) + r * Q + q        for row p * Q + q of rank r's shard

so a rank's rows are not contiguous when P > 1. Along the last dim a rank owns a range of columns instead: of
the contraction dim for a gather, of the output for a scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShardLayout:
    """One rank's share of a 2-D matrix with N-D clothes.

    Attributes:
        world: number of ranks (W).
        inner: consecutive rows of one rank (Q); all rows when `along_last`.
        rows, cols: of one rank's share, flattened to 2-D.
        along_last: the ranks split the columns, and all have the same rows.
        full_shape: the N-D shape over all ranks.
        shard_shape: the N-D shape of one rank's share.
    """

    world: int
    inner: int
    rows: int
    cols: int
    along_last: bool
    full_shape: Shape
    shard_shape: Shape

    @property
    def outer(self) -> int:
        """Into how many ranges the rows of one rank fall (P)."""
        return self.rows // max(self.inner, 1)

    @property
    def whole(self) -> bool:
        """One rank's share lies in one piece of the full matrix."""
        return self.outer == 1 and not self.along_last

    @property
    def full_rows(self) -> int:
        return self.rows if self.along_last else self.rows * self.world

    @property
    def full_cols(self) -> int:
        return self.cols * self.world if self.along_last else self.cols


def gather_layout(shard_shape: Sequence[int], dim: int, world: int) -> ShardLayout:
    """The layout of an all-gather of `shard_shape` along `dim` (0 <= dim < ndim)."""
    shard = tuple(shard_shape)
    full = (*shard[:dim], shard[dim] * world, *shard[dim + 1 :])
    return _layout(full, shard, dim, world)


def scatter_layout(full_shape: Sequence[int], dim: int, world: int) -> ShardLayout:
    """The layout of a reduce-scatter of `full_shape` along `dim` (0 <= dim < ndim, divisible by `world`)."""
    full = tuple(full_shape)
    shard = (*full[:dim], full[dim] // world, *full[dim + 1 :])
    return _layout(full, shard, dim, world)


def _layout(full: Shape, shard: Shape, dim: int, world: int) -> ShardLayout:
    along_last = dim == len(shard) - 1
    rows = math.prod(shard[:-1])
    inner = rows if along_last else math.prod(shard[dim:-1])
    return ShardLayout(world, inner, rows, shard[-1], along_last, full, shard)
