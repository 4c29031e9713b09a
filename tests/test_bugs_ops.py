"""Bugs of operators that were met and mended, each with its story."""

import pytest
import torch

import pymoe


@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager"])
@pytest.mark.parametrize("raw", [False, True])
def test_a_buffer_that_dispatch_fills_is_known_to_have_changed(backend, raw):
    """``dispatch(out=buffer)`` wrote to the buffer past autograd, which goes by a tensor's version.

    A backward pass through an earlier use of the buffer then took the new contents for the old ones, and gradients
    were wrong without an error. Compiled with the eager backend the same held.
    """
    routing = pymoe.ops.build_routing(torch.tensor([[0, 1], [1, 0]]), 2)
    x, buffer, weight = torch.rand(2, 3), torch.ones(4, 3), torch.ones(4, 3, requires_grad=True)
    y = (weight * buffer).sum()

    def fill(buffer):
        if raw:
            torch.ops.pymoe.dispatch_out(x, routing.slot, routing.offsets, buffer)
        else:
            pymoe.ops.dispatch(x, routing, out=buffer)

    torch._dynamo.reset()
    (fill if backend == "none" else torch.compile(fill, fullgraph=True, backend=backend))(buffer)
    assert torch.equal(buffer, pymoe.reference.dispatch(x, routing))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_buffer_made_for_inference_is_filled():
    """Such a tensor has no version to count."""
    routing = pymoe.ops.build_routing(torch.tensor([[0, 1], [1, 0]]), 2)
    with torch.inference_mode():
        x, buffer = torch.rand(2, 3), torch.ones(4, 3)
        pymoe.ops.dispatch(x, routing, out=buffer)
        assert torch.equal(buffer, pymoe.reference.dispatch(x, routing))


def test_the_reference_of_gelu_does_not_depend_on_the_processor():
    """Where there is AVX-512 torch leaves gelu to oneDNN, whose gelu of infinity is NaN, and of the largest float
    infinity.

    The reference called it, and native operator and specification differed on such machines alone.
    """
    largest = torch.finfo(torch.float32).max
    h = torch.tensor([[torch.inf, largest, -largest, torch.nan]]).repeat(4, 8)
    expected = torch.tensor([[torch.inf, largest, 0.0, torch.nan]]).repeat(4, 8)
    for expert_activation in (pymoe.ops.expert_activation, pymoe.reference.expert_activation):
        y = expert_activation(h, "gelu")
        assert torch.equal(y.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
