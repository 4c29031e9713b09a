"""Tests of the load of experts of transformers: of every model, under checkpointing, compiled, in a Trainer."""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from experts_classes import experts_classes
from tiny_models import build, tokens

pytest.importorskip("transformers", minversion="5")

from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from pymoe.ep.simulate import LoadRecorder
from pymoe.integrations.transformers import LoadCallback, count_expert_load
from pymoe.integrations.transformers.interface import is_behind
from pymoe.nn import MoE, expert_load
from pymoe.nn.expert_load import load_of

MODELS = sorted({one.model for one in experts_classes()})
EXPERTS = 8


def mixtral(**other):
    torch.manual_seed(0)
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=24, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    config = MixtralConfig(**sizes, **heads, num_local_experts=EXPERTS, num_experts_per_tok=2, **other)
    return MixtralForCausalLM._from_config(config, experts_implementation="pymoe")


def seen_choices(model):
    """Return the lists into which hooks put the indices of every call of experts, by name."""
    seen = {}
    for name, module in model.named_modules():
        if is_behind(module):
            calls = seen[name] = []
            module.register_forward_pre_hook(lambda experts, inputs, calls=calls: calls.append(inputs[1].clone()))
    return seen


def numbers(load):
    return {name: one.tolist() for name, one in load.items()}


def test_numbers_past_the_experts_are_slots_of_none():
    assert load_of(torch.tensor([[0, 1], [3, 4], [1, 7]]), 4).tolist() == [1, 2, 0, 1]


@pytest.mark.thinned(usual=4)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_counts_the_choices_that_its_experts_get(name):
    model = build(name)
    counting = count_expert_load(model)
    seen = seen_choices(model)
    state = model.state_dict().keys()
    with torch.no_grad():
        model(input_ids=tokens())
    expected = {name: torch.bincount(calls[-1].flatten(), minlength=EXPERTS) for name, calls in seen.items() if calls}
    assert expected
    if len(expected) == len(seen):
        assert numbers(expert_load(model)) == numbers(expected)
    else:  # experts that these tokens do not reach, such as those of pictures
        with pytest.raises(RuntimeError, match="expected a forward of"):
            expert_load(model)
    counting.remove()
    assert model.state_dict().keys() == state
    with pytest.raises(ValueError, match="with neither"):
        expert_load(model)


def test_the_last_forward_counts_with_and_without_checkpointing():
    model = mixtral().train()
    count_expert_load(model)
    seen = seen_choices(model)
    for ids in (tokens(9), tokens(5)):
        model(input_ids=ids, labels=ids).loss.backward()
    plain = expert_load(model)
    assert {int(load.sum()) for load in plain.values()} == {2 * 5 * 2}
    assert numbers(plain) == {
        name: torch.bincount(calls[-1].flatten(), minlength=EXPERTS).tolist() for name, calls in seen.items()
    }
    model.gradient_checkpointing_enable()
    ids = tokens(5)
    model(input_ids=ids, labels=ids).loss.backward()
    assert numbers(expert_load(model)) == numbers(plain)


def test_counting_is_copied_and_moved_and_not_saved(tmp_path):
    model = mixtral().eval()
    keys = set(model.state_dict())
    count_expert_load(model)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model))).to(torch.float64)
    assert set(twin.state_dict()) == keys
    model(input_ids=tokens(7))
    with pytest.raises(RuntimeError, match="since its experts are counted, got none"):
        expert_load(twin)
    twin(input_ids=tokens(5))
    assert {int(load.sum()) for load in expert_load(twin).values()} == {20}
    assert {int(load.sum()) for load in expert_load(model).values()} == {28}
    model.save_pretrained(tmp_path)
    assert set(MixtralForCausalLM.from_pretrained(tmp_path).state_dict()) == keys


def test_compiled_code_counts():
    torch.compiler.reset()
    model = mixtral().eval()
    count_expert_load(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        model(input_ids=tokens(6))
        eager = expert_load(model)
        model(input_ids=tokens(9))
        compiled(input_ids=tokens(6))
    assert numbers(expert_load(model)) == numbers(eager)


def test_code_that_was_compiled_before_does_not_count():
    torch.compiler.reset()
    model = mixtral().eval()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        compiled(input_ids=tokens(6))
        count_expert_load(model)
        compiled(input_ids=tokens(6))
    with pytest.raises(RuntimeError, match="compiled before count_expert_load"):
        expert_load(model)


def test_counting_twice_and_removing():
    model = mixtral().eval()
    first = count_expert_load(model)
    count_expert_load(model).remove()  # it began nothing, and ends nothing
    model(input_ids=tokens(6))
    assert len(expert_load(model)) == 2
    first.remove()
    first.remove()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_models_without_such_experts_are_refused():
    with pytest.raises(ValueError, match="got Linear with none"):
        count_expert_load(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"count_expert_load: expected experts behind .* got Llama4TextMoe"):
        count_expert_load(build("llama4"))
    with pytest.raises(TypeError, match="expert_load"):
        expert_load(3)
    model = mixtral()
    count_expert_load(model)
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="expected all experts on one rank"):
        model(input_ids=tokens(6))


