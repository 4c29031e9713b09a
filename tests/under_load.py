"""Runs a command while other processes keep every core busy, since tests must also pass on a busy machine.

    python tests/under_load.py [--processes 12] [--rounds 3] -- COMMAND [ARGUMENT ...]

The exit status is 0, or the status of the first round that fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

# Each busy process also writes memory, so that caches are contended as well as cores. It ends after its parent.
BUSY = """
import os
parent = os.getppid()
block = bytearray(1 << 20)
number = 0
while number % 1000 or os.getppid() == parent:
    number += 1
    block[:] = bytes(len(block))
"""


def run_under_load(command: list[str], processes: int) -> tuple[int, float]:
    """Run ``command`` together with ``processes`` busy processes; return its exit status and the load average at its
    end.
    """
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        status = subprocess.run(command, check=False).returncode
        return status, os.getloadavg()[0]
    finally:
        for process in busy:
            process.send_signal(signal.SIGKILL)
        for process in busy:
            process.wait()


def main() -> int:
    """Run the rounds one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=12, help="busy processes beside the command (default: 12)")
    parser.add_argument("--rounds", type=int, default=1, help="how often the command runs (default: 1)")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="what to run, with its arguments")
    options = parser.parse_args()
    for number in range(1, options.rounds + 1):
        start = time.monotonic()
        status, load = run_under_load(options.command, options.processes)
        minutes = (time.monotonic() - start) / 60
        print(
            f"round {number} of {options.rounds}: exit status {status}, {minutes:.1f} min, load {load:.1f}", flush=True
        )
        if status != 0:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
