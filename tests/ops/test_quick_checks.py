"""Tests that an operator's quick test accepts the same arguments as its named checks."""

import pytest
import torch
from specs import all_specs, samples_of
from torch import Tensor

from pymoe._common import contracts

pytestmark = pytest.mark.only_on("cpu")


def of_gate(logits, k, score="softmax", renormalize=True, bias=None, num_groups=None, topk_groups=None, scale=1.0):
    return logits, k, score, renormalize, bias, num_groups, topk_groups, scale


def of_routing(experts, num_experts, capacity=None, foreign_experts=False):
    return experts, num_experts, capacity, foreign_experts


# The arguments of each operator that its check gets.
ARGUMENTS = {
    "build_routing": of_routing,
    "combine": lambda y, routing, weights=None, bias=None: (y, routing, weights, bias),
    "dispatch": lambda x, routing, out=None: (x, routing),
    "expert_activation": lambda h, kind, bias=None, offsets=None: (h, kind, bias, offsets),
    "gate_topk": of_gate,
    "grouped_linear": lambda x, weight, offsets, bias=None, order=None: (x, weight, offsets, bias, order),
    "router_losses": lambda logits, load, score="softmax": ("router_losses", logits, load, score),
}
NAMES = pytest.mark.parametrize("name", ARGUMENTS)
SPECS = {spec.name: spec for spec in all_specs()}


def check_of(name):
    check = getattr(contracts, f"check_{name}")
    if name == "grouped_linear":
        return lambda x, weight, offsets, bias, order: check(x, weight, offsets, bias, order=order)
    return check


def calls(name):
    """Yield the check's arguments in the right and wrong calls of the specification."""
    spec = SPECS[name]
    for sample in [*samples_of(spec, spec.dtypes[0]), *samples_of(spec, spec.dtypes[-1])]:
        yield ARGUMENTS[name](*sample.args, **sample.kwargs)
    for wrong in spec.error_inputs():
        try:
            yield ARGUMENTS[name](*wrong.sample.args, **wrong.sample.kwargs)
        except TypeError:
            continue  # a call that no function of these parameters takes


def instead_of(value):
    """Yield values of the same and of other kinds than ``value``, some of which fit and some do not."""
    yield from (None, True, 0, 1, -1, 2**40, 1.5, float("nan"), "swiglu", "sigmoid", (), [], object())
    if isinstance(value, tuple):
        for i in range(len(value)):
            yield value[:i] + value[i + 1 :]
            for other in instead_of(value[i]):
                yield type(value)(*value[:i], other, *value[i + 1 :]) if hasattr(value, "_fields") else ()
    if isinstance(value, Tensor):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.bool):
            yield torch.empty(value.shape, dtype=dtype)
        for shape in ((), (1,), (2,), (2, 3), (2, 3, 4), (0, 2), (*value.shape, 1), value.shape[1:], value.shape[::-1]):
            yield torch.empty(shape, dtype=value.dtype)
        for dim in range(value.dim()):
            yield torch.empty([size + (i == dim) for i, size in enumerate(value.shape)], dtype=value.dtype)
        yield value.to("meta")


def outcome(check, arguments):
    try:
        check(*arguments)
    except Exception as error:
        return type(error), str(error)
    return None


@NAMES
def test_it_decides_as_the_named_checks_do(name, monkeypatch):
    check = check_of(name)
    tried = list(calls(name))
    for right in tried[:6]:
        for i, value in enumerate(right):
            if value != "router_losses":
                tried += [(*right[:i], other, *right[i + 1 :]) for other in instead_of(value)]
    with_it = [outcome(check, arguments) for arguments in tried]
    monkeypatch.setattr(contracts, f"_{name}_fits", lambda *_: False)
    for arguments, seen in zip(tried, with_it, strict=True):
        assert seen == outcome(check, arguments), f"{name}{arguments}"
    assert None in with_it
    assert sum(one is not None for one in with_it) > 50


@NAMES
def test_it_knows_most_calls(name, monkeypatch):
    """Otherwise, most calls would pay for both the quick test and the named checks."""
    known, fits = [], getattr(contracts, f"_{name}_fits")
    monkeypatch.setattr(contracts, f"_{name}_fits", lambda *arguments: known.append(fits(*arguments)) or known[-1])
    right = [ARGUMENTS[name](*one.args, **one.kwargs) for one in samples_of(SPECS[name], SPECS[name].dtypes[0])]
    for arguments in right:
        check_of(name)(*arguments)
    assert sum(known) >= len(right) / 3, f"{sum(known)} of {len(right)} calls"
