"""build_routing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pymoe.bench.calls import Sample
from specs import ErrorInput, RawCall, routings, specify
from specs.samples import expanded, layouts


def sample(choices: routings.Choices, dtype: torch.dtype, name: str = "") -> Sample:
    keywords = {} if choices.capacity is None else {"capacity": choices.capacity}
    return Sample(name or choices.name, (choices.experts.to(dtype), choices.num_experts), keywords)


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for make in (routings.usual, routings.odd, routings.large):
        for choices in make(generator):
            yield sample(choices, dtype)
            for capacity in (0, 1, 5):  # no row, one row, or a few rows per expert
                if choices.capacity is None:
                    arguments = (choices.experts.to(dtype), choices.num_experts)
                    yield Sample(f"{choices.name}_capacity{capacity}", arguments, {"capacity": capacity})
    experts = routings.distinct(30, 4, 16, generator).to(dtype)
    for name, view in layouts(experts):
        yield Sample(name, (view, 16))
        yield Sample(f"{name}_capacity", (view, 16), {"capacity": 3})
        yield Sample(f"{name}_foreign", (view, 5), {"capacity": 3, "foreign_experts": True})
    yield Sample("foreign_all", (experts + 3, 3), {"foreign_experts": True})
    yield Sample("foreign_none", (experts, 16), {"foreign_experts": True})
    yield Sample("foreign_huge", (experts.clamp(max=4) * (torch.iinfo(dtype).max // 4), 1), {"foreign_experts": True})
    many = routings.distinct(9000, 3, 16, generator).to(dtype)
    yield Sample("foreign_many", (many, 7), {"foreign_experts": True})
    yield Sample("one_token_expanded", (expanded(experts, 12), 16))
    yield Sample("capacity_past_64_bits", (experts, 16), {"capacity": 2**70})
    yield Sample("one_choice_expanded", (expanded(experts, 5, dim=1), 16), {"capacity": 9})
    yield Sample("no_choices", (experts[:, :0], 16))
    yield Sample("more_experts_than_slots", (experts, 70_000))


def error_inputs() -> Iterator[ErrorInput]:
    experts = torch.zeros(4, 2, dtype=torch.int32)

    def wrong(value: int, at: tuple[int, int], dtype: torch.dtype = torch.int32) -> Tensor:
        bad = torch.zeros(5000, 2, dtype=dtype)
        bad[at] = value
        return bad

    for name, args, keywords, error, match in (
        ("list", ([[0, 1]], 2), {}, TypeError, "experts must be a tensor"),
        ("float", (experts.float(), 2), {}, TypeError, "experts must have dtype int32 or int64"),
        ("int16", (experts.short(), 2), {}, TypeError, "experts must have dtype int32 or int64"),
        ("bool", (experts.bool(), 2), {}, TypeError, "experts must have dtype int32 or int64"),
        ("one_dimension", (experts[0], 2), {}, ValueError, "experts must have shape (T, K), got (2,)"),
        ("three_dimensions", (experts[None], 2), {}, ValueError, "experts must have shape (T, K), got (1, 4, 2)"),
        ("no_experts", (experts, 0), {}, ValueError, "num_experts must be in 1..2^31 - 1, got 0"),
        ("too_many_experts", (experts, 2**31), {}, ValueError, "num_experts must be in 1..2^31 - 1"),
        ("num_experts_float", (experts, 2.0), {}, TypeError, "num_experts must be an int, got float"),
        ("num_experts_bool", (experts, True), {}, TypeError, "num_experts must be an int, got bool"),
        ("capacity_negative", (experts, 2), {"capacity": -1}, ValueError, "capacity must be None or at least 0"),
        ("capacity_float", (experts, 2), {"capacity": 1.5}, TypeError, "capacity must be an int, got float"),
        ("foreign_int", (experts, 2), {"foreign_experts": 1}, TypeError, "foreign_experts must be a bool, got int"),
        ("foreign_negative", (wrong(-1, (3, 1)), 3), {"foreign_experts": True}, IndexError, "got -1 at [3, 1]"),
        ("too_many_slots", (experts[:1, :1].expand(2**30, 2), 2), {}, ValueError, "fewer than 2^31 choices"),
        ("expert_negative", (wrong(-1, (17, 1)), 3), {}, IndexError, "[0, E) (E = 3), got -1 at [17, 1]"),
        ("expert_too_large", (wrong(3, (4999, 0)), 3), {}, IndexError, "[0, E) (E = 3), got 3 at [4999, 0]"),
        ("expert_int32_min", (wrong(-(2**31), (0, 0)), 3), {}, IndexError, "got -2147483648 at [0, 0]"),
        ("expert_past_int32", (wrong(2**32, (1, 0), torch.int64), 3), {}, IndexError, "got 4294967296 at [1, 0]"),
        ("expert_int64_min", (wrong(-(2**63), (9, 1), torch.int64), 3), {}, IndexError, "at [9, 1]"),
    ):
        yield ErrorInput(Sample(name, args, keywords), error, match)


def raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    experts = routings.distinct(10, 2, 5, generator)
    yield RawCall("int32", "build_routing", (experts, 5, None))
    yield RawCall("int64", "build_routing", (experts.long(), 5, None))
    yield RawCall("foreign", "build_routing", (experts, 3, None, True))
    yield RawCall("capacity", "build_routing", (experts, 5, 3))
    yield RawCall("no_tokens", "build_routing", (experts[:0], 5, None))


SPECS = [
    specify(
        "build_routing",
        samples=samples,
        error_inputs=error_inputs,
        raw_calls=raw_calls,
        dtypes=(torch.int32, torch.int64),
    )
]
