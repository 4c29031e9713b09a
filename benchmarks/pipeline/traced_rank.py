"""One rank of a captured model's pipeline: ``python -m benchmarks.pipeline.traced_rank RANK WORLD FILE``.

Whoever captures, ``pymoe.pipeline`` or torch's own, gives stages that the same schedule of torch's runs over gloo. It
is asked on standard input and answers on standard output, as :mod:`.torch_rank`, whose loop it runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.pipelining as pipelining
from torch.distributed.pipelining import schedules as torch_schedules

import pymoe
from benchmarks.pipeline import torch_orders
from benchmarks.pipeline.torch_rank import serve_rank, spans_of
from benchmarks.pipeline.traced_work import TracedCase, loss
from benchmarks.pipeline.work import gradients, largest_error, reference


class Captured:
    """A schedule's steps, as this rank runs them."""

    def __init__(self, request: dict[str, Any], rank: int, world: int) -> None:
        self.case = TracedCase(**request["open"])
        name, count = request["schedule"], request["stages"]
        self.own = [i for i in range(count) if torch_orders.rank_of(name, world, i) == rank]
        x, y = self.case.batch()
        example = x[: len(x) // self.case.micro_batches]
        whose: Any = pymoe if request["system"] == "pymoe" else pipelining
        spec = dict.fromkeys(self.case.beginnings(count), whose.SplitPoint.BEGINNING)
        options = {"checkpoint": "never"} if whose is pymoe else {}  # as torch's stages, which repeat no forward
        pipe = whose.pipeline(self.case.model(), (example,), split_spec=spec, **options)
        self.stages = [pipe.build_stage(i, torch.device("cpu")) for i in self.own]
        schedule = getattr(torch_schedules, name)
        single = issubclass(schedule, torch_schedules.PipelineScheduleSingle)
        self.schedule = schedule(self.stages[0] if single else self.stages, self.case.micro_batches, loss_fn=loss)
        self.inputs = (x,) if 0 in self.own else ()
        self.target = {"target": y} if count - 1 in self.own else {}

    def run(self) -> None:
        self.schedule.step(*self.inputs, **self.target, return_outputs=False)

    def clear(self) -> None:
        for stage in self.stages:
            for parameter in stage.submod.parameters():
                parameter.grad = None

    def check(self) -> dict[str, Any]:
        """Check the second step: torch's first runs an additional forward to learn shapes."""
        self.run()
        self.clear()
        self.run()
        expected = reference(self.case)
        return {"error": max(largest_error(gradients(stage.submod), expected) for stage in self.stages)}

    def step(self) -> dict[str, Any]:
        """Return what :func:`spans_of` does."""
        return spans_of(self.clear, self.run, self.case.repeats)


if __name__ == "__main__":
    serve_rank(Captured)
