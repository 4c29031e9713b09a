"""Defines the experts to serve: ``python -m pymoe.remote serve benchmarks.remote.served:make``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.runtime.scenario import Expert

ECHO_WIDTH = 1 << 14
"""Width of a row of :class:`Echo`: 16,384 float32 numbers, 64 KiB."""


class Echo(nn.Module):
    """Returns its input, so that only the messages take time."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x


def make() -> list[Any]:
    """Return the small expert of benchmarks/runtime, and the expert that returns its input."""
    from pymoe.runtime import BatchTensorProto, ExpertBackend

    expert = Expert("small")
    row, wide = BatchTensorProto(expert.hidden), BatchTensorProto(ECHO_WIDTH)
    return [
        ExpertBackend("expert", expert.module, expert.optimizer, args_schema=[row], outputs_schema=row),
        ExpertBackend("echo", Echo(), None, args_schema=[wide], outputs_schema=wide),
    ]
