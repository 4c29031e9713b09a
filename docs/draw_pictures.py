"""Draws the pictures of the documentation, one function for each: ``python docs/draw_pictures.py`` writes them into
``docs/pictures``.

The files are committed, and a test compares them with what this program draws.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from pymoe import ops
from pymoe.pipe.schedules import Times, build, simulate
from pymoe.pipe.schedules.record import png

FOLDER = Path(__file__).parent / "pictures"
BLUE, ORANGE, GREEN, PURPLE = "#a8c8ea", "#f6c48c", "#b5d9a6", "#cdb8e4"
GREY, LIGHT, INK = "#c9ced6", "#f1f3f6", "#2b2f36"

Draw = Callable[[Any], None]
PICTURES: dict[str, tuple[tuple[float, float], Draw]] = {}
"""The size of every picture, in units of its coordinates, and the function that draws it."""


def picture(width: float, height: float) -> Callable[[Draw], Draw]:
    """Register a function that draws onto axes of these limits."""

    def register(draw: Draw) -> Draw:
        PICTURES[draw.__name__] = ((width, height), draw)
        return draw

    return register


def box(axes: Any, x: float, y: float, width: float, height: float, text: str = "", colour: str = LIGHT) -> None:
    """Draw a box with its lower left corner at ``(x, y)`` and a text in its middle."""
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor=INK, linewidth=0.8)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, color=INK)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], text: str = "", bend: float = 0.0) -> None:
    """Draw an arrow, with a text above its middle."""
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.0, "connectionstyle": f"arc3,rad={bend}"}
    axes.annotate("", end, start, arrowprops={**style, "shrinkA": 1, "shrinkB": 1})
    note(axes, (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.1, text)


def note(axes: Any, x: float, y: float, text: str, **options: Any) -> None:
    """Write a text whose lower edge, by default, is centred at ``(x, y)``."""
    axes.text(x, y, text, **{"ha": "center", "va": "bottom", "fontsize": 7.5, "color": INK, **options})


@picture(12.4, 4.9)
def token(axes: Any) -> None:
    """Draw the way of four tokens through an MoE layer with three experts, as the operators choose it."""
    import torch

    colours = (BLUE, ORANGE, GREEN, PURPLE)
    logits = torch.tensor([[2.0, 0.0, 1.0], [1.0, 2.0, 0.0], [0.0, 2.0, 1.0], [2.0, 1.0, 0.0]])
    gate = ops.gate_topk(logits, 2)
    routing = ops.build_routing(gate.experts, num_experts=3)
    rows, bounds = routing.token.tolist(), routing.offsets.tolist()
    tall = 0.42
    places = [3.55 - 0.5 * row for row in range(4)]
    for row, (y, colour) in enumerate(zip(places, colours, strict=True)):
        chosen = ", ".join(str(expert) for expert in gate.experts[row].tolist())
        box(axes, 0.1, y, 1.0, tall, f"token {row}", colour)
        box(axes, 2.0, y, 1.3, tall, f"experts {chosen}", colour)
        box(axes, 11.2, y, 1.0, tall, f"token {row}", colour)
    tops: list[float] = []
    at = 3.95
    for expert in range(3):
        first = at
        for row in rows[bounds[expert] : bounds[expert + 1]]:
            at -= tall
            for x in (4.5, 8.9):
                box(axes, x, at, 1.0, tall, f"token {row}", colours[row])
        box(axes, 6.35, at, 1.7, first - at, f"expert {expert}")
        for x, end in ((5.5, 6.35), (8.05, 8.9)):
            arrow(axes, (x, (first + at) / 2), (end, (first + at) / 2))
        tops.append(at)
        at -= 0.12
    arrow(axes, (1.1, 3.0), (2.0, 3.0))
    arrow(axes, (3.3, 3.0), (4.5, 3.0))
    arrow(axes, (9.9, 3.0), (11.2, 3.0))
    names = {
        1.55: "router",
        2.65: "gate_topk",
        3.9: "dispatch",
        7.2: "grouped_linear,\nexpert_activation,\ngrouped_linear",
    }
    for x, text in {**names, 10.55: "combine"}.items():
        note(axes, x, 4.12, text, family="monospace" if text != "router" else None)
    note(axes, 5.0, tops[-1] - 0.12, "rows, sorted by expert", va="top")
    note(axes, 9.4, tops[-1] - 0.12, "their outputs", va="top")
    note(axes, 11.7, places[-1] - 0.12, "weighted sums", va="top")


@picture(12.4, 4.0)
def batching(axes: Any) -> None:
    """Draw how requests of several clients become a batch, and its output their results."""
    for client, (colour, rows) in enumerate(((BLUE, 2), (ORANGE, 1), (GREEN, 3))):
        y = 3.0 - 1.2 * client
        box(axes, 0.1, y, 1.3, 0.6, f"client {client}", colour)
        arrow(axes, (1.4, y + 0.3), (3.2, 1.95 + 0.1 * (1 - client)), "")
        note(axes, 2.2, y + 0.42 if client == 0 else y + 0.36, f"{rows} row{'s' * (rows > 1)}")
        arrow(axes, (9.35, 1.95 + 0.1 * (1 - client)), (11.0, y + 0.3))
        box(axes, 11.0, y, 1.3, 0.6, "its rows", colour)
    box(axes, 3.2, 1.1, 1.6, 1.7)
    for row, colour in enumerate((BLUE, BLUE, ORANGE, GREEN, GREEN, GREEN)):
        box(axes, 3.4, 2.45 - 0.24 * row, 1.2, 0.2, "", colour)
        box(axes, 5.7, 2.45 - 0.24 * row, 0.9, 0.2, "", colour)
        box(axes, 8.45, 2.45 - 0.24 * row, 0.9, 0.2, "", colour)
    box(axes, 7.0, 1.5, 1.1, 0.9, "function")
    arrow(axes, (4.8, 1.95), (5.7, 1.95))
    arrow(axes, (6.6, 1.95), (7.0, 1.95))
    arrow(axes, (8.1, 1.95), (8.45, 1.95))
    note(axes, 4.0, 2.9, "TaskPool: a bounded queue", family="monospace")
    note(axes, 6.15, 2.9, "a batch")
    note(axes, 7.55, 2.5, "one call, on\na worker thread")
    note(axes, 8.9, 2.9, "its output")


@picture(12.4, 3.6)
def parallel_backward(axes: Any) -> None:
    """Draw three calls with their backward passes: by a loop, and by map_with_parallel_backward."""
    colours = (BLUE, ORANGE, GREEN)
    note(axes, 1.2, 3.05, "a loop", ha="right", va="center")
    note(axes, 1.2, 1.35, "the map", ha="right", va="center")
    for call, colour in enumerate(colours):
        box(axes, 1.4 + 1.1 * call, 2.8, 1.05, 0.5, f"forward {call}", colour)
        box(axes, 4.9 + 1.6 * (2 - call), 2.8, 1.55, 0.5, f"backward {call}", colour)
        y = 1.65 - 0.55 * call
        box(axes, 1.4, y, 1.05, 0.5, f"forward {call}", colour)
        box(axes, 2.65, y, 1.55, 0.5, f"backward {call}", colour)
    axes.annotate("", (12.2, 0.3), (1.4, 0.3), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 0.8})
    note(axes, 12.0, 0.38, "time", ha="right")
    note(
        axes, 4.4, 1.35, "forward passes and backward passes of the calls run at the same time", ha="left", va="center"
    )


@picture(12.4, 3.4)
def skips(axes: Any) -> None:
    """Draw a skip connection over a stage: it travels from its stash to its pop, not through the stage between."""
    for stage, (x, text) in enumerate(((0.9, "Stash('skip')"), (5.2, "..."), (9.5, "Pop('skip')"))):
        box(axes, x, 0.9, 2.2, 1.1, text, (BLUE, LIGHT, BLUE)[stage])
        note(axes, x + 1.1, 0.4, f"stage {stage}")
    arrow(axes, (0.1, 1.45), (0.9, 1.45))
    arrow(axes, (3.1, 1.45), (5.2, 1.45), "activations")
    arrow(axes, (7.4, 1.45), (9.5, 1.45), "activations")
    arrow(axes, (11.7, 1.45), (12.3, 1.45))
    arrow(axes, (2.0, 2.0), (10.6, 2.0), bend=-0.13)
    note(axes, 6.3, 2.75, "the skip tensor, and its gradient on the way back, pass no other stage")


@picture(12.4, 4.4)
def expert_parallel(axes: Any) -> None:
    """Draw the rows of two ranks on their way to the ranks of their experts and back."""
    homes = ((BLUE, "rank 0", "experts 0, 1", 2.5), (ORANGE, "rank 1", "experts 2, 3", 0.7))
    for colour, rank, experts, y in homes:
        box(axes, 0.1, y, 1.6, 1.0, f"{rank}:\ntokens, router", colour)
        box(axes, 5.4, y, 1.8, 1.0, f"{rank}:\n{experts}")
        box(axes, 10.6, y, 1.7, 1.0, f"{rank}:\nweighted sums", colour)
        for row in range(4):
            sent = BLUE if row < 2 else ORANGE
            box(axes, 4.3, y + 0.75 - 0.25 * row, 0.8, 0.22, "", sent)
            box(axes, 7.5, y + 0.75 - 0.25 * row, 0.8, 0.22, "", sent)
    for start in (3.0, 1.2):
        for end in (3.0, 1.2):
            arrow(axes, (1.7, start), (4.3, end + (0.12 if start == 3.0 else -0.12)))
            arrow(axes, (8.3, end + (0.12 if start == 3.0 else -0.12)), (10.6, start))
    note(axes, 3.0, 3.75, "dispatch: all-to-all")
    note(axes, 6.3, 3.75, "grouped products over\nthe rows of all ranks")
    note(axes, 9.45, 3.75, "combine: all-to-all")
    note(axes, 6.3, 0.2, "colours: the rank that a row comes from, and to which its output returns")


@picture(12.4, 4.2)
def remote_retry(axes: Any) -> None:
    """Draw a gradient that is sent twice because its answer was lost, and applied once."""
    client, server = 2.0, 10.2
    for x, text in ((client, "client"), (server, "server")):
        box(axes, x - 0.8, 3.5, 1.6, 0.5, text, BLUE)
        axes.plot([x, x], [0.2, 3.5], color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    arrow(axes, (client, 3.1), (server, 2.8), "gradient, key 17")
    note(axes, server + 0.15, 2.7, "updates the expert;\nkeeps the answer under 17", ha="left", va="top")
    axes.plot([server, 6.6], [2.35, 2.15], color=INK, linewidth=1.0)
    note(axes, 6.5, 2.13, "the connection ends: the answer is lost", ha="right", va="center")
    arrow(axes, (client, 1.5), (server, 1.2), "the same gradient again, key 17")
    note(axes, client - 0.15, 1.5, "connects again", ha="right", va="center")
    note(axes, server + 0.15, 1.2, "knows 17: no\nsecond update", ha="left", va="center")
    arrow(axes, (server, 0.75), (client, 0.45), "the kept answer")


@picture(12.4, 3.6)
def memory(axes: Any) -> None:
    """Draw the measured sizes of Qwen3-30B-A3B: its checkpoint, the peaks of loading it, and what it takes when packed.

    The figures are those of benchmarks/results/large_checkpoint.md.
    """
    limit, scale, left = 25.77, 0.125, 3.3
    rows = (
        ("checkpoint in bfloat16", 61.06, GREY, "61.1 GB on disk"),
        ("peak while it is read and packed", 18.95, BLUE, "19.0 GB"),
        ("the packed weights, experts in 4 bits", 17.55, GREEN, "17.5 GB"),
        ("peak while the packed model is loaded", 0.034, BLUE, "0.03 GB"),
    )
    for number, (text, size, colour, figure) in enumerate(rows):
        y = 2.75 - 0.65 * number
        note(axes, left - 0.12, y + 0.2, text, ha="right", va="center")
        axes.add_patch(Rectangle((left, y), scale * size, 0.4, facecolor=colour, edgecolor=INK, linewidth=0.8))
        note(axes, left + scale * size + 0.12, y + 0.2, figure, ha="left", va="center")
    x = left + scale * limit
    axes.plot([x, x], [0.5, 3.3], color="#b03030", linewidth=1.0, linestyle=(0, (4, 3)))
    note(axes, x + 0.1, 0.32, "24 GiB of memory", ha="left", color="#b03030")


def schedules(file: Path) -> None:
    """Draw three schedules of four stages as the simulator plans them."""
    times = Times(forward=1, backward_input=1, backward_weight=1)
    png(file, *(simulate(build(name, stages=4, micro_batches=8), times) for name in ("gpipe", "1f1b", "zero-bubble")))


def draw(folder: Path) -> list[Path]:
    """Write every picture into ``folder`` as SVG, the same bytes each time, and return the files."""
    folder.mkdir(exist_ok=True)
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # matplotlib writes this date into the files
    options = {"svg.hashsalt": "pymoe", "font.family": "DejaVu Sans", "font.monospace": "DejaVu Sans Mono"}
    files = []
    with mpl.rc_context(options):
        for name, ((width, height), function) in PICTURES.items():
            figure = Figure(figsize=(0.8 * width, 0.8 * height))
            axes = figure.add_axes((0, 0, 1, 1))
            axes.set(xlim=(0, width), ylim=(0, height))
            axes.axis("off")
            function(axes)
            files.append(folder / f"{name}.svg")
            figure.savefig(files[-1])
        files.append(folder / "schedules.svg")
        schedules(files[-1])
    return files


if __name__ == "__main__":
    print(*draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER), sep="\n")
