"""A layer on 1, 2, 3 and 4 ranks equals the layer in one process that has the tokens of all ranks.

Outputs, gradients of inputs and gradients of experts are equal bit for bit, also where rows travel in padded buffers;
gradients of router and shared experts, which are sums over ranks, are equal to rounding, and so are gradients of
experts that ranks cloned. If a token travels once to a rank, outputs and gradients of inputs are equal only to
rounding, too.
"""

import pytest
from equality import one, twenty_steps

NAMED = {
    "no tokens at all": {"world": 4, "tokens": [0, 0, 0, 0], "experts": 5, "top_k": 2},
    "one token": {"world": 3, "tokens": [0, 1, 0], "experts": 4, "top_k": 1},
    "ranks without experts": {"world": 4, "tokens": [6, 3, 0, 8], "experts": 2, "top_k": 2, "chunks": 2},
    "one expert for all": {"world": 4, "tokens": [6, 3, 2, 8], "experts": 1, "top_k": 1},
    "six experts on four ranks": {"world": 4, "tokens": [13, 5, 0, 9], "experts": 6, "top_k": 2, "unchosen": True},
    "more chunks than experts": {"world": 2, "tokens": [13, 5], "experts": 3, "top_k": 2, "chunks": 9},
    "every expert": {"world": 3, "tokens": [4, 4, 4], "experts": 7, "top_k": 7, "chunks": 3},
    "capacity of a rank": {
        **{"world": 4, "tokens": [20, 1, 0, 11], "experts": 6, "top_k": 3},
        "options": {"capacity_factor": 0.5, "num_shared_experts": 1},
    },
    "capacity of the group": {
        **{"world": 4, "tokens": [20, 1, 0, 11], "experts": 6, "top_k": 3, "scope": "group", "chunks": 2},
        "options": {"capacity_factor": 0.5, "num_shared_experts": 1},
    },
    "losses of the group": {
        **{"world": 3, "tokens": [20, 0, 11], "experts": 6, "top_k": 2, "scope": "group"},
        "options": {"aux_loss_coef": 0.5, "z_loss_coef": 0.1, "bias_update_rate": 0.05},
    },
    "groups of experts": {
        **{"world": 4, "tokens": [9, 7, 3, 1], "experts": 8, "top_k": 2},
        "options": {"num_groups": 4, "topk_groups": 2, "score": "sigmoid", "bias_update_rate": 0.05},
    },
    "a gate of shared experts and a bias of the router": {
        **{"world": 4, "tokens": [9, 17, 0, 1], "experts": 6, "top_k": 2, "chunks": 2},
        "options": {"num_shared_experts": 2, "shared_gate": True, "router_bias": True, "bias": True},
    },
    "clones": {
        **{"world": 4, "tokens": [30, 11, 0, 20], "experts": 8, "top_k": 2, "clones": 2},
        "options": {"bias": True, "num_shared_experts": 1},
    },
    "clones of the experts of another placement, in chunks": {
        **{"world": 4, "tokens": [30, 11, 0, 20], "experts": 8, "top_k": 2, "clones": 1, "chunks": 2, "placed": True},
    },
    "ranks that have clones alone": {"world": 4, "tokens": [16, 3, 9, 8], "experts": 2, "top_k": 1, "clones": 2},
    "clones where the group shares a capacity": {
        **{"world": 3, "tokens": [20, 1, 11], "experts": 6, "top_k": 3, "scope": "group", "clones": 1, "chunks": 3},
        "options": {"capacity_factor": 0.9, "num_shared_experts": 1},
    },
    "another placement": {
        **{"world": 4, "tokens": [13, 5, 0, 9], "experts": 11, "top_k": 2, "chunks": 3, "placed": True},
        "options": {"bias": True, "capacity_factor": 0.8},
    },
}


WAYS = {"padded": {"transport": "padded"}, "deduplicated": {"deduplicate": True}}


def differences(ranks, case, **way):
    """Return what differs, by rank."""
    return {rank: found for rank, found in enumerate(ranks.run(one, case=case, **way)) if found}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMED)
def test_a_layer_on_several_ranks_equals_one_process(ranks, name, dtype):
    assert not differences(ranks, {**NAMED[name], "dtype": dtype})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name, case in NAMED.items() if "clones" not in case])
def test_a_layer_with_another_exchange_equals_one_process(ranks, name, way):
    assert not differences(ranks, {**NAMED[name], "dtype": "float32"}, **WAYS[way])


@pytest.mark.thinned(usual=8, deep=30)
@pytest.mark.parametrize("seed", range(220))
def test_layers_drawn_by_chance_equal_one_process(ranks, seed):
    assert not differences(ranks, seed)


@pytest.mark.thinned(usual=8, deep=40)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(220))
def test_layers_drawn_by_chance_with_another_exchange_equal_one_process(ranks, seed, way):
    assert not differences(ranks, seed, **WAYS[way])


@pytest.mark.parametrize(("ep_ranks", "chunks"), [(2, 1), (4, 2)])
def test_twenty_training_steps_equal_those_of_one_process(ranks, ep_ranks, chunks):
    for found in ranks.run(twenty_steps, ep_ranks=ep_ranks, chunks=chunks)[:ep_ranks]:
        assert len(found["losses"]) == 20
        assert max(abs(a - b) for a, b in found["losses"]) < 1e-11
        assert found["parameters"] < 1e-9
        assert found["losses"][-1][0] < found["losses"][0][0]
