"""Pools with the counters of native pools, filled by hand: statistics without a runtime."""

from __future__ import annotations

from typing import Any

from pymoe.runtime.monitoring.statistics import HISTOGRAMS, TOTALS

BUCKETS = 252  # number of buckets of the native histogram


def bucket(value: int) -> int:
    """Return the bucket of the native histogram that holds a value."""
    if value < 4:
        return value
    top = value.bit_length() - 1
    return (top - 1) * 4 + ((value >> (top - 2)) & 3)


class CountedPool:
    """A pool with the given name, whose counters are zero."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.numbers = dict.fromkeys((*TOTALS, "queued", "queued_rows", "running"), 0)
        self.values: dict[str, list[int]] = {name: [] for name in HISTOGRAMS}

    def add(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self.numbers[name] += number

    def batch(self, requests: int, rows: int, *, wait: float, process: float) -> None:
        """Count a batch that took ``process`` seconds, whose requests waited ``wait`` seconds."""
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
