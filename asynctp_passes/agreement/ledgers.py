"""Ledgers: which graphs this rank has compiled, and told the others of, in the store of each process group.

Keys, in the store of the group, below `asynctp/<life>/<kind>/<hash of the collectives>/<function>`:

    shown/<n>                  how many ranks have compiled the nth such graph, and posted its deviations
    has/<rank>                 the texts of a rank's last graph
    <hash of text>/votes/<n>   how many ranks have the deviation in the nth graph
    <hash of text>/in/<n>/<rank>    there, if this rank has it in the nth graph
    <hash of text>/outcome     "accepted", or "refused" and why
    <hash of text>/lacks/<rank>     how often this rank has compiled the function without it, after a graph with it

A function goes by file, name and line, which all ranks share. One rank may compile it anew by itself, for another
Python number say. Below `asynctp/<life>` itself, for other ranks to see where a rank's graphs end:

    graphs/<kind>/<function>/<rank>   the hashes of a rank's graphs of a function, in order
    resumed/<function>/<rank>         the functions that are the rest of this one after a graph break
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from asynctp_passes import compat
from asynctp_passes.config import agree_seconds
from asynctp_passes.ir.records import Ballot

__all__ = ["LOOKED_AT", "Ledger", "keyed", "kind_of", "lock", "of_group"]

LOOKED_AT = 64
"""How many ranks the store is asked about at once; and how many of a group, the first, whether their graphs differ."""

lock = threading.Lock()
"""Held while ledgers are made or change: ranks may be threads of one process."""


@dataclass(eq=False)
class Ledger:
    """A record of this process's graphs and posts in the store of one process group.

    Attributes:
        store: The store.
        rank: This rank.
        ranks: All ranks of the group.
        life: See `compat.Peers`.
        group: The process group; None where its timeout does not matter.
        compiles: How many graphs there were, by key.
        graphs: The keys of this rank's graphs, in order, by the kind of the key and the function.
        last: By key, the function and number of the last graph.
        bases: By function, the function in the program: another one for the rest of that after a graph break.
        resumed: Functions that are the rest of a function after a graph break, by that.
        done: Deviations that all ranks do, by the kind of the key and the function: each with its key, and whether the
            graph was of the whole function.
        departed: By place, how many graphs of the function there were when this rank compiled it without a deviation.
        left: Places of deviations that all ranks have left, and not done again. With `deviate=False` this one may
            compile alone then.
        lacked: How often this rank has compiled a function without a deviation after a graph with it, by place.
        sets: By key, the sets of deviations that were done in the graphs with these collectives, each once.
        posted: Deviations that the others know of.
        shown: Graphs that the others know of.
        late: Ranks that let a wait pass.
    """

    store: Any
    rank: int
    ranks: tuple[int, ...]
    life: str
    group: Any = None
    compiles: Counter[str] = field(default_factory=Counter)
    graphs: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    last: dict[str, tuple[str, int]] = field(default_factory=dict)
    bases: dict[str, str] = field(default_factory=dict)
    resumed: dict[str, list[str]] = field(default_factory=dict)
    done: dict[tuple[str, str], dict[tuple[str, str], bool]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    lacked: Counter[str] = field(default_factory=Counter)
    departed: dict[str, int] = field(default_factory=dict)
    sets: dict[str, set[frozenset[str]]] = field(default_factory=dict)
    posted: set[str] = field(default_factory=set)
    shown: set[str] = field(default_factory=set)
    late: set[int] = field(default_factory=set)

    def key_of(self, ballot: Ballot) -> str:
        """The key of a ballot's graph in the store."""
        return f"asynctp/{self.life}/{'joint' if ballot.joint else 'graph'}/{ballot.key}"

    def count(self, key: str, function: compat.CompiledFunction | None) -> None:
        """Count a graph with these collectives."""
        name = f"graph {self.compiles[key]} of {key[-8:]}" if function is None else function.name
        self.compiles[key] += 1
        graphs = self.graphs.setdefault((kind_of(key), name), [])
        self.last[key] = name, graphs.count(key)
        graphs.append(key)
        self.bases[name] = name if function is None else function.base
        if function is not None and function.resumes:
            resumed = self.resumed.setdefault(function.resumes, [])
            resumed += [] if name in resumed else [name]

    def discount(self, key: str) -> None:
        """Take back, once, the count of the last graph with these collectives: the next one has its number."""
        if key not in self.last:  # the store failed before
            return
        name, number = self.last[key]
        graphs = self.graphs[kind_of(key), name]
        if graphs.count(key) > number:
            del graphs[len(graphs) - 1 - graphs[::-1].index(key)]
            self.compiles[key] -= 1

    def withdraw(self, key: str) -> None:
        """Take back the count of the last graph with these collectives, in the store too."""
        name, number = self.last[key]
        shown = f"{key}/{name}/shown/{number}"
        self.discount(key)
        self.shown.remove(shown)
        self.store.add(shown, -1)
        self._write(self._graphs_at(kind_of(key), name), self.graphs[kind_of(key), name])

    def others_came(self, key: str) -> bool:
        """True once all ranks have compiled as many such graphs of the function as this one."""
        name, number = self.last[key]
        return bool(self.store.add(f"{key}/{name}/shown/{number}", 0) >= len(self.ranks))

    @property
    def patience(self) -> float:
        """Seconds to wait for other ranks, which may wait meanwhile in a collective of this group."""
        return min(agree_seconds(), compat.group_timeout_s(self.group) / 4)

    def tell(self, key: str, function: compat.CompiledFunction | None) -> None:
        """Tell the other ranks which graphs this rank has of a function."""
        name, _ = self.last[key]
        self._write(self._graphs_at(kind_of(key), name), self.graphs[kind_of(key), name])
        if function is not None and function.resumes:
            self._write(self._resumed_at(function.resumes), self.resumed[function.resumes])

    def difference(self, key: str, rank: int) -> str:
        """How another rank's graphs of the function that is compiled differ from this rank's; or nothing."""
        name, _ = self.last[key]
        own, theirs = self.graphs[kind_of(key), name], self._read(self._graphs_at(kind_of(key), name), rank)
        if len(theirs) >= len(own) and theirs[len(own) - 1] != key:
            return f"rank {rank} compiled {name} with other collectives"
        base = self.bases[name]
        new = set(self._read(self._resumed_at(base), rank)).difference(self.resumed.get(base, ()))
        return f"rank {rank} breaks its graph: it compiled {min(new)}" if new else ""

    def has_backward(self, key: str) -> bool:
        """True where a deviation was done in a backward of the function that is compiled."""
        function = compat.compiled_function()
        return function is not None and (kind_of(key), function.name) in self.done

    def silent(self, key: str) -> list[int]:
        """The ranks that are not known to have compiled the function of the last graph, in this way or another."""
        if self.others_came(key):
            return []
        name, _ = self.last[key]
        whole = self._graphs_at(kind_of(key), self.bases[name])  # others may not break the graph of the function

        def is_known(rank: int) -> bool:
            has = self.store.check([f"{key}/{name}/has/{rank}"])
            return bool(has or self.difference(key, rank) or self._read(whole, rank))

        return [rank for rank in self.ranks[:LOOKED_AT] if rank != self.rank and not is_known(rank)]

    def _graphs_at(self, kind: str, name: str) -> str:
        return f"asynctp/{self.life}/graphs/{kind}/{name}"

    def _resumed_at(self, base: str) -> str:
        return f"asynctp/{self.life}/resumed/{base}"

    def _write(self, at: str, values: list[str]) -> None:
        self.store.set(f"{at}/{self.rank}", json.dumps(values))

    def _read(self, at: str, rank: int) -> list[str]:
        at = f"{at}/{rank}"
        found: list[str] = json.loads(self.store.get(at)) if self.store.check([at]) else []
        return found


_ledgers: weakref.WeakKeyDictionary[Any, Ledger] = weakref.WeakKeyDictionary()  # a ledger goes with its group


def keyed(ballots: Iterable[Ballot]) -> Iterator[tuple[Ledger, str]]:
    """Where the ballots of groups that can be asked are in their stores."""
    for one in ballots:
        if (ledger := of_group(one.group)) is not None:
            yield ledger, ledger.key_of(one)


def of_group(group: str) -> Ledger | None:
    """The ledger of a process group; None where there are no other ranks to ask."""
    peers = compat.peers_of(group)
    if peers is None:
        return None
    ledger = Ledger(peers.store, peers.rank, peers.ranks, peers.life or f"unknown to {peers.rank}", peers.group)
    with lock:  # where the store has failed, the next compile looks again
        return ledger if peers.life is None else _ledgers.setdefault(peers.group, ledger)


def kind_of(key: str) -> str:
    """The kind of graph that a key is of: a forward (`graph/f`), a backward (`graph/b`), or both.

    Of both, `joint/f` is before torch has divided it, and `joint/p` afterwards.
    """
    joint, _, communicated = key.removeprefix("asynctp/").partition("/")[2].partition("/")
    return f"{joint}/{communicated[:1]}"
