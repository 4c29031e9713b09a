"""hivemind's runtime and its clients in a process of their own, with hivemind's own environment.

    python -m benchmarks.runtime.hivemind_worker EXPERT

Reads a request a line from standard input and answers each with a line, both JSON: ``{"cell": …, "effort": …}`` with
a sample, ``{"check": true}`` with what is wrong. Ends with its input. Without arguments it names hivemind's version.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from hivemind import __version__
from hivemind.moe.server.module_backend import ModuleBackend
from hivemind.moe.server.runtime import Runtime
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from torch import Tensor

from benchmarks.runtime.clients import Ask, AskAsync, Effort
from benchmarks.runtime.scenario import Cell, Expert
from benchmarks.runtime.serving import InProcess, check

TICKS = os.sysconf("SC_CLK_TCK")


class HivemindServer:
    """An expert behind hivemind's task pools and runtime."""

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
        """Seconds of processor time of this process and its pools' processes."""
        total = time.process_time()
        for pool in self.backend.get_pools():
            fields = Path(f"/proc/{pool.pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / TICKS
        return total

    def close(self) -> None:
        self.runtime.shutdown()


def main() -> None:
    if len(sys.argv) == 1:
        print(__version__)
        return
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed must not come between the replies
    torch.set_num_threads(1)
    expert = Expert(sys.argv[1])
    server = HivemindServer(expert)
    contender = InProcess(server, expert, server.cpu)
    for line in sys.stdin:
        wanted = json.loads(line)
        if "check" in wanted:
            reply: object = check(HivemindServer)
        else:
            reply = asdict(contender.measure(Cell(**wanted["cell"]), Effort(**wanted["effort"])))
        print(json.dumps(reply), file=replies, flush=True)
    contender.close()
    os._exit(0)  # its threads and processes do not all end by themselves


if __name__ == "__main__":
    main()
