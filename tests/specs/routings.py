"""Choices of experts, usual and odd, from which the routing operators' samples are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pymoe.bench.operators import distinct
from pymoe.reference import Routing, build_routing


class Choices(NamedTuple):
    """Arguments of :func:`pymoe.ops.build_routing`, with a name."""

    name: str
    experts: Tensor
    num_experts: int
    capacity: int | None = None

    def routing(self) -> Routing:
        """Return the reference's routing of these choices."""
        return build_routing(self.experts, self.num_experts, capacity=self.capacity)


def in_rows(routing: Routing, rows: int) -> Routing:
    """Return the routing in a buffer of ``rows`` rows: choices past its end are dropped, or rows are left over."""
    slot, token, offsets = routing
    kept = token[:rows]
    return Routing(
        torch.where(slot < rows, slot, -1),
        torch.cat([kept, kept.new_full((rows - len(kept),), -1)]),
        offsets.clamp(max=rows),
    )


# (T, K, E): no tokens, one of everything, K = E, more experts than slots, sizes that are not powers of two.
SHAPES = (
    (0, 2, 8),
    (1, 1, 1),
    (5, 1, 1),
    (7, 3, 3),
    (8, 8, 8),
    (64, 2, 8),
    (33, 8, 64),
    (29, 6, 160),
    (19, 4, 257),
)


def skewed(tokens: int, choices: int, experts: int, generator: torch.Generator) -> Tensor:
    """Return (T, K) int32 choices, most of them among the first experts."""
    return (torch.rand(tokens, choices, generator=generator) ** 4 * experts).int()


def usual(generator: torch.Generator) -> Iterator[Choices]:
    """Yield choices of every shape, without a capacity and with one that drops choices."""
    for tokens, choices, experts in SHAPES:
        chosen = distinct(tokens, choices, experts, generator)
        name = f"T{tokens}_K{choices}_E{experts}"
        yield Choices(name, chosen, experts)
        yield Choices(f"{name}_capacity", chosen, experts, max(tokens * choices // (2 * experts), 1))


def odd(generator: torch.Generator) -> Iterator[Choices]:
    """Yield choices with skew, empty experts, repeats within a token, and capacities at the edges."""
    yield Choices("all_to_the_first", torch.zeros(40, 3, dtype=torch.int32), 8)
    yield Choices("all_to_the_last", torch.full((40, 3), 7, dtype=torch.int32), 8)
    yield Choices("all_to_the_last_capacity", torch.full((40, 3), 7, dtype=torch.int32), 8, 50)
    yield Choices("skewed", skewed(101, 4, 64, generator), 64)
    yield Choices("skewed_capacity", skewed(101, 4, 64, generator), 64, 5)
    yield Choices("every_other_expert_empty", 2 * distinct(50, 2, 16, generator), 32)
    yield Choices("repeats_within_a_token", torch.randint(0, 3, (50, 5), generator=generator, dtype=torch.int32), 3)
    yield Choices("capacity_zero", distinct(21, 2, 8, generator), 8, 0)
    yield Choices("capacity_one", distinct(21, 2, 8, generator), 8, 1)
    yield Choices("capacity_of_all", distinct(21, 2, 8, generator), 8, 42)
    yield Choices("capacity_beyond_int32", distinct(21, 2, 8, generator), 8, 2**40)


def large(generator: torch.Generator) -> Iterator[Choices]:
    """Yield choices with more slots than a kernel handles in one block."""
    yield Choices("large", distinct(5001, 4, 96, generator), 96)
    yield Choices("large_skewed_capacity", skewed(9001, 3, 40, generator), 40, 900)
    yield Choices("large_one_expert", torch.zeros(20011, 1, dtype=torch.int32), 1)
