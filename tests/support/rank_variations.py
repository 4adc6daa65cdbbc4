"""What one rank may compute around a collective, while the others compute something else: one function for each.

A variation is a generator. It yields the tensor that is sent, is given the collective's result, and writes what this
rank does with it. `yield LATER` goes on after the next collective, and gives the result of that, or None at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rank_writer import LATER, Stage, Value, Writer

__all__ = ["NAMES", "VARIATIONS", "Variation"]

Steps = Generator[Any, Any, None]


@dataclass(frozen=True)
class Variation:
    """A way to use a collective.

    Attributes:
        write: Writes it.
        wants: Fields that its stage must have.
        followed_by: The stage that has to follow: `"any"`, `"the same"` (kind, group, dtype and dimension), or none.
    """

    write: Callable[[Writer, Stage], Steps]
    wants: dict[str, Any] = field(default_factory=dict)
    followed_by: str = ""

    def fits(self, stage: Stage, following: Sequence[Stage]) -> bool:
        """Whether it can be written around a stage."""
        if any(getattr(stage, name) != value for name, value in self.wants.items()):
            return False
        if self.followed_by == "the same":
            return any(_alike(stage, one) for one in following)
        return bool(following) or not self.followed_by


VARIATIONS: dict[str, dict[str, Variation]] = {"gather": {}, "reduction": {}, "maximum": {}}
"""By kind of collective (reductions are reduce-scatter and all-reduce), the variations by name."""


def _alike(stage: Stage, other: Stage) -> bool:
    return (stage.kind, stage.group, stage.dtype, stage.dim) == (other.kind, other.group, other.dtype, other.dim)


def variation(
    table: str, followed_by: str = "", **wants: Any
) -> Callable[[Callable[..., Steps]], Callable[..., Steps]]:
    """Add a function to a table."""

    def add(write: Callable[..., Steps]) -> Callable[..., Steps]:
        VARIATIONS[table][write.__name__] = Variation(write, wants, followed_by)
        return write

    return add


def _multiplied(w: Writer, h: Value, columns: int | None = None) -> Value:
    """The product of a gathered tensor: it is returned, and later products may be made of it."""
    p = w.product(h, columns)
    w.hidden.append(p)
    w.returns(p)
    return p


def _kept(w: Writer, stage: Stage, r: Value) -> None:
    """The result of a reduction: it is returned, and later gathers may send it."""
    if stage.kind == "scatter":
        w.scattered.append(r)
    w.returns(r)


# --- gathers: who uses what is gathered ----------------------------------------------------------------------
@variation("gather")
def multiply(w: Writer, stage: Stage) -> Steps:
    """Multiplies what is gathered, and nothing else."""
    _multiplied(w, (yield w.shard(stage)))


@variation("gather")
def gathered_used(w: Writer, stage: Stage) -> Steps:
    """Computes a metric of what is gathered, too."""
    h = yield w.shard(stage)
    _multiplied(w, h)
    w.returns(w.let("metric", f"{h}.float().square().mean()"))


@variation("gather")
def gathered_returned(w: Writer, stage: Stage) -> Steps:
    """Returns what is gathered, too."""
    h = yield w.shard(stage)
    _multiplied(w, h)
    w.returns(h)


@variation("gather")
def product_used(w: Writer, stage: Stage) -> Steps:
    """Logs a statistic of its product."""
    p = _multiplied(w, (yield w.shard(stage)))
    w.returns(w.let("log", f"({p} @ {p}.t()).float().trace()"))


@variation("gather")
def no_matmul(w: Writer, stage: Stage) -> Steps:
    """Multiplies what is gathered with nothing."""
    h = yield w.shard(stage)
    w.returns(w.let("p", f"{h} * 1.5", h.shape, h.dtype))


@variation("gather")
def products_beside(w: Writer, stage: Stage) -> Steps:
    """Multiplies what is gathered with nothing, and has other products to compute meanwhile."""
    h = yield w.shard(stage)
    y = w.fresh((16, 16), stage.dtype)
    w.returns(w.product(y), w.product(y), w.let("p", f"{h} * 1.5", h.shape, h.dtype))


@variation("gather")
def gathered_dropped(w: Writer, stage: Stage) -> Steps:
    """Does not use what is gathered."""
    yield w.shard(stage)


@variation("gather")
def only_a_statistic(w: Writer, stage: Stage) -> Steps:
    """Needs the largest element of what is gathered only."""
    h = yield w.shard(stage)
    w.returns(w.let("log", f"{h}.abs().amax()"))


# --- gathers: other matmuls -----------------------------------------------------------------------------------
@variation("gather")
def uneven_columns(w: Writer, stage: Stage) -> Steps:
    """Has a weight of another width, odd ones among them."""
    _multiplied(w, (yield w.shard(stage)), w.random.choice((1, 5, 12, 24)))


@variation("gather")
def no_columns(w: Writer, stage: Stage) -> Steps:
    """Has an empty weight: its part of the columns is none."""
    _multiplied(w, (yield w.shard(stage)), 0)


@variation("gather")
def two_products(w: Writer, stage: Stage) -> Steps:
    """Has two weights."""
    h = yield w.shard(stage)
    _multiplied(w, h)
    _multiplied(w, h)


@variation("gather", followed_by="any")
def later(w: Writer, stage: Stage) -> Steps:
    """Multiplies after the next collective."""
    h = yield w.shard(stage)
    yield LATER
    _multiplied(w, h)


@variation("gather", followed_by="any")
def needs_a_later_collective(w: Writer, stage: Stage) -> Steps:
    """Multiplies with a weight that depends on the next collective."""
    h = yield w.shard(stage)
    other = yield LATER
    weight = w.input("w", (h.shape[1], 8), h.dtype)
    scaled = weight if other is None else f"({weight} * {other}.float().square().mean().to({weight}.dtype))"
    w.returns(w.let("p", f"{h} @ {scaled}", (h.shape[0], 8), h.dtype))


@variation("gather")
def transposed_weight(w: Writer, stage: Stage) -> Steps:
    """Has a weight that lies in memory the other way round."""
    h = yield w.shard(stage)
    weight = w.input("w", (16, h.shape[1]), h.dtype)
    w.returns(w.let("p", f"{h} @ {weight}.t()", (h.shape[0], 16), h.dtype))


@variation("gather")
def strided_weight(w: Writer, stage: Stage) -> Steps:
    """Has a weight with gaps in memory, which begins in the middle of an allocation."""
    h = yield w.shard(stage)
    weight = w.input("w", (h.shape[1], 19), h.dtype)
    w.returns(w.let("p", f"{h} @ {weight}[:, 1::2]", (h.shape[0], 9), h.dtype))


@variation("gather")
def bias_and_residual(w: Writer, stage: Stage) -> Steps:
    """Adds a bias, then a residual."""
    h = yield w.shard(stage)
    weight, bias = w.input("w", (h.shape[1], 16), h.dtype), w.input("b", (16,), h.dtype)
    p = w.let("p", f"torch.addmm({bias}, {h}, {weight})", (h.shape[0], 16), h.dtype)
    w.returns(w.let("q", f"{p} + {w.input('y', p.shape, p.dtype)}"))


# --- gathers: between the gather and the matmul ---------------------------------------------------------------
@variation("gather", dim=0)
def rows_permuted(w: Writer, stage: Stage) -> Steps:
    """Rearranges the rows within each shard."""
    h = yield w.shard(stage)
    ranks, half = w.outline.size(stage.group), w.outline.rows // 2
    turned = f"{h}.view({ranks}, 2, {half}, -1).transpose(1, 2).reshape({h.shape[0]}, -1)"
    _multiplied(w, w.let("h", turned, h.shape, h.dtype))


@variation("gather", dim=0)
def own_shard_first(w: Writer, stage: Stage) -> Steps:
    """Joins the gathered pieces with its own one first, as a ring does."""
    h = yield w.shard(stage)
    ranks = w.outline.size(stage.group)
    pieces = w.let("pieces", f"{h}.chunk({ranks})")
    order = ", ".join(f"{pieces}[{(w.rank + step) % ranks}]" for step in range(ranks))
    _multiplied(w, w.let("h", f"torch.cat([{order}])", h.shape, h.dtype))


@variation("gather", dim=0)
def some_rows(w: Writer, stage: Stage) -> Steps:
    """Multiplies the first half of what is gathered only."""
    h = yield w.shard(stage)
    half = h.shape[0] // 2
    _multiplied(w, w.let("h", f"{h}[:{half}]", (half, h.shape[1]), h.dtype))


@variation("gather")
def relu_between(w: Writer, stage: Stage) -> Steps:
    """Applies a function to what is gathered."""
    h = yield w.shard(stage)
    _multiplied(w, w.let("h", f"torch.relu({h})", h.shape, h.dtype))


@variation("gather")
def scaled_between(w: Writer, stage: Stage) -> Steps:
    """Multiplies what is gathered by its own number."""
    h = yield w.shard(stage)
    _multiplied(w, w.let("h", f"{h} * {w.random.choice((0.3, 2.0, 0.5, -1.0, 2.0**-4))}", h.shape, h.dtype))


@variation("gather")
def rows_scaled_between(w: Writer, stage: Stage) -> Steps:
    """Multiplies every gathered row by a number of its own."""
    h = yield w.shard(stage)
    rows = w.input("s", (h.shape[0], 1), h.dtype)
    _multiplied(w, w.let("h", f"{h} * {rows}", h.shape, h.dtype))


@variation("gather")
def converted_between(w: Writer, stage: Stage) -> Steps:
    """Converts what is gathered, and multiplies in another dtype."""
    h = yield w.shard(stage)
    dtype = "bfloat16" if stage.dtype == "float32" else "float32"
    _multiplied(w, w.let("h", f"{h}.to(torch.{dtype})", h.shape, dtype))


@variation("gather")
def quantized_between(w: Writer, stage: Stage) -> Steps:
    """Quantizes what is gathered to fp8, a scale for each row, and multiplies the numbers that this gives."""
    h = yield w.shard(stage)
    scale = w.let("s", f"{h}.float().abs().amax(1, keepdim=True).clamp(min=1e-6) / 448")
    q = w.let("q", f"({h}.float() / {scale}).clamp(-448, 448).to(torch.float8_e4m3fn)", h.shape, "float32")
    _multiplied(w, w.let("h", f"{q}.float() * {scale}", h.shape, "float32"))


@variation("gather", dim=0)
def scaled_mm(w: Writer, stage: Stage) -> Steps:
    """Quantizes what is gathered to fp8 with one scale, and multiplies fp8."""
    h = yield w.shard(stage)
    if h.shape[1] % 16:
        h = w.let("h", f"torch.cat([{h}, {h}], 1)", (h.shape[0], h.shape[1] * 2), h.dtype)
    weight = w.input("w", (16, h.shape[1]), "float32")
    scale = w.let("s", f"{h}.float().abs().amax().clamp(min=1e-6) / 448")
    q = w.let("q", f"({h}.float() / {scale}).clamp(-448, 448).to(torch.float8_e4m3fn)")
    one = w.let("one", "torch.ones((), dtype=torch.float32)")
    b = w.let("b", f"{weight}.to(torch.float8_e4m3fn).t()")
    w.returns(w.let("p", f"torch._scaled_mm({q}, {b}, {scale}, {one}, out_dtype=torch.bfloat16)"))


# --- reductions: what is summed -------------------------------------------------------------------------------
@variation("reduction")
def partial(w: Writer, stage: Stage) -> Steps:
    """Sends its part of a product, and nothing else."""
    _kept(w, stage, (yield w.product(w.left(stage), w.outline.width, stem="z")))


@variation("reduction")
def uneven_depth(w: Writer, stage: Stage) -> Steps:
    """Has another part of the contraction, odd ones among them."""
    left = w.left(stage, w.random.choice((1, 5, 12, 24)))
    _kept(w, stage, (yield w.product(left, w.outline.width, stem="z")))


@variation("reduction")
def no_depth(w: Writer, stage: Stage) -> Steps:
    """Has nothing of the contraction: its part of the sum is zero."""
    _kept(w, stage, (yield w.product(w.left(stage, 0), w.outline.width, stem="z")))


@variation("reduction")
def nothing_multiplied(w: Writer, stage: Stage) -> Steps:
    """Sends what no matmul made."""
    x = w.fresh(w.outline.whole(stage), stage.dtype)
    _kept(w, stage, (yield w.let("z", f"torch.relu({x})", x.shape, x.dtype)))


@variation("reduction")
def residual(w: Writer, stage: Stage) -> Steps:
    """Adds its own residual before the sum."""
    z = w.product(w.left(stage), w.outline.width, stem="z")
    _kept(w, stage, (yield w.let("z", f"{z} + {w.input('y', z.shape, z.dtype)}", z.shape, z.dtype)))


@variation("reduction")
def bias_before(w: Writer, stage: Stage) -> Steps:
    """Adds its own bias before the sum."""
    left = w.left(stage)
    weight, bias = (
        w.input(*one, left.dtype) for one in (("w", (left.shape[1], w.outline.width)), ("b", (w.outline.width,)))
    )
    _kept(w, stage, (yield w.let("z", f"torch.addmm({bias}, {left}, {weight})")))


@variation("reduction", dtype="float32")
def widened(w: Writer, stage: Stage) -> Steps:
    """Multiplies bf16, and sums in fp32."""
    z = w.product(w.left(stage, dtype="bfloat16"), w.outline.width, stem="z")
    _kept(w, stage, (yield w.let("z", f"{z}.float()")))


@variation("reduction", dtype="float32")
def wide_residual(w: Writer, stage: Stage) -> Steps:
    """Multiplies bf16, adds its own fp32 residual, and sums in fp32."""
    z = w.product(w.left(stage, dtype="bfloat16"), w.outline.width, stem="z")
    _kept(w, stage, (yield w.let("z", f"{z}.float() + {w.input('y', z.shape, 'float32')}")))


@variation("reduction", dtype="bfloat16")
def narrowed(w: Writer, stage: Stage) -> Steps:
    """Multiplies fp32, and sums in bf16."""
    z = w.product(w.left(stage, dtype="float32"), w.outline.width, stem="z")
    _kept(w, stage, (yield w.let("z", f"{z}.bfloat16()")))


@variation("reduction")
def two_terms(w: Writer, stage: Stage) -> Steps:
    """Adds up two products before the sum."""
    y, z = (w.product(w.left(stage), w.outline.width, stem="z") for _ in range(2))
    _kept(w, stage, (yield w.let("z", f"{y} + {z}")))


@variation("reduction")
def factor(w: Writer, stage: Stage) -> Steps:
    """Weighs its part of the sum by its own number."""
    z = w.product(w.left(stage), w.outline.width, stem="z")
    _kept(w, stage, (yield w.let("z", f"{z} * {w.random.choice((2.0, 0.5, -1.0, 0.25, 0.3))}")))


@variation("reduction", dtype="float32")
def extreme_factor(w: Writer, stage: Stage) -> Steps:
    """Weighs its product by a power of two that one of the operands alone has no room for."""
    of_x, of_w, power = w.random.choice(((-124, 122, -31), (100, -100, 30), (100, -100, 30)))
    x = w.fresh((w.outline.whole(stage)[0], 16), "float32", power=of_x)
    z = w.product(x, w.outline.width, power=of_w, stem="z")
    _kept(w, stage, (yield w.let("z", f"{z} * 2.0 ** {power}")))


@variation("reduction")
def adapter(w: Writer, stage: Stage) -> Steps:
    """Has a low-rank adapter beside the weight."""
    left = w.left(stage)
    z, low = w.product(left, w.outline.width, stem="z"), w.product(left, 4)
    other = w.product(low, w.outline.width)
    _kept(w, stage, (yield w.let("z", f"{z} + {other} * 2.0")))


# --- reductions: how it lies -----------------------------------------------------------------------------------
@variation("reduction")
def rows_permuted_before(w: Writer, stage: Stage) -> Steps:
    """Rearranges the rows of its product before the sum."""
    z = w.product(w.left(stage), w.outline.width, stem="z")
    blocks = w.random.choice((1, w.outline.size(stage.group))) if stage.kind == "scatter" and stage.dim == 0 else 1
    half = z.shape[0] // blocks // 2
    turned = f"{z}.view({blocks}, 2, {half}, -1).transpose(1, 2).reshape({z.shape[0]}, -1)"
    _kept(w, stage, (yield w.let("z", turned)))


@variation("reduction")
def transposed_product(w: Writer, stage: Stage) -> Steps:
    """Computes the transpose of its product."""
    left = w.left(stage)
    weight = w.input("w", (w.outline.width, left.shape[1]), left.dtype)
    _kept(w, stage, (yield w.let("z", f"({weight} @ {left}.t()).t()")))


@variation("reduction")
def batched(w: Writer, stage: Stage) -> Steps:
    """Multiplies in three dimensions."""
    left = w.left(stage)
    rows, width = left.shape[0], w.outline.width
    weight = w.input("w", (left.shape[1], width), left.dtype)
    _kept(w, stage, (yield w.let("z", f"({left}.view(2, {rows // 2}, -1) @ {weight}).view({rows}, {width})")))


# --- reductions: who uses what -----------------------------------------------------------------------------------
@variation("reduction")
def partial_used(w: Writer, stage: Stage) -> Steps:
    """Logs a statistic of its own part of the sum."""
    z = w.product(w.left(stage), w.outline.width, stem="z")
    w.returns(w.let("log", f"{z}.float().square().mean()"))
    _kept(w, stage, (yield z))


def _own_part(w: Writer, stage: Stage, r: Value, shift: int = 0) -> None:
    """Uses this rank's part of a sum, in one of several spellings; with a shift, another rank's."""
    ranks, shape = w.outline.size(stage.group), r.shape
    place = (w.place(stage.group) + shift) % ranks
    if shape[0] % ranks or w.random.random() < 0.3:
        shape = (shape[0] * shape[1],)
        r = w.let("r", f"{r}.view(-1)", shape, r.dtype)
    count, old = shape[0] // ranks, str(r)
    spellings: Sequence[str] = (
        f"{r}[{place * count}:{(place + 1) * count}]",
        f"{r}.narrow(0, {place * count}, {count})",
        f"{r}.chunk({ranks})[{place}]",
        f"torch.tensor_split({r}, {ranks})[{place}]",
        f"{r}.view({ranks}, {count}, *{r}.shape[1:])[{place}]",
        f"{r}[{place * count}:][:{count}]",
    )
    if w.random.random() < 0.3:
        other = w.input("y", shape, r.dtype)
        r = w.let(
            "r", w.random.choice((f"{r} + {other}", f"torch.relu({r}) * {other}", f"{r} + {r}.abs()")), shape, r.dtype
        )
        spellings = [spelling.replace(old, str(r)) for spelling in spellings]
    part = w.let("o", w.random.choice(spellings), (count, *shape[1:]), r.dtype)
    if w.random.random() < 0.3:
        w.returns(w.let("q", f"{part} * {part}.float().square().mean().to({part}.dtype)"))
    w.returns(w.let("o", f"torch.relu({part})"))


@variation("reduction", kind="reduce")
def own_part(w: Writer, stage: Stage) -> Steps:
    """Uses its own part of the sum alone."""
    before = w.random.choice((partial, nothing_multiplied, residual, two_terms, factor, bias_before, batched))
    _own_part(w, stage, (yield next(before(w, stage))))


@variation("reduction", kind="reduce")
def own_part_of_turned(w: Writer, stage: Stage) -> Steps:
    """Uses its own part alone of a sum of what is rearranged, or converted."""
    before = w.random.choice((rows_permuted_before, transposed_product, uneven_depth, no_depth, partial_used))
    _own_part(w, stage, (yield next(before(w, stage))))


@variation("reduction", kind="reduce")
def part_of_the_next(w: Writer, stage: Stage) -> Steps:
    """Uses the next rank's part of the sum alone."""
    _own_part(w, stage, (yield next(partial(w, stage))), shift=1)


