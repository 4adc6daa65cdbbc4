"""Kernels that move and reduce: the direct (one kernel) collectives, and the copy and the reduction of pushed ones.

The direct kernels push: program i of every rank stores its slice of the shard into each peer's landing slot, posts the
peer's word (own rank, i), waits for the peers' words (rank, i) in its own memory, and takes their slices from there.

    landing of one slot, on every rank:  [ from rank 0 | from rank 1 | ... ]   each: [ slice units | fp32 scales ]

Programs take runs of bytes, cut by the number of bytes alone, so ranks may see the shard as they like. A word is
`epoch * SIGNATURES + signature`: a rank that reads another signature in its own epoch has met an unlike call, and takes
nothing. A rank of which a wait has failed so, or has run out, goes on to its later calls, but pushes and posts nothing
more: a peer that still waits would take a later call's word for this one's, and that call's data for its own.

They need no barrier before or after, and no memset: epochs only grow, and call e lands in slot e % 2.
There a rank R writes over the data of call e - 2, which is never too early for a peer P:

    R starts call e only after its call e - 1 ended, which waited for the words of *every* peer, P's included;
    P released its word of call e - 1 only after P's call e - 2 had ended, so after P's last read of that slot.

With one slot, R could overwrite what P still reads: in call e - 1 P may be a whole call behind. An all-reduce in two
shots has words and landings for each of them; both words of a call come before its end, so the same holds. All that is
explored by `tests/soundness/test_protocol_model.py`. The epoch is a word in device memory that the last program of a
call advances, so a replayed CUDA graph goes on counting.

Memory order: the stores of a slice are joined by a CTA barrier and released (scope sys) by the word; the reader
acquires the word (scope sys), and a CTA barrier hands that to its other threads. See `asynctp_kernels.signals`.
"""

# triton ships no types: its decorator is untyped
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from asynctp_kernels.cuda.gemm.gemm_kernels import await_word
from asynctp_kernels.numerics import exact_f32, round_to
from asynctp_kernels.signals import (
    none_failed,
    peers_of,
    post_words,
    record_unlike,
    see_words,
    wait_exactly,
    wait_word,
)

#: of direct calls: a word holds an epoch and one of so many
SIGNATURES = tl.constexpr(1 << 24)
#: bits of data that did not come: NaN in every floating-point format of the ops
POISON = tl.constexpr(-1)


