"""Read the graph dumps of `tests/graphs` back into FX graphs, and print graphs in the same format.

A dump has one line a node; `graphs/README.md` describes it. `load` rebuilds a graph with real op targets and fake
tensors of the dumped shape, strides and dtype, so that a pass can run on it as it would inside `torch.compile`;
`dump` is its inverse, up to the addresses of opaque objects.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import serving_ops  # noqa: F401  (defines the custom ops of some dumps)
import torch
import torch._prims
import torch.distributed as dist
import torch.fx
from torch._C._distributed_c10d import FakeProcessGroup
from torch._dynamo.source import ConstantSource
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

if dist.is_available():
    import torch.distributed.tensor  # registers _dtensor.mesh_get_process_group

__all__ = ["CORPUS", "Opaque", "dump", "dump_paths", "example_inputs", "load", "without_addresses"]

CORPUS = Path(__file__).parents[1] / "graphs"

#: What every symbol of a dump stands for in the rebuilt graph; equal to none of the corpus' static sizes.
SYMBOL_HINT = 24

#: The type of a node's `meta["val"]`: a fake tensor, a symbolic or plain number, an `Opaque`, None, or a tuple of them.
Value = Any

_NODE = re.compile(r"^(?P<name>\w+) = (?P<call>.*?)  # (?P<value>.*) users\[\d+\](?:: (?P<users>.*))?$")
_ARGUMENT_TOKEN = re.compile(r"\s*([\[\](),=]|[^\s\[\](),=]+)")
_TENSOR = re.compile(r"^(?P<dtype>[a-z0-9_]+)\[(?P<shape>.*)\]s\[(?P<strides>.*)\]$")
_SYMBOL = re.compile(r"\b[su]\d+\b")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_WORDS: dict[str, Any] = {"None": None, "True": True, "False": False}
_HIGHER_ORDER = {"run_with_rng_state": run_with_rng_state, "run_and_save_rng_state": run_and_save_rng_state}


@dataclass(frozen=True)
class Opaque:
    """Stands for a value that is no tensor: a device mesh, a script object."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass
class _Reader:
    """The state of one `load`: the graph so far, its nodes by name, and its symbols."""

    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    graph: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    nodes: dict[str, torch.fx.Node] = field(default_factory=dict)
    users: dict[str, list[str]] = field(default_factory=dict)
    symbols: dict[str, torch.SymInt] = field(default_factory=dict)
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    shape_env: ShapeEnv = field(default_factory=ShapeEnv)

    def __post_init__(self) -> None:
        self.fake_mode = FakeTensorMode(shape_env=self.shape_env)


def dump_paths() -> list[Path]:
    """Every dump of the corpus, sorted."""
    return sorted(CORPUS.glob("*/*__*.txt"))


def load(path: str | Path) -> torch.fx.GraphModule:
    """Rebuild the graph of a dump.

    Every node has `meta["val"]`. `graph_module.meta` holds the dump's `"header"` line, and the `"shape_env"` and
    `"fake_mode"` of its values.

    Skips the test that asks for a dump of a newer torch, when this one lacks its op for groups as objects.

    Raises:
        ValueError: A line cannot be parsed, or an op is unknown to this torch.
    """
    text = Path(path).read_text()
    if "mesh_get_process_group" in text and not _has_group_objects():
        pytest.skip(f"torch {torch.__version__} has no _dtensor.mesh_get_process_group: groups are names there")
    lines = text.splitlines()
    reader = _Reader()
    header = lines.pop(0) if lines and lines[0].startswith("#") else ""
    output_name = _output_name(lines)
    for number, line in enumerate(lines, start=2):
        try:
            if line.startswith("output ("):
                _read_output(reader, line, output_name)
            else:
                _read_node(reader, line)
        except (ValueError, AttributeError, IndexError) as error:
            raise ValueError(f"{Path(path).name}:{number}: {error}: {line}") from error
    _restore_user_order(reader)
    reader.graph.lint()
    module = torch.fx.GraphModule(reader.root, reader.graph)
    module.meta.update(header=header, shape_env=reader.shape_env, fake_mode=reader.fake_mode)
    return module


def _has_group_objects() -> bool:
    return hasattr(torch.ops, "_dtensor") and hasattr(torch.ops._dtensor, "mesh_get_process_group")


def dump(module: torch.fx.GraphModule) -> str:
    """Print a graph in the format of the corpus."""
    lines = [module.meta["header"]] if module.meta.get("header") else []
    lines += [_format_node(node) for node in module.graph.nodes]
    return "\n".join(lines) + "\n"


def example_inputs(module: torch.fx.GraphModule, seed: int) -> list[Any]:
    """Random values for the placeholders of a loaded graph; symbols become `SYMBOL_HINT`."""
    generator = torch.Generator().manual_seed(seed)
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    return [_example(value, generator) for value in values]


