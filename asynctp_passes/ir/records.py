"""Records of a graph that its report keeps, in memory and in files: plain values, so that a reader needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Ballot", "Crossing"]


@dataclass(frozen=True)
class Crossing:
    """A tensor by which a collective of one graph and a matmul of another may belong together.

    Attributes:
        leaves: It is a result of the graph; else an input.
        index: Its number among the results, or the inputs, of the compiled function.
        role: The op next to it: `"matmul"`, `"all_gather"` (only of results), `"reduce_scatter"` or `"all_reduce"`
            (only of inputs).
        node: Name of that op's node in the original graph.
        tensor: Dtype and shape of the op's result, or of its operand, as text.
        source: `file:line` of it in the user's program, when the graph knows it.
        module: Path in what was compiled of its module, when the graph knows it.
        group: Name of the process group; empty for a matmul.
        group_size: Number of ranks in it; 0 for a matmul, or where the graph does not say it.
    """

    leaves: bool
    index: int
    role: str
    node: str
    tensor: str
    source: str | None = None
    module: str | None = None
    group: str = ""
    group_size: int = 0


@dataclass(frozen=True)
class Ballot:
    """The deviations of a graph that all ranks of a group do, or none: their vote is on these.

    Attributes:
        group: Name of the process group.
        key: Hash of what it communicates in the graph.
        deviations: Texts of `planning.deviations.Words`, as `"sum: all_reduce(sum) in place of
            1 * 0 + 1 * 1"`: numbers are places among the group's collectives.
        joint: It is of the graph of a forward and its backward, before it was divided.
    """

    group: str
    key: str
    deviations: tuple[str, ...] = ()
    joint: bool = False
