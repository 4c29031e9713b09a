"""Formats in which checkpoints of other methods hold experts, and which pymoe keeps as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from pymoe._common.types import WeightFormat
from pymoe.integrations.transformers import interface

AS_STORED: Literal["stored"] = "stored"
"""The name by which a configuration asks for the format that the files have, or for several."""


class StoredFormat(NamedTuple):
    """A format of experts in the files of another method."""

    method: str
    """The name of the method in configurations of such checkpoints."""
    name: str
    """The name of the format in errors."""
    bits: int | None
    """The bits of pymoe's own format with the same codes and scales; None if weights have several formats."""
    format: WeightFormat | Literal["stored"]
    """The name of that format."""
    ending: str
    """What the name of a weight's codes in files has in addition to that of the weight."""
    transposed: bool | None
    """Whether the model's own weights are (E, in, out), not (E, out, in); None if they may be either."""
    layout: str
    """These dimensions in words, for errors."""

    def check_model(self, model: Any, weights: Iterable[str], bits: int | None, format: str) -> None:
        """Raise if the experts of a model cannot hold such weights unchanged.

        Args:
            model: the model, before its weights are loaded.
            weights: names of its stacked weights.
            bits: bits that the weights shall have.
            format: format that they shall have.

        Raises:
            ValueError: ``bits`` and ``format`` are others, or the model's weights have other dimensions.
        """
        asked = ", ".join(f"{key}={value!r}" for key, value in (("bits", self.bits), ("format", self.format)) if value)
        for name in sorted(weights):
            if (bits, format) != (self.bits, self.format):
                raise ValueError(
                    f"from_pretrained: expected PymoeConfig({asked}) for a checkpoint in {self.name}, which is not "
                    f"rounded again, got bits={bits} and format={format!r} for {name + self.ending!r}"
                )
            if self.transposed not in (None, interface.flags(model.get_submodule(name.rpartition(".")[0])).transposed):
                raise ValueError(
                    f"from_pretrained: expected a model with weights {self.layout} for a checkpoint in {self.name}, "
                    f"got {name!r} of {type(model).__name__}"
                )
