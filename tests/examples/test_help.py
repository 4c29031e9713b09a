"""Tests that the tutorials' examples print a description for --help instead of training."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ["quickstart", "served_expert", "mixed_experts", "staged_model", "captured_model"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_tutorial_shows_the_example(name: str) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "tutorials").glob("*.md"))
    assert f"```{{literalinclude}} ../../examples/{name}.py\n" in pages


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_asked_what_it_is(name: str) -> None:
    file = ROOT / "examples" / f"{name}.py"
    about = subprocess.run([sys.executable, file, "--help"], capture_output=True, text=True, check=True).stdout
    assert " ".join(about.split()).count(file.read_text().split('"""')[1].split("\n")[0]) == 1
    assert "loss" not in about
    refused = subprocess.run([sys.executable, file, "--steps", "3"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stdout == ""
