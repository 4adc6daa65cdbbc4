"""Run the tests on several versions of torch, each in a virtual environment of its own, and print a table.

    python tests/support/matrix.py                               the versions of docs/reference/tried.md
    python tests/support/matrix.py --torch 2.12.1 2.14.1 -- -n 4 other versions, with arguments of pytest
    python tests/support/matrix.py --tests tests/*/test_*.py     the whole suite
    python tests/support/matrix.py --index https://download.pytorch.org/whl/cpu   torch without CUDA, 200 MB, not 5 GB

No test needs a GPU, and none is used. An environment is made once, in `--folder`, and used again after that. Each file
is a run of its own, so that one that hangs or crashes costs its own results only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TESTS = tuple(
    f"tests/{folder}/test_{name}.py"
    for folder, names in (
        ("unit", ("corpus", "rewrite", "reasons", "strict", "index_map", "bucketing", "overlap", "shard_region")),
        ("unit", ("report", "config", "registry", "layering")),
        ("soundness", ("attacks", "property")),
        ("integration", ("torch_notes", "accord", "ops", "forms", "backend", "recipes")),
        ("tools", ("doctor",)),
    )
    for name in names
)
TOOLS = (
    "pytest>=8",
    "pytest-xdist>=3.5",
    "expecttest>=0.2",
    "hypothesis>=6.100",
    "matplotlib>=3.8",
    "tensorboard>=2.16",
)
_PRINT_VERSIONS = """
import json, platform, torch
try:
    from triton import __version__ as triton
except ImportError:
    triton = "none"
print(json.dumps([torch.__version__, triton, platform.python_version()]))
"""


@dataclass
class Row:
    """What one version gave.

    Attributes:
        asked: The version of torch that was asked for.
        torch, triton, python: What was installed.
        counts: Tests by outcome: "passed", "failed", "skipped".
        failures: Names of the tests that failed, with the last line of why; files that gave no results.
        fault: Why nothing ran; empty when tests ran.
        seconds: How long the tests took.
    """

    asked: str
    torch: str = ""
    triton: str = ""
    python: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    fault: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        counts = [str(self.counts[name]) for name in ("passed", "failed", "skipped")]
        cells = [self.torch or self.asked, self.triton, self.python, *counts, f"{self.seconds:.0f} s"]
        return f"| {' | '.join(cells)} |" if not self.fault else f"| {self.asked} | {self.fault} ||||||"


def main() -> int:
    """Exit code 0: everything passed on every version; 1: something failed, or could not be installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=VERSIONS, metavar="VERSION", help="default: %(default)s")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="default: graphs, ops and backend")
    parser.add_argument("--index", metavar="URL", help="where else pip looks; without it pip's settings decide on CUDA")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "asynctp-matrix"))
    parser.add_argument("--python", default=sys.executable, help="makes the environments (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=1800, metavar="SECONDS", help="for each path (%(default)s)")
    parser.add_argument("pytest", nargs="*", metavar="-- ARGUMENT", help="further arguments of pytest")
    options = parser.parse_args()
    rows = []
    for version in options.torch:
        rows.append(run_version(version, options))
        print(rows[-1], *rows[-1].failures, sep="\n", flush=True)
    print("\n| torch | triton | Python | passed | failed | skipped | time |\n|---|---|---|---|---|---|---|")
    print(*rows, sep="\n")
    return int(any(row.fault or row.failures for row in rows))


def run_version(version: str, options: argparse.Namespace) -> Row:
    """Make the environment if it is not there, and run the tests in it."""
    row, folder = Row(version), options.folder / f"torch{version}"
    python = folder / "bin" / "python"
    index = ["--extra-index-url", options.index] if options.index else []
    try:
        if not python.exists():
            subprocess.run([options.python, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *index]
        subprocess.run([*pip, f"torch=={version}", *TOOLS, "--editable", str(ROOT)], check=True)
        found = subprocess.run([python, "-c", _PRINT_VERSIONS], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        row.fault = f"cannot be installed here (exit code {error.returncode} of {error.cmd[1:4]})"
        return row
    row.torch, row.triton, row.python = json.loads(found.stdout.splitlines()[-1])
    started = time.monotonic()
    for path in options.tests:
        run_tests(row, python, folder / "results.xml", path, options)
    row.seconds = time.monotonic() - started
    return row


def run_tests(row: Row, python: Path, results: Path, path: str, options: argparse.Namespace) -> None:
    """Run one file (or folder), and add what it gave to the row."""
    results.unlink(missing_ok=True)
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", path, *options.pytest]
    process = subprocess.Popen(command, cwd=ROOT, env=hidden, start_new_session=True)
    try:
        end = f"pytest ended with {process.wait(options.limit)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the processes that it started, too
        process.wait()
        end = f"it took longer than {options.limit} s"
    if not results.exists():
        row.failures.append(f"{path}: no results, {end}")
        return
    for case in ElementTree.parse(results).iter("testcase"):
        outcome = next((name for name in ("failure", "error", "skipped") if case.find(name) is not None), "passed")
        row.counts[{"failure": "failed", "error": "failed"}.get(outcome, outcome)] += 1
        if outcome in ("failure", "error"):
            message = str(case.find(outcome).get("message", ""))  # type: ignore[union-attr]
            row.failures.append(f"{case.get('classname')}.{case.get('name')}: {message.splitlines()[0][:200]}")


if __name__ == "__main__":
    sys.exit(main())
