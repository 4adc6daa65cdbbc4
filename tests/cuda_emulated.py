"""What the kernels of `asynctp_kernels.cuda` do to memory, in torch on CPU, as their docstrings say it.

For plans that run on the machine of `cuda_stubs`: arguments come from the launch, so that a wrong address, stride or
count gives a wrong result. Words are waited for, counted and cleared as in the kernels; a wait that is not over when
the kernel is launched fails, since nothing else runs here meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from asynctp_kernels.cuda.memory import MAX_CHUNKS, MAX_WORLD
from asynctp_kernels.signals import FAILED
from cuda_stubs import Launched, Machine
from torch import Tensor

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def at(address: int, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    """The memory at an address, as a tensor."""
    strides = strides or torch.empty(shape, device="meta").stride()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_uint8 * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


class Call:
    """A launch's arguments by name, with descriptors and words as tensors."""

    def __init__(self, launched: Launched) -> None:
        self.prepared, self.arguments = launched.prepared, launched.arguments
        self.examples = dict(zip(launched.prepared.names, launched.prepared.args, strict=True))
        self.constants = launched.prepared.constants

    def __getattr__(self, name: str) -> Any:
        return self.constants[name] if name.isupper() else self.arguments[name]

    def described(self, name: str) -> Tensor:
        """What a TMA descriptor describes."""
        tma = self.arguments[name]
        return at(tma.address, tma.shape, self.examples[name].base.dtype, tma.strides)

    @property
    def words_address(self) -> int:
        """Of a GEMM's words."""
        return int(self.arguments["words"])

    def words(self, name: str) -> Tensor:
        """int32 [rank, chunk]."""
        return at(self.arguments[name], (MAX_WORLD, MAX_CHUNKS), torch.int32)


# --- the GEMM ----------------------------------------------------------------------------------------------------
def gemm(launched: Launched) -> None:
    """`gemm_kernel`, with all programs one after the other."""
    call = Call(launched)
    if call.GATHER and not call.OWN:
        _async_input_gemm(call)
    elif call.GATHER:
        _gather_gemm(call)
        call.words("words").zero_()
    else:
        _scatter_gemm(call)


def _gather_gemm(call: Call) -> None:
    own, full, words = call.described("a0"), call.described("a1"), call.words("words")
    for step in range(call.world):
        peer = (call.rank + step) % call.world
        for chunk in _chunks(call) if step else ():
            assert words[peer, chunk] >= 1, f"nothing announces chunk {chunk} of rank {peer}"
        for p in range(call.outer):
            block = p * call.world + peer
            a = full[block] if step else own[p]
            for i in range(call.COUNT):
                acc = _finish(call, a.float() @ _weight(call, i), p, block, step, i)
                _store(call, f"c{i}", block, acc)


def _async_input_gemm(call: Call) -> None:
    a, words = call.described("a0"), at(call.words_address, (call.world,), torch.int32)
    for step in range(call.world):
        chunk = (call.rank + step) % call.world
        assert words[chunk] >= call.value, f"nothing announces chunk {chunk}"
        for i in range(call.COUNT):
            _store(call, f"c{i}", chunk, a[chunk].float() @ _weight(call, i))


