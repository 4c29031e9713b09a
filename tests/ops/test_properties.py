"""Tests that operators agree with their references and their promises, for random shapes, layouts and special values.

Shapes are small, with sizes from 0 to 6, to reach edge cases; the examples are the same in every run.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import rounds
from specs.comparison import assert_close, assert_same_bits
from specs.samples import layouts, special_values

import pymoe

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
SIDE = st.integers(0, 6)
MANY = settings(max_examples=rounds(300, 3000), deadline=None, derandomize=True, database=None)
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.float64: (1e-12, 1e-12),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
}


@st.composite
def tensors(draw, shape, dtype, special=True):
    """Draw random values, values from a small set (ties) or special values, in some memory layout."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    kind = draw(st.sampled_from(["random", "ties", "special"] if special else ["random", "ties"]))
    value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if kind == "ties":
        value = value.round()
    elif kind == "special":
        chosen = special_values(dtype)[torch.randint(0, 14, shape, generator=generator)]
        value = torch.where(torch.rand(shape, generator=generator) < 0.5, chosen, value)
    return draw(in_some_layout(value))


def in_some_layout(value):
    """Draw ``value`` contiguous, in one of the layouts of specs.samples, or with its first row expanded."""
    views = [value, *(view for _, view in layouts(value))]
    if value.dim() and value.shape[0]:
        views.append(value[:1].expand_as(value))
    return st.sampled_from(views)


@st.composite
def routed(draw):
    """Draw (experts, E, capacity) with any choices, including repeated choices of one expert by a token."""
    tokens, choices, experts = draw(SIDE), draw(SIDE), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    index = torch.randint(0, draw(st.integers(1, experts)), (tokens, choices), generator=generator)
    index = index.to(draw(st.sampled_from([torch.int32, torch.int64])))
    return draw(in_some_layout(index)), experts, draw(st.none() | st.integers(0, 8))


@MANY
@given(routed())
def test_build_routing(case):
    experts, count, capacity = case
    routing = pymoe.ops.build_routing(experts, count, capacity=capacity)
    for got, wanted in zip(routing, pymoe.reference.build_routing(experts, count, capacity=capacity), strict=True):
        assert_same_bits(got, wanted)
    slot, token, offsets = routing
    kept = slot[slot >= 0]
    used = int(offsets[-1])
    assert sorted(kept.tolist()) == list(range(used)), "the rows in use are numbered once each"
    for t, k in (slot >= 0).nonzero().tolist():
        assert token[slot[t, k]] == t
        assert offsets[experts[t, k]] <= slot[t, k] < offsets[experts[t, k] + 1]
    assert token[used:].tolist() == [-1] * (slot.numel() - used)
    rows = (offsets[1:] - offsets[:-1]).tolist()
    load = torch.bincount(experts.flatten().long(), minlength=count).tolist()
    assert rows == [n if capacity is None else min(n, capacity) for n in load]


@MANY
@given(routed(), DTYPES, SIDE, st.data())
def test_dispatch(case, dtype, hidden, data):
    experts, count, capacity = case
    routing = pymoe.ops.build_routing(experts, count, capacity=capacity)
    x = data.draw(tensors((experts.shape[0], hidden), dtype))
    rows = pymoe.ops.dispatch(x, routing)
    assert_same_bits(rows, pymoe.reference.dispatch(x, routing))
    for t, k in (routing.slot >= 0).nonzero().tolist():
        assert_same_bits(rows[routing.slot[t, k]], x[t])


@MANY
@given(routed(), DTYPES, SIDE, st.booleans(), st.data())
def test_combine(case, dtype, hidden, weighted, data):
    experts, count, capacity = case
    routing = pymoe.ops.build_routing(experts, count, capacity=capacity)
    y = data.draw(tensors((experts.numel(), hidden), dtype))
    weights = None
    if weighted:
        weights = data.draw(tensors(tuple(experts.shape), torch.float64 if dtype == torch.float64 else torch.float32))
    assert_same_bits(pymoe.ops.combine(y, routing, weights), pymoe.reference.combine(y, routing, weights))


@MANY
@given(routed(), DTYPES, SIDE, st.data())
def test_combine_undoes_dispatch(case, dtype, hidden, data):
    """Summing the copies of a token gives it back, times the number of its choices that were not dropped."""
    experts, count, capacity = case
    routing = pymoe.ops.build_routing(experts, count, capacity=capacity)
    x = data.draw(tensors((experts.shape[0], hidden), dtype, special=False)).round()
    kept = (routing.slot >= 0).sum(1, keepdim=True)
    assert_close(pymoe.ops.combine(pymoe.ops.dispatch(x, routing), routing), (x * kept).to(dtype))


