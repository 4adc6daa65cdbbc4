"""A kernel as Triton has lowered it (its TTGIR: loops fused and pipelined), run program by program on symbols.

Integers are computed. A tensor is the products that went into it, as often as they did; a product is a pair of places
in what TMA descriptors describe. What a program does is a list of events, in their order:

    ("load", descriptor, place)                    a tile is asked for
    ("multiply",)
    ("store", descriptor, place, products, half)   a tile, or the half of one that `tl.split` gave, goes out
    ("wait", word, value, known)                   `await_word`
    ("count", word, number)                        `publish`

The interpreter cannot show this: it runs the kernel's source, and what Triton makes of loops is what is in question.
The rest is taken as given: what is asked for is there, what is stored is stored, and barriers, layouts and memory order
are Triton's; numbers that are loaded by pointer (scales, biases) and masks have no symbols; of the programs none is the
last to be done, which clears words.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Event = tuple[Any, ...]
Products = Counter[tuple[Any, Any]]


@dataclass(frozen=True)
class Tensor:
    """half: 0 or 1, of a tensor that was split."""

    products: Products = field(default_factory=Counter)
    half: int | None = None


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
#: what gives the products of all its operands
_ELEMENTWISE = {
    *("tt.reshape", "tt.trans", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.make_range", "tt.load"),
    *("arith.truncf", "arith.extf", "arith.mulf", "arith.addf", "arith.cmpi", "arith.select", "ttg.convert_layout"),
}
_SILENT = {
    *("ttng.init_barrier", "ttng.inval_barrier", "ttng.barrier_expect", "ttng.wait_barrier", "ttng.fence_async_shared"),
    *("ttng.async_tma_store_wait", "ttg.local_dealloc", "ttg.barrier", "gpu.barrier", "tt.store", "tt.return"),
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

    def run(self, program: int, arguments: Sequence[int | str]) -> list[Event]:
        """What a program does. Descriptors are given by what to call them, pointers and others as integers."""
        return _Program(self.bind(arguments), program).run(self.body)

    def bind(self, arguments: Sequence[int | str]) -> dict[str, Any]:
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
        if op.name in _INTEGERS and all(isinstance(value, int) for value in operands):
            return _INTEGERS[op.name](*operands)
        if op.name == "arith.cmpi" and all(isinstance(value, int) for value in operands):
            return int(_COMPARISONS[op.text.split(",")[0].strip()](*operands))
        if op.name == "arith.select" and isinstance(operands[0], int):
            return operands[1] if operands[0] else operands[2]
        if (op.name in _ELEMENTWISE or op.name in _INTEGERS) and None not in operands:
            tensors = [value for value in operands if isinstance(value, Tensor)]
            halves = {tensor.half for tensor in tensors} - {None}
            assert len(halves) <= 1, op.line
            return Tensor(sum((tensor.products for tensor in tensors), Counter()), next(iter(halves), None))
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
        value = op.text.split()[0]
        return Tensor() if value.startswith("dense") else int({"true": "1", "false": "0"}.get(value, value))

    def _ub_poison(self, op: Op) -> Any:
        return None

    def _arith_extui(self, op: Op, value: int) -> int:
        return value

    def _tt_get_program_id(self, op: Op) -> int:
        return self.number

    def _tt_atomic_rmw(self, op: Op, *operands: Any) -> int:
        return 0

    def _tt_elementwise_inline_asm(self, op: Op, *operands: Any) -> int:
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
        self.events.append(("store", descriptor, tuple(place), tensor.products, tensor.half))

    def _ttng_warp_group_dot(self, op: Op, a: Any, b: Any, acc: Tensor, *use_acc: int) -> Tensor:
        self.events.append(("multiply",))
        product = Counter([(self.shared[a], self.shared[b])])
        return Tensor(acc.products + product if all(use_acc) else product)

    def _ttng_warp_group_dot_wait(self, op: Op, *operands: Any) -> Any:
        return operands[0] if len(op.results) == 1 else operands