@variation("reduction", kind="reduce")
def more_than_its_part(w: Writer, stage: Stage) -> Steps:
    """Uses its own part of the sum, and something beside it."""
    r = yield next(w.random.choice((partial, nothing_multiplied))(w, stage))
    _own_part(w, stage, r)
    _own_part(w, stage, r, shift=1)


@variation("reduction", kind="reduce")
def other_parts(w: Writer, stage: Stage) -> Steps:
    """Uses a part of the sum that is none of the ranks': of another size, or of the columns."""
    r = yield next(w.random.choice((partial, nothing_multiplied))(w, stage))
    ranks, place, (rows, columns) = w.outline.size(stage.group), w.place(stage.group), r.shape
    wide = columns // ranks
    spellings = (
        f"{r}[:, {place * wide}:{(place + 1) * wide}]",
        f"{r}[{rows // 2}:]",
        f"{r}[:{rows // 2}]",
        f"{r}[{place}::{ranks}]",
        f"{r}.t()[{place * wide}:{(place + 1) * wide}]",
        f"{r}[{place}:{place + 1}]",
    )
    w.returns(w.let("o", f"torch.relu({w.random.choice(spellings)})"))


@variation("reduction")
def result_used(w: Writer, stage: Stage) -> Steps:
    """Logs a statistic of the sum."""
    r = yield w.product(w.left(stage), w.outline.width, stem="z")
    w.returns(w.let("log", f"{r}.float().square().mean()"))
    _kept(w, stage, r)


