"""Writes that no version counter shows: fingerprints of memory find them, for pipes built in any way."""

import copy

import pytest
import torch
from kinds_of_state import CHUNKS, KINDS, LARGE
from pipe_models import assert_same_gradients
from torch import nn
from torch.nn import functional as F

import pymoe
from pymoe.pipe import Pipe, is_recomputing
from pymoe.pipe.execution.held_state import HeldState, PutBack
from pymoe.pipe.execution.held_values import HeldLayout

pytestmark = [
    pytest.mark.filterwarnings("ignore:Pipe.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:Pipe. a forward:UserWarning"),
]


def loss_fn(output):
    return output.square().mean()


def batch(step):
    return torch.randn(3 * CHUNKS, 4, generator=torch.Generator().manual_seed(step))


def model_with(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), KINDS[kind]().float(), nn.Tanh(), nn.Linear(4, 4))


def of_stages(model, checkpoint):
    return Pipe.from_stages(
        [nn.Sequential(*model[:2]), nn.Sequential(*model[2:])], chunks=CHUNKS, checkpoint=checkpoint
    )


def captured(model, checkpoint):
    split = {"2": pymoe.SplitPoint.BEGINNING}
    return pymoe.pipeline(model, (torch.ones(3, 4),), split_spec=split, chunks=CHUNKS, checkpoint=checkpoint)


SOME = [
    "ParameterByData",
    "LargeByNumpy",
    "TrainedByData",
    "InSlots",
    "InClosure",
    "ClassNumber",
    "Array",
    "LargeArray",
]
SOME += ["PythonRandom", "NumpyRandomState", "Counts", "GeneratorFunction", "Buffer", "InDefault"]


@pytest.mark.thinned(usual=14)
@pytest.mark.parametrize("make", [of_stages, captured])
@pytest.mark.parametrize("kind", SOME)
def test_however_a_pipe_is_made_what_forwards_write_is_the_models_or_refused(kind, make):
    made = model_with(kind)
    for checkpoint in ("never", "except_last", "always"):
        model, plain = copy.deepcopy(made), copy.deepcopy(made)
        try:
            pipe = make(model, checkpoint)
            for step in range(2):
                pipe.step(batch(step), loss_fn=loss_fn)
        except Exception:
            if make is captured:
                continue  # models that cannot be captured are refused
            raise
        for step in range(2):
            for part in batch(step).chunk(CHUNKS):
                (loss_fn(plain(part)) / CHUNKS).backward()
        assert_same_gradients(model, plain, rtol=1.3e-6, atol=1e-5)
        torch.testing.assert_close(model[1].state(), plain[1].state())


@pytest.mark.parametrize("kind", SOME)
def test_the_state_of_a_loss_of_any_kind_is_that_of_a_loop(kind):
    made, layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), KINDS[kind]().float()
    for checkpoint in ("never", "always"):
        model, plain, mine, of_plain = (copy.deepcopy(one) for one in (made, made, layer, layer))
        pipe = Pipe(model, CHUNKS, checkpoint, balance=[2, 1])
        for step in range(2):
            pipe.step(batch(step), loss_fn=lambda output, loss=mine: loss(output).square().mean())
            for part in batch(step).chunk(CHUNKS):
                (loss_fn(of_plain(plain(part))) / CHUNKS).backward()
        pairs = zip(
            [*model.parameters(), *mine.parameters()], [*plain.parameters(), *of_plain.parameters()], strict=True
        )
        for one, other in pairs:
            torch.testing.assert_close(one.grad, other.grad)
        torch.testing.assert_close(mine.state(), of_plain.state())


def test_an_optimizer_that_writes_by_data_between_forward_and_backward_is_noticed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    output = Pipe(model, 2, "always", balance=[1, 1])(torch.ones(4, 4))
    model[0].weight.data.add_(0.1)
    with pytest.raises(RuntimeError, match=r"'0.weight' has changed since its first run"):
        output.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


class ReadsThenWrites(nn.Linear):
    """Its graph keeps a weight that the layer changes without autograd noticing."""

    def forward(self, x):
        y = super().forward(x)
        self.weight.data.mul_(0.5)
        return y


