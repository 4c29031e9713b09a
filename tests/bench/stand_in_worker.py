"""A worker like the workers of peers, with the plain batcher instead of hivemind: see test_children.py."""

import time

from benchmarks.runtime.batcher import BatcherServer
from benchmarks.runtime.serving import InProcess, check
from benchmarks.runtime.worker import answer_lines


def served(expert):
    print("what a library prints must not come between the answers")
    return InProcess(BatcherServer(expert), expert, time.process_time)


if __name__ == "__main__":
    answer_lines(served, lambda: check(BatcherServer))