@triton.jit
def place(
    index, cols, inner, peer, world, CONTIGUOUS: tl.constexpr, ALONG_LAST: tl.constexpr, size, ALIGN: tl.constexpr = 0
):
    """Where element `index` of `peer`'s shard lies in the whole tensor. Shard: [P * Q, cols]; `size` elements in it.

    ALIGN: so many lie together there, at a multiple of so many. It is said here, of the last operation: until 3.9,
    Triton forgets it of a function's result.
    """
    if CONTIGUOUS:
        where = peer * size + index
    else:
        row = index // cols
        col = index % cols
        if ALONG_LAST:
            where = (row * world + peer) * cols + col
        else:
            where = ((row // inner * world + peer) * inner + row % inner) * cols + col
    if ALIGN:
        where = tl.max_contiguous(tl.multiple_of(where, ALIGN), ALIGN)
    return where


@triton.jit
def begin_call(doing_ptr, signature):
    """Say which call is under way, for who watches over its waits."""
    if tl.program_id(0) == 0:
        tl.store(doing_ptr, signature)


@triton.jit
def end_call(epoch_ptr, epoch, done_ptr, doing_ptr, PROGRAMS: tl.constexpr):
    """The last program of the launch makes `epoch` the current one, and counts the call."""
    tl.debug_barrier()
    if tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
        tl.store(done_ptr, 0)
        tl.store(doing_ptr, 0)
        tl.store(done_ptr + 1, tl.load(done_ptr + 1) + 1)
        tl.store(epoch_ptr, epoch)


@triton.jit
def data_came(word, epoch, signature, timeout_ns, status_ptr, src, awaited):
    """Wait until `src` has posted its data of call `epoch`; whether it has, and of a call like this one.

    A rank posts a later call only if it has met no unlike one (`may_push`): then neither has this rank, of that one's.
    """
    found = wait_word(word, epoch * SIGNATURES, timeout_ns, status_ptr, src, awaited)
    unlike = (found // SIGNATURES == epoch) & (found % SIGNATURES != signature)
    if unlike:
        record_unlike(status_ptr, src, signature, found % SIGNATURES)
    return (found >= epoch * SIGNATURES) & (unlike == 0)


@triton.jit
def may_push(status_ptr):
    """Whether no wait of this rank has failed; all threads of a program agree."""
    return none_failed(status_ptr)


@triton.jit(do_not_specialize=["signature", "rank"])
def stage_kernel(
    shard_ptr,
    scale_ptr,
    kept_ptr,
    outbox_ptr,
    scale_box_ptr,
    done_ptr,
    awaited_ptr,
    size,
    numbers,
    pads,
    free_word,
    landed_word,
    timeout_ns,
    status_ptr,
    signature,
    rank,
    WORLD: tl.constexpr,
    SCALE_TRAVELS: tl.constexpr,
    KEEPS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
):
    """Copy the own shard of `size` units, and `numbers` scales, into the outbox, from which peers then pull.

    Before that all ranks meet: FREE of every peer has the call's `signature`, so no rank still pulls the outbox's last
    shard. Meanwhile `awaited` has it, too, for `watch`. After the copy every outbox is full (LANDED), and all ranks go
    on in step. A rank that has not met all others leaves its outbox as it is: a peer may still pull it. KEEPS: the
    shard goes to `kept_ptr` as well, its place in the gathered A. pads: each rank's words, in which `free_word` and
    `landed_word` are numbers of int32. It counts the call. It runs beside a GEMM, with few registers and no shared
    memory to speak of, and does not wait for it. ALIGN units, a power of two, are read and written together, as in
    `keep_kernel`.
    """
    pid = tl.program_id(0)
    pad_table = pads.to(tl.pointer_type(tl.int64))
    own_words = tl.load(pad_table + rank).to(tl.pointer_type(tl.int32))
    if pid == 0:
        tl.store(awaited_ptr, signature)
        tl.debug_barrier()
        for step in tl.static_range(1, WORLD):
            words = tl.load(pad_table + (rank + step) % WORLD).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(words + free_word + rank, signature, sem="release", scope="sys")
    for step in tl.static_range(1, WORLD):
        src = (rank + step) % WORLD
        wait_exactly(own_words + free_word + src, signature, timeout_ns, status_ptr, src, signature)
    stages = may_push(status_ptr)
    staged = tl.where(stages, size, 0)
    for block in range(pid, tl.cdiv(size, BLOCK), PROGRAMS):
        index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        index = tl.max_contiguous(tl.multiple_of(index, ALIGN), ALIGN)
        units = tl.load(shard_ptr + index, mask=index < size)
        tl.store(outbox_ptr + index, units, mask=index < staged)
        if KEEPS:
            tl.store(kept_ptr + index, units, mask=index < size)
    if SCALE_TRAVELS:
        for first in range(pid * 256, tl.where(stages, numbers, 0), PROGRAMS * 256):
            index = first + tl.arange(0, 256)
            tl.store(scale_box_ptr + index, tl.load(scale_ptr + index, mask=index < numbers), mask=index < numbers)
    tl.debug_barrier()
    if tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
        tl.store(done_ptr, 0)
        tl.store(done_ptr + 1, tl.load(done_ptr + 1) + 1)
        for step in tl.static_range(1, WORLD):
            tl.store(own_words + free_word + (rank + step) % WORLD, 0)
        tl.store(awaited_ptr, 0)
        tl.debug_barrier()
        for step in tl.static_range(1, WORLD):
            words = tl.load(pad_table + (rank + step) % WORLD).to(tl.pointer_type(tl.int32))
            if may_push(status_ptr):
                tl.atomic_xchg(words + landed_word + rank, MAX_CHUNKS, sem="release", scope="sys")
        for step in tl.static_range(1, WORLD):
            src = (rank + step) % WORLD
            wait_exactly(own_words + landed_word + src, MAX_CHUNKS, timeout_ns, status_ptr, src, signature)
            tl.store(own_words + landed_word + src, 0)


@triton.jit(do_not_specialize=["source", "own"])
def keep_kernel(
    received_ptr,
    whole_ptr,
    done_ptr,
    size,
    cols,
    inner,
    source,
    own,
    WORLD: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALONG_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Copy the `size` units (integers of any width) of rank `source`'s shard to their place in the gathered tensor.

    ALIGN units, a power of two, are read and written together: a run of units that lie together has a multiple of so
    many. With the `own` rank's shard it counts the call. It runs beside a GEMM, with few registers and no shared memory
    to speak of, and waits for nothing.
    """
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), PROGRAMS):
        index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        # one layout for both: two would need shared memory, which the GEMM may have
        there = place(index, cols, inner, source, WORLD, CONTIGUOUS, ALONG_LAST, size, ALIGN)
        here = tl.max_contiguous(tl.multiple_of(index, ALIGN), ALIGN)
        tl.store(whole_ptr + there, tl.load(received_ptr + here, mask=index < size), mask=index < size)
    if (source == own) & (tl.program_id(0) == 0):  # once a call
        tl.store(done_ptr + 1, tl.load(done_ptr + 1) + 1)


@triton.jit
def all_came(
    pad, first, epoch, signature, timeout_ns, status_ptr, awaited, rank, WORLD: tl.constexpr, STRIDE: tl.constexpr
):
    """As `data_came`, of all peers: 1 or 0, the same in all threads. Rank r's word is `pad + first + r * STRIDE`."""
    posted = epoch * SIGNATURES
    came = see_words(pad + first, posted + signature, posted + SIGNATURES, rank, STRIDE, WORLD)
    if came == 0:  # a peer is late, or makes another call
        came = came + 1
        for step in tl.static_range(1, WORLD):
            src = (rank + step) % WORLD
            word = pad + first + src * STRIDE
            came = came & data_came(word, epoch, signature, timeout_ns, status_ptr, src, awaited).to(tl.int32)
    return came


@triton.jit(do_not_specialize=["awaited", "signature", "rank"])
def push_gather_kernel(
    shard_ptr,
    scale_ptr,
    full_ptr,
    full_scale_ptr,
    size,
    cols,
    inner,
    numbers,
    inner_numbers,
    buffers,
    pads,
    slot_bytes,
    part_bytes,
    scales_offset,
    epoch_ptr,
    done_ptr,
    doing_ptr,
    timeout_ns,
    status_ptr,
    awaited,
    signature,
    rank,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    SCALE_TRAVELS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALONG_LAST: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """All-gather of `size` units (integers of any width) and, if they travel, fp32 scales: `numbers` of them.

    A shard's rows lie in blocks of `inner` between those of other ranks, and its scales in blocks of `inner_numbers`.
    A program takes `BLOCK` units and `NUMBERS` scales at a time, of each rank. If a shard did not come, the places of
    all others' are poisoned.
    """
    begin_call(doing_ptr, signature)
    pid = tl.program_id(0)
    epoch = tl.load(epoch_ptr) + 1
    slot = (epoch % 2) * slot_bytes
    table = buffers.to(tl.pointer_type(tl.int64))
    pad_table = pads.to(tl.pointer_type(tl.int64))
    unit = shard_ptr.dtype.element_ty
    blocks = tl.cdiv(size, BLOCK)
    peers, others = peers_of(pad_table, rank, WORLD)
    pad = tl.load(pad_table + rank)

    pushes = may_push(status_ptr)
    pushed_size, pushed_numbers = tl.where(pushes, size, 0), tl.where(pushes, numbers, 0)
    for block in range(pid, blocks, PROGRAMS):
        index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(shard_ptr + index, mask=index < size)
        for step in tl.static_range(1, WORLD):
            landing = tl.load(table + (rank + WORLD - step) % WORLD) + slot + rank * part_bytes
            landing = tl.multiple_of(landing.to(tl.pointer_type(unit)), 16)
            tl.store(landing + index, values, mask=index < pushed_size)
        where = place(index, cols, inner, rank, WORLD, CONTIGUOUS, ALONG_LAST, size)
        tl.store(full_ptr + where, values, mask=index < size)
    if SCALE_TRAVELS:
        for first in range(pid * NUMBERS, numbers, PROGRAMS * NUMBERS):
            index = first + tl.arange(0, NUMBERS)
            scales = tl.load(scale_ptr + index, mask=index < numbers)
            for step in tl.static_range(1, WORLD):
                landing = tl.load(table + (rank + WORLD - step) % WORLD) + slot + rank * part_bytes + scales_offset
                tl.store(landing.to(tl.pointer_type(tl.float32)) + index, scales, mask=index < pushed_numbers)
            where = (index // inner_numbers * WORLD + rank) * inner_numbers + index % inner_numbers
            tl.store(full_scale_ptr + where, scales, mask=index < numbers)
    word = epoch * SIGNATURES + signature
    post_words(peers, others, (rank * MAX_PROGRAMS + pid) * 8, word, pushes.to(tl.int32))
    came = all_came(pad, pid * 8, epoch, signature, timeout_ns, status_ptr, awaited, rank, WORLD, MAX_PROGRAMS * 8)

    sources = tl.arange(0, LANES).to(tl.int64)
    landed = tl.load(table + rank) + slot + sources * part_bytes
    units = tl.multiple_of(landed.to(tl.pointer_type(unit)), 16)[:, None]
    other_sources = ((sources < WORLD) & (sources != rank))[:, None]
    for block in range(pid, blocks, PROGRAMS):
        index = (tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
        mask = (index < size) & other_sources
        values = tl.load(units + index, mask=mask)
        values = values | tl.where(came != 0, 0, POISON).to(values.dtype)
        where = place(index, cols, inner, sources[:, None], WORLD, CONTIGUOUS, ALONG_LAST, size)
        tl.store(full_ptr + where, values, mask=mask)
    if SCALE_TRAVELS:
        scale_landed = (landed + scales_offset).to(tl.pointer_type(tl.float32))[:, None]
        for first in range(pid * NUMBERS, numbers, PROGRAMS * NUMBERS):
            index = (first + tl.arange(0, NUMBERS))[None, :]
            mask = (index < numbers) & other_sources
            scales = tl.load(scale_landed + index, mask=mask)
            where = (index // inner_numbers * WORLD + sources[:, None]) * inner_numbers + index % inner_numbers
            tl.store(full_scale_ptr + where, tl.where(came != 0, scales, float("nan")), mask=mask)
    end_call(epoch_ptr, epoch, done_ptr, doing_ptr, PROGRAMS)


@triton.jit(do_not_specialize=["awaited", "signature", "rank"])
def push_reduce_kernel(
    full_ptr,
    out_ptr,
    size,
    cols,
    inner,
    buffers,
    pads,
    slot_bytes,
    part_bytes,
    epoch_ptr,
    done_ptr,
    doing_ptr,
    timeout_ns,
    status_ptr,
    awaited,
    signature,
    factor,
    rank,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ALONG_LAST: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce-scatter: fp32 sum in rank order, times `factor`, rounded once. `size` elements in the own shard.

    The data on its way has the dtype of `full`, and the result that of `out`.
    """
    begin_call(doing_ptr, signature)
    pid = tl.program_id(0)
    epoch = tl.load(epoch_ptr) + 1
    slot = (epoch % 2) * slot_bytes
    table = buffers.to(tl.pointer_type(tl.int64))
    pad_table = pads.to(tl.pointer_type(tl.int64))
    dtype = full_ptr.dtype.element_ty
    blocks = tl.cdiv(size, BLOCK)
    peers, others = peers_of(pad_table, rank, WORLD)
    pad = tl.load(pad_table + rank)

    pushes = may_push(status_ptr)
    ranks = tl.arange(0, LANES).to(tl.int64)
    landings = tl.load(table + ranks, mask=ranks < WORLD, other=0) + slot + rank * part_bytes
    landings = tl.multiple_of(landings.to(tl.pointer_type(dtype)), 16)[:, None]
    other_ranks = ((ranks < WORLD) & (ranks != rank))[:, None]
    for block in range(pid, tl.where(pushes, blocks, 0), PROGRAMS):
        index = (tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
        where = place(index, cols, inner, ranks[:, None], WORLD, CONTIGUOUS, ALONG_LAST, size)
        mask = (index < size) & other_ranks
        tl.store(landings + index, tl.load(full_ptr + where, mask=mask), mask=mask)
    word = epoch * SIGNATURES + signature
    post_words(peers, others, (rank * MAX_PROGRAMS + pid) * 8, word, pushes.to(tl.int32))
    came = all_came(pad, pid * 8, epoch, signature, timeout_ns, status_ptr, awaited, rank, WORLD, MAX_PROGRAMS * 8)

    own = tl.load(table + rank) + slot
    for block in range(pid, blocks, PROGRAMS):
        index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for source_rank in tl.static_range(WORLD):
            source = tl.multiple_of((own + source_rank * part_bytes).to(tl.pointer_type(dtype)), 16)
            where = index
            if source_rank == rank:
                source = full_ptr
                where = place(index, cols, inner, rank, WORLD, CONTIGUOUS, ALONG_LAST, size)
            total += exact_f32(tl.load(source + where, mask=index < size, other=0.0))
        total = tl.where(came != 0, total * factor, float("nan"))
        tl.store(out_ptr + index, round_to(total, out_ptr.dtype.element_ty), mask=index < size)
    end_call(epoch_ptr, epoch, done_ptr, doing_ptr, PROGRAMS)


@triton.jit
def sum_of_ranks(own, others, part_bytes, index, size, came, factor, rank, WORLD: tl.constexpr):
    """fp32 sum in rank order, times `factor`, of elements `index` below `size`; NaN where data did not come.

    own: pointer to this rank's part, of which `others`, an address, has that of rank 0.
    """
    dtype = own.dtype.element_ty
    here = index < tl.where(came != 0, size, 0)
    total = tl.zeros(index.shape, dtype=tl.float32)
    for src in tl.static_range(WORLD):
        source = tl.multiple_of((others + src * part_bytes).to(tl.pointer_type(dtype)), 16)
        if src == rank:
            source = own
        total += exact_f32(tl.load(source + index, mask=here, other=0.0))
    return tl.where(here, total * factor, float("nan"))


@triton.jit
def extreme_of_ranks(own, others, part_bytes, index, size, came, rank, WORLD: tl.constexpr, REDUCE: tl.constexpr):
    """The largest ("max") of the ranks' elements `index` below `size`, or the smallest; poison where data did not come.

    The other arguments are as of `sum_of_ranks`. A NaN gives way to a number, as with NCCL.
    """
    dtype = own.dtype.element_ty
    here = index < tl.where(came != 0, size, 0)
    for src in tl.static_range(WORLD):
        source = tl.multiple_of((others + src * part_bytes).to(tl.pointer_type(dtype)), 16)
        if src == rank:
            source = own
        values = tl.load(source + index, mask=here, other=0)
        if dtype == tl.bfloat16 or dtype == tl.float16:
            values = exact_f32(values)
        if src == 0:
            found = values
        elif REDUCE == "max":
            found = tl.maximum(found, values)
        else:
            found = tl.minimum(found, values)
    if dtype == tl.bfloat16 or dtype == tl.float16:
        found = round_to(found, dtype)
    return poisoned(found, came)


@triton.jit
def poisoned(values, came):
    """`values`; NaN, or of integers `POISON`, where they did not come."""
    if values.dtype.is_floating():
        poison = tl.full(values.shape, float("nan"), tl.float32)
    else:
        poison = tl.full(values.shape, POISON, tl.int32)
    return tl.where(came != 0, values, poison.to(values.dtype))


@triton.jit(do_not_specialize=["awaited", "signature", "rank"])
def push_all_reduce_kernel(
    own_ptr,
    out_ptr,
    size,
    part,
    buffers,
    pads,
    slot_bytes,
    part_bytes,
    epoch_ptr,
    done_ptr,
    doing_ptr,
    timeout_ns,
    status_ptr,
    awaited,
    signature,
    factor,
    rank,
    WORLD: tl.constexpr,
    REDUCE: tl.constexpr,
    SHOTS: tl.constexpr,
    LANES: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All-reduce of `size` elements: fp32 sum in rank order, times `factor`, rounded once. `out` may be `own`.

    REDUCE: "sum", or in its place "max" or "min" of each element, in the dtypes of `wire.EXTREME_DTYPES`.

    SHOTS 1: every rank gets all that the others have, and adds. A `part` is the whole.
    SHOTS 2: rank r adds the elements from r * `part` on, and sends their sum to the others. Of the last ranks there may
    be fewer, or none. A part begins at a multiple of 16 bytes, so sums may be loaded and stored in as wide runs.

    The same bits come out of both, and on all ranks. A program has one run of blocks in every part, and waits only for
    programs of its number. What goes to all others, and what comes, is loaded at once: LANES are the ranks, and as many
    more as make a power of two.

    Words of sums come after those of parts, and their landings after those of parts. A slot is free for both by the
    same argument, since a rank posts sums before its call ends.
    """
    begin_call(doing_ptr, signature)
    pid = tl.program_id(0)
    epoch = tl.load(epoch_ptr) + 1
    slot = (epoch % 2) * slot_bytes
    table = buffers.to(tl.pointer_type(tl.int64))
    pad_table = pads.to(tl.pointer_type(tl.int64))
    dtype = own_ptr.dtype.element_ty
    blocks = tl.cdiv(part, BLOCK)
    peers, others = peers_of(pad_table, rank, WORLD)
    pad = tl.load(pad_table + rank)
    parts = tl.arange(0, LANES)
    others_of_part = parts != rank
    firsts = parts.to(tl.int64) * part
    counts = tl.minimum(part, size - firsts)  # of the ranks that there are not, 0 or less
    bases = tl.load(table + parts, mask=parts < WORLD, other=0)
    word = epoch * SIGNATURES + signature

    pushes = may_push(status_ptr)
    for block in range(pid, tl.where(pushes, blocks, 0), PROGRAMS):
        index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        if SHOTS == 1:
            values = tl.load(own_ptr + index, mask=index < size)
            for step in tl.static_range(1, WORLD):
                landing = tl.load(table + (rank + step) % WORLD) + slot + rank * part_bytes
                landing = tl.multiple_of(landing.to(tl.pointer_type(dtype)), 16)
                tl.store(landing + index, values, mask=index < size)
        else:
            landings = (bases + slot + rank * part_bytes).to(tl.pointer_type(dtype))
            landings = tl.multiple_of(landings, 16)[:, None] + index[None, :]
            mask = (index[None, :] < counts[:, None]) & others_of_part[:, None]
            values = tl.load(own_ptr + firsts[:, None] + index[None, :], mask=mask)
            tl.store(landings, values, mask=mask)
    pushed = pushes.to(tl.int32)
    post_words(peers, others, (rank * MAX_PROGRAMS + pid) * 8, word, pushed)
    came = all_came(pad, pid * 8, epoch, signature, timeout_ns, status_ptr, awaited, rank, WORLD, MAX_PROGRAMS * 8)

    landed = tl.load(table + rank) + slot
    first = tl.cast(rank, tl.int64) * part if SHOTS == 2 else tl.zeros((), tl.int64)
    count = tl.minimum(part, size - first)
    for block in range(pid, blocks, PROGRAMS):
        index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        if REDUCE == "sum":
            total = sum_of_ranks(own_ptr + first, landed, part_bytes, index, count, came, factor, rank, WORLD)
            total = round_to(total, dtype)
        else:
            total = extreme_of_ranks(own_ptr + first, landed, part_bytes, index, count, came, rank, WORLD, REDUCE)
        tl.store(out_ptr + first + index, total, mask=index < count)
        if SHOTS == 2:
            mask = index < tl.where((pushed & came) != 0, count, 0)
            for step in tl.static_range(1, WORLD):
                landing = tl.load(table + (rank + step) % WORLD) + slot + (WORLD + rank) * part_bytes
                landing = tl.multiple_of(landing.to(tl.pointer_type(dtype)), 16)
                tl.store(landing + index, total, mask=mask)
    if SHOTS == 2:
        offset = ((WORLD + rank) * MAX_PROGRAMS + pid) * 8
        post_words(peers, others, offset, word, pushed & came)
        came = came & all_came(
            pad, (WORLD * MAX_PROGRAMS + pid) * 8, epoch, signature, timeout_ns, status_ptr, awaited, rank, WORLD,
            MAX_PROGRAMS * 8,
        )  # fmt: skip
        sums = (landed + (WORLD + parts) * part_bytes).to(tl.pointer_type(dtype))
        for block in range(pid, blocks, PROGRAMS):
            index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            mask = (index[None, :] < counts[:, None]) & others_of_part[:, None]
            there = tl.multiple_of(sums, 16)[:, None] + index[None, :]
            values = tl.load(there, mask=mask & (index[None, :] < tl.where(came != 0, size, 0)))
            tl.store(out_ptr + firsts[:, None] + index[None, :], poisoned(values, came), mask=mask)
    end_call(epoch_ptr, epoch, done_ptr, doing_ptr, PROGRAMS)


@triton.jit(do_not_specialize=["rank", "tiles", "own_tiles"])
def reduce_kernel(
    own_ptr,
    received_ptr,
    out_ptr,
    sums_ptr,
    progress,
    arrived,
    done_ptr,
    size,
    own_size,
    chunk_size,
    tiles,
    own_tiles,
    factor,
    rank,
    WORLD: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    MAX_OWN: tl.constexpr,
    SHARES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """The own rows' sum over ranks: part by part, while the GEMM that fills the later ones may still run.

    own [R, N], received [WORLD - 1, R, N] (of all others, by rank), of one dtype, and out [R, N], of that or another,
    contiguous, of `size` elements each. The own rows are cut into parts of `own_size` elements, and those of others
    into chunks of `chunk_size`. Where there are several parts `own_size` is a multiple of ALIGN, a power of two up to
    8. For part c it waits until progress[c] is the number of its tiles, which are `own_tiles` of all `tiles` or, at the
    end, fewer, and until each arrived[src] counts the chunk that it ends in: chunks come in order. At the end it clears
    these words, and counts the call. fp32 sum in rank order, times `factor`, rounded once: bits do not depend on
    timing. `out` may be `own`. SHARES: it goes to `sums` as well, from where peers pull it.

    It runs beside the GEMM on the same SMs (few registers, no shared memory), and never the other way round: the GEMM
    does not wait for it.
    """
    pid = tl.program_id(0)
    dtype = out_ptr.dtype.element_ty
    here = -1
    for part in range(1 + (size - 1) // own_size):
        begin = part * own_size
        end = begin + tl.minimum(own_size, size - begin)
        come = tl.minimum((end - 1) // chunk_size, MAX_CHUNKS - 1)
        zero = 0
        for src in tl.static_range(WORLD):
            known = (src == rank) | (come == here)
            zero += await_word(arrived + src, come + 1, known.to(tl.int32))
        here = come
        zero += await_word(progress + part, tl.minimum(own_tiles, tiles - part * own_tiles), 0)
        for block in range(pid, tl.cdiv(end - begin, BLOCK), PROGRAMS):
            index = begin + tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK) + zero
            index = tl.max_contiguous(tl.multiple_of(index, ALIGN), 8)
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for src in tl.static_range(WORLD):
                source = received_ptr + (src - tl.where(src > rank, 1, 0)) * tl.cast(size, tl.int64)
                if src == rank:
                    source = own_ptr
                source = tl.multiple_of(source, 16)
                total += exact_f32(tl.load(source + index, mask=index < end, other=0.0))
            rounded = round_to(total * factor, dtype)
            tl.store(out_ptr + index, rounded, mask=index < end)
            if SHARES:
                tl.store(sums_ptr + index, rounded, mask=index < end)

    tl.debug_barrier()
    if tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
        tl.store(done_ptr, 0)
        tl.store(done_ptr + 1, tl.load(done_ptr + 1) + 1)
        tl.store(progress + tl.arange(0, MAX_OWN), 0)
        tl.store(arrived + tl.arange(0, 8), 0)
