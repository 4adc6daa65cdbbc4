"""Rooms import lower rows only, and private torch lives in one room.

A room is a package, or a module beside the packages. It may import rooms of its own row or of a lower one, at the top
of a module or inside a function. No import goes in a circle, neither between rooms nor within one.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PASSES = ROOT / "asynctp_passes"
KERNELS = ROOT / "kernels" / "asynctp_kernels"


ROWS = (
    ("config", "torch_private", "reasons", "errors", "waiting"),
    ("ops", "ir"),
    ("layout",),
    ("matching",),
    ("planning",),
    ("rewriting", "reporting"),
    ("ranks",),
    ("pipeline", "remat", "steps"),
    ("backend",),
    ("process", "reference", "doctor"),
    ("__init__",),
    ("torchtitan", "vllm", "megatron"),
    ("tools",),
    ("__main__",),
)
ROW_OF = {module: row for row, modules in enumerate(ROWS) for module in modules}


KERNEL_ROWS = (
    ("torch_private", "errors", "shard_layout"),
    ("meeting", "signals"),
    ("host",),
    ("numerics", "interpreter"),
    ("cuda",),
    ("__init__",),
)
CUDA_ROWS = (
    ("choose",),
    ("runtime",),
    ("gemm",),
    ("facts",),
    ("checks",),
    ("plans",),
    ("implementations",),
    ("choices", "groups"),
    ("moves",),
    ("calls",),
    ("bound_calls",),
    ("__init__",),
)
"""The rooms of `asynctp_kernels.cuda`."""


KERNEL_ROW_OF = {module: row for row, modules in enumerate(KERNEL_ROWS) for module in modules}


PRIVATE_TORCH = {
    # An op namespace, which torch.ops spells with an underscore.
    "ops/plain_collectives": {"torch.ops._c10d_functional"},
    "rewriting/emit_alone": {"torch.ops._c10d_functional"},
    "rewriting/emit_gather": {"torch.ops._c10d_functional"},
    "rewriting/ordering": {"torch.ops._c10d_functional"},
    "tools/bench": {"torch.ops._c10d_functional"},
    "ops/collectives": {"torch.ops._c10d_functional"},
    "tools/demo/recipe": {"torch.ops._c10d_functional"},
    "vllm": {"torch.ops._C"},
    # Programs for the reader, as users write them.
    "tools/reason_programs": {
        "torch._scaled_mm",
        "torch.distributed._functional_collectives",
        "torch.ops._c10d_functional",
    },
    # The demo is a program of its own: it turns caches off and has the backward graph compiled early.
    "tools/demo/train": {"torch._functorch", "torch._inductor", "torch._dynamo"},
}
"""Private names of torch outside `torch_private`, by module; each is there for the reason above it."""


PROGRAMS = {"tools/bench", "tools/e2e"}
"""Modules that are run, in processes of their own, and imported by nothing else: they may need the kernels."""


KERNELS_PRIVATE_TORCH: dict[str, set[str]] = {}


# --- reading sources -------------------------------------------------------------------------------------------
@functools.cache
def modules(package: Path) -> Mapping[str, ast.Module]:
    """Every module of a package, by its path without the suffix."""
    paths = sorted(package.rglob("*.py"))
    return {path.relative_to(package).with_suffix("").as_posix(): ast.parse(path.read_text("utf-8")) for path in paths}


def imported(tree: ast.Module, package: str) -> Iterator[str]:
    """The absolute names of all that a module of `package` imports, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{package}.{node.module or ''}".rstrip(".") if node.level else str(node.module)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_imports(tree: ast.Module, home: str, known: dict[str, int]) -> set[str]:
    """The modules of its own package that a module imports: `pkg.find.find` is `find`, `pkg.Report` is `__init__`."""
    package = home.split(".")[0]
    parts = [name.split(".")[1:] for name in imported(tree, home) if name.split(".")[0] == package]
    return {part[0] if part and part[0] in known else "__init__" for part in parts}


def top(module: str) -> str:
    """`demo` for `demo/train`."""
    return module.split("/", maxsplit=1)[0]


def graph_of(package: Path, known: dict[str, int]) -> dict[str, set[str]]:
    """Modules, and the modules of the package that each imports."""
    out: dict[str, set[str]] = {}
    for module, tree in modules(package).items():
        home = ".".join((package.name, *module.split("/")[:-1]))
        out.setdefault(top(module), set()).update(own_imports(tree, home, known) - {top(module)})
    return out


