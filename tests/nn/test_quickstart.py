"""The example in the README runs, learns, and keeps its experts busy."""

import re
import runpy
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


@pytest.mark.only_on("cpu")
def test_quickstart_learns(capsys):
    runpy.run_path(str(QUICKSTART))
    lines = capsys.readouterr().out.splitlines()
    losses = [float(re.search(r"loss (\S+)", line)[1]) for line in lines]
    loads = [[int(n) for n in re.search(r"\[(.*)\]", line)[1].split(", ")] for line in lines]
    assert losses[-1] < 0.1 * losses[0]
    assert max(loads[-1]) < max(loads[0])
