"""Who uses the experts: a training loop, threads, and the coroutines of one event loop; and who watches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pymoe.runtime import Runtime
from pymoe.runtime.monitoring.statistics import PoolStats, StatsReader

from .model import NextByte, Windows

LARGEST_QUESTION = 4  # rows


@dataclass
class History:
    """What was seen over time; times in seconds since the start, losses in nats per byte."""

    start: float = field(default_factory=time.perf_counter)
    trained: list[tuple[float, float]] = field(default_factory=list)
    """(time, loss of the batch) of every training step."""
    asked: list[tuple[float, float, float]] = field(default_factory=list)
    """(time, loss, seconds until the answer) of every question about the unseen text."""
    pools: list[tuple[float, dict[str, PoolStats]]] = field(default_factory=list)
    """(time, recent numbers of every pool)."""

    def now(self) -> float:
        return time.perf_counter() - self.start


def train(
    model: NextByte, text: Tensor, history: History, *, seconds: float, steps: int, rows: int, learning_rate: float
) -> None:
    """An ordinary training loop: nothing in it knows that the experts live elsewhere."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    windows = Windows(text, seed=0)
    while history.now() < seconds and len(history.trained) < steps:
        contexts, targets = windows.draw(rows)
        loss = nn.functional.cross_entropy(model(contexts), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.trained.append((history.now(), loss.item()))


class Load:
    """Questions about the unseen text from ``threads`` threads and ``coroutines`` coroutines, until it is stopped.

    Each pauses for ``pause`` seconds between an answer and its next question.
    """

    def __init__(
        self, model: NextByte, text: Tensor, history: History, *, threads: int, coroutines: int, pause: float
    ) -> None:
        self.model, self.text, self.history, self.pause = model, text, history, pause
        self.ended = threading.Event()
        self.errors: list[BaseException] = []
        jobs: list[Callable[[], None]] = [lambda i=i: self.ask(i) for i in range(threads)]
        if coroutines:
            jobs.append(lambda: asyncio.run(self.ask_together(coroutines)))
        self.threads = [threading.Thread(target=self.guard, args=(job,), daemon=True) for job in jobs]

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()

    def guard(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self.errors.append(error)

    @torch.no_grad()
    def ask(self, seed: int) -> None:
        windows = Windows(self.text, seed=100 + seed)
        while not self.ended.is_set():
            contexts, targets = windows.draw(1 + len(self.history.asked) % LARGEST_QUESTION)
            begin = time.perf_counter()
            self.note(self.model(contexts), targets, begin)
            time.sleep(self.pause)

    async def ask_together(self, coroutines: int) -> None:
        async def one(seed: int) -> None:
            windows = Windows(self.text, seed=200 + seed)
            while not self.ended.is_set():
                contexts, targets = windows.draw(1 + len(self.history.asked) % LARGEST_QUESTION)
                begin = time.perf_counter()
                with torch.no_grad():
                    logits = await self.model.forward_async(contexts)
                self.note(logits, targets, begin)
                await asyncio.sleep(self.pause)

        await asyncio.gather(*(one(i) for i in range(coroutines)))

    def note(self, logits: Tensor, targets: Tensor, begin: float) -> None:
        took = time.perf_counter() - begin
        self.history.asked.append((self.history.now(), nn.functional.cross_entropy(logits, targets).item(), took))


class Watch:
    """Notes the pools' numbers every ``interval`` seconds."""

    def __init__(self, runtime: Runtime, history: History, interval: float) -> None:
        self.reader, self.history, self.interval = StatsReader(runtime.pools, recent=True), history, interval
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def run(self) -> None:
        while not self.ended.wait(self.interval):
            self.history.pools.append((self.history.now(), self.reader.read()))
