"""Tests that the README's example of a mixture runs, learns, and continues without one of its experts."""

import re
import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "mixed_experts.py"


def test_a_mixture_learns_while_an_expert_goes_and_another_comes(capsys):
    runpy.run_path(str(EXAMPLE))
    out = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert losses[-1] < 0.5 * losses[0]
    counts = {name: (int(n), int(of)) for name, n, of in re.findall(r"(\w+): (\d+) of (\d+)", out)}
    assert list(counts) == ["first", "fourth", "third"]
    assert all(0 < answered <= asked for answered, asked in counts.values())
