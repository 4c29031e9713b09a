"""Compare a layer whose experts are on two ranks with one process, and with the same layer in plain torch.

    python -m benchmarks.expert_parallel [--quick] [--rounds N] [--output DIR]

Forward and backward of a whole layer over gloo, one thread per rank; all systems take turns, one step each. The peer
sorts rows, exchanges them by ``all_to_all_single`` and adds them up by ``index_add``, as torchtitan does. It multiplies
by ``F.linear``, expert by expert, or by pymoe's products. Results are checked. A second part simulates a wire that is
as slow as the experts, and shows how much of its time 1, 2 and 4 chunks hide. A third part measures a skewed load, with
clones of hot experts and with experts moved. Writes JSON and Markdown tables. ``make bench-expert-parallel`` sets
everything up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.run import Run, as_report, measured, parser_of, show_sections
from benchmarks.expert import hot_experts, slow_wire, work
from benchmarks.expert.work import ALONE, PEER, PEER_MOVES, SYSTEMS, Cell
from pymoe.bench.report import Table
from pymoe.bench.timing import Quartiles

CELLS = [Cell(4096, 512, 1024, 8, 2), Cell(8192, 256, 128, 32, 8)]
QUICK_CELLS = [Cell(256, 32, 16, 8, 2)]
HOT = Cell(8192, 512, 512, 32, 2)
ROUNDS, QUICK_ROUNDS = 9, 2
CHUNKS = (1, 2, 4)
WIRE = 0.2
"""Seconds that a call's rows take in each direction; the experts take as many seconds."""
Record = dict[str, Any]