# --- rows ------------------------------------------------------------------------------------------------------
PACKAGES = pytest.mark.parametrize(
    ("package", "rows"), [(PASSES, ROW_OF), (KERNELS, KERNEL_ROW_OF)], ids=["passes", "kernels"]
)


@PACKAGES
def test_every_module_has_a_row(package: Path, rows: dict[str, int]) -> None:
    assert {top(module) for module in modules(package)} == set(rows)


@PACKAGES
def test_no_module_imports_a_higher_row(package: Path, rows: dict[str, int]) -> None:
    up = [
        f"{module} imports {other}"
        for module, others in graph_of(package, rows).items()
        for other in sorted(others)
        if rows[other] > rows[module]
    ]
    assert up == []


@PACKAGES
def test_no_import_goes_in_a_circle(package: Path, rows: dict[str, int]) -> None:
    TopologicalSorter(graph_of(package, rows)).prepare()


@pytest.mark.parametrize(
    "room",
    [PASSES / name for names in ROWS for name in names if (PASSES / name).is_dir()]
    + [KERNELS / "cuda" / name for names in CUDA_ROWS for name in names if (KERNELS / "cuda" / name).is_dir()],
    ids=lambda room: room.name,
)
def test_no_import_goes_in_a_circle_within_a_room(room: Path) -> None:
    """Nor does a room of the kernels', which hold all that runs on a GPU, import itself in a circle."""
    known = {top(module): 0 for module in modules(room)}
    package = PASSES if room.parent == PASSES else KERNELS
    prefix = ".".join(room.relative_to(package.parent).parts) + "."
    inner: dict[str, set[str]] = {}
    for module, tree in modules(room).items():
        names = {name.removeprefix(prefix).split(".")[0] for name in imported(tree, "") if name.startswith(prefix)}
        inner.setdefault(top(module), set()).update(names & set(known))
    TopologicalSorter({module: others - {module} for module, others in inner.items()}).prepare()


ROOMS = {name: PASSES / name for names in ROWS for name in names if (PASSES / name).is_dir()}
ROOMS |= {name: KERNELS / "cuda" / name for names in CUDA_ROWS for name in names if (KERNELS / "cuda" / name).is_dir()}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_its_job_and_so_do_its_modules(room: str) -> None:
    """The first line of a docstring does. Contributors are told that of each room."""
    jobs = {module: ast.get_docstring(tree) for module, tree in modules(ROOMS[room]).items()}
    assert [module for module, job in jobs.items() if not job] == []
    row = next(line for line in told_rows() if line.startswith(f"| `{room}` |"))
    assert str(jobs["__init__"]).splitlines()[0].rstrip(".") in row


