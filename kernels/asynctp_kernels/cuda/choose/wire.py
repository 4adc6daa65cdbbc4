"""The wire of a call: how its data travels, as a function of facts that all ranks of a group share.

Ranks share the collective: its kind, its bytes and dtype, and the group. They need not share anything else: what a rank
multiplies by, how it views a tensor, whether it multiplies at all. So the transport is chosen here, of these facts
alone, and what a rank computes beside it (`select`) is its own:

    direct    one kernel pushes and collects all: little latency              `copy_kernels.push_*_kernel`
    push      copy engines push into inboxes, chunk by chunk: it overlaps     `script.push_script`
    pull      copy engines pull shards to where all ranks keep them           `script.pull_script`
    plain     the backend's own collective (NCCL)

Unlike calls that meet are found: a call's `signature` is on the wire, in words that are awaited anyway.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from asynctp_kernels.signals import IS_INTERPRETED

DIRECT, PUSH, PULL, PLAIN = "direct", "push", "pull", "plain"
#: of implementations, by the names that users give and see: the transports by which they can move a call's data. Where
#: all ranks ask for one by name, its first is the call's. `cuda.implementations` fills it, from its tables.
TRANSPORTS: dict[str, tuple[str, ...]] = {}
SUMMED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INT32_LIMIT = (1 << 31) - (1 << 16)  # what kernels count in, less a block
DIRECT_LIMIT = 64 << 20  # bytes of one slot: what arrives from all ranks together
#: bytes of a gather's result, or of what a rank's part of a reduction is a part of, up to which `direct` is faster.
#: Source: 656 gathers and scatters over 2 and 4 GPUs (`measured.json` of commit 9c98103). 27 were faster by the
#: transport that this limit does not choose, 24 of them of 4 to 16 MiB.
DIRECT_BYTES = 8 << 20
#: bytes of an all-reduce up to which it may be `direct`: two shots land as many bytes again
ALL_REDUCE_LIMIT = DIRECT_LIMIT // 2
#: of a direct all-reduce in one shot: its bytes, at most, and how many more a rank sends than in two shots, at most.
#: Source: `docs/results/2026-11-27-h100x4`, over 2 and 4 ranks, where these are 8 MB and 512 KB
ONE_SHOT_BYTES, ONE_SHOT_EXTRA = 8 << 20, 3 << 18
#: bytes of an all-reduce from which a scatter that overlaps, whose sums are shared then, is faster than `direct`.
#: Source: `docs/results/2026-11-27-h100x4/all-reduce-shared.txt`: here both take as long
ALL_REDUCE_BYTES = ALL_REDUCE_LIMIT
#: reductions that give one of the ranks' elements
EXTREMES = ("max", "min")
#: bytes of an all-reduce of these up to which it is `direct`, and up to which the pass makes one all-reduce of several
#: (`planning.bucketing`)
EXTREME_BYTES = 256 << 10
#: of an accord: the matmuls of the call's graph are batch-invariant, on all ranks
INVARIANT = 1 << 31
#: what both torch's NCCL and torch's elementwise ops find the larger of
EXTREME_DTYPES = (
    *SUMMED_DTYPES, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_SIGNATURES = 1 << 31
DIRECT_SIGNATURES = 1 << 24  # `copy_kernels.SIGNATURES`


@dataclass(frozen=True)
class Wire:
    """The facts of one call that its ranks share.

    Attributes:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        world: Ranks of the group.
        bytes: Of one rank's shard, of its part of the sum, or of an all-reduce's sum.
        dtype: Of what is reduced; None of a gather, which only moves bytes.
        reduce_op: "sum" or "avg", of an all-reduce also "max" or "min"; "" of a gather.
        number_bytes: Of the float32 numbers that travel with a shard.
        kept_by_all: Of a gather that every rank keeps.
        skipped: Calls of the group that this rank has left out, since they ended with an error.
        accord: What all ranks have agreed that the call's graph does otherwise than its program, and `INVARIANT`; 0:
            nothing.
    """

    kind: str
    world: int
    bytes: int
    dtype: torch.dtype | None = None
    reduce_op: str = ""
    number_bytes: int = 0
    kept_by_all: bool = False
    skipped: int = 0
    accord: int = 0

    def transport(self, forced: str | None = None) -> str:
        """How the data travels. `forced`: an implementation that all ranks have asked for."""
        found = self._transport(forced)
        return PULL if found == PUSH and self.kept_by_all else found

    def _transport(self, forced: str | None) -> str:
        total_bytes, limit = self.total_bytes, ALL_REDUCE_LIMIT if self.kind == "all_reduce" else DIRECT_LIMIT
        sums = self.dtype is not None
        if self.reduce_op in EXTREMES:
            folds = 0 < total_bytes <= EXTREME_BYTES and self.dtype in EXTREME_DTYPES
            return DIRECT if folds and forced != "sequential" else PLAIN
        if total_bytes == 0 or total_bytes // self.world >= INT32_LIMIT or (sums and self.dtype not in SUMMED_DTYPES):
            return PLAIN
        fits, even = total_bytes <= limit, not sums or total_bytes % (16 * self.world) == 0
        if forced is None and IS_INTERPRETED:  # nothing is fast: what has most to show
            forced = "fused"
        if forced is not None:
            wanted = TRANSPORTS[forced][0]
            if wanted == PUSH and not even:
                wanted = DIRECT
            return PLAIN if wanted == DIRECT and not fits else wanted
        if self.kind == "all_reduce" and total_bytes < ALL_REDUCE_BYTES:
            return DIRECT
        if total_bytes <= DIRECT_BYTES or not even:
            return DIRECT if fits else PLAIN
        return PUSH

    @property
    def total_bytes(self) -> int:
        """Bytes of what is gathered, or of what each rank has to be summed up."""
        return self.bytes if self.kind == "all_reduce" else self.bytes * self.world

    @property
    def shots(self) -> int:
        """How often the data of a direct all-reduce travels: all to all at once, or parts, and then their sums."""
        extra = (self.world - 1) * (self.world - 2) * self.bytes // self.world
        return 1 if self.bytes <= ONE_SHOT_BYTES and extra <= ONE_SHOT_EXTRA else 2

    @property
    def told(self) -> str:
        """The call in words, for messages and for its signature.

        A message adds to it what the ranks have told of the accord (`watch.Calls`).
        """
        kind = "" if self.dtype is None else f" of {str(self.dtype).removeprefix('torch.')}, {self.reduce_op}"
        numbers = f" and {self.number_bytes} bytes of scales" if self.number_bytes else ""
        kept = ", kept by every rank" if self.kept_by_all else ""
        skipped = f", after {self.skipped} calls that ended with an error there" if self.skipped else ""
        accord = f", of accord {self.agreed}" if self.agreed else ""
        invariant = ", batch-invariant" if self.accord & INVARIANT else ""
        return f"{self.kind} ({self.bytes} bytes a rank{kind}{numbers}{kept}{skipped}{accord}{invariant})"

    @property
    def agreed(self) -> int:
        """The accord without `INVARIANT`."""
        return self.accord & ~INVARIANT

    def signature(self, transport: str) -> int:
        """A positive int32: of a direct call below `DIRECT_SIGNATURES`, of a pushed one above."""
        digest = zlib.crc32(f"{self.told} {self.world}".encode())
        if transport == DIRECT:
            return 1 + digest % (DIRECT_SIGNATURES - 1)
        return DIRECT_SIGNATURES + digest % (_SIGNATURES - DIRECT_SIGNATURES)
