"""Collectives and matmuls of a graph as frozen values, which are read once, and all later stages go by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from asynctp_passes.ir.registry import CollectiveKind
from asynctp_passes.torch_private import fx_graphs


@dataclass(frozen=True)
class Collective:
    """One collective node, read once.

    `input → node → waits`; `group` is the FX argument (a name, or a node that carries a process group), and
    `group_key` the name that identifies it. `group_size` is its number of ranks, 0 where that is unknown: an all-reduce
    does not say it. The ranks' blocks lie along `dim` of a gather's result or a scatter's input. A
    collective of several tensors is read as one for each, `input → call → node → waits`: `node` is then the item of the
    result, and `call` the op. An item that nothing takes has no node of its own: `node` is the op too. `mesh_dim` is
    the name of the mesh dimension that the group is of, where it is known.
    """

    node: fx.Node
    kind: CollectiveKind
    input: fx.Node | None
    waits: tuple[fx.Node, ...] = ()
    group: Any = ""
    group_key: str = ""
    group_size: int = 0
    reduce_op: str = ""
    dim: int = 0
    call: fx.Node | None = None
    mesh_dim: str = ""

    @property
    def source(self) -> fx.Node:
        """The tensor that is communicated: of all but what only looks like a collective there is one."""
        assert self.input is not None
        return self.input

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that make up the collective."""
        return self.results if self.call is None else (self.call, *self.results)

    @property
    def start(self) -> fx.Node:
        """The op that communicates."""
        return self.call or self.node

    @property
    def is_on_one_stream(self) -> bool:
        """True where the program waits on the stream on which it communicates, so that no wait orders two streams."""
        return len(set(map(fx_graphs.stream_of, self.nodes))) == 1

    @property
    def is_unused(self) -> bool:
        """True for a tensor of several that is communicated, and that nothing takes."""
        return self.call is self.node

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes whose value is the collective's result: itself and its waits."""
        return (self.node, *self.waits)


@dataclass(frozen=True)
class Blocks:
    """Scales of blocks of `rows` rows of A, and `columns` columns of B (1 or 128), by 128 of K: `depth` of these.

    They are `[M/rows, depth]` and `[depth, N/columns]`, or the transpose of that if so. Scales of B, or of A if
    transposed, may have more along K than `depth`: padding.
    """

    rows: int
    columns: int
    depth: int
    a_transposed: bool = False
    b_transposed: bool = False


@dataclass(frozen=True)
class ScalesOfA:
    """There are `numbers` scales for every `rows` rows of A: in a row, or in a column if `transposed`."""

    rows: int = 1
    numbers: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class ScaledOptions:
    """The arguments that make a matmul a scaled one.

    Scales are tensorwise (one number) or rowwise (M and N numbers), unless they are of `blocks`. A matmul of operands
    that are not fp8 is scaled after it (`matching.scaled_epilogue`): None stands for a scale of 1.
    """

    a_scale: fx.Node | None
    b_scale: fx.Node | None
    out_dtype: torch.dtype
    use_fast_accum: bool
    blocks: Blocks | None = None

    @property
    def given_a_scale(self) -> fx.Node:
        """The scales of A where the matmul itself takes them, as each one after a gather does."""
        assert self.a_scale is not None
        return self.a_scale

    @property
    def of_a(self) -> ScalesOfA:
        """How the scales of A are laid out; those of a tensor as those of rows."""
        blocks = self.blocks
        return ScalesOfA() if blocks is None else ScalesOfA(blocks.rows, blocks.depth, blocks.a_transposed)


@dataclass(frozen=True)
class Matmul:
    """One matmul: `node[..., N] = a[..., K] @ b[K, N] (+ bias[N])`, where `...` is M rows in one or several dimensions.

    `b` may have leading dimensions of one element, and is `[N, K]` if `b_transposed`. `call` is the op where `node` is
    an item of what it returns. `node` may also be the last step of an epilogue that scales the product; then `epilogue`
    has the matmul and all other nodes of that (`matching.scaled_epilogue`). A term of a sum counts `factor` times: 1,
    or another power of two, or the negative of one. The fused op multiplies the product by it.
    """

    node: fx.Node
    a: fx.Node
    b: fx.Node
    bias: fx.Node | None = None
    scaled: ScaledOptions | None = None
    b_transposed: bool = False
    call: fx.Node | None = None
    epilogue: tuple[fx.Node, ...] = ()
    factor: float = 1.0

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that compute the product."""
        own = (self.node,) if self.call is None else (self.call, self.node)
        return (*self.epilogue, *own)

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """Every input but `a`."""
        scales = () if self.scaled is None else (self.scaled.a_scale, self.scaled.b_scale)
        return tuple(node for node in (self.b, self.bias, *scales) if node is not None)


def nodes_of(matmuls: Iterable[Matmul]) -> tuple[fx.Node, ...]:
    """The nodes that compute the products of some matmuls."""
    return tuple(node for matmul in matmuls for node in matmul.nodes)
