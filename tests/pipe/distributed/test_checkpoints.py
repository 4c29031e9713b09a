"""A checkpoint from a pipe on several processes is loaded by the model, or with another split, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pipe_models import WIDTH, batches
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.nn import functional as F
from training import BALANCES, make, run

import pymoe
from pymoe.pipe import checkpoint


def build_model(seed=0):
    """Return eight layers, of which the first and seventh are the same, and the second has buffers."""
    torch.manual_seed(seed)
    tied = nn.Linear(WIDTH, WIDTH)
    own = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return nn.Sequential(tied, nn.BatchNorm1d(WIDTH), nn.Tanh(), own[0], nn.ReLU(), own[1], tied, own[2]).double()


def adam(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def moments(module, optimizer):
    """Return an optimizer's state by parameter name."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {names[id(parameter)]: state for parameter, state in optimizer.state.items()}


def everything(pipe, indices, optimizer):
    """Return this rank's part of the model's and the optimizer's state."""
    values = {name: value.clone() for name, value in checkpoint.stage_state_dict(pipe, indices).items()}
    return {"model": values, "optimizer": moments(pipe, optimizer)}


def train_and_save(rank, world, folder):
    """Train and save, and also write every rank's part by simple means, for comparison."""
    pipe = pymoe.Pipe(build_model(), balance=BALANCES[world], checkpoint="never")
    schedule, stages = make("Schedule1F1B", pipe, rank, world, world, F.mse_loss)
    optimizer = adam(pipe[rank])
    for x, y in batches(3, (8,)):
        optimizer.zero_grad()
        run(schedule, stages, (x,), target=y)
        optimizer.step()
    folder = Path(folder)
    checkpoint.save(pipe, folder / "dcp", stages=[rank], optimizer=optimizer)
    checkpoint.save_safetensors(pipe, folder / "safetensors", stages=[rank])
    torch.save(everything(pipe, [rank], optimizer), folder / f"{rank}.pt")
    dist.barrier()


def load_and_show(rank, world, folder, out):
    """Load on other ranks, with another split, and return the state."""
    pipe = pymoe.Pipe(build_model(seed=1), balance=BALANCES[world], checkpoint="never")
    optimizer = adam(pipe[rank])
    checkpoint.load(pipe, Path(folder) / "dcp", stages=[rank], optimizer=optimizer)
    torch.save(everything(pipe, [rank], optimizer), Path(out) / f"{rank}.pt")
    dist.barrier()


def parts(folder, world):
    """Merge the parts of all ranks; copies must be equal."""
    whole = {"model": {}, "optimizer": {}}
    for rank in range(world):
        for kind, found in torch.load(Path(folder) / f"{rank}.pt").items():
            for name, value in found.items():
                are_equal(whole[kind].setdefault(name, value), value)
    return whole


def are_equal(found, expected):
    torch.testing.assert_close(
        found, expected, rtol=0, atol=0, check_dtype=False
    )  # step counters have the default dtype


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Provide a folder with checkpoints of three ranks, and the ranks' states."""
    folder = tmp_path_factory.mktemp("saved")
    ranks(3).run(train_and_save, folder=str(folder))
    whole = parts(folder, 3)
    model = build_model()
    assert set(whole["model"]) == set(model.state_dict())
    assert set(whole["optimizer"]) == {name for name, _ in model.named_parameters()}
    assert whole["model"]["1.num_batches_tracked"] > 0
    return folder, whole


@pytest.mark.slow
def test_the_unsplit_model_loads_it_with_torchs_own_calls(saved):
    folder, whole = saved
    model = build_model(seed=1)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "dcp", no_dist=True)
    are_equal(dict(model.state_dict()), whole["model"])
    assert model[0] is model[6]


