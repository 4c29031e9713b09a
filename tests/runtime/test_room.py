"""Waiting for room in a full pool, without a request."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from limits import LONG

from pymoe.runtime import Runtime, TaskPool


def test_a_wait_for_room_ends_when_there_is_room_or_the_time_is_over_or_the_pool_closes() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def held(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert go_on.wait(LONG)
        return x

    pool = TaskPool(held, name="held", capacity=1, max_batch_size=1)
    x = torch.ones(1, 2)
    assert pool._wait_for_room(0.0)
    with Runtime([pool]):
        requests = [pool.submit_task(x)]
        assert begun.wait(LONG)
        requests.append(pool.submit_task(x))
        before = time.monotonic()
        assert not pool._wait_for_room(0.05)
        assert time.monotonic() - before >= 0.05
        found: list[bool] = []
        waiting = threading.Thread(target=lambda: found.append(pool._wait_for_room(LONG)))
        waiting.start()
        go_on.set()
        waiting.join(LONG)
        assert found == [True]
        for request in requests:
            request.result()
        assert pool._wait_for_room(0.0)
    with pytest.raises(RuntimeError, match="closed"):
        pool._wait_for_room(LONG)
