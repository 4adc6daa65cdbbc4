"""The notebook runs cell by cell, and prints the output that it shows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from scripts import run_forked

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
    program = tmp_path / "tour.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}  # a report says what comes of it
    done = run_forked(program, str(TOUR), cwd=tmp_path, environment=environment, paths=True, timeout_s=600)
    assert done.returncode == 0, done.stderr[-4000:]


def test_it_is_a_notebook() -> None:
    """Of version 4.5, whose cells have names; every code cell but the first one prints something."""
    notebook = json.loads(TOUR.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(names) == len(set(names))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [bool(cell["outputs"]) for cell in code] == [False, *[True] * (len(code) - 1)]
