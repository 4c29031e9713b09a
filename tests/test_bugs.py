"""Bugs that were met and mended, each with its story."""

import torch

import pymoe


def test_router_losses_of_a_load_whose_sum_passes_64_bits():
    """The kernel added up an int64 load in a signed integer: undefined where the sum overflows.

    The undefined-behaviour sanitizer reported it in a raw call whose load held the smallest int64 everywhere. The sum
    now wraps around, as torch's does in the reference.
    """
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    for value in (-(2**63), 2**63 - 1, 2**62):
        load = torch.full((3,), value)
        losses = pymoe.ops.router_losses(logits, load)
        expected = pymoe.reference.router_losses(logits, load)
        torch.testing.assert_close(losses.load_balancing, expected.load_balancing)
