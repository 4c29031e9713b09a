"""Measures the minimum seconds for handing work from one thread to another."""

from __future__ import annotations

import queue
import threading
import time

from pymoe._runtime import WorkerPool


def between_threads(turns: int) -> float:
    """Return the seconds that a handover between two Python threads takes, using two queues."""
    there: queue.SimpleQueue[bool] = queue.SimpleQueue()
    back: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def echo() -> None:
        while there.get():
            back.put(True)

    other = threading.Thread(target=echo)
    other.start()
    start = time.perf_counter()
    for _ in range(turns):
        there.put(True)
        back.get()
    took = time.perf_counter() - start
    there.put(False)
    other.join()
    return took / (2 * turns)


def to_worker(turns: int) -> float:
    """Return the seconds that a handover to or from a worker of the runtime takes."""
    with WorkerPool(1) as pool:
        pool.submit(int).result()
        start = time.perf_counter()
        for _ in range(turns):
            pool.submit(int).result()
        return (time.perf_counter() - start) / (2 * turns)
