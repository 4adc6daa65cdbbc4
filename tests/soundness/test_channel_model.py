"""Every interleaving of a small model of the copy engine's protocol of `asynctp_kernels.cuda`.

The model plays the scripts that `push_script` and `pull_script` build, and what `gather`, `scatter` and `collectives`
put around them: events, kernels, and the words that these wait for and clear. That the package asks the driver for the
same, in the same order, is tested (`asked_for`). A thread is a stream or one program of a kernel: a straight line of
actions that runs at any speed, but never starves. Every byte remembers the call and rank that made it. An access (copy,
load, store) takes two actions, a begin and an end, and another access may come in between; addresses are the same in
all calls, as when the allocator hands a freed block out again.

Ranks make one call each in its own way, or calls that are unlike. Findings:

    overwritten    a write begins where a read is under way, or a reader sees a later call
    torn           a read or a write begins where a write is under way
    stale          a reader sees an earlier call, or nothing
    misplaced      a reader sees its own call, but another rank or row
    unlike         a reader sees data of a call that is not like its own
    set again      a word is set that says as much, or more, already
    left over      a word is still set when all calls are done
    stuck          some thread waits forever
    unseen         somebody waits forever, and not for a rank to come to a call: no watch would see it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from asynctp_kernels.cuda.runtime.memory import MAX_CHUNKS, MAX_OWN, existing_memory
from asynctp_kernels.cuda.runtime.script import (
    Await,
    Copy,
    Place,
    Post,
    Record,
    Wait,
    Write,
)
from channel_model import explore
from channel_program import (
    _AREA,
    _RANK,
    _WORD,
    END,
    FIRST_EVENT,
    REDUCED,
    ROWS,
    START,
    TILE,
    Call,
    Case,
    Each,
    Item,
    Kernel,
    Rank,
    Spoil,
    Touch,
    Watching,
    area,
    of_block,
)
from cuda_stubs import FP8, MAIN, Copied, Entry, Names
from profiles import THOROUGH, thorough
from stream_sessions import Op, Session, bulk, gather, move, perform, scatter
from streams import TILES, Shared, rank_of

# --- it is what the package does ---------------------------------------------------------------------------------
PUSHED = (
    Call("gather"),
    Call("gather", chunks=4),
    Call("gather", keeps=True),
    Call("gather", "decomposed"),
    Call("gather", "decomposed", keeps=True),
    Call("gather", "whole"),
)
PULLED = (
    Call("gather", kept=True),
    Call("gather", "decomposed", kept=True),
    Call("gather", "whole", kept=True),
)
SCATTERED = (
    Call("scatter"),
    Call("scatter", chunks=2),
    Call("scatter", "decomposed"),
    Call("scatter", "whole"),
)
REDUCED_TO_ALL = (
    Call("all_reduce"),
    Call("all_reduce", chunks=2),
    Call("all_reduce", "decomposed"),
    Call("all_reduce", "whole"),
)
KINDS = (*PUSHED, *PULLED, *SCATTERED, *REDUCED_TO_ALL)
BULK = (Call("gather", "bulk"), Call("gather", "bulk", kept=True), Call("scatter", "bulk"))
OUTER = (
    Call("gather", chunks=2, keeps=True),
    Call("gather", scales=True),
    Call("gather", chunks=2, outer=2, scales=True),
    Call("gather", keep_scales=True),
    Call("gather", outer=2, scales=True, keeps=True),
    Call("gather", chunks=2, outer=2, keeps=True, keep_scales=True),
    Call("gather", "decomposed", outer=2, scales=True, keeps=True),
    Call("gather", "decomposed", outer=2, scales=True),
    Call("gather", "decomposed", keep_scales=True),
    Call("gather", chunks=2, kept=True),
    Call("gather", outer=2, scales=True, kept=True),
    Call("gather", chunks=2, outer=2, kept=True, keep_scales=True),
    Call("gather", "decomposed", outer=2, scales=True, kept=True),
    Call("gather", "decomposed", kept=True, keep_scales=True),
    Call("scatter", chunks=2, outer=2),
    Call("scatter", "decomposed", outer=2),
)
EVENTS = ("start", "running", "end", "reduced")
KERNELS = {"stage": "stage_kernel", "gemm": "gemm_kernel", "keep": "keep_kernel", "reduction": "reduce_kernel"}


def op_of(call: Call, world: int) -> Op:
    """The same call of an op, with half a tile of rows for each row here."""
    size, dim = ROWS // TILE * TILES.block_m, int(call.outer > 1)
    if call.whole:
        shape = (size, 64) if call.op == "gather" else (world * size, TILES.block_n)
        make = bulk if call.flies else move
        op = make(call.op.replace("_", " "), shape=shape, kept=call.kept, way="fused" if call.flies else "whole")
        return replace(op, waited=(int(call.flies), MAIN))
    if call.op == "all_reduce":
        return scatter(call.way, kind="all reduce", n=TILES.block_n, rows=(world * size,))
    if call.op == "scatter":
        rows = (call.outer, world * size // call.outer) if dim else (world * size,)
        return scatter(call.way, n=TILES.block_n, rows=rows, dim=dim)
    scaled = {"dtype": FP8, "scales": "row"} if call.scales or call.keep_scales else {}
    numbers = {"travels": not call.keep_scales, "along": call.keep_scales} if scaled else {}
    shard = (call.outer, size // call.outer) if dim else (size,)
    return gather(call.way, shard=shard, dim=dim, full=call.keeps, kept=call.kept, **scaled, **numbers)


def asked_for(calls: Sequence[Call], rank: int, world: int) -> list[tuple[str, str]]:
    """What the package puts on which stream, but for the ends of calls: these order calls on several streams."""
    session = Session(world, tuple(op_of(call, world) for call in calls), rounds=1)
    with rank_of(rank, world, Shared(), calls[0].chunks) as here:
        perform(session, here)
        memory = existing_memory(here.groups[0])
        assert memory is not None
        names = Names(memory, {})
        streams = {MAIN: "main", memory.stream: "copy", memory.reducer: "reduce"}
        others = {memory.last, memory.flown}
        log = [entry for entry in here.log if getattr(entry, "event", None) not in others]
        return [(streams[entry.stream], _said(entry, names)) for entry in log]


def _said(entry: Entry, names: Names) -> str:
    return "copy" if isinstance(entry, Copied) else names.entry(entry)


def modelled(calls: Sequence[Call], rank: int, world: int) -> list[tuple[str, str]]:
    """The same of the model. What products and the program do to memory is not asked of the driver."""
    one = Rank(Case(world, tuple(calls)), rank)
    items = [item for number, call in enumerate(calls) for item in one.enqueue(number, call)]
    return [(stream, _said_here(item, one)) for stream, item in items if not isinstance(item, Touch)]


def _said_here(item: object, rank: Rank) -> str:
    if isinstance(item, Copy):
        return "copy"
    if isinstance(item, Kernel):
        return f"launch {KERNELS[item.name]}"
    if isinstance(item, Record | Await):
        return f"{type(item).__name__.lower()} {_event(item.event, rank)}"
    assert isinstance(item, Wait | Write | Post)
    word, index = area(item.address), item.address % _AREA // _WORD
    places = {"progress": f"[{index // MAX_OWN}, {index % MAX_OWN}]", "awaited": ""}
    place = places.get(word, f"[{index}]")
    of = f" of {item.address // _RANK} " if word in ("free", "full", "landed") else ""
    value = "call" if word in ("free", "awaited") and item.value else item.value
    if isinstance(item, Wait):
        return f"wait {word}{of}{place} {'==' if item.exactly else '>='} {value}"
    return f"write {word}{of}{place} = {value}"


def _event(event: int, rank: Rank) -> str:
    if event < FIRST_EVENT:
        return EVENTS[event]
    if event in rank.flights:
        return "flight"
    block, source = divmod(event - FIRST_EVENT, 100)
    return f"event[{source * MAX_CHUNKS + block}]"


@pytest.mark.parametrize("call", [*KINDS, *OUTER], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_model_asks_for_what_the_package_asks_for(call: Call, world: int) -> None:
    for rank in range(world):
        assert modelled([call], rank, world) == asked_for([call], rank, world)


@pytest.mark.parametrize("bulk_call", BULK, ids=str)
def test_so_it_does_beside_results_in_flight(bulk_call: Call) -> None:
    for other in (*BULK, *KINDS):
        for calls in ((bulk_call, replace(other, chunks=1)), (replace(other, chunks=1), bulk_call)):
            assert modelled(calls, 1, 3) == asked_for(calls, 1, 3)


# --- the protocol holds ----------------------------------------------------------------------------------------
FEW = (*PUSHED[:4:2], PUSHED[3], *PULLED[:2], *SCATTERED[1:3])
FEW_ACTIONS = (PUSHED[0], PUSHED[3], *PULLED[:2], SCATTERED[0], SCATTERED[2])
PARTICULAR = (
    Case(2, (Call("gather", scales=True), Call("gather", chunks=4, scales=True)), programs=2),
    Case(2, (Call("gather", "decomposed", scales=True), Call("gather", chunks=2), Call("gather", scales=True))),
    Case(2, (Call("gather", outer=2), Call("gather", chunks=2, outer=2, scales=True, kept=True)), programs=2),
    Case(2, (Call("gather", chunks=2, outer=2), Call("scatter", chunks=2, outer=2)), programs=2, columns=2),
    Case(2, (Call("gather", "decomposed", outer=2, scales=True, kept=True), Call("gather")), programs=2),
    Case(2, (Call("gather", "decomposed", outer=2, scales=True, keeps=True), Call("gather", keeps=True)), programs=2),
    Case(2, (Call("scatter", "decomposed", outer=2), Call("scatter", chunks=2)), programs=2),
    Case(2, (Call("gather", "decomposed", keep_scales=True),) * 2),
    Case(3, (Call("gather", "decomposed", scales=True), Call("gather", "decomposed", keep_scales=True))),
    Case(3, (Call("gather", "decomposed", outer=2), Call("scatter", "decomposed", outer=2))),
    Case(4, (Call("scatter", "decomposed", outer=2), Call("gather", "decomposed", outer=2))),
    Case(2, (Call("scatter", chunks=2), Call("scatter"), Call("scatter", "decomposed")), programs=2, columns=2),
    Case(3, (Call("gather", outer=2, scales=True, kept=True), Call("scatter")), programs=4, columns=2),
    Case(2, (Call("gather", kept=True, keep_scales=True), Call("gather", scales=True)), programs=2),
    thorough(Case(4, (Call("gather", chunks=2), Call("scatter", chunks=2), Call("gather", "decomposed")), programs=2)),
    Case(4, (Call("scatter", "decomposed"), Call("scatter"), Call("gather", scales=True))),
    # numbers of a gather have the place from which sums are pulled
    Case(3, (Call("all_reduce", "decomposed"), Call("gather", scales=True), Call("all_reduce"))),
    Case(3, (Call("gather", "decomposed", scales=True, keeps=True), Call("all_reduce", "whole")), programs=2),
    Case(2, (Call("all_reduce", chunks=2), Call("gather", scales=True, kept=True)), programs=2, columns=2),
    Case(
        4, (Call("all_reduce"), Call("gather", "decomposed", scales=True, kept=True), Call("all_reduce", "decomposed"))
    ),
)


#: each beside itself; `test_three_calls` has all pairs, with the reduction
PAIRS = [
    (first, second) if first == second else thorough(((first, second),))
    for first, second in product(FEW_ACTIONS, repeat=2)
]
#: each result in flight beside one call; `test_calls_beside_results_in_flight` has all pairs, with the reduction
BESIDE = [
    (bulk, other) if (bulk, other) in zip(BULK, FEW_ACTIONS[::-1][::2], strict=True) else thorough((bulk, other))
    for other in FEW_ACTIONS
    for bulk in BULK
]


#: all-reduces beside themselves, and before and after calls that use the same words
SHARED = [
    (REDUCED_TO_ALL[2], REDUCED_TO_ALL[2]),
    (REDUCED_TO_ALL[2], PUSHED[2]),
    (PUSHED[2], REDUCED_TO_ALL[2]),
    (REDUCED_TO_ALL[2], SCATTERED[2]),
    (SCATTERED[2], REDUCED_TO_ALL[0]),
    (PULLED[0], REDUCED_TO_ALL[3]),
]


@pytest.mark.parametrize("calls", SHARED, ids=lambda calls: ", ".join(map(str, calls)))
def test_all_reduces_beside_calls_of_the_same_words(calls: tuple[Call, ...]) -> None:
    assert not explore(Case(2, calls)).findings


@pytest.mark.parametrize(
    "calls", [*PAIRS, *map(thorough, ((each,) for each in SHARED))], ids=lambda calls: ", ".join(map(str, calls))
)
def test_two_calls_in_every_interleaving(calls: tuple[Call, ...]) -> None:
    search = explore(Case(2, calls), reduced=False)
    assert not search.findings
    assert search.states > 500


@pytest.mark.parametrize(("world", "programs"), [(3, 1), thorough((3, 4))])
@pytest.mark.parametrize("first", [kind if kind in FEW_ACTIONS else thorough(kind) for kind in KINDS], ids=str)
def test_three_calls(first: Call, world: int, programs: int) -> None:
    for rest in product(FEW_ACTIONS if first in FEW_ACTIONS else FEW[1::2], repeat=2):
        case = Case(world, (first, *rest), programs)
        assert not explore(case).findings, str(case)


@pytest.mark.parametrize(("bulk", "other"), BESIDE, ids=str)
def test_a_call_beside_a_result_in_flight_in_every_interleaving(bulk: Call, other: Call) -> None:
    assert not explore(Case(2, (bulk, other)), reduced=False).findings
    assert not explore(Case(2, (other, bulk)), reduced=False).findings


@pytest.mark.parametrize(("world", "programs"), [(2, 2), thorough((3, 1))])
@pytest.mark.parametrize("first", BULK, ids=str)
def test_calls_beside_results_in_flight(first: Call, world: int, programs: int) -> None:
    for rest in [*product(BULK, repeat=2), *product(FEW_ACTIONS, BULK), *product(BULK, FEW_ACTIONS)]:
        case = Case(world, (first, *rest), programs)
        assert not explore(case).findings, str(case)


@pytest.mark.parametrize("case", PARTICULAR, ids=str)
def test_more_ranks_scales_and_columns(case: Case) -> None:
    assert not explore(case).findings


# --- ranks that use one call in unlike ways --------------------------------------------------------------------
WIRES = {
    "pushed": (*PUSHED, Call("gather", chunks=2, outer=2), Call("gather", "decomposed", outer=2, keeps=True), BULK[0]),
    "pulled": (*PULLED, Call("gather", chunks=2, outer=2, kept=True), BULK[1]),
    "scattered": (*SCATTERED, Call("scatter", chunks=2, outer=2), BULK[2]),
    "reduced": REDUCED_TO_ALL,
}
UNLIKE_USES = [(name, first) for name, uses in WIRES.items() for first in uses]


@pytest.mark.parametrize(("wire", "first"), UNLIKE_USES, ids=str)
def test_each_rank_uses_a_call_as_it_likes(wire: str, first: Call) -> None:
    """Whatever the others do, in this call and in the next one, with other ranks' uses."""
    uses = WIRES[wire]
    for number, second in enumerate(uses):
        third = uses[(number + 1) % len(uses)]
        for case in (
            Case(2, ((first, second), (second, third)), programs=2),
            Case(3, ((first, second, third), (third, first, second))),
        ):
            assert not explore(case).findings, str(case)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        thorough(pair) if wire == "scattered" or number != 2 else pair  # one of each wire of few actions
        for wire, uses in WIRES.items()
        for number, pair in enumerate(zip(uses, (*uses[1:], uses[0]), strict=True))
    ],
    ids=str,
)
def test_so_it_does_in_every_interleaving(first: Call, second: Call) -> None:
    assert not explore(Case(2, ((first, second), (second, first))), reduced=False).findings


