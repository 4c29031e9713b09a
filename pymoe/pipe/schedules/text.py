"""A record as text: one line a worker, time to the right."""

from __future__ import annotations

from pymoe.pipe.schedules.record import Record, Span


def label(record: Record, span: Span) -> str:
    """``F5``; where workers have several stages ``F5b``, the letter counting them from a to z."""
    stage, micro_batch, kind = span.action
    earlier = record.placement[:stage].count(record.placement[stage])
    several = len(record.placement) > record.workers
    return f"{kind.value}{micro_batch}{chr(ord('a') + earlier % 26) if several else ''}"


def text(record: Record, width: int | None = None) -> str:
    """A line for every worker, ``width`` characters at most; None: as wide as the labels need, 160 at most.

    An action is drawn as its label, filled up with dashes. Where that does not fit its letter stands alone, and what
    is shorter than half a character is not seen. Blanks are bubbles.
    """
    heads = [f"worker {worker}" for worker in range(record.workers)]
    margin = max(map(len, heads)) + len("  ||")
    room = max(0, (160 if width is None else width) - margin)
    durations = [span.duration for order in record.spans for span in order if span.duration]
    labels = [[label(record, span) for span in order] for order in record.spans]
    if durations:
        longest = max(len(name) for names in labels for name in names)
        # A single short action (of a run, say) shall not stretch the whole picture.
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
