"""An implementation as an entry of a table, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asynctp_kernels.cuda.choose.cost import Estimate
from asynctp_kernels.cuda.choose.tiles import Tiles
from asynctp_kernels.cuda.choose.wire import TRANSPORTS

Call = TypeVar("Call")


@dataclass(frozen=True)
class Choice:
    """The implementation that runs, and why.

    Attributes:
        implementation: its name, a key of `wire.TRANSPORTS`.
        source: "cost model", "measured" (a tuning table), "forced", "only one that can", or "interpreted" (the first
            that can run).
        estimates_us: of the cost model, per implementation that can run; empty when nothing was compared.
        refused: why each other implementation cannot run this call.
        chunks: into how many a rank's rows are cut, where that applies.
        tiles: of the GEMM, for "fused".
    """

    implementation: str
    source: str
    estimates_us: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    chunks: int = 1
    tiles: Tiles | None = None


@dataclass(frozen=True)
class Implementation(Generic[Call]):
    """One way to run a kind of call.

    Attributes:
        name: A key of `wire.TRANSPORTS`, which says by which wires it moves a call's data.
        refuses: Checks, in order: each gives the reason why a call cannot run, or None. The first reason counts.
        estimate: What a call costs; None for what runs only where no other entry can.
        make: The plan of a call, given the call, the memory of its group, and the choice.
    """

    name: str
    refuses: Sequence[Callable[[Call], str | None]]
    estimate: Estimate | None
    make: Callable[[Call, Any, Choice], Any]

    @property
    def transports(self) -> tuple[str, ...]:
        """The wires by which it can move a call's data; the first where it is asked for by name."""
        return TRANSPORTS[self.name]

    def refusal(self, call: Call) -> str | None:
        """Why `call` cannot run so, whatever the wire is."""
        return next((reason for check in self.refuses if (reason := check(call)) is not None), None)
