"""Simulates a step of a mixture layer on a group of ranks: rows, bytes, balance and memory, as numbers and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pymoe._common import checks
from pymoe.bench.report import Table, plain
from pymoe.ep.clones import fewest_rows_that_pay
from pymoe.ep.exchange import message_length
from pymoe.ep.simulate.block import Block, at_least
from pymoe.ep.simulate.loads import Load
from pymoe.ep.simulate.rows import (
    SPREADS,
    Balance,
    Spread,
    balance,
    expected_imbalance,
    expected_rows,
    spreads,
    travelling,
)
from pymoe.nn.options import check_number

FORMAT = 2
"""Version of the dictionary that :meth:`Simulation.as_dict` returns."""
EXCHANGES = 4
"""Number of exchanges of rows per layer and step: dispatch and combine, forward and backward."""
INDEX_BYTES = 4
"""Size of the index of an expert, in bytes. A deduplicated row travels with an index for each choice."""


@dataclass(frozen=True)
class Memory:
    """Memory of a rank, in bytes, for all mixture layers of the model; the rest of the model is not counted."""

    weights: float
    gradients: float
    optimizer: float
    """Bytes of the optimizer's states, and of master weights if it keeps them."""
    activations: float
    """Bytes that the forward saves for the backward."""
    buffers: float
    """Additional bytes that one layer needs while it runs."""

    @property
    def total(self) -> float:
        """Return the sum of all parts in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True)
class Traffic:
    """Rows and bytes that a rank sends per layer and step, the mean over ranks, with given options of
    :func:`pymoe.ep.shard`.
    """

    deduplicated: bool
    chunks: int
    """Number of parts in which rows travel; it matters only for deduplicated rows."""
    rows: float
    """Rows that one rank sends to other ranks per exchange, divided by its number of tokens."""
    expected: float | None
    """The value of ``rows`` according to the formula for a uniform router; None where the formula does not hold."""
    bytes: float
    """Bytes that one rank sends in the four exchanges, including indices and weights of deduplicated rows."""
    saved: float
    """Fraction of the bytes that is saved compared with a row for each choice."""


@dataclass(frozen=True)
class Simulation:
    """Result of :func:`simulate`; all amounts of data are in bytes."""

    block: Block
    load: Load
    ranks: int
    """R, the number of ranks."""
    tokens: int
    """T, the number of tokens per rank and step."""
    min_rows_to_clone: int
    """Smallest number of rows that are moved to a clone."""
    balance: Balance
    """Balance of the chosen spread, for which traffic and memory are computed."""
    balances: tuple[Balance, ...]
    """Balance of every way in :data:`~pymoe.ep.simulate.rows.SPREADS`."""
    expected_imbalance: float | None
    """Imbalance by the formula for a uniform router; None if the load is not uniform."""
    traffic: tuple[Traffic, ...]
    """Traffic with a row for each choice; then, without clones, deduplicated traffic for each number of chunks."""
    counts_bytes: float
    """Bytes that a rank sends to announce its counts, once per layer and step."""
    clones_bytes: float
    """Bytes of clones' weights and gradients that a rank sends per layer and step, the mean over ranks."""
    alternatives: dict[str, float]
    """Bytes that a rank sends per layer and step under ``"DP"`` and ``"FSDP"``, which do not depend on tokens."""
    memory: dict[str, Memory]
    """Memory of the fullest rank under ``"EP"``, ``"EP deduplicated"`` (absent with clones), ``"DP"`` and
    ``"FSDP"``."""

    def tokens_below(self, traffic: Traffic, name: str) -> float | None:
        """Return the number of tokens per rank and step up to which expert parallelism sends fewer bytes than ``name``.

        The bytes of rows grow with the number of tokens; those of counts, clones and the alternatives do not. If
        ``traffic`` has no bytes, there is no limit: return None.

        Args:
            traffic: an element of ``self.traffic``.
            name: ``"DP"`` or ``"FSDP"``.
        """
        left = max(0.0, self.alternatives[name] - self.counts_bytes - self.clones_bytes)
        return left / (traffic.bytes / self.tokens) if traffic.bytes else None

    def as_dict(self) -> dict[str, Any]:
        """Return inputs and results as a dictionary for JSON, with the title of the load in place of the load."""
        memory = {name: {**asdict(one), "total": one.total} for name, one in self.memory.items()}
        fields = {name: value for name, value in vars(self).items() if name not in ("block", "load", "balance")}
        return {
            "format": FORMAT,
            "block": asdict(self.block),
            "load": self.load.title,
            "balance": self.balance.name,
            **fields,
            "balances": [asdict(one) for one in self.balances],
            "traffic": [
                {**asdict(one), "tokens_below": {name: self.tokens_below(one, name) for name in self.alternatives}}
                for one in self.traffic
            ],
            "memory": memory,
        }


