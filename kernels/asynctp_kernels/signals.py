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
def post_word(address: tl.tensor, epoch: tl.tensor) -> None:
    """Publish all earlier stores of this program and set the word to `epoch`.

    The barrier is the fence between threads: every thread's stores happen before the one thread that
    releases (a release orders only the stores that its own thread has observed).
    """
    tl.debug_barrier()
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int64)), epoch, sem="release", scope="sys")


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
        waiting = tl.load(status_ptr) == 0
        while waiting:
            found = load_acquire(word)
            if found >= value:
                waiting = tl.load(status_ptr) < 0
            else:
                waiting = tl.load(status_ptr) == 0
                if clock_ns() - start > timeout_ns:
                    record_timeout(status_ptr, peer, index)
                    waiting = tl.load(status_ptr) < 0
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
        waiting = tl.load(status_ptr) == 0
        while waiting:
            found = load_acquire(word)
            if found == value:
                waiting = tl.load(status_ptr) < 0
            else:
                waiting = tl.load(status_ptr) == 0
                if INTERPRETED:  # noqa: SIM102 - a constexpr
                    if found != 0:
                        record_unlike(status_ptr, peer, call, found)
                if clock_ns() - start > timeout_ns:
                    record_timeout(status_ptr, peer, call)
    tl.debug_barrier()


def new_status(device: torch.device) -> torch.Tensor:
    """A status tensor with no failure in it. Shape: [STATUS_WORDS] int64."""
    return torch.zeros(STATUS_WORDS, dtype=torch.int64, device=device)