def told_rows() -> list[str]:
    """The rows of rooms in CONTRIBUTING, the highest first."""
    return re.findall(r"^\| `\w+` \|.*$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)


def test_no_room_of_the_kernels_imports_a_higher_one() -> None:
    row_of = {room: row for row, rooms in enumerate(CUDA_ROWS) for room in rooms}
    cuda, prefix = KERNELS / "cuda", "asynctp_kernels.cuda."
    found = {
        (top(module), name.removeprefix(prefix).split(".")[0])
        for module, tree in modules(cuda).items()
        for name in imported(tree, "")
        if name.startswith(prefix)
    }
    assert {room for room, _ in found} == set(row_of)
    assert [(room, other) for room, other in sorted(found) if row_of.get(other, len(CUDA_ROWS)) > row_of[room]] == []


@pytest.mark.parametrize("rows", [ROWS, CUDA_ROWS], ids=["passes", "kernels"])
def test_contributors_see_a_room_above_those_that_it_imports(rows: tuple[tuple[str, ...], ...]) -> None:
    row_of = {f"| `{name}` |": row for row, names in enumerate(rows) for name in names}
    told = [row for line in told_rows() for start, row in row_of.items() if line.startswith(start)]
    assert len(told) > 3
    assert told == sorted(told, reverse=True)


def test_check_and_rewrite_name_each_other() -> None:
    """The table of `chains`: each function in it is there, one that proves and one that rewrites in each row."""
    sources = modules(PASSES)
    functions = {
        f"{path}.{node.name}"
        for path, tree in sources.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    told = ast.get_docstring(sources["matching/chains"], clean=False) or ""
    table = re.findall(r"^    .*?  (\w+\.\w+) +(\w+\.\w+)$", told, re.MULTILINE)
    assert len(table) > 10
    for proves, rewrites in table:
        assert {f"matching/{proves}", f"planning/{proves}"} & functions, proves
        assert f"rewriting/{rewrites}" in functions


def test_only_rewriting_edits_graphs() -> None:
    """The calls that change a graph occur nowhere else, so that finding and deciding cannot.

    `torch_private` puts a graph back, and adds a tensor that Inductor can wait for. `remat` edits the halves of a
    graph, which no plan is about.
    """
    edits = {"erase_node", "replace_all_uses_with", "inserting_before", "inserting_after", "replace_input_with"}
    editors = {
        module
        for module, tree in modules(PASSES).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in edits
    }
    own = {"builder", "cleanup", "emit_alone", "rewrite", "store_scales", "ungroup"}
    private = {"torch_private/fx_graphs", "torch_private/inductor_order"}
    assert editors == private | {"remat/partition"} | {f"rewriting/{module}" for module in own}


def test_only_config_reads_our_environment_variables() -> None:
    """Prose may name a variable; code that looks one up builds its name from the prefix, which config holds alone."""
    holders = {
        module
        for module, tree in modules(PASSES).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value == "ASYNCTP_"
    }
    assert holders == {"config"}


# --- borders ---------------------------------------------------------------------------------------------------
def test_kernels_never_import_the_passes() -> None:
    for module, tree in modules(KERNELS).items():
        names = {name.split(".")[0] for name in imported(tree, KERNELS.name)}
        assert "asynctp_passes" not in names, module


def test_passes_import_the_kernels_by_name_only() -> None:
    """`ops` loads them when they are asked for; nothing imports them, or triton, along with the package."""
    for module, tree in modules(PASSES).items():
        names = {name.split(".")[0] for name in imported(tree, PASSES.name)}
        assert module in PROGRAMS or not names & {"asynctp_kernels", "triton"}, module


# --- private torch ---------------------------------------------------------------------------------------------
def dotted(node: ast.expr) -> str:
    """`"torch.ops.aten"` for that chain of attributes, nothing for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def aliases(tree: ast.Module) -> dict[str, str]:
    """What the names that imports bind stand for: `dist` for `torch.distributed`."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom):
            bound.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return bound


def private_names(tree: ast.Module) -> set[str]:
    """The names under torch, imported or used, up to their first part that begins with one underscore."""
    bound = aliases(tree)
    names = set(imported(tree, ""))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = dotted(node).partition(".")
            names.add(f"{bound.get(root, root)}.{rest}")
    return {private for name in names if name.startswith("torch.") and (private := first_private(name))}


def first_private(name: str) -> str:
    """`torch._inductor` for `torch._inductor.config`; nothing for a name that is public throughout."""
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")), None)
    return "" if place is None else ".".join(parts[: place + 1])


def test_private_torch_is_in_one_room_only() -> None:
    found = {module: private_names(tree) for module, tree in modules(PASSES).items()}
    assert any(found[module] for module in found if top(module) == "torch_private")
    outside = {module: names for module, names in found.items() if names and top(module) != "torch_private"}
    assert outside == PRIVATE_TORCH


def test_the_kernels_need_next_to_no_private_torch() -> None:
    found = {module: private_names(tree) for module, tree in modules(KERNELS).items()}
    assert found.pop("torch_private")
    assert {module: names for module, names in found.items() if names} == KERNELS_PRIVATE_TORCH


def test_the_kernels_take_no_stream_that_others_get_too() -> None:
    """PyTorch hands its streams out in turn: ours are the driver's (`driver.new_stream`)."""
    for module, tree in modules(KERNELS).items():
        calls = {dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & {"torch.Stream", "torch.cuda.Stream"}, module


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._inductor.config", {"torch._inductor"}),
        ("from torch._dynamo import reset", {"torch._dynamo"}),
        ("def f():\n    from torch import _C", {"torch._C"}),
        ("isinstance(x, torch._ops.OpOverload)", {"torch._ops"}),
        ("import torch.distributed as dist\ndist._f(dist.g._h)", {"torch.distributed._f", "torch.distributed.g._h"}),
        ("from torch import distributed\ndistributed._f", {"torch.distributed._f"}),
        ("torch.ops.aten.mm.default", set()),
        ("torch.__version__", set()),
    ],
)
def test_private_names(source: str, found: set[str]) -> None:
    assert private_names(ast.parse(source)) == found


def test_imports_inside_functions_count() -> None:
    source = (
        "def f():\n    from asynctp_passes.matching.find import find\n    from asynctp_passes import reasons, Report"
    )
    assert own_imports(ast.parse(source), "asynctp_passes", ROW_OF) == {"matching", "reasons", "__init__"}
