"""Starts an example in several processes."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def command_of(example, processes, *options):
    """Return the command that runs the example, and its environment; torchrun starts several processes alone."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(ranks if processes > 1 else []), str(EXAMPLES / example), *options]
    return command, os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}


def torchrun(example, processes, *options):
    """Run the example; return its exit status and its output."""
    command, environment = command_of(example, processes, *options)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return run.returncode, run.stdout + run.stderr
