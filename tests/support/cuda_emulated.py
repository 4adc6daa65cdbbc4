"""What the kernels of `asynctp_kernels.cuda` do to memory, in torch on CPU, as their docstrings say it.

For plans that run on the machine of `cuda_stubs`: arguments come from the launch, so that a wrong address, stride or
count gives a wrong result. Words are waited for, counted and cleared as in the kernels.

Each program of a kernel is a generator. Where it yields nothing, others may come in between; where it yields a
question, it goes on once the answer is yes. `streams` lets the programs of all ranks run together. On one rank they
run one after the other (`in_order`): a wait that is not over when it is come to fails, since nothing else runs there.
An access is not done at once: what is written is `POISON` at first, and what is read is looked at twice.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from math import ceil, nan
from typing import Any

import torch
from asynctp_kernels.cuda.gemm.copy_kernels import SIGNATURES
from asynctp_kernels.cuda.runtime.memory import MAX_WORLD
from asynctp_kernels.signals import FAILED, UNLIKE
from cuda_stubs import Launched, Machine
from torch import Tensor

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POISON = 255  # of a byte
Question = Callable[[], bool]
Steps = Iterator[Question | None]


class Raced(Exception):
    """Two accesses meet."""


# --- memory ------------------------------------------------------------------------------------------------------
def at(address: int, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    """The memory at an address, as a tensor."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    strides = strides or torch.empty(shape, device="meta").stride()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_uint8 * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in the order of its elements."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def look(memory: Tensor, index: Any = ...) -> Generator[Question | None, None, Tensor]:
    """Read; nobody may write there meanwhile."""
    found = memory[index].clone()
    yield None
    if not torch.equal(raw(found), raw(memory[index])):
        raise Raced("what is read is written meanwhile")
    return found


def put(memory: Tensor, values: Tensor, index: Any = ...) -> Steps:
    """Write; nobody else may write there meanwhile."""
    memory[index] = nan if memory.is_floating_point() else POISON - 256 * memory.dtype.is_signed
    poison = memory[index].clone()
    assert (poison.shape, poison.dtype) == (values.shape, values.dtype)
    yield None
    if not torch.equal(raw(poison), raw(memory[index])):
        raise Raced("what is written is written by another too")
    memory[index] = values


def int32(address: int) -> Any:
    """A word; its `value` may be set."""
    return ctypes.c_int32.from_address(address)


def int64(address: int) -> Any:
    """An epoch, likewise."""
    return ctypes.c_int64.from_address(address)


def reached(word: Any, value: int) -> Question:
    """Whether a word is at least `value`."""
    return lambda: bool(word.value >= value)


class Call:
    """A launch's arguments by name, with descriptors and words as tensors."""

    def __init__(self, launched: Launched) -> None:
        self.prepared, self.arguments = launched.prepared, launched.arguments
        self.examples = dict(zip(launched.prepared.names, launched.prepared.args, strict=True))
        self.constants = launched.prepared.constants
        self._described: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return self.constants[name] if name.isupper() else self.arguments[name]

    def described(self, name: str) -> Tensor:
        """What a TMA descriptor describes."""
        if name not in self._described:
            tma = self.arguments[name]
            self._described[name] = at(tma.address, tma.shape, self.examples[name].base.dtype, tma.strides)
        return self._described[name]

    def is_last(self) -> bool:
        """A program is done: whether all others are. Then the call is counted."""
        done = int32(self.done_ptr)
        done.value = (done.value + 1) % self.PROGRAMS
        if done.value == 0:
            self.count()
        return bool(done.value == 0)

    def may_push(self) -> bool:
        """No wait of this rank has failed."""
        return int64(self.status_ptr).value == 0

    def count(self) -> None:
        """A call is over."""
        int32(self.done_ptr + 4).value += 1


