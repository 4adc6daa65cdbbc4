"""An implementation as an entry of a table, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from asynctp_kernels.cuda.choose.cost import Estimate
from asynctp_kernels.cuda.choose.tiles import Tiles


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


class Ahead(NamedTuple):
    """By which part of its time an implementation has to be faster than another one, `of`, to be chosen before it.

    beside: where kernels of other groups may run beside it.
    """

    of: str
    alone: float
    beside: float


Check = Callable[[Any], str | None]
"""Why a call cannot run so, or None."""


SiteForm = tuple[tuple[int, ...], tuple[Callable[[], Any] | None, ...], int, bool, bool]
"""How calls are made whose operands lie as a plan reads them: OPERANDS, MAKERS and RESULTS as `site.c` has them, then
whether calls come after all that is in flight, or after gathers."""


class Implementation:
    """One way to run a kind of call: a plan's class is its entry in the table of implementations.

    Attributes:
        name: As users give and see it.
        transports: The wires by which it can move a call's data; the first where it is asked for by name.
        refuses: Checks, in order: each gives the reason why a call cannot run, or None. The first reason counts.
        estimate: What a call costs; None for what runs only where no other entry can.
        ahead: What it has to be ahead of, or None.
    """

    name: ClassVar[str]
    transports: ClassVar[tuple[str, ...]]
    refuses: ClassVar[Sequence[Check]] = ()
    estimate: ClassVar[Estimate | None] = None
    ahead: ClassVar[Ahead | None] = None

    @classmethod
    def refusal(cls, call: Any) -> str | None:
        """Why `call` cannot run so, whatever the wire is."""
        return next((reason for check in cls.refuses if (reason := check(call)) is not None), None)

    @classmethod
    def plan(cls, call: Any, memory: Any, choice: Choice) -> Any:
        """The plan of a call, in the memory of its group."""
        return cls(call, memory)  # type: ignore[call-arg]
