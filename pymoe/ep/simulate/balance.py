"""Ways to spread the experts, applied to a load: who computes how many rows, and what travels for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pymoe.ep.clones import plan_clones
from pymoe.ep.placement import Shares, contiguous, place, share_evenly
from pymoe.ep.simulate.gates import Load, source_ranks
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
    clones: float
    """Clones that travel in a step and layer, all ranks together; replicas stay where they are."""


@dataclass(frozen=True)
class Spread:
    """One layer and step of a load, and who computes what of it."""

    choices: Tensor
    """(N, K) int64."""
    source: Tensor
    """(N,) int64, the rank of each token."""
    destinations: Tensor
    """(N, K) int64, the rank to which each choice's row goes."""
    shares: Shares
    ranks: int
    scale: float
    """Rows that one counted row stands for."""
    clones: Tensor
    """(R, R) int64: the experts that each owner (first dimension) sends to each rank for this step."""

    @property
    def held(self) -> list[list[int]]:
        """(R,): the experts that each rank computes, ascending."""
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for expert, hosts in enumerate(self.shares.hosts):
            for rank in hosts:
                held[rank].append(expert)
        return held

    def pairs(self, deduplicate: bool, chosen: Tensor | None = None) -> Tensor:
        """Return (R, R) float64: rows from each rank to each, of the ``chosen`` (N, K) choices."""
        return pairs_of(self.destinations, self.source, self.ranks, deduplicate, chosen).double() * self.scale

    def chunk_of_choices(self, chunks: int) -> tuple[Tensor, Tensor]:
        """Return (N, K) int64, the chunk of each choice, and (chunks, R) int64, the experts of each chunk and rank.

        A chunk is the same share of each rank's experts: of n experts those from ``c * n // chunks`` on. Clones that
        travel are one more chunk, the last.
        """
        travel = bool(self.clones.any())
        chunk = torch.zeros(self.ranks, len(self.shares.hosts), dtype=torch.int64)
        number = torch.zeros(chunks + travel, self.ranks, dtype=torch.int64)
        for rank, experts in enumerate(self.held):
            if travel:
                cloned = [expert for expert in experts if self.shares.hosts[expert][0] != rank]
                chunk[rank, cloned] = chunks
                number[chunks, rank] = len(cloned)
                experts = [expert for expert in experts if self.shares.hosts[expert][0] == rank]
            for part in range(chunks):
                own = experts[part * len(experts) // chunks : (part + 1) * len(experts) // chunks]
                chunk[rank, own] = part
                number[part, rank] = len(own)
        return chunk[self.destinations, self.choices], number


def spreads(name: str, plan: Plan, load: Load, ranks: int, tokens: float) -> Iterator[Spread]:
    """Yield every layer and step of ``load`` under ``plan``, with rows that stand for ``tokens`` a rank."""
    source = source_ranks(load.tokens, ranks)
    for before, now in load.with_past():
        counts = counts_of(now, source, ranks, load.experts)
        shares = plan(counts_of(before, source, ranks, load.experts).sum(0), counts)
        clones = counts.new_zeros(ranks, ranks)
        if sends_weights(name):
            for owner, *others in shares.hosts:
                clones[owner, others] += 1
        where = destinations_of(now, source, shares)
        yield Spread(now, source, where, shares, ranks, tokens * ranks / load.tokens, clones)


def balance(name: str, plan: Plan, load: Load, ranks: int, tokens: float) -> Balance:
    """Return what ``plan`` makes of ``load``, with rows scaled from its tokens to ``tokens`` a rank."""
    found: list[dict[str, float]] = []
    for spread in spreads(name, plan, load, ranks, tokens):
        plain, once = (spread.pairs(deduplicate) for deduplicate in (False, True))
        filled = plain.sum(0)
        found.append(
            {
                "imbalance": float(filled.max() / filled.mean()),
                "rows": float(filled.max()),
                "experts": float(max(map(len, spread.held))),
                "sent": travelling(plain) / ranks,
                "sent_once": travelling(once) / ranks,
                "gathered_once": float(once.sum()) / ranks,
                "clones": float(spread.clones.sum()),
            }
        )
    means = {key: sum(one[key] for one in found) / len(found) for key in found[0]}
    return Balance(name, ranks, tokens, worst=max(one["imbalance"] for one in found), **means)


def sends_weights(name: str) -> bool:
    """Return whether the plan called ``name`` sends weights in every step."""
    return "clone" in name
