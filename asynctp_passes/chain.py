"""The vocabulary of the pass: frozen values that travel from `find` to `decide` to `rewrite`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from asynctp_passes.reasons import Refusal
from asynctp_passes.registry import CollectiveKind
from asynctp_passes.shapes import GatherPlacement, ScatterPlacement

__all__ = ["Candidate", "Collective", "Decision", "GatherChain", "Matmul", "ScaledOptions", "ScatterChain"]


@dataclass(frozen=True)
class Collective:
    """One collective node, read once.

    `input → node → waits`; `group` is the FX argument (a name, or a node that carries a process group) and
    `group_key` the name that identifies it. The ranks' blocks lie along `dim` of a gather's result or a scatter's
    input. A collective of several tensors is read as one for each, `input → call → node → waits`: `node` is then the
    item of the result, and `call` the op.
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

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that make up the collective."""
        return self.results if self.call is None else (self.call, *self.results)

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes whose value is the collective's result: itself and its waits."""
        return (self.node, *self.waits)


@dataclass(frozen=True)
class ScaledOptions:
    """What makes a matmul a scaled (fp8) one; scales are tensorwise (one number) or rowwise (M and N numbers)."""

    a_scale: fx.Node
    b_scale: fx.Node
    out_dtype: torch.dtype
    use_fast_accum: bool


@dataclass(frozen=True)
class Matmul:
    """One matmul: `node[..., N] = a[..., K] @ b[K, N] (+ bias[N])`, where `...` is M rows in one or several dimensions.

    `b` may have leading dimensions of one element, and is `[N, K]` if `b_transposed`. `call` is the op where `node` is
    an item of what it returns.
    """

    node: fx.Node
    a: fx.Node
    b: fx.Node
    bias: fx.Node | None = None
    scaled: ScaledOptions | None = None
    b_transposed: bool = False
    call: fx.Node | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that compute the product."""
        return (self.node,) if self.call is None else (self.call, self.node)

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """Every input but `a`."""
        scales = () if self.scaled is None else (self.scaled.a_scale, self.scaled.b_scale)
        return tuple(node for node in (self.b, self.bias, *scales) if node is not None)


@dataclass(frozen=True)
class GatherChain:
    """`shard → all_gather → wait → view* → matmul+`: one gather and the matmuls that take it as their left operand.

    All matmuls share `placement`, and the options of a scaled matmul. `views` lie between the wait and the
    operands; `saved` tells that the gathered tensor has users besides the matmuls. `scale` is the gather that
    brings the rowwise scale of the shard, when the program gathers it too, and `scale_placement` where it puts them.
    """

    collective: Collective
    shard: fx.Node
    matmuls: tuple[Matmul, ...]
    placement: GatherPlacement
    views: tuple[fx.Node, ...]
    saved: bool
    scale: Collective | None = None
    scale_placement: GatherPlacement | None = None

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The tensors whose sizes the fused op's shapes follow from."""
        return (self.shard,)


@dataclass(frozen=True)
class ScatterChain:
    """`(matmul → view* →) sum → view* → reduce_scatter → wait`: the matmuls whose sum is scattered."""

    collective: Collective
    matmuls: tuple[Matmul, ...]
    placement: ScatterPlacement
    views: tuple[fx.Node, ...]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The tensors whose sizes the fused op's shapes follow from."""
        return tuple(matmul.a for matmul in self.matmuls)


@dataclass(frozen=True)
class Candidate:
    """A collective and what `find` could prove about it: a chain, or the refusals met on the way.

    `joins` is the data gather whose chain this collective, a gather of scales, is part of. `left_out` says what other
    matmuls the chain's gathered tensor goes to, and why they are not fused.
    """

    collective: Collective
    chain: GatherChain | ScatterChain | None
    refusals: tuple[Refusal, ...] = ()
    nodes: tuple[fx.Node, ...] = ()
    joins: Collective | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The outcome for one candidate: `refusal is None` means FUSED."""

    candidate: Candidate
    refusal: Refusal | None
