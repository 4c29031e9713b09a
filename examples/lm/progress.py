"""What a run shows while it trains: a live panel on a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import math
import sys
from collections import deque
from typing import Protocol

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text as RichText
from torch import Tensor

from .trainer import Trainer

PLAIN_LINES = 20  # over a whole run
SPEED_WINDOW = 20  # steps over which speed and load are averaged
BARS = "▁▂▃▄▅▆▇█"


class Display(Protocol):
    def step(self) -> None: ...
    def close(self) -> None: ...


def open_display(trainer: Trainer) -> Display:
    console = Console()
    return LiveDisplay(trainer, console) if console.is_terminal else PlainDisplay(trainer)


class Figures:
    """The figures of the last steps, as both displays show them."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loads: deque[Tensor] = deque(maxlen=SPEED_WINDOW)

    def update(self) -> None:
        history = self._trainer.history
        self.step, self.steps = self._trainer.steps_done, self._trainer.config.steps
        self.loss = history.loss[-1]
        self.bits = self.loss / math.log(2)
        recent = sorted(history.seconds[-SPEED_WINDOW:])
        seconds = recent[len(recent) // 2]
        self.tokens_per_second = self._trainer.bytes_per_step / seconds
        self.time_left = seconds * (self.steps - self.step)
        self.validation = history.validation_bits[-1] if history.validation_bits else None
        if history.load:
            self._loads.append(history.load[-1])

    def relative_load(self) -> Tensor | None:
        """Each expert's share of its layer's slots, as a multiple of an even share, (layers, experts)."""
        if not self._loads:
            return None
        load = torch.stack(list(self._loads)).double().sum(dim=0)
        return load / load.mean(dim=1, keepdim=True)


class PlainDisplay:
    def __init__(self, trainer: Trainer) -> None:
        self._figures = Figures(trainer)
        self._every = max(1, trainer.config.steps // PLAIN_LINES)

    def step(self) -> None:
        figures = self._figures
        figures.update()
        if figures.step % self._every and figures.step not in (1, figures.steps):
            return
        parts = [
            f"step {figures.step:>{len(str(figures.steps))}}/{figures.steps}",
            f"loss {figures.loss:.3f}",
            f"{figures.bits:.2f} bits/byte",
            f"{figures.tokens_per_second:,.0f} tokens/s",
            f"{duration(figures.time_left)} left",
        ]
        if figures.validation is not None:
            parts.append(f"held-back text {figures.validation:.3f} bits/byte")
        load = figures.relative_load()
        if load is not None:
            parts.append(f"busiest expert {load.max():.2f}x its even share")
        print("  ".join(parts), flush=True)

    def close(self) -> None:
        sys.stdout.flush()


class LiveDisplay:
    def __init__(self, trainer: Trainer, console: Console) -> None:
        self._figures = Figures(trainer)
        self._live = Live(console=console, refresh_per_second=4)
        self._live.start()

    def step(self) -> None:
        self._figures.update()
        self._live.update(self._panel())

    def close(self) -> None:
        self._live.stop()

    def _panel(self) -> Group:
        figures = self._figures
        head = Table.grid(padding=(0, 2))
        head.add_row(
            f"step [bold]{figures.step}[/]/{figures.steps}",
            ProgressBar(total=figures.steps, completed=figures.step, width=40),
            f"[bold]{duration(figures.time_left)}[/] left",
            f"[bold]{figures.tokens_per_second:,.0f}[/] tokens/s",
        )
        loss = f"loss [bold]{figures.loss:.3f}[/]   [bold]{figures.bits:.2f}[/] bits/byte"
        if figures.validation is not None:
            loss += f"   held-back text [bold]{figures.validation:.3f}[/] bits/byte"
        lines: list[object] = [head, RichText.from_markup(loss)]
        load = figures.relative_load()
        if load is not None:
            lines.append(_balance_table(load))
        return Group(*lines)


def _balance_table(load: Tensor) -> Table:
    table = Table.grid(padding=(0, 2))
    for layer, row in enumerate(load.tolist(), start=1):
        bars = "".join(BARS[min(len(BARS) - 1, int(share / 2 * len(BARS)))] for share in row)
        table.add_row(f"experts of layer {layer}", f"[cyan]{bars}[/]", f"busiest {max(row):.2f}x its even share")
    return table


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
