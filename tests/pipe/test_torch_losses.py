"""Every loss of torch, with every option, in a step: the gradients of ``loss_fn(model(x), y).backward()``, or an error.

The losses and their options are read from torch, so a new one fails the test until it is listed here.
"""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pymoe.pipe import Pipe

ROWS, CHUNKS, CLASSES = 7, 3, 4  # micro-batches of 3, 2 and 2 rows
D = torch.float64


def numbers(*shape):
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(3), dtype=D)


REALS, SIGNS, SHARES = numbers(CLASSES), numbers(CLASSES).sign(), numbers(CLASSES).softmax(1)
Y = torch.tensor([0, 3, 2, 1, 1, 3, 0])
SOME_PADDED, A_PART_PADDED = torch.tensor([[0, -100, 2, 1, 1, -100, -100], [0, -100, 2, -100, -100, 3, 1]])
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 4.0], dtype=D)
LINEAR = numbers(CLASSES)[:CLASSES]


def plainly(loss, output, target):
    return loss(output, target)


def of_halves(loss, output, target):
    return loss(*output.chunk(2, 1), target)


def of_three(loss, output, target):
    return loss(output, output.roll(1, 1), 2 * output.roll(2, 1))


def of_log_shares(loss, output, target):
    return loss(output.log_softmax(1), target)


def of_sequences(loss, output, target):
    lengths = torch.full((2, len(output)), 2)
    return loss(torch.stack([output, -output]).log_softmax(-1), target, lengths[0], lengths[1] - 1)


# Constructor arguments of modules, a target, and how a loss is called.
LOSSES = [
    ("BCELoss", "binary_cross_entropy", SHARES, lambda loss, output, target: loss(output.sigmoid(), target)),
    ("BCEWithLogitsLoss", "binary_cross_entropy_with_logits", SHARES, plainly),
    ("CosineEmbeddingLoss", "cosine_embedding_loss", SIGNS[:, 0], of_halves),
    ("CrossEntropyLoss", "cross_entropy", Y, plainly),
    ("CTCLoss", "ctc_loss", Y[:, None].clamp(min=1), of_sequences),
    ("GaussianNLLLoss", "gaussian_nll_loss", REALS, lambda loss, out, target: loss(out, target, out.detach().exp())),
    ("HingeEmbeddingLoss", "hinge_embedding_loss", SIGNS, plainly),
    ("HuberLoss", "huber_loss", REALS, plainly),
    ("KLDivLoss", "kl_div", SHARES, of_log_shares),
    ("L1Loss", "l1_loss", REALS, plainly),
    ("LinearCrossEntropyLoss", "linear_cross_entropy", Y, lambda loss, output, target: loss(output, LINEAR, target)),
    ("MarginRankingLoss", "margin_ranking_loss", SIGNS[:, :2], of_halves),
    ("MSELoss", "mse_loss", REALS, plainly),
    ("MultiLabelMarginLoss", "multilabel_margin_loss", torch.tensor([[0, -1, -1, -1], [1, 2, -1, -1]])[Y % 2], plainly),
    ("MultiLabelSoftMarginLoss", "multilabel_soft_margin_loss", (SIGNS + 1) / 2, plainly),
    ("MultiMarginLoss", "multi_margin_loss", Y, plainly),
    ("NLLLoss", "nll_loss", Y, plainly),
    ("PoissonNLLLoss", "poisson_nll_loss", REALS.abs(), plainly),
    ("SmoothL1Loss", "smooth_l1_loss", REALS, plainly),
    ("SoftMarginLoss", "soft_margin_loss", SIGNS, plainly),
    ("TripletMarginLoss", "triplet_margin_loss", Y, of_three),
    ("TripletMarginWithDistanceLoss", "triplet_margin_with_distance_loss", Y, of_three),
]
INPUTS = {"self", "input", "target", "input1", "input2", "anchor", "positive", "negative", "var", "device", "dtype"}
INPUTS |= {"log_probs", "targets", "input_lengths", "target_lengths"}
INPUTS |= {"linear_weight", "in_features", "out_features", "num_classes"}
OPTIONS = {
    "beta": [0.5],
    "blank": [0],
    "bias": [True],
    "delta": [0.5],
    "distance_function": [nn.PairwiseDistance(p=1)],
    "eps": [1e-3],
    "full": [True],
    "ignore_index": [-100, 1],
    "label_smoothing": [0.1],
    "linear_bias": [CLASS_WEIGHTS],
    "log_input": [False],
    "log_target": [True],
    "margin": [0.3],
    "options": [getattr(nn, "LinearCrossEntropyOptions", dict)(batch_chunk_size=1)],
    "p": [1],
    "pos_weight": [CLASS_WEIGHTS],
    "reduce": [True],
    "reduction": ["mean", "sum", "batchmean"],
    "size_average": [True, False],
    "swap": [True],
    "weight": [CLASS_WEIGHTS],
    "zero_infinity": [True],
}
BY_ELEMENT = ["huber_loss", "l1_loss", "mse_loss"]
"""Losses whose weights have the shape of the target."""


ADAPTIVE = "AdaptiveLogSoftmaxWithLoss"  # itself a model, without these options
SUMS_UNSEEN = {
    "cosine_embedding_loss",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "linear_cross_entropy",
    "margin_ranking_loss",
    "multilabel_soft_margin_loss",
    "poisson_nll_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
}
"""In a user's own function, the sums of these losses look like other computations, and need ``reduction="sum"``."""


