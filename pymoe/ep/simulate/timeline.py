"""Times of the parts of a layer: tasks on the wire and on the ranks' processors, simulated as events.

The wire and each rank's processor run their tasks one at a time, in the order in which they were launched, like a
communication stream and compute streams. All ranks meet in every exchange: it starts when the last rank is ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Seconds = float | NDArray[np.float64]
"""One number for all ranks, or (R,) one number per rank."""
WIRE, PROCESSOR = "wire", "processor"
LANES = (WIRE, PROCESSOR)


@dataclass(frozen=True)
class Task:
    """Work on a lane that starts when the lane is free and the tasks ``after`` have ended."""

    name: str
    lane: str
    seconds: Seconds
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Event:
    """A task as it ran: separately on each rank, or at once on all ranks."""

    name: str
    lane: str
    start: Seconds
    end: Seconds


@dataclass(frozen=True)
class Phases:
    """The seconds of a pass through a layer whose rows travel in n chunks."""

    gate: float
    """Seconds of the router."""
    counts: float
    """Seconds of the exchange of counts, including latency; 0 if they are known."""
    gather: float
    """Seconds to copy rows into the send buffer, during the exchange of counts, or after it if clones are planned."""
    latency: float
    """Latency in seconds of every exchange of rows."""
    dispatch: tuple[float, ...]
    """(n,) seconds of a chunk's rows on the way to the experts' ranks, without latency."""
    shared: float
    """Seconds of shared experts, launched after the dispatches."""
    experts: tuple[Seconds, ...]
    """(n,) seconds of the experts of a chunk, on each rank."""
    combine: tuple[float, ...]
    """(n,) seconds of a chunk's rows on the way back, without latency."""
    sum: float
    """Seconds of the weighted sum of the rows that came back."""
    clones: float = 0.0
    """Seconds of clones' weights, including latency; after the dispatches, before the experts of the last chunk."""
    clones_back: float = 0.0
    """Seconds of clones' gradients, including latency; after the first combine."""

    @property
    def chunks(self) -> int:
        """Number of parts in which rows travel."""
        return len(self.dispatch)

    @property
    def gathered(self) -> float:
        """Time at which the rows are in the send buffer."""
        return self.gate + self.gather + (self.counts if self.clones else 0.0)


@dataclass(frozen=True)
class Timeline:
    """A simulated pass through a layer."""

    phases: Phases
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last end."""
        return max(float(np.max(event.end)) for event in self.events)

    @property
    def best(self) -> float:
        """Least possible seconds, see :func:`best_possible`."""
        return best_possible(self.phases)

    @property
    def fullest(self) -> int:
        """Rank whose experts take longest."""
        return int(np.argmax(np.sum(np.broadcast_arrays(*self.phases.experts), axis=0)))

    def seen_by(self, rank: int) -> tuple[Event, ...]:
        """Return the events of the wire and of one rank's processor."""

        def of(times: Seconds) -> float:
            return float(times[rank] if isinstance(times, np.ndarray) and times.ndim else times)

        return tuple(Event(event.name, event.lane, of(event.start), of(event.end)) for event in self.events)

    def busy(self, lane: str) -> float:
        """Return the seconds in which the wire, or the processor of the fullest rank, works."""
        events = (event for event in self.seen_by(self.fullest) if event.lane == lane)
        return float(sum(event.end - event.start for event in events))


def run(tasks: Sequence[Task]) -> tuple[Event, ...]:
    """Return the times of all tasks if each lane keeps the order of ``tasks`` and starts each as soon as it can.

    Raises:
        ValueError: a task waits for one that is not before it, has a repeated name, or takes less than 0.
    """
    free: dict[str, Seconds] = {}
    ends: dict[str, Seconds] = {}
    events = []
    for task in tasks:
        late = [name for name in task.after if name not in ends]
        if late or task.name in ends:
            wrong = f"a wait for {late[0]}" if late else "the same name again"
            raise ValueError(f"run: task {task.name} must wait for tasks before it and have a new name, got {wrong}")
        if not np.all(np.asarray(task.seconds) >= 0):
            raise ValueError(f"run: task {task.name} must take 0 or longer, got {task.seconds}")
        start = free.get(task.lane, 0.0)
        for name in task.after:
            start = np.maximum(start, ends[name])
        if task.lane == WIRE:  # all ranks meet
            start = float(np.max(start))
        ends[task.name] = free[task.lane] = start + task.seconds
        events.append(Event(task.name, task.lane, start, ends[task.name]))
    return tuple(events)


def tasks_of(phases: Phases) -> Iterator[Task]:
    """Yield the tasks of a pass in the order of launches.

    The order is: gate; counts during the gather, or before it with clones; all dispatches, and the weights of clones;
    the shared experts; then for each chunk the experts and the way back; the sum. Every exchange has the full latency.
    The last chunk needs the clones' weights; in a backward, their gradients leave after the first chunk.
    """
    yield Task("gate", PROCESSOR, phases.gate)
    yield Task("counts", WIRE, phases.counts, ("gate",))
    yield Task("gather", PROCESSOR, phases.gather, ("gate", "counts") if phases.clones else ("gate",))
    for chunk, seconds in enumerate(phases.dispatch):
        yield Task(f"dispatch {chunk}", WIRE, phases.latency + seconds, ("counts", "gather"))
    if phases.clones:
        yield Task("clones", WIRE, phases.clones, ("counts",))
    yield Task("shared", PROCESSOR, phases.shared, ("gather",))
    for chunk, work in enumerate(phases.experts):
        weights = ("clones",) if phases.clones and chunk == phases.chunks - 1 else ()
        yield Task(f"experts {chunk}", PROCESSOR, work, (f"dispatch {chunk}", *weights))
    back = [f"combine {chunk}" for chunk in range(phases.chunks)]
    for chunk, seconds in enumerate(phases.combine):
        yield Task(f"combine {chunk}", WIRE, phases.latency + seconds, (f"experts {chunk}",))
        if chunk == 0 and phases.clones_back:
            back.append("clones back")
            yield Task("clones back", WIRE, phases.clones_back, ("experts 0",))
    yield Task("sum", PROCESSOR, phases.sum, tuple(back))


def best_possible(phases: Phases) -> float:
    """Return the least seconds in which any run of these tasks in this order can end.

    They are the longer of two chains, plus the sum. In one chain the wire is busy with all rows and clones without a
    pause once rows are gathered. In the other the processor of the fullest rank is busy from the arrival of the first
    chunk (or the end of the shared experts) to the last chunk, which then has to travel back.
    """
    before = max(phases.gate + phases.counts, phases.gathered)
    wire = 2 * phases.chunks * phases.latency + sum(phases.dispatch) + sum(phases.combine)
    ready = max(before + phases.latency + phases.dispatch[0], phases.gathered + phases.shared)
    work = float(np.max(np.sum(np.broadcast_arrays(*phases.experts), axis=0)))
    back = phases.latency + phases.combine[-1]
    return max(before + wire + phases.clones + phases.clones_back, ready + work + back) + phases.sum


def timeline(phases: Phases) -> Timeline:
    """Return the simulated pass."""
    return Timeline(phases, run(tuple(tasks_of(phases))))
