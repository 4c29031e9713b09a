"""Ways to spread the experts, applied to a load: who computes how many rows, and what that costs on the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pymoe.ep.clones import plan_clones
from pymoe.ep.placement import Shares, contiguous, place, share_evenly
from pymoe.ep.simulate.block import Block
from pymoe.ep.simulate.gates import Load, source_ranks
from pymoe.ep.simulate.machine import Network
from pymoe.ep.simulate.traffic import counts_of, destinations_of, pairs_of, travelling

Plan = Callable[[Tensor, Tensor], Shares]
"""From (E,) the load of the step before and (R, E) this step's counts to who computes what."""


def as_it_is(past: Tensor, counts: Tensor) -> Shares:
    """Contiguous shards, as :func:`torch.chunk` cuts them."""
    return share_evenly(counts, contiguous(counts.shape[1], counts.shape[0]))


def placed(past: Tensor, counts: Tensor, replicas: int) -> Shares:
    """Experts placed by the load of the step before, with ``replicas`` more a rank."""
    return share_evenly(counts, place(past, counts.shape[0], replicas=replicas))


def cloned(past: Tensor, counts: Tensor, clones: int, worth: int) -> Shares:
    """Contiguous shards, and ``clones`` a rank for this step, planned from its own counts."""
    return plan_clones(counts, clones, worth=worth)


def plans(worth: int) -> dict[str, Plan]:
    """Return the ways that are compared, by name; ``worth`` is the fewest rows for which an expert is cloned."""
    return {
        "as it is": as_it_is,
        "placed": partial(placed, replicas=0),
        "placed, 1 replica a rank": partial(placed, replicas=1),
        "placed, 2 replicas a rank": partial(placed, replicas=2),
        "1 clone a rank": partial(cloned, clones=1, worth=worth),
        "2 clones a rank": partial(cloned, clones=2, worth=worth),
    }


BALANCES = tuple(plans(1))
"""The names of the ways."""


@dataclass(frozen=True)
class Balance:
    """A load under one way to spread the experts: means over its layers and steps, of T tokens a rank."""

    name: str
    ranks: int
    """R."""
    tokens: float
    """T."""
    imbalance: float
    """Rows of the fullest rank over the mean."""
    worst: float
    """The largest of the layers and steps."""
    rows: float
    """Rows that the fullest rank computes, a layer and step."""
    experts: float
    """The most experts that a rank computes, clones and replicas among them."""
    sent: float
    """Rows that leave a rank in one exchange, the mean over ranks."""
    sent_once: float
    """The same with a row a token and destination rank."""
    gathered_once: float
    """The same with the rows that stay on their rank: what is written to the send buffer."""
    wire: float
    """Seconds in which the busiest rank sends and receives the rows of one exchange, without latency."""
    wire_once: float
    """The same with a row a token and destination rank."""
    clones: float
    """Clones that travel in a step and layer, all ranks together; replicas stay where they are."""
    clones_wire: float
    """Seconds in which the busiest rank sends and receives the weights of clones, without latency."""


def balance(name: str, plan: Plan, load: Load, block: Block, ranks: int, tokens: float, network: Network) -> Balance:
    """Return what ``plan`` makes of ``load``, with rows scaled from its tokens to ``tokens`` a rank."""
    source = source_ranks(load.tokens, ranks)
    scale = tokens * ranks / load.tokens
    found: list[dict[str, float]] = []
    for before, now in load.with_past():
        counts = counts_of(now, source, ranks, load.experts)
        past = counts_of(before, source, ranks, load.experts).sum(0)
        shares = plan(past, counts)
        filled = shares.destinations().sum(0)
        where = destinations_of(now, source, shares)
        pairs, once = (pairs_of(where, source, ranks, deduplicate) for deduplicate in (False, True))
        moved = _clone_pairs(shares, ranks) if plan_is_of_clones(name) else None
        found.append(
            {
                "imbalance": float(filled.max()) / (float(filled.sum()) / ranks),
                "rows": float(filled.max()) * scale,
                "experts": float(max(map(len, _held(shares, ranks)))),
                "sent": travelling(pairs) / ranks * scale,
                "sent_once": travelling(once) / ranks * scale,
                "gathered_once": float(once.sum()) / ranks * scale,
                "wire": network.busiest(pairs.double() * (scale * block.row_bytes)),
                "wire_once": network.busiest(once.double() * (scale * block.row_bytes)),
                "clones": 0.0 if moved is None else float(moved.sum()),
                "clones_wire": 0.0
                if moved is None
                else network.busiest(moved.double() * (block.expert_parameters * block.itemsize)),
            }
        )
    means = {key: sum(one[key] for one in found) / len(found) for key in found[0]}
    return Balance(name, ranks, tokens, worst=max(one["imbalance"] for one in found), **means)


def plan_is_of_clones(name: str) -> bool:
    """Return whether the plan called ``name`` sends weights in every step."""
    return "clone" in name


def _held(shares: Shares, ranks: int) -> list[list[int]]:
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert, hosts in enumerate(shares.hosts):
        for rank in hosts:
            held[rank].append(expert)
    return held


def _clone_pairs(shares: Shares, ranks: int) -> Tensor:
    """(R, R) int64: the experts that each owner (first dimension) sends to each rank."""
    moved = shares.rows.new_zeros(ranks, ranks)
    for owner, *clones in shares.hosts:
        for rank in clones:
            moved[owner, rank] += 1
    return moved
