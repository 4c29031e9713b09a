"""Measure many callers of an expert in another process: pymoe.remote, the expert in process, hivemind and Ray.

    python -m benchmarks.remote_load [--quick] [--systems 'NAME;...'] [--output DIR]

Everything is on this machine, over loopback. Closed-loop threads call the small expert of benchmarks/runtime with one
row at a time; measurement windows of all systems take turns, answers are checked, and ratios are taken between windows
of the same round. Then messages of several lengths go to an expert that returns its input. Writes JSON and Markdown
tables. `make bench-remote` sets up the environments of the peers, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.run import Run, Sections, as_report, measured, names_of, parser_of, show_sections
from benchmarks.common.targets import checked_target, targets_table
from benchmarks.remote.ours import RemoteServer
from benchmarks.remote.served import ECHO_WIDTH
from benchmarks.runtime.clients import Effort
from benchmarks.runtime.hivemind_peer import PYTHON, HivemindProcess, version
from benchmarks.runtime.ours import BackendServer
from benchmarks.runtime.report import in_short, rate
from benchmarks.runtime.scenario import Cell, Expert
from benchmarks.runtime.serving import Contender, InProcess
from benchmarks.runtime_load import record_of, windows
from pymoe.bench.report import Table, in_a_line

LOCAL, DIRECT, COALESCED, SECURE = "in process", "direct", "coalesced", "coalesced, TLS"
HIVEMIND, RAY = "hivemind", "Ray actor"
WORKERS = {HIVEMIND: "benchmarks.remote.hivemind_worker", RAY: "benchmarks.remote.ray_worker"}
RAY_PYTHON = PYTHON.parents[2] / "ray" / "bin" / "python"
CELLS = [Cell("small", way, 1, clients, "threads") for way in ("forward", "backward") for clients in (1, 8, 64)]
EFFORT, QUICK = Effort(0.2, 0.8), Effort(0.05, 0.2)
MESSAGES = {"64 KiB": 1, "256 KiB": 4, "4 MiB": 64, "64 MiB": 1024}
"""Lengths of messages to the echo expert, and their numbers of rows, of 64 KiB each."""
TARGETS = (
    (COALESCED, HIVEMIND, "forward", 64, 30.0),
    (COALESCED, HIVEMIND, "backward", 64, 20.0),
    (COALESCED, HIVEMIND, "forward", 8, 8.0),
    (COALESCED, HIVEMIND, "forward", 1, 4.0),
    (COALESCED, LOCAL, "forward", 64, 0.6),
    (SECURE, COALESCED, "forward", 64, 0.8),
)
"""For each target: two systems, the direction, the number of clients, and the minimum ratio of the first system's rate
to the second's."""
Record = dict[str, Any]


def main() -> int:
    """Measure the chosen systems; return 1 if any system's answer is wrong."""
    options = parse()
    torch.set_num_threads(1)
    rounds = options.rounds or (2 if options.quick else 5)
    effort = QUICK if options.quick else EFFORT
    run = Run("remote_load", options.output, asdict(effort) | {"rounds": rounds}, absent={}, versions={})
    result = run.result
    contenders: dict[str, Contender] = {}
    for name in options.systems:
        try:
            contenders[name] = open_system(name, options, result["versions"])
        except Exception as error:  # a peer that fails must not keep the others from being measured
            result["absent"][name] = in_a_line(error)
    print(f"measured: {', '.join(contenders)}; not: {result['absent']}", file=sys.stderr, flush=True)
    result["cells"] = [measure(cell, contenders, effort, rounds) for cell in CELLS]
    result["messages"] = messages(contenders, 1 if options.quick else 5)
    for one in contenders.values():
        one.close()
    result["targets"] = judged(result["cells"])
    run.keep(markdown)
    show_sections(sections(result))
    return int(any(one["verdict"] == "WRONG" for cell in result["cells"] for one in cell["systems"].values()))