def simulate(
    block: Block,
    ranks: int,
    tokens: int,
    load: Load,
    *,
    chunks: Sequence[int] = (1, 2, 4),
    spread: str = "contiguous",
    min_rows_to_clone: int | None = None,
    optimizer_bytes: float | None = None,
    recompute: bool = False,
) -> Simulation:
    """Simulate expert parallelism: rows, bytes, balance and memory, compared with data parallelism and FSDP.

    Every formula is on the page :doc:`/concepts/expert_parallel_costs`.

    Args:
        block: the mixture layers of a model.
        ranks: R, the number of ranks that share the experts of a layer; at least 1.
        tokens: T, the number of tokens per rank and step; the rows of ``load`` are scaled to it.
        load: the choices of the tokens, with the block's E and K.
        chunks: numbers of chunks to simulate, for deduplicated traffic. Each chunk has an equal share of every rank's
            experts. A token travels to a rank once in every chunk in which it has experts there.
        spread: the way to spread experts for traffic and memory, a key of :data:`~pymoe.ep.simulate.rows.SPREADS`;
            ``balances`` compares all of these ways.
        min_rows_to_clone: the smallest number of rows that are moved to a clone; None: the default of
            :func:`pymoe.ep.shard`.
        optimizer_bytes: bytes per parameter for optimizer states and master weight; None: those of AdamW.
        recompute: run the forward of each layer again in the backward (activation checkpointing). This changes only
            the memory.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range, or the load does not fit the block or the ranks.
    """
    at_least("simulate", "ranks", ranks, 1)
    at_least("simulate", "tokens", tokens, 1)
    checks.choice("simulate", "spread", spread, tuple(SPREADS))
    if not chunks:
        raise ValueError("simulate: chunks must name at least one number, got none")
    for number in chunks:
        at_least("simulate", "chunks", number, 1)
    if optimizer_bytes is not None:
        check_number("simulate", "optimizer_bytes", optimizer_bytes, minimum=0)
    if (load.experts, load.top_k) != (block.experts, block.choices):
        raise ValueError(
            f"simulate: load must have E {block.experts} and K {block.choices}, got E {load.experts} and K {load.top_k}"
        )
    if load.tokens < ranks:
        raise ValueError(f"simulate: load must have a token for each of {ranks} ranks, got {load.tokens}")
    least = min_rows_to_clone
    if least is None:
        least = fewest_rows_that_pay(block.expert_parameters, block.hidden)
    at_least("simulate", "min_rows_to_clone", least, 1)
    counted = max(1, round(least * load.tokens / (tokens * ranks)))  # scaled to the tokens of the load
    every = {name: list(spreads(name, load, ranks, tokens, counted)) for name in SPREADS}
    balances = {name: balance(name, steps) for name, steps in every.items()}
    chosen, found = balances[spread], every[spread]
    counts_bytes = 4.0 * (ranks - 1) * message_length(block.experts)
    clones_bytes = 2 * chosen.clones / ranks * block.expert_parameters * block.itemsize
    # DP all-reduces the gradients of all experts in a ring. FSDP all-gathers the weights in both passes and
    # reduce-scatters the gradients, which sends 1.5 times as many bytes.
    all_reduced = 2 * (ranks - 1) / ranks * block.experts * block.expert_parameters * block.itemsize
    alternatives = {"DP": all_reduced, "FSDP": 1.5 * all_reduced}
    ways = [(False, 1)] + [(True, number) for number in chunks if not chosen.clones]
    formula = load.uniform and spread == "contiguous"
    traffic = [_traffic(block, found, tokens, *way, formula=formula) for way in ways]
    states = optimizer_bytes_of(block) if optimizer_bytes is None else optimizer_bytes
    send_buffers: dict[str, float | None] = {"EP": None}
    if not chosen.clones:
        send_buffers["EP deduplicated"] = sum(float(one.pairs(True).sum()) for one in found) / ranks / len(found)
    memory = {
        name: expert_parallel(block, ranks, chosen, tokens, states, gathered, recompute)
        for name, gathered in send_buffers.items()
    }
    memory["DP"] = data_parallel(block, tokens, states, recompute=recompute)
    memory["FSDP"] = fully_sharded(block, ranks, tokens, states, recompute=recompute)
    return Simulation(
        block=block,
        load=load,
        ranks=ranks,
        tokens=tokens,
        min_rows_to_clone=least,
        balance=chosen,
        balances=tuple(balances.values()),
        expected_imbalance=expected_imbalance(block, ranks, load.tokens / ranks) if load.uniform else None,
        traffic=tuple(traffic),
        counts_bytes=counts_bytes,
        clones_bytes=clones_bytes,
        alternatives=alternatives,
        memory=memory,
    )


