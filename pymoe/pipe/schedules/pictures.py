"""Draws records as text, with one line per worker and time from left to right, and as image files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pymoe.pipe.schedules.record import Record, Span
from pymoe.pipe.schedules.schedule import Kind

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
    """Return ``F5``; if workers have several stages, ``F5b``, with a letter for the stage, from a to z."""
    stage, micro_batch, kind = span.action
    earlier = record.placement[:stage].count(record.placement[stage])
    several = len(record.placement) > record.workers
    return f"{kind.value}{micro_batch}{chr(ord('a') + earlier % 26) if several else ''}"


def text(record: Record, width: int | None = None) -> str:
    """Return one line for every worker, at most ``width`` characters wide; None: as wide as the labels need, at most
    160.

    An action is drawn as its label, filled up with dashes. If the label does not fit, only its letter is drawn; actions
    shorter than half a character are invisible. Blanks are bubbles.
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
    """Draw the records one above the other on one time scale, for example to compare a plan with a run; return
    ``file``.

    The suffix of ``file`` selects one of matplotlib's formats. Raises ImportError without matplotlib.
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
    units = {record.unit for record in records if record.unit}  # records without a unit are on the same scale
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
