"""A fault to be planted in a source file, one at a time, so that it is known that tests notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlantedFault:
    """``old`` becomes ``new`` at its only place in ``file``."""

    name: str
    file: str
    old: str
    new: str

    def planted(self, text: str) -> str:
        """``text``, the file's, with the fault in it.

        Raises:
            ValueError: ``old`` is not there exactly once: the file has changed, and the fault needs a new text.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)
