"""Deferred batch norms as layers: converted, copied, saved, compiled, and in pipelines."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from deferred import assert_same_statistics, batches, micro_batches, pair, run
from torch import Tensor, nn

from pymoe.pipe import Pipe, micro_batch
from pymoe.pipe.deferred_batch_norm import DeferredBatchNorm, convert_deferred_batch_norm
from pymoe.pipe.schedules import Action, Kind, Schedule, names

# Emitted, for example, by pipes with one micro-batch.
pytestmark = pytest.mark.filterwarnings("ignore:Pipe.step:UserWarning")


class Twice(nn.Module):
    """Has one batch norm under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.again = self.norm


def test_a_converted_layer_is_the_same_object():
    seen: list[str] = []
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=1e-3, momentum=0.2), Twice())
    norm = model[1]
    norm.register_forward_hook(lambda *_: seen.append("forward"))
    norm.register_full_backward_hook(lambda *_: seen.append("backward"))
    norm.weight.requires_grad_(False)
    norm.eval()
    kept = dict(norm.named_parameters()) | dict(norm.named_buffers())
    keys = list(model.state_dict())
    assert convert_deferred_batch_norm(model) is model
    assert model[1] is norm
    assert isinstance(norm, DeferredBatchNorm)
    assert isinstance(norm, nn.BatchNorm2d)
    assert isinstance(model[2].norm, DeferredBatchNorm)
    assert model[2].norm is model[2].again
    for name, tensor in (dict(norm.named_parameters()) | dict(norm.named_buffers())).items():
        assert tensor is kept[name]
    assert (norm.eps, norm.momentum, norm.training, norm.weight.requires_grad) == (1e-3, 0.2, False, False)
    assert list(model.state_dict()) == keys
    norm(torch.randn(2, 4, 3, 3, requires_grad=True)).sum().backward()
    assert seen == ["forward", "backward"]


def test_a_converted_layer_is_left_alone_the_second_time():
    norm = convert_deferred_batch_norm(nn.BatchNorm1d(3))
    kind = type(norm)
    assert type(convert_deferred_batch_norm(norm)) is kind


def test_a_converted_layer_refuses_what_it_refused_before():
    with pytest.raises(ValueError, match="expected 4D input"):
        run(convert_deferred_batch_norm(nn.BatchNorm2d(3)), torch.randn(6, 3, 4), 2)
    with pytest.raises(ValueError, match="at least 2D"):
        DeferredBatchNorm(3)(torch.randn(3))
    with pytest.raises(ValueError, match="more than 1 value"):
        run(convert_deferred_batch_norm(nn.BatchNorm1d(3)), torch.randn(2, 3), 2)


def test_layers_that_cannot_be_deferred_are_refused_and_nothing_changes():
    class Own(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    for name, layer, why in [
        ("SyncBatchNorm", nn.SyncBatchNorm(3), "several processes"),
        ("LazyBatchNorm1d", nn.LazyBatchNorm1d(), "run it once"),
        ("Own", Own(3), "derive it from DeferredBatchNorm"),
    ]:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(layer))
        with pytest.raises(TypeError, match=f"'1.0' is a {name}.*{why}"):
            convert_deferred_batch_norm(model)
        assert type(model[0]) is nn.BatchNorm1d


def test_a_subclass_without_a_forward_of_its_own_is_converted():
    class Named(nn.BatchNorm1d):
        pass

    ordinary, deferred = pair(Named(2).double())
    assert isinstance(deferred, Named)
    (batch,) = batches(9, 2, count=1)
    ordinary(batch)
    run(deferred, batch, 3)
    assert_same_statistics(ordinary, deferred)


def test_made_by_hand_it_takes_inputs_of_every_shape():
    for shape in [(9, 2), (9, 2, 3), (9, 2, 3, 3), (9, 2, 2, 2, 2)]:
        deferred = DeferredBatchNorm(2).double()
        ordinary = nn.BatchNorm1d(2).double()
        (batch,) = batches(*shape, count=1)
        ordinary(batch.flatten(2) if len(shape) > 2 else batch)
        run(deferred, batch, 3)
        assert_same_statistics(ordinary, deferred)


def test_state_goes_to_and_from_an_ordinary_batch_norm():
    ordinary, deferred = pair(nn.BatchNorm2d(3).double())
    run(deferred, *batches(9, 3, 2, 2, count=1), 3)
    ordinary.load_state_dict(deferred.state_dict())
    assert_same_statistics(ordinary, deferred, 0)
    ordinary(*batches(4, 3, 2, 2, count=1))
    deferred.load_state_dict(ordinary.state_dict())
    assert_same_statistics(ordinary, deferred, 0)


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved])
@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), DeferredBatchNorm(3)], ids=["converted", "made by hand"])
def test_a_copy_is_deferred_and_begins_anew(duplicate, layer):
    deferred = convert_deferred_batch_norm(copy.deepcopy(layer).double())
    (batch,) = batches(9, 3, 2, 2, count=1)
    micro_batches(deferred, batch, 3)(0)
    twin = duplicate(deferred)
    assert type(twin) is type(deferred)
    assert "_unfinished" not in vars(twin)
    run(deferred, batch, 3), run(twin, batch, 3)
    assert_same_statistics(deferred, twin)
    assert twin.num_batches_tracked == 1


