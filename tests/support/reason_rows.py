"""Rows of the table of reasons, and pieces of their graphs. See `test_reasons`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import serving_ops  # noqa: F401  (defines torch.ops.vllm_like)
import torch
import torch.distributed._symmetric_memory  # registers symm_mem.fused_*
from graph_builder import GraphBuilder, aten
from torch.fx import Graph, Node

FP8 = torch.float8_e4m3fn


_WRITING_OPS = torch.library.Library("registry_like", "FRAGMENT")
_WRITING_OPS.define("all_gather_out(Tensor! out, Tensor x, str group_name) -> ()")
_WRITING_OPS.define("dynamic_per_token_quant(Tensor! out, Tensor x, Tensor! scale) -> ()")


Build = Callable[[GraphBuilder], Any]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        build: Builds a graph on four ranks and returns what it returns.
        name: The expected reason, of the collective that comes last in the graph.
        fact: What the remark must mention.
        config: Fields of the configuration, where they are not the defaults.
        ranks: Number of ranks.
        fused: Number of chains of the graph that are fused all the same.
        mesh_dim: The mesh dimension that groups are of.
        rank: The rank of this process in groups, if it is in one.
    """

    build: Build
    name: str
    fact: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    ranks: int = 4
    fused: int = 0
    mesh_dim: str = ""
    rank: int | None = None

    @property
    def id(self) -> str:
        return f"{self.name}-{self.build.__name__}"

    def graph(self) -> Graph:
        b = GraphBuilder(ranks=self.ranks)
        out = self.build(b)
        return b.returns(*(out if isinstance(out, tuple) else (out,)))


ROWS: list[Row] = []


def row(
    name: str,
    fact: str = "",
    *,
    ranks: int = 4,
    fused: int = 0,
    mesh_dim: str = "",
    rank: int | None = None,
    **config: Any,
) -> Callable[[Build], Build]:
    """Add the decorated builder to the table."""

    def add(build: Build) -> Build:
        ROWS.append(Row(build, name, fact, config, ranks, fused, mesh_dim, rank))
        return build

    return add


# --- remedies ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Remedy:
    """A row's program after its hint was followed word for word.

    Attributes:
        row: The row.
        build: Builds the graph.
        outcome: What becomes of the collective.
        differs: Why the program computes something else than the row's; it computes the same where this is empty.
        equal: The inputs that are the same on all ranks, where the program computes the same for such only.
        using: Applies what the hint says to set or register, and takes it back.
        config: Fields of the configuration that the hint says to set.
    """

    row: Row
    build: Build
    outcome: str = "FUSED"
    differs: str = ""
    equal: tuple[str, ...] = ()
    using: Callable[[], AbstractContextManager[Any]] = nullcontext
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.row.id}-{self.build.__name__}"


REMEDIES: list[Remedy] = []


def mends(before: Build, **facts: Any) -> Callable[[Build], Build]:
    """Add the decorated builder as a remedy of a row; without one, as of what is set: `mends(before, ...)(before)`."""
    (line,) = (line for line in ROWS if line.build is before)

    def add(build: Build) -> Build:
        REMEDIES.append(Remedy(line, build, **facts))
        return build

    return add


# --- pieces of graphs ----------------------------------------------------------------------------------------
def gathered(b: GraphBuilder, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
    """A gathered shard; `[4, 8]`, so `[16, 8]` together, unless said otherwise."""
    return b.gather(b.input("x", shape or [4, 8], dtype))


def times(b: GraphBuilder, a: Node, columns: int = 12) -> Node:
    """`a @ w`."""
    value = a.meta["val"]
    return b.mm(a, b.input("w", [value.shape[-1], columns], value.dtype, device=value.device.type))


def product(b: GraphBuilder, name: str = "a", rows: int = 16) -> Node:
    """A product `[rows, 12]` to scatter."""
    return b.mm(b.input(name, [rows, 8]), b.input(f"{name}_w", [8, 12]))


def scaled(b: GraphBuilder, a_scale: list[int], b_scale: list[int], **kwargs: Any) -> Node:
    """A scaled product `[16, 12]` of a gathered operand `[16, 32]`."""
    w = b.input("w", [32, 16], FP8, column_major=True)
    scales = b.input("a_scale", a_scale), b.input("b_scale", b_scale)
    return b.scaled_mm(gathered(b, 4, 32, dtype=FP8), w, *scales, **kwargs)


def quantized(b: GraphBuilder, scale_of: Callable[[Node], Node]) -> Node:
    """A scaled product `[16, 16]` of a gathered tensor that is multiplied by a scale and cast to fp8."""
    whole = gathered(b, 4, 32)
    fp8 = b.call(torch.ops.prims.convert_element_type.default, b.call(aten.mul.Tensor, whole, scale_of(whole)), FP8)
    w = b.input("w", [32, 16], FP8, column_major=True)
    return b.scaled_mm(fp8, w, b.input("a_scale", []), b.input("b_scale", []))


def weight_gradient(b: GraphBuilder) -> Node:
    """`dYᵀ @ x`, `[16, 12]`."""
    return b.mm(b.permute(b.input("dy", [6, 16]), [1, 0]), b.input("saved", [6, 12]))
