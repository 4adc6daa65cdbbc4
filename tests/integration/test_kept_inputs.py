"""What Inductor makes of collectives in flight: what they read stays until the wait, and is made by the kernel before.

A graph waits for them as rewritten graphs do, by `asynctp::wait`, whatever happens between start and wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

from asynctp_passes.ir.traversal import segments
from asynctp_passes.rewriting.emit_alone import OWN_OPS
from asynctp_passes.rewriting.ordering import wait_with_sources
from asynctp_passes.torch_private import inductor_order

WORLD, NAME = 2, "0"
gather, scatter, wait = (
    torch.ops.asynctp.all_gather,
    torch.ops.asynctp.reduce_scatter,
    torch.ops._c10d_functional.wait_tensor,
)


@torch.library.custom_op("kept_inputs::grow", mutates_args=("x",))
def grow(x: Tensor) -> None:
    """What Inductor makes of it writes to `x` itself, if in the graph nothing reads that later."""
    x.add_(4)


def beside(x: Tensor) -> tuple[Tensor, ...]:
    """But for the collectives, the memory of both inputs would be free for what the product takes."""
    y, z = x.sin(), x.cos()
    full, part = gather(y, WORLD, NAME), scatter(z, "sum", WORLD, NAME)
    product = (y + 1) @ (z + 1).t()
    return wait(full) + product.amax(), wait(part), product


def written_between(x: Tensor) -> tuple[Tensor, ...]:
    y = x @ x
    full = gather(y, WORLD, NAME)
    grow(y)
    return wait(full), y.cos()


def view_written_between(x: Tensor) -> tuple[Tensor, ...]:
    y = x @ x
    full = gather(y.view(-1), WORLD, NAME)
    grow(y[:2])
    return wait(full), y.cos()


def argument_written_between(x: Tensor) -> Tensor:
    full = gather(x, WORLD, NAME)
    x.add_(1)
    return wait(full) + 0


def start_behind(x: Tensor) -> tuple[Tensor, ...]:
    """One kernel makes what the product takes and what is gathered behind the product."""
    y = x.sin()
    product = (y + 1) @ x
    return wait(gather(y, WORLD, NAME)), product


def copied_first(x: Tensor) -> tuple[Tensor, ...]:
    """Inductor copies a view of another dtype, or of parts that overlap, for each call that reads it."""
    y = x * 3
    full, parts = gather(y.view(torch.int32), WORLD, NAME), gather(y.view(-1).unfold(0, 512, 256), WORLD, NAME)
    product = (y + 1) @ x
    return wait(full), wait(parts), product


PROGRAMS: tuple[Callable[[Tensor], object], ...] = (
    beside,
    written_between,
    view_written_between,
    argument_written_between,
    copied_first,
    start_behind,
)


class AsRewritten(CustomGraphPass):
    """No copies, waits that read what their collectives read, and if asked for the start behind the product."""

    def __init__(self, start_behind: bool) -> None:
        self.start_behind = start_behind

    def __call__(self, graph: fx.Graph) -> None:
        wait_with_sources(segments(graph))
        for start in [node for node in graph.nodes if node.target in OWN_OPS.values()]:
            start.meta.pop("eager_input_vals", None)
            (end,) = start.users
            if self.start_behind:
                (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
                product.append(end)
                product.append(start)
                inductor_order.keep_order(graph, {start: [product]})

    def uuid(self) -> None:
        return None


def test_inputs_are_kept_until_the_wait() -> None:
    run_ranks(WORLD, on_ranks, timeout_s=300)


def on_ranks(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    assert dist.group.WORLD.group_name == NAME
    for program in PROGRAMS:
        torch._dynamo.reset()
        inputs = [torch.randn(512, 512, generator=torch.Generator().manual_seed(rank)) / 16 for _ in range(2)]
        expected = program(inputs[0])
        options = {"post_grad_custom_post_pass": AsRewritten(program is start_behind)}
        found, codes = run_and_get_code(torch.compile(program, fullgraph=True, options=options), inputs[1])
        torch.testing.assert_close(found, expected, msg=lambda text, of=program: f"{of.__name__}: {text}")
        torch.testing.assert_close(*inputs)
        code = codes[-1].splitlines()
        calls = [place for place, line in enumerate(code) if "= torch.ops.asynctp." in line and "wait" not in line]
        assert calls, codes[-1]
        for place in calls:
            kept = re.findall(r"\bbuf\d+|\barg\d+_\d+", code[place])[1]
            end = max(place for place, line in enumerate(code) if re.search(rf"asynctp\.wait\..*\b{kept}\b", line))
            assert not [line for line in code[place:end] if f"del {kept}" in line], codes[-1]
        if program is start_behind:
            made = [line for line in code[: calls[0]] if "cpp_fused" in line and "async_compile" not in line]
            assert len(made) == 1, codes[-1]