def test_compiled_it_is_one_graph_outside_of_a_pipeline_and_right_inside():
    ordinary, deferred = pair(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double())
    torch.compiler.reset()
    compiled = torch.compile(deferred, backend="eager", fullgraph=True)
    parted = torch.compile(deferred, backend="eager")
    first, third = batches(2, 3, 4, 4, count=2)
    (second,) = batches(8, 3, 4, 4, count=1)
    compiled(first)
    run(parted, second, 4)  # parts with the compiled shape
    compiled(third)
    for batch in (first, second, third):
        ordinary(batch)
    assert_same_statistics(ordinary, deferred)


def test_compiled_it_is_compiled_once_for_all_micro_batches():
    deferred = convert_deferred_batch_norm(nn.BatchNorm1d(2).double())
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(deferred, backend=backend)
    for batch in batches(16, 2):
        run(compiled, batch, 8)
    seen = len(graphs)
    assert 0 < seen < 8
    for batch in batches(16, 2):
        run(compiled, batch, 8)
    assert len(graphs) == seen


def convolutions() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 2)).double()


@pytest.mark.thinned(usual=6, deep=20)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", names())
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_the_first_layer_of_a_pipeline_sees_the_whole_mini_batch(chunks, schedule, checkpoint):
    # Later layers see separately normalised micro-batches, so their inputs differ from those of one batch.
    torch.manual_seed(3)
    model = convolutions()
    first = copy.deepcopy(model[:2])
    pipe = Pipe(model, chunks, checkpoint, deferred_batch_norm=True, balance=[2, 3, 5, 4])
    for batch in batches(11, 3, 4, 4):
        first(batch)
        pipe.step(batch, target=torch.zeros(11, 2).double(), loss_fn=nn.functional.mse_loss, schedule=schedule)
        assert_same_statistics(first[1], model[1])
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.num_batches_tracked == 3


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_layer_of_a_pipeline_collects_what_it_sees(stages):
    torch.manual_seed(3)
    model = convolutions()
    seen: dict[int, list[Tensor]] = {}
    reference = copy.deepcopy(model)
    pipe = Pipe(
        model, 4, deferred_batch_norm=True, balance=[14 // stages + 14 % stages] + [14 // stages] * (stages - 1)
    )
    (batch,) = batches(11, 3, 4, 4, count=1)
    parts = []
    for part in batch.tensor_split(4):
        for number, layer in enumerate(reference):
            seen.setdefault(number, []).append(part.detach())
            part = layer(part)
        parts.append(part)
    pipe(batch).sum().backward()
    for number, layer in enumerate(copy.deepcopy(reference)):
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer(torch.cat(seen[number]))
            assert_same_statistics(layer, model[number])


class FailsOnce(nn.Module):
    """Fails once, in the given micro-batch."""

    index: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if micro_batch().index == self.index:
            self.index = None
            raise KeyError("lost")
        return x


@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_pipeline_that_failed_counts_the_next_mini_batch_alone(index):
    torch.manual_seed(3)
    model, fails = convolutions(), FailsOnce()
    model.insert(1, fails)  # before the first batch norm
    first = copy.deepcopy(model[::2][:2])
    assert isinstance(first[1], nn.BatchNorm2d)
    pipe = Pipe(model, 4, deferred_batch_norm=True, balance=[3, 12])
    lost, batch = batches(11, 3, 4, 4, count=2)
    fails.index = index
    with pytest.raises(KeyError, match="lost"):
        pipe(lost)
    pipe(batch)
    first(batch)
    assert_same_statistics(first[1], model[2])


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_layer_in_two_stages_of_a_pipeline_updates_by_each(schedule, checkpoint):
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(4, momentum=0.3)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4)).double()
    alone = convert_deferred_batch_norm(copy.deepcopy(model))
    pipe = Pipe(model, 4, checkpoint, deferred_batch_norm=True, balance=[3, 2])
    for batch in batches(11, 4):
        between = torch.cat(run(alone[:3], batch, 4, stage=0))
        run(alone[3:], between, 4, stage=1)
        pipe.step(batch, target=batch, loss_fn=nn.functional.mse_loss, schedule=schedule)
        assert_same_statistics(alone[1], norm)
    assert norm.num_batches_tracked == 6


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 0, 3, 1)])
def test_micro_batches_may_come_in_any_order(order: tuple[int, ...]) -> None:
    """A custom schedule may run micro-batches in any order; an index below the last one was taken for a new
    mini-batch.
    """
    layer = nn.BatchNorm1d(3)
    found = []
    x = torch.randn(8, 3) * torch.arange(1, 9)[:, None]
    for numbers in (range(4), order):
        model = nn.Sequential(copy.deepcopy(layer), nn.Linear(3, 1))
        actions = [
            [Action(stage, n, kind) for kind in (Kind.FORWARD, Kind.BACKWARD) for n in numbers] for stage in (0, 1)
        ]
        schedule = Schedule("own", 4, (0, 1), tuple(map(tuple, actions)))
        pipe = Pipe(model, 4, deferred_batch_norm=True)
        for _ in range(2):
            pipe.step(x, loss_fn=torch.mean, schedule=schedule)
        found.append([buffer.clone() for buffer in model.buffers()])
    assert all(map(torch.equal, *found))
    for _ in range(2):
        layer(x)
    torch.testing.assert_close(found[0], [*layer.buffers()])