def _traffic(
    block: Block, found: Sequence[Spread], tokens: int, deduplicate: bool, chunks: int, *, formula: bool
) -> Traffic:
    ranks = found[0].ranks

    def size(deduplicate: bool) -> tuple[float, float]:
        rows = sum(travelling(pairs) for one in found for pairs in one.pairs(deduplicate, chunks)) / len(found) / ranks
        indexed = INDEX_BYTES + 2 * block.weight_itemsize  # per choice: index, weight, gradient of the weight
        return rows, rows * (EXCHANGES * block.row_bytes + deduplicate * indexed * block.choices)

    rows, moved = size(deduplicate)
    plain = size(False)[1]
    return Traffic(
        deduplicated=deduplicate,
        chunks=chunks,
        rows=rows / tokens,
        expected=expected_rows(block, ranks, deduplicate) if formula and (chunks == 1 or not deduplicate) else None,
        bytes=moved,
        saved=1 - moved / plain if plain else 0.0,
    )


# The memory of a rank.


def optimizer_bytes_of(block: Block) -> int:
    """Return the bytes of AdamW per parameter: two float32 moments, and a float32 copy of each 16-bit parameter.

    The moments of float64 parameters are float64.
    """
    if block.itemsize == 8:
        return 16
    return 12 if block.itemsize < 4 else 8


