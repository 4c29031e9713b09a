"""Tests that the notebooks run, learn, and hold the outputs that their cells print.

Numbers with a decimal point and ports may differ: they depend on the processor and on what else runs.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from notebooks import NOTEBOOKS, run, stored_outputs

PACKAGES = {"remote_experts": ("grpc", "msgspec"), "transformers_4_bits": ("transformers",)}
VARIES = re.compile(r"127\.0\.0\.1:\d+|\d+\.\d+")


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """Yield an empty dictionary for a notebook's variables, and end the server that it may have started."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    yield variables
    if "server" in variables:
        variables["server"].drain()
    if (transformers := sys.modules.get("transformers")) is not None:
        transformers.utils.logging.enable_progress_bar()  # a notebook turns it off


def without_numbers(texts: list[str]) -> list[str]:
    return [VARIES.sub("NUMBER", text) for text in texts]


def check_what_was_learned(notebook: str, names: dict[str, Any]) -> None:
    if notebook == "remote_experts":
        assert sum(names["losses"][-10:]) < sum(names["losses"][:10]) / 2
        assert names["ada"].updates == names["bob"].updates == len(names["losses"])
    elif notebook == "train_moe_layer":
        assert names["losses"][-1] < names["losses"][0] / 10
        assert names["worst_loads"][-1] < names["worst_loads"][0]
        assert names["after"] < names["before"] * 1.1
    else:
        assert names["megabytes"](names["model"]) < names["megabytes"](names["original"]) / 2


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_the_cells_run_and_print_what_the_file_holds(file: Path, names: dict[str, Any]) -> None:
    for package in PACKAGES.get(file.stem, ()):
        pytest.importorskip(package)
    notebook = json.loads(file.read_text())
    printed = run(notebook, names)
    assert without_numbers(printed) == without_numbers(stored_outputs(notebook)), "run python tests/notebooks.py"
    check_what_was_learned(file.stem, names)


def test_there_is_a_notebook_for_each_of_the_three_main_ways() -> None:
    assert [file.stem for file in NOTEBOOKS] == ["remote_experts", "train_moe_layer", "transformers_4_bits"]
    for file in NOTEBOOKS:
        cells = json.loads(file.read_text())["cells"]
        assert 6 <= len(cells) <= 10
        assert any(stored_outputs({"cells": cells}))


def test_an_output_of_other_words_or_whole_numbers_is_noticed() -> None:
    assert without_numbers(["loss 0.5, 3 steps"]) == without_numbers(["loss 0.25, 3 steps"])
    assert without_numbers(["loss 0.5, 3 steps"]) != without_numbers(["loss 0.5, 4 steps"])
    assert without_numbers(["loss 0.5"]) != without_numbers(["loss nan"])
