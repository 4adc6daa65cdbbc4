"""The notebook runs cell by cell, and prints the output that it shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "examples" / "tour.ipynb"

PROGRAM = """
import json, sys
from pathlib import Path
from notebooks import code_cells, run, shown

notebook = json.loads(Path(sys.argv[1]).read_text("utf-8"))
for number, (cell, text) in enumerate(zip(code_cells(notebook), run(notebook, "tour"), strict=True)):
    assert shown(cell) == text, f"cell {number} prints\\n{text}\\nand shows\\n{shown(cell)}"
"""


@pytest.mark.ranks
def test_every_cell_prints_what_it_shows(tmp_path: Path) -> None:
    """To write the output anew: python tests/support/notebooks.py examples/tour.ipynb"""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TOUR)],
        cwd=ROOT / "tests" / "support",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_it_is_a_notebook() -> None:
    """Of version 4.5, whose cells have names; every code cell but the first one prints something."""
    notebook = json.loads(TOUR.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(names) == len(set(names))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [bool(cell["outputs"]) for cell in code] == [False, *[True] * (len(code) - 1)]
