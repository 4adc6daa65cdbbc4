"""The persistent TMA GEMM of both fused ops, and the words through which it meets the copy engine.

    gather    for each source, own first:       wait(chunk) → A[source] @ B, B, … → C, C, …
              (`async_input`: for each chunk, from a pivot on)
    scatter   for each destination, own last:   Σ A @ B → staging[destination] → publish(chunk)

One flat loop over tiles (`flatten=True`: the loads of the next tile start while this one is stored). What would hold it
up is done seldom, and when it costs least: a CTA awaits a chunk once, not for each of its tiles, and publishes its
tiles of a chunk together, some steps into the first tile of another one, when their stores are over. It sees A and C as
blocks of rows and never names a rank's data by a row number:

    A, C: [blocks, Q, columns]      block p * W + r holds rank r's Q rows of outer index p

so a gather or scatter dim other than 0 is only another order of blocks, and a ragged Q ends at the edge of its
block: TMA reads zeros beyond it and does not write there.

Which tensor a tile belongs to (own or gathered A, one of several Bs, one of several summed matmuls) is a choice
between descriptors, not between loops: it compiles to a select of two addresses.

Memory order, with the source of every fence:
- `await_word`: one thread polls with ld.acquire.sys (the word's writer is a stream, of this GPU or of another),
  bar.sync hands that to the CTA's other threads (PTX ISA, causality order goes through barriers), and
  fence.proxy.async orders the TMA loads that follow, which are made in another proxy (PTX ISA, "Async proxy"): those
  of all later tiles of the chunk, too.
- `publish`: cp.async.bulk.wait_group 0 waits for the *writes* of this CTA's TMA stores (Triton itself waits only for
  their reads of shared memory), bar.sync joins the CTA's threads, fence.proxy.async orders the two proxies, and one
  red.release.gpu makes all of it visible to whoever sees the count; gpu scope is enough, because the readers (this
  GPU's front end, its copy engine and its reduce kernel) are behind the same L2.
"""

# triton ships no types: its decorator is untyped
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from asynctp_kernels.numerics import exact_f32, round_to, scale_and_bias
from asynctp_kernels.signals import INTERPRETED, IS_INTERPRETED, load_acquire

if IS_INTERPRETED:

    def await_word(word: tl.tensor, value: tl.tensor, known: tl.tensor) -> int:
        """As below. What this process does comes in one order, so that every word is there (`interpreted`)."""
        if not known and load_acquire(word) < value:
            raise RuntimeError("a kernel waits for a word that nothing sets any more")
        return 0

    def publish(counter: tl.tensor, count: tl.tensor) -> None:
        """As below."""
        if count != 0:
            tl.atomic_add(counter, count, sem="release", scope="gpu")

    def prefetch(pointers: tl.tensor, mask: tl.tensor) -> None:
        """Nothing: there is no cache."""

