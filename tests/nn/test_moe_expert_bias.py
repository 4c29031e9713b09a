"""Balancing by an expert bias: what is counted and when, and how the bias moves."""

import copy
import pickle

import pytest
import torch
from moe_layers import BACKENDS, make_input, make_layer
from torch import nn
from torch.utils.checkpoint import checkpoint

from pymoe.nn import MoE, Router, update_expert_biases

RATE = 0.01


def biased_layer(**options):
    layer = make_layer(**{"bias_update_rate": RATE, **options})
    layer.router.expert_bias.zero_()
    return layer


def train_on(layer, x, call=None):
    y = layer(x) if call is None else call(x)
    y.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_moves_by_the_rate_towards_the_mean_load(backend):
    layer = biased_layer(num_experts=4, backend=backend)
    train_on(layer, make_input(33))
    load = layer.stats.load
    assert load.sum() == 66
    layer.update_bias()
    expected = torch.sign(16.5 - load.double()) * RATE
    assert torch.equal(layer.router.expert_bias, expected)
    assert layer.router.counted["load"].tolist() == [0, 0, 0, 0]


def test_an_expert_at_the_mean_keeps_its_bias():
    layer = biased_layer(num_experts=3)
    layer.router.counted["load"].copy_(torch.tensor([1, 2, 3]))
    layer.update_bias()
    assert layer.router.expert_bias.tolist() == [RATE, 0.0, -RATE]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_updates_balance_a_skewed_router(score, device):
    torch.manual_seed(0)
    router = Router(6, 4, 2, score=score, bias_update_rate=RATE).to(device)
    x = torch.randn(128, 6)
    x[:, 0] = 1.0
    with torch.no_grad():
        router.weight[:, 0] = torch.linspace(0.6, -0.6, 4)
    shares = []
    for _ in range(40):
        gate, _ = router(x)
        shares.append(gate.load.max().item() / 64)  # 1 is perfect balance, 2 is every token
        gate.weights.sum().backward()
        update_expert_biases(router)
    assert shares[0] > 1.7
    assert max(shares[-5:]) < 1.2


def test_bias_changes_the_choice_and_not_the_weights():
    layer = biased_layer(score="sigmoid", renormalize=False, num_experts=4, top_k=1)
    x = make_input(30).detach()
    layer.router.expert_bias.copy_(torch.tensor([0.0, 0.0, 10.0, 0.0]))
    gate, logits = layer.router(x)
    assert gate.experts.unique().tolist() == [2]
    torch.testing.assert_close(gate.weights[:, 0], torch.sigmoid(logits[:, 2]), rtol=1e-12, atol=0)


def test_load_is_summed_over_micro_batches():
    layer = biased_layer()
    expected = torch.zeros(8, dtype=torch.int64)
    for seed in range(3):
        train_on(layer, make_input(11, seed=seed))
        expected += layer.stats.load
    assert torch.equal(layer.router.counted["load"], expected)


def test_load_is_counted_with_several_micro_batches_in_flight():
    layer = biased_layer()
    expected = torch.zeros(8, dtype=torch.int64)
    outputs = []
    for seed in range(3):
        outputs.append(layer(make_input(11, seed=seed)))
        expected += layer.stats.load
    for y in reversed(outputs):
        y.sum().backward()
    assert torch.equal(layer.router.counted["load"], expected)


def test_nothing_is_counted_without_a_gradient():
    layer = biased_layer()
    with torch.no_grad():
        layer(make_input(11))
    layer(make_input(11))  # no backward
    layer.eval()
    train_on(layer, make_input(11))
    assert layer.router.counted["load"].sum() == 0


@pytest.mark.only_on("cpu", "cuda")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointing_counts_once(backend, use_reentrant):
    layer = biased_layer(backend=backend)
    x = make_input(11)
    for times in (1, 2):
        train_on(layer, x, lambda x: checkpoint(layer, x, use_reentrant=use_reentrant))
        assert layer.router.counted["load"].sum() == times * 22
    assert torch.equal(layer.router.counted["load"], 2 * layer.stats.load)


def test_a_forward_without_gradients_before_the_real_one_is_not_counted():
    """Run as a pipeline or a remote expert does: once without gradients, then again when gradients arrive."""
    layer = biased_layer()
    x = make_input(11)
    with torch.no_grad():
        layer(x)
    train_on(layer, x)
    assert layer.router.counted["load"].sum() == 22