# --- ranks that make unlike calls -------------------------------------------------------------------------------
OTHER_SIZE = Call("gather", size=1)
#: equal calls, of a graph that does otherwise than its program and of one that does not
UNLIKE_FORMS = (
    *(
        ((call,), (replace(call, accord=1),))
        for call in (
            *(Call("gather"), Call("gather", "decomposed", kept=True), Call("scatter", chunks=2)),
            *(Call("all_reduce"), Call("gather", "whole")),
        )
    ),
    ((BULK[0], Call("scatter")), (replace(BULK[0], accord=1), Call("scatter", accord=1))),
    ((Call("gather"), Call("scatter")), (Call("gather"), Call("scatter", accord=1))),
)
#: what ranks make after what they have made together
UNLIKE = (
    ((Call("gather"),), (Call("scatter"),)),
    ((Call("gather"),), (OTHER_SIZE,)),
    ((Call("gather", keeps=True),), (Call("gather", "decomposed", size=1),)),
    ((Call("gather"),), (Call("gather", kept=True),)),
    ((Call("gather", "decomposed", kept=True),), (Call("gather", kept=True, size=1),)),
    ((Call("gather", kept=True),), (Call("scatter", "decomposed"),)),
    ((Call("scatter", chunks=2),), (Call("scatter", "decomposed", size=1),)),
    ((BULK[0], Call("scatter", "decomposed")), (BULK[2], Call("scatter", "decomposed"))),
    thorough((((BULK[0], Call("scatter")), (BULK[2], Call("scatter"))),)),
    ((BULK[0], Call("gather")), (Call("gather"),)),  # one more
    ((BULK[2], BULK[0]), (BULK[0], BULK[2])),  # in another order
    ((Call("gather"), Call("scatter")), (Call("scatter"), Call("gather"))),
    ((Call("gather"), Call("scatter"), Call("gather")), (Call("gather"), Call("gather"))),  # one left out
    ((Call("gather"), OTHER_SIZE), (OTHER_SIZE,)),
    ((Call("scatter"),), ()),  # a rank that does not come
    ((Call("all_reduce"),), (Call("scatter"),)),
    ((Call("all_reduce", "decomposed"),), (Call("all_reduce", size=1),)),
    ((Call("gather", keeps=True), Call("all_reduce", "whole")), (Call("all_reduce", "whole"),)),
    ((Call("all_reduce"),), ()),
    *UNLIKE_FORMS,
)
AMONG_LIKE = (
    ((Call("gather"),), (Call("gather", "decomposed"),), (Call("scatter"),)),
    ((Call("gather", kept=True),), (Call("gather", kept=True),), (Call("gather", kept=True, size=1),)),
    ((Call("scatter"),), (Call("scatter", "decomposed"),), (OTHER_SIZE,)),
    ((Call("gather"), Call("scatter")), (Call("scatter"),), (Call("gather"), Call("scatter"))),
    ((Call("gather"),), (OTHER_SIZE,), (Call("scatter"),)),
    ((BULK[1],), (Call("gather", kept=True),), (Call("gather", keeps=True),)),
    ((Call("gather"),), (Call("gather"),), ()),
    ((Call("gather"),), (Call("gather", "decomposed"),), (Call("gather", accord=1),)),
)
TOGETHER: tuple[tuple[Each, ...], ...] = ((), (Call("gather"),), ((BULK[0], Call("gather", "decomposed")),), (BULK[2],))


