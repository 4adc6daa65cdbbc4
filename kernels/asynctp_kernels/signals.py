"""Signal words: how a kernel tells another rank that data has landed, and how it waits for that.

A word is an int64 that only grows: its value is the last epoch (call number) whose data is complete. A
waiter accepts any value that is not smaller, so nothing is ever reset, and 2^63 calls do not wrap.

Memory order. The writer's data stores come first, then one release of the word; the reader acquires the
word, then loads the data. Both sides use scope "sys", since the other side is another device (or another
process). The pair is what makes the data visible: PTX ISA, "Memory Consistency Model", release and acquire
patterns; in the interpreter the same calls are C++ atomics of the same order.

Waits are bounded. A kernel cannot raise, so a wait that runs out writes one record to a status tensor, and
every later wait with that status returns at once, as every wait does once the host has set it; the host reads the
record and raises. A wait gives the value that it saw, so a kernel can tell data from none.
"""

# triton ships no types: its decorator is untyped
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl

IS_INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
INTERPRETED = tl.constexpr(IS_INTERPRETED)

STATUS_WORDS = 3  # state, peer, number of what was awaited
FAILED = 2  # the state: 0 while no wait has run out, 1 while the first that did is being recorded
UNLIKE = 1 << 31  # a number from here on holds two calls' signatures: theirs times this, and this rank's
POLL_PAUSE_S = 100e-6

if IS_INTERPRETED:

    def clock_ns() -> int:
        """Nanoseconds of a monotonic clock; also lets the peer run, which may share this core."""
        time.sleep(POLL_PAUSE_S)
        return time.monotonic_ns()

else:

    @triton.jit
    def clock_ns() -> tl.tensor:
        """Nanoseconds of the device's global timer."""
        return tl.extra.cuda.globaltimer()