def test_layers_of_pymoe_have_the_load_of_their_statistics():
    torch.manual_seed(0)
    model = torch.nn.Sequential(MoE(8, 8, 4, 2), MoE(8, 8, 4, 2))
    model(torch.randn(5, 8))
    assert numbers(expert_load(model)) == {str(place): model[place].stats.load.tolist() for place in (0, 1)}
    assert list(expert_load(model[0])) == ["moe"]


def test_a_recorder_writes_what_the_routers_chose(tmp_path):
    model = mixtral().train()
    seen = seen_choices(model)
    recorder = LoadRecorder(model)
    assert (recorder.experts, recorder.top_k) == (EXPERTS, None)
    steps = [tokens(9), tokens(9).flip(0)]
    for ids in steps:
        with recorder:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    recorder.save(tmp_path / "loads.npz")
    assert recorder.top_k == 2
    with np.load(tmp_path / "loads.npz") as found:
        assert found["layers"].tolist() == list(seen)
        expected = np.stack([np.stack([calls[step].numpy() for calls in seen.values()]) for step in range(2)])
        assert np.array_equal(found["choices"], expected)
    mixed = mixtral()
    mixed.model.layers[1].mlp.gate.top_k = 3
    with pytest.raises(ValueError, match=r"expected layers with one K, got \[2, 3\]"), LoadRecorder(mixed):
        mixed(input_ids=tokens(9))


class Reported(torch.nn.Module):
    """A model that a Trainer takes, with a layer of pymoe that drops slots."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(128, 16)
        self.layer = MoE(16, 8, 4, 2, capacity_factor=0.5, aux_loss_coef=0.01)
        self.head = torch.nn.Linear(16, 128)

    def forward(self, input_ids, labels):
        logits = self.head(self.layer(self.embedding(input_ids)))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def trained(model, folder, steps=4, **other):
    """Return the Trainer of a training with the callback, and the loads of the last forward of each step."""
    ids = torch.randint(3, 100, (8, 6), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=steps,
        per_device_train_batch_size=2,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **other,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(LoadCallback(trainer, folder / "pictures"))
    trainer.train()
    return trainer


@pytest.mark.parametrize("other", [{}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2}])
def test_a_trainer_reports_the_load(tmp_path, other):
    pytest.importorskip("matplotlib")
    model = mixtral()
    seen = seen_choices(model)
    trainer = trained(model, tmp_path, **other)
    history = trainer.state.log_history
    logs = [log for log in history if any(key.startswith("expert_load/") for key in log)]
    losses = [log for log in history if "loss" in log]
    assert [log["step"] for log in logs] == [log["step"] for log in losses] == [2, 4]
    forwards = other.get("gradient_accumulation_steps", 1)
    for number, log in enumerate(logs):
        for name, calls in seen.items():
            first = calls if "gradient_checkpointing" not in other else calls[::2]  # the recomputation's are the same
            last = first[forwards - 1 :: forwards][2 * number : 2 * number + 2]
            load = torch.bincount(torch.cat(last).flatten(), minlength=EXPERTS).double()
            assert log[f"expert_load/{name}/max_over_mean"] == pytest.approx(float(load.max() / load.mean()))
            entropy = torch.distributions.Categorical(load).entropy() / torch.tensor(EXPERTS).double().log()
            assert log[f"expert_load/{name}/entropy"] == pytest.approx(float(entropy))
            assert f"expert_load/{name}/dropped" not in log
    assert (tmp_path / "pictures" / "experts.png").stat().st_size > 1000
    assert not any(name.endswith("pymoe_load") for name, _ in model.named_modules())


def test_training_again_after_an_interruption_leaves_nothing_behind(tmp_path):
    """Nothing calls on_train_end of a training that raises, so the next one must end its counting."""
    model = mixtral()
    callback = LoadCallback(SimpleNamespace(model=model))
    callback.on_train_begin(None, None, None)
    assert any(name.endswith("pymoe_load") for name, _ in model.named_modules())
    callback.on_train_begin(None, None, None)
    callback.on_train_end(None, None, None)
    assert not any(name.endswith("pymoe_load") for name, _ in model.named_modules())


def test_a_trainer_reports_what_layers_of_pymoe_drop(tmp_path):
    pytest.importorskip("matplotlib")
    model = Reported()
    trainer = trained(model, tmp_path, steps=2)
    (log,) = [log for log in trainer.state.log_history if "expert_load/layer/dropped" in log]
    assert 0.5 <= log["expert_load/layer/dropped"] < 1
    assert 0 < log["expert_load/layer/entropy"] <= 1 <= log["expert_load/layer/max_over_mean"]
