"""Pools that count as the native ones do, filled by hand: the numbers of a runtime without a runtime."""

from __future__ import annotations

from typing import Any

from pymoe.runtime.monitoring.statistics import HISTOGRAMS, TOTALS

BUCKETS = 252  # of the native histogram


def bucket(value: int) -> int:
    """Which bucket of the native histogram a value falls into."""
    if value < 4:
        return value
    top = value.bit_length() - 1
    return (top - 1) * 4 + ((value >> (top - 2)) & 3)


class CountedPool:
    """A pool with the given name and nothing counted yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.numbers = dict.fromkeys((*TOTALS, "queued", "queued_rows", "running"), 0)
        self.values: dict[str, list[int]] = {name: [] for name in HISTOGRAMS}

    def add(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self.numbers[name] += number

    def batch(self, requests: int, rows: int, *, wait: float, process: float) -> None:
        """A batch whose requests waited ``wait`` seconds and that took ``process`` seconds."""
        self.add(submitted=requests, completed=requests, batches=1, rows=rows)
        self.values["batch_rows"].append(rows)
        self.values["process_ns"].append(round(process * 1e9))
        self.values["wait_ns"] += [round(wait * 1e9)] * requests
        self.values["latency_ns"] += [round((wait + process) * 1e9)] * requests

    def _statistics(self) -> dict[str, Any]:
        def histogram(values: list[int]) -> tuple[list[int], int, int]:
            counts = [0] * BUCKETS
            for value in values:
                counts[bucket(value)] += 1
            return counts, sum(values), max(values, default=0)

        return self.numbers | {name: histogram(values) for name, values in self.values.items()}