def _example(value: Value, generator: torch.Generator) -> Any:
    if isinstance(value, torch.SymInt):
        return _hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.uint8 and value.dim() == 1:
        return torch.get_rng_state()  # the only bytes that the corpus' graphs take
    shape, strides = ([_hint(size) for size in sizes] for sizes in (value.shape, value.stride()))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64) / 2
    example = torch.empty_strided(shape, strides, dtype=value.dtype)
    return example.copy_(numbers > 0 if value.dtype == torch.bool else numbers)


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def without_addresses(text: str) -> str:
    """Blank the addresses of objects, which differ in every run."""
    return _ADDRESS.sub("", text)


# --- reading: lines ----------------------------------------------------------------------------------


def _output_name(lines: list[str]) -> str:
    """The name of the output node: the one user that no line defines."""
    matches = [match for match in map(_NODE.match, lines) if match]
    defined = {match["name"] for match in matches}
    used = {user for match in matches for user in (match["users"] or "").split(",") if user}
    return next(iter(used - defined), "output")


def _read_output(reader: _Reader, line: str, name: str) -> None:
    (values,), _ = _parse_arguments(f"{line.removeprefix('output ')})", reader.nodes)
    reader.nodes[name] = reader.graph.create_node("output", "output", (values,), name=name)


def _read_node(reader: _Reader, line: str) -> None:
    match = _NODE.match(line)
    if match is None:
        raise ValueError("not a node")
    name, call = match["name"], match["call"]
    node = _create_placeholder(reader, name) if call == "placeholder" else _create_call(reader, name, call)
    if node.name != name:
        raise ValueError(f"the name {name} became {node.name}")
    node.meta["val"] = _parse_value(reader, match["value"])
    reader.nodes[name] = node
    reader.users[name] = [user for user in (match["users"] or "").split(",") if user]


def _restore_user_order(reader: _Reader) -> None:
    """List users as dumped: in a graph that passes have edited, their order is not that of the graph."""
    for name, users in reader.users.items():
        if users:
            reader.nodes[name].users = {reader.nodes[user]: None for user in users}


def _create_placeholder(reader: _Reader, name: str) -> torch.fx.Node:
    return reader.graph.create_node("placeholder", name, name=name)


def _create_call(reader: _Reader, name: str, call: str) -> torch.fx.Node:
    target_text, arguments_text = _split_call(call)
    if target_text == name and not arguments_text.strip(")"):
        setattr(reader.root, name, Opaque(name))
        return reader.graph.create_node("get_attr", name, name=name)
    target = _target(target_text)
    args, kwargs = _parse_arguments(arguments_text, reader.nodes)
    return reader.graph.create_node("call_function", target, _quote(target, args), kwargs, name=name)


def _split_call(call: str) -> tuple[str, str]:
    """Split `target(a, b)` into `target` and `a, b)`."""
    start = call.index("(", call.index(">")) if call.startswith("<") else call.index("(")
    return call[:start], call[start + 1 :]


def _target(text: str) -> Callable[..., Any]:
    """The function that a dumped target names."""
    if text.startswith("<built-in function "):
        return getattr(operator, text.removeprefix("<built-in function ").removesuffix(">"))
    if text in _HIGHER_ORDER:
        return _HIGHER_ORDER[text]
    namespace, op, overload = text.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


def _quote(target: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Turn the group name, which the dumps print as the number 0, back into a string."""
    if not isinstance(target, torch._ops.OpOverload):
        return args
    names = [argument.name for argument in target._schema.arguments]
    return tuple(
        str(arg) if name == "group_name" and isinstance(arg, int) else arg
        for name, arg in zip(names, args, strict=False)
    )


# --- reading: arguments ------------------------------------------------------------------------------


def _parse_arguments(text: str, nodes: Mapping[str, torch.fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Parse `a, [b, 1], key=c)`, the closing parenthesis included."""
    tokens = [match[1] for match in _ARGUMENT_TOKEN.finditer(text)]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    stream = _Tokens(tokens)
    while stream.peek() != ")":
        if stream.peek(1) == "=":
            key = stream.take()
            stream.expect("=")
            kwargs[key] = _parse_argument(stream, nodes)
        else:
            args.append(_parse_argument(stream, nodes))
        if stream.peek() == ",":
            stream.take()
    stream.expect(")")
    stream.expect_end()
    return tuple(args), kwargs


@dataclass
class _Tokens:
    """A list of tokens with a position."""

    tokens: list[str]
    position: int = 0

    def peek(self, ahead: int = 0) -> str:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else ""

    def take(self) -> str:
        token = self.tokens[self.position]
        self.position += 1
        return token

    def expect(self, token: str) -> None:
        if self.peek() != token:
            raise ValueError(f"expected {token!r}, found {self.peek()!r}")
        self.take()

    def expect_end(self) -> None:
        if self.position != len(self.tokens):
            raise ValueError(f"unexpected {self.peek()!r}")


def _parse_argument(tokens: _Tokens, nodes: Mapping[str, torch.fx.Node]) -> Any:
    first = tokens.take()
    if first not in ("[", "("):
        return _parse_atom(first, nodes)
    last = "]" if first == "[" else ")"
    items = []
    while tokens.peek() != last:
        items.append(_parse_argument(tokens, nodes))
        if tokens.peek() == ",":
            tokens.take()
    tokens.expect(last)
    return items if first == "[" else tuple(items)


def _parse_atom(text: str, nodes: Mapping[str, torch.fx.Node]) -> Any:
    """A node, a word, a torch constant, a device, a number, an op, or else a string."""
    if text in nodes:
        return nodes[text]
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    if text == "cpu":
        return torch.device("cpu")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return _target(text) if text.count(".") == 2 else text


# --- reading: values ---------------------------------------------------------------------------------


def _parse_value(reader: _Reader, text: str) -> Value:
    """Parse what a node holds: a tensor, a tuple, an object, None, or a (symbolic) number."""
    if text == "None":
        return None
    if text.startswith("<torch.distributed.distributed_c10d.ProcessGroup "):
        return reader.groups.setdefault(text, _create_group(len(reader.groups)))
    if text.startswith("<"):
        return Opaque(text)
    if text.startswith("("):
        return tuple(_parse_value(reader, part) for part in _split_top_level(text[1:-1]))
    match = _TENSOR.match(text)
    if match is None:
        return _parse_size(reader, text)
    shape, strides = (_parse_sizes(reader, match[key]) for key in ("shape", "strides"))
    with reader.fake_mode:
        return torch.empty_strided(shape, strides, dtype=getattr(torch, match["dtype"]))


def _create_group(index: int) -> dist.ProcessGroup:
    """A process group that has a name and communicates with no one."""
    create = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    group = dist.ProcessGroup(0, 4)  # type: ignore[call-arg]
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, create(0, 4))
    group._set_group_name(f"group{index}")  # type: ignore[arg-type]
    return group


