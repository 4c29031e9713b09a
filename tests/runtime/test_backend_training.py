"""Training of an expert backend: one update per batch, only from its own gradients, whatever happened before."""

from __future__ import annotations

import copy
import io
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pymoe.runtime import BatchTensorProto, ExpertBackend, NonFiniteGradientError

X = BatchTensorProto(4)
NAN = float("nan")


class Scale(nn.Module):
    """Multiplies rows by a weight, whose gradient is the sum of inputs times gradients. Tests can change what it
    does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.before: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        return x * self.weight


class Observed(ExpertBackend):
    """Records the gradients of its updates."""

    def apply_gradients(self) -> None:
        self.__dict__.setdefault("seen", []).append([parameter.grad for parameter in self.parameters()])
        super().apply_gradients()


def make(
    expert: nn.Module | None = None, *, optimizer: Any = torch.optim.SGD, lr: float = 0.5, **options: Any
) -> Observed:
    expert = expert or Scale()
    return Observed("e", expert, optimizer(expert.parameters(), lr=lr), args_schema=[X], **options)


ONES = torch.ones(3, 4)

# --- reduction, accumulation, clipping ---


def test_one_update_a_batch_of_the_sum_or_the_mean_over_its_rows() -> None:
    for reduction, expected in (("sum", 6.0), ("mean", 2.0)):
        backend = make(gradient_reduction=reduction)
        (gradient,) = backend.backward(ONES, 2 * ONES)
        assert torch.equal(gradient, 4 * ONES)  # clients' gradients are not averaged
        assert torch.equal(backend.seen[0][0], torch.full((4,), expected))
        assert torch.equal(backend.expert.weight, torch.full((4,), 2.0 - 0.5 * expected))
        assert len(backend.seen) == backend.updates == 1


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_accumulated_batches_make_the_update_of_one_large_batch(reduction: str) -> None:
    options: dict[str, Any] = {"gradient_reduction": reduction, "clip_grad_norm": 3.0}
    several, large = make(accumulate_steps=3, **options), make(**options)
    x, grad = torch.randn(2, 12, 4).unbind()
    for part in (slice(0, 2), slice(2, 3), slice(3, 12)):
        assert several.updates == 0
        assert torch.equal(several.expert.weight, torch.full((4,), 2.0))
        several.backward(x[part], grad[part])
        assert several.expert.weight.grad is None
    large.backward(x, grad)
    assert several.updates == large.updates == 1
    torch.testing.assert_close(several.expert.weight, large.expert.weight)
    several.backward(x, grad)
    assert several.updates == 1  # accumulation starts again at zero


def test_clipping_is_torchs() -> None:
    plain = Scale()
    grad = torch.randn(3, 4)
    plain(ONES).backward(grad)
    for length in (0.25, 1e6):
        expected = copy.deepcopy(plain)
        expected.weight.grad = plain.weight.grad.clone()
        nn.utils.clip_grad_norm_(expected.parameters(), length)
        backend = make(clip_grad_norm=length)
        backend.backward(ONES, grad)
        torch.testing.assert_close(backend.seen[0][0], expected.weight.grad)


def test_the_scheduler_steps_after_every_update() -> None:
    expert = Scale()
    opt = torch.optim.SGD(expert.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    backend = ExpertBackend("e", expert, opt, args_schema=[X], scheduler=scheduler, accumulate_steps=2)
    rates = []
    for _ in range(6):
        backend.backward(ONES, ONES)
        rates.append(opt.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_apply_gradients_can_be_overridden_and_needs_no_optimizer() -> None:
    class SignDescent(ExpertBackend):
        def apply_gradients(self) -> None:
            with torch.no_grad():
                for parameter in self.expert.parameters():
                    parameter -= parameter.grad.sign()

    backend = SignDescent("e", Scale(), args_schema=[X])
    assert backend.trains
    backend.backward(ONES, 5 * ONES)
    assert torch.equal(backend.expert.weight, torch.ones(4))
    assert backend.expert.weight.grad is None
    assert backend.updates == 1


def test_without_an_optimizer_nothing_is_updated_and_no_parameter_gets_a_gradient() -> None:
    expert = Scale()
    hooked: list[Tensor] = []
    expert.weight.register_hook(hooked.append)
    expert.weight.grad = torch.full((4,), 7.0)  # another user's gradient
    backend = ExpertBackend("e", expert, args_schema=[X])
    assert not backend.trains
    assert torch.equal(backend.backward(ONES, ONES)[0], 2 * ONES)
    assert torch.equal(expert.weight, torch.full((4,), 2.0))
    assert torch.equal(expert.weight.grad, torch.full((4,), 7.0))
    assert not hooked
    assert backend.updates == 0


# --- nothing stale ---


def fail() -> None:
    raise ZeroDivisionError("planted")


def failing_hook(_: Tensor) -> None:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("where", ["forward", "backward", "after the gradient", "step"])
def test_a_failed_backward_leaves_no_gradient_for_the_next_batch(where: str) -> None:
    backend = make(accumulate_steps=1)
    expert, step = backend.expert, backend.opt.step
    handle = None
    if where == "forward":
        expert.before = fail
    elif where == "backward":
        handle = expert.weight.register_hook(failing_hook)
    elif where == "after the gradient":
        handle = expert.weight.register_post_accumulate_grad_hook(failing_hook)
    else:
        backend.opt.step = fail
    with pytest.raises(ZeroDivisionError) as caught:
        backend.backward(ONES, 1000 * ONES)
    assert expert.weight.grad is None
    assert backend.may_retry(caught.value) == (where != "step")
    assert backend.updates == 0

    expert.before, backend.opt.step = lambda: None, step
    if handle is not None:
        handle.remove()
    backend.backward(ONES, ONES)
    assert torch.equal(backend.seen[-1][0], torch.full((4,), 3.0))
    assert torch.equal(expert.weight, torch.full((4,), 0.5))


def test_a_failed_batch_takes_no_part_in_an_accumulated_update() -> None:
    backend = make(accumulate_steps=2)
    backend.backward(ONES, ONES)
    backend.expert.before = fail
    with pytest.raises(ZeroDivisionError):
        backend.backward(ONES, 1000 * ONES)
    with pytest.raises(ZeroDivisionError):
        backend.forward(ONES)
    backend.expert.before = lambda: None
    with pytest.raises(NonFiniteGradientError):
        backend.backward(ONES, NAN * ONES)
    backend.backward(ONES, ONES)
    assert torch.equal(backend.seen[0][0], torch.full((4,), 6.0))


def test_gradients_left_by_others_enter_no_update() -> None:
    backend = make()
    backend.expert(ONES).backward(1000 * ONES)
    backend.backward(ONES, ONES)
    assert torch.equal(backend.seen[0][0], torch.full((4,), 3.0))


def test_parameters_that_the_optimizer_does_not_know_are_cleared_too() -> None:
    expert = nn.Sequential(Scale(), Scale())
    backend = Observed("e", expert, torch.optim.SGD(expert[1].parameters(), lr=0.5), args_schema=[X])
    for _ in range(2):
        backend.backward(ONES, ONES)
        assert all(parameter.grad is None for parameter in expert.parameters())
    # 3 rows times the second weight, which is 2 and then 2 - 0.5 * 6; gradients do not add up over batches.
    assert [grads[0][0].item() for grads in backend.seen] == [6.0, -3.0]
    assert torch.equal(expert[0].weight, torch.full((4,), 2.0))


def test_only_exceptions_of_an_unfinished_batch_may_be_retried() -> None:
    backend = make()
    assert not backend.may_retry(ValueError("from somewhere else"))
    once = ZeroDivisionError("raised twice")

    def fail_once() -> None:
        raise once

    backend.expert.before = fail_once
    with pytest.raises(ZeroDivisionError):
        backend.backward(ONES, ONES)
    assert backend.may_retry(once)
    backend.expert.before, backend.opt.step = lambda: None, fail_once
    with pytest.raises(ZeroDivisionError):
        backend.backward(ONES, ONES)
    assert not backend.may_retry(once)

    def interrupt() -> None:
        raise KeyboardInterrupt

    backend.expert.before = interrupt
    with pytest.raises(KeyboardInterrupt) as caught:
        backend.backward(ONES, ONES)
    assert not backend.may_retry(caught.value)


# --- NaN ---


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_never_reaches_the_expert(bad: float) -> None:
    backend = make()
    grad = ONES.clone()
    grad[1, 2] = bad
    with pytest.raises(NonFiniteGradientError, match="made no update") as caught:
        backend.backward(ONES, grad)
    assert backend.may_retry(caught.value)
    assert torch.equal(backend.expert.weight, torch.full((4,), 2.0))
    assert backend.updates == 0
    backend.backward(ONES, ONES)
    assert backend.expert.weight.isfinite().all()


def test_skipped_updates_give_every_request_its_gradients(caplog: pytest.LogCaptureFixture) -> None:
    backend = make(nonfinite_gradients="skip")
    grad = ONES.clone()
    grad[1] = NAN
    with caplog.at_level(logging.WARNING, "pymoe.runtime"):
        (gradient,) = backend.backward(ONES, grad)
    assert "made no update" in caplog.text
    assert torch.equal(gradient[[0, 2]], 2 * ONES[:2])
    assert gradient[1].isnan().all()
    assert torch.equal(backend.expert.weight, torch.full((4,), 2.0))
    assert backend.updates == 0


def test_steps_with_nan_are_made_where_asked_for() -> None:
    backend = make(nonfinite_gradients="step")
    backend.backward(ONES, NAN * ONES)
    assert backend.expert.weight.isnan().all()


def test_large_finite_gradients_are_no_error() -> None:
    """Their sum overflows, which must not be taken for an infinity among the gradients."""
    backend = make(lr=1e-38)
    grad = torch.full((1, 4), 3e38)
    backend.backward(torch.ones(1, 4), grad)
    assert torch.equal(backend.seen[0][0], grad[0])
    with pytest.raises(NonFiniteGradientError, match="the norm of all gradients"):
        make(clip_grad_norm=1.0).backward(torch.ones(1, 4), grad)


def test_an_update_whose_norm_overflows_drops_all_of_its_batches_and_says_how_many() -> None:
    backend = make(accumulate_steps=2, clip_grad_norm=1.0)
    backend.backward(ONES, ONES)
    with pytest.raises(NonFiniteGradientError, match="not finite: 2 batches, whose gradients were accum"):
        backend.backward(torch.ones(1, 4), torch.full((1, 4), 3e38))
    backend.backward(ONES, ONES)
    assert (backend.updates, backend.expert.weight.tolist()) == (0, [2.0] * 4)
    backend.backward(ONES, ONES)
    assert backend.updates == 1


# --- modes, buffers, state ---


@pytest.mark.parametrize(("buffers", "after_forward", "after_backward"), [("backward", 0, 1), ("both", 1, 2)])
def test_batch_statistics_count_what_is_trained_on_once(buffers: str, after_forward: int, after_backward: int) -> None:
    expert = nn.Sequential(nn.BatchNorm1d(4), Scale())
    plain = copy.deepcopy(expert)
    backend = make(expert, buffers=buffers)
    x = torch.randn(5, 4) + 3
    (output,) = backend.forward(x)
    assert torch.equal(output, plain(x))
    assert expert[0].num_batches_tracked == after_forward
    assert bool(expert[0].running_mean.any()) == bool(after_forward)
    backend.backward(x, torch.ones(5, 4))
    assert expert[0].num_batches_tracked == after_backward
    if buffers == "backward":
        assert torch.equal(expert[0].running_mean, plain[0].running_mean)


def test_a_failed_backward_leaves_the_buffers_alone() -> None:
    expert = nn.Sequential(nn.BatchNorm1d(4), Scale())
    backend = make(expert)
    expert[1].before = fail
    with pytest.raises(ZeroDivisionError):
        backend.backward(torch.randn(5, 4) + 3, torch.ones(5, 4))
    assert expert[0].num_batches_tracked == 0
    assert not expert[0].running_mean.any()


def test_the_mode_of_the_expert_is_kept_and_can_be_set() -> None:
    expert = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)).eval()
    backend = ExpertBackend("e", expert, args_schema=[X])
    assert not backend.training
    assert torch.equal(backend.forward(ONES)[0], ONES / (1 + 1e-5) ** 0.5)
    backend.train()
    assert expert[0].training
    assert backend.forward(torch.randn(100, 4))[0].eq(0).sum() == 0  # normalised after dropout, so some values are 0
    backend.eval()
    assert not expert[1].training
    assert torch.equal(backend.forward(ONES)[0], ONES / (1 + 1e-5) ** 0.5)


def trained(**options: Any) -> Observed:
    backend = make(nn.Sequential(nn.BatchNorm1d(4), Scale()), optimizer=torch.optim.Adam, **options)
    for seed in range(3):
        backend.backward(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)), torch.ones(5, 4))
    return backend


def test_the_state_with_the_optimizer_continues_the_trajectory() -> None:
    first = trained()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make(nn.Sequential(nn.BatchNorm1d(4), Scale()), optimizer=torch.optim.Adam)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.updates == 3
    x = torch.randn(5, 4)
    for backend in (first, second):
        backend.backward(x, torch.ones(5, 4))
    for mine, its in zip(first.expert.parameters(), second.expert.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_the_state_is_of_one_moment() -> None:
    backend = trained()
    state = backend.state_dict()
    copies = copy.deepcopy(state)
    backend.backward(torch.randn(5, 4), torch.ones(5, 4))
    for key in copies:
        if key != "_extra_state":
            assert torch.equal(state[key], copies[key])
    moments = [one["_extra_state"]["opt"]["state"][0]["exp_avg"] for one in (state, copies)]
    assert torch.equal(*moments)
    assert not torch.equal(backend.expert[1].weight, state["expert.1.weight"])


def test_a_state_taken_while_training_is_between_two_updates() -> None:
    """Both weights always change together, so a state with only one changed was taken during a step."""

    class Slowly(ExpertBackend):
        def apply_gradients(self) -> None:
            with torch.no_grad():
                for parameter in self.expert.parameters():
                    parameter += 1
                    threading.Event().wait(0.0005)

    backend = Slowly("e", nn.Sequential(Scale(), Scale()), args_schema=[X])
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            backend.backward(ONES, ONES)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(50):
            state = backend.state_dict()
            assert torch.equal(state["expert.0.weight"], state["expert.1.weight"])
            assert state["expert.0.weight"][0] == 2 + state["_extra_state"]["updates"]
            state = nn.ModuleDict({"one": backend}).state_dict()
            assert torch.equal(state["one.expert.0.weight"], state["one.expert.1.weight"])
    finally:
        stop.set()
        trainer.join()


def test_states_pass_between_backends_with_and_without_an_optimizer() -> None:
    training = trained()
    frozen = ExpertBackend("e", nn.Sequential(nn.BatchNorm1d(4), Scale()), args_schema=[X])
    frozen.load_state_dict(training.state_dict())
    assert torch.equal(frozen.expert[1].weight, training.expert[1].weight)
    training.load_state_dict(frozen.state_dict())
    assert training.opt.state


def test_a_loaded_state_begins_without_what_was_accumulated() -> None:
    backend = make(accumulate_steps=2)
    state = backend.state_dict()
    backend.backward(ONES, 1000 * ONES)
    backend.load_state_dict(state)
    backend.backward(ONES, ONES)
    assert backend.updates == 0
    backend.backward(ONES, ONES)
    assert torch.equal(backend.seen[0][0], torch.full((4,), 6.0))


def test_moving_an_expert_moves_its_optimizer() -> None:
    backend = trained()
    loaded: list[Any] = []
    load, backend.opt.load_state_dict = backend.opt.load_state_dict, loaded.append
    backend.to("cpu")
    (state,) = loaded
    load(state)  # moves its tensors to the parameters' device
    backend.backward(torch.randn(5, 4), torch.ones(5, 4))
    assert backend.updates == 4


def test_the_optimizers_own_zero_grad_is_called_after_its_step() -> None:
    """An optimizer that overrides it (to keep its own sums, for example) did not notice that gradients were cleared."""
    calls = []

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            calls.append("step")
            super().step()

        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append("zero_grad")
            super().zero_grad(set_to_none=False)

    expert = nn.Linear(4, 4)
    backend = ExpertBackend("e", expert, Own(expert.parameters(), lr=0.1), args_schema=[BatchTensorProto(4)])
    for _ in range(2):
        backend.backward(torch.ones(2, 4), torch.ones(2, 4))
    assert calls == ["step", "zero_grad"] * 2
    assert [parameter.grad for parameter in expert.parameters()] == [None] * 2
