"""Does it pay that workers run what is ready instead of waiting? ``python -m benchmarks.overtaking``

Simulated makespans of every schedule, in which some kinds of actions may overtake, beside the planned order of the same
schedule, when times vary log-normally around their means (forward, backward of inputs, backward of weights: 1 each).
Means over seeds, each with the same times for all orders. No machine is measured: the numbers are the same everywhere.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace

from pymoe.pipe.schedules import Action, Kind, Schedule, build, simulate

OVERTAKING = {
    "W": {Kind.BACKWARD_WEIGHT},
    "B I": {Kind.BACKWARD, Kind.BACKWARD_INPUT},
    "B I W": {Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT},
    "all": set(Kind),
}
SHAPES = ((2, 8), (4, 8), (4, 16), (8, 16))
SPREADS = (0.02, 0.1, 0.3, 0.6)


def times(schedule: Schedule, spread: float, seed: int) -> Callable[[Action], float]:
    """A duration for every action, with a mean of 1, of 2 for a whole backward."""
    draw = random.Random(seed).lognormvariate
    found = {
        action: (1 + (action.kind is Kind.BACKWARD)) * draw(-(spread**2) / 2, spread)
        for order in schedule.orders
        for action in order
    }
    return found.__getitem__


def compare(schedule: Schedule, spread: float, seeds: int) -> dict[str, float]:
    """Makespans, divided by that of the planned order."""
    drawn = [times(schedule, spread, seed) for seed in range(seeds)]

    def mean(overtakes: set[Kind]) -> float:
        bent = replace(schedule, overtakes=frozenset(overtakes))
        return statistics.fmean(simulate(bent, durations).makespan for durations in drawn)

    planned = mean(set())
    return {name: mean(kinds) / planned for name, kinds in OVERTAKING.items()}


def main(seeds: int = 60) -> None:
    """Print the table."""
    print(f"{'schedule':18} stages  micro-batches  spread  {'  '.join(f'{name:>6}' for name in OVERTAKING)}")
    for name in ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"):
        for workers, micro_batches in SHAPES:
            stages = 2 * workers if name == "interleaved-1f1b" else workers
            for spread in SPREADS:
                found = compare(build(name, stages, micro_batches), spread, seeds)
                row = "  ".join(f"{ratio:6.3f}" for ratio in found.values())
                print(f"{name:18} {stages:6}  {micro_batches:13}  {spread:6.2f}  {row}")


if __name__ == "__main__":
    main()