def _scatter_gemm(call: Call) -> None:
    words = call.words("words")
    tiles_n = ceil(call.n0 / call.BN)
    for step in range(call.world):
        peer = (call.rank + 1 + step) % call.world
        for p in range(call.outer):
            block = p * call.world + peer
            acc = sum(call.described(f"a{i}")[block].float() @ _weight(call, i) for i in range(call.COUNT))
            acc = _finish(call, acc, p, block, 0, 0)
            for i in range(call.ADDENDS):
                acc = acc + call.described(f"c{1 + i}")[block].float()
            _store(call, "c0", peer * call.outer + p, acc)
        for tile_m in range(call.outer * ceil(call.inner / call.BM)):
            words[peer, tile_m // (call.own_tiles if peer == call.rank else call.chunk_tiles)] += tiles_n


def _chunks(call: Call) -> list[int]:
    """The chunks that the row tiles of one rank are in."""
    tiles = call.outer * ceil(call.inner / call.BM)
    return sorted({tile // call.chunk_tiles for tile in range(tiles)})


def _weight(call: Call, i: int) -> Tensor:
    """B number `i`, fp32 [K, N]."""
    b = call.described(f"b{i}").float()
    b = b.t() if call.B_K_MAJOR else b
    width, depth = (f"n{i}", "k0") if call.GATHER else ("n0", f"k{i}")
    assert b.shape == (call.arguments[depth], call.arguments[width])
    return b


def _finish(call: Call, acc: Tensor, p: int, block: int, step: int, i: int) -> Tensor:
    inner, n = acc.shape
    assert inner == call.inner
    if call.A_SCALE == 1:
        acc = acc * at(call.a_scale0, (1,), torch.float32)
    if call.A_SCALE == 2:
        scale, first = call.a_scale0, block * inner
        if call.SCALE_TRAVELS:
            scale, first = (call.a_scale1, block * inner) if step else (call.a_scale0, p * inner)
        acc = acc * at(scale + 4 * first, (inner, 1), torch.float32)
    if call.B_SCALE:
        acc = acc * at(call.arguments[f"s{i}"], (1,) if call.B_SCALE == 1 else (1, n), torch.float32)
    if call.BIAS:
        acc = acc + at(call.arguments[f"z{i}"], (1, n), call.examples[f"z{i}"].dtype).float()
    return acc


def _store(call: Call, name: str, block: int, acc: Tensor) -> None:
    c = call.described(name)
    assert TORCH_DTYPES[str(call.OUT)] == c.dtype
    c[block] = acc.to(c.dtype)


# --- staging and reduction ---------------------------------------------------------------------------------------
def stage(launched: Launched) -> None:
    """`stage_kernel`, once all ranks have come."""
    call = Call(launched)
    for place in [call.outbox_ptr, *[call.kept_ptr] * call.KEEPS]:
        ctypes.memmove(place, call.shard_ptr, call.size * call.examples["shard_ptr"].itemsize)
    if call.SCALE_TRAVELS:
        ctypes.memmove(call.scale_box_ptr, call.scale_ptr, call.numbers * 4)


def reduce(launched: Launched) -> None:
    """`reduce_kernel`: sum in fp32, in rank order, rounded once; then the words are cleared."""
    call = Call(launched)
    sent, dtype = call.examples["own_ptr"].dtype, call.examples["out_ptr"].dtype
    assert call.examples["received_ptr"].dtype == sent
    progress, arrived = call.words("progress"), call.words("arrived")
    begin = 0
    for chunk in range(call.CHUNKS):
        assert progress[call.rank, chunk] >= call.arguments[f"tiles{chunk}"]
        size = call.arguments[f"end{chunk}"] - begin
        total = torch.zeros(size)
        for src in range(call.WORLD):
            assert src == call.rank or arrived[src, chunk // call.SPLIT] >= 1
            slot = src - (src > call.rank)
            start = call.own_ptr if src == call.rank else call.received_ptr + slot * call.part_size * sent.itemsize
            total += at(start + begin * sent.itemsize, (size,), sent).float()
        at(call.out_ptr + begin * dtype.itemsize, (size,), dtype).copy_((total * call.factor).to(dtype))
        begin += size
    assert begin == call.part_size
    progress[call.rank] = 0
    arrived.zero_()


def await_word(launched: Launched) -> None:
    """`await_kernel`. Time is up at once, since nothing else runs here meanwhile."""
    call = Call(launched)
    word, status = at(call.word, (1,), torch.int32), at(call.status_ptr, (3,), torch.int64)
    if word < call.value:
        if status[0] == 0:
            status.copy_(torch.tensor([FAILED, call.peer, call.awaited]))
        word.fill_(call.value)


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


def check_landing(call: Call, part: int) -> None:
    """One slot has room for a part of every rank, and parts begin where every load may."""
    assert call.part_bytes >= part
    assert call.part_bytes % 256 == 0
    assert call.slot_bytes % 256 == 0
    assert call.WORLD * call.part_bytes <= call.slot_bytes
    assert 1 <= call.PROGRAMS <= call.MAX_PROGRAMS


def push_gather(launched: Launched, shards: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
    """`push_gather_kernel`, given all ranks' shards and scales."""
    call = Call(launched)
    unit = call.examples["shard_ptr"].dtype
    check_landing(call, call.scales_offset + call.numbers * 4 if call.SCALE_TRAVELS else call.size * unit.itemsize)
    assert call.scales_offset >= call.size * unit.itemsize
    full = at(call.full_ptr, (call.WORLD * call.size,), unit)
    for src in range(call.WORLD):
        shard = raw(shards[src]).view(unit)
        if src == call.rank:
            assert torch.equal(at(call.shard_ptr, (call.size,), unit), shard)
        full[place(call, src)] = shard
        if call.SCALE_TRAVELS:
            index, inner = torch.arange(call.numbers), call.inner_numbers
            where = (index // inner * call.WORLD + src) * inner + index % inner
            at(call.full_scale_ptr, (call.WORLD * call.numbers,), torch.float32)[where] = scales[src].flatten()


def push_reduce(launched: Launched, parts: Sequence[Tensor]) -> None:
    """`push_reduce_kernel`, given what every other rank has for this one."""
    call = Call(launched)
    sent, dtype = call.examples["full_ptr"].dtype, call.examples["out_ptr"].dtype
    check_landing(call, call.size * sent.itemsize)
    full = at(call.full_ptr, (call.WORLD * call.size,), sent)
    total = torch.zeros(call.size)
    for src in range(call.WORLD):
        total += (full[place(call, src)] if src == call.rank else parts[src].flatten()).float()
    at(call.out_ptr, (call.size,), dtype).copy_((total * call.factor).to(dtype))


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def emulate(here: Machine) -> None:
    """Have the kernels of the pipelines do their work; the direct ones need what other ranks have."""
    here.kernels |= {"gemm_kernel": gemm, "stage_kernel": stage, "reduce_kernel": reduce, "await_kernel": await_word}
