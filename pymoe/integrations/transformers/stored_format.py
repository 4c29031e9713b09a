"""Formats of experts in checkpoints of other quantisation methods that pymoe keeps without rounding.

:class:`StoredRows` is for files with separate experts, where each weight is in several tensors: codes, scales and
others. transformers' own converters stack experts and concatenate gate and up. So that they can do this to all tensors
of a weight at once, the format joins them into rows of bytes, one row for each output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pymoe._common.types import WeightFormat
from pymoe.integrations.transformers import interface
from pymoe.nn import QuantizedLinear

Format = tuple[WeightFormat, int]
"""A format's name and bits, as the keys of ``FORMATS``."""

WEIGHT = "weight"
"""The last part of the name of a weight that is not quantised."""

AS_STORED: Literal["stored"] = "stored"
"""The value of ``format`` in a configuration that means the format or formats of the files."""


@dataclass(frozen=True)
class StoredFormat:
    """The format in which files of another quantisation method store experts."""

    method: str
    """The name of the method in configurations of such checkpoints."""
    name: str
    """The name of the format in errors."""
    bits: int | None
    """The bits of pymoe's own format with the same codes and scales; None if weights have several formats."""
    format: WeightFormat | Literal["stored"]
    """The name of that format."""
    ending: str
    """Suffix of the name of a weight's codes in files after the name of the weight."""
    transposed: bool | None
    """Whether the model's own weights are (E, in, out), not (E, out, in); None if they may be either."""
    layout: str
    """The order of the dimensions of the model's own weights, for errors."""

    def check_model(self, model: Any, weights: Iterable[str], bits: int | None, format: str) -> None:
        """Raise ValueError if the experts of a model cannot take weights of this format unchanged.

        Args:
            model: the model, before its weights are loaded.
            weights: names of its stacked weights.
            bits: the bits that the user's configuration requests.
            format: the format that the user's configuration requests.

        Raises:
            ValueError: ``bits`` and ``format`` are not those of the files, or the model's weights have their dimensions
                in another order.
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


@dataclass(frozen=True)
class StoredRows(StoredFormat, ABC):
    """A format of files that store each expert separately, and each weight as several tensors, such as codes and
    scales.
    """

    bits: int
    format: WeightFormat
    parts: ClassVar[tuple[str, ...]]
    """The last parts of the names of a weight's tensors in the files; the first is ``weight``, which is also the last
    part of the name of a weight that is not quantised."""
    of_unbiased: ClassVar[tuple[str, ...]] = ()
    """More such parts, which are looked for only if the layer has no bias in the model."""

    @abstractmethod
    def tensors_in(self, files: Iterable[str]) -> set[str]:
        """Return the names of the tensors of quantised weights in the safetensors files among ``files``.

        Raises:
            ValueError: a weight lacks a tensor that it must have.
        """

    @abstractmethod
    def joined(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Join the tensors of a weight into rows of bytes, (..., N, bytes) uint8.

        Args:
            parts: the tensors, by the part of the tensor's name that takes the place of ``weight``.

        Raises:
            ValueError: a tensor is missing or has another shape or dtype, or a value cannot be represented without
                rounding.
        """

    @abstractmethod
    def packed_weight(self, name: str, rows: Tensor, layer: QuantizedLinear) -> Tensor:
        """Return the packed bytes of a stacked weight; every code and scale is kept unchanged.

        Args:
            name: name of the weight, for errors.
            rows: (E, N, bytes), from :meth:`joined`.
            layer: a layer with the sizes that the model needs.

        Raises:
            ValueError: ``rows`` do not have these sizes, or a weight is not a finite number.
        """

    @staticmethod
    def check_rows(name: str, rows: Tensor, layer: QuantizedLinear, size: int) -> None:
        """Raise unless there are rows of ``size`` bytes for all experts and outputs of a layer."""
        if tuple(rows.shape) != (layer.num_experts, layer.output_features, size):
            raise ValueError(
                f"expected {name!r} of {layer.num_experts} experts, {layer.output_features} outputs and "
                f"{layer.input_features} inputs, got {tuple(rows.shape[:2])} and rows of {rows.shape[-1]} bytes with "
                f"scales"
            )

    @staticmethod
    def numbers_after(rows: Tensor, inputs: int) -> Tensor:
        """Return the float32 values that follow the codes in each row of bytes; the codes take ``inputs`` bytes."""
        # Copy the bytes, since even contiguous bytes may start at an address that is not aligned for float32.
        return rows[..., inputs:].clone(memory_format=torch.contiguous_format).view(torch.float32)

    @abstractmethod
    def dequantized(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Dequantise a weight that pymoe does not pack; return (N, H) float32. Errors are those of :meth:`joined`."""

    def widened(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return, in ``dtype``, a weight that pymoe does not pack. In the files, the weight may be quantised or not."""
        if set(parts) == {WEIGHT} and parts[WEIGHT].dtype.itemsize > 1:
            return parts[WEIGHT].to(dtype)
        return self.dequantized(parts).to(dtype)

    def sources(self, weights: Iterable[str], *, unbiased: bool = False) -> list[str]:
        """Return patterns for the names of the tensors that make up weights, given the patterns for the names of the
        weights. ``unbiased`` adds the tensors that files may have for a layer that has no bias in the model.
        """
        parts = self.parts + (self.of_unbiased if unbiased else ())
        # The tensors "weight" come last: before transformers 5.23, a pattern for "weight" without ``$`` would also
        # match the name "weight_scale_inv".
        return [_pattern(weight, part) for part in reversed(parts) for weight in weights]

    def collected(
        self, tensors: Mapping[str, list[Tensor]], weights: Iterable[str]
    ) -> dict[str, list[dict[str, Tensor]]]:
        """Return, for each weight, the tensors that a converter has collected.

        Args:
            tensors: the tensors, by the patterns that match their names.
            weights: patterns for the names of weights.

        Returns:
            A dictionary with a list for each pattern in ``weights`` that has tensors. An element of the list is a
            weight: a dictionary of its tensors by part.

        Raises:
            ValueError: some of the weights have a part that others lack.
        """
        found = {}
        for weight in weights:
            names = {part: _pattern(weight, part) for part in (*self.parts, *self.of_unbiased)}
            lists = {part: tensors[name] for part, name in names.items() if name in tensors}
            count = len(next(iter(lists.values()), ()))
            for part, of_part in lists.items():
                if len(of_part) != count:
                    raise ValueError(f"expected {part} of {count} weights, got {len(of_part)}")
            if lists:
                found[weight] = [dict(zip(lists, of_one, strict=True)) for of_one in zip(*lists.values(), strict=True)]
        return found

    def check_conversions(
        self, model: Any, conversions: Iterable[Any], names: Iterable[str], weights: Iterable[str]
    ) -> None:
        """Raise if transformers would convert a quantised weight without its scales, or keep other weights in float32.

        Args:
            model: the model, before its weights are loaded.
            conversions: the converters of transformers to which pymoe passes no scales.
            names: names of the tensors of quantised weights in the files.
            weights: last parts of the names of stacked weights.

        Raises:
            ValueError: the last part of a name is neither that of a stacked weight nor in ``parts``; one of the
                converters takes a tensor; or transformers keeps a weight in float32 in a model of another dtype.
        """
        names = sorted(names)
        known = (*weights, *self.parts)
        other = next((name for name in names if name.rpartition(".")[2] not in known), None)
        taken = (interface.reads(one, names) for one in conversions)
        if name := other or next(filter(None, taken), None):
            raise ValueError(
                f"from_pretrained: expected a checkpoint whose weights in {self.name} transformers does not convert "
                f"without their scales, got {name!r} for {type(model).__name__}"
            )
        kept = [name for name in interface.kept_in_float32(model) if name.endswith(f".{WEIGHT}")]
        if kept:
            raise ValueError(
                f"from_pretrained: expected a model of a dtype in which all its weights may be, got {model.dtype} for "
                f"{kept[0]!r}, which stays in float32; pass dtype=torch.float32"
            )


def opened(files: Iterable[str]) -> Iterator[Any]:
    """Open the safetensors files among ``files``, one after another, and yield each of them.

    Raises:
        ValueError: a file is truncated.
    """
    from safetensors import SafetensorError, safe_open

    for file in files:
        if str(file).endswith(".safetensors"):
            try:
                tensors = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"from_pretrained: expected a whole safetensors file, got {file}: {error}") from error
            with tensors:
                yield tensors


def _pattern(weight: str, part: str) -> str:
    """Return the pattern for the name of a weight's tensor, given the pattern for the name of the weight.

    Both may end in ``$``. ``part`` takes the place of ``weight`` in the name.
    """
    stem = weight.removesuffix("$")
    end = weight[len(stem) :]
    return (stem.removesuffix(WEIGHT) + part if stem.endswith(WEIGHT) else stem + part.removeprefix(WEIGHT)) + end