def said(calls: Sequence[Sequence[Call]]) -> str:
    return " or ".join(", ".join(map(str, each)) for each in calls)


@pytest.mark.parametrize("alone", UNLIKE, ids=said)
def test_unlike_calls_of_two_ranks_never_exchange_anything(alone: tuple[tuple[Call, ...], ...]) -> None:
    """All that can come of them is that both wait for the other to come to their call, which a watch sees."""
    for together in TOGETHER if THOROUGH else (TOGETHER[0], TOGETHER[1 + UNLIKE.index(alone) % 3]):
        case = Case(2, together, alone=alone)
        assert explore(case, all_kinds=True).findings.keys() == {"stuck"}, str(case)
    case = Case(2, (), alone=alone, programs=2)
    assert explore(case, reduced=alone not in UNLIKE[:3] and not THOROUGH, all_kinds=True).findings.keys() == {"stuck"}


@pytest.mark.parametrize("alone", AMONG_LIKE, ids=said)
def test_nor_do_those_of_three(alone: tuple[tuple[Call, ...], ...]) -> None:
    for together in TOGETHER[:2]:
        case = Case(3, together, alone=alone)
        assert explore(case, all_kinds=True).findings.keys() == {"stuck"}, str(case)


# --- and then a watch ends their waits ------------------------------------------------------------------------
SLOW = (
    Call("gather"),
    Call("gather", "decomposed", keeps=True),
    Call("gather", kept=True),
    Call("scatter"),
    Call("all_reduce", "decomposed"),
)


