"""Every model of the zoo trains on several processes as it does alone: losses, gradients, parameters and buffers."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "traced"))

from model_zoo import CASES

EXACT = 1e-12
# Their norms compute in float32. Ranks weight the gradients of a micro-batch after its backward pass, when all know how
# many rows there are, so float32 rounds other numbers than in a loss that is weighted before.
SINGLE = {"Llama": 1e-6, "Mixtral": 1e-6}


@pytest.mark.thinned(10)
@pytest.mark.parametrize("name", CASES)
def test_training_on_ranks_equals_that_of_the_model(ranks, name):
    world = 3 if CASES[name].marks or CASES[name].parts else 2
    for worst in ranks(world).run("zoo.train", name=name):
        assert max(worst.values()) <= SINGLE.get(name, EXACT), worst
