"""One source of random numbers for all ranks.

A stage draws for a micro-batch from a stream of its own, as in a pipe in one process: the number that all streams are
made of is taken from the default generator of the first stage's rank, and travels with the values. In a step in which
any stage has drawn, the default generator of every rank moves on by one number; so ranks that were seeded alike stay
alike, and like a pipe in one process.
"""

from __future__ import annotations

import torch

from pymoe.autograd.random_streams import Source, draw

__all__ = ["SharedSource", "base_of_this_process", "move_on"]


class SharedSource(Source):
    """Streams made of a number that is known."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self._base = self.base = base
        self.was_asked = False
        """Whether any stage has drawn, as far as this rank knows."""

    def seed(self, position: int) -> int:
        """Of the stream at ``position``."""
        self.was_asked = True
        return super().seed(position)


def base_of_this_process() -> int:
    """The next number of the default generator, which stays where it is."""
    before = torch.default_generator.get_state()
    try:
        return draw(None)
    finally:
        torch.default_generator.set_state(before)


def move_on() -> None:
    """Take that number."""
    draw(None)