def test_update_reaches_every_router_of_a_model(device):
    model = nn.Sequential(biased_layer(), nn.Linear(12, 12).double(), biased_layer(num_experts=3), make_layer()).to(
        device
    )
    train_on(model, make_input(11))
    update_expert_biases(model)
    assert model[0].router.expert_bias.abs().max() == RATE
    assert model[2].router.expert_bias.abs().max() == RATE
    assert model[3].router.expert_bias is None


def test_update_of_a_model_without_biases_does_nothing():
    update_expert_biases(nn.Sequential(nn.Linear(2, 2), make_layer()))


def test_update_before_any_step_does_nothing():
    layer = biased_layer()
    layer.update_bias()
    assert (layer.router.expert_bias == 0).all()


def test_bias_is_a_buffer_in_the_state_dict_and_no_parameter():
    layer = biased_layer()
    assert "router.expert_bias" in layer.state_dict()
    assert "router.expert_bias" not in dict(layer.named_parameters())


@pytest.mark.only_on("cpu", "cuda")
@pytest.mark.parametrize("cast", ["bfloat16", "half", "to", "constructor"])
def test_bias_stays_in_float32_in_half_precision(cast, device):
    dtype = torch.float16 if cast == "half" else torch.bfloat16
    layer = MoE(8, 4, 4, 2, bias_update_rate=0.001, dtype=dtype if cast == "constructor" else torch.float32)
    layer = layer.to(device)
    layer.router.expert_bias.fill_(1.0)
    layer.router.counted["load"].copy_(torch.tensor([0, 0, 9, 9]))
    layer.update_bias()
    if cast == "to":
        layer = layer.to(dtype=dtype)
    elif cast != "constructor":
        layer = getattr(layer, cast)()
    assert layer.router.weight.dtype == dtype
    expected = torch.tensor([1.001, 1.001, 0.999, 0.999])
    torch.testing.assert_close(layer.router.expert_bias, expected, rtol=1e-6, atol=0)
    layer(torch.randn(3, 8, dtype=dtype)).sum().backward()
    assert layer.router.counted["load"].dtype == torch.int64


def test_a_copy_counts_for_itself():
    layer = biased_layer()
    twin = copy.deepcopy(layer)
    train_on(layer, make_input(11))
    assert twin.router.counted["load"].sum() == 0


def test_router_alone_counts_and_updates(device):
    router = Router(6, 4, 2, bias_update_rate=0.5).to(device)
    gate, logits = router(torch.randn(9, 6))
    assert logits.shape == (9, 4)
    gate.weights.sum().backward()
    assert router.counted["load"].sum() == 18
    update_expert_biases(router)
    assert router.counted["load"].sum() == 0


@pytest.mark.only_on("cpu", "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_moves_in_a_layer_assigned_from_a_checkpoint(dtype):
    """``assign=True`` gives a layer on the meta device its parameters; nothing tells the counters to follow."""
    trained = biased_layer(dtype=dtype).state_dict()
    trained["router.expert_bias"] = torch.linspace(0.5, 1, trained["router.expert_bias"].numel()).to(dtype)
    layer = biased_layer(dtype=dtype, device="meta")
    layer.load_state_dict(trained, assign=True)
    bias = layer.router.expert_bias.clone()
    assert bias.dtype == torch.float32
    assert torch.equal(bias, trained["router.expert_bias"].float())
    train_on(layer, make_input(12, dtype=dtype))
    assert layer.stats.load.sum() == 12 * layer.top_k
    assert torch.equal(layer.router.counted["load"], layer.stats.load.long())
    layer.update_bias()
    assert not torch.equal(layer.router.expert_bias, bias)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    assert torch.equal(twin.router.expert_bias, layer.router.expert_bias)


def test_reset_parameters_forgets_the_load_and_the_bias():
    layer = biased_layer()
    train_on(layer, make_input(12))
    layer.update_bias()
    train_on(layer, make_input(12))
    assert layer.router.counted["load"].any()
    assert layer.router.expert_bias.any()
    layer.reset_parameters()
    assert not layer.router.counted["load"].any()
    assert not layer.router.expert_bias.any()
    assert not any(bool(value.any()) for value in layer.stats)
