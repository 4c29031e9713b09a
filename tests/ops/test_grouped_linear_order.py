"""grouped_linear of rows that an order gives: outputs and gradients equal those of sorted rows bit for bit."""

import os
import subprocess
import sys

import pytest
import torch
from limits import ISAS, LONG, rounds
from specs.comparison import assert_same_bits

import pymoe
from pymoe.bench.operators import offsets_of, random_counts, uniform

BACKENDS = pytest.mark.parametrize("backend", [pymoe.ops, pymoe.reference], ids=["native", "reference"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)


def by_rank(counts, ranks, random):
    """Return the order of rows that arrive rank by rank, each rank's rows sorted by expert."""
    shares = torch.stack([random_counts_of(count, ranks, random) for count in counts], dim=1)  # (ranks, experts)
    experts = torch.arange(len(counts)).repeat(ranks).repeat_interleave(shares.reshape(-1))
    return experts.argsort(stable=True).int()


def random_counts_of(total, parts, random):
    return torch.tensor(random_counts(total, parts, random)) if total else torch.zeros(parts, dtype=torch.int64)


def same_as_sorted(counts, sizes, order, past, dtype, random, transposed=False, bias=True):
    """Compare outputs and all gradients of rows in an order with outputs and gradients of the same rows after a
    gather.
    """
    outputs, inputs = sizes
    used = sum(counts)
    x = uniform(used + past, inputs, dtype=dtype, generator=random)
    weight = uniform(len(counts), outputs, inputs, dtype=dtype, generator=random, scale=max(inputs, 1) ** -0.5)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    leaves = [x, weight] + ([uniform(len(counts), outputs, dtype=dtype, generator=random)] if bias else [])
    leaves = [leaf.requires_grad_() for leaf in leaves]
    grad = uniform(used + past, outputs, dtype=dtype, generator=random)
    offsets, places = offsets_of(counts), order[:used].long()

    def results(rows, order, grad):
        y = pymoe.ops.grouped_linear(rows, weight, offsets, *leaves[2:], order=order)
        return y.detach(), *torch.autograd.grad(y, [rows, *leaves[1:]], grad)

    y, dx, *others = results(x, order, grad)
    sorted_y, sorted_dx, *sorted_others = results(x[places].detach().requires_grad_(), None, grad[places])
    for found, expected, name in ((y, sorted_y, "y"), (dx, sorted_dx, "the gradient of x")):
        whole = found.new_zeros(found.shape).index_copy(0, places, expected)
        assert_same_bits(found, whole, name)
    for found, expected, name in zip(others, sorted_others, ("weight", "bias"), strict=False):
        assert_same_bits(found, expected, f"the gradient of {name}")


@DTYPES
def test_every_bit_is_that_of_sorted_rows(dtype):
    """Cover every path through the product: few and many rows, short and long sums, and both weight layouts."""
    random = torch.Generator().manual_seed(0)
    shapes = [([n, 0, n + 1], (24, k)) for n in (1, 2, 3, 6, 9, 13, 30, 70) for k in (8, 37, 300)]
    shapes += [([20, 3], (40, 2100)), ([900, 5], (33, 40)), ([5, 200], (1, 1)), ([5, 60], (1, 9)), ([5, 60], (9, 1))]
    for counts, sizes in shapes:
        for transposed in (False, True):
            used = sum(counts)
            anyhow = torch.randperm(used + 4, generator=random).int()
            same_as_sorted(counts, sizes, anyhow, 4, dtype, random, transposed)
            same_as_sorted(counts, sizes, by_rank(counts, 3, random), 0, dtype, random, transposed, bias=False)


def test_every_bit_is_that_of_sorted_rows_in_random_shapes():
    random = torch.Generator().manual_seed(1)

    def one(low, high):
        return int(torch.randint(low, high + 1, (), generator=random))

    for number in range(rounds(200, 2000)):
        dtype = (torch.float32, torch.bfloat16, torch.float16, torch.float64)[number % 4]
        counts = random_counts(one(0, 120), one(1, 6), random)
        past = one(0, 3)
        order = torch.randperm(sum(counts) + past, generator=random).int()
        if past == 0 and one(0, 1):
            order = by_rank(counts, one(1, 4), random)
        same_as_sorted(counts, (one(1, 70), one(1, 90)), order, past, dtype, random, bool(one(0, 1)), bool(one(0, 1)))


@pytest.mark.slow
@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("isa", ISAS[: ISAS.index(pymoe.build_info()["cpu_isa"])])
def test_every_bit_is_that_of_sorted_rows_on_a_lesser_processor(isa):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "random_shapes"]
    ran = subprocess.run(
        command, env={**os.environ, "PYMOE_CPU_ISA": isa}, capture_output=True, text=True, timeout=LONG, check=False
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert "1 passed" in ran.stdout


@BACKENDS
@DTYPES
def test_rows_that_the_order_does_not_name_are_never_read(backend, dtype):
    x, weight, bias = torch.randn(7, 5).to(dtype), torch.randn(2, 3, 5).to(dtype), torch.randn(2, 3).to(dtype)
    order = torch.tensor([6, 1, 3, 4, -1, 2**31 - 1, 6], dtype=torch.int32)  # rows 0, 2 and 5 do not occur in the order
    idle = [0, 2, 5]
    x[idle] = float("nan")
    leaves = [value.requires_grad_() for value in (x, weight, bias)]
    y = backend.grouped_linear(x, weight, offsets_of([3, 1]), bias, order=order)
    assert_same_bits(y.detach()[idle], torch.zeros(3, 3, dtype=dtype))
    grad = torch.ones_like(y)
    grad[idle] = float("nan")
    grads = torch.autograd.grad(y, leaves, grad)
    assert all(bool(found.isfinite().all()) for found in (y, *grads))
    assert_same_bits(grads[0][idle], torch.zeros(3, 5, dtype=dtype))


@BACKENDS
def test_a_routing_of_one_choice_a_token_is_an_order(backend):
    experts = torch.tensor([[2], [0], [3], [0], [2], [1]], dtype=torch.int32)
    routing = backend.build_routing(experts, 3, foreign_experts=True)
    x, weight = torch.randn(6, 4), torch.randn(3, 5, 4)
    moved = backend.combine(backend.grouped_linear(backend.dispatch(x, routing), weight, routing.offsets), routing)
    assert torch.equal(backend.grouped_linear(x, weight, routing.offsets, order=routing.token), moved)


@pytest.mark.parametrize("strides", [(1, 1), (7, 1), (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 6), (6, 1)], ids=str)
def test_a_single_feature_may_have_any_stride(strides, sizes):
    """A dimension of one element is contiguous whatever its stride; the rows are found all the same."""
    outputs, inputs = sizes
    order, offsets = torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32), offsets_of([2, 3])
    base = torch.arange(1.0, 60.0)
    x = base.as_strided((5, inputs), strides if inputs == 1 else (inputs, 1))
    grad = base.as_strided((5, outputs), strides if outputs == 1 else (outputs, 1))
    weight = torch.randn(2, outputs, inputs)
    places = order.long()
    y = torch.ops.pymoe.grouped_linear(x, weight, offsets, None, order)
    assert torch.allclose(y[places], torch.ops.pymoe.grouped_linear(x[places], weight, offsets, None))
    found = torch.ops.pymoe.grouped_linear_weight_grad(grad, x, offsets, order)
    assert torch.allclose(found, torch.ops.pymoe.grouped_linear_weight_grad(grad[places], x[places], offsets))
    found = torch.ops.pymoe.grouped_linear_bias_grad(grad, offsets, order)
    assert torch.equal(found, torch.ops.pymoe.grouped_linear_bias_grad(grad[places], offsets))


@pytest.mark.only_on("cpu")
def test_results_do_not_depend_on_the_number_of_threads():
    random = torch.Generator().manual_seed(2)
    before = torch.get_num_threads()
    x, weight = torch.randn(700, 130, generator=random), torch.randn(5, 210, 130, generator=random)
    order, offsets = torch.randperm(700, generator=random).int(), offsets_of([300, 0, 10, 340, 1])
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            y = pymoe.ops.grouped_linear(*leaves, offsets, order=order)
            found.append([y.detach(), *torch.autograd.grad(y, leaves, y.detach())])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert_same_bits(one, two)
