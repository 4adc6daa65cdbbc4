"""Run a notebook's code cells one after the other, and see that they print the output that it holds.

python tests/support/notebooks.py examples/tour.ipynb     write their output into it
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any], name: str) -> list[str]:
    """The text that each code cell prints. What a cell's last line evaluates to is not shown: cells print."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(code_cells(notebook)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), f"{name}[{number}]", "exec"), names)
        printed.append(out.getvalue())
    return printed


def shown(cell: dict[str, Any]) -> str:
    """The output that a notebook holds of a cell."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def write(path: Path) -> None:
    notebook = json.loads(path.read_text("utf-8"))
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run(notebook, path.name), strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["outputs"], cell["execution_count"] = [stream] if text else [], number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
