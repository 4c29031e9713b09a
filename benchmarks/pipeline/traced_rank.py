"""Runs one rank of a captured model's pipeline: ``python -m benchmarks.pipeline.traced_rank RANK WORLD FILE``.

The model is captured and split by ``pymoe.pipeline`` or by torch's ``pipeline``; in both cases torch's schedule runs
the stages over gloo. Requests and answers are those of :mod:`.torch_rank`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.pipelining as pipelining

import pymoe
from benchmarks.pipeline import torch_orders
from benchmarks.pipeline.torch_rank import Scheduled, serve_rank
from benchmarks.pipeline.traced_work import TracedCase, loss


class Captured(Scheduled):
    """Runs steps of a captured model."""

    def __init__(self, request: dict[str, Any], rank: int, world: int) -> None:
        case = TracedCase(**request["open"])
        name, count = request["schedule"], request["stages"]
        x, _ = case.batch()
        example = x[: len(x) // case.micro_batches]
        whose: Any = pymoe if request["system"] == "pymoe" else pipelining
        spec = dict.fromkeys(case.beginnings(count), whose.SplitPoint.BEGINNING)
        options = {"checkpoint": "never"} if whose is pymoe else {}  # torch's stages never recompute a forward
        pipe = whose.pipeline(case.model(), (example,), split_spec=spec, **options)
        own = [i for i in range(count) if torch_orders.rank_of(name, world, i) == rank]
        parts = {i: pipe.build_stage(i, torch.device("cpu")) for i in own}
        super().__init__(case, name, parts, count, loss, [part.submod for part in parts.values()])


if __name__ == "__main__":
    serve_rank(Captured)
