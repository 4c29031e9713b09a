"""Tests of what build_routing, dispatch and combine promise in addition to agreeing with their references."""

import pytest
import torch
from specs.comparison import assert_same_bits
from specs.routings import skewed
from torch._subclasses import FakeTensorMode

import pymoe
from pymoe.bench.calls import generator
from pymoe.bench.operators import distinct
from pymoe.ops import build_routing, combine, dispatch, gather_batch, split_batch

GIGABYTE = 2**30


def choices_of(routing, num_choices):
    """Return the choice that owns each row in use, as token * K + k."""
    owner = torch.full_like(routing.token, -1)
    flat = routing.slot.flatten()
    owner[flat[flat >= 0].long()] = torch.arange(flat.numel(), dtype=torch.int32)[flat >= 0]
    assert_same_bits(owner[owner >= 0] // num_choices, routing.token[owner >= 0])
    return owner


@pytest.mark.parametrize("capacity", [None, 700])
def test_rows_of_an_expert_keep_the_order_of_token_and_choice(capacity):
    """The order also holds across the blocks that threads sort separately: there are far more slots than one block
    holds.
    """
    experts = skewed(30_000, 3, 50, generator())
    routing = build_routing(experts, 50, capacity=capacity)
    owner = choices_of(routing, 3)
    for expert in range(50):
        rows = owner[routing.offsets[expert] : routing.offsets[expert + 1]]
        assert (experts.flatten()[rows.long()] == expert).all()
        assert (rows.diff() > 0).all()


@pytest.mark.parametrize("capacity", [0, 1, 5, 2000, 20_000])
def test_capacity_keeps_the_first_rows_of_an_expert(capacity):
    experts = skewed(20_000, 2, 8, generator())
    routing = build_routing(experts, 8, capacity=capacity)
    for expert in range(8):
        mine = (experts == expert).flatten().nonzero().flatten()
        kept = routing.slot.flatten()[mine] >= 0
        assert kept[:capacity].all()
        assert not kept[capacity:].any()
        assert int(routing.offsets[expert + 1] - routing.offsets[expert]) == min(capacity, len(mine))
    assert (routing.token[int(routing.offsets[-1]) :] == -1).all()


def test_a_token_may_name_an_expert_twice():
    routing = build_routing(torch.tensor([[1, 1], [0, 1]]), 2)
    assert routing.slot.tolist() == [[1, 2], [0, 3]]
    assert routing.token.tolist() == [1, 0, 0, 1]
    assert routing.offsets.tolist() == [0, 1, 4]


def test_dropped_choices_are_zero_rows_without_gradient():
    experts = torch.zeros(6, 1, dtype=torch.int32)
    routing = build_routing(experts, 2, capacity=4)
    x = torch.full((6, 3), float("inf"), requires_grad=True)
    rows = dispatch(x, routing)
    assert_same_bits(rows[4:], torch.zeros(2, 3))
    rows.backward(torch.ones(6, 3))
    assert x.grad[:, 0].tolist() == [1, 1, 1, 1, 0, 0]

    y = torch.full((6, 3), 2.0)
    y[4:] = float("nan")  # rows past the end are never read
    y.requires_grad_()
    weights = torch.full((6, 1), 3.0)
    weights[4:] = float("nan")
    weights.requires_grad_()
    out = combine(y, routing, weights)
    assert out[:, 0].tolist() == [6, 6, 6, 6, 0, 0]
    out.backward(torch.ones(6, 3))
    assert y.grad[:, 0].tolist() == [3, 3, 3, 3, 0, 0]
    assert weights.grad[:, 0].tolist() == [6, 6, 6, 6, 0, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("combine", [pymoe.ops.combine, pymoe.reference.combine], ids=["native", "reference"])
@pytest.mark.parametrize("of", ["weight", "row"])
def test_a_dropped_choice_has_no_part_in_gradients_whatever_its_weight(of, combine, value):
    """The reference read row 0 for a dropped choice, so a NaN in row 0 or in the choice's weight reached gradients."""
    routing = build_routing(torch.zeros(3, 1, dtype=torch.int32), 1, capacity=2)
    y, weights = torch.ones(3, 4), torch.full((3, 1), 0.5)
    if of == "weight":
        weights[2] = value  # the weight of the dropped choice
    else:
        y[0] = value
    y.requires_grad_()
    weights.requires_grad_()
    dy, dweights = torch.autograd.grad(combine(y, routing, weights).sum(), (y, weights))
    assert dy.tolist() == [[0.5] * 4, [0.5] * 4, [0.0] * 4]
    assert dweights[1:].tolist() == [[4.0], [0.0]]
    assert bool(torch.isfinite(dweights[0]).all()) == (of == "weight")


@pytest.mark.parametrize("hidden", [1, 4, 7, 8, 64])
def test_combine_adds_in_the_order_of_the_choices(hidden):
    """2^24 + 1 - 2^24 is 0 in float32 in this order and 1 in another, at every column of every vector width."""
    routing = build_routing(torch.tensor([[2, 0, 1]]), 3)
    y = torch.empty(3, hidden)
    y[routing.slot[0].long()] = torch.tensor([2.0**24, 1.0, -(2.0**24)])[:, None].expand(3, hidden)
    assert_same_bits(combine(y, routing), torch.zeros(1, hidden))
    assert_same_bits(combine(y, routing, torch.ones(1, 3)), torch.zeros(1, hidden))


def test_combine_rounds_product_and_addition_apart():
    """A fused multiply-add would keep the 2^-46 that a rounded product loses."""
    routing = build_routing(torch.tensor([[0, 0]]), 1)
    factor = 1 + 2.0**-23
    y = torch.tensor([[-(1 + 2.0**-22)] * 40, [factor] * 40])
    assert_same_bits(combine(y, routing, torch.tensor([[1.0, factor]])), torch.zeros(1, 40))


def test_combine_starts_at_positive_zero():
    routing = build_routing(torch.tensor([[0]]), 1)
    assert_same_bits(combine(torch.full((1, 9), -0.0), routing), torch.zeros(1, 9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_combine_rounds_once(dtype):
    """Many terms too small to move the running sum, were it kept in ``dtype``."""
    choices = 64
    routing = build_routing(torch.zeros(1, choices, dtype=torch.int32), 1)
    y = torch.full((choices, 5), 2.0**-10, dtype=dtype)
    y[0] = 1
    assert_same_bits(combine(y, routing), torch.full((1, 5), 1 + 63 * 2.0**-10).to(dtype))


@pytest.mark.only_on("cpu", "pretended")  # a GPU adds up its warps in another order
@pytest.mark.parametrize("hidden", [1, 31, 32, 33, 1000])
def test_gradient_of_the_weights_is_one_sum_for_every_instruction_set(hidden):
    """Element h goes to partial sum h % 32, and the sums are added as a balanced tree."""
    random = generator()
    y, grad = torch.randn(1, hidden, generator=random), torch.randn(1, hidden, generator=random)
    weights = torch.ones(1, 1, requires_grad=True)
    combine(y, build_routing(torch.tensor([[0]]), 1), weights).backward(grad)
    sums = torch.zeros(32)
    for product in torch.nn.functional.pad(grad * y, (0, -hidden % 32)).view(-1, 32):
        sums = sums + product
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    assert_same_bits(weights.grad.flatten(), sums)


@pytest.mark.parametrize(("need_y", "need_weights"), [(True, False), (False, True)])
def test_backward_computes_only_what_is_asked_for(need_y, need_weights):
    routing = build_routing(distinct(10, 2, 4, generator()), 4)
    slot, _, offsets = routing
    y, weights, grad = torch.randn(20, 6), torch.rand(10, 2), torch.randn(10, 6)
    both = torch.ops.pymoe.combine_backward(grad, y, weights, slot, offsets, True, True)
    dy, dweights = torch.ops.pymoe.combine_backward(grad, y, weights, slot, offsets, need_y, need_weights)
    assert_same_bits(dy, both[0] if need_y else both[0][:0])
    assert_same_bits(dweights, both[1] if need_weights else both[1][:0])


def test_gradient_of_narrow_weights_has_their_dtype():
    routing = build_routing(distinct(10, 2, 4, generator()), 4)
    weights = torch.rand(10, 2).bfloat16().requires_grad_()
    combine(torch.randn(20, 6).bfloat16(), routing, weights).sum().backward()
    assert weights.grad.dtype == torch.bfloat16


def test_dispatch_fills_the_given_buffer_and_returns_it():
    routing = build_routing(distinct(10, 2, 4, generator()), 4)
    x, out = torch.randn(10, 6), torch.full((20, 6), float("nan"))
    assert dispatch(x, routing, out=out) is out
    assert_same_bits(out, dispatch(x, routing))


def test_dispatch_refuses_a_buffer_that_overlaps_its_input():
    routing = build_routing(distinct(4, 2, 4, generator()), 4)
    memory = torch.zeros(8 * 6 + 4 * 6)
    for start in (0, 1, 47):
        with pytest.raises(ValueError, match="dispatch: out must not overlap x"):
            dispatch(memory[start : start + 24].view(4, 6), routing, out=memory[:48].view(8, 6))
    beside = dispatch(memory[48:].view(4, 6), routing, out=memory[:48].view(8, 6))
    assert beside.data_ptr() == memory.data_ptr()


@pytest.mark.parametrize("read", ["x", "slot", "offsets"])
def test_the_raw_dispatch_refuses_a_buffer_that_overlaps_what_it_reads(read):
    """Kernels process rows in any order, so a thread would read values that another thread has already overwritten."""
    slot, _, offsets = build_routing(distinct(4, 2, 4, generator()), 4)
    values = {"x": torch.rand(4, 6), "slot": slot, "offsets": offsets}
    memory = torch.zeros(100)
    last = 4 + 48 - values[read].numel()
    for start in (4, last):
        inside = memory[start : start + values[read].numel()].view(values[read].dtype).view(values[read].shape)
        overlapping = {**values, read: inside.copy_(values[read])}
        with pytest.raises(ValueError, match=f"dispatch: out must not overlap {read} in memory"):
            torch.ops.pymoe.dispatch_out(*overlapping.values(), memory[4:52].view(8, 6))
    beside = memory[52 : 52 + values[read].numel()].view(values[read].dtype).view(values[read].shape)
    torch.ops.pymoe.dispatch_out(*{**values, read: beside.copy_(values[read])}.values(), memory[4:52].view(8, 6))
    before = memory[:4].view(torch.int32)[:3].copy_(torch.tensor([0, 4, 8]))  # offsets of two experts
    torch.ops.pymoe.dispatch_out(values["x"], slot, before, memory[4:52].view(8, 6))


def test_dispatch_refuses_to_lose_a_gradient_in_a_buffer():
    routing = build_routing(distinct(4, 2, 4, generator()), 4)
    x = torch.zeros(4, 6, requires_grad=True)
    with pytest.raises(ValueError, match="dispatch: out= has no gradient, but x requires one"):
        dispatch(x, routing, out=torch.zeros(8, 6))
    with pytest.raises(ValueError, match="dispatch: out= has no gradient, but out requires one"):
        dispatch(x.detach(), routing, out=torch.zeros(8, 6, requires_grad=True))
    with torch.no_grad():
        assert dispatch(x, routing, out=torch.ones(8, 6)).sum() == 0


def test_gathered_tensors_are_copied_and_split_parts_are_views():
    parts = [torch.ones(2, 3), torch.zeros(0, 3), torch.full((4, 3), 2.0)]
    batch, sizes = gather_batch(parts)
    parts[0].zero_()
    assert sizes == (2, 0, 4)
    assert batch.sum(1).tolist() == [3, 3, 6, 6, 6, 6]
    views = split_batch(batch, sizes)
    assert all(view.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr() for view in views)


def test_a_lone_tensor_is_copied_too():
    lone = torch.ones(3, 2)
    batch, _ = gather_batch([lone])
    assert batch.data_ptr() != lone.data_ptr()


@pytest.mark.slow
def test_rows_past_two_gigabytes():
    """Byte offsets are 64-bit: rows end past 2 GiB, where a 32-bit offset would wrap."""
    hidden = 2**20
    tokens, choices = 520, 2
    assert tokens * choices * hidden * 2 > 2 * GIGABYTE
    routing = build_routing(distinct(tokens, choices, 8, generator()), 8)
    x = torch.arange(tokens).to(torch.bfloat16)[:, None].expand(tokens, hidden).contiguous()
    x[:, -1] = 1
    rows = dispatch(x, routing)
    for at in (0, 1, hidden // 2, hidden - 1):
        assert_same_bits(rows[:, at], x[routing.token.long(), at])
    del x
    total = combine(rows, routing)
    assert_same_bits(total[:, 0], (2 * torch.arange(tokens).float()).to(torch.bfloat16))
    assert (total[:, -1] == 2).all()


@pytest.mark.slow
def test_gathering_past_two_gigabytes():
    batch, sizes = gather_batch([torch.full((GIGABYTE,), value, dtype=torch.uint8) for value in (1, 2, 3)])
    assert sizes == (GIGABYTE,) * 3
    assert [int(batch[at]) for at in (0, GIGABYTE - 1, GIGABYTE, 2 * GIGABYTE, 3 * GIGABYTE - 1)] == [1, 1, 2, 3, 3]


def test_every_operator_is_exported():
    names = {"build_routing", "dispatch", "combine", "gather_batch", "split_batch"}
    assert names <= set(pymoe.ops.__all__)
    assert names <= set(pymoe.reference.__all__)


@pytest.mark.only_on("cpu")
def test_dispatch_fills_a_buffer_without_memory():
    """Meta and fake tensors all lie at address 0; that is no overlap."""
    experts = torch.tensor([[0, 1], [1, 0], [2, 1]])
    routing = build_routing(experts, 3)
    x, out = torch.zeros(3, 4, device="meta"), torch.zeros(6, 4, device="meta")
    assert dispatch(x, type(routing)(*(part.to("meta") for part in routing)), out=out) is out
    with FakeTensorMode() as mode:
        fake = type(routing)(*(mode.from_tensor(part) for part in routing))
        out = torch.zeros(6, 4)
        assert dispatch(torch.zeros(3, 4), fake, out=out) is out
