"""Records of a graph that its report keeps, in memory and in files: plain values, so that a reader needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


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
class Question:
    """A question to a group's ranks about a graph: whether all of them deviate alike (`ranks.accord`).

    Attributes:
        group: Name of the process group.
        phase: Of the graph that is asked about: `"joint"`, `"partition"`, or as in reports.
        communicates: Hash of what the group communicates in it.
        deviations: Texts of `planning.deviations.Words`, sorted, as `"sum: all_reduce(sum) in place of
            1 * 0 + 1 * 1"`: numbers are places among the group's collectives. All ranks do all of them, or none.
        keeps: The gathers whose result this rank keeps: each is a question of its own.
        can_keep: Others that it could keep, too. It does so where all ranks have agreed on that before; else none does
            from now on.
        joint: What the group was asked about the graph of the forward and its backward, and about its two halves.
        rank: This rank's number in the group, where a deviation is about its own part of a tensor; else -1. On another
            rank it would be about another part.
        done: The ranks' answer: the graph has the deviations.
        kept: The gathers that all ranks keep.
    """

    group: str
    phase: str
    communicates: str
    deviations: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    can_keep: tuple[str, ...] = ()
    joint: tuple[Question, ...] = ()
    rank: int = -1
    done: bool = False
    kept: tuple[str, ...] = ()

    def with_answer(self, answer: Answer) -> Question:
        """The question with its answer."""
        done = bool(self.deviations) and answer.agreed.issuperset(self.deviations)
        kept = tuple(text for text in (*self.keeps, *self.can_keep) if text in answer.agreed)
        return replace(self, done=done, kept=kept)


@dataclass(frozen=True)
class Answer:
    """The deviations that all ranks of a group do.

    Attributes:
        agreed: The texts of the deviations and of the gathers that are kept, of those that were asked about.
        refused: Why others of these are not done, by text.
        known: False where the others may still come to another answer.
        accord: The number that every call of the graph in this group carries: a hash of all that the ranks agreed on
            for it, before it was divided too. 0 for nothing.
    """

    agreed: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    accord: int = 0
    known: bool = True

    def refuses(self, text: str) -> str | None:
        """Why a deviation is not done; None for one that all ranks do."""
        missing = f"{text}: it became possible only when others were refused"
        return None if text in self.agreed else self.refused.get(text, missing)


Answers = Mapping[str, Answer]
"""By group. A group that is missing was not asked yet: it may do everything."""
