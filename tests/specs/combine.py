"""combine, with weights and without."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pymoe.bench.calls import Sample
from pymoe.bench.operators import uniform
from pymoe.reference import Routing
from specs import ErrorInput, RawCall, routings, specify
from specs.samples import expanded, layouts, special_values, sprinkled

HIDDEN = (64, 1, 3, 16, 100, 0, 257)


def weight_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    wide = weight_dtype(dtype)
    for make in (routings.usual, routings.odd):
        for i, choices in enumerate(make(generator)):
            hidden = HIDDEN[i % len(HIDDEN)]
            y = uniform(choices.experts.numel(), hidden, dtype=dtype, generator=generator)
            weights = uniform(*choices.experts.shape, dtype=wide, generator=generator)
            yield Sample(f"{choices.name}_H{hidden}", (y, choices.routing(), weights))
            if i % 3 == 0:
                yield Sample(f"{choices.name}_H{hidden}_sum", (y, choices.routing()))
    routing = routings.Choices("", routings.distinct(31, 3, 8, generator), 8, capacity=9).routing()
    y = uniform(93, 40, dtype=dtype, generator=generator)
    weights = torch.rand(31, 3, generator=generator, dtype=wide)
    special = sprinkled(y, generator)
    yield Sample("special", (special, routing, weights))
    yield Sample("special_sum", (special, routing))
    yield Sample("special_weights", (y, routing, sprinkled(weights, generator)))
    yield Sample("special_finite", (sprinkled(y, generator, finite=True), routing, sprinkled(weights, generator)))
    yield Sample("all_special", (special_values(dtype).repeat(93, 3)[:, :41], routing, sprinkled(weights, generator)))
    yield Sample("negative_zeros", (torch.full_like(y, -0.0), routing, weights))
    yield Sample("negative_zeros_sum", (torch.full_like(y, -0.0), routing))
    yield Sample("cancelling", (y, routing, weights - 0.5))
    for name, view in layouts(y):
        yield Sample(name, (view, routing, weights))
    for name, view in layouts(weights):
        yield Sample(f"weights_{name}", (y, routing, view))
    yield Sample("row_expanded", (expanded(y, 93), routing, weights))
    yield Sample("weights_expanded", (y, routing, expanded(weights, 31)))
    yield Sample("weights_of_the_rows_dtype", (y, routing, weights.to(dtype)))
    yield Sample("weights_bfloat16", (y, routing, weights.bfloat16()))
    for (name, slot), (_, token), (_, offsets) in zip(*map(layouts, routing), strict=False):
        yield Sample(f"routing_{name}", (y, Routing(slot, token, offsets), weights))
    for rows in (60, 150):  # fewer and more than choices
        in_rows = routings.in_rows(routing, rows)
        y = uniform(rows, 40, dtype=dtype, generator=generator)
        yield Sample(f"rows{rows}", (y, in_rows, weights))
        yield Sample(f"rows{rows}_sum", (y, in_rows))
    none = Routing(torch.full_like(routing.slot, -1), routing.token[:0], 0 * routing.offsets)
    yield Sample("rows_none", (y[:0], none, weights))
    yield from _biased_samples(dtype, generator)
    for k in (2, 5):
        routing = routings.Choices("", routings.skewed(1500, k, 16, generator), 16, 500).routing()
        y = uniform(1500 * k, 1024, dtype=dtype, generator=generator)
        yield Sample(f"large_K{k}", (y, routing, torch.rand(1500, k, generator=generator, dtype=wide)))


def _biased_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    wide = weight_dtype(dtype)

    def random_bias(experts: int, hidden: int) -> Tensor:
        # In 16 bits the gradient of a bias is a sum of rounded terms, which tests/ops/test_expert_biases.py checks. The
        # special values keep these samples out of the comparison with the reference's gradients.
        bias = uniform(experts, hidden, dtype=dtype, generator=generator)
        return sprinkled(bias, generator) if dtype.itemsize == 2 else bias

    for i, choices in enumerate(routings.odd(generator)):
        hidden, routing = HIDDEN[i % len(HIDDEN)], choices.routing()
        y = uniform(choices.experts.numel(), hidden, dtype=dtype, generator=generator)
        weights = uniform(*choices.experts.shape, dtype=wide, generator=generator)
        bias = random_bias(len(routing.offsets) - 1, hidden)
        yield Sample(f"{choices.name}_H{hidden}_bias", (y, routing, weights, bias))
    for k in (1, 4, 8, 9):
        routing = routings.Choices("", routings.distinct(21, k, 12, generator), 12, capacity=4 * k).routing()
        y, bias = uniform(21 * k, 72, dtype=dtype, generator=generator), random_bias(12, 72)
        weights = torch.rand(21, k, generator=generator, dtype=wide)
        yield Sample(f"bias_K{k}", (y, routing, weights, bias))
        yield Sample(f"bias_K{k}_sum", (y, routing, None, bias))
    for name, view in layouts(bias):
        yield Sample(f"bias_{name}", (y, routing, weights, view))
    yield Sample("bias_special", (y, routing, weights, sprinkled(bias, generator)))
    yield Sample("bias_of_more_rows", (torch.cat((y, y)), routings.in_rows(routing, 2 * len(y)), weights, bias))


def error_inputs() -> Iterator[ErrorInput]:
    y, weights = torch.zeros(8, 3), torch.zeros(4, 2)
    bias = torch.zeros(3, 3)
    routing = routings.Choices("", torch.tensor([[0, 1], [1, 0], [2, 1], [0, 2]]), 3).routing()
    slot, token, offsets = routing

    def with_slot(value: int) -> Routing:
        bad = slot.clone()
        bad[2, 1] = value
        return Routing(bad, token, offsets)

    def with_offsets(*values: int) -> Routing:
        return routing._replace(offsets=torch.tensor(values, dtype=torch.int32))

    for name, args, error, match in (
        ("y_list", ([[1.0]], routing, weights), TypeError, "y must be a tensor, got list"),
        ("y_int", (y.int(), routing, weights), TypeError, "y must have dtype float32"),
        ("y_one_dimension", (y[0], routing, weights), ValueError, "y must have shape (S, H), got (3,)"),
        ("y_short", (y[1:], routing, weights), ValueError, "y must have size 8 (S of routing.token)"),
        ("routing_tensor", (y, slot, weights), TypeError, "routing must be a Routing, got Tensor"),
        ("slot_int64", (y, routing._replace(slot=slot.long())), TypeError, "routing.slot must have dtype int32"),
        ("slot_flat", (y, routing._replace(slot=slot.view(-1))), ValueError, "routing.slot must have shape (T, K)"),
        ("token_short", (y, routing._replace(token=token[1:])), ValueError, "y must have size 7 (S of routing.token)"),
        ("offsets_short", (y, routing._replace(offsets=offsets[:1])), ValueError, "with E >= 1, got (1,)"),
        ("other_device", (y.to("meta"), routing), ValueError, "must be on the device of y (meta), got cpu"),
        ("weights_list", (y, routing, [[1.0]]), TypeError, "weights must be a tensor, got list"),
        ("weights_int", (y, routing, weights.int()), TypeError, "weights must have dtype float32"),
        ("weights_double", (y, routing, weights.double()), TypeError, "weights must not have dtype float64"),
        ("weights_flat", (y, routing, weights.view(-1)), ValueError, "weights must have shape (T, K), got (8,)"),
        ("weights_tokens", (y, routing, weights[1:]), ValueError, "weights must have size 4 (T of routing.slot)"),
        ("weights_choices", (y, routing, weights[:, :1]), ValueError, "weights must have size 2 (K of routing.slot)"),
        ("weights_device", (y, routing, weights.to("meta")), ValueError, "weights must be on the device of y (cpu)"),
        ("slot_too_large", (y, with_slot(8), weights), IndexError, "must lie in [-1, S) (S = 8), got 8 at [2, 1]"),
        ("slot_negative", (y, with_slot(-2), weights), IndexError, "must lie in [-1, S) (S = 8), got -2 at [2, 1]"),
        ("slot_too_large_sum", (y, with_slot(8)), IndexError, "must lie in [-1, S) (S = 8), got 8 at [2, 1]"),
        ("slot_negative_sum", (y, with_slot(-9)), IndexError, "must lie in [-1, S) (S = 8), got -9 at [2, 1]"),
        ("bias_list", (y, routing, weights, [[1.0]]), TypeError, "bias must be a tensor, got list"),
        ("bias_half", (y, routing, weights, bias.half()), TypeError, "bias must have dtype float32"),
        ("bias_flat", (y, routing, weights, bias[0]), ValueError, "bias must have shape (E, N), got (3,)"),
        ("bias_experts", (y, routing, weights, bias[1:]), ValueError, "must have size 3 (E of routing.offsets)"),
        ("bias_wide", (y, routing, weights, torch.zeros(3, 4)), ValueError, "bias must have size 3 (H of y)"),
        ("bias_device", (y, routing, weights, bias.to("meta")), ValueError, "bias must be on the device of y (cpu)"),
        ("bias_no_start", (y, with_offsets(1, 3, 5, 8), weights, bias), ValueError, "offsets must start at 0, got 1"),
        ("bias_down", (y, with_offsets(0, 4, 3, 8), None, bias), ValueError, "must not decrease, got 3 after 4"),
        ("bias_past", (y, with_offsets(0, 3, 5, 9), None, bias), IndexError, "must lie in [0, S] (S = 8), got 9"),
    ):
        yield ErrorInput(Sample(name, args), error, match)


def gradient_samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, capacity in (("all", None), ("capacity", 3)):
        routing = routings.Choices("", routings.distinct(5, 2, 3, generator), 3, capacity).routing()
        y = uniform(10, 3, dtype=torch.float64, generator=generator).requires_grad_()
        weights = torch.rand(5, 2, generator=generator, dtype=torch.float64).requires_grad_()
        yield Sample(f"{name}_both", (y, routing, weights))
        yield Sample(f"{name}_rows", (y, routing, weights.detach()))
        yield Sample(f"{name}_weights", (y.detach(), routing, weights))
        yield Sample(f"{name}_sum", (y, routing))
        y = uniform(13, 3, dtype=torch.float64, generator=generator).requires_grad_()
        yield Sample(f"{name}_in_rows", (y, routings.in_rows(routing, 13), weights.detach().requires_grad_()))
        y, bias = (uniform(n, 3, dtype=torch.float64, generator=generator).requires_grad_() for n in (10, 3))
        yield Sample(f"{name}_bias", (y, routing, weights, bias))
        yield Sample(f"{name}_bias_alone", (y.detach(), routing, weights.detach(), bias))
        yield Sample(f"{name}_bias_sum", (y, routing, None, bias))
        yield Sample(f"{name}_fixed_bias", (y, routing, weights, bias.detach()))


def raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    slot, _, offsets = routings.Choices("", routings.distinct(6, 2, 4, generator), 4, 2).routing()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        y = uniform(12, 5, dtype=dtype, generator=generator)
        grad = uniform(6, 5, dtype=dtype, generator=generator)
        weights = torch.rand(6, 2, generator=generator, dtype=weight_dtype(dtype))
        yield RawCall(f"{dtype}", "combine", (y, slot, weights))
        yield RawCall(f"{dtype}_sum", "combine", (y, slot, None))
        for need in ((True, True), (True, False), (False, True)):
            name = f"{dtype}_{'dy' * need[0]}{'dweights' * need[1]}"
            yield RawCall(name, "combine_backward", (grad, y, weights, slot, offsets, *need))
        yield RawCall(f"{dtype}_rows", "combine", (y[:9], slot, weights))
        bias = uniform(4, 5, dtype=dtype, generator=generator)
        yield RawCall(f"{dtype}_bias", "combine", (y, slot, weights, bias, offsets))
        yield RawCall(f"{dtype}_bias_sum", "combine", (y, slot, None, bias, offsets))
        yield RawCall(f"{dtype}_bias", "combine_backward", (grad, y, weights, slot, offsets, True, True, bias))
    yield RawCall("empty", "combine", (torch.zeros(0, 5), slot[:0], None))


SPECS = [
    specify(
        "combine",
        samples=samples,
        error_inputs=error_inputs,
        gradient_samples=gradient_samples,
        raw_calls=raw_calls,
    )
]