def parse() -> argparse.Namespace:
    """Return the options."""
    names = [LOCAL, DIRECT, COALESCED, SECURE, HIVEMIND, RAY]
    parser = parser_of("remote_load", __doc__)
    parser.add_argument("--quick", action="store_true", help="short windows, and few")
    parser.add_argument(
        "--systems", type=names_of(names, ";"), default=names, metavar="NAME;...", help=f"of {'; '.join(names)}"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="windows of each system in a cell (default: 5)")
    parser.add_argument("--hivemind", type=Path, default=PYTHON, metavar="PYTHON", help="the interpreter that has it")
    parser.add_argument("--ray", type=Path, default=RAY_PYTHON, metavar="PYTHON", help="the interpreter that has it")
    return parser.parse_args()


def open_system(name: str, options: argparse.Namespace, versions: dict[str, str]) -> Contender:
    """Start a system; raise the error that keeps it from starting."""
    if name in WORKERS:
        python = options.hivemind if name == HIVEMIND else options.ray
        versions[name] = version(python, WORKERS[name])
        return HivemindProcess("small", python, WORKERS[name])
    expert = Expert("small")
    if name == LOCAL:
        return InProcess(BackendServer(expert), expert, time.process_time)
    server = RemoteServer(coalesce=name != DIRECT, secure=name == SECURE)
    return InProcess(server, expert, server.cpu)


def measure(cell: Cell, contenders: dict[str, Contender], effort: Effort, rounds: int) -> Record:
    """Return the figures of a cell; windows of all contenders take turns."""
    samples = windows([(cell, name) for name in contenders], contenders, effort, rounds)
    record = record_of(cell, {name: own for (_, name), own in samples.items()})
    print(in_short(record), file=sys.stderr, flush=True)
    return record


def messages(contenders: dict[str, Contender], rounds: int) -> list[Record]:
    """Return one caller's bytes per second, there and back, for each length: medians over calls that take turns."""
    pools = {name: one.server.echo for name, one in contenders.items() if hasattr(getattr(one, "server", None), "echo")}
    found = []
    for name, rows in MESSAGES.items():
        x = torch.randn(rows, ECHO_WIDTH)
        times: dict[str, list[float]] = {system: [] for system in pools}
        for i in range(rounds + 1):
            for system, pool in pools.items():
                begin = time.perf_counter()
                pool.submit_task(x).result()
                taken = time.perf_counter() - begin
                times[system] += [taken] if i else []  # the first call warms up
        rates = {system: 2 * x.nbytes / statistics.median(taken) for system, taken in times.items()}
        found.append({"message": name, "bytes_per_second": rates})
    return found


def judged(cells: list[Record]) -> list[Record]:
    """Return the targets, each with whether it was reached."""
    targets = []
    for mine, other, way, clients, wanted in TARGETS:
        own = (one for one in cells if (one["cell"]["direction"], one["cell"]["clients"]) == (way, clients))
        found = next((one["systems"].get(mine, {}).get("over", {}).get(other) for one in own), None)
        targets.append(checked_target(f"{mine} / {other}, {way}, {clients}", ">=", wanted, found))
    return targets


def sections(result: Record) -> Sections:
    """Yield all tables with their headings."""
    names = list(result["cells"][0]["systems"])
    rows = [
        [one["cell"]["direction"], str(one["cell"]["clients"]), *(rate(one, name) for name in names)]
        for one in result["cells"]
    ]
    yield "Requests of one row per second [quartiles]", Table(["pass", "callers", *names], rows, frozenset({"pass"}))
    if result["messages"]:
        systems = list(result["messages"][0]["bytes_per_second"])
        rows = [
            [one["message"], *(f"{one['bytes_per_second'][name] / 1e6:,.0f}" for name in systems)]
            for one in result["messages"]
        ]
        heading = "Messages: megabytes per second, there and back, of one caller"
        yield heading, Table(["message", *systems], rows, frozenset({"message"}))
    yield "Targets: requests per second of one over another's", targets_table(result["targets"])


def markdown(result: Record) -> str:
    """Return the report of the run as Markdown."""
    peers = ", ".join(f"{name} {number}" for name, number in result["versions"].items()) or "none"
    about = f"Medians. Peers: {peers}; absent: {result['absent'] or 'nobody'}."
    return as_report(["# Experts of another process", "", measured(result, about)], sections(result))


if __name__ == "__main__":
    sys.exit(main())
