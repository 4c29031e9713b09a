"""The layer computes the same as a token-by-token implementation, with either set of operators."""

import sys

import pytest
import torch
from moe_layers import (
    BACKENDS,
    OPTIONS,
    SCORED_BEFORE,
    assert_same,
    gradients,
    make_input,
    make_layer,
    one_by_one,
    run,
    with_backend,
)
from naive_moe import naive_moe

EVERY = OPTIONS | SCORED_BEFORE
TOLERANCE = {torch.float64: (1e-11, 1e-12), torch.float32: (2e-4, 2e-5)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_outputs_gradients_and_stats_equal_a_loop_over_tokens(options, backend):
    layer = make_layer(backend=backend, **options)
    x = make_input(3, 7)
    rtol, atol = TOLERANCE[torch.float64]
    output, found = run(layer, x)
    stats = layer.stats

    naive = naive_moe(layer, x)
    direction = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    ((naive.output * direction).sum() + naive.auxiliary).backward()
    expected = gradients(layer, x)
    expected = {name: torch.zeros_like(found[name]) if grad is None else grad for name, grad in expected.items()}

    torch.testing.assert_close(output, naive.output.detach(), rtol=rtol, atol=atol)
    assert_same(found, expected, rtol, atol)
    assert stats.load.tolist() == naive.load
    assert stats.dropped.item() == naive.dropped
    assert stats.load_balancing_loss.item() == pytest.approx(naive.balancing.item(), rel=1e-6)
    assert stats.z_loss.item() == pytest.approx(naive.z.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_native_equals_reference(options, dtype):
    native = make_layer(backend="native", dtype=dtype, **options)
    x = make_input(40, dtype=dtype)
    rtol, atol = TOLERANCE[dtype]
    reference = with_backend(native, "reference")
    output, found = run(native, x)
    expected_output, expected = run(reference, x)
    torch.testing.assert_close(output, expected_output, rtol=rtol, atol=atol)
    assert_same(found, expected, rtol, atol)
    assert torch.equal(native.stats.load, reference.stats.load)
    assert torch.equal(native.stats.dropped, reference.stats.dropped)
    if native.router.expert_bias is not None:
        assert torch.equal(native.router.counted["load"], reference.router.counted["load"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("before", [False, True])
def test_native_equals_reference_in_half_precision(before, dtype):
    options = {"num_shared_experts": 1, "shared_gate": True, "router_bias": True, "score_before_experts": before}
    native = make_layer(backend="native", dtype=dtype, aux_loss_coef=0.1, **options)
    x = make_input(16, dtype=dtype)
    output, found = run(native, x)
    expected_output, expected = run(with_backend(native, "reference"), x)
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected_output, rtol=0.02, atol=0.02)
    assert_same(found, expected, rtol=0.05, atol=0.1)


CHECKED = ["plain", "capacity below the mean", "two shared gelu", "gated shared", "router bias", "scored before"]


@pytest.mark.parametrize("name", CHECKED)
def test_gradcheck_through_the_layer(name):
    """There are no auxiliary losses here: injected gradients are, on purpose, not gradients of the output."""
    layer = make_layer(**{**EVERY[name], "hidden_size": 3, "ffn_size": 2, "num_experts": 3})
    x = make_input(4, hidden_size=3)
    names = [key for key, _ in layer.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    parameters = [parameter.detach().requires_grad_() for parameter in layer.parameters()]
    assert torch.autograd.gradcheck(call, (x, *parameters))


@pytest.mark.parametrize("before", [False, True])
def test_second_derivatives_pass_the_layer(before):
    options = {"num_shared_experts": 1, "shared_gate": True, "router_bias": True, "score_before_experts": before}
    layer = make_layer(hidden_size=3, ffn_size=2, num_experts=3, bias=True, **options)
    x = make_input(3, hidden_size=3)
    assert torch.autograd.gradgradcheck(lambda x: layer(x), (x,))


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_multiply_the_outputs_of_experts(backend):
    layer = make_layer(backend=backend, activation="relu", score="sigmoid", renormalize=False)
    doubled = with_backend(layer, backend)
    doubled.router.scale = 2.0
    x = make_input(9)
    torch.testing.assert_close(doubled(x), 2.0 * layer(x), rtol=1e-14, atol=0)


@pytest.mark.only_on("cpu")
def test_biases_left_to_the_activation_and_to_combine_are_added_once(monkeypatch):
    """On some GPUs products leave out the biases; scores before the experts do not multiply them."""
    layer = make_layer(**SCORED_BEFORE["several scored before"] | {"capacity_factor": None})
    x = make_input(9)
    output, expected = run(layer, x)
    monkeypatch.setattr(sys.modules["pymoe.nn.apply_experts"], "leaves_bias", lambda _: True)
    with one_by_one():
        left, found = run(layer, x)
    torch.testing.assert_close(left, output, rtol=1e-12, atol=1e-13)
    assert_same(found, expected, rtol=1e-11, atol=1e-12)


def test_capacity_keeps_the_first_tokens_of_an_expert():
    layer = make_layer(num_experts=2, top_k=1, renormalize=True, capacity_factor=0.5)
    with torch.no_grad():
        layer.router.weight.copy_(torch.stack([torch.ones(12), -torch.ones(12)]))
    x = make_input(8).detach().abs()  # every token wants expert 0, which takes ceil(0.5 * 8 / 2) = 2
    y = layer(x)
    assert layer.stats.load.tolist() == [8, 0]
    assert layer.stats.dropped.item() == 6
    assert (y[:2] != 0).any(dim=1).all()
    assert (y[2:] == 0).all()
