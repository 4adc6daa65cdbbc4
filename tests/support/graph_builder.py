"""Small graphs by hand, as a post-grad pass gets them, and a printer for them.

b = GraphBuilder()
x, w = b.input("x", [4, 8]), b.input("w", [8, 16])
graph = b.returns(b.mm(b.gather(x), w))
"""

from __future__ import annotations

import operator
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lockstep import op_name
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

__all__ = ["GraphBuilder", "aten", "c10d", "show", "snapshot"]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_SYMBOL = re.compile(r"\bs\d+\b")


@dataclass
class GraphBuilder:
    """Appends nodes to a graph, each with a fake tensor. `ranks` and `group` are those of its collectives."""

    ranks: int = 4
    group: Any = "tp"
    graph: Graph = field(default_factory=Graph)

    def __post_init__(self) -> None:
        self.mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        dynamic: int | Sequence[int] | None = None,
        column_major: bool = False,
        device: str = "cpu",
    ) -> Node:
        """A placeholder; `column_major` swaps the strides of a matrix.

        Dimension `dynamic` is symbolic, with a symbol of its own; of several, equal ones share a symbol, as torch has
        it where the program does not say which dimensions are dynamic.
        """
        node = self.graph.placeholder(name)
        if dynamic is None:
            elements = torch.empty(tuple(shape), dtype=dtype, device="meta")
            with self.mode:  # not torch.empty(device=...): a build of torch makes no tensors on devices it is not for
                value = torch._subclasses.FakeTensor(self.mode, elements, torch.device(device))
        else:
            kind = DimDynamic.DYNAMIC if isinstance(dynamic, int) else DimDynamic.DUCK
            axes = (dynamic,) if isinstance(dynamic, int) else dynamic
            sizes = [kind if axis in axes else DimDynamic.STATIC for axis in range(len(shape))]
            real = torch.empty(tuple(shape), dtype=dtype)
            value = self.mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(sizes))
        if column_major:
            with self.mode:
                value = torch.empty(tuple(shape)[::-1], dtype=dtype).t()
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call, evaluated on fake tensors."""
        fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        with self.mode, enable_python_dispatcher():
            value = target(*fake_args, **fake_kwargs)
        return self.call_like(value, target, *args, **kwargs)

    def call_like(self, value: Any, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call that returns a value like `value`, for ops that fake tensors cannot run here."""
        node = self.graph.create_node("call_function", target, args, kwargs, name=target.__name__.split(".")[0])
        node.meta["val"] = value
        return node

    def gather(self, shard: Node) -> Node:
        """all_gather → wait."""
        gathered = self.call(c10d.all_gather_into_tensor.default, shard, self.ranks, self.group)
        return self.call(c10d.wait_tensor.default, gathered)

    def gather_list(self, *shards: Node) -> list[Node]:
        """all_gather of several tensors → wait, one for each."""
        gathered = self.call(c10d.all_gather_into_tensor_coalesced.default, list(shards), self.ranks, self.group)
        return self.wait_list(gathered, len(shards))

    def wait_list(self, collective: Node, count: int) -> list[Node]:
        """getitem → wait, one for each result of a collective of several tensors."""
        items = (self.call(operator.getitem, collective, index) for index in range(count))
        return [self.call(c10d.wait_tensor.default, item) for item in items]

    def scatter(self, full: Node, op: str = "sum") -> Node:
        """reduce_scatter → wait."""
        scattered = self.call(c10d.reduce_scatter_tensor.default, full, op, self.ranks, self.group)
        return self.call(c10d.wait_tensor.default, scattered)

    def all_reduce(self, partial: Node, op: str = "sum") -> Node:
        """all_reduce → wait."""
        reduced = self.call(c10d.all_reduce.default, partial, op, self.group)
        return self.call(c10d.wait_tensor.default, reduced)

    def chunks(self, x: Node, dim: int = 0) -> list[Node]:
        """split → getitem, one piece a rank."""
        split = self.call(aten.split.Tensor, x, x.meta["val"].shape[dim] // self.ranks, dim)
        return [self.call(operator.getitem, split, index) for index in range(self.ranks)]

    def cat(self, pieces: Sequence[Node], dim: int = 0) -> Node:
        return self.call(aten.cat.default, list(pieces), dim)

    def reshape(self, x: Node, shape: Sequence[Any]) -> Node:
        return self.call(aten.reshape.default, x, list(shape))

    def permute(self, x: Node, order: Sequence[int]) -> Node:
        return self.call(aten.permute.default, x, list(order))

    def mm(self, a: Node, b: Node) -> Node:
        return self.call(aten.mm.default, a, b)

    def add(self, a: Node, b: Node) -> Node:
        return self.call(aten.add.Tensor, a, b)

    def mul(self, a: Node, b: Node) -> Node:
        return self.call(aten.mul.Tensor, a, b)

    def relu(self, x: Node) -> Node:
        return self.call(aten.relu.default, x)

    def one(self) -> Node:
        """The number 1."""
        return self.call(aten.full.default, [], 1.0, dtype=torch.float32)

    def scaled_mm(self, a: Node, b: Node, a_scale: Node, b_scale: Node, **kwargs: Any) -> Node:
        """_scaled_mm to bf16. Its value is written down: fake rowwise scales do not run on CPU."""
        with self.mode:
            value = a.meta["val"].new_empty(a.meta["val"].shape[0], b.meta["val"].shape[1], dtype=torch.bfloat16)
        kwargs = {"out_dtype": torch.bfloat16, **kwargs}
        return self.call_like(value, aten._scaled_mm.default, a, b, a_scale, b_scale, **kwargs)

    def returns(self, *nodes: Node) -> Graph:
        """Finish the graph."""
        self.graph.output(nodes)
        self.graph.lint()
        return self.graph


# --- printing ------------------------------------------------------------------------------------------
def show(graph: Graph) -> str:
    """One line a node: `mm = mm(wait_tensor, w)  # f32[16, 16]`; strides only where memory is not row-major.

    The one symbol that a graph may have is `s`, as torch versions number it differently.
    """
    return "".join(f"{_SYMBOL.sub('s', _line(node))}\n" for node in graph.nodes)


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    value = _value(node.meta.get("val"))
    if node.op != "call_function":
        return f"{node.name}: {value}"
    call = f"{node.name} = {_call_name(node)}({', '.join(_arguments(node))})  # {value}"
    return textwrap.fill(call, 118, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _call_name(node: Node) -> str:
    namespace, _, name = op_name(node.target).rpartition("::")
    return f"asynctp::{name}" if namespace == "asynctp" else name


def _arguments(node: Node) -> list[str]:
    """The fused ops' arguments by name, as there are many."""
    args = [_argument(argument) for argument in node.args]
    if _call_name(node).startswith("asynctp::"):
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        args = [f"{name}={text}" for name, text in zip(names, args, strict=False)]  # the last may be left out
    return args + [f"{name}={_argument(argument)}" for name, argument in node.kwargs.items()]


def _argument(argument: Any) -> str:
    if isinstance(argument, list | tuple):
        left, right = "[]" if isinstance(argument, list) else "()"
        return f"{left}{', '.join(map(_argument, argument))}{right}"
    if isinstance(argument, torch.dtype):
        return _dtype(argument)
    return repr(argument) if isinstance(argument, str) else str(argument)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_value, value))})"
    if not isinstance(value, torch.Tensor):
        return str(value) if isinstance(value, int | torch.SymInt) else type(value).__name__
    strides = "" if value.is_contiguous() else f"s{list(value.stride())}"
    return f"{_dtype(value.dtype)}{list(value.shape)}{strides}"


def _dtype(dtype: torch.dtype) -> str:
    short = {"bfloat16": "bf16", "float32": "f32", "float8_e4m3fn": "f8", "uint8": "u8"}
    name = str(dtype).removeprefix("torch.")
    return short.get(name, name)


def snapshot(graph: Graph) -> list[tuple[Any, ...]]:
    """Everything a pass could have changed about a graph, the identity of nodes and of their values included."""
    return [
        (id(node), node.name, node.op, node.target, str((node.args, node.kwargs)), list(node.users), _ids(node.meta))
        for node in graph.nodes
    ]


def _ids(meta: dict[str, Any]) -> dict[str, int]:
    return {key: id(value) for key, value in meta.items()}
