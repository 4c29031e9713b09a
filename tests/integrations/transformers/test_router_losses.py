"""Tests of the auxiliary losses of routers of transformers: their gradients, and that they do not count twice."""

import pytest
import torch
from experts_classes import experts_classes
from tiny_models import build, tokens

pytest.importorskip("transformers", minversion="5")

from pymoe.integrations.transformers import add_expert_biases, add_router_losses
from pymoe.nn import record_routing, replay_routing, set_aux_loss_scale

MODELS = sorted({one.model for one in experts_classes()})
REFUSED = {"deepseek_v4", "inkling", "kolibri1", "muse_spark", "phimoe", "zaya"}
"""Models with other scores, or scores of logits that are masked, capped or joined with others before."""
EXPERTS = 8
AUX, Z = 0.5, 0.125


def gradients(model, ids, extra=None, **other):
    model.zero_grad()
    y = model(input_ids=ids, use_cache=False, **other)[0].square().mean()
    (y if extra is None else y + extra()).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def is_router(name):
    return bool({"gate", "router"} & set(name.split(".")[:-1]))


@pytest.mark.thinned(usual=6)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_gets_gradients_of_its_routers(name):
    model = build(name).train()
    torch.manual_seed(0)
    plain = gradients(model, tokens())
    handle = add_router_losses(model, aux_loss_coef=AUX, z_loss_coef=Z)
    if name in REFUSED:
        with pytest.raises(ValueError, match="expected a router that takes a softmax, a sigmoid or the largest"):
            model(input_ids=tokens(), use_cache=False)
        return
    torch.manual_seed(0)
    found = gradients(model, tokens())
    routers = [key for key in plain if is_router(key) and key.endswith("weight") and plain[key].dim() == 2]
    assert routers
    assert not any(torch.allclose(found[key], plain[key], rtol=1e-4, atol=1e-7) for key in routers)
    handle.remove()
    torch.manual_seed(0)
    again = gradients(model, tokens())
    assert all(torch.equal(again[key], plain[key]) for key in plain)


def logits_and_choices(model):
    """Return a dictionary into which hooks put the logits and the choice of every layer."""
    seen = {}
    for name, block in model.named_modules():
        router = getattr(block, "gate", None) or getattr(block, "router", None)
        if router is None or not hasattr(block, "experts"):
            continue

        def keep(router, inputs, name=name):
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            seen[name] = [torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None))]

        router.register_forward_pre_hook(keep)
        block.experts.register_forward_pre_hook(lambda experts, given, name=name: seen[name].append(given[1]))
    return seen


def losses_of(seen, score, aux, z):
    """Return both losses of all layers, by the formulas of arXiv 2101.03961 and 2202.08906."""
    total = 0
    for logits, index in seen.values():
        scores = logits.softmax(1) if score == "softmax" else logits.sigmoid()
        shares = scores / scores.sum(1, keepdim=True)
        load = torch.bincount(index.flatten(), minlength=EXPERTS) / index.numel()
        total = total + aux * EXPERTS * (load * shares.mean(0)).sum() + z * logits.logsumexp(1).square().mean()
    return total


@pytest.mark.parametrize(
    ("name", "score"), [("gpt_oss", "softmax"), ("mixtral", "softmax"), ("deepseek_v3", "sigmoid")]
)
@pytest.mark.parametrize(("aux", "z"), [(AUX, 0.0), (0.0, Z), (AUX, Z)])
def test_gradients_are_those_of_the_formulas(name, score, aux, z):
    model = build(name).train()
    seen = logits_and_choices(model)
    expected = gradients(model, tokens(), lambda: losses_of(seen, score, aux, z))
    add_router_losses(model, aux_loss_coef=aux, z_loss_coef=z)
    found = gradients(model, tokens())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_losses_count_once_under_checkpointing(reentrant):
    model = build("mixtral").train()
    add_router_losses(model, aux_loss_coef=AUX, z_loss_coef=Z)
    plain = gradients(model, tokens())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients(model, tokens())
    assert all(torch.equal(found[key], plain[key]) for key in plain)


def test_evaluation_has_no_losses_and_a_scale_scales_them():
    model = build("mixtral").eval()
    plain = gradients(model, tokens())
    add_router_losses(model, aux_loss_coef=AUX)
    assert all(torch.equal(one, plain[key]) for key, one in gradients(model, tokens()).items())
    model.train()
    set_aux_loss_scale(model, 0.25)
    found = gradients(model, tokens())
    plain_and_losses = build("mixtral").train()
    seen = logits_and_choices(plain_and_losses)
    expected = gradients(plain_and_losses, tokens(), lambda: losses_of(seen, "softmax", AUX / 4, 0.0))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_losses_of_transformers_do_not_count_twice():
    model = build("mixtral").train()
    add_router_losses(model, aux_loss_coef=AUX)
    ids = tokens()
    with pytest.raises(ValueError, match="expected a forward without transformers' own balancing loss"):
        model(input_ids=ids, labels=ids, output_router_logits=True)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="expected a forward without transformers' own balancing loss"):
        model(input_ids=ids, labels=ids)
    model.eval()(input_ids=ids, labels=ids)  # nothing is added to a loss that is only reported
    model.train().router_aux_loss_coef = 0.0
    model(input_ids=ids, labels=ids)
    alone = build("mixtral").train()
    add_router_losses(alone, z_loss_coef=Z)  # transformers has no z loss
    alone(input_ids=ids, labels=ids, output_router_logits=True).loss.backward()


def test_losses_biases_and_replay_together():
    model = build("gpt_oss").train()
    with record_routing(model) as routes:
        model(input_ids=tokens())
    add_router_losses(model, aux_loss_coef=AUX, z_loss_coef=Z)
    add_expert_biases(model, rate=0.1)
    for module in model.modules():
        if hasattr(module, "expert_bias"):
            module.expert_bias[3] = 50.0
    with replay_routing(model, routes), record_routing(model) as replayed:
        found = gradients(model, tokens())
    assert all(map(torch.equal, replayed.joined().choices.values(), routes.joined().choices.values()))
    plain = build("gpt_oss").train()
    seen = logits_and_choices(plain)
    expected = gradients(plain, tokens(), lambda: losses_of(seen, "softmax", AUX, Z))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_arguments():
    torch.compiler.reset()
    model = build("mixtral")
    with pytest.raises(ValueError, match="got 0 for both"):
        add_router_losses(model)
    with pytest.raises(ValueError, match="aux_loss_coef must be finite and at least 0"):
        add_router_losses(model, aux_loss_coef=-1.0)
    with pytest.raises(ValueError, match="got Linear with none"):
        add_router_losses(torch.nn.Linear(2, 2), z_loss_coef=0.1)
    with pytest.raises(ValueError, match="expected experts next to a router"):
        add_router_losses(model.model.layers[0].mlp.experts, z_loss_coef=0.1)
    add_router_losses(model, z_loss_coef=0.1)
    with pytest.raises(ValueError, match="expected a model without added losses"):
        add_router_losses(model, z_loss_coef=0.1)
    with pytest.raises(Exception, match="eager code only"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(input_ids=tokens())
