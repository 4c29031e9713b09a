"""Records of when every action starts and ends, simulated or measured; figures computed from them; and pictures of
them, as text (one line per worker, time from left to right) or image files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pymoe.pipe.schedules.schedule import Action, Kind, Schedule, peak_live, run


class Span(NamedTuple):
    """An action, with start and end in the unit of the record (for runs: seconds)."""

    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Return the time that the action took."""
        return self.end - self.start


@dataclass(frozen=True)
class Record:
    """The spans of every worker in order of time. The earliest span of the record starts at 0."""

    title: str
    placement: tuple[int, ...]
    """The worker of every stage."""
    spans: tuple[tuple[Span, ...], ...]
    unit: str = ""
    """The unit of times, such as "s". Empty: the unit of the times given to :func:`simulate`."""

    def __repr__(self) -> str:
        actions, time = sum(map(len, self.spans)), f"{self.makespan:.4g} {self.unit}".strip()
        return f"<Record {self.title!r}: {actions} actions on {self.workers} workers, makespan {time}>"

    @property
    def workers(self) -> int:
        """Return the number of workers."""
        return len(self.spans)

    @cached_property
    def makespan(self) -> float:
        """Return the time until the last action has ended."""
        return max((order[-1].end for order in self.spans if order), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Return the time that each worker spends on its actions."""
        return tuple(sum(span.duration for span in order) for order in self.spans)

    @cached_property
    def bubble(self) -> tuple[float, ...]:
        """Return, for every worker, the share of the makespan in which it waits: 0 to 1."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def mean_bubble(self) -> float:
        """Return the share of all workers' time that is spent waiting."""
        return sum(self.bubble) / self.workers

    @property
    def ideal(self) -> float:
        """Return the working time of the busiest worker. No order of the actions has a shorter makespan."""
        return max(self.busy)

    @property
    def speed_up(self) -> float:
        """Return the time that a single worker would take, divided by the makespan; 1 if the makespan is 0."""
        return sum(self.busy) / self.makespan if self.makespan else 1.0

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Return the maximum number of activations that each worker holds at once; see :func:`live_counts`."""
        return tuple(peak_live(span.action for span in order) for order in self.spans)

    @cached_property
    def peak_live_of_stages(self) -> tuple[int, ...]:
        """Return, for every stage, the maximum number of activations of that stage that are held at once."""
        return tuple(
            peak_live(span.action for span in self.spans[worker] if span.action.stage == stage)
            for stage, worker in enumerate(self.placement)
        )

    def peak_memory(self, kept: float = 1.0) -> tuple[float, ...]:
        """Return every worker's peak memory, in units of one activation, if the backward of inputs frees all of an
        activation except the share ``kept`` (0 to 1), and the backward of weights frees that share.
        """
        peaks = []
        for order in self.spans:
            level = peak = 0.0
            for action, _, _ in order:
                level += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: kept - 1}.get(action.kind, -kept)
                peak = max(peak, level)
            peaks.append(peak)
        return tuple(peaks)

    def summary(self) -> str:
        """Return the title, makespan, bubbles and activations as four lines of text."""
        bubbles = "  ".join(f"{share:.1%}" for share in self.bubble)
        return "\n".join(
            [
                f"{self.title}",
                f"  makespan     {self.makespan:.6g}, without bubbles {self.ideal:.6g}; speed-up {self.speed_up:.2f}",
                f"  bubble       {self.mean_bubble:.1%}; of the workers: {bubbles}",
                f"  activations  at most {'  '.join(map(str, self.peak_live))}",
            ]
        )


def as_run(schedule: Schedule, triples: Iterable[tuple[Action, float, float]], title: str | None = None) -> Record:
    """Return the record of a run of ``schedule``.

    Args:
        schedule: what was run. The run may have used another order, and may lack actions (because it failed or has not
            ended).
        triples: (action, start, end) in any order, with times in seconds on one clock for all workers.
        title: the record's title; None: the schedule's name.

    Raises:
        ValueError: an action is not in the schedule, occurs twice, ends before it starts or overlaps another of its
            worker.
    """
    workers: list[list[Span]] = [[] for _ in range(schedule.workers)]
    seen = set()
    for span in (Span(*triple) for triple in triples):
        if span.action not in schedule.places:
            raise ValueError(f"action {span.action} is not of this schedule, {schedule.name}")
        if span.action in seen:
            raise ValueError(f"action {span.action} was run twice")
        if not span.start <= span.end:
            raise ValueError(f"action {span.action} starts at {span.start} and ends at {span.end}")
        seen.add(span.action)
        workers[schedule.placement[span.action.stage]].append(span)
    zero = min((span.start for order in workers for span in order), default=0.0)
    for worker, order in enumerate(workers):
        order.sort(key=lambda span: (span.start, span.end))
        for first, second in pairwise(order):
            if second.start < first.end:
                raise ValueError(f"worker {worker} starts {second.action} before {first.action} has ended")
    spans = tuple(tuple(Span(a, start - zero, end - zero) for a, start, end in order) for order in workers)
    return Record(title or f"{schedule.name}, as run", schedule.placement, spans, "s")


def mean_times(record: Record) -> Callable[[Action], float]:
    """Return a function that gives an action the mean duration of the actions of its stage and kind in ``record``.

    With this function and the record of a run, :func:`simulate` gives the makespan that the run would have without any
    overhead. The function raises KeyError if no action of that stage and kind was run.
    """
    durations = defaultdict(list)
    for order in record.spans:
        for span in order:
            durations[span.action.stage, span.action.kind].append(span.duration)
    means = {what: sum(values) / len(values) for what, values in durations.items()}
    return lambda action: means[action.stage, action.kind]


# Simulation.

Duration = float | Sequence[float]


@dataclass(frozen=True)
class Times:
    """The duration of every action: a number, or a sequence with one number for every stage."""

    forward: Duration = 1.0
    backward_input: Duration = 1.0
    backward_weight: Duration = 1.0
    backward: Duration | None = None
    """The time of a whole backward; None: the sum of its two parts."""

    def __post_init__(self) -> None:
        """Raise ValueError for a time below 0."""
        for field in fields(self):
            given = getattr(self, field.name)
            for duration in given if isinstance(given, Sequence) else (0.0 if given is None else given,):
                if not duration >= 0:
                    raise ValueError(f"{field.name} must take 0 or longer, got {duration}")

    def __call__(self, action: Action) -> float:
        """Return the duration of ``action``."""
        stage, _, kind = action
        if kind is Kind.BACKWARD and self.backward is None:
            return _of(self.backward_input, stage) + _of(self.backward_weight, stage)
        return _of(getattr(self, kind.name.lower()), stage)


def simulate(schedule: Schedule, times: Callable[[Action], float] | None = None, communication: float = 0.0) -> Record:
    """Return a record of every action, if every worker keeps its order and starts each action as soon as it can.

    ``times`` gives an action's duration: :class:`Times` (the default: 1 for forward, backward of inputs and backward of
    weights), or any function of the action. A value from another worker arrives ``communication`` after the end of the
    action that makes it; sending occupies neither worker. Raises :class:`ScheduleError` if the schedule is not valid,
    ValueError if a time is below 0, or missing for a stage.
    """
    times = Times() if times is None else times
    unit = "forwards of a stage" if times == Times() else ""
    if not communication >= 0:
        raise ValueError(f"communication must take 0 or longer, got {communication}")
    ends: dict[Action, float] = {}
    free = [0.0] * schedule.workers
    spans: list[list[Span]] = [[] for _ in free]
    for worker, action, dependencies in run(schedule):
        start = free[worker]
        for needed in dependencies:
            arrives = ends[needed]
            if schedule.placement[needed.stage] != worker:
                arrives += communication
            start = max(start, arrives)
        duration = times(action)
        if not duration >= 0:
            raise ValueError(f"action {action} must take 0 or longer, got {duration}")
        free[worker] = ends[action] = start + duration
        spans[worker].append(Span(action, start, ends[action]))
    return Record(schedule.name, schedule.placement, tuple(map(tuple, spans)), unit)


def _of(duration: Duration, stage: int) -> float:
    if isinstance(duration, (float, int)):
        return duration
    if stage >= len(duration):
        raise ValueError(f"times for {len(duration)} stages, none for stage {stage}")
    return duration[stage]


# Pictures.

MISSING = "pictures of schedules need matplotlib: pip install matplotlib"
COLOURS = {
    Kind.FORWARD: (0.35, 0.60, 0.85),
    Kind.BACKWARD: (0.95, 0.65, 0.30),
    Kind.BACKWARD_INPUT: (0.98, 0.78, 0.40),
    Kind.BACKWARD_WEIGHT: (0.55, 0.75, 0.45),
}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
}
MAX_LABELS = 1000
"""Labels are left out if there are more actions than this."""


def label(record: Record, span: Span) -> str:
    """Return kind and micro-batch, such as ``F5``; if workers have several stages, also a letter for the stage."""
    stage, micro_batch, kind = span.action
    earlier = record.placement[:stage].count(record.placement[stage])
    several = len(record.placement) > record.workers
    return f"{kind.value}{micro_batch}{chr(ord('a') + earlier % 26) if several else ''}"


def text(record: Record, width: int | None = None) -> str:
    """Return one line for every worker, at most ``width`` characters wide (or as wide as the workers' names need);
    None: as wide as the labels need, at most 160.

    An action is drawn as its label, padded with dashes. If the label does not fit, only its letter is drawn; actions
    shorter than a character may be invisible. Blanks are bubbles.
    """
    heads = [f"worker {worker}" for worker in range(record.workers)]
    margin = max(map(len, heads)) + len("  ||")
    room = max(0, (160 if width is None else width) - margin)
    durations = [span.duration for order in record.spans for span in order if span.duration]
    labels = [[label(record, span) for span in order] for order in record.spans]
    if durations:
        longest = max(len(name) for names in labels for name in names)
        # A single very short action, as may occur in a run, must not stretch the whole picture.
        natural = longest / sorted(durations)[len(durations) // 20]
        scale = min(natural, room / record.makespan)
    else:
        scale = 0.0
    columns = round(record.makespan * scale)
    lines = []
    for head, order, names in zip(heads, record.spans, labels, strict=True):
        line = [" "] * columns
        for span, name in zip(order, names, strict=True):
            first, last = round(span.start * scale), round(span.end * scale)
            shown = name if len(name) <= last - first else name[: last > first]
            line[first:last] = shown.ljust(last - first, "-")
        lines.append(f"{head:<{margin - 4}}  |{''.join(line)}|")
    return "\n".join(lines)


def png(file: str | Path, *records: Record) -> Path:
    """Draw the records one above the other on one time scale, for example a simulation and a run; return the path.

    The suffix of ``file`` selects one of matplotlib's formats. Raises ImportError without matplotlib, ValueError
    without records.
    """
    if not records:
        raise ValueError("no record to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(MISSING) from error
    heights = [record.workers for record in records]
    figure = Figure(figsize=(14, 0.42 * sum(heights) + 0.5 * len(records) + 0.8), layout="constrained")
    grid = figure.subplots(len(records), 1, squeeze=False, height_ratios=heights, sharex=True)
    shown = []
    for axes, record in zip(grid[:, 0], records, strict=True):
        shown += [kind for kind in _draw(axes, record) if kind not in shown]
    grid[-1, 0].set_xlim(0, max(record.makespan for record in records) or 1)
    # Records without a unit are assumed to have that of the others.
    units = {record.unit for record in records if record.unit}
    grid[-1, 0].set_xlabel(f"time ({units.pop() if len(units) == 1 else 'in the unit of the given times'})")
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=COLOURS[kind], label=NAMES[kind]) for kind in Kind if kind in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False)
    path = Path(file)
    figure.savefig(path, dpi=110)
    return path


def _draw(axes: Any, record: Record) -> list[Kind]:
    """Draw one record; later (virtual) stages of a worker are darker. Return the kinds of action that occur."""
    with_labels = sum(map(len, record.spans)) <= MAX_LABELS
    seen: dict[tuple[Kind, int], None] = {}
    for worker, order in enumerate(record.spans):
        own = [stage for stage, home in enumerate(record.placement) if home == worker]
        bars: dict[tuple[Kind, int], list[tuple[float, float]]] = {}
        for span in order:
            bars.setdefault((span.action.kind, own.index(span.action.stage)), []).append((span.start, span.duration))
            if with_labels and span.duration > 0.008 * record.makespan:
                middle = span.start + span.duration / 2
                axes.text(middle, worker, label(record, span)[1:], ha="center", va="center", fontsize=7)
        for (kind, turn), spans in bars.items():
            shade = 1 - 0.3 * turn / max(1, len(own) - 1)
            colour = [shade * part for part in COLOURS[kind]]
            axes.broken_barh(spans, (worker - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.5)
            seen[kind, turn] = None
    axes.set_yticks(range(record.workers), [f"worker {worker}" for worker in range(record.workers)])
    axes.set_ylim(record.workers - 0.5, -0.5)
    live = max(record.peak_live)
    axes.set_title(
        f"{record.title}: makespan {record.makespan:.4g}, bubble {record.mean_bubble:.1%}, "
        f"at most {live} live activation{'s' * (live != 1)} a worker",
        fontsize=10,
        loc="left",
    )
    return list(dict.fromkeys(kind for kind, _ in seen))
