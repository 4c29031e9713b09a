"""For losses that are not means over rows, a step has the gradients of ``loss_fn(model(x), y).backward()``, or
raises.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pymoe
from pymoe.pipe import Pipe
from pymoe.pipe.schedules import names

D, WORDS, LENGTH, ROWS = torch.float64, 5, 6, 7
PADDING = -100
SCHEDULES = names()


class Logits(nn.Module):
    """(rows, LENGTH) tokens -> (rows, WORDS, LENGTH), as torch's cross entropy takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WORDS, dtype=D))

    def forward(self, x):
        return (x @ self.weight).transpose(1, 2)


def language_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(WORDS, 4, dtype=D), nn.Linear(4, 4, dtype=D), nn.Tanh(), Logits())


def sentences(lengths=(6, 2, 0, 1, 0, 0, 5)):
    """Return inputs, and targets with these lengths before padding."""
    tokens = torch.randint(WORDS, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    for row, length in zip(tokens[1], lengths, strict=True):
        row[length:] = PADDING
    return tokens[0], tokens[1]


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def of_model(model, x, y, loss_fn):
    plain = copy.deepcopy(model)
    loss = loss_fn(plain(x), y)
    loss.backward()
    return gradients(plain), loss.detach()


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def tokens(y):
    return (y != PADDING).sum()


def flat_cross_entropy(output, y):
    return F.cross_entropy(output.transpose(1, 2).reshape(-1, WORDS), y.reshape(-1))


def masked_mean(output, y):
    mask = y != PADDING
    return (F.cross_entropy(output, y.where(mask, 0), reduction="none") * mask).sum() / mask.sum()


def mean_of_the_chosen(output, y):
    return F.cross_entropy(output, y, reduction="none")[y != PADDING].mean()


def times_reciprocal(output, y):
    """Compute a mean that is mistaken for a sum."""
    return F.cross_entropy(output, y, reduction="sum") * (1 / tokens(y).double())


def with_a_term(output, y):
    return 0.1 * output.square().mean() + flat_cross_entropy(output, y) * 2


MEANS_OVER_TOKENS = [flat_cross_entropy, masked_mean, mean_of_the_chosen, times_reciprocal]
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=D)
TORCHS = [
    F.cross_entropy,
    nn.CrossEntropyLoss(),
    partial(F.cross_entropy, weight=WEIGHTS, label_smoothing=0.1),
    nn.CrossEntropyLoss(WEIGHTS, ignore_index=3),
    partial(F.nll_loss, ignore_index=2),
]


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunks", [2, 4])
def test_padding_leaves_the_gradients_of_the_whole_mini_batch(schedule, checkpoint, chunks):
    x, y = sentences()
    for number, loss_fn in enumerate(TORCHS):
        target = y if number < 3 else y.clamp(min=0)
        model = language_model()
        expected, whole = of_model(model, x, target, loss_fn)
        pipe = Pipe(model, chunks, checkpoint, balance=[1, 3])
        losses = pipe.step(x, target=target, loss_fn=loss_fn, schedule=schedule)
        assert_close(gradients(model), expected)
        assert losses.isfinite().all()
        if number == 0:
            parts = torch.stack([tokens(part) for part in target.tensor_split(chunks)])
            assert_close((losses * parts).sum() / parts.sum(), whole)
            assert losses[parts == 0].eq(0).all()


@pytest.mark.parametrize("loss_fn", MEANS_OVER_TOKENS)
@pytest.mark.parametrize("lengths", [(6, 2, 0, 1, 0, 0, 5), (6, 2, 1, 1, 3, 3, 5)], ids=["a part is padded", "some"])
def test_a_mean_over_tokens_says_what_it_divides_by_or_is_refused(loss_fn, lengths):
    x, y = sentences(lengths)
    model = language_model()
    pipe = Pipe(model, 4, balance=[1, 3])
    with pytest.raises(ValueError, match=r"reduction=lambda target|is a sum"):
        pipe.step(x, target=y, loss_fn=loss_fn)
    assert gradients(model) == [None] * 3 + [None]
    expected, _ = of_model(model, x, y, loss_fn)
    pipe.step(x, target=y, loss_fn=loss_fn, reduction=tokens)
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("loss_fn", [*MEANS_OVER_TOKENS[:-1], with_a_term])
def test_without_padding_every_mean_over_tokens_is_one_over_rows(loss_fn):
    x, y = sentences([LENGTH] * ROWS)
    model = language_model()
    expected, _ = of_model(model, x, y, loss_fn)
    Pipe(model, 4, balance=[1, 3]).step(x, target=y, loss_fn=loss_fn)
    assert_close(gradients(model), expected)


def test_a_sum_of_two_means_over_different_things_is_refused():
    x, y = sentences()
    with pytest.raises(ValueError, match="not known as a mean over rows"):
        Pipe(language_model(), 4, balance=[1, 3]).step(x, target=y, loss_fn=with_a_term)


def test_a_function_of_a_mean_is_refused():
    x, y = sentences([LENGTH] * ROWS)
    pipe = Pipe(language_model(), 4, balance=[1, 3])
    for function in (torch.sqrt, torch.exp, torch.square):
        with pytest.raises(ValueError, match=f"(?i)is the {function.__name__[:3]}|is the pow"):
            pipe.step(x, target=y, loss_fn=lambda output, y, of=function: of(flat_cross_entropy(output, y)))
    pipe.step(x, target=y, loss_fn=lambda output, y: flat_cross_entropy(output, y).sqrt(), reduction=len)