@pytest.mark.parametrize("before", [SLOW[0], thorough(SLOW[1]), *SLOW[2:]], ids=str)
def test_a_rank_that_has_not_failed_reads_nothing_of_one_that_has(before: Call) -> None:
    """One of three ranks may still be in the call before, when the other two have met with unlike ones."""
    for alone in AMONG_LIKE[:3]:
        for ranks in (alone, (alone[2], *alone[:2])):
            case = Case(3, (before,), alone=ranks, watch=Watching())
            assert not explore(case).findings, str(case)


@pytest.mark.parametrize("before", SLOW, ids=str)
@pytest.mark.parametrize("call", [Call("gather"), Call("gather", kept=True), Call("scatter", "decomposed")], ids=str)
def test_nor_where_a_rank_is_only_late(before: Call, call: Call) -> None:
    """Some ranks' time is up, whenever; another one comes nevertheless."""
    case = Case(2, (before, call), watch=Watching(impatient=True))
    assert not explore(case).findings, str(case)


def test_it_would_if_a_rank_went_on_at_once() -> None:
    unlike, late = Case(3, (SLOW[0],), alone=AMONG_LIKE[0]), Case(2, (SLOW[0], SLOW[0]))
    hasty = Watching(told=False)
    assert explore(replace(unlike, watch=hasty)).findings.keys() & {"overwritten", "torn"}
    hasty = replace(hasty, impatient=True)
    assert explore(replace(late, watch=hasty)).findings.keys() & {"overwritten", "torn"}


