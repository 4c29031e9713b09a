"""The README's examples are the files that are tested, and each says what it is instead of training."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


EXAMPLES = ["quickstart", "served_expert", "mixed_experts", "staged_model", "captured_model"]
# The lines for --help, which the README leaves out.
HELP = "\n    argparse.ArgumentParser(description=__doc__).parse_args()\n\n"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_readme_shows_the_example(name: str) -> None:
    body = (ROOT / "examples" / f"{name}.py").read_text().split(HELP, 1)[1]
    assert f"```python\n{body}```" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_asked_what_it_is(name: str) -> None:
    file = ROOT / "examples" / f"{name}.py"
    about = subprocess.run([sys.executable, file, "--help"], capture_output=True, text=True, check=True).stdout
    assert " ".join(about.split()).count(file.read_text().split('"""')[1].split("\n")[0]) == 1
    assert "loss" not in about
    refused = subprocess.run([sys.executable, file, "--steps", "3"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stdout == ""
