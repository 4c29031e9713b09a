"""Returns a simulation as text: a paragraph of inputs and three tables."""

from __future__ import annotations

from pymoe.bench.report import Table, plain
from pymoe.ep.simulate.simulation import Simulation


def text(simulation: Simulation) -> str:
    """Return the inputs and all tables as lines."""
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
    """Return a table with a row for every way to spread the experts."""
    heading = ("experts", "fullest / mean", "worst", "experts per rank", "clones per step")
    past = "" if simulation.load.has_past else " by this step's own load"
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
    """Return a table with a row for each way in which rows travel, and one for each other kind of parallelism."""
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
    """Return a table with a row for every kind of parallelism."""
    parts = ("weights", "gradients", "optimizer", "activations", "buffers", "total")
    rows = [
        (name, *(amount(getattr(one, part), 2**30, 2) for part in parts)) for name, one in simulation.memory.items()
    ]
    return Table(("", *parts), rows, frozenset({""}))


def amount(size: float, unit: int, digits: int) -> str:
    """Return a size in units of ``unit`` bytes, with at least two significant digits."""
    number = size / unit
    return f"{number:,.{digits}f}" if number >= 10.0 ** (1 - digits) or not number else f"{number:.2g}"
