"""A kernel as Triton has lowered it (its TTGIR: loops fused and pipelined), run program by program on symbols.

Integers are computed. A tensor of floats is a polynomial over what went into it: products of two places in what TMA
descriptors describe, and what was loaded by pointer. What a program does is a list of events, in their order:

    ("load", descriptor, place)                   a tile is asked for
    ("read", name, first, left)                   numbers are loaded by pointer, `left` of them from the first on
    ("multiply",)
    ("store", descriptor, place, tensor, half)    a tile, or the half of one that `tl.split` gave, goes out
    ("wait", word, value, known)                  `await_word`
    ("count", word, number)                       `publish`
    ("prefetch", name, first, left)               as "read", but that nothing waits for it
    ("set", first, how many, value)               integers are stored by pointer
    ("get", address)                              one is loaded, which is `COUNTED`
    ("add", address, number)                      one is added to, which counts programs that are done
    ("barrier",)                                  `tl.debug_barrier`

The interpreter cannot show this: it runs the kernel's source, and what Triton makes of loops is what is in question.
The rest is taken as given: what is asked for is there, what is stored is stored, and barriers, layouts, rounding and
memory order are Triton's. Programs are done in the order of their numbers.

Where warps have tasks of their own (`ttg.warp_specialize`), nothing of that is given: `_Warps` draws an order of what
they and the TMA unit do, and sees whether anything is read before it is there, or gone before it was read.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asynctp_kernels.cuda.choose.tiles import pingpong

Event = tuple[Any, ...]
COUNTED = 40  # calls so far
#: a sum: how often each product of symbols is in it, these in the order of what `repr` makes of them
Polynomial = Counter[tuple[Any, ...]]


@dataclass(frozen=True)
class Tensor:
    """Floats, of any shape. half: 0 or 1, of a tensor that was split."""

    sum: Polynomial = field(default_factory=Counter)
    half: int | None = None
    #: products of it are under way in the tensor cores
    pending: bool = False

    def __add__(self, other: Tensor) -> Tensor:
        return Tensor(self.sum + other.sum, self._half_with(other))

    def __mul__(self, other: Tensor) -> Tensor:
        pairs = itertools.product(self.sum.items(), other.sum.items())
        found: Polynomial = Counter()
        for (ours, many), (theirs, more) in pairs:
            found[monomial(*ours, *theirs)] += many * more
        return Tensor(found, self._half_with(other))

    def _half_with(self, other: Tensor) -> int | None:
        assert not self.pending
        assert not other.pending, "a sum is used before it is there"
        halves = {self.half, other.half} - {None}
        assert len(halves) <= 1, "different halves are combined"
        return next(iter(halves), None)


def monomial(*symbols: Any) -> tuple[Any, ...]:
    return tuple(sorted(symbols, key=repr))


def number(value: float) -> Tensor:
    """One number of float32, which a sum may be multiplied by."""
    return Tensor(Counter([monomial(("number", ctypes.c_float(value).value))]))


@dataclass(frozen=True)
class Range:
    """A tensor of integers that follow each other."""

    first: int
    size: int

    def __add__(self, other: int) -> Range:
        return replace(self, first=self.first + other)

    __radd__ = __add__


@dataclass(frozen=True)
class Place:
    """An address, or a tensor of such: so many elements behind a pointer that was given."""

    name: str
    at: int | Range = 0

    def __add__(self, other: int | Range) -> Place:
        if isinstance(other, int):
            return Place(self.name, self.at + other)
        assert isinstance(self.at, int)
        return Place(self.name, other + self.at)


@dataclass(frozen=True)
class Mask:
    """Of a `Range`: true up to here, without it."""

    left: int


_NAME = r"%[\w.$-]+(?:#\d+)?"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_ATTRIBUTES = re.compile(r"\{[^{}]*\}")
_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "slt": lambda a, b: a < b,
    "sle": lambda a, b: a <= b,
    "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b,
}
_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divsi": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "arith.ceildivsi": lambda a, b: -(-a // b),
    "arith.remsi": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "arith.minsi": min,
    "arith.maxsi": max,
    "arith.andi": lambda a, b: a & b,
    "arith.ori": lambda a, b: a | b,
    "arith.xori": lambda a, b: a ^ b,
    "tt.addptr": lambda a, b: a + b,  # in elements
}
#: what changes no number
_UNCHANGED = {
    *("tt.reshape", "tt.trans", "tt.splat", "tt.broadcast", "tt.expand_dims"),
    *("arith.truncf", "arith.extf", "arith.extsi", "tt.bitcast", "ttg.convert_layout", "ttg.memdesc_reshape"),
}
_SILENT = {
    *("ttng.init_barrier", "ttng.inval_barrier", "ttng.barrier_expect", "ttng.wait_barrier", "ttng.fence_async_shared"),
    *("ttng.async_tma_store_wait", "ttg.local_dealloc", "tt.return"),
}


@dataclass
class Op:
    """One line, and what is in its braces. `text` has no strings, types and locations any more."""

    name: str
    text: str
    line: str
    results: list[str]
    operands: list[str]
    regions: list[list[Op]] = field(default_factory=list)
    #: names, in each region, of what the operation is given
    arguments: list[list[str]] = field(default_factory=list)
    #: how each kind of program does it, looked up once: see `_Program._way`
    ways: dict[type, Way] = field(default_factory=dict, repr=False, compare=False)


@dataclass
class Kernel:
    """The one function of a TTGIR. `arguments`: (name, type), as they are in the text."""

    arguments: list[tuple[str, str]]
    body: list[Op]

    @property
    def specialized(self) -> bool:
        """Warps have tasks of their own."""
        return any(op.name == "ttg.warp_specialize" for op in self.body)

    def run(self, program: int, arguments: Sequence[int | str | Place], seed: int = 0) -> list[Event]:
        """What a program does.

        Descriptors are given by what to call them, pointers as places, and those to words, as numbers, as integers.
        `seed` is of the order in which warps come.
        """
        values = self.bind(arguments)
        if not self.specialized:
            return _Program(values, program).run(self.body)
        made = _Warps(values, program, Cta(random.Random(f"{seed} {program}")))
        return made.run(self.body)

    def bind(self, arguments: Sequence[int | str | Place]) -> dict[str, Any]:
        """Names in the text are not the kernel's, but their order is; behind a descriptor are its sizes and strides."""
        given, passed = iter(arguments), 0
        values: dict[str, Any] = {}
        for name, kind in self.arguments:
            if passed:
                passed -= 1
                values[name] = None  # handed on to warps, who do not look at it
                continue
            values[name] = next(given)
            block = re.match(r"!tt\.tensordesc<(?:tensor<)?((?:\d+x)+)", kind)
            assert (block is not None) == isinstance(values[name], str), (name, kind)
            passed = 2 * block[1].count("x") if block is not None else 0
        assert not list(given)
        return values


