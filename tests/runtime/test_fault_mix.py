"""Ten thousand requests, many of which fail: every kept future resolves once, and correctly."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError

import torch
from limits import LONG
from torch import Tensor

from pymoe.runtime import Future, Runtime, TaskPool

CLIENTS, REQUESTS = 8, 1250


class Planted(Exception):
    pass


def process(x: Tensor) -> Tensor:
    """Double the input; a negative row raises, and a huge one is slow."""
    if (x < 0).any():
        raise Planted
    if (x > 1e6).any():
        time.sleep(0.002)
    return x * 2


def test_every_kept_future_resolves_once_with_the_right_outcome() -> None:
    """Of the requests, 10 % raise, 5 % are cancelled, 5 % of the futures are dropped, and 1 % are slow."""
    pool = TaskPool(process, name="mix", max_batch_size=16, isolate=True, capacity=500)
    counts: Counter[str] = Counter()
    resolved: Counter[int] = Counter()
    wrong: list[str] = []
    alive: list[Future] = []  # all kept futures, so that IDs stay unique
    lock = threading.Lock()

    def check(future: Future, value: float, cancelled: bool) -> str:
        try:
            result = future.result(LONG)
        except Planted:
            return "raised" if value < 0 else f"{value} raised"
        except CancelledError:
            return "cancelled" if cancelled else f"{value} was cancelled"
        if torch.equal(result, torch.full((1, 4), value * 2)) and value >= 0 and not cancelled:
            return "right"
        return f"{value} came out as {result}"

    def client(number: int) -> None:
        chance = random.Random(number)
        kept: list[tuple[Future, float, bool]] = []

        def count(future: Future) -> None:
            with lock:
                resolved[id(future)] += 1

        for _ in range(REQUESTS):
            kind = chance.random()
            value = -1.0 if kind < 0.10 else 2e6 if kind < 0.11 else float(chance.randrange(1000))
            future = pool.submit_task(torch.full((1, 4), value))
            if 0.2 < kind < 0.25:
                del future
                continue
            future.add_done_callback(count)
            kept.append((future, value, 0.3 < kind < 0.35 and future.cancel()))
            if len(kept) >= 50:
                tally(kept)
                kept.clear()
        tally(kept)

    def tally(kept: list[tuple[Future, float, bool]]) -> None:
        outcomes = [check(*one) for one in kept]
        with lock:
            for outcome in outcomes:
                counts[outcome] += 1
                if outcome not in ("right", "raised", "cancelled"):
                    wrong.append(outcome)
            alive.extend(future for future, _, _ in kept)

    with Runtime([pool], num_workers=2) as runtime:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in threads)
        runtime.shutdown()
        stats = runtime.stats()["mix"]
    assert not wrong, wrong[:5]
    assert resolved == Counter(map(id, alive)), "a callback of each, once"
    assert counts["right"] > 7000
    assert counts["raised"] > 800
    assert stats.submitted == CLIENTS * REQUESTS == stats.completed + stats.failed + stats.cancelled
    assert stats.cancelled == counts["cancelled"]
    assert stats.queued == stats.running == 0
