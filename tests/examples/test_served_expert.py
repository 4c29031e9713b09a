"""Tests that the README's example of a served expert runs, learns, and fills batches."""

import re
import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "served_expert.py"


def test_a_served_expert_learns_while_others_ask_it(capsys):
    runpy.run_path(str(EXAMPLE))
    out = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert losses[-1] < 0.3 * losses[0]
    counts = {name: (int(n), float(size)) for name, n, size in re.findall(r"(\w+): (\d+) .* of (\S+) rows", out)}
    assert counts["sorter_backward"] == (301, 64.0)
    assert counts["sorter_forward"][0] > 301
    assert counts["sorter_forward"][1] > 1
