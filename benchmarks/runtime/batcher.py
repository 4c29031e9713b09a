"""Implements a simple batcher without a library: a queue, a thread that drains it, and futures."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from benchmarks.runtime.clients import Ask, AskAsync
from benchmarks.runtime.scenario import Expert


class Batcher:
    """Runs a function on batches of all waiting requests, up to about ``most_rows`` rows per batch."""

    def __init__(self, function: Callable[..., Tensor], lock: threading.Lock, most_rows: int = 4096) -> None:
        self.function, self.lock, self.most_rows = function, lock, most_rows
        self.queue: queue.Queue[tuple[tuple[Tensor, ...], Future[Tensor]] | None] = queue.Queue()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def submit(self, *tensors: Tensor) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        self.queue.put((tensors, future))
        return future

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()

    def serve(self) -> None:
        while (first := self.queue.get()) is not None:
            batch, rows, last = [first], len(first[0][0]), False
            while rows < self.most_rows:
                try:
                    one = self.queue.get_nowait()
                except queue.Empty:
                    break
                if one is None:
                    last = True
                    break
                batch.append(one)
                rows += len(one[0][0])
            self.run(batch)
            if last:
                return

    def run(self, batch: list[tuple[tuple[Tensor, ...], Future[Tensor]]]) -> None:
        try:
            inputs = [torch.cat(column) for column in zip(*(tensors for tensors, _ in batch), strict=True)]
            with self.lock:
                outputs = self.function(*inputs).split([len(tensors[0]) for tensors, _ in batch])
        except Exception as error:
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), output in zip(batch, outputs, strict=True):
            future.set_result(output)


class BatcherServer:
    """A batcher for each direction of an expert; forward and update of the expert never overlap."""

    def __init__(self, expert: Expert) -> None:
        lock = threading.Lock()
        self.batchers = {"forward": Batcher(expert.forward, lock), "backward": Batcher(expert.backward, lock)}

    def ask(self, direction: str) -> Ask:
        submit = self.batchers[direction].submit
        return lambda *tensors: submit(*tensors).result()

    def ask_async(self, direction: str) -> AskAsync:
        submit = self.batchers[direction].submit

        def ask(*tensors: Tensor) -> Awaitable[Tensor]:
            return asyncio.wrap_future(submit(*tensors))

        return ask

    def close(self) -> None:
        for batcher in self.batchers.values():
            batcher.close()
