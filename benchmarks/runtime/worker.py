"""Implements the protocol of peers' processes, and reads processor times from ``/proc``.

A worker reads one JSON request per line from standard input and answers each with one line: ``{"cell": …, "effort":
…}`` with a sample, ``{"check": true}`` with the first fault. It ends when its input ends. This file imports only torch
and the standard library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.children import serve
from benchmarks.runtime.clients import Effort
from benchmarks.runtime.scenario import Cell, Expert
from benchmarks.runtime.serving import InProcess

TICKS = os.sysconf("SC_CLK_TCK")


def answer_lines(contender_of: Callable[[Expert], InProcess], check: Callable[[], str] | None = None) -> None:
    """Serve the expert that the command line names, and answer requests until the input ends."""
    torch.set_num_threads(1)
    opened: list[InProcess] = []

    def answer(wanted: dict[str, Any]) -> Any:
        if check is not None and "check" in wanted:
            return check()
        return asdict(opened[0].measure(Cell(**wanted["cell"]), Effort(**wanted["effort"])))

    def start() -> Callable[[dict[str, Any]], Any]:
        opened.append(contender_of(Expert(sys.argv[1])))
        return answer

    serve(start)
    opened[0].close()


def group_and_seconds(process: int | str) -> tuple[int, float]:
    """Return the group of a process and its processor seconds; raise OSError if the process has ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[2]), (int(fields[11]) + int(fields[12])) / TICKS
