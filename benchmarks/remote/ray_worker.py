"""Serves the same expert from a Ray actor, with one call per request, in a separate virtual environment.

    python -m benchmarks.remote.ray_worker EXPERT

It speaks the protocol of benchmarks/runtime/worker.py. Without arguments it prints Ray's version.
"""

from __future__ import annotations

import sys
import time

import ray
import torch
from torch import Tensor

from benchmarks.runtime.clients import Ask
from benchmarks.runtime.scenario import Expert
from benchmarks.runtime.serving import InProcess
from benchmarks.runtime.worker import answer_lines


class Actor:
    """Serves the expert."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        self.expert = Expert(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert.forward(x)

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        return self.expert.backward(x, grad)


class RayServer:
    """Starts a local Ray with the actor, and sends requests to it."""

    def __init__(self, expert: Expert) -> None:
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        self.actor = ray.remote(Actor).options(max_concurrency=1).remote(expert.name)

    def ask(self, direction: str) -> Ask:
        method = getattr(self.actor, direction)
        return lambda *tensors: ray.get(method.remote(*tensors))

    def close(self) -> None:
        ray.shutdown()


def main() -> None:
    if len(sys.argv) == 1:
        print(ray.__version__)
        return
    answer_lines(lambda expert: InProcess(RayServer(expert), expert, time.process_time))


if __name__ == "__main__":
    main()
