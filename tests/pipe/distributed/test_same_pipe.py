"""Every process must have the same pipe: a different cut is noticed, and parameters may be tied and untied between
steps.
"""

import pytest
import torch
from pipe_models import WIDTH
from torch import nn
from torch.nn import functional as F
from training import EXACT, compare, in_two_stages, make, run, step_of_both

import pymoe

CUTS = {"a layer twice": ([2, 1], [1, 2]), "a layer left out": ([1, 2], [2, 1]), "more stages": ([2, 1], [1, 1, 1])}


def cut_otherwise(rank, world, cuts):
    """Run a step of a pipe that one process has cut differently."""
    torch.manual_seed(0)
    pipe = pymoe.Pipe(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]), balance=cuts[rank])
    schedule, stages = make("ScheduleGPipe", pipe, rank, world, 2, F.mse_loss)
    run(schedule, stages, (torch.randn(6, WIDTH),), target=torch.zeros(6, WIDTH))


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("name", CUTS)
def test_processes_that_have_cut_the_model_otherwise_are_refused(ranks, name):
    with pytest.raises(AssertionError, match="every process must make the same pipe, of the same model and cut in"):
        ranks(2).run(cut_otherwise, cuts=CUTS[name])


def retied(rank, world, kind, ties):
    """Return differences of gradients in steps before which every process ties or unties a weight of two stages."""
    model, pipe, schedule, stages = in_two_stages(kind, rank, world)
    worst = []
    for number, tied in enumerate(ties):
        for one in (model, pipe.staged.module):
            torch.manual_seed(number)
            own = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=one[0][0].weight.dtype))
            one[1][0].weight = one[0][0].weight if tied else own
        step_of_both(model, pipe, schedule, stages)
        worst.append(compare(model, pipe, stages))
    return worst


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("kind", ["sequential", "stages"])
@pytest.mark.parametrize("ties", [[True, False, False, True], [False, True, True, False]])
def test_gradients_of_parameters_that_are_tied_or_untied_between_steps(ranks, kind, ties):
    for worst in ranks(2).run(retied, kind=kind, ties=ties):
        assert max(worst) <= EXACT, worst
