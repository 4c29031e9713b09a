"""A pipe's checkpoint has everything in the model's ``state_dict``; loading restores it or names the keys."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.utils import parametrizations

import pymoe
from pymoe.pipe import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 4


class Half(nn.Linear):
    """Saves its weight in half precision, as packed layers do."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight16"] = self.weight.detach().half()
        destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        if prefix + "weight16" not in state:
            missing.append(prefix + "weight16")
            return
        self.weight.data.copy_(state[prefix + "weight16"].float())
        self.bias.data.copy_(state[prefix + "bias"])


class Extra(nn.Linear):
    """Has an extra state, whose structure grows."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.extra = {"steps": 0}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class Amax(nn.Linear):
    """Has a tensor as its extra state, as layers in FP8 do."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.amax = torch.randn(3)

    def get_extra_state(self):
        return self.amax.clone()

    def set_extra_state(self, state):
        self.amax = state


def cloning():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.update(
            {name: value.clone() for name, value in state.items() if name.startswith(prefix)}
        )
    )
    return layer


def extra():
    layer = Extra()
    layer.extra["steps"] = int(torch.randint(1, 1000, ()))
    return layer


class Unused(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.randn(2))
        self.register_buffer("table", torch.randn(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


LAYERS = {
    "a plain layer": lambda: nn.Linear(WIDTH, WIDTH),
    "packed weights": lambda: Half(WIDTH, WIDTH),
    "a hook that clones": cloning,
    "extra state": extra,
    "a tensor as extra state": Amax,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "a batch norm": lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)),
    "unused tensors": Unused,
    "nested": lambda: nn.Sequential(nn.Tanh(), Half(WIDTH, WIDTH)),
    "experts": lambda: pymoe.nn.MoE(WIDTH, 4, 3, 2, bias_update_rate=0.1),
}


def captured(model, first):
    return pymoe.pipeline(model, (torch.randn(2, WIDTH),), split_spec={str(first): pymoe.SplitPoint.BEGINNING})


PIPES = {
    "sequential": lambda model, first: pymoe.Pipe(model, balance=[first, 3 - first]),
    "stages": lambda model, first: pymoe.Pipe.from_stages(nn.ModuleList(model)),
    "captured": captured,
}


def values(state):
    return {name: value for name, value in state.items() if value is not None}


def build(seed, layer, pipe, first):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), LAYERS[layer](), nn.Linear(WIDTH, 2))
    return model, PIPES[pipe](model, first)


@pytest.mark.thinned(usual=15)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("pipe", PIPES)
def test_a_checkpoint_has_all_that_state_dict_has_and_loading_restores_it(pipe, layer, tmp_path):
    model, before = build(0, layer, pipe, 1)
    expected = values(model.state_dict())
    assert values(checkpoint.stage_state_dict(before)).keys() == expected.keys()
    checkpoint.save(before, tmp_path)
    other, after = build(1, layer, pipe, 2)
    checkpoint.load(after, tmp_path)
    torch.testing.assert_close(values(other.state_dict()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("pipe", PIPES)
def test_every_key_belongs_to_the_stage_of_its_layer(pipe, layer):
    model, made = build(0, layer, pipe, 1)
    parts = [checkpoint.stage_state_dict(made, [stage]) for stage in range(len(made))]
    assert {name for part in parts for name in part} == model.state_dict().keys()
    first = [name for name in model.state_dict() if name.startswith("0.")]
    assert [name for name in parts[0] if not name.startswith("1.")] == first
    unused = {"1.spare", "1.table"} if pipe == "captured" else set()
    assert {name for name in parts[0] if name.startswith("1.")} <= unused
    assert not parts[1].keys() & set(first)


def test_what_a_file_has_in_excess_is_refused_by_name(tmp_path):
    larger = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    checkpoint.save(pymoe.Pipe(larger), tmp_path)
    with pytest.raises(dcp.api.CheckpointException, match=r"got one with 1\.bias, 1\.weight as well"):
        checkpoint.load(pymoe.Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH))), tmp_path)


def test_an_extra_state_of_another_structure_is_refused_by_name(tmp_path):
    _, pipe = build(0, "extra state", "sequential", 1)
    pipe.get_submodule("1").extra["scales"] = {"weight": 0.5}
    checkpoint.save(pipe, tmp_path)
    _, other = build(1, "extra state", "sequential", 1)
    with pytest.raises(dcp.api.CheckpointException, match=r"got one with 1\._extra_state\.scales\.weight as well"):
        checkpoint.load(other, tmp_path)


def test_keys_that_modules_do_not_load_are_named(tmp_path):
    _, pipe = build(0, "a plain layer", "sequential", 1)
    pipe.get_submodule("1").register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.update({prefix + "version": torch.ones(1)})
    )
    checkpoint.save(pipe, tmp_path)
    with pytest.raises(RuntimeError, match=r"do not load, or miss: 1\.version"):
        checkpoint.load(pipe, tmp_path)


def test_what_belongs_to_no_stage_is_refused_by_name_where_stages_are_saved_apart():
    _, pipe = build(0, "a plain layer", "sequential", 1)
    pipe.staged.module.register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.update({"packed.weight": state["0.weight"].half()})
    )
    assert "packed.weight" in checkpoint.stage_state_dict(pipe)
    with pytest.raises(ValueError, match=r"got 'packed.weight', which the model itself makes for several stages"):
        checkpoint.stage_state_dict(pipe, [1])


def test_a_layer_that_was_replaced_is_saved(tmp_path):
    for name in PIPES:
        model, pipe = build(0, "a plain layer", name, 1)
        (pipe.staged.module if name == "stages" else model)[2] = Half(WIDTH, 2)
        assert "2.weight16" in checkpoint.stage_state_dict(pipe, [len(pipe) - 1])
