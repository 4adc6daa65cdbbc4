"""Run the tests on several versions of torch, each in a virtual environment of its own, and print a table.

    python tests/matrix.py                                      the versions that docs/reference/versions.md reports on
    python tests/matrix.py --torch 2.12.1 2.14.1 -- -k gather   other versions, with arguments of pytest
    python tests/matrix.py --tests tests                        the whole suite

pip's own settings choose the index, and so whether torch comes with CUDA; no test needs a GPU, and none is used. An
environment is made once, in `--folder`, and used again after that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("2.11.0", "2.13.0", "2.15.0")
TESTS = tuple(
    f"tests/test_{name}.py"
    for name in (
        *("rewrite", "attacks", "reasons", "strict", "property", "corpus", "coalesce", "agree", "ops", "backend"),
        *("layering", "config", "report"),
    )
)
TOOLS = ("pytest>=8", "pytest-xdist>=3.5", "expecttest>=0.2", "hypothesis>=6.100", "numpy")
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
        failures: Names of the tests that failed, with the last line of why.
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
        return f"| {' | '.join(cells)} |" if not self.fault else f"| {self.asked} | {self.fault} |||||"


def main() -> int:
    """Exit code 0: everything passed on every version; 1: something failed, or could not be installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=VERSIONS, metavar="VERSION", help="default: %(default)s")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="default: graphs, ops and backend")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "asynctp-matrix"))
    parser.add_argument("--python", default=sys.executable, help="makes the environments (default: %(default)s)")
    parser.add_argument("pytest", nargs="*", metavar="-- ARGUMENT", help="further arguments of pytest")
    options = parser.parse_args()
    rows = [run_version(version, options) for version in options.torch]
    print("\n| torch | triton | Python | passed | failed | skipped | time |\n|---|---|---|---|---|---|---|")
    for row in rows:
        print(row)
    for row in rows:
        for failure in row.failures:
            print(f"{row.asked}: {failure}")
    return int(any(row.fault or row.failures for row in rows))


def run_version(version: str, options: argparse.Namespace) -> Row:
    """Make the environment if it is not there, and run the tests in it."""
    row, folder = Row(version), options.folder / f"torch{version}"
    python = folder / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run([options.python, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"torch=={version}", *TOOLS], check=True)
        subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
        found = subprocess.run([python, "-c", _PRINT_VERSIONS], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        row.fault = f"cannot be installed here (exit code {error.returncode} of {error.cmd[1:4]})"
        return row
    row.torch, row.triton, row.python = json.loads(found.stdout.splitlines()[-1])
    run_tests(row, python, folder / "results.xml", [*options.tests, *options.pytest])
    return row


def run_tests(row: Row, python: Path, results: Path, arguments: list[str]) -> None:
    results.unlink(missing_ok=True)
    started = time.monotonic()
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=hidden, check=False)
    row.seconds = time.monotonic() - started
    if not results.exists():
        row.fault = f"pytest ended with {done.returncode}"
        return
    for case in ElementTree.parse(results).iter("testcase"):
        outcome = next((name for name in ("failure", "error", "skipped") if case.find(name) is not None), "passed")
        row.counts[{"failure": "failed", "error": "failed"}.get(outcome, outcome)] += 1
        if outcome in ("failure", "error"):
            message = str(case.find(outcome).get("message", ""))  # type: ignore[union-attr]
            row.failures.append(f"{case.get('classname')}.{case.get('name')}: {message.splitlines()[0][:200]}")


if __name__ == "__main__":
    sys.exit(main())
