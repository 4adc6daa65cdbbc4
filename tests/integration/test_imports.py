"""Imports in fresh processes: the graph side needs no triton, loads no compiler, and changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asynctp_passes import Report

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"


# --- borders ---------------------------------------------------------------------------------------------------
def test_the_graph_side_works_without_triton(run_after_torch: Callable[[str], None]) -> None:
    """With triton and the kernels out of reach, the package imports and rewrites a graph."""
    program = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "asynctp_kernels"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from graph_builder import GraphBuilder
import asynctp_passes, asynctp_passes.backend, asynctp_passes.tools.cli, asynctp_passes.reporting.graph_page

b = GraphBuilder()
graph = b.returns(b.mm(b.gather(b.input("x", [4, 8])), b.input("w", [8, 12])))
assert len(asynctp_passes.run(graph, asynctp_passes.Config(strict="all")).fused) == 1
assert not {"triton", "asynctp_kernels"} & set(sys.modules)
"""
    run_after_torch(program)


def test_an_import_loads_no_compiler() -> None:
    """These take seconds, and a program that imports asynctp may compile nothing."""
    program = """
import sys
import asynctp_passes

heavy = ("torch._dynamo", "torch._inductor", "triton")
assert not [name for name in heavy if name in sys.modules]
assert {"AsyncTPPass", "RematerializePass", "backend", "reports", "run"} <= {*dir(asynctp_passes)}
assert asynctp_passes.AsyncTPPass is asynctp_passes.backend.AsyncTPPass
assert all(name in sys.modules for name in heavy[:2])
assert not hasattr(asynctp_passes, "nothing_of_this_name")
"""
    run_program(program)


def test_a_compile_without_collectives_imports_no_step_of_the_pass() -> None:
    """Nor the kernels: each graph is looked through for what communicates, and that is all."""
    program = """
import sys
from unittest import mock
import torch
import torch._inductor.config
from asynctp_passes import backend, pipeline

torch._inductor.config.force_disable_caches = True  # no other test has compiled it
walks = []
communications = pipeline.communications
pipeline.communications = lambda nodes: walks.append(nodes) or communications(nodes)
layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
quick = {"fallback_by_default": True} if "fallback_by_default" in torch._inductor.list_options() else {}
torch.compile(layer, backend=backend.asynctp, options=quick)(torch.ones(2, 4)).sum().backward()
assert len(walks) == 4, "the joint graph's, before the joint pass and before it is divided, and both halves'"
rooms = ("matching", "planning", "rewriting", "remat", "layout", "steps", "ranks.undo", "reporting.graph_page")
steps = [name for name in sys.modules if name.removeprefix("asynctp_passes.").startswith(rooms)]
assert not steps, steps
assert not [name for name in sys.modules if name.startswith("asynctp_kernels")]
assert backend.summary().graphs == 2 and not backend.summary().internal_errors
"""
    run_program(program)


def test_the_command_line_needs_no_torch_to_speak_of_reasons_and_reports(tmp_path: Path) -> None:
    """They answer at once: torch alone takes longer than all that they do."""
    reports = tmp_path / "reports.jsonl"
    reports.write_text(Report(graph="graph 0", phase="forward", remarks=()).to_json() + "\n")
    program = f"""
import contextlib, io, sys

sys.modules["torch"] = None  # its import fails
import asynctp_passes
from asynctp_passes.tools.cli import main

for arguments, said in (
    (["--help"], "usage: asynctp"),
    (["--version"], "asynctp-passes"),
    (["reasons"], "ATP105 COMPUTED_BETWEEN"),
    (["report", {str(reports)!r}], "graph 0"),
):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(arguments)
    assert said in out.getvalue(), (arguments, out.getvalue())
"""
    run_program(program)


def test_ops_are_there_in_a_program_that_has_imported_torch(run_after_torch: Callable[[str], None]) -> None:
    """It may load an exported program, which calls them by name and asks for nothing else of the package."""
    run_after_torch("import torch, asynctp_passes; torch.ops.asynctp.all_gather_matmul")
    run_program("import asynctp_passes, torch; asynctp_passes.ops; torch.ops.asynctp.all_gather_matmul")
    run_after_torch(
        "import torch; assert callable(__import__('asynctp_passes').__dict__['run'])"
    )  # as vLLM looks it up


def test_the_public_names_are_there(run_after_torch: Callable[[str], None]) -> None:
    """Each by an attribute and by an import, and each is what it is at home."""
    program = """
import asynctp_passes
import asynctp_passes.reference as by_import
from asynctp_passes import *

assert by_import is asynctp_passes.reference is asynctp_passes.ops.reference is reference
assert run is asynctp_passes.pipeline.run
assert all(getattr(asynctp_passes, name) is globals()[name] for name in asynctp_passes.__all__)
"""
    run_after_torch(program)


def test_what_the_examples_compile_with_needs_no_installed_package(run_after_torch: Callable[[str], None]) -> None:
    """A checkout on Python's path: torch looks names of backends up among the entry points of what is installed."""
    program = """
import importlib.metadata
from unittest import mock
import torch

with mock.patch("importlib.metadata.entry_points", lambda **_: importlib.metadata.EntryPoints()):
    from asynctp_passes.tools.demo.recipe import compiler

    layer = torch.nn.Linear(4, 4)
    assert "asynctp" not in torch._dynamo.list_backends()
    assert compiler("asynctp", "0", torch.device("cpu"))(layer)(torch.ones(2, 4)).shape == (2, 4)
"""
    run_after_torch(program)


def test_importing_changes_nothing(run_after_torch: Callable[[str], None]) -> None:
    """The import makes no process group and sets no Inductor option, environment variable or log handler."""
    program = """
import logging, os
import torch, torch.distributed
import torch._inductor.config as inductor

before = dict(os.environ), inductor.get_config_copy(), list(logging.getLogger().handlers)
import asynctp_passes

assert (dict(os.environ), inductor.get_config_copy(), list(logging.getLogger().handlers)) == before
assert not torch.distributed.is_initialized()
assert not logging.getLogger("asynctp_passes").handlers
"""
    run_after_torch(program)


# --- processes ---------------------------------------------------------------------------------------------------
def run_program(program: str) -> None:
    """Run it in a process of its own, with the modules of `tests/support`; the test fails if it does."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=SUPPORT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


_FORKS = """
import os, runpy, sys
import torch

while path := sys.stdin.readline().strip():
    child = os.fork()
    if child == 0:
        os.dup2(os.open(path + ".err", os.O_WRONLY | os.O_CREAT), 2)
        runpy.run_path(path)
        sys.stderr.flush()
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def run_after_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], None]]:
    """A function that runs a program as `run_program` does, in a fork of a process that has imported torch alone."""
    folder, command = tmp_path_factory.mktemp("programs"), [sys.executable, "-c", _FORKS]
    with subprocess.Popen(command, cwd=SUPPORT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        told, said = process.stdin, process.stdout
        assert told is not None
        assert said is not None

        def run(program: str) -> None:
            path = folder / f"{len(list(folder.iterdir()))}.py"
            path.write_text(program)
            print(path, file=told, flush=True)
            status = said.readline().strip()
            assert status == "0", path.with_suffix(".py.err").read_text()

        yield run