@variation("reduction")
def sum_dropped(w: Writer, stage: Stage) -> Steps:
    """Does not use the sum."""
    yield w.product(w.left(stage), w.outline.width, stem="z")


@variation("reduction", followed_by="the same")
def summed_with_the_next(w: Writer, stage: Stage) -> Steps:
    """Needs nothing but the sum of two reductions, which the others log one by one."""
    r = yield w.product(w.left(stage), w.outline.width, stem="z")
    other = yield LATER
    fits = other is not None and (other.shape, other.dtype) == (r.shape, r.dtype)
    if fits:
        w.absorbed.add(other.name)
    w.returns(w.let("r", f"{r} + {other}") if fits else r)


@variation("reduction", followed_by="any")
def used_later(w: Writer, stage: Stage) -> Steps:
    """Uses the sum after the next collective only."""
    r = yield w.product(w.left(stage), w.outline.width, stem="z")
    yield LATER
    _multiplied(w, r)


@variation("reduction", followed_by="any")
def next_depends(w: Writer, stage: Stage) -> Steps:
    """Has an operand of the next collective depend on the sum."""
    r = yield w.product(w.left(stage), w.outline.width, stem="z")
    w.carried = w.let("c", f"{r}.float().square().mean()")
    w.returns(r)


# --- small all-reduces -------------------------------------------------------------------------------------------
def _columns(w: Writer, stage: Stage) -> Value:
    """The largest elements of each column of a new argument, of as many rows as the rank likes."""
    x = w.fresh((w.random.choice((1, 4, 5)), w.outline.width), stage.dtype)
    return w.let("a", f"{x}.abs().amax(0)", (w.outline.width,), stage.dtype)


@variation("maximum")
def largest(w: Writer, stage: Stage) -> Steps:
    """Returns the maximum."""
    w.returns((yield _columns(w, stage)))


@variation("maximum", followed_by="the same")
def needed_early(w: Writer, stage: Stage) -> Steps:
    """Needs the maximum for the next one, which for the others does not depend on it."""
    m = yield _columns(w, stage)
    w.carried = m
    w.returns(m)


@variation("maximum", followed_by="any")
def maximum_before_operand(w: Writer, stage: Stage) -> Steps:
    """Needs the maximum for an operand of the next collective."""
    w.carried = yield _columns(w, stage)


@variation("maximum")
def maximum_dropped(w: Writer, stage: Stage) -> Steps:
    """Does not use the maximum."""
    yield _columns(w, stage)


@variation("maximum", followed_by="any")
def maximum_used_later(w: Writer, stage: Stage) -> Steps:
    """Uses the maximum after the next collective only."""
    m = yield _columns(w, stage)
    yield LATER
    w.returns(w.let("p", f"{m} * 2.0"))


NAMES: tuple[str, ...] = tuple(name for table in VARIATIONS.values() for name in table)
"""All variations, which have unlike names."""
