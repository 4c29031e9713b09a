"""When the parts of a layer run: tasks on two lanes, the wire and the ranks' processors, simulated as events.

Each lane runs its tasks one at a time, in the order in which they were launched, as a communication stream and a
compute stream do. All ranks meet in every exchange, so the processor lane is that of the fullest rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIRE, PROCESSOR = "wire", "processor"
LANES = (WIRE, PROCESSOR)


@dataclass(frozen=True)
class Task:
    """Work on a lane that starts when the lane is free and the tasks ``after`` have ended."""

    name: str
    lane: str
    seconds: float
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Event:
    """A task as it ran."""

    name: str
    lane: str
    start: float
    end: float


@dataclass(frozen=True)
class Phases:
    """The seconds of a pass through a layer, before it is cut into chunks."""

    gate: float
    """The router, or what the backward does before rows can be gathered."""
    counts: float
    """The exchange of counts, latency included; 0 where they are known."""
    gather: float
    """Rows into the send buffer, beside the exchange of counts."""
    latency: float
    """Of every exchange of rows."""
    dispatch: float
    """Rows to the experts' ranks, without latency."""
    shared: float
    """Shared experts, launched after the dispatches."""
    experts: float
    """The experts of the fullest rank."""
    combine: float
    """Rows back, without latency."""
    sum: float
    """The weighted sum of the rows that came back."""
    clones: float = 0.0
    """Weights of clones, latency included; behind the first dispatch, before any experts."""
    clones_back: float = 0.0
    """Gradients of clones, latency included; behind the last combine."""


@dataclass(frozen=True)
class Timeline:
    """A pass through a layer in ``chunks`` parts, as simulated."""

    chunks: int
    events: tuple[Event, ...]
    best: float
    """No run in this order of launches can be shorter, in seconds; see :func:`best_possible`."""

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(event.end for event in self.events)

    def busy(self, lane: str) -> float:
        """Return the seconds in which ``lane`` works."""
        return sum(event.end - event.start for event in self.events if event.lane == lane)


def run(tasks: Sequence[Task]) -> tuple[Event, ...]:
    """Return when every task runs if each lane keeps the order of ``tasks`` and starts each as soon as it can.

    Raises:
        ValueError: a task waits for one that is not before it, has a name twice, or takes less than 0.
    """
    free: dict[str, float] = {}
    ends: dict[str, float] = {}
    events = []
    for task in tasks:
        late = [name for name in task.after if name not in ends]
        if late or task.name in ends:
            wrong = f"a wait for {late[0]}" if late else "the same name again"
            raise ValueError(f"run: task {task.name} must wait for tasks before it and have a new name, got {wrong}")
        if not task.seconds >= 0:
            raise ValueError(f"run: task {task.name} must take 0 or longer, got {task.seconds}")
        start = max([free.get(task.lane, 0.0), *(ends[name] for name in task.after)])
        ends[task.name] = free[task.lane] = start + task.seconds
        events.append(Event(task.name, task.lane, start, ends[task.name]))
    return tuple(events)


def tasks_of(phases: Phases, chunks: int) -> Iterator[Task]:
    """Yield the tasks of a pass in the order of launches.

    Gate; counts beside the gather; all dispatches, the weights of clones behind them; the shared experts; then of each
    chunk the experts and the way back; the sum. A chunk has the n-th part of the rows, weights and bytes, and the whole
    latency. The clones' weights are needed by the first chunk, and their gradients, in a backward, leave last.
    """
    yield Task("gate", PROCESSOR, phases.gate)
    yield Task("counts", WIRE, phases.counts, ("gate",))
    yield Task("gather", PROCESSOR, phases.gather, ("gate",))
    for chunk in range(chunks):
        yield Task(f"dispatch {chunk}", WIRE, phases.latency + phases.dispatch / chunks, ("counts", "gather"))
        if chunk == 0 and phases.clones:
            yield Task("clones", WIRE, phases.clones, ("counts",))
    yield Task("shared", PROCESSOR, phases.shared, ("gather",))
    for chunk in range(chunks):
        needed = (f"dispatch {chunk}", *(("clones",) if phases.clones else ()))
        yield Task(f"experts {chunk}", PROCESSOR, phases.experts / chunks, needed)
    for chunk in range(chunks):
        yield Task(f"combine {chunk}", WIRE, phases.latency + phases.combine / chunks, (f"experts {chunk}",))
    yield Task("sum", PROCESSOR, phases.sum, tuple(f"combine {chunk}" for chunk in range(chunks)))
    if phases.clones_back:
        yield Task("clones back", WIRE, phases.clones_back, (f"experts {chunks - 1}",))


def best_possible(phases: Phases, chunks: int) -> float:
    """Return the least seconds in which any run of these tasks can end that keeps what they need of each other.

    The longer of two chains, and then the sum: the wire, busy with all rows without a pause once they are gathered; and
    the processor, busy from the arrival of the first chunk (or the end of the shared experts) to the last, which then
    has to travel back. The gradients of clones leave while the sum runs.
    """
    before = phases.gate + max(phases.counts, phases.gather)
    dispatch, combine = (phases.latency + part / chunks for part in (phases.dispatch, phases.combine))
    wire = chunks * (dispatch + combine) + phases.clones
    ready = max(before + dispatch + phases.clones, phases.gate + phases.gather + phases.shared)
    return max(before + wire, ready + phases.experts + combine) + max(phases.sum, phases.clones_back)


def timeline(phases: Phases, chunks: int) -> Timeline:
    """Return the simulated pass in ``chunks`` parts."""
    return Timeline(chunks, run(tuple(tasks_of(phases, chunks))), best_possible(phases, chunks))