@triton.jit
def load_acquire(word: tl.tensor) -> tl.tensor:
    """The value at pointer `word`; later loads of this program see what its writer stored before it.

    Adding zero, because plain loads carry no order and Triton before 3.8 has no ordered load.
    """
    return tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def peers_of(table: tl.tensor, rank: tl.tensor, WORLD: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Addresses of all ranks' words, from int64 pointer `table`, and a mask of the other ranks. Shapes: [8]."""
    ranks = tl.arange(0, 8)
    others = (ranks < WORLD) & (ranks != rank)
    return tl.load(table + ranks, mask=others, other=0), others


@triton.jit
def post_words(pads: tl.tensor, others: tl.tensor, offset: tl.tensor, value: tl.tensor, posts: tl.tensor) -> None:
    """Publish all earlier stores of this program, and set each peer's word to `value`, by a thread for each.

    The barrier is the fence between threads: every thread's stores happen before the threads that release, and a
    release orders only the stores that its own thread has observed. The releases wait for the stores together.

    pads, others: as `peers_of` gives them. posts: 1, or 0 for nothing.
    """
    tl.debug_barrier()
    words = (pads + offset).to(tl.pointer_type(tl.int64))
    none = tl.zeros_like(pads)
    tl.atomic_xchg(words, none + value, mask=others & (none < posts), sem="release", scope="sys")


if IS_INTERPRETED:

    @triton.jit
    def all_true(holds: tl.tensor) -> tl.tensor:
        """As below."""
        return holds.to(tl.int32)

    @triton.jit
    def see_words(
        words: tl.tensor,
        value: tl.tensor,
        next_value: tl.tensor,
        rank: tl.tensor,
        STRIDE: tl.constexpr,
        WORLD: tl.constexpr,
    ) -> tl.tensor:
        """As below. `wait_word` has to look."""
        return tl.full((), 0, tl.int32)

else:

    @triton.jit
    def all_true(holds: tl.tensor) -> tl.tensor:
        """Whether `holds` is true in all threads of the program: 1 or 0, the same in all of them. It is a barrier."""
        return tl.inline_asm_elementwise(
            """{
                .reg .pred p, q;
                setp.ne.s32 p, $1, 0;
                bar.red.and.pred q, 0, p;
                selp.s32 $0, 1, 0, q; }""",
            "=r,r",
            [holds.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def see_words(
        words: tl.tensor,
        value: tl.tensor,
        next_value: tl.tensor,
        rank: tl.tensor,
        STRIDE: tl.constexpr,
        WORLD: tl.constexpr,
    ) -> tl.tensor:
        """Whether every peer's word becomes `value`, or at least `next_value`, in some milliseconds: 1 or 0.

        words: address of rank 0's int64 word; the others are STRIDE bytes apart. A thread polls for each peer, so the
        words are seen together. The barrier hands their acquires to the program's other threads.
        """
        return tl.inline_asm_elementwise(
            """{
                .reg .pred p, q, here; .reg .u32 t, left; .reg .u64 a; .reg .s64 v;
                mov.u32 t, %tid.x;
                mov.u32 left, 4096;
                setp.eq.u32 here, t, t;
                setp.ge.u32 q, t, $6;
                @q bra DONE;
                setp.eq.u32 q, t, $4;
                @q bra DONE;
                mad.wide.u32 a, t, $5, $1;
              POLL:
                ld.acquire.sys.global.s64 v, [a];
                setp.eq.s64 here, v, $2;
                @here bra DONE;
                setp.ge.s64 here, v, $3;
                @here bra DONE;
                sub.u32 left, left, 1;
                setp.ne.u32 p, left, 0;
                @p bra POLL;
              DONE:
                barrier.red.and.pred q, 0, here;
                selp.s32 $0, 1, 0, q; }""",
            "=r,l,l,l,r,r,r",
            [words, value, next_value, rank, STRIDE, WORLD],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def none_failed(status_ptr: tl.tensor) -> tl.tensor:
    """Whether no wait of this rank has failed: the same in all threads, though another program may say so meanwhile.

    Threads that did not agree would come to different barriers.
    """
    return all_true(tl.load(status_ptr) == 0) != 0


@triton.jit
def record_timeout(status_ptr: tl.tensor, peer: tl.tensor, index: tl.tensor) -> None:
    """Write the first failure of this launch; later ones change nothing."""
    none = tl.full((), 0, tl.int64)
    if tl.atomic_cas(status_ptr, none, none + 1) == 0:
        tl.store(status_ptr + 1, peer)
        tl.store(status_ptr + 2, index)
        tl.debug_barrier()
        tl.atomic_add(status_ptr, 1, sem="release", scope="sys")


@triton.jit
def record_unlike(status_ptr: tl.tensor, peer: tl.tensor, own: tl.tensor, theirs: tl.tensor) -> None:
    """Record that a peer makes another call, of signature `theirs`, than this rank, as the first failure."""
    record_timeout(status_ptr, peer, (tl.cast(theirs, tl.int64) << 31) + own)


@triton.jit
def wait_word(
    address: tl.tensor,
    value: tl.tensor,
    timeout_ns: tl.tensor,
    status_ptr: tl.tensor,
    peer: tl.tensor,
    index: tl.tensor,
) -> tl.tensor:
    """Wait until the int64 at `address` is at least `value`, at most `timeout_ns`; gives the last value seen.

    The barrier after the acquire hands the polling thread's observation to the program's other threads.
    """
    word = address.to(tl.pointer_type(tl.int64))
    found = load_acquire(word)
    if found < value:
        start = clock_ns()
        waiting = none_failed(status_ptr)
        while waiting:
            found = load_acquire(word)
            if found >= value:
                waiting = found < value
            else:
                waiting = none_failed(status_ptr)
                if all_true(clock_ns() - start <= timeout_ns) == 0:
                    record_timeout(status_ptr, peer, index)
                    waiting = found >= value
    tl.debug_barrier()
    return found


@triton.jit
def wait_exactly(
    word: tl.tensor,
    value: tl.tensor,
    timeout_ns: tl.tensor,
    status_ptr: tl.tensor,
    peer: tl.tensor,
    call: tl.tensor,
) -> None:
    """Wait until pointer `word` holds `value`, at most `timeout_ns`, or until the status is set.

    call: the signature of this rank's, for the record. The interpreter records another value than 0 as well; a GPU's
    waits are watched over by the host.
    """
    found = load_acquire(word)
    if found != value:
        start = clock_ns()
        waiting = none_failed(status_ptr)
        while waiting:
            found = load_acquire(word)
            if found == value:
                waiting = found != value
            else:
                waiting = none_failed(status_ptr)
                if INTERPRETED:  # noqa: SIM102 - a constexpr
                    if found != 0:
                        record_unlike(status_ptr, peer, call, found)
                if all_true(clock_ns() - start <= timeout_ns) == 0:
                    record_timeout(status_ptr, peer, call)
    tl.debug_barrier()


def new_status(device: torch.device) -> torch.Tensor:
    """A status tensor with no failure in it. Shape: [STATUS_WORDS] int64."""
    return torch.zeros(STATUS_WORDS, dtype=torch.int64, device=device)
