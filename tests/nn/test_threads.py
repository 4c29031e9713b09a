"""A layer's bits stay the same for other numbers of torch's threads."""

import pytest
import torch
from specs.comparison import assert_same_bits

from pymoe.nn import MoE


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_layer_whose_products_are_pymoes_own_does_not_depend_on_the_number_of_threads(dtype):
    """With ``row_invariant`` router and shared experts multiply by ``grouped_linear``. Without, torch's products in
    these sizes depend on the number of threads in float64 (8 threads, torch 2.13 on an AMD EPYC).
    """
    layer = MoE(
        hidden_size=2048, ffn_size=16, num_experts=64, top_k=2, num_shared_experts=1, z_loss_coef=0.01, dtype=dtype
    )
    layer.router.row_invariant = layer.shared.row_invariant = True
    x = torch.randn(8, 2048, dtype=dtype, requires_grad=True)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            y = layer(x)
            found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert_same_bits(one, two)
