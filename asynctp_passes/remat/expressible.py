"""Find what a backward can compute of a gather that it makes again, in place of what the forward keeps. Pure.

    saved   t(cast(gathered)), of a gathered tensor's bytes     ─▶  backward: t(cast(all_gather(shard)))
                                                                    and the forward saves the shard

Torch's partitioner has divided the graph already. Each saved tensor that is computed from the gathered one, without a
matmul in between, has to be computed again by ops that have the same bits whenever they are done. That may start from
the gather, from tensors that the backward reads anyway, and from the shard, which is saved if it has to be. All this is
memory that the graph has made and does not return: to other memory the program may write before the backward.

Each gather is looked at alone, so a refusal of one changes no other. `owners_of` tells in whose memory values lie.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from asynctp_passes.ir.collectives import awaited_item, read_collectives
from asynctp_passes.ir.nodes import (
    called_name,
    is_known_collective,
    is_number,
    is_pointwise,
    is_random,
    mutates,
    op_name,
    tensor_of,
    traits_of,
    written_by,
)
from asynctp_passes.ir.op_traits import View
from asynctp_passes.ir.operations import Collective
from asynctp_passes.ir.order import CANDIDATE, communicates, communications
from asynctp_passes.ir.traversal import reachable
from asynctp_passes.planning.deviations import of_rematerialized
from asynctp_passes.torch_private import partitioner, symbolic_sizes, torch_ops

_SMALL = 16
"""A saved tensor with less than this part of the gathered bytes, one in so many, may stay saved."""

_LEAST_GAIN = 8
"""Rematerialization has to save at least this part of the gathered bytes, one in so many."""


def _repeats(node: fx.Node) -> bool:
    """True for an op that has the same bits whenever it is done: a view, a copy, a pointwise op, a maximum, a number.

    Not one that draws random numbers, writes or communicates, and not one whose sum may be rounded in another way.
    """
    if node.op != "call_function" or is_random(node) or mutates(node) or communicates(node):
        return False
    traits = traits_of(node)
    if is_number(node):
        return traits.size or getattr(node.target, "__module__", "") in ("_operator", "math", "torch")
    if op_name(node) == "getitem":
        return traits_of(node.all_input_nodes[0]).view in (View.SPLIT, View.UNBIND)
    if is_known_collective(node) or not called_name(node).startswith(("aten.", "prims.")):
        return False
    exact = traits.is_exact_reduction and tensor_of(node) is not None
    view = traits.view not in (None, View.OPAQUE)
    return view or is_pointwise(node) or exact or traits.constant is not None


def repeatable_uses(gather: Collective) -> set[fx.Node]:
    """A gather's result, and all that is computed of it by ops that have the same bits whenever they are done."""
    own = set(gather.results)
    return reachable(own, lambda node: node.users, lambda node: node in own or _repeats(node))


@dataclass(frozen=True)
class Rematerialization:
    """A gather that the backward can make again.

    Attributes:
        gather: Of the forward graph.
        values: The saved tensors of the forward graph that are computed from it.
        copies: The nodes of the forward graph that the backward computes again, in order, the gather among them.
        shard: What is gathered, if it has to be saved.
        first: The first node of the backward that uses one of the values.
        after: How many communications of the backward come before that.
        text: The deviation, in words that ranks compare.
    """

    gather: Collective
    values: tuple[fx.Node, ...]
    copies: tuple[fx.Node, ...]
    shard: fx.Node | None
    first: fx.Node
    after: int
    text: str


class _CannotBe(Exception):
    """Why a tensor cannot be expressed."""


class Halves:
    """The two graphs that the partitioner has made of one.

    Attributes:
        outputs: The outputs of the forward.
        results: How many of these are results of the program. The others are saved.
        tagged: Names of the nodes on which activation checkpointing decides. The partitioner sets such tags, too.
        given: The input of the backward that has what a node of the forward computes, by that node.
        is_known: The saved outputs and the inputs of the backward belong together one by one, as torch has them.
    """

    def __init__(self, forward: fx.Graph, backward: fx.Graph, results: int | None, tagged: Container[str] = ()) -> None:
        self.forward, self.backward, self.results, self.tagged = forward, backward, results or 0, tagged
        outputs = forward.output_node().args[0]
        self.outputs: list[Any] = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        saved = self.saved
        inputs = [node for node in backward.nodes if node.op == "placeholder"]
        distinct = all(isinstance(node, fx.Node) for node in saved) and len(set(saved)) == len(saved)
        ordered = [*filter(is_number, saved), *(node for node in saved if not is_number(node))] if distinct else []
        alike = [one.name for one in ordered] == [one.name for one in inputs[: len(ordered)]]
        self.is_known = results is not None and distinct and alike
        self.given = dict(zip(ordered, inputs, strict=False)) if self.is_known else {}

    @property
    def saved(self) -> list[fx.Node]:
        """The tensors and numbers that the forward keeps for the backward."""
        return self.outputs[self.results :]

    def first_user(self, values: Iterable[fx.Node]) -> fx.Node:
        """The first node of the backward that uses one of some saved tensors."""
        first: fx.Node = min(user for value in values for user in self.given[value].users)
        return first


