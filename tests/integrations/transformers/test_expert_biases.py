"""Tests of balancing by biases: of the routers' own biases, of added ones, and of what is refused."""

import copy
import pickle

import pytest
import torch
from experts_classes import experts_classes
from tiny_models import build, tokens

pytest.importorskip("transformers", minversion="5")

from pymoe.integrations.transformers import add_expert_biases, count_expert_load
from pymoe.nn import expert_load, quantize_experts, update_expert_biases
from pymoe.nn.expert_bias import ExpertBias

MODELS = sorted({one.model for one in experts_classes()})
EXPERTS = 8
OWN = {
    *("afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "deepseek_v3", "deepseek_v32", "dots1", "dots3_note"),
    *("ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next"),
    *("glm_moe_dsa", "hy_v3", "hy_v4", "inkling", "inkling2", "kimi_linear", "kolibri1", "laguna", "lfm2_moe"),
    *("mimo_v2_flash", "minimax_m2", "minimax_m3_vl", "muse_spark", "nemotron_h", "solar_open"),
}
"""Models whose routers have a bias for the choice."""
REFUSED = {
    "deepseek_v4": "DeepseekV4Experts, which chooses in another way",  # by a table of tokens, in its first layers
    "mistral4": "Mistral4Experts, which chooses groups of experts first",
    "mistral_large4": "MistralLarge4TextExperts, which chooses groups of experts first",
    "phimoe": "PhimoeExperts, which chooses in another way",  # by masked maxima
    "zaya": "ZayaExperts, which chooses in another way",  # among one more than its experts
}


def biases(model):
    """Return the parts that were added, by the names of their experts."""
    return {name.rpartition(".")[0]: part for name, part in model.named_modules() if isinstance(part, ExpertBias)}


def counts(model):
    return {name: part.counted["load"].tolist() for name, part in biases(model).items()}


def choices(model, ids):
    """Return the arguments of the calls of experts in a forward, by name, and the output."""
    seen = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda experts, given, name=name: seen.update({name: given})
        )
        for name in biases(model)
    ]
    y = model(input_ids=ids)[0]
    for hook in hooks:
        hook.remove()
    return seen, y


def loss(model, ids, **other):
    return model(input_ids=ids, **other)[0].square().mean()


def test_an_interrupted_router_leaves_nothing_on(monkeypatch):
    """Hooks after a forward are not called after Ctrl-C: the choice of other models would stay changed."""
    model, other, ids = build("qwen3_moe"), build("qwen3_moe"), tokens()
    expected = other(input_ids=ids)[0]
    handle = add_expert_biases(model, 0.01)
    for part in biases(model).values():
        part.bias.copy_(torch.linspace(4, -4, EXPERTS))
    gate = next(module for name, module in model.named_modules() if name.endswith("mlp.gate"))

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(gate), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=ids)
    assert torch.equal(other(input_ids=ids)[0], expected)
    handle.remove()
    assert "forward" not in gate.__dict__
    assert torch.equal(model(input_ids=ids)[0], expected)


def test_quantised_experts_are_counted_and_balanced():
    """They have buffers and no parameters."""
    model = build("qwen3_moe").eval()
    model.set_experts_implementation("pymoe")
    quantize_experts(model, 8)
    count_expert_load(model)
    handle = add_expert_biases(model, 0.01)
    loss(model.train(), tokens()).backward()
    assert {sum(count) for count in counts(model).values()} == {model.config.num_experts_per_tok * tokens().numel()}
    assert {int(load.sum()) for load in expert_load(model).values()} == {
        model.config.num_experts_per_tok * tokens().numel()
    }
    handle.remove()


def test_the_lists_name_models():
    assert set(MODELS) >= OWN | set(REFUSED)
    assert not OWN & set(REFUSED)


@pytest.mark.thinned(usual=6)
@pytest.mark.parametrize("name", sorted(set(MODELS) - set(REFUSED)))
def test_a_bias_moves_against_the_load_and_changes_the_choice_alone(name):
    model = build(name).train()
    keys = set(model.state_dict())
    handle = add_expert_biases(model, rate=0.25)
    added = set(model.state_dict()) - keys
    assert bool(added) == (name not in OWN), added
    ids = tokens()
    before = {key: part.expert_bias.detach().clone() for key, part in biases(model).items()}
    seen, y = choices(model, ids)
    y.square().mean().backward()
    loads = {key: torch.bincount(given[1].flatten(), minlength=EXPERTS) for key, given in seen.items()}
    assert {key: load for key, load in counts(model).items() if any(load)} == {k: v.tolist() for k, v in loads.items()}
    update_expert_biases(model)
    for key, load in loads.items():
        moved = (biases(model)[key].expert_bias - before[key]).flatten()
        torch.testing.assert_close(
            moved, torch.where(load > load.double().mean(), -0.25, 0.25) * (load != load.double().mean())
        )
    assert not any(map(any, counts(model).values()))

    # A token whose experts get a larger bias has the same experts with the same weights; other tokens get these, too.
    model.eval()
    one = ids[:1, :1]
    with torch.no_grad():
        for part in biases(model).values():
            part.expert_bias.zero_()
        first, y = choices(model, one)
        for key, given in first.items():
            biases(model)[key].expert_bias.view(-1)[given[1][0]] = torch.linspace(20, 30, given[1].shape[1])
        second, again = choices(model, one)
        all_tokens, _ = choices(model, ids)
    torch.testing.assert_close(again, y)
    for key, (_, index, weights) in second.items():
        order, expected_order = index.sort(), first[key][1].sort()
        assert torch.equal(order.values, expected_order.values)
        expected = first[key][2].gather(1, expected_order.indices)
        torch.testing.assert_close(weights.gather(1, order.indices), expected)
        given = all_tokens[key][1].sort().values
        assert torch.equal(given, order.values.expand_as(given))

    handle.remove()
    assert set(model.state_dict()) == keys
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())


