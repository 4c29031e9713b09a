"""Runs the notebooks in examples/, and writes what their cells print into them: ``python tests/notebooks.py``."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored_outputs(notebook: dict[str, Any]) -> list[str]:
    """Return the text that each code cell has as its output in the file."""
    return ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in code_cells(notebook)]


def run(notebook: dict[str, Any], names: dict[str, Any]) -> list[str]:
    """Run the code cells in order, with ``names`` as their variables, and return what each one prints."""
    printed = []
    for cell in code_cells(notebook):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), names)
        printed.append(said.getvalue())
    return printed


def main() -> None:
    for file in NOTEBOOKS:
        notebook = json.loads(file.read_text())
        for number, (cell, text) in enumerate(zip(code_cells(notebook), run(notebook, {}), strict=True), start=1):
            stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell.update(execution_count=number, outputs=[stream] if text else [])
        file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