def find_rematerializations(halves: Halves) -> tuple[list[Rematerialization], dict[fx.Node, str]]:
    """Find the gathers of the forward that are marked as `CANDIDATE`, and that the backward can make again.

    Also the reason for each other marked gather that the backward needs, by its node.
    """
    gathers = [one for one in read_collectives(halves.forward) if CANDIDATE in one.node.meta and one.call is None]
    if not gathers:
        return [], {}
    if not halves.is_known:
        return [], {one.node: "what is saved is not what the backward takes: a pass has changed it" for one in gathers}
    search = _Search(halves, gathers)
    found: list[Rematerialization] = []
    left: dict[fx.Node, str] = {}
    for gather in gathers:
        try:
            if (one := search.of(gather)) is not None:
                found.append(one)
        except _CannotBe as why:
            left[gather.node] = str(why)
    return found, left


class _Search:
    def __init__(self, halves: Halves, gathers: Sequence[Collective]) -> None:
        self._halves = halves
        self._owners = owners_of(halves.forward)
        self._program = program_memory(halves.forward, self._owners, halves.results)
        self._written = written_memory(halves.forward, self._owners) | partitioner.inputs_written_after(halves.forward)
        self._values = {gather.node: self._saved_of(gather) for gather in gathers}
        self._starts = communications(halves.backward.nodes)
        self._groups = {one.start: one.group_key for one in read_collectives(halves.backward)}
        taken = {value for values in self._values.values() for value in values}
        self._leaves = set(self._read_anyway()) - taken
        self._sized = {node for node, given in halves.given.items() if given.users} - taken

    def _saved_of(self, gather: Collective) -> list[fx.Node]:
        """The saved tensors that are computed from a gather, and would not be there without being saved."""
        needs, given = repeatable_uses(gather), self._halves.given
        own = (node for node in self._halves.saved if node in needs and self._owners[node] not in self._program)
        return [node for node in own if given[node].users and not is_number(node)]

    def _read_anyway(self) -> Iterator[fx.Node]:
        """The saved values that the backward reads anyway, as the forward made them: none of the program's memory."""
        owners = owners_of(self._halves.backward)
        written = written_memory(self._halves.backward, owners)
        for node, given in self._halves.given.items():
            used = given.users and owners[given] not in written
            own = self._owners[node] not in self._written | self._program
            if used and (is_number(node) or own):
                yield node

    def of(self, gather: Collective) -> Rematerialization | None:
        """How a gather is made again; None where the backward needs nothing of it. Raises `_CannotBe` with a reason."""
        whole, saved = _bytes(gather.node), self._values[gather.node]
        if not saved:
            return None
        if any(node.name in self._halves.tagged for node in saved):
            raise _CannotBe("activation checkpointing decides on it")
        kept, leaves = self._shard_to_save(gather), self._leaves
        if kept is not None:
            leaves = leaves | {kept}
        values: list[fx.Node] = []
        copies: set[fx.Node] = set()
        for value in saved:
            try:
                copies |= self._expressed(value, gather.nodes, leaves)
                values.append(value)
            except _CannotBe:
                if _bytes(value) * _SMALL > whole:
                    raise
        if not values:
            raise _CannotBe("nothing that is kept of it is large")
        gone = set(values)
        before = self._kept(self._halves.saved)
        after = self._kept([*(node for node in self._halves.saved if node not in gone), *([kept] if kept else [])])
        if (before - after) * _LEAST_GAIN < whole or before <= after:
            raise _CannotBe(f"{after} bytes would be kept, in place of {before}")
        first = self._halves.first_user(values)
        earlier = [start for start in self._starts if start < first]
        told = [(called_name(start), self._groups.get(start) == gather.group_key) for start in earlier]
        text = of_rematerialized(gather.node.meta[CANDIDATE], told)
        return Rematerialization(gather, tuple(values), tuple(sorted(copies)), kept, first, len(earlier), text)

    def _shard_to_save(self, gather: Collective) -> fx.Node | None:
        """The shard, where it has to be saved; None where it can be expressed. Raises `_CannotBe` if it may not be."""
        shard = gather.source
        try:
            self._expressed(shard, (), self._leaves)
            return None
        except _CannotBe as why:
            reason, owner = f"its shard cannot be computed again ({why}), and", self._owners[shard]
        value = tensor_of(shard)
        if owner in self._program:
            raise _CannotBe(f"{reason} lies in memory of the program's, {owner.name}")
        if shard in self._halves.given:
            raise _CannotBe(f"{reason} is saved already, for another use")
        if owner in self._written:
            raise _CannotBe(f"{reason} is written to later")
        made = owner.all_input_nodes[0] if op_name(owner) == "getitem" else owner
        if value is None or not torch_ops.is_op(made.target):
            raise _CannotBe(f"{reason} is made by {called_name(made)}, whose memory is not known")
        if _bytes(owner) > _bytes(shard):
            raise _CannotBe(f"{reason} is a part of {owner.name}, which would be kept")
        if shard.name in self._halves.tagged:
            raise _CannotBe(f"{reason} activation checkpointing decides on it")
        if not symbolic_sizes.free_symbols(value) <= self._symbols():
            raise _CannotBe(f"{reason} has sizes that the backward does not know")
        return shard

    def _symbols(self) -> set[object]:
        """The symbols that the backward is given the values of."""
        numbers = (node.meta["val"] for node in self._halves.given if is_number(node))
        return {symbol for number in numbers for symbol in symbolic_sizes.free_symbols(number)}

    def _expressed(self, value: fx.Node, own: Collection[fx.Node], leaves: Container[fx.Node]) -> set[fx.Node]:
        """The nodes that compute a value of the forward again, from `leaves` and the gather's own nodes.

        Raises `_CannotBe` where one of them cannot be computed.
        """
        found: set[fx.Node] = set()
        stack = [value]
        while stack:
            node = stack.pop()
            if node in leaves or node in found:
                continue
            if node not in own and not _repeats(node):
                what = "an input" if node.op == "placeholder" else called_name(node) or node.op
                raise _CannotBe(f"{node.name} is {what}")
            if node.name in self._halves.tagged:
                raise _CannotBe(f"activation checkpointing decides on {node.name}")
            if self._owners[node] in self._written:
                raise _CannotBe(f"{node.name} is written to")
            found.add(node)
            stack += (one for one in node.all_input_nodes if not (is_number(node) and one in self._sized))
        return found

    def _kept(self, saved: Iterable[fx.Node]) -> int:
        """The bytes of memory that are kept for some saved tensors, and would not be there without."""
        tensors = [node for node in saved if tensor_of(node) is not None]
        kept = {self._owners[node]: node for node in tensors if self._owners[node] not in self._program}
        return sum(_bytes(owner) or _bytes(node) for owner, node in kept.items())


