"""Time calls that are so short that host code, not kernels, takes most of the time; list a layer's native calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from pymoe.bench.timing import Quartiles, WallTimer, measure
from pymoe.nn import MoE

ROW = 50
"""Calls in a row within a Python loop; many, since the first calls after another candidate find cold caches."""

Call = Callable[[], object]
Key = TypeVar("Key")


def microseconds(candidates: Mapping[Key, Call], budget: float) -> dict[Key, Quartiles]:
    """Return the processor time of one thread for one call of each candidate; candidates take turns, many calls each.

    Args:
        candidates: functions without arguments.
        budget: seconds for all of them together.
    """

    def in_a_row(call: Call) -> Call:
        def calls() -> None:
            for _ in range(ROW):
                call()

        return calls

    rows = {str(index): in_a_row(call) for index, call in enumerate(candidates.values())}
    timings = measure(rows, budget=budget, timer=WallTimer(time.thread_time))
    return {key: timings[str(index)].spread.scaled(1e6 / ROW) for index, key in enumerate(candidates)}


def native_calls(layer: MoE, x: Tensor) -> Call:
    """Return a function that makes only the native calls of a plain layer without gradients.

    Args:
        layer: a layer with the default options.
        x: the tokens, (T, H).
    """
    native: Any = torch.ops.pymoe
    router, w_in, w_out = (weight.detach() for weight in (layer.router.weight, layer.experts.w_in, layer.experts.w_out))

    def calls() -> None:
        logits = F.linear(x, router)
        weights, chosen, _ = native.gate_topk.default(logits, None, layer.top_k, "softmax", True, 0, 0, 1.0)
        native.apply_experts.default(x, chosen, weights, w_in, None, w_out, None, 0, None, False)

    return calls