def parse(ttgir: str) -> Kernel:
    """Raises ValueError where there is no function, or a line or brace that is not understood."""
    lines = iter([_LOCATION.sub("", line).strip() for line in ttgir.splitlines()])
    head = next((line for line in lines if line.startswith("tt.func")), "")
    body, _ = _region(lines)
    return Kernel(re.findall(rf"({_NAME}): ([^ ,)]+(?:, #\w+>+)?)", head), body)


def _region(lines: Iterator[str]) -> tuple[list[Op], str]:
    """The operations up to a closing brace, and that line."""
    ops: list[Op] = []
    for line in lines:
        if line.startswith("}"):
            return ops, line
        if found := re.match(r"(default|partition\d+\((.*)\) num_warps\(\d+\)) \{$", line):
            ops[-1].arguments.append(re.findall(rf"({_NAME}):", found[2] or ""))
            region, line = _region(lines)
            ops[-1].regions.append(region)
            continue
        op = _operation(line)
        while line.endswith("{"):
            region, line = _region(lines)
            op.regions.append(region)
        ops.append(op)
    raise ValueError("a brace is not closed")


def _operation(line: str) -> Op:
    text = _STRING.sub("", line)
    found = re.match(r"(?:(?P<results>%[^=]*?) = )?(?P<name>[a-z_]+\.[\w.]+)(?P<rest>.*)", text)
    if found is None:
        raise ValueError(f"not understood: {line}")
    rest = _ATTRIBUTES.sub("", found["rest"]).split(" : ")[0]
    results: list[str] = []
    for result in re.findall(r"%[\w.$-]+(?::\d+)?", found["results"] or ""):
        name, _, count = result.partition(":")
        results += [f"{name}#{i}" for i in range(int(count))] if count else [name]
    return Op(found["name"], rest, line, results, re.findall(_NAME, rest))


