"""Draws the results of a run: speed-up over the reference, and share of the floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

MISSING = "plots need matplotlib: pip install matplotlib"


def pyplot() -> Any:
    """Return matplotlib.pyplot, drawing to files; raise ImportError with a message that says what to install."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(MISSING) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(result: dict[str, Any], output: Path) -> list[Path]:
    """Draw ``speedup.png`` and ``floor.png`` into the folder ``output``; return the files.

    Wrong results are left out, and so is a file for which no line has a value.
    """
    plt = pyplot()
    output.mkdir(parents=True, exist_ok=True)
    facts = result["environment"]
    footnote = f"{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, {facts['date'][:10]}"
    pictures = (
        ("speedup.png", "over_reference", "speed-up over the PyTorch reference", "log"),
        ("floor.png", "share_of_floor", "share of copy_ bandwidth or torch.mm speed", "linear"),
    )
    files = []
    for name, key, title, scale in pictures:
        records = [record for record in result["lines"] if record[key] and record["correctness"]["verdict"] != "WRONG"]
        if records:
            files.append(bars(plt, records, key, title, scale, footnote, output / name))
    return files


def bars(
    plt: Any, records: Sequence[dict[str, Any]], key: str, title: str, scale: str, footnote: str, file: Path
) -> Path:
    """Draw a bar with quartiles of ``record[key]`` for every record into ``file``, with one colour per operator."""
    operators = list(dict.fromkeys(record["operator"] for record in records))
    colours = dict(zip(operators, (f"C{i % 10}" for i in range(len(operators))), strict=True))
    labels = [
        f"{r['operator']}  {r['case']}  {r['dtype']}{'  +bwd' if 'backward' in r['direction'] else ''}" for r in records
    ]
    middle = [record[key]["median"] for record in records]
    below = [record[key]["median"] - record[key]["low"] for record in records]
    above = [record[key]["high"] - record[key]["median"] for record in records]
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.24 * len(records)), layout="constrained")
    axes.barh(labels, middle, xerr=[below, above], color=[colours[r["operator"]] for r in records], error_kw={"lw": 1})
    axes.axvline(1, color="black", lw=1)
    axes.set_xscale(scale)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.tick_params(labelsize=8)
    axes.set_title(title)
    axes.set_xlabel(footnote, fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file
