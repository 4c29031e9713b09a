"""Serves the expert with pymoe's runtime: by an :class:`ExpertBackend`, and by the :class:`TaskPool` below it."""

from __future__ import annotations

from collections.abc import Awaitable

from torch import Tensor

from benchmarks.runtime.clients import Ask, AskAsync
from benchmarks.runtime.scenario import Expert


class BackendServer:
    """Serves an expert with an ExpertBackend, which does the checks, forward, backward and the optimizer's step."""

    def __init__(self, expert: Expert) -> None:
        from pymoe.runtime import BatchTensorProto, ExpertBackend, Runtime

        row = BatchTensorProto(expert.hidden)
        self.backend = ExpertBackend("expert", expert.module, expert.optimizer, args_schema=(row,), outputs_schema=row)
        self.pools = {"forward": self.backend.forward_pool, "backward": self.backend.backward_pool}
        self.runtime = Runtime({"expert": self.backend})
        self.runtime.start()

    def ask(self, direction: str) -> Ask:
        submit = self.pools[direction].submit_task
        return lambda *tensors: submit(*tensors).result()[0]

    def ask_async(self, direction: str) -> AskAsync:
        submit = self.pools[direction].submit_task

        async def ask(*tensors: Tensor) -> Tensor:
            return (await submit(*tensors))[0]

        return ask

    def close(self) -> None:
        self.runtime.shutdown()


class PoolServer:
    """Serves the functions that the simple batcher runs, with one TaskPool for each and one worker for both."""

    def __init__(self, expert: Expert) -> None:
        from pymoe.runtime import Runtime, TaskPool

        self.pools = {
            "forward": TaskPool(expert.forward, name="forward"),
            "backward": TaskPool(expert.backward, name="backward"),
        }
        self.runtime = Runtime(list(self.pools.values()), num_workers=1)
        self.runtime.start()

    def ask(self, direction: str) -> Ask:
        submit = self.pools[direction].submit_task
        return lambda *tensors: submit(*tensors).result()

    def ask_async(self, direction: str) -> AskAsync:
        submit = self.pools[direction].submit_task

        def ask(*tensors: Tensor) -> Awaitable[Tensor]:
            return submit(*tensors)

        return ask

    def close(self) -> None:
        self.runtime.shutdown()