else:

    @triton.jit
    def await_word(word: tl.tensor, value: tl.tensor, known: tl.tensor) -> tl.tensor:
        """Wait until the int32 at `word` is at least `value`. Gives 0, to be added to what must come after the wait.

        known: not 0 where there is nothing to wait for, as far as this whole CTA knows.
        """
        return tl.inline_asm_elementwise(
            """{
                .reg .pred p, q; .reg .u32 t; .reg .s32 v;
                setp.ne.s32 q, $3, 0;
                @q bra.uni KNOWN;
                mov.u32 t, %tid.x; setp.ne.u32 q, t, 0;
                @q bra DONE;
              POLL:
                ld.acquire.sys.global.s32 v, [$1];
                setp.lt.s32 p, v, $2;
                @p bra POLL;
              DONE:
                bar.sync 0;
                fence.proxy.async;
              KNOWN:
                mov.u32 $0, 0; }""",
            "=r,l,r,r",
            [word, value, known],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def publish(counter: tl.tensor, count: tl.tensor) -> None:
        """Add `count` to the int32 at `counter` once every TMA store of this CTA so far is visible to this GPU.

        0 does nothing, and waits for nothing.
        """
        tl.inline_asm_elementwise(
            """{
                .reg .pred p, q; .reg .u32 t;
                setp.eq.s32 q, $2, 0;
                @q bra.uni NOTHING;
                cp.async.bulk.wait_group 0;
                bar.sync 0;
                mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
                @p fence.proxy.async;
                @p red.release.gpu.global.add.u32 [$1], $2;
              NOTHING:
                mov.u32 $0, 0; }""",
            "=r,l,r",
            [counter, count],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def prefetch(pointers: tl.tensor, mask: tl.tensor) -> None:
        """Bring data that does not change while the kernel runs to L1, where the mask is true."""
        tl.inline_asm_elementwise(
            """{
                .reg .pred p;
                setp.ne.s32 p, $2, 0;
                @p prefetch.global.L1 [$1];
                mov.u32 $0, 0; }""",
            "=r,l,r",
            [pointers, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


#: tiles are published among the matmuls of the next one, after so many steps over K more than one: by then their
#: stores are over
LATE = tl.constexpr(2)


@triton.jit
def tile_of(
    tile: tl.tensor,
    tiles_m: tl.tensor,
    tiles_n: tl.tensor,
    rank: tl.tensor,
    world: tl.tensor,
    chunk: tl.tensor,
    own_tiles: tl.tensor,
    inner: tl.tensor,
    GATHER: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BM: tl.constexpr,
) -> tuple:
    """(step, rank whose rows it is of, row tile, column tile, number of its chunk's word) of tile number `tile`.

    A gather's chunk has `chunk` rows, and a tile needs the one that its last row is in, since chunks come in order; a
    scatter's has `chunk` row tiles.

    A gather's steps begin with the own rows, a scatter's end with them. Of one rank's tiles columns of `GROUP_M` row
    tiles come one after the other, so that neighbours share A and B; chunks of own rows that are no longer than that
    come whole, since the last one is left to reduce at the end.
    """
    per_rank = tiles_m * tiles_n
    step = tile // per_rank
    peer = (rank + step + (0 if GATHER else 1)) % world
    group = GROUP_M
    if not GATHER:
        chunk = tl.where(step == world - 1, own_tiles, chunk)
        group = tl.minimum(GROUP_M, chunk)
    per_group = group * tiles_n
    first = (tile % per_rank) // per_group * group
    height = tl.minimum(tiles_m - first, group)
    within = (tile % per_rank) % per_group
    tile_m = first + within % height
    number = tile_m // chunk
    if GATHER:
        tiles_q = tl.cdiv(inner, BM)
        last = tile_m // tiles_q * inner + tl.minimum((tile_m % tiles_q + 1) * BM, inner) - 1
        number = tl.minimum(last // chunk, CHUNKS - 1)
    return step, peer, tile_m, within // height, peer * CHUNKS + number


@triton.jit
def share_of(program: tl.tensor, tiles: tl.tensor, SLOTS: tl.constexpr, PROGRAMS: tl.constexpr) -> tuple:
    """(first tile, end) of a program, which takes every `SLOTS`-th tile between them.

    There is an SM for each program of a share, and the next share's start as SMs become free. Each share has half of
    the waves that are left, the last one all. So a program that finds its SM taken by another kernel holds up its
    share alone.
    """
    waves = tl.cdiv(tiles, SLOTS)
    share = program // SLOTS
    first = 0
    end = waves
    taken = 0
    for i in tl.static_range(PROGRAMS // SLOTS - 1):
        taken += (waves - taken + 1) // 2
        first = tl.where(share > i, taken, first)
        end = tl.where(share == i, taken, end)
    return first * SLOTS + program % SLOTS, tl.minimum(end * SLOTS, tiles)


@triton.jit
def ends_of(
    size0: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    size3: tl.tensor,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
) -> tl.tuple:
    """(where each of four sizes ends, one after the other, in blocks; where number `COUNT` does).

    Column tiles of several Bs, or steps over K of several pairs.
    """
    e1 = tl.cdiv(size0, BLOCK)
    e2 = e1 + tl.cdiv(size1, BLOCK)
    e3 = e2 + tl.cdiv(size2, BLOCK)
    e4 = e3 + tl.cdiv(size3, BLOCK)
    end = e1
    if COUNT == 2:
        end = e2
    if COUNT == 3:
        end = e3
    if COUNT == 4:
        end = e4
    return e1, e2, e3, e4, end


@triton.jit
def store_tile(
    c: tl.tensor,
    block: tl.tensor,
    row: tl.tensor,
    col: tl.tensor,
    acc: tl.tensor,
    OUT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Round `acc` and store it through the descriptor `c`: whole, or (SPLIT 2) half of its columns after the other.

    Halves need half the shared memory on their way out. What that leaves is a stage or two more of the loop over K.
    """
    if SPLIT == 1:
        c.store([block, row, col], round_to(acc, OUT).reshape(1, BM, BN))
    else:
        left, right = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        c.store([block, row, col], round_to(left, OUT).reshape(1, BM, BN // 2))
        c.store([block, row, col + BN // 2], round_to(right, OUT).reshape(1, BM, BN // 2))


@triton.jit
def multiply(a: tl.tensor, b: tl.tensor, acc: tl.tensor, B_K_MAJOR: tl.constexpr, IMPRECISE: tl.constexpr) -> tl.tensor:
    """acc + a @ b. `IMPRECISE` bounds fp8's running sums in the tensor core (None: the default, fast)."""
    if B_K_MAJOR:
        b = b.T
    if INTERPRETED:
        return tl.dot(exact_f32(a), exact_f32(b), acc, input_precision="ieee")
    return tl.dot(a, b, acc, max_num_imprecise_acc=IMPRECISE)


#: what a GEMM's launches may differ in from the example that it is compiled for, but for addresses
PROMISES = {
    "do_not_specialize_on_alignment": [
        *("a_scale0", "a_scale1", "a_scale2", "a_scale3"),
        *("b_scale0", "b_scale1", "b_scale2", "b_scale3", "bias0", "bias1", "bias2", "bias3"),
    ],
    "do_not_specialize": [
        *("outer", "inner", "k0", "k1", "k2", "k3", "n0", "n1", "n2", "n3"),
        *("rank", "world", "chunk_size", "own_tiles", "value", "real_rows"),
    ],
}


@triton.jit(**PROMISES)
def gemm_kernel(
    a0,
    a1,
    a2,
    a3,
    b0,
    b1,
    b2,
    b3,
    c0,
    c1,
    c2,
    c3,
    a_scale0,
    a_scale1,
    a_scale2,
    a_scale3,
    b_scale0,
    b_scale1,
    b_scale2,
    b_scale3,
    bias0,
    bias1,
    bias2,
    bias3,
    words,
    done_ptr,
    outer,
    inner,
    k0,
    k1,
    k2,
    k3,
    n0,
    n1,
    n2,
    n3,
    rank,
    world,
    chunk_size,
    own_tiles,
    value,
    real_rows,
    GATHER: tl.constexpr,
    OWN: tl.constexpr,
    INBOX: tl.constexpr,
    CLEARS: tl.constexpr,
    COUNT: tl.constexpr,
    CHUNKS: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    A_SCALE: tl.constexpr,
    SCALE_TRAVELS: tl.constexpr,
    B_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    OUT: tl.constexpr,
    ROUNDED: tl.constexpr,
    IMPRECISE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP_M: tl.constexpr,
    SLOTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FACTOR: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Every matmul of a gather, or every destination of a scatter; `COUNT` is the number of Bs, or of pairs.

    GATHER: a0 [P, Q, K] the own rows, a1 [P*W, Q, K] the gathered ones (own part never read; INBOX: the others' only,
        [(W-1)*P, Q, K], by source), b [N, K] or [K, N], c [P*W, Q, N]; b_scale, bias: of each B. words: int32
        [W], how many chunks of a source are in a1 (and its scales in a_scale1, in the same order; a_scale0 holds the
        own ones, if they travel). CLEARS: no other reader of the words is left at the end. Not OWN: all rows are in a0
        and have words, which are awaited to be `value` and are left as they are.
    else: a [P*W, Q, K], b as above, c0 [W*P, Q, N] in memory order [destination, p], so that what goes to one rank
        is contiguous. words: int32 [W, CHUNKS], counts the finished tiles of chunk (destination, c). Each pair has its
        own scales; with several there is no bias. PADDED: zeros are stored after the first `real_rows` of the W*Q rows
        of each p.

    A chunk is `chunk_size` rows of a gather's source, or row tiles of a scatter's destination; of a scatter's own rows,
    `own_tiles` row tiles. A scale is absent (0), one element (1, 3), or one per row or column (2). A matmul is rounded
    to ROUNDED, multiplied by FACTOR, and stored as OUT, which may be wider.
    """
    tiles_q = tl.cdiv(inner, BM)
    tiles_m = outer * tiles_q
    if GATHER:
        e1, e2, e3, e4, tiles_n = ends_of(n0, n1, n2, n3, BN, COUNT)
        steps_k = tl.cdiv(k0, BK)
    else:
        e1, e2, e3, e4, steps_k = ends_of(k0, k1, k2, k3, BK, COUNT)
        tiles_n = tl.cdiv(n0, BN)
    tiles = tiles_m * tiles_n * world
    EACH: tl.constexpr = not GATHER and COUNT > 1 and A_SCALE > 0  # matmuls are scaled before they are added
    LATER: tl.constexpr = not GATHER and not EACH  # two accumulators leave no registers to remember a chunk in
    # Scales of rows are loaded where tiles are counted, as at the end of the matmuls all would wait for them. In the
    # layout that they are used in they take two registers; those of columns would take 64, and are prefetched instead.
    EARLY: tl.constexpr = LATER and A_SCALE == 2
    awaited = -1  # the chunk that was awaited last
    # One more than the chunk of the tile before this one, and how many tiles of that are made here and not counted.
    # Triton (3.6 to 3.9) makes one loop of this and of that over K, where what a tile hands on, and is made before that
    # over K, changes at its first step already. So it is made behind it, as `chunk` itself, without the one, is not;
    # `tests/support/gemm_runs.py` checks what comes of it.
    behind = 0
    uncounted = 0
    first_mine, end = share_of(tl.program_id(0), tiles, SLOTS, PROGRAMS)
    for tile in tl.range(first_mine, end, SLOTS, flatten=True):
        step, peer, tile_m, tile_n, chunk = tile_of(
            tile, tiles_m, tiles_n, rank, world, chunk_size, own_tiles, inner, GATHER, CHUNKS, GROUP_M, BM
        )
        p = tile_m // tiles_q
        q = (tile_m % tiles_q) * BM
        block = p * world + peer

        b_out = b0
        c = c0
        n = n0
        first_tile = 0
        a_out = a0
        a_block = block
        if GATHER:
            if COUNT > 1:
                if tile_n >= e1:
                    b_out = b1
                    c = c1
                    n = n1
                    first_tile = e1
            if COUNT > 2:
                if tile_n >= e2:
                    b_out = b2
                    c = c2
                    n = n2
                    first_tile = e2
            if COUNT > 3:
                if tile_n >= e3:
                    b_out = b3
                    c = c3
                    n = n3
                    first_tile = e3
            known = chunk == awaited
            awaited = chunk
            if OWN:
                known = known | (step == 0)
                a_block = p
                if step > 0:
                    a_out = a1
                    a_block = block
                    if INBOX:
                        a_block = tl.where(peer > rank, peer - 1, peer) * outer + p
                a_block += await_word(words + peer, chunk - peer * CHUNKS + 1, known.to(tl.int32))
            else:
                a_block += await_word(words + chunk, value, known.to(tl.int32))
        col = (tile_n - first_tile) * BN

        acc = tl.zeros((BM, BN), dtype=tl.float32)
        if EARLY:
            of_rows = tl.zeros((BM,), dtype=tl.float32)
        if EACH:
            total = tl.zeros((BM, BN), dtype=tl.float32)
        for step_k in range(steps_k):
            a = a_out
            b = b_out
            at_k = step_k * BK
            a_scale = a_scale0
            b_scale = b_scale0
            if not GATHER:
                if COUNT > 1:
                    if step_k >= e1:
                        a = a1
                        b = b1
                        at_k = (step_k - e1) * BK
                        a_scale = a_scale1
                        b_scale = b_scale1
                if COUNT > 2:
                    if step_k >= e2:
                        a = a2
                        b = b2
                        at_k = (step_k - e2) * BK
                        a_scale = a_scale2
                        b_scale = b_scale2
                if COUNT > 3:
                    if step_k >= e3:
                        a = a3
                        b = b3
                        at_k = (step_k - e3) * BK
                        a_scale = a_scale3
                        b_scale = b_scale3
            a_tile = a.load([a_block, q, at_k]).reshape(BM, BK)
            if B_K_MAJOR:
                b_tile = b.load([col, at_k])
            else:
                b_tile = b.load([at_k, col])
            acc = multiply(a_tile, b_tile, acc, B_K_MAJOR, IMPRECISE)
            if LATER:
                if step_k == tl.minimum(LATE, steps_k - 1):
                    publish(words + behind - 1, tl.where(chunk == behind - 1, 0, uncounted))
                    if EARLY:
                        in_block = q + tl.arange(0, BM)
                        of_rows = tl.load(a_scale0 + block * inner + in_block, mask=in_block < inner, other=0.0)
                        if B_SCALE == 1:
                            of_rows = of_rows * tl.load(b_scale0)
                    if B_SCALE == 2:
                        cols = col + tl.arange(0, BN)
                        prefetch(b_scale0 + cols, cols < n)
            if EACH:
                ended = step_k + 1
                if (ended == e1) | (ended == e2) | (ended == e3) | (ended == e4):
                    in_block = q + tl.arange(0, BM)
                    rows = block * inner + in_block
                    rows_in = in_block < inner
                    cols = col + tl.arange(0, BN)
                    cols_in = cols < n
                    total += scale_and_bias(acc, a_scale, rows, rows_in, b_scale, None, cols, cols_in, A_SCALE, B_SCALE)
                    acc = tl.zeros((BM, BN), dtype=tl.float32)

        if EACH:
            acc = total
        elif A_SCALE + B_SCALE + BIAS > 0:
            in_block = q + tl.arange(0, BM)
            rows = block * inner + in_block
            a_scale = a_scale0
            if SCALE_TRAVELS:
                rows = a_block * inner + in_block
                if step > 0:
                    a_scale = a_scale1
            b_scale = b_scale0
            bias = bias0
            if GATHER:
                if COUNT > 1:
                    if tile_n >= e1:
                        b_scale = b_scale1
                        bias = bias1
                if COUNT > 2:
                    if tile_n >= e2:
                        b_scale = b_scale2
                        bias = bias2
                if COUNT > 3:
                    if tile_n >= e3:
                        b_scale = b_scale3
                        bias = bias3
            cols = col + tl.arange(0, BN)
            if not BIAS:
                bias = None
            if EARLY:
                acc = acc * of_rows[:, None]  # of B's one element, too
            acc = scale_and_bias(
                acc, a_scale, rows, in_block < inner, b_scale, bias, cols, cols < n, 0 if EARLY else A_SCALE, B_SCALE
            )
        c_block = block
        if not GATHER:
            c_block = peer * outer + p
        if (ROUNDED != OUT) or (FACTOR != 1.0):
            acc = exact_f32(round_to(acc, ROUNDED))
        if FACTOR != 1.0:
            acc = acc * FACTOR
        if PADDED:
            acc = tl.where((peer * inner + q + tl.arange(0, BM) < real_rows)[:, None], acc, 0.0)
        if LATER:
            uncounted = tl.where(chunk == behind - 1, uncounted, 0) + 1
            behind = chunk + 1
        store_tile(c, c_block, q, col, acc, OUT, BM, BN, SPLIT)
        if EACH:
            after = tile + SLOTS
            following = tile_of(
                after, tiles_m, tiles_n, rank, world, chunk_size, own_tiles, inner, GATHER, CHUNKS, GROUP_M, BM
            )
            stays = (chunk == following[4]) & (after < end)
            publish(words + chunk, tl.where(stays, 0, uncounted + 1))
            uncounted = tl.where(stays, uncounted + 1, 0)
    if LATER:
        publish(words + behind - 1, uncounted)
    if OWN:
        # every program is done with the words: count the call, and leave them cleared for the next one
        tl.debug_barrier()
        if tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
            tl.store(done_ptr, 0)
            tl.store(done_ptr + 1, tl.load(done_ptr + 1) + 1)
            if CLEARS:
                tl.store(words + tl.arange(0, 8), 0)