# --- the GEMM ----------------------------------------------------------------------------------------------------
def gemm_program(call: Call, program: int) -> Steps:
    """Either `gemm_kernel`. That of `pingpong_kernels` counts a tile as soon as it is stored."""
    at_once = "STAGES" in call.constants
    tiles_q = ceil(call.inner / call.BM)
    widths = [call.arguments[f"n{i}"] for i in range(call.COUNT if call.GATHER else 1)]
    columns = [(i, col) for i, width in enumerate(widths) for col in range(0, width, call.BN)]
    count = call.outer * tiles_q * len(columns) * call.world
    mine = _share_of(program, count, call.SLOTS, call.PROGRAMS)
    tiles = [_tile_of(call, tile, call.outer * tiles_q, len(columns)) for tile in mine]
    awaited, counter, made, due = -1, None, 0, 0  # made: tiles of this chunk; due: of the one before, to be counted
    for number, (step, peer, tile_m, tile_n, chunk) in enumerate(tiles):
        p, q = tile_m // tiles_q, tile_m % tiles_q * call.BM
        word = int32(call.arguments["words"] + chunk * 4)
        rows = slice(q, q + call.BM)
        if call.GATHER:
            if call.OWN and step > 0 and chunk != awaited:
                yield reached(int32(call.arguments["words"] + peer * 4), chunk - peer * call.CHUNKS + 1)
            if not call.OWN and chunk != awaited:
                yield reached(word, call.value)
            awaited = chunk
            yield from _gathered_tile(call, step, peer, p, rows, *columns[tile_n])
            continue
        yield from _scattered_tile(call, peer, p, rows, columns[tile_n][1], counter, due)
        made, due, counter = made + 1, 0, word
        if at_once or number + 1 == len(tiles) or tiles[number + 1][-1] != chunk:
            made, due = 0, made
        if at_once or (call.COUNT > 1 and call.A_SCALE):
            word.value, due = word.value + due, 0
    if due:
        counter.value += due
    if call.OWN and call.is_last() and call.CLEARS:
        at(call.arguments["words"], (MAX_WORLD,), torch.int32).zero_()


