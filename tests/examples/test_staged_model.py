"""Tests that the README's example of a pipeline runs, learns, and draws its last step."""

import re
import runpy
from pathlib import Path

from torch import nn

EXAMPLE = Path(__file__).parents[2] / "examples" / "staged_model.py"


def test_a_model_learns_in_two_stages(capsys):
    found = runpy.run_path(str(EXAMPLE))
    out = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert losses[-1] < 0.3 * losses[0]
    assert re.search(r"2 stages of \[\d, \d\] layers; 1f1b, as run", out)
    assert len(re.findall(r"^worker \d  \|.*\|$", out, re.MULTILINE)) == 2
    actions = [span.action for order in found["pipe"].last_run.spans for span in order]
    assert len(actions) == 2 * 2 * 8
    assert {int(layer[1].num_batches_tracked) for layer in found["model"] if isinstance(layer, nn.Sequential)} == {101}