def parameters(thing):
    try:
        return inspect.signature(thing).parameters.keys()
    except (TypeError, ValueError):  # some functions of C have no signature
        return set()


def unknown():
    """Return the losses of torch, and their options, that are not listed here."""
    modules = {name for name, kind in vars(nn).items() if isinstance(kind, type) and name.endswith("Loss")} - {ADAPTIVE}
    functions = {name for name, f in vars(F).items() if not name.startswith("_") and "reduction" in parameters(f)}
    things = [getattr(nn, name) for name in modules] + [getattr(F, name) for name in functions]
    options = {option for thing in things for option in parameters(thing)}
    known = {row[0] for row in LOSSES} | {row[1] for row in LOSSES}
    return (modules | functions) - known | (options - INPUTS - OPTIONS.keys())


def test_every_loss_and_option_of_torch_stands_here():
    assert not unknown()


def test_a_new_loss_is_told(monkeypatch):
    def tomorrows_loss(input, target, temperature=1.0, reduction="mean"):
        return input.sum()

    monkeypatch.setattr(F, "tomorrows_loss", tomorrows_loss, raising=False)
    assert unknown() == {"tomorrows_loss", "temperature"}


def model_of(width=CLASSES):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, width)).to(D)


def outcome(loss_fn, target, **options):
    """Compare a step with the model's own backward; return None if the model alone fails, too."""
    plain, model = model_of(), model_of()
    x = numbers(3)
    try:
        loss_fn(plain(x), target).backward()
    except (IndexError, ValueError, RuntimeError, NotImplementedError):
        return None
    try:
        Pipe(model, CHUNKS, balance=[2, 1]).step(x, target=target, loss_fn=loss_fn, **options)
    except ValueError:
        assert all(parameter.grad is None for parameter in model.parameters())
        return "refused"
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return "equal" if all(torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-14) for a, b in pairs) else "different"


def variants(thing, name, target):
    """Return (options, target, whether it is a mean over rows) for each variant of a loss."""
    has_padding = "ignore_index" in parameters(thing)
    for option in ["reduction", *sorted(parameters(thing) & OPTIONS.keys())]:
        for value in OPTIONS[option]:
            options = {option: value}
            is_weighted = (option == "weight" and has_padding) or options == {"ignore_index": 1} or option == "options"
            yield options, target, not is_weighted and value != "sum" and options != {"size_average": False}
            if has_padding:
                yield options, SOME_PADDED, False
                yield options, A_PART_PADDED, False


@pytest.mark.thinned(usual=12)
@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("row", [row for row in LOSSES if hasattr(F, row[1])], ids=lambda row: row[1])
def test_a_step_has_the_gradients_of_every_loss_of_torch_or_raises(row):
    of_nn, name, plain_target, call = row
    thing = getattr(F, name)
    counted = name in ("cross_entropy", "nll_loss")
    tried = 0
    for options, target, is_over_rows in variants(thing, name, plain_target):
        is_sum = "sum" in options.values() or options == {"size_average": False}
        losses = {"function": partial(thing, **options)}
        if set(options) <= parameters(getattr(nn, of_nn)) and name != "linear_cross_entropy":
            losses["module"] = getattr(nn, of_nn)(**options)
        for kind, loss in losses.items():
            what = f"{kind} {name}, {options}, {target.tolist()}"
            if call is plainly:  # torch's own loss, passed directly
                found = outcome(loss, target)
                tried += found is not None
                expected = is_over_rows or counted or is_sum
                assert found in ((None, "equal") if expected else (None, "equal", "refused")), what
            found = outcome(lambda output, target, loss=loss: call(loss, output, target), target)
            tried += found is not None
            if is_sum:
                expected = ("different", "refused") if name in SUMS_UNSEEN else ("refused",)
                assert outcome(partial(call, loss), target, reduction="sum") in (None, "equal"), what
            else:
                expected = ("equal",) if is_over_rows else ("equal", "refused")
            assert found in (None, *expected), what
    assert tried >= 2


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_means_that_are_weighted_by_element_are_refused_or_told_by_what_they_divide(name):
    loss, target = getattr(F, name), (REALS, REALS.abs())

    def weighted(output, target):
        return loss(output, target[0], weight=target[1])

    assert outcome(weighted, target) == ("equal" if name == "huber_loss" else "refused")
    if name != "huber_loss":
        assert outcome(weighted, target, reduction=lambda target: target[1].sum()) == "equal"


def test_every_loss_with_weights_by_element_stands_here():
    takes = {name for _, name, _, call in LOSSES if call is plainly and "weight" in parameters(getattr(F, name))}
    assert takes - {"cross_entropy", "nll_loss", "multi_margin_loss"} - set(BY_ELEMENT) == {
        "binary_cross_entropy_with_logits",
        "multilabel_soft_margin_loss",
    }


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has no such loss")
@pytest.mark.parametrize("target", [Y, SOME_PADDED, A_PART_PADDED], ids=["whole", "padded", "a part is padded"])
@pytest.mark.parametrize("chunk", [None, 1])
def test_a_cross_entropy_with_its_own_layer_divides_by_the_weights_of_its_targets(target, chunk):
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    loss = nn.LinearCrossEntropyLoss(CLASSES, CLASSES, weight=CLASS_WEIGHTS, options=options, dtype=D)
    assert outcome(loss, target) == "equal"
    assert outcome(lambda output, target: loss(output, target), target) == "refused"
