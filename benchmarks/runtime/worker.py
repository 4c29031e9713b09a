"""What the processes of peers have in common: lines of JSON in and out, and what the system says of processes.

A worker reads a request a line from standard input and answers each with a line: ``{"cell": …, "effort": …}`` with a
sample, ``{"check": true}`` with what is wrong. It ends with its input. Needs torch and the standard library alone.
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
    """Serve the expert that the command line names, and measure what is asked for, until the input ends."""
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
    """The group of a process, and the seconds of processor time that it has had; raises OSError where it is gone."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[2]), (int(fields[11]) + int(fields[12])) / TICKS