def _split_top_level(text: str) -> Iterator[str]:
    """Split at the commas that stand inside no bracket."""
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    if text[start:].strip():
        yield text[start:].strip()


def _parse_sizes(reader: _Reader, text: str) -> tuple[int | torch.SymInt, ...]:
    return tuple(_parse_size(reader, part) for part in _split_top_level(text))


def _parse_size(reader: _Reader, text: str) -> int | torch.SymInt:
    """Evaluate `4*s27` over symbolic integers, created when first seen."""
    names = _SYMBOL.findall(text)
    for name in names:
        if name not in reader.symbols:
            reader.symbols[name] = _create_symbol(reader.shape_env, name)
    return _evaluate(ast.parse(text, mode="eval").body, reader.symbols)


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def _evaluate(expression: ast.expr, symbols: Mapping[str, torch.SymInt]) -> int | torch.SymInt:
    if isinstance(expression, ast.Constant) and isinstance(expression.value, int):
        return expression.value
    if isinstance(expression, ast.Name):
        return symbols[expression.id]
    if isinstance(expression, ast.BinOp) and type(expression.op) in _ARITHMETIC:
        left, right = (_evaluate(side, symbols) for side in (expression.left, expression.right))
        return _ARITHMETIC[type(expression.op)](left, right)
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
        return -_evaluate(expression.operand, symbols)
    raise ValueError(f"not a size: {ast.unparse(expression)}")


def _create_symbol(shape_env: ShapeEnv, name: str) -> torch.SymInt:
    """A backed symbol that prints as `name` (torch would number it by a hash of its source)."""
    source = ConstantSource(name)
    number = int(name[1:])
    shape_env._generate_unique_id = lambda source_name: number  # type: ignore[method-assign]
    symbol = shape_env.create_symbol(SYMBOL_HINT, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    size = shape_env.create_symintnode(symbol, hint=SYMBOL_HINT, source=source)
    assert isinstance(size, torch.SymInt)
    return size


# --- printing ----------------------------------------------------------------------------------------


def _format_node(node: torch.fx.Node) -> str:
    if node.op == "output":
        (results,) = node.args
        assert isinstance(results, list | tuple)
        return f"output {_format_argument(tuple(results))}"
    call = "placeholder" if node.op == "placeholder" else _format_call(node)
    users = f": {','.join(user.name for user in node.users)}" if node.op != "placeholder" else ""
    return f"{node.name} = {call}  # {_format_value(node.meta['val'])} users[{len(node.users)}]{users}"


def _format_call(node: torch.fx.Node) -> str:
    arguments = [_format_argument(arg) for arg in node.args]
    arguments += [f"{key}={_format_argument(arg)}" for key, arg in node.kwargs.items()]
    return f"{node.target}({', '.join(arguments)})"


def _format_argument(argument: Any) -> str:
    """As `str`, but strings (and the names of nodes and devices) bare at every depth."""
    if isinstance(argument, tuple) and len(argument) == 1:
        return f"({_format_argument(argument[0])},)"
    if isinstance(argument, list | tuple):
        left, right = "[]" if isinstance(argument, list) else "()"
        return f"{left}{', '.join(map(_format_argument, argument))}{right}"
    return str(argument)


def _format_value(value: Value) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_format_value, value))})"
    if isinstance(value, torch.Tensor):
        shape, strides = (", ".join(map(str, sizes)) for sizes in (value.shape, value.stride()))
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]s[{strides}]"
    return str(value)
