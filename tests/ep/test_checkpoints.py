"""Checkpoints hold the whole model: any number of ranks loads what another number has saved, bit for bit.

The same holds for ranks that have other experts than at first.
"""

import pytest
import saved
import torch
import torch.distributed.checkpoint as dcp
from parallel import model

SPREAD = [4, 3, 2, 1, 0, "2x2", "3 placed", "2x2 placed"]


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize("saved_on", SPREAD)
def test_model_and_optimizer_are_loaded_on_any_number_of_ranks(ranks, tmp_path, saved_on):
    ranks.run(saved.save, folder=str(tmp_path), spread_over=saved_on)
    for loaded_on in SPREAD:
        assert ranks.run(saved.load, folder=str(tmp_path), spread_over=loaded_on) == [[]] * 4, loaded_on


def test_a_process_without_a_group_loads_what_four_ranks_have_saved(ranks, tmp_path):
    ranks.run(saved.save, folder=str(tmp_path), spread_over=4)
    own, optimizer = model(bias=True), None
    state = {"model": own.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    whole, optimizer, _ = saved.made(0)
    saved.train(whole, optimizer)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in own.state_dict().items())


@pytest.mark.parametrize("spread_over", [4, "4 placed"])
def test_ranks_take_their_share_of_a_whole_models_state_dict(ranks, spread_over):
    assert ranks.run(saved.load_whole_state_dict, spread_over=spread_over) == [[[], True]] * 4


@pytest.mark.parametrize("spread_over", [4, "2x2", "3 placed", "2x2 placed"])
def test_the_first_rank_gets_whole_tensors_for_other_formats(ranks, spread_over):
    assert all(ranks.run(saved.export, spread_over=spread_over))