def main() -> int:
    """Run the measurements; return 1 if any system's results are wrong."""
    options = parse()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    run = Run("expert_parallel", options.output, {"rounds": rounds, "quick": options.quick})
    result = run.result
    cells = QUICK_CELLS if options.quick else CELLS
    wire = 0.005 if options.quick else WIRE
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work.rank_main, args=(folder, cells, rounds), nprocs=2)
        result["cells"] = json.loads((Path(folder) / "found.json").read_text())
        torch.multiprocessing.spawn(slow_wire.rank_main, args=(folder, CHUNKS, wire, wire, rounds), nprocs=2)
        found = json.loads((Path(folder) / "wire.json").read_text())
        hot = QUICK_CELLS[0] if options.quick else HOT
        torch.multiprocessing.spawn(hot_experts.rank_main, args=(folder, hot, rounds), nprocs=2)
        result["hot"] = {"cell": str(hot), "ways": json.loads((Path(folder) / "hot.json").read_text())}
    result["wire"] = [
        {
            "chunks": chunks,
            "seconds": found[str(chunks)],
            "best": [
                slow_wire.best(wire, passes * wire, chunks) for passes in (1, 2)
            ],  # a backward pass takes twice as long
        }
        for chunks in CHUNKS
    ]
    tables = {cell["cell"]: table_of(cell) for cell in result["cells"]} | {
        f"a wire of {wire * 1e3:g} ms one way, experts of {wire * 1e3:g} ms": wire_table(result["wire"]),
        f"a skewed load, {result['hot']['cell']}": hot_table(result["hot"]["ways"]),
    }
    show_sections(tables.items())
    run.keep(lambda result: markdown(result, tables))
    wrong = [verdict for cell in result["cells"] for verdict in cell["verdicts"].values() if verdict == "WRONG"]
    return int(bool(wrong) or not all(way["exact"] for way in result["hot"]["ways"].values()))


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("expert_parallel", __doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny layer and few rounds: some seconds")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"steps behind a median (default: {ROUNDS})")
    return parser.parse_args()


def table_of(cell: Record) -> Table:
    """Return a table of a step's median times, and of ratios within rounds with their quartiles."""
    rows = []
    for name in SYSTEMS:
        wall, processors, waits, transport = (list(column) for column in zip(*cell["times"][name], strict=True))
        rows.append(
            [
                name,
                f"{statistics.median(wall) * 1e3:.1f}",
                f"{statistics.median(processors) * 1e3:.1f}",
                f"{statistics.median(transport) * 1e3:.1f}" if name != ALONE else "",
                f"{statistics.median(waits) * 1e3:.1f}" if name.startswith("pymoe, EP 2") else "",
                f"{cell['sent'][name] / 2**20:.1f}" if name.startswith("pymoe, EP 2") else "",
                ratio(cell, ALONE, name, 1, inverse=True),
                ratio(cell, PEER, name, 1),
                ratio(cell, PEER_MOVES, name, 1),
                cell["verdicts"][name],
            ]
        )
    heading = [
        *("system", "ms a step", "processor ms, all ranks", "of these gloo's threads", "ms that a rank waits"),
        "MiB that it sends",
        *("processor over one process", f"{PEER} over it", f"{PEER_MOVES} over it", "results"),
    ]
    return Table(heading, rows, left=frozenset({"system", "results"}), alarms=frozenset({"WRONG"}))


def ratio(cell: Record, one: str, other: str, column: int, *, inverse: bool = False) -> str:
    """Return the median and the quartiles of the ratio of ``one`` to ``other``, taken round by round."""
    pairs = [(a[column], b[column]) for a, b in zip(cell["times"][one], cell["times"][other], strict=True)]
    spread = Quartiles.of([b / a if inverse else a / b for a, b in pairs])
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def wire_table(records: list[Record]) -> Table:
    """Return a table of forward and backward times, compared with the best that the order of chunks allows."""
    rows = []
    for one in records:
        cells = [str(one["chunks"])]
        for number in range(2):
            seconds, best = one["seconds"][number], one["best"][number]
            over = seconds / records[0]["seconds"][number]
            cells += [f"{seconds * 1e3:.1f}", f"{best * 1e3:.1f}", f"{best / seconds:.0%}", f"{over:.2f}"]
        rows.append(cells)
    heading = ["chunks"]
    for name in ("forward", "backward"):
        heading += [f"{name} ms", f"best {name}", f"share of best {name}", f"{name} over 1 chunk"]
    return Table(heading, rows)


def hot_table(ways: dict[str, Record]) -> Table:
    """Return a table of the fullest rank's rows and processor time, with ratios taken within rounds."""
    rows = []
    for name, way in ways.items():
        wall, fullest, both = (list(column) for column in zip(*way["times"], strict=True))
        plain = [one[1] for one in ways[hot_experts.AS_IT_IS]["times"]]
        over = Quartiles.of([a / b for a, b in zip(fullest, plain, strict=True)])
        rows.append(
            [
                name,
                f"{max(way['rows']) * len(way['rows']) / sum(way['rows']):.2f}",
                f"{statistics.median(wall) * 1e3:.1f}",
                f"{statistics.median(fullest) * 1e3:.1f}",
                f"{statistics.median(both) * 1e3:.1f}",
                f"{over.median:.2f} ({over.low:.2f} to {over.high:.2f})",
                "exact" if way["exact"] else "WRONG",
            ]
        )
    heading = [
        *("experts", "fullest rank's rows over the mean", "ms a step", "processor ms, fullest rank"),
        *("processor ms, all ranks", "fullest rank over as it is", "results"),
    ]
    return Table(heading, rows, left=frozenset({"experts", "results"}), alarms=frozenset({"WRONG"}))


def markdown(result: Record, tables: dict[str, Table]) -> str:
    """Return the report as Markdown."""
    about = (
        "Two ranks over gloo on one machine, forward and backward in float32; medians, and ratios of processor time "
        "within a round with quartiles. Ranks of one machine share its memory and cores, so a step's wall time is no "
        "measure of two machines."
    )
    return as_report([measured(result, about, "one thread a rank")], tables.items())


if __name__ == "__main__":
    sys.exit(main())