@MANY
@given(DTYPES, st.lists(SIDE, min_size=1, max_size=5), SIDE, SIDE, st.booleans(), st.data())
def test_grouped_linear(dtype, sizes, hidden, features, with_bias, data):
    offsets = torch.tensor([0, *sizes]).cumsum(0).int()
    rows = int(offsets[-1]) + data.draw(st.integers(0, 2))
    x = data.draw(tensors((rows, hidden), dtype, special=False))
    weight = data.draw(tensors((len(sizes), features, hidden), dtype, special=False))
    bias = data.draw(tensors((len(sizes), features), dtype, special=False)) if with_bias else None
    out = pymoe.ops.grouped_linear(x, weight, offsets, bias)
    assert_close(out, pymoe.reference.grouped_linear(x, weight, offsets, bias), TOLERANCE[dtype])
    assert_same_bits(out[int(offsets[-1]) :], torch.zeros_like(out[int(offsets[-1]) :]))


@st.composite
def gate_calls(draw):
    """Draw (logits, k, keywords) within the contract."""
    dtype = draw(DTYPES)
    groups = draw(st.none() | st.integers(1, 3))
    experts = draw(st.integers(1, 6)) if groups is None else groups * draw(st.integers(2, 4))
    options = {
        "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "renormalize": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
    }
    reach = experts
    if groups is not None:
        options |= {"num_groups": groups, "topk_groups": draw(st.integers(1, groups))}
        reach = experts // groups * options["topk_groups"]
    if draw(st.booleans()):
        accumulate = torch.float64 if dtype == torch.float64 else torch.float32
        options["bias"] = draw(tensors((experts,), accumulate, special=False))
    logits = draw(tensors((draw(SIDE), experts), dtype))
    return logits, draw(st.integers(1, reach)), options


@MANY
@given(gate_calls())
def test_gate_topk(call):
    logits, k, options = call
    weights, experts, load = pymoe.ops.gate_topk(logits, k, **options)
    expected = pymoe.reference.gate_topk(logits, k, **options)
    assert_same_bits(experts, expected.experts, "experts")
    assert_same_bits(load, expected.load, "load")
    assert_close(weights, expected.weights, (1e-5, 1e-6), "weights")
    count = logits.shape[1]
    assert all(len(set(row)) == k for row in experts.tolist()), "the experts of a token are distinct"
    assert load.tolist() == torch.bincount(experts.flatten().long(), minlength=count).tolist()


@MANY
@given(DTYPES, SIDE, st.integers(1, 6), st.data())
def test_gate_topk_orders_as_a_stable_sort_of_the_logits(dtype, tokens, count, data):
    """Without bias and groups, NaN comes first, then larger values; ties go to the lower expert, and -0 ties with
    +0.
    """
    logits = data.draw(tensors((tokens, count), dtype))
    k = data.draw(st.integers(1, count))
    experts = pymoe.ops.gate_topk(logits, k, score=data.draw(st.sampled_from(["softmax", "sigmoid"]))).experts
    for row, chosen in zip(logits.double().tolist(), experts.tolist(), strict=True):
        order = sorted(range(count), key=lambda e: (row[e] == row[e], -row[e] if row[e] == row[e] else 0, e))
        assert chosen == order[:k]


@MANY
@given(DTYPES, st.lists(SIDE, min_size=1, max_size=6), st.lists(SIDE, max_size=2), st.data())
def test_gather_and_split_are_inverse(dtype, sizes, trailing, data):
    parts = [data.draw(tensors((size, *trailing), dtype)) for size in sizes]
    batch, seen = pymoe.ops.gather_batch(parts)
    assert seen == tuple(sizes)
    assert_same_bits(batch, torch.cat(parts))
    for got, wanted in zip(pymoe.ops.split_batch(batch, seen), parts, strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("kind", ["swiglu", "gelu", "relu"])
@MANY
@given(DTYPES, SIDE, SIDE, st.data())
def test_expert_activation(kind, dtype, rows, features, data):
    h = data.draw(tensors((rows, 2 * features if kind == "swiglu" else features), dtype))
    assert_close(pymoe.ops.expert_activation(h, kind), pymoe.reference.expert_activation(h, kind), TOLERANCE[dtype])
