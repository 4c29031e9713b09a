"""Runs hivemind's runtime and its clients in one process, in a separate virtual environment.

    python -m benchmarks.runtime.hivemind_worker EXPERT

It speaks the protocol of benchmarks/runtime/worker.py. Without arguments it prints hivemind's version.
"""

from __future__ import annotations

import os
import sys
import time

from hivemind import __version__
from hivemind.moe.server.module_backend import ModuleBackend
from hivemind.moe.server.runtime import Runtime
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from torch import Tensor

from benchmarks.runtime.clients import Ask, AskAsync
from benchmarks.runtime.scenario import Expert
from benchmarks.runtime.serving import InProcess, check
from benchmarks.runtime.worker import answer_lines, group_and_seconds


class HivemindServer:
    """Serves an expert with hivemind's task pools and runtime."""

    def __init__(self, expert: Expert) -> None:
        row = BatchTensorDescriptor(expert.hidden)
        self.backend = ModuleBackend(
            "expert",
            expert.module,
            optimizer=expert.optimizer,
            args_schema=(row,),
            outputs_schema=row,
            max_batch_size=4096,
        )
        self.runtime = Runtime({"expert": self.backend})
        self.runtime.start()
        self.runtime.ready.wait()

    def ask(self, direction: str) -> Ask:
        submit = getattr(self.backend, f"{direction}_pool").submit_task
        return lambda *tensors: submit(*tensors).result()[0]

    def ask_async(self, direction: str) -> AskAsync:
        submit = getattr(self.backend, f"{direction}_pool").submit_task

        async def ask(*tensors: Tensor) -> Tensor:
            return (await submit(*tensors))[0]

        return ask

    def cpu(self) -> float:
        """Return processor seconds of this process and its pools' processes."""
        return time.process_time() + sum(group_and_seconds(pool.pid)[1] for pool in self.backend.get_pools())

    def close(self) -> None:
        self.runtime.shutdown()


def served(expert: Expert) -> InProcess:
    server = HivemindServer(expert)
    return InProcess(server, expert, server.cpu)


def main() -> None:
    if len(sys.argv) == 1:
        print(__version__)
        return
    answer_lines(served, lambda: check(HivemindServer))
    os._exit(0)  # some of hivemind's threads and processes would not end otherwise


if __name__ == "__main__":
    main()