def test_a_term_of_parameters_alone_may_be_any():
    x, y = sentences([LENGTH] * ROWS)
    model = language_model()
    scale = nn.Parameter(torch.tensor(2.0, dtype=D))

    def loss_fn(output, y):
        return flat_cross_entropy(output, y) / scale + scale.log() + F.mse_loss(scale, scale * 0, reduction="sum")

    expected, _ = of_model(model, x, y, loss_fn)
    scale_grad, scale.grad = scale.grad, None
    Pipe(model, 4, balance=[1, 3]).step(x, target=y, loss_fn=loss_fn)
    assert_close(gradients(model), expected)
    assert_close(scale.grad, scale_grad)


class Fused(torch.autograd.Function):
    """A mean over tokens that autograd cannot see."""

    @staticmethod
    def forward(ctx, output, y):
        with torch.enable_grad():
            ctx.output = output.detach().requires_grad_()
            ctx.loss = flat_cross_entropy(ctx.output, y)
        return ctx.loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return torch.autograd.grad(ctx.loss, ctx.output, grad)[0], None


def test_padding_under_a_loss_that_tells_nothing_is_refused():
    """An error and not a warning, since nearly every loss that knows -100 omits it from its mean."""
    x, y = sentences()
    model = language_model()
    pipe = Pipe(model, 4, balance=[1, 3])
    with pytest.raises(ValueError, match="different amounts of padding"):
        pipe.step(x, target=y, loss_fn=Fused.apply)
    expected, _ = of_model(model, x, y, Fused.apply)
    pipe.step(x, target=y, loss_fn=Fused.apply, reduction=tokens)
    assert_close(gradients(model), expected)
    pipe.step(x, target=y.clamp(min=0), loss_fn=Fused.apply)


class Captured(nn.Module):
    """A model that returns its loss if it is given labels, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.layers = language_model()

    def forward(self, x, labels):
        output = self.layers[:2](x)
        pymoe.pipe_split()
        output = self.layers[2:](output)
        return {"loss": F.cross_entropy(output, labels), "logits": output}


def test_a_models_own_loss_says_what_it_divides_by_or_is_refused():
    x, y = sentences()
    model = Captured()
    pipe = pymoe.pipeline(model, (x[:2], y[:2]), output_loss_value_spec={"loss": True}, chunks=4)
    with pytest.raises(ValueError, match="not known as a mean over rows"):
        pipe.step(x, labels=y)
    assert gradients(model) == [None] * 4
    plain = copy.deepcopy(model)
    plain(x, y)["loss"].backward()
    pipe.step(x, labels=y, reduction=lambda x, labels: tokens(labels))
    assert_close(gradients(model), gradients(plain))


def test_a_call_of_a_model_with_its_own_loss_refuses_a_mean_over_tokens():
    x, y = sentences()
    model = Captured()
    for checkpoint in ("never", "always"):
        pipe = pymoe.pipeline(
            model, (x[:2], y[:2]), output_loss_value_spec={"loss": True}, chunks=4, checkpoint=checkpoint
        )
        with pytest.raises(ValueError, match=r"^Pipe: the loss divides by 8, 1, 0, 5 in micro-batches"):
            pipe(x, y)
        whole = y.clamp(min=0)
        plain = copy.deepcopy(model)
        plain(x, whole)["loss"].backward()
        found = pipe(x, whole)["loss"]
        found.backward()
        assert_close(found, plain(x, whole)["loss"])
        assert_close(gradients(model), gradients(plain))
        model.zero_grad()


def test_stages_of_ones_own_and_captured_models_count_by_tokens():
    x, y = sentences()
    layers = language_model()
    expected, _ = of_model(layers, x, y, F.cross_entropy)
    Pipe.from_stages([layers[:2], layers[2:]], chunks=3).step(x, target=y, loss_fn=F.cross_entropy)
    assert_close(gradients(layers), expected)
    model = Captured()
    model.load_state_dict({f"layers.{name}": value for name, value in layers.state_dict().items()})
    pipe = pymoe.pipeline(model, (x[:2], y[:2]), chunks=3)
    pipe.step(x, y.clamp(min=0), target=y, loss_fn=lambda out, y: F.cross_entropy(out["logits"], y), reduction=tokens)
    assert_close(gradients(model), expected)


def test_if_everything_is_padding_the_loss_is_what_the_loss_function_makes_of_it():
    x, y = sentences([0] * ROWS)
    model = language_model()
    expected, loss = of_model(model, x, y, F.cross_entropy)
    losses = Pipe(model, 4, balance=[1, 3]).step(x, target=y, loss_fn=F.cross_entropy)
    assert loss.isnan()
    assert losses.isnan().all()
    torch.testing.assert_close(gradients(model), expected, equal_nan=True)


def test_weights_of_micro_batches_are_checked():
    x, y = sentences()
    pipe = Pipe(language_model(), 4, balance=[1, 3])
    for reduction, error, words in [
        (lambda y: -1, ValueError, "at least 0, got -1"),
        (lambda y: float("nan"), ValueError, "finite number of at least 0, got nan"),
        (lambda y: y, TypeError, r"got a tensor of shape \(2, 6\)"),
        (lambda y: None, TypeError, "expected a number, got NoneType"),
    ]:
        with pytest.raises(error, match=words):
            pipe.step(x, target=y, loss_fn=F.cross_entropy, reduction=reduction)
    with pytest.raises(ValueError, match="expected 'mean', which that of loss_fn is, got 'sum'"):
        pipe.step(x, target=y, loss_fn=F.cross_entropy, reduction="sum")


def test_without_gradients_a_part_without_weight_has_the_loss_0():
    x, y = sentences()
    with torch.no_grad():
        losses = Pipe(language_model(), 4, balance=[1, 3]).step(x, target=y, loss_fn=F.cross_entropy)
    assert losses[2] == 0
    assert losses.isfinite().all()
