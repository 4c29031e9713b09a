"""Tests of routing replay with layers of pymoe: bits, weights of other choices, checkpointing, and what is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pymoe.nn import MoE, Routes, record_routing, replay_routing, update_expert_biases
from pymoe.reference.gate_topk import weights_of

HIDDEN, EXPERTS, TOP_K = 16, 8, 2
OPTIONS = [
    {},
    {"score": "sigmoid", "scale": 2.5, "num_shared_experts": 1},
    {"renormalize": False, "aux_loss_coef": 0.1, "z_loss_coef": 0.01},
    {"score": "sigmoid", "num_groups": 4, "topk_groups": 2, "bias_update_rate": 0.01},
    {"capacity_factor": 0.5},
    {"router_bias": True, "score_before_experts": True, "num_shared_experts": 1, "shared_gate": True},
    {"backend": "reference"},
]


class Model(nn.Module):
    def __init__(self, layers=3, checkpointed=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, HIDDEN)
        self.layers = nn.ModuleList(MoE(HIDDEN, 8, EXPERTS, TOP_K, **options) for _ in range(layers))
        self.checkpointed = checkpointed
        self.to(torch.empty(0).device)  # drawn on the CPU, the same anywhere

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            plain = self.checkpointed is None
            x = x + (layer(x) if plain else checkpoint(layer, x, use_reentrant=self.checkpointed))
        return x


def ids_of(length=9, rows=2, seed=1):
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(seed))


def perturbed(model):
    """Return a copy with other routers, which choose other experts."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in other.layers:
            layer.router.weight.add_(torch.randn(EXPERTS, HIDDEN, generator=generator))
    return other


def choices(routes):
    return {name: choice.tolist() for name, choice in routes.joined().choices.items()}


def gradients(model):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_replay_has_the_bits_of_the_recorded_forward(options):
    model = Model(**options)
    ids = ids_of()
    y = model(ids)
    y.square().sum().backward()
    expected = gradients(model)
    loads = [layer.router.counted["load"].clone() for layer in model.layers]
    with record_routing(model) as routes:
        assert torch.equal(model(ids), y)
    model.zero_grad()
    for layer in model.layers:
        layer.router.counted.zero_()
    with replay_routing(model, routes):
        again = model(ids)
    assert torch.equal(again, y)
    again.square().sum().backward()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(layer.router.counted["load"], load) for layer, load in zip(model.layers, loads, strict=True))
    assert torch.equal(model(ids), y)  # the model is as before, and calls its kernels as before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_routers_take_the_recorded_experts_with_weights_by_their_own_rule(options):
    model = Model(**options)
    ids = ids_of()
    with record_routing(model) as routes:
        model(ids)
    assert len({str(choice) for choice in choices(routes).values()}) == 3  # so that a wrong layer would be seen
    other = perturbed(model).train()
    with record_routing(other) as own:
        other(ids)
    assert choices(own) != choices(routes)
    gates = []
    for layer in other.layers:
        layer.router.register_forward_hook(lambda router, inputs, output: gates.append((router, output)))
    with replay_routing(other, routes), record_routing(other) as replayed:
        y = other(ids)
    assert choices(replayed) == choices(routes)
    for (router, (gate, logits)), choice in zip(gates, routes.joined().choices.values(), strict=True):
        rule = (router.score, router.renormalize, router.scale)
        torch.testing.assert_close(gate.weights, weights_of(logits, choice.long(), *rule), rtol=1e-6, atol=1e-7)
        assert gate.load.tolist() == torch.bincount(choice.flatten(), minlength=EXPERTS).tolist()
    y.square().sum().backward()
    assert all(layer.router.weight.grad.abs().sum() > 0 for layer in other.layers)
    if "bias_update_rate" in options:  # what the model was trained on counts
        assert [layer.router.counted["load"].tolist() for layer in other.layers] == [
            gate.load.tolist() for _, (gate, _) in gates
        ]
        update_expert_biases(other)


@pytest.mark.only_on("cpu", "cuda")  # checkpointing knows no other device
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_neither_records_twice_nor_shifts_the_replay(reentrant):
    ids = ids_of()
    plain = Model()
    with record_routing(plain) as routes:
        plain(ids)
    other = perturbed(plain)
    with replay_routing(other, routes):
        other(ids).square().sum().backward()
    checkpointed = perturbed(Model(checkpointed=reentrant))
    with replay_routing(checkpointed, routes), record_routing(checkpointed) as replayed:
        checkpointed(ids).square().sum().backward()
    assert len(replayed.forwards) == 1
    assert choices(replayed) == choices(routes)
    assert all(map(torch.equal, gradients(checkpointed), gradients(other)))
    y = None
    with (
        pytest.raises(RuntimeError, match="expected the backward pass in the block"),
        replay_routing(checkpointed, routes),
    ):
        y = checkpointed(ids)
    assert y is not None
    with torch.no_grad(), replay_routing(checkpointed.eval(), routes):  # nothing will be recomputed
        checkpointed.checkpointed = None
        checkpointed(ids)


def test_several_forwards_are_joined_along_sequences():
    model = Model()
    ids = ids_of(7)
    with record_routing(model) as routes:
        for part in ids.split([4, 1, 1, 1], dim=1):
            model(part)
    with record_routing(model) as whole:
        model(ids)
    assert [forward.shape for forward in routes.forwards] == [(2, 4), (2, 1), (2, 1), (2, 1)]
    assert choices(routes) == choices(whole)
    other = perturbed(model)
    with replay_routing(other, routes), record_routing(other) as replayed:
        other(ids)
    assert choices(replayed) == choices(whole)


