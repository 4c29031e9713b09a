"""What the processes of peers have in common: lines of JSON in and out, and what the system says of processes.

A worker reads a request a line from standard input and answers each with a line: ``{"cell": …, "effort": …}`` with a
sample, ``{"check": true}`` with what is wrong. It ends with its input. Needs torch and the standard library alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.runtime.clients import Effort
from benchmarks.runtime.scenario import Cell, Expert
from benchmarks.runtime.serving import InProcess

TICKS = os.sysconf("SC_CLK_TCK")


def answer_lines(contender_of: Callable[[Expert], InProcess], check: Callable[[], str] | None = None) -> None:
    """Serve the expert that the command line names, and measure what is asked for, until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed must not come between the replies
    torch.set_num_threads(1)
    contender = contender_of(Expert(sys.argv[1]))
    for line in sys.stdin:
        wanted = json.loads(line)
        if check is not None and "check" in wanted:
            reply: object = check()
        else:
            reply = asdict(contender.measure(Cell(**wanted["cell"]), Effort(**wanted["effort"])))
        print(json.dumps(reply), file=replies, flush=True)
    contender.close()


def group_and_seconds(process: int | str) -> tuple[int, float]:
    """The group of a process, and the seconds of processor time that it has had; raises OSError where it is gone."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[2]), (int(fields[11]) + int(fields[12])) / TICKS
