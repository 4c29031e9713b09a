"""Tests that the README's example of a captured model runs, learns, and prints the cut."""

import re
import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "captured_model.py"


def test_a_captured_model_learns_in_three_stages(capsys):
    found = runpy.run_path(str(EXAMPLE))
    out = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert losses[-1] < 0.7 * losses[0]
    assert float(re.search(r"(\d+)% of new pairs", out).group(1)) > 70
    assert re.findall(r"^stage (\d)  (\w+) ", out, re.MULTILINE) == [("0", "encoder"), ("1", "mixer"), ("2", "head")]
    assert found["pipe"].state_dict().keys() == found["model"].state_dict().keys()