def test_a_graph_that_needs_a_parameter_that_was_put_back_and_has_changed_since_raises():
    """Without recomputation, torch silently computes with the changed values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), ReadsThenWrites(4, 4), nn.Linear(4, 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Pipe(model, CHUNKS, "always", balance=[2, 1]).step(batch(0), loss_fn=loss_fn)
    assert all(parameter.grad is None for parameter in model.parameters())


class ScalesByBuffer(nn.Linear):
    """Its graph keeps a buffer that later forwards change without autograd noticing."""

    def __init__(self, elements):
        super().__init__(4, 4)
        self.register_buffer("scale", torch.ones(elements))

    def forward(self, x):
        self.scale.data.mul_(0.5)
        return super().forward(x) * self.scale[:4]


@pytest.mark.parametrize("elements", [4, 1 << 15], ids=["small", "large"])
def test_a_graph_that_needs_a_buffer_that_was_put_back_and_has_changed_since_raises(elements):
    """Small buffers, which are copied in any case, silently gave wrong gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), ScalesByBuffer(elements), nn.Linear(4, 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Pipe(model, CHUNKS, "always", balance=[2, 1]).step(batch(0), loss_fn=loss_fn)
    assert all(parameter.grad is None for parameter in model.parameters())


class OwnBatchNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.register_buffer("moving_mean", torch.zeros(channels))
        self.register_buffer("moving_var", torch.ones(channels))

    def forward(self, x):
        return F.batch_norm(x, self.moving_mean, self.moving_var, training=True)


@pytest.mark.parametrize("make", [nn.BatchNorm1d, OwnBatchNorm])
@pytest.mark.parametrize("channels", [4, 1 << 15], ids=["small", "large"])
def test_batch_norms_of_any_width_are_recomputed(make, channels):
    """Batch norms' autograd nodes save running statistics without need. The second micro-batch changes them, and with
    many channels torch then raised an error.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, channels), make(channels), nn.Linear(channels, 1))
    plain = copy.deepcopy(model)
    pipe = Pipe(model, CHUNKS, "always", balance=[2, 1])
    for step in range(3):
        x = batch(step)
        pipe.step(x, loss_fn=loss_fn)
        for rows in x.tensor_split(CHUNKS):
            (loss_fn(plain(rows)) * (len(rows) / len(x))).backward()
    assert_same_gradients(model, plain, rtol=1.3e-6, atol=1e-5)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)


class Part(nn.Module):
    """Writes to a part of a large parameter."""

    def __init__(self, elements):
        super().__init__()
        self.kept = nn.Parameter(torch.zeros(elements), requires_grad=False)


@pytest.mark.parametrize("where", [0, 12345, -1])
def test_a_part_is_found_in_the_first_forward_and_one_that_is_written_every_time_in_the_end(where):
    part = Part(1 << 18)
    held = HeldState([("", part)])
    seen = held.before()
    part.kept.data[where] += 1
    assert held.after(seen) is None
    held = HeldState([("", part)])
    for _ in range(2):
        assert held.after(held.before()) is not None  # nothing is written
    lines = part.kept.nbytes // 64
    for _ in range(2 * lines // 30 + 2):
        seen = held.before()
        part.kept.data[where] += 1
        if held.after(seen) is None:
            break
    else:
        pytest.fail("never found")
    seen = held.before()
    assert seen.copies, "it is copied from now on"
    before = part.kept.detach().clone()
    part.kept.data[where] += 1
    again = held.after(seen)
    after = part.kept.detach().clone()
    with PutBack(held, again):
        assert torch.equal(part.kept, before)
        part.kept.data[where] += 1
    assert torch.equal(part.kept, after)


def test_a_forward_is_not_recomputed_if_a_later_one_was_found_to_write_what_its_own_sample_has_missed():
    part = Part(1 << 18)
    held = HeldState([("", part)], moment=2)
    earlier = held.after(held.before())
    later = held.before()  # the fourth reading, which is complete
    where = next(n for n in range(16, 16000, 16) if _is_unseen(part, earlier, n))
    part.kept.data[where] += 1
    assert held.after(later) is None
    assert not earlier.rewritten()
    with pytest.raises(RuntimeError, match="'kept' has changed since"), PutBack(held, earlier):
        pass


def _is_unseen(part, seen, where):
    part.kept.data[where] += 1
    unseen = not seen.rewritten()
    part.kept.data[where] -= 1
    return unseen


def test_memory_is_read_within_its_allocation_whatever_a_tensor_has_become():
    parameters = [nn.Parameter(torch.ones(LARGE)) for _ in range(4)]
    layout = HeldLayout([(str(number), parameter) for number, parameter in enumerate(parameters)])
    before = layout.fingerprints(1)
    assert layout.fingerprints(1) == before
    parameters[0].data = torch.ones(3)
    parameters[1].data = torch.ones(0)
    parameters[2].untyped_storage().resize_(0)
    parameters[3].data = torch.ones(2, 3).t()
    for moment in range(1, 9):
        assert len(layout.fingerprints(moment)) == 4
    assert all(one != other for one, other in zip(before, layout.fingerprints(1), strict=True))


def test_a_stage_that_is_not_recomputed_takes_no_fingerprints(monkeypatch):
    taken = []
    monkeypatch.setattr(HeldLayout, "fingerprints", lambda *_: taken.append(1) or [])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    Pipe(model, 2, "never", balance=[1, 1]).step(torch.ones(4, 4), loss_fn=loss_fn)
    assert not taken
    Pipe(model, 2, "always", balance=[1, 1]).step(torch.ones(4, 4), loss_fn=loss_fn)
    assert taken


class WritesAgain(nn.Module):
    """Calls ``write`` on a parameter in recomputations, and not in first runs; ``write`` may do nothing."""

    def __init__(self, write):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept = nn.Parameter(torch.zeros(LARGE), requires_grad=False)
        self.write = write

    def forward(self, x):
        if is_recomputing():
            self.write(self.kept)
        return self.linear(x)


@pytest.mark.parametrize("write", [lambda kept: kept.add_(1), lambda kept: kept.data.add_(1), lambda kept: None])
def test_a_recomputation_that_writes_to_what_the_first_run_has_left_alone_raises(write):
    model = nn.Sequential(WritesAgain(write), nn.Linear(4, 4))
    pipe = Pipe(model, 1, "always", balance=[1, 1])
    if write(torch.zeros(1)) is None:
        pipe.step(torch.ones(4, 4), loss_fn=loss_fn)
        return
    with pytest.raises(RuntimeError, match=r"'0\.kept'"):
        pipe.step(torch.ones(4, 4), loss_fn=loss_fn)
    assert all(parameter.grad is None for parameter in model.parameters())
