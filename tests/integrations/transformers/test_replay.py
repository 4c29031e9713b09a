"""Tests of routing replay with models of transformers: all classes, generation, padding, checkpointing."""

import pytest
import torch
from experts_classes import experts_classes
from tiny_models import build, tokens

pytest.importorskip("transformers", minversion="5")

from pymoe.integrations.transformers import add_expert_biases, count_expert_load
from pymoe.integrations.transformers.interface import is_behind
from pymoe.nn import expert_load, record_routing, replay_routing

MODELS = sorted({one.model for one in experts_classes()})
REFUSED = {"phimoe": "PhimoeExperts", "zaya": "ZayaExperts"}
"""Models that do not choose by torch.topk among their experts."""


def choices(routes):
    return {name: choice.tolist() for name, choice in routes.joined().choices.items()}


def perturb(model):
    """Change the routers, so that they choose other experts."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if {"gate", "router"} & set(name.split(".")[:-1]) and parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator))


def weights_given(model):
    """Return the lists into which hooks put the indices and weights of every call of experts."""
    seen = {}
    for name, module in model.named_modules():
        if is_behind(module):
            calls = seen[name] = []
            module.register_forward_pre_hook(lambda experts, given, calls=calls: calls.append(given[1:]))
    return seen


@pytest.mark.thinned(usual=6)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_replays(name):
    model = build(name)
    ids = tokens()
    plain = model(input_ids=ids, use_cache=False)[0]
    with record_routing(model) as routes:
        y = model(input_ids=ids, use_cache=False)[0]
    assert torch.equal(y, plain)
    with replay_routing(model, routes):
        assert torch.equal(model(input_ids=ids, use_cache=False)[0], plain)
    perturb(model)
    with record_routing(model) as own:
        model(input_ids=ids, use_cache=False)
    if name == "deepseek_v4":  # in its first layers a table of tokens chooses, and nothing has to be replaced
        assert choices(own) == choices(routes)
        with replay_routing(model, routes):
            model(input_ids=ids, use_cache=False)
        return
    assert choices(own) != choices(routes)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]), replay_routing(model, routes):
            model(input_ids=ids, use_cache=False)
        return
    seen = weights_given(model)
    with replay_routing(model, routes), record_routing(model) as replayed:
        y = model(input_ids=ids, use_cache=False)[0]
    assert choices(replayed) == choices(routes)
    y.square().mean().backward()

    # The weights belong to the experts: in another order of choices they are the same numbers, in that order.
    first = {key: calls[-1][1].detach().clone() for key, calls in seen.items() if calls}
    for forward in routes.forwards:
        forward.choices = {key: choice.flip(1) for key, choice in forward.choices.items()}
    with replay_routing(model, routes):
        again = model(input_ids=ids, use_cache=False)[0]
    scale = y.abs().max().item()
    torch.testing.assert_close(again, y, rtol=1e-4, atol=1e-4 * scale)
    for key, weights in first.items():
        torch.testing.assert_close(seen[key][-1][1].flip(1), weights, rtol=1e-3, atol=1e-5)


def softmax_of_chosen(logits, index):
    return logits.gather(1, index).softmax(1)


def mixtral_rule(logits, index):
    weights = logits.softmax(1).gather(1, index)
    return weights / weights.sum(1, keepdim=True)


def deepseek_rule(logits, index):
    weights = logits.sigmoid().gather(1, index)
    return weights / (weights.sum(1, keepdim=True) + 1e-20)


@pytest.mark.parametrize(
    ("name", "rule"), [("gpt_oss", softmax_of_chosen), ("mixtral", mixtral_rule), ("deepseek_v3", deepseek_rule)]
)
def test_weights_of_replayed_experts_are_those_of_the_routers_rule(name, rule):
    model = build(name)
    ids = tokens()
    with record_routing(model) as routes:
        model(input_ids=ids)
    perturb(model)
    given, logits = weights_given(model), {}
    for key in given:
        block = model.get_submodule(key.rpartition(".")[0])
        router = getattr(block, "gate", None) or block.router
        bias = getattr(router, "bias", None)

        def keep(router, inputs, key=key, bias=bias):
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            logits[key] = torch.nn.functional.linear(x, router.weight, bias)

        router.register_forward_pre_hook(keep)
    with replay_routing(model, routes):
        model(input_ids=ids)
    for key, ((index, weights),) in given.items():
        scale = getattr(model.config, "routed_scaling_factor", 1.0)
        torch.testing.assert_close(weights, rule(logits[key], index) * scale, rtol=1e-5, atol=1e-6)


def test_a_batch_with_padding_is_generated_and_replayed_in_one_forward():
    model = build("mixtral")
    prompt = tokens(6)
    mask = torch.ones_like(prompt)
    mask[1, :2] = 0
    options = dict(do_sample=False, pad_token_id=0)
    with record_routing(model) as routes:
        ids = model.generate(prompt, attention_mask=mask, max_new_tokens=5, **options)
    assert [forward.shape for forward in routes.forwards] == [(2, 6), (2, 1), (2, 1), (2, 1), (2, 1)]
    joined = routes.joined()
    for key, choice in joined.choices.items():
        for row in range(2):  # of each sequence: its prompt, then its tokens
            own = choice.view(2, 10, 3)[row]
            assert torch.equal(own[:6], routes.forwards[0].choices[key].view(2, 6, 3)[row])
            for step in range(1, 5):
                assert torch.equal(own[5 + step], routes.forwards[step].choices[key][row])
    perturb(model)
    model.train()
    whole = torch.cat([mask, torch.ones(2, 4, dtype=mask.dtype)], dim=1)
    with replay_routing(model, routes), record_routing(model) as replayed:
        model(input_ids=ids[:, :-1], attention_mask=whole).logits.square().mean().backward()
    assert choices(replayed) == choices(routes)
    with (
        pytest.raises(ValueError, match="the last token that was generated has no routes"),
        replay_routing(model, routes),
    ):
        model(input_ids=ids)
    padded_elsewhere = torch.cat([ids[:1, :-1], ids[1:, :-1].roll(-2, 1)])
    with pytest.raises(ValueError, match="padding included"), replay_routing(model, routes):
        model(input_ids=padded_elsewhere)


def test_beams_that_change_places_are_refused():
    model = build("mixtral")
    with record_routing(model) as routes:
        ids = model.generate(tokens(6)[:1], max_new_tokens=8, num_beams=4, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match="expected tokens of the recorded shape"), replay_routing(model, routes):
        model(input_ids=ids[:, :-1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
def test_checkpointing_neither_records_twice_nor_shifts_the_replay(name, reentrant):
    model = build(name)
    ids = tokens()
    with record_routing(model) as routes:
        model(input_ids=ids)
    perturb(model)
    model.train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.zero_grad()
        with replay_routing(model, routes), record_routing(model) as replayed:
            model(input_ids=ids, use_cache=False)[0].square().mean().backward()
        assert len(replayed.forwards) == 1
        assert choices(replayed) == choices(routes)
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *found))
    with pytest.raises(RuntimeError, match="expected the backward pass in the block"), replay_routing(model, routes):
        model(input_ids=ids, use_cache=False)


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
def test_replay_wins_over_biases_and_is_what_is_counted(name):
    model = build(name)
    ids = tokens()
    with record_routing(model) as routes:
        model(input_ids=ids)
    add_expert_biases(model, rate=0.1)
    count_expert_load(model)
    for module in model.modules():
        if hasattr(module, "expert_bias"):
            with torch.no_grad():
                module.expert_bias.view(-1)[3] = 50.0
    with replay_routing(model, routes), record_routing(model) as replayed:
        model(input_ids=ids)
    assert choices(replayed) == choices(routes)
    counted = {key: torch.bincount(one.flatten(), minlength=8).tolist() for key, one in routes.joined().choices.items()}
    assert {key: load.tolist() for key, load in expert_load(model).items()} == counted
    with record_routing(model) as biased:
        model(input_ids=ids)
    assert all((choice == 3).any(1).all() for choice in biased.joined().choices.values())


def test_groups_whose_scores_are_lost_are_refused():
    model = build("deepseek_v2")
    for module in model.modules():
        if hasattr(module, "topk_method"):
            module.topk_method, module.num_group, module.topk_group = "group_limited_greedy", 4, 2
    ids = tokens()
    with record_routing(model) as routes:
        model(input_ids=ids)
    words = "DeepseekV2Experts, which chooses groups of experts first"
    with pytest.raises(ValueError, match=words), replay_routing(model, routes):
        model(input_ids=ids)


def test_experts_outside_of_the_interface_are_refused():
    words = r"record_routing: expected experts behind .* got Llama4TextMoe"
    with pytest.raises(ValueError, match=words), record_routing(build("llama4")):
        pass


def test_code_that_was_compiled_before_is_noticed():
    torch.compiler.reset()
    model = build("mixtral")
    with record_routing(model) as routes:
        model(input_ids=tokens())
    compiled = torch.compile(model, backend="aot_eager")
    compiled(input_ids=tokens())
    with pytest.raises(RuntimeError, match="got none that was seen"), record_routing(compiled):
        compiled(input_ids=tokens())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.copy_(parameter.flip(0))
    with replay_routing(model, routes):
        expected = model(input_ids=tokens())[0]
    with replay_routing(compiled, routes):  # torch notices that the router has another forward, and leaves its code
        assert torch.equal(compiled(input_ids=tokens())[0], expected)
    assert not torch.equal(compiled(input_ids=tokens())[0], expected)
