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
    ("add", address, number)                      one is added to, which counts programs that are done
    ("barrier",)                                  `tl.debug_barrier`

The interpreter cannot show this: it runs the kernel's source, and what Triton makes of loops is what is in question.
The rest is taken as given: what is asked for is there, what is stored is stored, and barriers, layouts, rounding and
memory order are Triton's. Programs are done in the order of their numbers.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Event = tuple[Any, ...]
#: a sum: how often each product of symbols is in it, these in the order of what `repr` makes of them
Polynomial = Counter[tuple[Any, ...]]


@dataclass(frozen=True)
class Tensor:
    """Floats, of any shape. half: 0 or 1, of a tensor that was split."""

    sum: Polynomial = field(default_factory=Counter)
    half: int | None = None

    def __add__(self, other: Tensor) -> Tensor:
        return Tensor(self.sum + other.sum, self._half_with(other))

    def __mul__(self, other: Tensor) -> Tensor:
        pairs = itertools.product(self.sum.items(), other.sum.items())
        found: Polynomial = Counter()
        for (ours, many), (theirs, more) in pairs:
            found[monomial(*ours, *theirs)] += many * more
        return Tensor(found, self._half_with(other))

    def _half_with(self, other: Tensor) -> int | None:
        halves = {self.half, other.half} - {None}
        assert len(halves) <= 1, "different halves are combined"
        return next(iter(halves), None)


def monomial(*symbols: Any) -> tuple[Any, ...]:
    return tuple(sorted(symbols, key=repr))


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
    *("arith.truncf", "arith.extf", "ttg.convert_layout"),
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


@dataclass
class Kernel:
    """The one function of a TTGIR. `arguments`: (name, type), as they are in the text."""

    arguments: list[tuple[str, str]]
    body: list[Op]

    def run(self, program: int, arguments: Sequence[int | str | Place]) -> list[Event]:
        """What a program does.

        Descriptors are given by what to call them, pointers as places, and those to words, as numbers, as integers.
        """
        return _Program(self.bind(arguments), program).run(self.body)

    def bind(self, arguments: Sequence[int | str | Place]) -> dict[str, Any]:
        """Names in the text are not the kernel's, but their order is; behind a descriptor are its sizes and strides."""
        given, values, passed = iter(arguments), {}, 0
        for name, kind in self.arguments:
            if passed:
                passed -= 1
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


class _Program:
    """One program of a kernel, under way. `events`: what it has done."""

    def __init__(self, values: dict[str, Any], number: int) -> None:
        self.values, self.number = values, number
        self.shared: dict[Any, Any] = {}
        self.events: list[Event] = []
        self._fresh = itertools.count()

    def run(self, body: Sequence[Op]) -> list[Event]:
        self._block(body)
        return self.events

    def _block(self, ops: Sequence[Op]) -> list[Any]:
        """What the block yields."""
        for op in ops:
            if op.name == "scf.yield":
                return self._all(op.operands)
            found = self._do(op)
            if len(op.results) == 1:
                self.values[op.results[0]] = found
            elif op.results:
                self.values.update(zip(op.results, found, strict=True))
        return []

    def _all(self, names: Sequence[str]) -> list[Any]:
        return [self.values[name] for name in names]

    def _do(self, op: Op) -> Any:
        operands = [] if op.name.startswith("scf.") else self._all(op.operands)
        if op.name in _SILENT:
            return None
        if op.name in _UNCHANGED:
            return operands[0]
        if op.name in _INTEGERS and all(isinstance(value, int) for value in operands):
            return _INTEGERS[op.name](*operands)
        if op.name in ("arith.addi", "tt.addptr"):
            return operands[0] + operands[1]
        method = getattr(self, "_" + op.name.replace(".", "_"), None)
        if method is None:
            raise NotImplementedError(op.line)
        return method(op, *operands)

    # --- control -------------------------------------------------------------------------------------------------
    def _scf_if(self, op: Op) -> Any:
        condition = self.values[op.operands[0]]
        assert isinstance(condition, int), op.line
        regions = [*op.regions, []]
        found = self._block(regions[0 if condition else 1])
        return found[0] if len(op.results) == 1 else found

    def _scf_for(self, op: Op) -> Any:
        index, first, end, step, *carried = op.operands
        inner, initial = carried[0::2], self._all(carried[1::2])
        start, stop, stride = self._all([first, end, step])
        for here in range(start, stop, stride):
            self.values.update(zip([index, *inner], [here, *initial], strict=True))
            initial = self._block(op.regions[0])
        return initial[0] if len(op.results) == 1 else initial

    # --- values --------------------------------------------------------------------------------------------------
    def _arith_constant(self, op: Op) -> Any:
        value = op.text.split()[0].removeprefix("dense<").removesuffix(">")
        if "." in value:
            assert float(value) == 0, op.line
            return Tensor()
        return int({"true": "1", "false": "0"}.get(value, value))

    def _arith_cmpi(self, op: Op, one: int | Range, other: int) -> int | Mask:
        name = op.text.split(",")[0].strip()
        if isinstance(one, int):
            return int(_COMPARISONS[name](one, other))
        assert name == "slt", op.line
        return Mask(other - one.first)

    def _arith_select(self, op: Op, condition: int, one: Any, other: Any) -> Any:
        assert isinstance(condition, int), op.line
        return one if condition else other

    def _arith_addf(self, op: Op, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    def _arith_mulf(self, op: Op, one: Tensor, other: Tensor) -> Tensor:
        return one * other

    def _tt_make_range(self, op: Op) -> Range:
        found = re.search(r"end = (\d+) : i32, start = (\d+) : i32", op.line)
        assert found is not None, op.line
        return Range(int(found[2]), int(found[1]) - int(found[2]))

    def _tt_load(self, op: Op, place: Place, mask: Mask | None = None, other: Tensor | None = None) -> Tensor:
        first = place.at if isinstance(place.at, int) else place.at.first
        assert (mask is None) == isinstance(place.at, int), op.line
        assert other is None or not other.sum, op.line
        symbol = (place.name, first, None if mask is None else mask.left)
        self.events.append(("read", *symbol))
        return Tensor(Counter([monomial(symbol)]))

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
            word, value, known = operands
            self.events.append(("wait", word, value, bool(known)))
        else:
            assert "red.release.gpu" in op.line, op.line
            self.events.append(("count", *operands))
        return 0

    def _tt_split(self, op: Op, tensor: Tensor) -> list[Tensor]:
        assert tensor.half is None, op.line
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
