"""What the servers of this benchmark serve: ``python -m pymoe.remote serve benchmarks.remote.served:make``.

A peer's own process reads this file too, for :class:`Echo`: it needs torch alone for that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.runtime.scenario import Expert

ECHO_WIDTH = 1 << 14
"""Numbers of a row of :class:`Echo`: 64 KiB."""


class Echo(nn.Module):
    """Returns its rows, so that messages are all that takes time."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x


def make() -> list[Any]:
    """Return the small expert of benchmarks/runtime, and the echo."""
    from pymoe.runtime import BatchTensorProto, ExpertBackend

    expert = Expert("small")
    row, wide = BatchTensorProto(expert.hidden), BatchTensorProto(ECHO_WIDTH)
    return [
        ExpertBackend("expert", expert.module, expert.optimizer, args_schema=[row], outputs_schema=row),
        ExpertBackend("echo", Echo(), None, args_schema=[wide], outputs_schema=wide),
    ]