def expert_parallel(
    block: Block,
    ranks: int,
    balance: Balance,
    tokens: float,
    optimizer_bytes: float,
    gathered: float | None,
    recompute: bool,
) -> Memory:
    """Return the memory of the fullest rank under expert parallelism.

    The weights of clones are kept for the backward, so they count as activations (as buffers with ``recompute``); their
    gradients count as buffers of a layer.

    Args:
        block: the sizes of the layers.
        ranks: R, the number of ranks.
        balance: gives the rows and experts of the fullest rank.
        tokens: T, the number of tokens per rank.
        optimizer_bytes: bytes of the optimizer per parameter.
        gathered: the number of rows in a rank's send buffer if a token travels once per rank and is copied for each
            expert on arrival; None if every choice is a row.
        recompute: run the forward again in the backward (activation checkpointing of each layer).
    """
    own = -(-block.experts // ranks) if balance.clones else balance.experts
    clones = (balance.experts - own) * block.expert_parameters * block.itemsize
    rows = (balance.rows, tokens * block.choices if gathered is None else gathered)
    layer = _activations(block, *rows, tokens, copied=gathered is not None)
    parameters = block.layers * (own * block.expert_parameters + block.replicated_parameters)
    return _memory(block, parameters, optimizer_bytes, layer + clones, rows, tokens, recompute, clones)


def data_parallel(block: Block, tokens: float, optimizer_bytes: float, *, recompute: bool) -> Memory:
    """Return the memory of a rank that holds all experts (DistributedDataParallel)."""
    return _alone(block, 1, 0.0, tokens, optimizer_bytes, recompute)


def fully_sharded(block: Block, ranks: int, tokens: float, optimizer_bytes: float, *, recompute: bool) -> Memory:
    """Return the memory of a rank that holds 1 / R of every parameter (FSDP).

    The buffers of the rank include the whole weights and gradients of one layer.
    """
    whole = block.experts * block.expert_parameters + block.replicated_parameters
    return _alone(block, ranks, 2.0 * whole * block.itemsize, tokens, optimizer_bytes, recompute)


def _alone(block: Block, ranks: int, gathered: float, tokens: float, optimizer_bytes: float, recompute: bool) -> Memory:
    rows = tokens * block.choices
    layer = _activations(block, rows, rows, tokens, copied=False)
    whole = block.layers * (block.experts * block.expert_parameters + block.replicated_parameters)
    return _memory(block, whole / ranks, optimizer_bytes, layer, (rows, rows), tokens, recompute, gathered)


def _activations(block: Block, computed: float, returned: float, tokens: float, *, copied: bool) -> float:
    """Return the number of bytes that the forward of one layer saves for the backward.

    Let b be the size in bytes of an element of the rows, and w that of an element in the router (float32 or float64).
    The terms are w T (H + E) for the router's rows and logits; b (H + 3 F) for each computed row, which is saved before
    and after the first product and before the second; b H for each returned row, for the gradient of its weight;
    b T (H + 3 F_shared) for shared experts, less b T H if they use the router's rows; and 16 T K for choices, weights
    and the order of rows. Rows that are copied on arrival (``copied``) are summed on the rank of the experts, which
    saves the experts' outputs for this: another b H for each computed row.
    """
    wide = block.weight_itemsize
    saved = wide * tokens * (block.hidden + block.experts) + 16.0 * tokens * block.choices
    inner = computed * ((2 if copied else 1) * block.hidden + 3 * block.ffn)
    saved += block.itemsize * (inner + returned * block.hidden)
    if block.shared_ffn:
        rows = 0 if block.itemsize == wide else block.hidden
        saved += block.itemsize * tokens * (rows + 3 * block.shared_ffn)
    return saved


def _memory(
    block: Block,
    parameters: float,
    optimizer_bytes: float,
    layer: float,
    rows: tuple[float, float],
    tokens: float,
    recompute: bool,
    more: float,
) -> Memory:
    """Return the memory of a rank.

    The backward of a layer needs buffers for the gradients of rows: b H bytes for each sent row and b (H + 3 F) for
    each computed row, b being the size of an element in bytes. ``more`` is the size of other buffers in bytes. With
    ``recompute``, only the layers' inputs are saved, and the activations of one layer count as buffers.
    """
    computed, sent = rows
    buffers = block.itemsize * (sent * block.hidden + computed * (block.hidden + 3 * block.ffn)) + more
    activations = block.layers * layer
    if recompute:
        activations = block.layers * tokens * block.row_bytes
        buffers += layer
    numbers = parameters * block.itemsize
    return Memory(numbers, numbers, parameters * optimizer_bytes, activations, buffers)


# The text of a simulation: a paragraph with the inputs, and three tables.


def text(simulation: Simulation) -> str:
    """Return the inputs and the results as text: a paragraph and three tables."""
    ranks = f"{simulation.ranks} rank{'s' * (simulation.ranks != 1)}, {simulation.tokens} tokens per rank and step"
    load = f"load: {simulation.load.title}; experts spread: {simulation.balance.name}"
    min_rows_to_clone = f"clones of {simulation.min_rows_to_clone:,} rows or more"
    tables = {
        f"Balance: rows of the fullest rank over the mean; {min_rows_to_clone}": balance_table(simulation),
        "Bytes that a rank sends per layer and step; below: tokens per rank and step up to which EP sends less": (
            traffic_table(simulation)
        ),
        "Memory of a rank for all mixture layers, in GiB": memory_table(simulation),
    }
    parts = [f"{simulation.block}\n{ranks}\n{load}", *(f"{title}\n{plain(table)}" for title, table in tables.items())]
    return "\n\n".join(parts)


def balance_table(simulation: Simulation) -> Table:
    """Return a table of the balance of ranks, with a row for every way to spread the experts."""
    heading = ("experts", "fullest / mean", "worst", "experts per rank", "clones per step")
    past = "" if len(simulation.load.choices[0]) > 1 else " by this step's own load"
    rows = [
        (
            f"{one.name}{past}" if one.name == "placed" else one.name,
            f"{one.imbalance:.2f}",
            f"{one.worst:.2f}",
            f"{one.experts:.1f}".removesuffix(".0"),
            f"{one.clones:.1f}".removesuffix(".0"),
        )
        for one in simulation.balances
    ]
    if simulation.expected_imbalance is not None:
        rows.append(("formula for a uniform router", f"{simulation.expected_imbalance:.2f}", "", "", ""))
    return Table(heading, rows, frozenset({"experts"}))


def traffic_table(simulation: Simulation) -> Table:
    """Return a table of traffic: a row for each way in which rows travel, for counts, clones, and each alternative."""
    heading = ("", "rows per token", "formula", "MiB", "saved", *(f"below {name}" for name in simulation.alternatives))
    rows = []
    for one in simulation.traffic:
        parts = f", {one.chunks} chunk{'s' * (one.chunks != 1)}"
        name = f"EP deduplicated{parts}" if one.deduplicated else "EP"
        formula = "" if one.expected is None else f"{one.expected:.3f}"
        below = [simulation.tokens_below(one, name) for name in simulation.alternatives]
        cells = ["any number" if tokens is None else f"{tokens:,.0f}" for tokens in below]
        rows.append((name, f"{one.rows:.3f}", formula, amount(one.bytes, 2**20, 1), f"{one.saved:.1%}", *cells))
    others = {"counts, in addition": simulation.counts_bytes, "weights of clones, in addition": simulation.clones_bytes}
    others = {name: size for name, size in others.items() if size} | simulation.alternatives
    rows += [(name, "", "", amount(size, 2**20, 1), "", "", "") for name, size in others.items()]
    return Table(heading, rows, frozenset({""}))


def memory_table(simulation: Simulation) -> Table:
    """Return a table of the memory of a rank in GiB: a row for each kind of parallelism, a column for each use."""
    parts = ("weights", "gradients", "optimizer", "activations", "buffers", "total")
    rows = [
        (name, *(amount(getattr(one, part), 2**30, 2) for part in parts)) for name, one in simulation.memory.items()
    ]
    return Table(("", *parts), rows, frozenset({""}))


def amount(size: float, unit: int, digits: int) -> str:
    """Return a size as text, in units of ``unit`` bytes: ``digits`` decimals or, if small, two significant digits."""
    number = size / unit
    return f"{number:,.{digits}f}" if number >= 10.0 ** (1 - digits) or not number else f"{number:.2g}"