STAGES = pingpong(1).stages  # any of which may be late
#: an operation under way: it yields what it waits for, if anything, and gives what the operation does
Running = Generator[Callable[[], bool] | None, None, Any]
#: whether an operation may wait, and a function of a program that does it
Way = tuple[bool, Callable[[Any], Any]]


class _Program:
    """One program of a kernel, under way. `events`: what it has done."""

    SILENT = _SILENT

    def __init__(self, values: dict[str, Any], number: int) -> None:
        self.values, self.number = values, number
        self.shared: dict[Any, Any] = {}
        self.events: list[Event] = []
        self._fresh = itertools.count()

    def run(self, body: Sequence[Op]) -> list[Event]:
        for wanted in self._block(body):
            assert wanted is None or wanted(), "nobody else is there to wait for"
        return self.events

    def _block(self, ops: Sequence[Op]) -> Running:
        """What the block yields."""
        values, kind = self.values, type(self)
        for op in ops:
            if op.name == "scf.yield":
                return self._all(op.operands)
            may_wait, do = op.ways.get(kind) or self._way(op)
            found = (yield from do(self)) if may_wait else do(self)
            if len(op.results) == 1:
                values[op.results[0]] = found
            elif op.results:
                values.update(zip(op.results, found, strict=True))
        return []

    def _all(self, names: Sequence[str]) -> list[Any]:
        return [self.values[name] for name in names]

    @classmethod
    def _way(cls, op: Op) -> Way:
        """Look up how these programs do an operation; loops do it thousands of times."""
        control = getattr(cls, "_run_" + op.name.replace(".", "_"), None)
        if control is not None:
            op.ways[cls] = True, lambda program: control(program, op)
        else:
            op.ways[cls] = False, cls._doing(op)
        return op.ways[cls]

    @classmethod
    def _doing(cls, op: Op) -> Callable[[_Program], Any]:
        """A function that does an operation, which does not wait."""
        if op.name in cls.SILENT:
            return lambda program: None
        if op.name in _UNCHANGED:
            first = op.operands[0]
            return lambda program: program.values[first]
        if op.name in _WITHOUT_OPERANDS:
            constant = _WITHOUT_OPERANDS[op.name](op)
            return lambda program: constant
        if op.name == "arith.cmpi":
            return _comparison(op)
        if op.name in _INTEGERS:
            return _integer_op(op)
        method = getattr(cls, "_" + op.name.replace(".", "_"), None)
        if method is None:
            raise NotImplementedError(op.line)
        return lambda program: method(program, op, *program._all(op.operands))

    # --- control -------------------------------------------------------------------------------------------------
    def _run_scf_if(self, op: Op) -> Running:
        condition = self.values[op.operands[0]]
        assert isinstance(condition, int), op.line
        regions = [*op.regions, []]
        found = yield from self._block(regions[0 if condition else 1])
        return found[0] if len(op.results) == 1 else found

    def _run_scf_for(self, op: Op) -> Running:
        index, first, end, step, *carried = op.operands
        inner, initial = carried[0::2], self._all(carried[1::2])
        start, stop, stride = self._all([first, end, step])
        for here in range(start, stop, stride):
            self.values.update(zip([index, *inner], [here, *initial], strict=True))
            initial = yield from self._block(op.regions[0])
        return initial[0] if len(op.results) == 1 else initial

    # --- values --------------------------------------------------------------------------------------------------
    def _arith_select(self, op: Op, condition: int | Mask, one: Any, other: Any) -> Any:
        if isinstance(condition, Mask):  # zeros after so many rows
            assert not other.sum, op.line
            return one * Tensor(Counter([monomial(("real", condition.left))]))
        return one if condition else other

    def _arith_addf(self, op: Op, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    def _arith_mulf(self, op: Op, one: Tensor, other: Tensor) -> Tensor:
        return one * other

    def _tt_load(
        self, op: Op, place: Place | int, mask: Mask | None = None, other: Tensor | None = None
    ) -> Tensor | int:
        if isinstance(place, int):
            self.events.append(("get", place))
            return COUNTED
        first = place.at if isinstance(place.at, int) else place.at.first
        assert (mask is None) == isinstance(place.at, int), op.line
        assert other is None or not other.sum, op.line
        symbol = (place.name, first, None if mask is None else mask.left)
        self._read(symbol)
        return Tensor(Counter([monomial(symbol)]))

    def _read(self, symbol: tuple[Any, ...]) -> None:
        self.events.append(("read", *symbol))

    def _tt_store(self, op: Op, place: int | Range, value: int) -> None:
        first, size = (place, 1) if isinstance(place, int) else (place.first, place.size)
        self.events.append(("set", first, size, value))

    def _ub_poison(self, op: Op) -> Any:
        return None

    def _arith_extui(self, op: Op, value: int) -> int:
        return value

    def _tt_get_program_id(self, op: Op) -> int:
        return self.number

    def _tt_atomic_rmw(self, op: Op, address: int, number: int, mask: int) -> int:
        """Of the count of programs that are done."""
        assert "add, acq_rel, gpu" in op.line, op.line
        assert mask, op.line
        self.events.append(("add", address, number))
        return self.number

    def _ttg_barrier(self, op: Op) -> None:
        self.events.append(("barrier",))

    _gpu_barrier = _ttg_barrier

    def _tt_elementwise_inline_asm(self, op: Op, *operands: Any) -> int:
        if "prefetch.global.L1" in op.line:
            place, mask = operands
            self.events.append(("prefetch", place.name, place.at.first, mask.left))
            return 0
        assert all(isinstance(value, int) for value in operands), op.line
        if "ld.acquire.sys" in op.line:
            self._wait(*operands)
        else:
            assert "red.release.gpu" in op.line, op.line
            self._count(*operands)
        return 0

    def _wait(self, word: int, value: int, known: int) -> None:
        self.events.append(("wait", word, value, bool(known)))

    def _count(self, word: int, number: int = 1) -> None:
        self.events.append(("count", word, number))

    def _tt_split(self, op: Op, tensor: Tensor) -> list[Tensor]:
        assert tensor.half is None, op.line
        assert not tensor.pending, "a sum is used before it is there"
        return [replace(tensor, half=half) for half in (0, 1)]

    # --- shared memory and tensor cores --------------------------------------------------------------------------
    def _ttg_local_alloc(self, op: Op) -> Any:
        return (next(self._fresh),)

    def _ttg_memdesc_index(self, op: Op, buffer: Any, index: int) -> Any:
        return (*buffer, index)

    def _ttg_memdesc_trans(self, op: Op, buffer: Any) -> Any:
        return buffer

    def _ttg_local_store(self, op: Op, tensor: Tensor, buffer: Any) -> None:
        self.shared[buffer] = tensor

    def _ttng_async_tma_copy_global_to_local(self, op: Op, descriptor: str, *operands: Any) -> None:
        *place, buffer, _, wanted = operands
        if wanted:
            self.shared[buffer] = (descriptor, tuple(place))
            self.events.append(("load", descriptor, tuple(place)))

    def _ttng_async_tma_copy_local_to_global(self, op: Op, descriptor: str, *operands: Any) -> None:
        *place, buffer = operands
        tensor = self.shared[buffer]
        self.events.append(("store", descriptor, tuple(place), tensor.sum, tensor.half))

    def _ttng_warp_group_dot(self, op: Op, a: Any, b: Any, acc: Tensor, *use_acc: int) -> Tensor:
        self.events.append(("multiply",))
        product = Tensor(Counter([monomial(("product", self.shared[a], self.shared[b]))]))
        return acc + product if all(use_acc) else product

    def _ttng_warp_group_dot_wait(self, op: Op, *operands: Any) -> Any:
        return operands[0] if len(op.results) == 1 else operands


def _integer_op(op: Op) -> Callable[[_Program], Any]:
    """Compute on two integers; additions take a range or a place, too."""
    (one, other), compute, adds = op.operands, _INTEGERS[op.name], op.name in ("arith.addi", "tt.addptr")

    def do(program: _Program) -> Any:
        a, b = program.values[one], program.values[other]
        if isinstance(a, int) and isinstance(b, int):
            return compute(a, b)
        if not adds:
            raise NotImplementedError(op.line)
        return a + b

    return do


def _comparison(op: Op) -> Callable[[_Program], int | Mask]:
    """Compare two integers, or find where a range ends."""
    (one, other), name = op.operands, op.text.split(",")[0].strip()
    compare = _COMPARISONS[name]

    def do(program: _Program) -> int | Mask:
        a, b = program.values[one], program.values[other]
        if isinstance(a, int):
            return int(compare(a, b))
        assert name == "slt", op.line
        return Mask(b - a.first)

    return do


def _constant(op: Op) -> Any:
    value = op.text.split()[0].removeprefix("dense<").removesuffix(">")
    if "." in value:
        return number(float(value)) if float(value) else Tensor()
    return int({"true": "1", "false": "0"}.get(value, value))


def _range(op: Op) -> Range:
    found = re.search(r"end = (\d+) : i32, start = (\d+) : i32", op.line)
    assert found is not None, op.line
    return Range(int(found[2]), int(found[1]) - int(found[2]))


#: the same whenever they are done
_WITHOUT_OPERANDS: dict[str, Callable[[Op], Any]] = {"arith.constant": _constant, "tt.make_range": _range}


# --- warps with tasks of their own -------------------------------------------------------------------------------
@dataclass
class Barrier:
    """An mbarrier.

    count: arrivals of a phase. bytes: that TMA has still to bring. phases: how many are over. known: what those who
    arrived have awaited: words and their values.
    """

    count: int
    arrived: int = 0
    bytes: int = 0
    phases: int = 0
    known: set[tuple[int, int]] = field(default_factory=set)

    def arrive(self, arrivals: int = 0, brought: int = 0) -> None:
        self.arrived, self.bytes = self.arrived + arrivals, self.bytes - brought
        assert self.arrived <= self.count, "an mbarrier has more arrivals than a phase has"
        if self.arrived == self.count and not self.bytes:
            self.arrived, self.phases = 0, self.phases + 1

    def over(self, parity: int) -> bool:
        """Whether the last phase that is over has this parity: all that a wait can see."""
        return (self.phases - 1) % 2 == parity


@dataclass(eq=False)
class Copy:
    """What TMA was asked for. number: of the stage."""

    number: int
    bring: Callable[[], None]

    def is_late(self, late: int | None) -> bool:
        return self.number == late


@dataclass
class Cta:
    """What the warps of a program share.

    copies: what TMA was asked for and has not brought. unfenced: shared memory whose contents it would not see yet.
    late: a stage whose copies come, or a task whose warps go on, only when nobody else can, if any.
    """

    draw: random.Random
    shared: dict[Any, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    barriers: dict[Any, Barrier] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    late: int | None = None
    unfenced: set[Any] = field(default_factory=set)


class _Warps(_Program):
    """Some warps of a program: those of one task, or, outside of `ttg.warp_specialize`, the kernel's own.

    TMA brings what it was asked for at any time later. It reads what it is to store, and the tensor cores what they are
    to multiply, at any time from when that is asked for until it is awaited, so that it must not change between.
    """

    SILENT = frozenset({"ttng.inval_barrier", "ttg.local_dealloc", "tt.return", "ttg.warp_return"})

    def __init__(self, values: dict[str, Any], number: int, cta: Cta) -> None:
        super().__init__(values, number)
        self.cta, self.shared, self.events = cta, cta.shared, cta.events
        self._multiplying: list[dict[Any, Any]] = []  # what each product reads
        self._storing: list[tuple[Any, Any, Event]] = []  # (buffer, what is in it, the event)
        self._stored: list[Event] = []
        self._known: set[tuple[int, int]] = set()  # words that these warps know to have a value
        self._number = -1  # of the task
        self._unfenced: set[Any] = set()  # of the shared memory, what these warps wrote

    def _run_ttg_warp_specialize(self, op: Op) -> Running:
        operands = self._all(op.operands)
        given = [dict(zip(names, operands, strict=True)) for names in op.arguments[1:]]
        tasks = [self, *(_Warps({**self.values, **values}, self.number, self.cta) for values in given)]
        for number, task in enumerate(tasks):
            task._number = number
        self.cta.late = self.cta.draw.choice([None, *range(STAGES + len(tasks))])
        running = {task: task._task(region) for task, region in zip(tasks, op.regions, strict=True)}
        awaited: dict[_Warps, Callable[[], bool] | None] = dict.fromkeys(tasks)
        while running or self.cta.copies:
            ready = [task for task in running if (wanted := awaited[task]) is None or wanted()]
            assert ready or self.cta.copies, "warps wait for each other"
            able: list[Copy | _Warps] = [*ready, *self.cta.copies]
            chosen = self.cta.draw.choice([one for one in able if not one.is_late(self.cta.late)] or able)
            if isinstance(chosen, Copy):
                self.cta.copies.remove(chosen)
                chosen.bring()
                continue
            try:
                awaited[chosen] = next(running[chosen])
            except StopIteration:
                del running[chosen]
        return []
        yield  # of one task, which does not wait

    def is_late(self, late: int | None) -> bool:
        return late is not None and self._number == late - STAGES

    def _task(self, region: Sequence[Op]) -> Running:
        yield from self._block([op for op in region if op.name != "ttg.warp_yield"])
        assert not self._multiplying, "products are not awaited"
        assert not self._storing, "shared memory is left before it was read"
        self.events += self._stored

    def _count(self, word: int, number: int = 1) -> None:
        """Behind `cp.async.bulk.wait_group 0`."""
        assert not self._storing, "stores are not awaited"
        self.events += self._stored
        self._stored = []
        super()._count(word, number)

    def _read(self, symbol: tuple[Any, ...]) -> None:
        """With what these warps have awaited, by themselves or from others."""
        self.events.append(("read", *symbol, frozenset(self._known)))

    def _wait(self, word: int, value: int, known: int) -> None:
        super()._wait(word, value, known)
        self._known.add((word, value))

    # --- barriers ------------------------------------------------------------------------------------------------
    def _ttng_init_barrier(self, op: Op, barrier: Any) -> None:
        self.cta.barriers[barrier] = Barrier(_number(op))

    def _run_ttng_wait_barrier(self, op: Op) -> Running:
        barrier, parity, *wanted = self._all(op.operands)
        assert all(wanted), op.line
        yield lambda: self.cta.barriers[barrier].over(parity)
        self._known |= self.cta.barriers[barrier].known

    def _run_ttng_arrive_barrier(self, op: Op) -> Running:
        barrier, *wanted = self._all(op.operands)
        if all(wanted):
            yield None
            self.cta.barriers[barrier].known |= self._known
            self.cta.barriers[barrier].arrive(_number(op))

    def _run_ttng_barrier_expect(self, op: Op) -> Running:
        barrier, *wanted = self._all(op.operands)
        assert all(wanted), op.line
        yield None
        self.cta.barriers[barrier].known |= self._known
        self.cta.barriers[barrier].arrive(1, -_number(op))

    # --- shared memory -------------------------------------------------------------------------------------------
    def _ttng_async_tma_copy_global_to_local(self, op: Op, descriptor: str, *operands: Any) -> None:
        *place, buffer, barrier, wanted = operands
        assert wanted, op.line
        shape = re.search(r"!ttg\.memdesc<((?:\d+x)+)b?f(8|16)", op.line)
        assert shape is not None, op.line
        size = math.prod(int(extent) for extent in shape[1].split("x")[:-1]) * int(shape[2]) // 8
        self.shared[buffer] = "under way"
        self.events.append(("load", descriptor, tuple(place)))

        def bring() -> None:
            self.shared[buffer] = (descriptor, tuple(place))
            self.cta.barriers[barrier].arrive(0, size)

        self.cta.copies.append(Copy(buffer[-1], bring))

    def _run_ttg_local_store(self, op: Op) -> Running:
        tensor, buffer = self._all(op.operands)
        yield None
        self.shared[buffer] = replace(tensor)
        self._unfenced.add(buffer)
        self.cta.unfenced.add(buffer)

    def _ttng_fence_async_shared(self, op: Op) -> None:
        self.cta.unfenced -= self._unfenced
        self._unfenced.clear()

    def _run_ttng_async_tma_copy_local_to_global(self, op: Op) -> Running:
        descriptor, *place, buffer = self._all(op.operands)
        yield None
        tensor = self.shared.get(buffer)
        assert isinstance(tensor, Tensor), "nothing was put there to be stored"
        assert buffer not in self.cta.unfenced, "TMA does not see what it is to store"
        self._storing.append((buffer, tensor, ("store", descriptor, tuple(place), tensor.sum, tensor.half)))

    def _run_ttng_async_tma_store_wait(self, op: Op) -> Running:
        yield None
        assert "pendings = 0" in op.line, op.line
        for buffer, tensor, event in self._storing:
            assert self.shared[buffer] is tensor, "a tile is overwritten before it was read"
            self._stored.append(event)
        self._storing = []

    def _ttng_warp_group_dot(self, op: Op, a: Any, b: Any, acc: Tensor, *use_acc: int) -> Tensor:
        read = {buffer: self.shared.get(buffer) for buffer in (a, b)}
        assert all(isinstance(place, tuple) for place in read.values()), "operands are not there yet"
        self._multiplying.append(read)
        return replace(super()._ttng_warp_group_dot(op, a, b, replace(acc, pending=False), *use_acc), pending=True)

    def _run_ttng_warp_group_dot_wait(self, op: Op) -> Running:
        yield None
        found = re.search(r"pendings = (\d+)", op.line)
        assert found is not None, op.line
        over, self._multiplying = _split_at(self._multiplying, len(self._multiplying) - int(found[1]))
        for read in over:
            for buffer, place in read.items():
                assert self.shared[buffer] is place, "operands are overwritten before they were read"
        return replace(self.values[op.operands[0]], pending=bool(self._multiplying))


def _split_at(items: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    return items[: max(count, 0)], items[max(count, 0) :]


def _number(op: Op) -> int:
    """The integer among an operation's operands."""
    found = re.search(r", (\d+)", op.text)
    assert found is not None, op.line
    return int(found[1])