def any_signature(rank: int, items: list[Item]) -> list[Item]:
    """FREE only says that a rank has come."""

    def loose(item: object) -> object:
        exact = isinstance(item, Wait) and item.exactly and area(item.address) == "free"
        return replace(item, value=1, exactly=False) if exact else item  # type: ignore[type-var]

    return [(on, _each(item, loose) if isinstance(item, Kernel) else loose(item)) for on, item in items]  # type: ignore[misc]


def _each(kernel: Kernel, change: Callable[[object], object]) -> Kernel:
    first, *rest = [tuple(map(change, program)) for program in (kernel.last, *kernel.programs)]
    return replace(kernel, programs=tuple(rest), last=first)  # type: ignore[arg-type]


READ_AS_RIGHT = (*UNLIKE[1:3], UNLIKE[4], UNLIKE[6], *UNLIKE_FORMS[:4])


@pytest.mark.parametrize("alone", READ_AS_RIGHT, ids=said)
def test_without_signatures_they_would(alone: tuple[tuple[Call, ...], ...]) -> None:
    case = Case(2, (), alone=alone)
    assert not explore(replace(case, alone=(alone[0], alone[0]), spoil=any_signature)).findings, "all that is missed"
    assert "unlike" in explore(replace(case, spoil=any_signature), until="unlike").findings


# --- and the search finds what each rule prevents ----------------------------------------------------------------
Which = Callable[[int, object], bool]  # of rank and item