def _share_of(program: int, count: int, slots: int, programs: int) -> range:
    """The tiles of a program: of the waves that others have left, each share's take half, and the last one's all."""
    share, left = program // slots, ceil(count / slots)
    for _ in range(share):
        left -= ceil(left / 2)
    taken = ceil(count / slots) - left
    end = taken + (left if share == programs // slots - 1 else ceil(left / 2))
    return range(taken * slots + program % slots, min(end * slots, count), slots)


def _tile_of(call: Call, tile: int, tiles_m: int, tiles_n: int) -> tuple[int, int, int, int, int]:
    """(step, rank, row tile, column tile, chunk)."""
    step, index = divmod(tile, tiles_m * tiles_n)
    peer = (call.rank + step + (not call.GATHER)) % call.world
    chunk_tiles = call.own_tiles if peer == call.rank and not call.GATHER else call.chunk_size
    group = call.GROUP_M if call.GATHER else min(call.GROUP_M, chunk_tiles)
    first, rest = index // (group * tiles_n) * group, index % (group * tiles_n)
    height = min(tiles_m - first, group)
    tile_m = first + rest % height
    chunk = tile_m // chunk_tiles
    if call.GATHER:  # chunks are of rows; the last row of a tile comes last
        tiles_q = ceil(call.inner / call.BM)
        last = tile_m // tiles_q * call.inner + min((tile_m % tiles_q + 1) * call.BM, call.inner) - 1
        chunk = min(last // call.chunk_size, call.CHUNKS - 1)
    return step, peer, tile_m, rest // height, peer * call.CHUNKS + chunk


def _gathered_tile(call: Call, step: int, peer: int, p: int, rows: slice, i: int, col: int) -> Steps:
    block = p * call.world + peer
    own, name, a_block = call.OWN and step == 0, "a0", block
    if own:
        a_block = p
    elif call.OWN:
        name = "a1"
        if call.INBOX:
            a_block = (peer - (peer > call.rank)) * call.outer + p
    a = call.described(name)[a_block]
    columns = slice(col, col + call.BN)
    found = yield from look(a[rows])
    scale, first = call.a_scale0, block * call.inner + rows.start
    if call.SCALE_TRAVELS:
        scale, first = call.a_scale0 if own else call.a_scale1, a_block * call.inner + rows.start
    acc = _finish(call, found.float() @ _weight(call, i, columns), scale, first, i, col)
    yield from _store(call, f"c{i}", block, rows, columns, acc)


def _scattered_tile(call: Call, peer: int, p: int, rows: slice, col: int, counter: Any, due: int) -> Steps:
    """Before it is stored, `due` tiles of the chunk before are counted."""
    block, columns = p * call.world + peer, slice(col, col + call.BN)
    total = torch.zeros(())
    assert call.COUNT == 1 or not call.BIAS
    for i in range(call.COUNT):
        found = yield from look(call.described(f"a{i}")[block][rows])
        scale = call.arguments[f"a_scale{i}"]
        total = total + _finish(
            call, found.float() @ _weight(call, i, columns), scale, block * call.inner + rows.start, i, col
        )
    if due:
        counter.value += due
    if call.FACTOR != 1:
        total = total.to(call.described("c0").dtype).float() * call.FACTOR
    if call.PADDED:
        total[max(call.real_rows - peer * call.inner - rows.start, 0) :] = 0
    yield from _store(call, "c0", peer * call.outer + p, rows, columns, total)


def _weight(call: Call, i: int, columns: slice) -> Tensor:
    """These columns of B number `i`, fp32 [K, columns]."""
    b = call.described(f"b{i}")
    b = b.t() if call.B_K_MAJOR else b
    width, depth = (f"n{i}", "k0") if call.GATHER else ("n0", f"k{i}")
    assert b.shape == (call.arguments[depth], call.arguments[width])
    return b[:, columns].float()


def _finish(call: Call, acc: Tensor, scale: int, first: int, i: int, col: int) -> Tensor:
    """Scales and bias number `i` of a tile at column `col`; its rows' scales are those from `first` on at `scale`."""
    height, width = acc.shape
    if call.A_SCALE:
        start = scale + 4 * first * (call.A_SCALE == 2)
        acc = acc * at(start, (1,) if call.A_SCALE == 1 else (height, 1), torch.float32)
    if call.B_SCALE:
        start = call.arguments[f"b_scale{i}"] + 4 * col * (call.B_SCALE == 2)
        acc = acc * at(start, (1, width) if call.B_SCALE == 2 else (1,), torch.float32)
    if call.BIAS:
        dtype = call.examples[f"bias{i}"].dtype
        acc = acc + at(call.arguments[f"bias{i}"] + dtype.itemsize * col, (1, width), dtype).float()
    return acc


def _store(call: Call, name: str, block: int, rows: slice, columns: slice, acc: Tensor) -> Steps:
    c, width = call.described(name), call.BN // call.SPLIT
    assert "OUT" not in call.constants or TORCH_DTYPES[str(call.OUT)] == c.dtype
    acc = acc.to(TORCH_DTYPES[str(call.ROUNDED)]) if "ROUNDED" in call.constants else acc
    for first in range(0, acc.shape[1], width):
        part = slice(columns.start + first, columns.start + first + width)
        yield from put(c[block][rows, part], acc[:, first : first + width].to(c.dtype))


def few_rows_program(call: Call, program: int) -> Steps:
    """`few_rows_kernel`."""
    widths = [call.arguments[f"n{i}"] for i in range(call.COUNT)]
    columns = [(i, col) for i, width in enumerate(widths) for col in range(0, width, call.BN)]
    tile_n, tile_m = divmod(program, ceil(call.m / call.BM))
    i, col = columns[tile_n]
    rows = slice(tile_m * call.BM, min((tile_m + 1) * call.BM, call.m))
    part = slice(col, min(col + call.BN, widths[i]))
    weight = call.described(f"b{i}")
    weight = weight.t() if call.B_K_MAJOR else weight
    assert weight.shape == (call.k, widths[i])
    found = yield from look(call.described("a")[rows])
    acc = _finish(call, found.float() @ weight[:, part].float(), call.arguments["a_scale"], rows.start, i, col)
    dtype = call.examples[f"c{i}"].dtype
    assert TORCH_DTYPES[str(call.OUT)] == dtype
    assert widths[i] % call.TOGETHER == 0
    place = at(call.arguments[f"c{i}"], (call.m, widths[i]), dtype)
    yield from put(place[rows, part], (acc.to(dtype).float() * call.FACTOR).to(dtype))


# --- staging, what is kept, and the reduction --------------------------------------------------------------------
def stage_program(call: Call, program: int) -> Steps:
    """`stage_kernel`."""
    unit, peers = call.examples["shard_ptr"].dtype, _others(call, 1)
    words = at(call.pads, (call.WORLD,), torch.int64).tolist()

    def free(rank: int, peer: int) -> Any:
        return int32(words[rank] + 4 * (call.free_word + peer))

    def landed(rank: int, peer: int) -> Any:
        return int32(words[rank] + 4 * (call.landed_word + peer))

    if program == 0:
        int32(call.awaited_ptr).value = call.signature
    for peer in peers if program == 0 else ():
        free(peer, call.rank).value = call.signature
        yield None
    for peer in peers:
        yield exactly(call, free(call.rank, peer), call.signature)
    stages = call.may_push()
    for block in range(program, ceil(call.size / call.BLOCK), call.PROGRAMS):
        first = block * call.BLOCK
        shape = (min(call.BLOCK, call.size - first),)
        units = yield from look(at(call.shard_ptr + first * unit.itemsize, shape, unit))
        for place in [*[call.outbox_ptr] * stages, *[call.kept_ptr] * call.KEEPS]:
            yield from put(at(place + first * unit.itemsize, shape, unit), units)
    if call.SCALE_TRAVELS and stages:
        for first in range(program * 256, call.numbers, call.PROGRAMS * 256):
            shape = (min(256, call.numbers - first),)
            numbers = yield from look(at(call.scale_ptr + 4 * first, shape, torch.float32))
            yield from put(at(call.scale_box_ptr + 4 * first, shape, torch.float32), numbers)
    if call.is_last():
        for peer in peers:
            free(call.rank, peer).value = 0
            yield None
        int32(call.awaited_ptr).value = 0
        for peer in peers if call.may_push() else ():
            landed(peer, call.rank).value = call.MAX_CHUNKS
            yield None
        for peer in peers:
            yield exactly(call, landed(call.rank, peer), call.MAX_CHUNKS)
            landed(call.rank, peer).value = 0


def exactly(call: Call, word: Any, value: int) -> Question:
    """Whether a word is `value`, or a wait of this rank has failed."""
    return lambda: bool(word.value == value or int64(call.status_ptr).value)


def keep_program(call: Call, program: int) -> Steps:
    """`keep_kernel`."""
    unit = call.examples["received_ptr"].dtype
    assert call.examples["whole_ptr"].dtype == unit
    shard, whole = at(call.received_ptr, (call.size,), unit), at(call.whole_ptr, (call.WORLD * call.size,), unit)
    for first in _from(call, program, call.size):
        block = slice(first, min(first + call.BLOCK, call.size))
        yield from put(whole, (yield from look(shard, block)), place(call, call.source)[block])
    if program == 0 and call.source == call.own:
        call.count()


def reduce_program(call: Call, program: int) -> Steps:
    """`reduce_kernel`: sum in fp32, in rank order, rounded once; then the words are cleared."""
    sent, dtype = call.examples["own_ptr"].dtype, call.examples["out_ptr"].dtype
    assert call.examples["received_ptr"].dtype == sent
    here = None
    for part in range(ceil(call.size / call.own_size)):
        begin = part * call.own_size
        end = min(begin + call.own_size, call.size)
        come = min((end - 1) // call.chunk_size, call.MAX_CHUNKS - 1)
        for src in range(call.WORLD):
            if src != call.rank and come != here:
                yield reached(int32(call.arrived + src * 4), come + 1)
        here = come
        tiles = min(call.own_tiles, call.tiles - part * call.own_tiles)
        yield reached(int32(call.progress + part * 4), tiles)
        for first in range(begin + program * call.BLOCK, end, call.PROGRAMS * call.BLOCK):
            size = min(call.BLOCK, end - first)
            total = torch.zeros(size)
            for src in range(call.WORLD):
                slot = src - (src > call.rank)
                start = call.own_ptr if src == call.rank else call.received_ptr + slot * call.size * sent.itemsize
                found = yield from look(at(start + first * sent.itemsize, (size,), sent))
                total += found.float()
            for place in (call.out_ptr, *([call.sums_ptr] if call.SHARES else [])):
                yield from put(at(place + first * dtype.itemsize, (size,), dtype), (total * call.factor).to(dtype))
    if call.is_last():
        at(call.progress, (call.MAX_OWN,), torch.int32).zero_()
        at(call.arrived, (MAX_WORLD,), torch.int32).zero_()


# --- the direct kernels ------------------------------------------------------------------------------------------
def place(call: Call, peer: int) -> Tensor:
    """Where each element of `peer`'s shard lies in the whole tensor."""
    index = torch.arange(call.size)
    if call.CONTIGUOUS:
        return peer * call.size + index
    row, col = index // call.cols, index % call.cols
    if call.ALONG_LAST:
        return (row * call.WORLD + peer) * call.cols + col
    return ((row // call.inner * call.WORLD + peer) * call.inner + row % call.inner) * call.cols + col


def number_place(call: Call, peer: int) -> Tensor:
    """Likewise of the numbers that travel."""
    index, inner = torch.arange(call.numbers), call.inner_numbers
    return (index // inner * call.WORLD + peer) * inner + index % inner


def check_landing(call: Call, part: int) -> None:
    """One slot has room for a part of every rank, and parts begin where every load may."""
    assert call.part_bytes >= part
    assert call.part_bytes % 256 == 0
    assert call.slot_bytes % 256 == 0
    assert call.WORLD * call.part_bytes <= call.slot_bytes
    assert 1 <= call.PROGRAMS <= call.MAX_PROGRAMS


def begin_call(call: Call, program: int) -> Steps:
    """Say which call is under way."""
    if program == 0:
        int32(call.doing_ptr).value = call.signature
    yield None


def end_call(call: Call, epoch: int) -> None:
    """A program is done; the last one ends the call."""
    if call.is_last():
        int32(call.doing_ptr).value = 0
        int64(call.epoch_ptr).value = epoch


def word_of(call: Call, epoch: int) -> int:
    """What the words of a call are set to."""
    return int(epoch * SIGNATURES.value + call.signature)


def data_came(
    call: Call, pad: int, program: int, epoch: int, src: int, shot: int = 0
) -> Generator[Question | None, None, bool]:
    """Wait for a rank's word: whether its data is there, and of a call like this one. Time is never up."""
    number = (shot * call.WORLD + src) * call.MAX_PROGRAMS + program
    word, status = int64(pad + number * 8), int64(call.status_ptr)
    yield lambda: bool(word.value >= epoch * SIGNATURES.value or status.value)
    of_epoch, signature = divmod(word.value, SIGNATURES.value)
    unlike = of_epoch == epoch and signature != call.signature
    if unlike and status.value == 0:
        at(call.status_ptr, (3,), torch.int64).copy_(torch.tensor([FAILED, src, signature * UNLIKE + call.signature]))
    return of_epoch >= epoch and not unlike


def poisoned(values: Tensor, came: bool) -> Tensor:
    """Data, or NaN where it did not come."""
    return values if came else raw(values).fill_(POISON).view(values.dtype).view(values.shape)


def push_gather_program(call: Call, program: int) -> Steps:
    """`push_gather_kernel`."""
    yield from begin_call(call, program)
    unit, epoch = call.examples["shard_ptr"].dtype, int64(call.epoch_ptr).value + 1
    size, part = unit.itemsize, call.scales_offset + call.numbers * 4
    check_landing(call, part if call.SCALE_TRAVELS else call.size * size)
    assert call.scales_offset >= call.size * size
    blocks = [slice(first, min(first + call.BLOCK, call.size)) for first in _from(call, program, call.size)]
    firsts = range(program * call.NUMBERS, call.numbers, call.PROGRAMS * call.NUMBERS)
    some = [slice(first, min(first + call.NUMBERS, call.numbers)) for first in firsts]
    some = some if call.SCALE_TRAVELS else []
    shard, numbers = at(call.shard_ptr, (call.size,), unit), at(call.scale_ptr, (call.numbers,), torch.float32)
    full = at(call.full_ptr, (call.WORLD * call.size,), unit)
    all_numbers = at(call.full_scale_ptr, (call.WORLD * call.numbers,), torch.float32)
    landings, pads = _landings(call, epoch), at(call.pads, (call.WORLD,), torch.int64).tolist()

    pushed = _others(call, -1) if call.may_push() else []
    for block in blocks:
        values = yield from look(shard, block)
        for peer in pushed:
            landing = landings[peer] + call.rank * call.part_bytes
            yield from put(at(landing, (call.size,), unit), values, block)
        yield from put(full, values, place(call, call.rank)[block])
    for block in some:
        values = yield from look(numbers, block)
        for peer in pushed:
            landing = landings[peer] + call.rank * call.part_bytes + call.scales_offset
            yield from put(at(landing, (call.numbers,), torch.float32), values, block)
        yield from put(all_numbers, values, number_place(call, call.rank)[block])
    for peer in pushed:
        int64(pads[peer] + (call.rank * call.MAX_PROGRAMS + program) * 8).value = word_of(call, epoch)
        yield None
    came = True
    for src in _others(call, 1):
        came &= yield from data_came(call, pads[call.rank], program, epoch, src)
    for src in _others(call, 1):
        landing = landings[call.rank] + src * call.part_bytes
        source = at(landing, (call.size,), unit)
        number_source = at(landing + call.scales_offset, (call.numbers,), torch.float32)
        for block in blocks:
            yield from put(full, poisoned((yield from look(source, block)), came), place(call, src)[block])
        for block in some:
            found = yield from look(number_source, block)
            yield from put(all_numbers, found if came else found * nan, number_place(call, src)[block])
    end_call(call, epoch)


def push_reduce_program(call: Call, program: int) -> Steps:
    """`push_reduce_kernel`."""
    yield from begin_call(call, program)
    sent, dtype = call.examples["full_ptr"].dtype, call.examples["out_ptr"].dtype
    epoch = int64(call.epoch_ptr).value + 1
    check_landing(call, call.size * sent.itemsize)
    blocks = [slice(first, min(first + call.BLOCK, call.size)) for first in _from(call, program, call.size)]
    full, out = at(call.full_ptr, (call.WORLD * call.size,), sent), at(call.out_ptr, (call.size,), dtype)
    landings, pads = _landings(call, epoch), at(call.pads, (call.WORLD,), torch.int64).tolist()
    places = {peer: place(call, peer) for peer in range(call.WORLD)}
    pushed = _others(call, 1) if call.may_push() else []
    for peer in pushed:
        landing = at(landings[peer] + call.rank * call.part_bytes, (call.size,), sent)
        for block in blocks:
            yield from put(landing, (yield from look(full, places[peer][block])), block)
    for peer in pushed:
        int64(pads[peer] + (call.rank * call.MAX_PROGRAMS + program) * 8).value = word_of(call, epoch)
        yield None
    came = True
    for src in _others(call, 1):
        came &= yield from data_came(call, pads[call.rank], program, epoch, src)
    for block in blocks:
        total = torch.zeros(block.stop - block.start)
        for src in range(call.WORLD):
            landing = at(landings[call.rank] + src * call.part_bytes, (call.size,), sent)
            own = src == call.rank
            found = yield from look(full if own else landing, places[src][block] if own else block)
            total += found.float()
        yield from put(out, (total * call.factor if came else total * nan).to(dtype), block)
    end_call(call, epoch)


def push_all_reduce_program(call: Call, program: int) -> Steps:
    """`push_all_reduce_kernel`."""
    yield from begin_call(call, program)
    dtype, epoch, world, part = call.examples["own_ptr"].dtype, int64(call.epoch_ptr).value + 1, call.WORLD, call.part
    assert call.slot_bytes >= call.SHOTS * world * call.part_bytes
    check_landing(call, part * dtype.itemsize)
    assert part * dtype.itemsize % 16 == 0 or call.SHOTS == 1, "parts begin where every load may"
    own, out = at(call.own_ptr, (call.size,), dtype), at(call.out_ptr, (call.size,), dtype)
    landings, pads = _landings(call, epoch), at(call.pads, (world,), torch.int64).tolist()

    def runs(rank: int) -> list[slice]:
        """This program's of the elements that `rank` adds up."""
        first = rank * part if call.SHOTS == 2 else 0
        count = max(0, min(part, call.size - first))
        blocks = [(start, min(start + call.BLOCK, count)) for start in _from(call, program, count)]
        return [slice(first + start, first + end) for start, end in blocks]

    def landing(at_rank: int, src: int, shot: int, adder: int) -> Tensor:
        """Where rank `src` pushes to in a shot, as the elements that `adder` adds up."""
        start = landings[at_rank] + (shot * world + src) * call.part_bytes
        first = adder * part * dtype.itemsize if call.SHOTS == 2 else 0
        return at(start - first, (call.size,), dtype)  # only the part is there

    def post(shot: int) -> Steps:
        for peer in _others(call, 1):
            number = (shot * world + call.rank) * call.MAX_PROGRAMS + program
            int64(pads[peer] + number * 8).value = word_of(call, epoch)
            yield None

    pushes = call.may_push()
    for peer in _others(call, 1) if pushes else ():
        for run in runs(peer):
            yield from put(landing(peer, call.rank, 0, peer), (yield from look(own, run)), run)
    if pushes:
        yield from post(0)
    came = True
    for src in _others(call, 1):
        came &= yield from data_came(call, pads[call.rank], program, epoch, src)
    for run in runs(call.rank):
        found = []
        for src in range(world):
            source = own if src == call.rank else landing(call.rank, src, 0, call.rank)
            found.append((yield from look(source, run)))
        if call.REDUCE == "sum":
            total = functools.reduce(torch.add, [each.float() for each in found], torch.zeros(())) * call.factor
        else:
            total = functools.reduce(torch.fmax if call.REDUCE == "max" else torch.fmin, found)
        rounded = poisoned(total.to(dtype), came)
        yield from put(out, rounded, run)
        for peer in _others(call, 1) if call.SHOTS == 2 and pushes and came else ():
            yield from put(landing(peer, call.rank, 1, call.rank), rounded, run)
    if call.SHOTS == 2:
        if pushes and came:
            yield from post(1)
        for src in _others(call, 1):
            came &= yield from data_came(call, pads[call.rank], program, epoch, src, 1)
        for src in _others(call, 1):
            for run in runs(src):
                found = yield from look(landing(call.rank, src, 1, src), run)
                yield from put(out, poisoned(found, came), run)
    end_call(call, epoch)


def _from(call: Call, program: int, size: int) -> range:
    """Where the blocks of one program begin."""
    return range(program * call.BLOCK, size, call.PROGRAMS * call.BLOCK)


def _landings(call: Call, epoch: int) -> list[int]:
    """The address of each rank's slot for this call."""
    return [start + epoch % 2 * call.slot_bytes for start in at(call.buffers, (call.WORLD,), torch.int64).tolist()]


def _others(call: Call, way: int) -> list[int]:
    """All other ranks, up from the own one (1) or down (-1)."""
    return [(call.rank + way * step) % call.WORLD for step in range(1, call.WORLD)]


# --- on one rank -------------------------------------------------------------------------------------------------
PROGRAMS: dict[str, Callable[[Call, int], Steps]] = {
    "gemm_kernel": gemm_program,
    "few_rows_kernel": few_rows_program,
    "stage_kernel": stage_program,
    "keep_kernel": keep_program,
    "reduce_kernel": reduce_program,
    "push_gather_kernel": push_gather_program,
    "push_reduce_kernel": push_reduce_program,
    "push_all_reduce_kernel": push_all_reduce_program,
}


def in_order(launched: Launched) -> None:
    """All programs of a kernel, one after the other."""
    call = Call(launched)
    for number in range(launched.prepared.programs):
        for question in PROGRAMS[launched.prepared.name](call, number):
            assert question is None or question(), f"{launched.prepared.name} waits for what nothing announces"


def met(launched: Launched) -> None:
    """`stage_kernel`, to which all ranks have come, and all have staged."""
    call = Call(launched)
    words = at(at(call.pads, (call.WORLD,), torch.int64)[call.rank].item(), (3 * MAX_WORLD,), torch.int32)
    for peer in _others(call, 1):
        words[call.free_word + peer], words[call.landed_word + peer] = call.signature, call.MAX_CHUNKS
    in_order(launched)


def landed(launched: Launched, parts: Sequence[Tensor], scales: Sequence[Tensor] = ()) -> None:
    """A direct kernel, to which the other ranks have pushed their parts, and their scales if any travel.

    Of an all-reduce in two shots `parts` are what the others have of this rank's part, and then all ranks' sums.
    """
    call = Call(launched)
    epoch = int64(call.epoch_ptr).value + 1
    landing, pad = _landings(call, epoch)[call.rank], at(call.pads, (call.WORLD,), torch.int64)[call.rank].item()
    for src in _others(call, 1):
        sums = [(call.WORLD * call.part_bytes, raw(parts[call.WORLD + src]))] if len(parts) > call.WORLD else []
        pieces = [
            (0, raw(parts[src])),
            *sums,
            *[(call.scales_offset, raw(numbers)) for numbers in scales[src : src + 1]],
        ]
        for offset, piece in pieces:
            at(landing + src * call.part_bytes + offset, piece.shape, torch.uint8).copy_(piece)
    at(int(pad), (2 * call.WORLD * call.MAX_PROGRAMS,), torch.int64).fill_(word_of(call, epoch))
    in_order(launched)


def emulate(here: Machine) -> None:
    """Have the kernels of the pipelines do their work; the direct ones need what other ranks have."""
    here.kernels |= dict.fromkeys(("gemm_kernel", "few_rows_kernel", "keep_kernel", "reduce_kernel"), in_order) | {
        "stage_kernel": met
    }