@pytest.mark.parametrize("name", REFUSED)
def test_routers_that_choose_in_other_ways_are_refused_by_name(name):
    model = build(name)
    handle = add_expert_biases(model, rate=0.001)
    with pytest.raises(ValueError, match=REFUSED[name]):
        model(input_ids=tokens())
    handle.remove()
    model(input_ids=tokens())


def test_one_group_of_experts_is_none():
    model = build("mistral4")
    for module in model.modules():
        if hasattr(module, "num_group"):
            module.num_group = module.topk_group = 1
    add_expert_biases(model, rate=0.001)
    ids = tokens(5)
    (part,) = biases(model).values()
    part.expert_bias.zero_()[6] = 5.0
    seen, _ = choices(model, ids)
    ((_, index, _),) = seen.values()
    assert (index == 6).sum() == 10


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_loads_are_counted_once_under_checkpointing_and_add_up(name, reentrant):
    model = build(name).train()
    add_expert_biases(model, rate=0.01)
    batches = [tokens(9), tokens(6)]
    for ids in batches:
        loss(model, ids, use_cache=False).backward()
    expected = counts(model)
    assert {sum(load) for load in expected.values()} == {3 * 2 * (9 + 6)}
    for part in biases(model).values():
        part.counted.zero_()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # which checkpointing with reentrant needs
    for ids in batches:
        loss(model, ids, use_cache=False).backward()
    assert counts(model) == expected
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, found, gradients))
    model.eval()
    loss(model, batches[0]).backward()
    assert counts(model) == expected  # evaluation does not count
    late = build(name)
    add_expert_biases(late, rate=0.01)  # to a model that is in evaluation
    loss(late, batches[0]).backward()
    assert not any(map(any, counts(late).values()))


def test_the_state_dict_keeps_added_biases_and_saving_in_files_is_refused(tmp_path):
    model = build("mixtral")
    add_expert_biases(model, rate=0.1)
    model.save_pretrained(tmp_path)  # nothing is lost yet
    model.train()
    loss(model, tokens()).backward()
    update_expert_biases(model)
    with pytest.raises(ValueError, match=r"pymoe_bias\.bias, which from_pretrained would drop"):
        model.save_pretrained(tmp_path)
    twin = build("mixtral")
    add_expert_biases(twin, rate=0.1)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(input_ids=tokens()).logits, twin.eval()(input_ids=tokens()).logits)
    ours = build("deepseek_v3").train()
    add_expert_biases(ours, rate=0.1)
    loss(ours, tokens()).backward()
    update_expert_biases(ours)
    ours.save_pretrained(tmp_path)
    (part,) = biases(ours).values()
    assert torch.equal(
        type(ours).from_pretrained(tmp_path).model.layers[1].mlp.gate.e_score_correction_bias, part.expert_bias
    )
    assert part.expert_bias.any()


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
def test_copies_balance_on_their_own(name):
    model = build(name).train()
    add_expert_biases(model, rate=0.5)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss(twin, tokens()).backward()
        assert any(map(any, counts(twin).values()))
        update_expert_biases(twin)
        assert all(part.expert_bias.any() for part in biases(twin).values())
        assert not any(part.expert_bias.any() for part in biases(model).values())
        for key, part in biases(twin).items():
            with torch.no_grad():
                part.expert_bias.zero_()[2] = 40.0
            assert (choices(twin, tokens(5))[0][key][1] == 2).any(dim=1).all()


def test_dtypes():
    model = build("mixtral")
    add_expert_biases(model, rate=0.5)
    model.to(torch.bfloat16)
    assert {part.expert_bias.dtype for part in biases(model).values()} == {torch.float32}
    narrow = build("deepseek_v3").to(torch.bfloat16)
    with pytest.raises(ValueError, match="e_score_correction_bias of DeepseekV3TopkRouter must be of float32, got"):
        add_expert_biases(narrow, rate=0.5)


def test_compiled_code_counts_and_does_not_change_the_choice():
    torch.compiler.reset()
    model = build("deepseek_v3").train()
    add_expert_biases(model, rate=0.5)
    loss(model, tokens(), use_cache=False).backward()
    expected = counts(model)
    for part in biases(model).values():
        part.counted.zero_()
    torch.compile(model, backend="aot_eager")(input_ids=tokens(), use_cache=False)[0].square().mean().backward()
    assert counts(model) == expected
    added = build("mixtral")
    add_expert_biases(added, rate=0.5)
    compiled = torch.compile(added, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="eager code only"):
        compiled(input_ids=tokens())


def test_a_router_that_raises_leaves_no_mode_behind():
    model = build("mixtral")
    add_expert_biases(model, rate=0.5)
    router = model.model.layers[0].mlp.gate
    kept, router.weight = router.weight, torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RuntimeError):
        model(input_ids=tokens())
    router.weight = kept
    scores = torch.arange(8.0)[None]
    assert torch.topk(scores, 2).indices.tolist() == [[7, 6]]
    model(input_ids=tokens())


def test_arguments():
    model = build("mixtral")
    with pytest.raises(ValueError, match="rate must be finite and greater than 0"):
        add_expert_biases(model, rate=0)
    with pytest.raises(ValueError, match="got Linear with none"):
        add_expert_biases(torch.nn.Linear(2, 2), rate=0.1)
    with pytest.raises(ValueError, match="got experts in MixtralExperts"):
        add_expert_biases(model.model.layers[0].mlp.experts, rate=0.1)
    add_expert_biases(model, rate=0.1)
    with pytest.raises(ValueError, match="expected a model without added biases"):
        add_expert_biases(model, rate=0.1)