def word(kind: type, name: str, value: int | None = None, number: int | None = None) -> Which:
    """A step about a word of area `name`; `number` is the other rank."""

    def which(rank: int, item: object) -> bool:
        if not isinstance(item, Wait | Write | Post) or not isinstance(item, kind) or area(item.address) != name:
            return False
        asked = value in (None, item.value), number in (None, item.address % _AREA // _WORD)
        return all(asked)

    return which


def event(kind: type, *numbers: int) -> Which:
    return lambda rank, item: isinstance(item, kind) and getattr(item, "event", -1) in numbers


def own_event(rank: int, item: object) -> bool:
    return event(Await, FIRST_EVENT + rank)(rank, item)


def is_a(kind: type) -> Which:
    return lambda rank, item: isinstance(item, kind)


def drop(which: Which) -> Spoil:
    """Without some items, and kernels without such actions."""

    def spoil(rank: int, items: list[Item]) -> list[Item]:
        kept = [item for item in items if not which(rank, item[1])]
        return [(stream, _deafen(rank, item, which) if isinstance(item, Kernel) else item) for stream, item in kept]

    return spoil


def _deafen(rank: int, kernel: Kernel, which: Which) -> Kernel:
    first, *rest = [
        tuple(action for action in program if not which(rank, action)) for program in (kernel.last, *kernel.programs)
    ]
    return replace(kernel, programs=tuple(rest), last=first)


def hasten(which: Which, anchor: Which) -> Spoil:
    """Move items to in front of the last `anchor` before them."""

    def spoil(rank: int, items: list[Item]) -> list[Item]:
        moved: list[Item] = []
        for item in items:
            places = [i for i, (stream, other) in enumerate(moved) if stream == item[0] and anchor(rank, other)]
            moved.insert(places[-1] if which(rank, item[1]) else len(moved), item)
        return moved

    return spoil


def postpone(which: Which) -> Spoil:
    """Move items to the end of what the copy stream does."""

    def spoil(rank: int, items: list[Item]) -> list[Item]:
        rest = [item for item in items if not which(rank, item[1])]
        end = rest.index(("copy", Record(END)))
        return [*rest[:end], *(item for item in items if which(rank, item[1])), *rest[end:]]

    return spoil


def bind_early(which: Which) -> Spoil:
    """The host makes these waits for events before the records: they wait for what the call before recorded."""

    def spoil(rank: int, items: list[Item]) -> list[Item]:
        early = [item for item in items if which(rank, item[1])]
        return [*early, *(item for item in items if not which(rank, item[1]))]

    return spoil


def await_one_by_one(rank: int, items: list[Item]) -> list[Item]:
    """A scatter pushes to each rank behind that one's FREE, not behind all ranks'."""
    waits, clears = ([item for item in items if word(kind, "free")(rank, item[1])] for kind in (Wait, Write))
    late, copies = list(zip(waits, clears, strict=True))[1:], 0
    spoilt: list[Item] = []
    for item in items:
        if any(item in pair for pair in late):
            continue
        if isinstance(item[1], Copy) and late:
            spoilt += late[copies - 1] if copies else ()
            copies += 1
        spoilt.append(item)
    return spoilt


def staged_too_early(rank: int, items: list[Item]) -> list[Item]:
    """The outbox is said to be full before it is."""

    def early(kernel: Kernel) -> Kernel:
        posts = tuple(action for action in kernel.last if isinstance(action, Post))
        rest = tuple(action for action in kernel.last if not isinstance(action, Post))
        return replace(kernel, programs=((*posts, *kernel.programs[0]), *kernel.programs[1:]), last=rest)

    return [(on, early(item) if isinstance(item, Kernel) and item.name == "stage" else item) for on, item in items]


def first_tile_is_enough(rank: int, items: list[Item]) -> list[Item]:
    """A push waits for one tile of its chunk."""
    waits = word(Wait, "progress")
    return [(on, Wait(item.address) if isinstance(item, Wait) and waits(rank, item) else item) for on, item in items]


def other_row(rank: int, items: list[Item]) -> list[Item]:
    """A pull takes the rows of another piece."""

    def pull(copy: Copy) -> Copy:
        return replace(copy, src=Place(copy.src.base, copy.src.offset ^ TILE)) if copy.width == TILE else copy

    return [(stream, pull(item) if isinstance(item, Copy) else item) for stream, item in items]


def one_less(name: str) -> Spoil:
    """A GEMM's tile waits for the chunk before the one that its last row is in: that of its first row."""

    def less(item: object) -> object:
        waits = isinstance(item, Wait) and area(item.address) == name and item.value > 1
        return replace(item, value=item.value - 1) if waits else item  # type: ignore[type-var, union-attr]

    def spoil(rank: int, items: list[Item]) -> list[Item]:
        return [
            (on, _each(item, less) if isinstance(item, Kernel) and item.name == "gemm" else item) for on, item in items
        ]

    return spoil


def one_more(rank: int, items: list[Item]) -> list[Item]:
    """A push says that the chunk after its piece is complete."""
    return [
        (on, replace(item, value=min(item.value + 1, MAX_CHUNKS)) if word(Post, "landed")(rank, item) else item)  # type: ignore[type-var, union-attr]
        for on, item in items
    ]


def gemm_clears(rank: int, items: list[Item]) -> list[Item]:
    """The GEMM clears words that another still reads."""
    clears = tuple(step for _, step in items if word(Write, "landed", value=0)(rank, step))
    gemms = [isinstance(item, Kernel) and item.name == "gemm" for _, item in items]
    return [(on, replace(item, last=clears) if gemm else item) for gemm, (on, item) in zip(gemms, items, strict=True)]  # type: ignore[type-var]


PART_EVENTS = range(FIRST_EVENT, FIRST_EVENT + 2)
SECOND_RANGES = tuple(of_block(rank, 1) for rank in range(2))


def fault(name: str, kind: str, call: Each, spoil: Spoil, world: int = 2, calls: int = 2, columns: int = 1) -> object:
    """`kind` is among what the search must find when `spoil` breaks each of `calls` equal calls."""
    case = Case(world, (call,) * calls, columns=columns, spoil=spoil)
    first = call if isinstance(call, Call) else call[0]
    return pytest.param(case, kind, id=f"{first.op}: {name}")


def pull_faults() -> Iterator[object]:
    one, two = Call("gather", kept=True), Call("gather", chunks=2, kept=True)
    decomposed, flight = Call("gather", "decomposed", kept=True), BULK[1]
    copy, parts = is_a(Copy), PART_EVENTS
    for way, call in (("fused", one), ("decomposed", decomposed), ("bulk", flight)):
        yield fault(f"outbox filled at once, {way}", "overwritten", call, drop(word(Wait, "free")))
        yield fault(f"FREE not set, {way}", "stuck", call, drop(word(Post, "free")))
        yield fault(f"FREE not cleared, {way}", "overwritten", call, drop(word(Write, "free")))
        yield fault(f"pull at once, {way}", "stale", call, drop(word(Wait, "landed")))
        yield fault(f"LANDED not set, {way}", "stuck", call, drop(word(Post, "landed")))
        yield fault(f"LANDED not cleared, {way}", "stale", call, drop(word(Write, "landed")))
    yield fault("LANDED set early", "torn", one, staged_too_early)
    yield fault("arrival before the pull", "torn", one, hasten(set_to_some("arrivals"), copy))
    yield fault("arrivals not cleared", "stale", one, drop(word(Write, "arrivals", value=0)))
    yield fault("GEMM without arrivals", "stale", one, drop(word(Wait, "arrivals")))
    yield fault("tile that waits for its first row", "stale", replace(two, chunks=2), one_less("arrivals"))
    yield fault("copies before the call", "stale", decomposed, drop(event(Await, START)))
    yield fault("staging before the call", "stale", one, drop(event(Await, START)), calls=1)
    yield fault("call ends before the copies", "overwritten", one, drop(event(Await, END)))
    yield fault("event before the pull", "torn", decomposed, hasten(event(Record, *parts), copy))
    yield fault("event of the call before", "stale", decomposed, bind_early(event(Await, *parts)))
    yield fault("second range not awaited", "stale", replace(decomposed, outer=2), drop(event(Await, *SECOND_RANGES)))
    yield fault("wrong rows", "misplaced", two, other_row)


def push_faults(name: str, call: Each, full: str = "full") -> Iterator[object]:
    """Of the words, whoever pushes; `full` says that a chunk is there."""
    yield fault(f"push without FREE, {name}", "overwritten", call, drop(word(Wait, "free")))
    yield fault(f"FREE not cleared, {name}", "overwritten", call, drop(word(Write, "free")))
    yield fault(f"FREE cleared late, {name}", "stuck", call, postpone(word(Write, "free")))
    yield fault(f"FREE not set, {name}", "stuck", call, drop(word(Post, "free")))
    yield fault(f"{full} not awaited, {name}", "stale", call, drop(word(Wait, full)))
    yield fault(f"{full} not set, {name}", "stuck", call, drop(word(Post, full)))
    yield fault(f"{full} not cleared, {name}", "stale", call, drop(word(Write, full)))
    yield fault(f"{full} set before the push, {name}", "torn", call, hasten(word(Post, full), is_a(Copy)))
    yield fault(f"push behind the call, {name}", "overwritten", call, drop(event(Await, END)))


def gather_faults() -> Iterator[object]:
    for way in ("fused", "decomposed"):
        one = Call("gather", way)
        yield from push_faults(way, one, "landed")
        yield fault(f"pushed before the call, {way}", "stale", one, drop(event(Await, START)))
    keeps, whole, quarters = Call("gather", keeps=True), Call("gather", "whole"), Call("gather", chunks=4)
    yield from push_faults("whole", whole, "landed")
    yield fault("second range not awaited", "stale", Call("gather", "decomposed", outer=2), drop(last_wait))
    yield fault("tile that waits for its first row", "stale", quarters, one_less("landed"))
    yield fault(
        "tile that waits for its first row, of one rank", "stale", (Call("gather"), quarters), one_less("landed")
    )
    yield fault("one chunk too many", "stale", quarters, one_more)
    decomposed = Call("gather", "decomposed", outer=2)
    yield fault("one chunk too many for ranges", "stale", (decomposed, quarters), one_more)
    yield fault("kept before it is there", "stale", keeps, drop_on("reduce", word(Wait, "landed")))
    yield fault("kept before the call", "stale", keeps, drop_on("reduce", event(Await, START)))
    yield fault("call ends before it is kept", "overwritten", (whole, keeps), drop(event(Await, REDUCED)))
    yield fault("words cleared before A is kept", "stuck", keeps, drop(event(Await, REDUCED)))
    yield fault("words cleared by the GEMM while A is kept", "stuck", keeps, gemm_clears)


def last_wait(rank: int, item: object) -> bool:
    """For all of a source's chunks."""
    return word(Wait, "landed", value=MAX_CHUNKS)(rank, item)


def set_to_some(name: str) -> Which:
    return lambda rank, item: word(Write, name)(rank, item) and getattr(item, "value", 0) > 0


def drop_on(stream: str, which: Which) -> Spoil:
    """Without some items of one stream."""
    return lambda rank, items: [item for item in items if item[0] != stream or not which(rank, item[1])]


def scatter_faults() -> Iterator[object]:
    one, parts = Call("scatter", "decomposed"), PART_EVENTS
    yield from push_faults("decomposed", one)
    yield fault("FREE set before the call", "overwritten", one, drop(event(Await, START)))
    yield fault("push without event", "stale", one, drop(event(Await, *parts)))
    yield fault("reduction without event", "torn", one, drop(own_event))
    yield fault("second range not awaited", "stale", replace(one, outer=2), drop(event(Await, *SECOND_RANGES)))


def wide_faults() -> Iterator[object]:
    """Those with too many interleavings for a search without the reduction."""
    after = Case(3, (Call("gather", kept=True), Call("scatter")), spoil=await_one_by_one)
    yield pytest.param(after, "overwritten", id="scatter: pushed into a box from which another rank still pulls")
    pulled, scatter = Call("gather", "decomposed", kept=True), Call("scatter", "decomposed")
    fused, chunks, pushed = Call("scatter"), Call("scatter", chunks=2), Call("gather", "decomposed")
    second = Call("scatter", "decomposed", outer=2)
    yield fault("pulled, FREE of one peer", "overwritten", pulled, drop(word(Wait, "free", number=2)), world=3)
    yield fault("pulled, LANDED of one peer", "stale", pulled, drop(word(Wait, "landed", number=2)), world=3, calls=1)
    yield fault("FREE of one peer", "overwritten", scatter, drop(word(Wait, "free", number=2)), world=3)
    yield fault("FREE of one peer", "overwritten", pushed, drop(word(Wait, "free", number=2)), world=3)
    yield fault("FULL of one peer", "stale", scatter, drop(word(Wait, "full", number=2)), world=3, calls=1)
    yield fault("LANDED of one peer", "stale", pushed, drop(word(Wait, "landed", number=2)), world=3, calls=1)
    yield fault("call ends before the reduction", "overwritten", scatter, drop(event(Await, REDUCED)))
    yield fault("event of the call before", "stale", scatter, bind_early(event(Await, *PART_EVENTS)))
    yield fault(
        "FULL of the last chunk not awaited", "stale", second, drop(word(Wait, "full", value=MAX_CHUNKS)), calls=1
    )
    chunk_posts = word(Post, "full", value=MAX_CHUNKS)
    yield fault("FULL set before the last push", "torn", chunks, hasten(chunk_posts, is_a(Copy)), calls=1)
    yield fault("progress not cleared", "left over", fused, drop(word(Write, "progress")))
    yield fault("push without progress", "torn", fused, drop(word(Wait, "progress")), calls=1)
    yield fault("push after one of two tiles", "torn", fused, first_tile_is_enough, calls=1, columns=2)


def shared_faults() -> Iterator[object]:
    """Faults in the second half of an all-reduce."""
    one, whole = Call("all_reduce", "decomposed"), Call("all_reduce", "whole")
    for call in (one, whole):
        yield fault(f"sums pulled at once, {call.way}", "stale", call, drop(word(Wait, "landed")), calls=1)
        yield fault(f"sums not told, {call.way}", "stuck", call, drop(word(Post, "landed")), calls=1)
        yield fault(f"LANDED not cleared, {call.way}", "stale", call, drop(word(Write, "landed")))
        yield fault(
            f"told before the sum, {call.way}", "torn", call, hasten(word(Post, "landed"), is_a(Kernel)), calls=1
        )
    yield fault("call ends before the pulls", "misplaced", one, drop(event(Await, END)), calls=1)
    yield fault("LANDED of one peer", "stale", one, drop(word(Wait, "landed", number=2)), world=3, calls=1)
    pulled_first = Case(2, (Call("all_reduce"),), spoil=drop(word(Wait, "full")))
    yield pytest.param(pulled_first, "stale", id="all_reduce: sum without the parts")
    for name, after in (
        ("numbers pushed", Call("gather", scales=True)),
        ("staged", Call("gather", scales=True, kept=True)),
    ):
        early = Case(3, (one, after), spoil=drop(word(Wait, "free")))
        yield pytest.param(early, "overwritten", id=f"all_reduce: {name} where sums are still pulled from")


FLIGHTS = range(FIRST_EVENT + 2, FIRST_EVENT + 5)  # of two ranks


def bulk_faults() -> Iterator[object]:
    """Of results in flight. What is left out on the copy stream only matters to the call after."""
    gather, pulled, scatter = BULK
    staged_first = Call("gather", "decomposed", kept=True)
    flights = event(Await, *FLIGHTS)
    cases = (
        ("read before it is there", "stale", (gather,), drop(flights)),
        ("read before it is there", "stale", (pulled,), drop(flights)),
        ("read before it is there", "stale", (scatter,), drop(flights)),
        ("staged beside the pulls", "overwritten", (pulled, staged_first), drop(flights)),
        ("products beside the pushes", "stale", (gather, Call("gather")), drop(flights)),
        ("products beside the pulls", "stale", (pulled, Call("gather", "decomposed")), drop(flights)),
        ("inbox free before the sum", "overwritten", (scatter, scatter), drop(event(Await, REDUCED))),
        ("sum at once", "stale", (scatter,), drop(word(Wait, "full"))),
        ("kept at once", "stale", (gather,), drop(word(Wait, "landed"))),
        ("words not cleared", "stale", (gather, gather), drop(word(Write, "landed"))),
        ("copies before the call", "stale", (gather,), drop(event(Await, START))),
        ("staging before the call", "stale", (pulled,), drop(event(Await, START))),
    )
    for name, kind, calls, spoil in cases:
        yield pytest.param(Case(2, calls, spoil=spoil), kind, id=f"{', '.join(map(str, calls))}: {name}")


FAULTS = [*bulk_faults(), *pull_faults(), *gather_faults(), *scatter_faults()]


@pytest.mark.parametrize(("case", "kind"), [*FAULTS, *wide_faults(), *shared_faults()])
def test_search_finds_what_each_rule_prevents(case: Case, kind: str) -> None:
    assert kind in explore(case, until=kind).findings


#: a sixteenth of them, but for one that takes long, for which there is another that ends as stuck
SEARCHED_IN_FULL = {each.id for each in FAULTS[::16]} - {"gather: words cleared by the GEMM while A is kept"}


SEARCHED_IN_FULL |= {"gather: FREE not set, fused"}


@pytest.mark.parametrize(("case", "kind"), [each if each.id in SEARCHED_IN_FULL else thorough(each) for each in FAULTS])
def test_reduction_loses_no_finding(case: Case, kind: str) -> None:
    full, reduced = explore(case, reduced=False, all_kinds=True), explore(case, all_kinds=True)
    assert full.findings.keys() == reduced.findings.keys()
    assert full.states > reduced.states


def test_finding_comes_with_its_interleaving() -> None:
    found = explore(Case(2, (Call("gather"),), spoil=drop(word(Post, "landed")))).findings
    assert found.keys() == {"stuck", "unseen"}
    assert "rank 0 main: access begins" in found["stuck"]
