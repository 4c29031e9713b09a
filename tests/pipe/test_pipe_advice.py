"""Steps that gain nothing warn, and errors use the caller's words."""

import warnings

import pytest
import torch
from pipe_models import WIDTH
from torch import nn
from torch.nn import functional as F

from pymoe.nn import MoE
from pymoe.pipe import Pipe
from pymoe.pipe.schedules import build, simulate


def model(layers):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def step(pipe, rows=8, **options):
    x = torch.randn(rows, WIDTH)
    return pipe.step(x, target=x, loss_fn=F.mse_loss, **options)


NO_GAIN = {
    "one stage": (lambda: step(Pipe(model(2), 4, balance=[2])), r"one stage.*balance="),
    "one micro-batch": (lambda: step(Pipe(model(3))), "one micro-batch, so 3 stages wait.*chunks=12"),
    "few rows": (lambda: step(Pipe(model(2), 4), rows=1), "one micro-batch.*give it more rows"),
    "one worker": (
        lambda: step(Pipe(model(2), 4), schedule="interleaved-1f1b"),
        "'interleaved-1f1b' has one worker run all 2 stages.*schedule='1f1b'",
    ),
}


@pytest.mark.parametrize("name", NO_GAIN)
def test_a_step_that_cannot_overlap_anything_warns(name):
    run, message = NO_GAIN[name]
    with pytest.warns(UserWarning, match=message) as caught:
        run()
    assert len(caught) == 1
    assert caught[0].filename == __file__, "it shows the caller's line"


def test_it_warns_once_and_of_the_first_step_alone():
    pipe = Pipe(model(2))
    with pytest.warns(UserWarning, match="one micro-batch"):
        step(pipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(pipe)
        useful = Pipe(model(2), 2)
        step(useful)
        step(useful, chunks=1)
        Pipe(model(1))(torch.randn(2, WIDTH))


def test_hooks_that_a_step_does_not_call_are_told():
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        layers = model(2)
        getattr(layers, register)(lambda *_: None)
        with pytest.warns(UserWarning, match="hooks of the model itself are not called"):
            step(Pipe(layers, 2))


MIXED_ROWS = {
    "batch norm that trains": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm without running statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False).eval(),
    "capacity": lambda: MoE(WIDTH, 16, 4, 2, capacity_factor=1.9),
}


@pytest.mark.parametrize("name", MIXED_ROWS)
def test_a_layer_that_would_mix_other_rows_warns(name):
    pipe = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), MIXED_ROWS[name]()), 2)
    pipe.train(pipe.staged.module[1].training)
    x = torch.randn(8, WIDTH)
    for _ in range(2):  # an error of the first call does not count as said
        with pytest.raises(UserWarning, match="outputs and gradients may not be those of the whole mini-batch"):
            call_with_errors(pipe, x)


ROWS_ALONE = {
    "batch norm in evaluation": lambda: nn.BatchNorm1d(WIDTH).eval(),
    "deferred batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "a capacity for all": lambda: MoE(WIDTH, 16, 4, 2, capacity_factor=2.0),
    "no capacity": lambda: MoE(WIDTH, 16, 4, 2),
}


@pytest.mark.parametrize("name", ROWS_ALONE)
def test_a_layer_that_treats_rows_alone_does_not_warn(name):
    layer = ROWS_ALONE[name]()
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer)
    pipe = Pipe(layers, 2, deferred_batch_norm=name == "deferred batch norm")
    pipe.train(layer.training)
    call_with_errors(pipe, torch.randn(8, WIDTH))


def call_with_errors(pipe, x):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pipe(x)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("GPipe", "gpipe"),
        ("FillDrain", "gpipe"),
        ("1F1B", "1f1b"),
        ("Schedule1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved-1f1b"),
        ("Zero-Bubble", "zero-bubble"),
    ],
)
def test_schedules_go_by_the_names_that_torch_has_for_them(spelling, name):
    assert build(spelling, 4, 8) == build(name, 4, 8)
    pipe = Pipe(model(3), 4)
    step(pipe, schedule=spelling)
    assert pipe.last_run.title == f"{name}, as run"


def test_a_schedule_that_is_not_there_is_answered_with_what_is():
    with pytest.raises(ValueError, match="no schedule 'nothing': there are gpipe, 1f1b") as failed:
        step(Pipe(model(2), 2), schedule="nothing")
    assert "come nearest" not in str(failed.value)
    for name in ("LoopedBFS", "ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV", "ScheduleDualPipeV"):
        with pytest.raises(ValueError, match=r"no schedule .* come nearest.*Pipe.build_stage"):
            build(name, 2, 2)


def test_a_loss_that_is_missing_is_told_apart_from_a_wrong_one():
    x = torch.randn(4, WIDTH)
    with pytest.raises(
        ValueError, match=r"without a loss_fn the model's own output .* shape \(2, 5\): give step a loss"
    ):
        Pipe(model(2), 2).step(x)
    with pytest.raises(ValueError, match="loss_fn must return a tensor with one element, got float"):
        Pipe(model(2), 2).step(x, loss_fn=lambda y: 1.0)


@pytest.mark.only_on("cpu")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@pytest.mark.parametrize("device", ["cuda:0", 0, "cuda", "nothing"], ids=str)
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises(
        ValueError, match=rf"Pipe: devices\[1\] must be a device of this machine, got '{device}': torch is"
    ):
        Pipe(model(2), 2, devices=["cpu", device])


def test_pipes_and_records_are_shown_in_a_line():
    pipe = Pipe(model(3), 4, balance=[2, 1])
    count = sum(p.numel() for p in pipe.parameters())
    assert repr(pipe) == f"Pipe(chunks=4, checkpoint='except_last', balance=[2, 1], parameters={count})"
    step(pipe)
    shown = repr(pipe.last_run)
    assert shown.startswith("<Record '1f1b, as run': 16 actions on 2 workers, makespan ")
    assert shown.endswith(" s>")
    assert (
        repr(simulate(build("1f1b", 2, 2))) == "<Record '1f1b': 8 actions on 2 workers, makespan 9 forwards of a stage>"
    )
    assert "devices=['cpu', 'meta']" in repr(Pipe(model(2), 2, devices=["cpu", "meta"]))
