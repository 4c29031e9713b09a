"""dispatch, into fresh memory and into a given buffer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pymoe.bench.calls import Sample
from pymoe.bench.operators import uniform
from pymoe.reference import Gate, Routing
from specs import ErrorInput, RawCall, routings, specify
from specs.samples import expanded, layouts, special_values, sprinkled

HIDDEN = (64, 1, 3, 16, 100, 0, 257)


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for make in (routings.usual, routings.odd):
        for i, choices in enumerate(make(generator)):
            hidden = HIDDEN[i % len(HIDDEN)]
            x = uniform(choices.experts.shape[0], hidden, dtype=dtype, generator=generator)
            yield Sample(f"{choices.name}_H{hidden}", (x, choices.routing()))
    choices = routings.Choices("", routings.distinct(31, 3, 8, generator), 8, capacity=9)
    routing = choices.routing()
    x = uniform(31, 40, dtype=dtype, generator=generator)
    yield Sample("special", (sprinkled(x, generator), routing))
    yield Sample("all_special", (special_values(dtype).repeat(31, 1), routing))
    for name, view in layouts(x):
        yield Sample(name, (view, routing))
    yield Sample("token_expanded", (expanded(x, 31), routing))
    yield Sample("column_expanded", (expanded(x, 40, dim=1), routing))
    for (name, slot), (_, token), (_, offsets) in zip(*map(layouts, routing), strict=False):
        yield Sample(f"routing_{name}", (x, Routing(slot, token, offsets)))
    buffer = torch.full((93, 40), float("nan"), dtype=dtype)
    yield Sample("out", (x, routing), {"out": buffer})
    yield Sample("out_offset", (x, routing), {"out": next(layouts(buffer))[1]})
    yield Sample("out_empty", (x[:, :0], routing), {"out": buffer[:, :0].contiguous()})
    for rows in (40, 150):  # fewer and more than choices
        buffers = routings.in_rows(choices.routing(), rows)
        yield Sample(f"rows{rows}", (x, buffers))
        yield Sample(f"rows{rows}_out", (x, buffers), {"out": torch.full((rows, 40), float("nan"), dtype=dtype)})
    yield Sample("rows_without_tokens", (x[:0], Routing(routing.slot[:0], routing.token, 0 * routing.offsets)))
    large = routings.Choices("", routings.skewed(1200, 4, 16, generator), 16)
    x = uniform(1200, 1024, dtype=dtype, generator=generator)
    yield Sample("large", (x, large.routing()))
    yield Sample("large_capacity", (x, large._replace(capacity=300).routing()))


def error_inputs() -> Iterator[ErrorInput]:
    x = torch.zeros(4, 3)
    routing = routings.Choices("", torch.tensor([[0, 1], [1, 0], [2, 1], [0, 2]]), 3).routing()
    slot, token, offsets = routing
    out = torch.zeros(8, 3)

    def with_slot(value: int) -> Routing:
        bad = slot.clone()
        bad[2, 1] = value
        return Routing(bad, token, offsets)

    for name, args, keywords, error, match in (
        ("x_list", ([[1.0]], routing), {}, TypeError, "x must be a tensor, got list"),
        ("x_int", (x.int(), routing), {}, TypeError, "x must have dtype float32"),
        ("x_one_dimension", (x[0], routing), {}, ValueError, "x must have shape (T, H), got (3,)"),
        ("x_wrong_tokens", (x[:3], routing), {}, ValueError, "must have size 3 (T of x) in dimension 0"),
        ("routing_tensor", (x, slot), {}, TypeError, "routing must be a Routing, got Tensor"),
        ("routing_gate", (x, Gate(x, slot, offsets)), {}, TypeError, "routing must be a Routing, got Gate"),
        ("slot_int64", (x, routing._replace(slot=slot.long())), {}, TypeError, "routing.slot must have dtype int32"),
        ("slot_flat", (x, routing._replace(slot=slot.view(-1))), {}, ValueError, "routing.slot must have shape"),
        ("token_short", (x, routing._replace(token=token[1:])), {}, IndexError, "in [-1, S) (S = 7), got 7 at"),
        ("token_rank", (x, routing._replace(token=token[None])), {}, ValueError, "routing.token must have shape (S,)"),
        ("offsets_int64", (x, routing._replace(offsets=offsets.long())), {}, TypeError, "routing.offsets must have"),
        ("offsets_short", (x, routing._replace(offsets=offsets[:1])), {}, ValueError, "with E >= 1, got (1,)"),
        ("other_device", (x.to("meta"), routing), {}, ValueError, "must be on the device of x (meta), got cpu"),
        ("slot_too_large", (x, with_slot(8)), {}, IndexError, "must lie in [-1, S) (S = 8), got 8 at [2, 1]"),
        ("slot_negative", (x, with_slot(-2)), {}, IndexError, "must lie in [-1, S) (S = 8), got -2 at [2, 1]"),
        ("out_list", (x, routing), {"out": [1]}, TypeError, "out must be a tensor, got list"),
        ("out_dtype", (x, routing), {"out": out.double()}, TypeError, "out must have dtype float32"),
        ("out_rows", (x, routing), {"out": out[1:]}, ValueError, "out must have size 8"),
        ("out_columns", (x, routing), {"out": torch.zeros(8, 4)}, ValueError, "out must have size 3 (H of x)"),
        ("out_rank", (x, routing), {"out": out[0]}, ValueError, "out must have shape (S, H), got (3,)"),
        ("out_strided", (x, routing), {"out": torch.zeros(3, 8).T}, ValueError, "out must be contiguous"),
        ("out_device", (x, routing), {"out": out.to("meta")}, ValueError, "out must be on the device of x (cpu)"),
        ("grad_of_x_lost", (x.clone().requires_grad_(), routing), {"out": out}, ValueError, "but x requires one"),
    ):
        yield ErrorInput(Sample(name, args, keywords), error, match)


def gradient_samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, capacity in (("all", None), ("capacity", 3)):
        routing = routings.Choices("", routings.distinct(5, 2, 3, generator), 3, capacity).routing()
        x = uniform(5, 3, dtype=torch.float64, generator=generator)
        yield Sample(name, (x.requires_grad_(), routing))
        yield Sample(f"{name}_rows", (x.detach().requires_grad_(), routings.in_rows(routing, 13)))
    routing = routings.Choices("", routings.skewed(4, 3, 6, generator), 6).routing()
    x = uniform(3, 4, dtype=torch.float64, generator=generator)
    yield Sample("transposed", (x.t().requires_grad_(), routing))


def raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    slot, _, offsets = routings.Choices("", routings.distinct(6, 2, 4, generator), 4, 2).routing()
    for dtype in (torch.float32, torch.bfloat16):
        x = uniform(6, 5, dtype=dtype, generator=generator)
        yield RawCall(str(dtype), "dispatch", (x, slot, offsets))
        yield RawCall(f"{dtype}_rows", "dispatch", (x, slot, offsets, 17))
        yield RawCall(str(dtype), "dispatch_out", (x, slot, offsets, torch.zeros(12, 5, dtype=dtype)))
    yield RawCall("empty", "dispatch", (torch.zeros(0, 5), slot[:0], offsets))


SPECS = [
    specify(
        "dispatch",
        samples=samples,
        error_inputs=error_inputs,
        gradient_samples=gradient_samples,
        raw_calls=raw_calls,
    )
]
