"""A simulation as text: a paragraph of inputs and six tables."""

from __future__ import annotations

from collections.abc import Iterator

from pymoe.bench.report import Table, plain
from pymoe.ep.simulate.alternatives import expert_parallel_bytes
from pymoe.ep.simulate.simulation import Simulation

NAMES = {False: "a row a choice", True: "a row a rank"}
"""Names of the ways in which rows travel: each choice separately, or a token once to each rank."""


def text(simulation: Simulation) -> str:
    """Return all tables as lines."""
    return "\n\n".join((inputs(simulation), *(f"{title}\n{plain(table)}" for title, table in tables(simulation))))


def inputs(simulation: Simulation) -> str:
    """Return the inputs of the simulation."""
    layer, load = simulation.layer, simulation.load
    ranks = f"{layer.ranks} rank{'s' * (layer.ranks != 1)}, {simulation.tokens} tokens a rank and step"
    lines = [
        str(layer.block),
        f"{ranks}; {layer.machine}; {layer.network}",
        f"load: {load.title}; experts spread: {simulation.balance.name}",
    ]
    return "\n".join(lines)


def tables(simulation: Simulation) -> Iterator[tuple[str, Table]]:
    """Yield each table with its title."""
    worth = f"clones of {simulation.worth:,} rows or more"
    yield f"Balance: rows of the fullest rank over the mean; {worth}", balance_table(simulation)
    yield "Wire: rows and bytes that a rank sends, a layer and step", traffic_table(simulation)
    yield "Time of a layer, in ms; best: no run of these parts in this order is shorter", time_table(simulation)
    yield "Memory of a rank for all mixture layers, in GiB", memory_table(simulation)
    title = "Beside data parallelism and FSDP, a layer and step; up to: tokens a rank and step"
    yield title, alternatives_table(simulation)


def balance_table(simulation: Simulation) -> Table:
    """Return a table with a row for every way to spread the experts."""
    heading = ("experts", "fullest / mean", "worst", "experts a rank", "clones a step")
    past = "" if simulation.load.has_past else " by this step's own load"
    rows = [
        (
            f"{one.name}{past}" if one.name.startswith("placed") else one.name,
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
    """Return a table with a row for each way in which rows travel."""
    heading = ("rows travel", "rows a token", "formula", "MiB", "saved")
    rows = [
        (
            NAMES[one.deduplicated],
            f"{one.rows:.3f}",
            "" if one.expected is None else f"{one.expected:.3f}",
            mebibytes(one.bytes),
            f"{one.saved:.1%}",
        )
        for one in simulation.traffic
    ]
    if simulation.clones_bytes:
        rows.append(("weights of clones, beside", "", "", mebibytes(simulation.clones_bytes), ""))
    return Table(heading, rows, frozenset({"rows travel"}))


def time_table(simulation: Simulation) -> Table:
    """Return a table with a row for every number of chunks and way in which rows travel."""
    names = ("wire", "compute", "best", "time")
    heading = (
        "rows travel",
        "chunks",
        "rows a token",
        *(f"{way} {name}" for way in ("fwd", "bwd") for name in names),
        "sum",
    )
    rows = []
    for one in simulation.passes:
        cells = [NAMES[one.deduplicated], str(one.chunks), f"{one.rows:.3f}"]
        for found in (one.forward, one.backward):
            seconds = (found.wire, found.processor, found.best, found.seconds)
            cells += [milliseconds(value) for value in seconds]
        rows.append((*cells, milliseconds(one.seconds)))
    return Table(heading, rows, frozenset({"rows travel"}))


def memory_table(simulation: Simulation) -> Table:
    """Return a table with a row for every kind of parallelism."""
    parts = ("weights", "gradients", "optimizer", "activations", "buffers", "total")
    rows = [(name, *(gibibytes(getattr(one, part)) for part in parts)) for name, one in simulation.memory.items()]
    return Table(("", *parts), rows, frozenset({""}))


def alternatives_table(simulation: Simulation) -> Table:
    """Return a table with a row for expert parallelism and one for each alternative."""
    heading = ("", "MiB sent", "ms", "EP sends less up to", "EP is faster up to")
    best = simulation.best
    sent = expert_parallel_bytes(simulation.layer.block, best.rows * simulation.tokens)
    how = f"EP, {NAMES[best.deduplicated]}, {best.chunks} chunk{'s' * (best.chunks != 1)}"
    rows = [(how, mebibytes(sent + simulation.clones_bytes), milliseconds(best.seconds), "", "")]
    for one in simulation.alternatives:
        crossings = (crossing(one.fewer_bytes_below), crossing(one.faster_below))
        rows.append((one.name, mebibytes(one.bytes), milliseconds(one.seconds), *crossings))
    return Table(heading, rows, frozenset({""}))


def milliseconds(seconds: float) -> str:
    """Return a time in ms, with four significant digits."""
    return f"{1e3 * seconds:,.4g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def mebibytes(size: float) -> str:
    """Return a size in MiB."""
    return f"{size / 2**20:,.1f}"


def crossing(tokens: float | None) -> str:
    """Return the number of tokens up to which an advantage holds."""
    return "any number" if tokens is None else f"{tokens:,.0f}"


def gibibytes(size: float) -> str:
    """Return a size in GiB, with at least two significant digits."""
    amount = size / 2**30
    return f"{amount:,.2f}" if amount >= 0.1 or not amount else f"{amount:.2g}"
