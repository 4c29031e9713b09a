"""Tests that the cells of examples/remote_experts.ipynb run in order, and that the file holds no output."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("msgspec")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "remote_experts.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs() -> None:
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells()] == [([], None)] * len(cells())


def test_the_cells_train_a_mixture_over_served_experts(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for cell in cells():
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}#{cell['id']}", "exec"), names)
    finally:
        if "server" in names:
            names["server"].drain()
    assert sum(names["losses"][-10:]) < sum(names["losses"][:10]) / 2
    assert names["ada"].updates == names["bob"].updates == len(names["losses"])
    assert "ada: 101 of 101 requests answered" in capsys.readouterr().out