def test_a_model_that_is_a_layer_is_called_moe(device):
    torch.manual_seed(0)
    layer, x = MoE(16, 8, 4, 2).to(device), torch.randn(5, 16)
    with record_routing(layer) as routes:
        y = layer(x)
    assert routes.experts == {"moe": 4}
    with replay_routing(layer, routes):
        assert torch.equal(layer(x), y)


def test_what_does_not_fit_is_refused(device):
    model = Model()
    ids = ids_of()
    with record_routing(model) as routes:
        model(ids)

    def replayed(other, given, which=routes):
        with replay_routing(other, which):
            other(given)

    for given, words in (
        (ids_of(10), r"expected tokens of the recorded shape \(2, 9\), got \(2, 10\)"),
        (ids.flip(1), "expected the ids that were recorded, padding included"),
    ):
        with pytest.raises(ValueError, match=words):
            replayed(model, given)
    floating = nn.Sequential(*Model(2).layers)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    with record_routing(floating) as of_rows:
        floating(x)
    for given in (x[:4], x[:, None]):
        with pytest.raises(ValueError, match=r"expected tokens of the recorded shape \(5,\), got \((4,|5, 1)\)"):
            replayed(floating, given, of_rows)
    floating[0].top_k = 3
    with pytest.raises(ValueError, match="expected 5 tokens with 2 choices in 0, as recorded, got 5 tokens with 3"):
        replayed(floating, x, of_rows)
    with pytest.raises(ValueError, match="expected a model with the recorded layers"):
        replayed(Model(2), ids)
    wider = Model()
    wider.layers[1] = MoE(HIDDEN, 8, 4, TOP_K).to(device)
    with pytest.raises(ValueError, match=r"expected a model with the recorded layers .*'layers.1', 4"):
        replayed(wider, ids)
    with pytest.raises(ValueError, match="no MoE layer"), record_routing(nn.Linear(2, 2)):
        pass
    with pytest.raises(TypeError, match="routes must be Routes"):
        replayed(model, ids, {})
    with pytest.raises(ValueError, match="expected at least one recorded forward"):
        replayed(model, ids, Routes(routes.experts))
    assert torch.equal(model(ids), model(ids))


def test_forwards_of_other_batches_are_not_joined():
    model = Model()
    with record_routing(model) as routes:
        model(ids_of(3))
        model(ids_of(3, rows=1))
    with pytest.raises(ValueError, match="can be joined if each was given tokens"), replay_routing(model, routes):
        model(ids_of(3))


def test_the_number_of_forwards_is_checked():
    model = Model()
    ids = ids_of()
    twice = Model(1)
    with record_routing(model) as routes:
        model(ids)
    with record_routing(twice) as of_one:
        twice(ids)
    twice.layers.append(twice.layers[0])

    def runs(block, *calls):
        with block:
            for call in calls:
                call()

    def whole():
        return model(ids)

    for block, calls, words in (
        (replay_routing(model, routes), (whole, whole), "expected one forward of the model in the block"),
        (replay_routing(model, routes), (), r"got none of layers\.0, layers\.1"),
        (record_routing(model), (), "got none that was seen"),
        (record_routing(model), (lambda: model.layers[1](torch.randn(3, HIDDEN)),), r"got layers\.1 alone"),
        (record_routing(twice), (lambda: twice(ids),), r"expected one call of layers\.0 in a forward"),
        (replay_routing(twice, of_one), (lambda: twice(ids),), r"expected one call of layers\.0 in the forward"),
    ):
        with pytest.raises(RuntimeError, match=words):
            runs(block, *calls)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(layer.router.replaced is None for layer in model.layers)


@pytest.mark.only_on("cpu", "cuda")  # compilation knows no other device
def test_compiled_code_is_refused_or_left_out():
    torch.compiler.reset()
    model = Model(1)
    ids = ids_of()
    with record_routing(model) as routes:
        model(ids)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for make in (lambda: record_routing(compiled), lambda: replay_routing(compiled, routes)):
        with pytest.raises(Exception, match="expected eager code"), make():
            compiled(ids)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")  # which may leave the model out of its graphs
    with record_routing(compiled) as again:
        compiled(ids)
    assert list(choices(again).values()) == list(choices(routes).values())
    other = perturbed(model)
    compiled = torch.compile(other, backend="aot_eager")
    with replay_routing(compiled, routes), record_routing(other) as replayed:
        compiled(ids)
    assert choices(replayed) == choices(routes)


@pytest.mark.only_on("cpu", "cuda")  # the pretended device does not support inference mode
def test_routes_recorded_in_inference_mode_are_replayed_with_gradients():
    model = Model()
    ids = ids_of()
    with torch.inference_mode(), record_routing(model) as routes:
        model(ids)
    other = perturbed(model)
    with replay_routing(other, routes), record_routing(other) as replayed:
        other(ids).sum().backward()
    assert choices(replayed) == choices(routes)


def test_a_wrapper_of_the_model_is_the_model():
    model = Model()
    ids = ids_of()
    with record_routing(model) as routes:
        model(ids)

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, ids):
            return self.module(ids)

    wrapper = Wrapper(perturbed(model))
    for call in (wrapper, wrapper.module):  # `generate` of a wrapper may call the model alone
        with replay_routing(wrapper, routes), record_routing(wrapper) as replayed:
            call(ids)
        assert list(choices(replayed).values()) == list(choices(routes).values())