@pytest.mark.slow
def test_the_unsplit_models_optimizer_loads_it_with_torchs_own_calls(saved):
    folder, whole = saved
    model = build_model(seed=1)
    optimizer = adam(model)
    by_name = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=by_name)}
    dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
    for name, moments in whole["optimizer"].items():
        for key, value in moments.items():
            are_equal(state["optimizer"][f"state.{name}.{key}"], value)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_pipe_in_one_process_loads_it_with_any_split(saved, stages):
    folder, whole = saved
    pipe = pymoe.Pipe(build_model(seed=1), balance=[8 // stages] * stages)
    optimizer = adam(pipe)
    checkpoint.load(pipe, folder / "dcp", optimizer=optimizer)
    are_equal(dict(pipe.state_dict()), whole["model"])
    are_equal(moments(pipe, optimizer), whole["optimizer"])


def test_a_pipe_on_two_processes_loads_what_three_have_saved(saved, ranks, tmp_path):
    folder, whole = saved
    ranks(2).run(load_and_show, folder=str(folder), out=str(tmp_path))
    found = parts(tmp_path, 2)
    are_equal(found["model"], whole["model"])
    are_equal(found["optimizer"], whole["optimizer"])


def test_what_one_process_has_saved_is_loaded_by_several(ranks, tmp_path):
    pipe = pymoe.Pipe(build_model(seed=3), balance=[8])
    optimizer = adam(pipe)
    pipe.step(torch.randn(6, WIDTH).double(), loss_fn=torch.sum, reduction="sum")
    optimizer.step()
    checkpoint.save(pipe, tmp_path / "dcp", optimizer=optimizer)
    ranks(2).run(load_and_show, folder=str(tmp_path), out=str(tmp_path))
    found = parts(tmp_path, 2)
    are_equal(found["model"], dict(pipe.state_dict()))
    are_equal(found["optimizer"], moments(pipe, optimizer))


def test_a_stages_state_has_the_models_names_and_nothing_of_other_stages():
    pipe = pymoe.Pipe(build_model(), balance=[1, 2, 3, 2])
    buffers = {f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    tied = {"0.weight", "0.bias", "6.weight", "6.bias"}
    assert set(checkpoint.stage_state_dict(pipe, [1])) == buffers
    assert set(checkpoint.stage_state_dict(pipe, [0])) == tied
    assert set(checkpoint.stage_state_dict(pipe, [3])) == tied | {"7.weight", "7.bias"}
    assert set(checkpoint.stage_state_dict(pipe)) == set(pipe.state_dict())


def test_a_checkpoint_that_lacks_something_is_refused(saved):
    folder, _ = saved
    larger = torch.nn.Sequential(*build_model(), torch.nn.Linear(WIDTH, 1).double())
    with pytest.raises(dcp.api.CheckpointException, match=r"8\.weight"):
        checkpoint.load(pymoe.Pipe(larger, balance=[9]), folder / "dcp")


class TestSafetensors:
    def test_the_unsplit_model_and_pipes_load_what_several_processes_have_written(self, saved):
        folder, whole = saved
        for module in (build_model(seed=1), pymoe.Pipe(build_model(seed=1), balance=[5, 3])):
            checkpoint.load_safetensors(module, folder / "safetensors")
            are_equal(dict(module.state_dict()), whole["model"])

    def test_each_tensor_is_written_once_and_the_index_says_where(self, saved):
        from safetensors import safe_open

        folder, whole = saved
        places = json.loads((folder / "safetensors" / "model.safetensors.index.json").read_text())["weight_map"]
        assert set(places) == set(whole["model"]) - {"6.weight", "6.bias"}
        written = {}
        for file in (folder / "safetensors").glob("*.safetensors"):
            with safe_open(file, "pt") as found:
                written.update({name: file.name for name in found.keys()})  # noqa: SIM118 (no mapping)
        assert written == places

    def test_one_file_is_read_too(self, tmp_path):
        from safetensors.torch import save_file

        model, other = torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.nn.Sequential(torch.nn.Linear(3, 2))
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        checkpoint.load_safetensors(other, tmp_path / "model.safetensors")
        are_equal(dict(other.state_dict()), dict(model.state_dict()))

    def test_a_file_of_another_model_is_refused(self, saved):
        folder, _ = saved
        with pytest.raises(RuntimeError, match="Unexpected key"):
            checkpoint.load_safetensors(torch.nn.Sequential(*build_model()[:7]), folder / "safetensors")

    def test_without_the_package_the_error_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(ImportError, match="pip install safetensors"):
            checkpoint.save_safetensors(pymoe.Pipe(build_model(), balance=[8]), tmp_path)
