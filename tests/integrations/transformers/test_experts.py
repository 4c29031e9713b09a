"""Tests that every experts class of transformers gives the same outputs and gradients with pymoe as with eager."""

import copy

import pytest
import torch
from experts_classes import EXPERTS, experts_classes, hidden_size

TOKENS, CHOICES = 37, 4
CLASSES = experts_classes()

ROUNDS_LATER = {"OpenAIPrivacyFilterExperts"}
"""Classes whose eager forward computes in float32 for any dtype of the weights; pymoe, like grouped_mm, computes in the
weights' dtype."""


def test_all_classes_are_found():
    assert len(CLASSES) >= 65
    assert {"MixtralExperts", "GptOssExperts", "NemotronHExperts"} <= {one.name for one in CLASSES}


def outputs(experts, implementation, dtype, inputs):
    """Return the output and the gradients of hidden states, weights and parameters, by name, in float64."""
    experts = copy.deepcopy(experts).to(dtype)
    experts.config._experts_implementation = implementation
    x, index, weights, grad = inputs
    # Routers return weights in float32 or in the dtype of their input.
    weights = weights.to(torch.float32 if dtype == torch.bfloat16 else dtype).clone().requires_grad_()
    x = x.to(dtype).clone().requires_grad_()
    y = experts(x, index, weights)
    assert y.dtype == dtype
    y.backward(grad.to(dtype))
    with torch.no_grad():
        assert implementation != "pymoe" or torch.equal(experts(x, index, weights), y), (
            "the same bits without gradients"
        )
    found = {"output": y, "hidden_states": x.grad, "top_k_weights": weights.grad}
    found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {name: tensor.detach().double() for name, tensor in found.items()}


def largest_error(found, expected):
    assert found.keys() == expected.keys()
    return max(((found[n] - expected[n]).abs().max() / expected[n].abs().max()).item() for n in expected)


def mean_errors(found, expected):
    return {name: ((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected}


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.name)
def test_experts_equal_eager(one):
    import pymoe.integrations.transformers

    torch.manual_seed(0)
    experts = one.build()
    hidden = hidden_size(experts)
    assert experts.num_experts == EXPERTS
    x, grad = torch.randn(2, TOKENS, hidden, dtype=torch.float64)
    index = torch.rand(TOKENS, EXPERTS).topk(CHOICES).indices
    inputs = (x, index, torch.rand(TOKENS, CHOICES, dtype=torch.float64), grad)

    exact = outputs(experts, "eager", torch.float64, inputs)
    eager = outputs(experts, "eager", torch.float32, inputs)
    assert largest_error(outputs(experts, "pymoe", torch.float32, inputs), eager) <= 1e-6

    eager = mean_errors(outputs(experts, "eager", torch.bfloat16, inputs), exact)
    pymoe = mean_errors(outputs(experts, "pymoe", torch.bfloat16, inputs), exact)
    for name in eager:
        assert pymoe[name] <= max(1.25 * eager[name], 2**-7 if one.name in ROUNDS_LATER else 0), name
