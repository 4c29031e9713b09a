"""pymoe's runtime: an :class:`ExpertBackend` as a user has it, and the bare :class:`TaskPool` below it."""

from __future__ import annotations

from collections.abc import Awaitable

from torch import Tensor

from benchmarks.runtime.clients import Ask, AskAsync
from benchmarks.runtime.scenario import Expert


class BackendServer:
    """An expert behind an ExpertBackend: schemas, forward, backward and the optimizer's step are the backend's."""

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
    """The very functions that the queue-and-thread batcher runs, each behind a TaskPool; one worker for both."""

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
