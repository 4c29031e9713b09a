"""Losses and times of a run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class History:
    """What a run measured, one entry a step."""

    loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        """Of a step; the first is left out, which makes what later ones find."""
        return statistics.median(self.seconds[1:] or self.seconds)