def _bytes(node: fx.Node) -> int:
    value = tensor_of(node)
    return 0 if value is None else symbolic_sizes.expected_bytes(value)


# --- in whose memory the values of a graph's nodes lie ----------------------------------------------------------
def owners_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node, the one that made the memory in which its values lie: itself, unless it is a view of another.

    A node that may be a view, or a copy, counts as a view.
    """
    owners: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _viewed(node)
        owners[node] = node if source is None else owners[source]
    return owners


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node in whose memory a node's values may lie; None for memory of its own."""
    source = next((one for one in node.all_input_nodes if not is_number(one)), None)
    if source is None or node.op != "call_function":
        return None
    if op_name(node) == "getitem":
        if (awaited := awaited_item(node)) is not None:
            return awaited
        is_alias = traits_of(source).view is not None or torch_ops.may_alias(source)
        return source if is_alias or not torch_ops.is_op(source.target) else None
    traits = traits_of(node)
    same = traits.view is not None and not traits.copies  # as a wait, whose schema does not say so
    return source if same or torch_ops.may_alias(node) else None


def program_memory(graph: fx.Graph, owners: dict[fx.Node, fx.Node], results: int | None = None) -> set[fx.Node]:
    """The owners whose memory the program has: inputs of a graph, and what its results lie in. It can write there.

    The first `results` of its outputs are results; all if None.
    """
    outputs = graph.output_node().args[0]
    taken = list(outputs)[:results] if isinstance(outputs, list | tuple) else [outputs]
    inputs = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    return inputs | {owners[node] for node in taken if isinstance(node, fx.Node)}


def written_memory(graph: fx.Graph, owners: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """The owners whose memory in-place operations of the graph change, or may change."""
    writers = [node for node in graph.nodes if mutates(node)]
    return {owners[one] for node in writers for one in (node, *written_by(node))}
