"""Runs functions of the tests in the processes of a gloo group.

Starting processes takes seconds, so one group of each size serves all tests; after a failure a new group is started. A
rank reads one request per line from its standard input, and answers each with one line: the function's result or error.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PATIENCE = 300  # maximum seconds to wait for answers, enough for many processes on one core


def place_of(function):
    """Return the folder and the file that contain a function, and the function's name there."""
    file = Path(function.__code__.co_filename)
    return str(file.parent), file.stem, function.__qualname__


def function_at(folder, module, name):
    """Import and return the function that :func:`place_of` described, in another process."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return getattr(importlib.import_module(module), name)


class Ranks:
    """A group of ``world`` processes."""

    def __init__(self, world):
        self.world = world
        self._processes = []
        self._folder = None

    def start(self):
        if self._processes:
            return
        self._folder = tempfile.TemporaryDirectory()
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        for rank in range(self.world):
            command = [sys.executable, "-X", "faulthandler", __file__, str(rank), str(self.world), self._folder.name]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
            self._processes.append(process)

    def run(self, function, /, **options):
        """Return the result of ``function(rank, world, **options)`` on every rank; options must be JSON values."""
        answers = self.ask(function, **options)
        failures = [answer["failure"] for answer in answers if "failure" in answer]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [answer["result"] for answer in answers]

    def ask(self, function, /, **options):
        """Run the function as :meth:`run` does; return ``{"result": ...}`` or ``{"failure": text}`` of every rank."""
        self.start()
        case = place_of(function)
        line = json.dumps({"case": case, "options": options}).encode() + b"\n"
        for process in self._processes:
            process.stdin.write(line)
            process.stdin.flush()
        answers, deadline = {}, time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.world:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    said = self.close()
                    raise AssertionError(f"{case}: no answer of all ranks in {PATIENCE} s; {answers}; {said}")
                for key, _ in events:
                    line = key.fileobj.readline()
                    if not line:
                        said = self.close()
                        raise AssertionError(f"{case}: rank {key.data} has ended; {answers}; {said}")
                    selector.unregister(key.fileobj)
                    answers[key.data] = json.loads(line)
        return [answers[rank] for rank in range(self.world)]

    def close(self):
        """End the processes, and return their standard error."""
        for process in self._processes:
            process.kill()
        said = "\n".join(process.communicate()[1].decode(errors="replace")[-3000:] for process in self._processes)
        self._processes = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        return said


def main():
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:0] = [str(ROOT), str(TESTS), str(TESTS / "pipe")]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    patience = timedelta(seconds=PATIENCE - 20)
    dist.init_process_group("gloo", f"file://{folder}/meeting", timeout=patience, rank=rank, world_size=world)
    for line in sys.stdin:
        request = json.loads(line)
        torch.manual_seed(0)
        try:
            result = function_at(*request["case"])(rank, world, **request["options"])
            answer = {"result": result}
        except BaseException:
            answer = {"failure": f"rank {rank}: {traceback.format_exc()}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
