"""Ways to spread the experts, applied to a load: the rows that each rank computes, and the traffic for that."""

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
"""Function from (E,) the load of the previous step and (R, E) this step's counts to the ranks' shares."""


def as_it_is(past: Tensor, counts: Tensor) -> Shares:
    """Return contiguous shards, as :func:`torch.chunk` cuts them."""
    return share_evenly(counts, contiguous(counts.shape[1], counts.shape[0]))


def placed(past: Tensor, counts: Tensor, replicas: int) -> Shares:
    """Return experts placed by the load of the previous step, with ``replicas`` additional experts per rank."""
    return share_evenly(counts, place(past, counts.shape[0], replicas=replicas))


def cloned(past: Tensor, counts: Tensor, clones: int, worth: int) -> Shares:
    """Return contiguous shards, with ``clones`` per rank for this step, planned from its own counts."""
    return plan_clones(counts, clones, min_rows_to_clone=worth)


def plans(worth: int) -> dict[str, Plan]:
    """Return the ways that are compared, by name; ``worth`` is the least number of rows of a cloned expert."""
    return {
        "as it is": as_it_is,
        "placed": partial(placed, replicas=0),
        "placed, 1 replica a rank": partial(placed, replicas=1),
        "placed, 2 replicas a rank": partial(placed, replicas=2),
        "1 clone a rank": partial(cloned, clones=1, worth=worth),
        "2 clones a rank": partial(cloned, clones=2, worth=worth),
    }


BALANCES = tuple(plans(1))
"""Names of the ways."""


@dataclass(frozen=True)
class Balance:
    """A load under one way to spread the experts: means over its layers and steps, with T tokens per rank."""

    name: str
    ranks: int
    """R, the number of ranks."""
    tokens: float
    """T, the number of tokens per rank."""
    imbalance: float
    """Rows of the fullest rank divided by the mean."""
    worst: float
    """Largest imbalance of the layers and steps."""
    rows: float
    """Rows that the fullest rank computes per layer and step."""
    experts: float
    """Largest number of experts that a rank computes, including clones and replicas."""
    sent: float
    """Rows that leave a rank in one exchange, the mean over ranks."""
    sent_once: float
    """Like ``sent``, with one row per token and destination rank."""
    gathered_once: float
    """Like ``sent_once``, including rows that stay on their rank: the rows written to the send buffer."""
    clones: float
    """Clones that travel per step and layer, on all ranks together; replicas do not travel."""


@dataclass(frozen=True)
class Spread:
    """One layer and step of a load, and the rank that computes each row."""

    choices: Tensor
    """(N, K) int64."""
    source: Tensor
    """(N,) int64: the rank of each token."""
    destinations: Tensor
    """(N, K) int64: the rank to which each choice's row goes."""
    shares: Shares
    ranks: int
    scale: float
    """Number of rows that one counted row represents."""
    clones: Tensor
    """(R, R) int64: the experts that each owner (first dimension) sends to each rank for this step."""

    @property
    def held(self) -> list[list[int]]:
        """(R,): the experts that each rank computes, in ascending order."""
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

        A chunk is the same share of each rank's experts: of n experts, those from ``c * n // chunks`` on. Clones that
        travel are an additional chunk, the last one.
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
    """Yield every layer and step of ``load`` under ``plan``, with rows that represent ``tokens`` per rank."""
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
    """Return the balance of ``load`` under ``plan``, with rows scaled from its tokens to ``tokens`` per rank."""
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
