"""Checkpoints of GPTQ, AWQ and compressed-tensors, whose weights are integers of 4 or 8 bits.

A weight (N, H) has codes q, and a scale s and a zero point z for each output and group of inputs; it represents
``(q - z) * s``. That is ``s * q + offset`` with ``offset = -z * s``, pymoe's format "affine", if float32 can represent
the offset without rounding (this is checked). The three methods differ in the tensors that replace ``NAME.weight``, and
in the order of the codes in words of 32 bits; the first code is in the lowest bits:

- GPTQ: a word of ``qweight`` (H / 8, N) has 8 codes of 4 bits along the inputs, a word of ``qzeros`` (groups, N / 8)
  has 8 zero points along the outputs, ``scales`` is (groups, N), and ``g_idx`` (H,) has the group of each input. Files
  of version 1 (``checkpoint_format`` "gptq") store zero points minus 1; those of "gptq_v2" store them unchanged.
  Sources: ``auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py`` of AutoGPTQ, and
  ``convert_gptq_v1_to_v2_format_module`` in ``gptqmodel/utils/model.py`` of GPTQModel.
- AWQ, in its layout "gemm": ``qweight`` (H, N / 8) and ``qzeros`` (groups, N / 8) have codes along the outputs, in the
  order 0, 2, 4, 6, 1, 3, 5, 7, and ``scales`` (groups, N). Sources: ``awq/modules/linear/gemm.py`` and
  ``awq/utils/packing_utils.py`` of AutoAWQ.
- compressed-tensors, in its format "pack-quantized": ``weight_packed`` (N, ceil(H / 8)) has codes along the inputs,
  ``weight_scale`` (N, groups), ``weight_zero_point`` (ceil(N / 8), groups) along the outputs unless the weights are
  symmetric, and ``weight_shape`` is [N, H]. Codes and zero points are signed; words store them plus half their range.
  Source: ``compressors/quantized_compressors/pack_quantized.py`` of compressed-tensors.

With 8 bits a word has 4 codes. The row of bytes that is made for an output has its codes, one byte each, then the
scales and then the offsets, in float32, one for each group of pymoe's format: 128 inputs with 4 bits, 32 with 8. The
scales and offsets of larger groups are repeated.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pymoe._common.types import FORMATS, RUNS, up
from pymoe.integrations.transformers.stored_format import WEIGHT, StoredRows, opened
from pymoe.nn import QuantizedLinear
from pymoe.ops import pack_weight

GROUPS = {bits: RUNS[number][0] for (format, bits), number in FORMATS.items() if format == "affine"}
"""Number of inputs that share a scale and an offset in the format "affine", by its bits."""
SCALES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of scales, which all become float32 without rounding."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each of 8 outputs in a word of AWQ."""


@dataclass(frozen=True)
class _Integers(StoredRows):
    """Integers with a scale and a zero point for each output and group of inputs."""

    code_bits: int
    """Bits of a code in the files."""
    group: int | None
    """Number of inputs of a group; None if an output has a single scale for all inputs."""
    ordered: bool
    """Whether a group may have inputs that are not neighbours (act-order), so that the files must have ``order``."""

    of_unbiased = ("bias",)
    order: ClassVar[str | None] = None
    """The part with the group of each input; None if the method has none."""
    needed: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    """The parts that every weight must have."""

    @abstractmethod
    def _read(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes (N, H) uint8, scales (N, groups) and zero points (N, groups), both float32.

        Raises:
            ValueError: as for :meth:`joined`.
        """

    def tensors_in(self, files: Iterable[str]) -> set[str]:
        """Return the names of the tensors of quantised weights in the safetensors files among ``files``."""
        found: dict[str, set[str]] = {}
        for name in (name for file in opened(files) for name in list(file.keys())):
            path, _dot, part = name.rpartition(".")
            if part in self.parts[1:]:
                found.setdefault(path, set()).add(part)
        for path, parts in found.items():
            for part in self._required:
                if part not in parts:
                    raise ValueError(f"from_pretrained: expected the checkpoint to have '{path}.{part}', got none")
        return {f"{path}.{part}" for path, parts in found.items() for part in parts}

    @property
    def _required(self) -> tuple[str, ...]:
        return self.needed + ((self.order,) if self.ordered and self.order else ())

    def joined(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return rows of bytes, (N, H + 8 * groups of pymoe's format) uint8: codes, scales and offsets."""
        bias = parts.get("bias")
        if bias is not None and bool(bias.any()):
            raise ValueError("expected no bias, or zeros for it, as the model has none, got other numbers")
        codes, scales, zeros = self._read_checked(parts)
        products = scales.double() * zeros.double()  # exact: the factors have at most 24 and 8 bits
        offsets = -products.float()
        if not torch.equal(offsets.double(), -products):
            raise ValueError("expected zero points times scales to be float32 without rounding, which they are not")
        outputs, inputs = codes.shape
        groups = self._own_groups(inputs)
        repeats = groups if self.group is None else self.group // GROUPS[self.bits]
        ends = (end.repeat_interleave(repeats, dim=1)[:, :groups].contiguous() for end in (scales, offsets))
        return torch.cat([codes, *(end.view(torch.uint8).view(outputs, 4 * groups) for end in ends)], dim=1)

    def packed_weight(self, name: str, rows: Tensor, layer: QuantizedLinear) -> Tensor:
        """Return the packed bytes of a stacked weight; every code, scale and offset is kept unchanged."""
        inputs = layer.input_features
        groups = self._own_groups(inputs)
        self.check_rows(name, rows, layer, inputs + 8 * groups)
        ends = self.numbers_after(rows, inputs)
        scales, offsets = ends.split(groups, dim=2) if groups else (ends, ends)
        return pack_weight(rows[..., :inputs], scales, offsets, bits=self.bits).packed

    def dequantized(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return ``(q - z) * s`` for codes q, zero points z and scales s, in float32, rounded once."""
        codes, scales, zeros = self._read_checked(parts)
        inputs = codes.shape[1]
        size = inputs if self.group is None else self.group
        scales, zeros = (end.repeat_interleave(size, dim=1)[:, :inputs] for end in (scales, zeros))
        return (codes.float() - zeros) * scales

    def _read_checked(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        if WEIGHT in parts:
            raise ValueError(f"expected {', '.join(self._required)} without {WEIGHT}, got {', '.join(parts)}")
        for part in self._required:
            if part not in parts:
                raise ValueError(f"expected {part}, got none")
        codes, scales, zeros = self._read(parts)
        if not bool(scales.isfinite().all()):
            raise ValueError("expected scales to be numbers, got NaN or an infinity")
        return codes, scales, zeros

    def _own_groups(self, inputs: int) -> int:
        """Return the number of groups into which pymoe's format "affine" divides ``inputs`` inputs."""
        return up(inputs, GROUPS[self.bits]) // GROUPS[self.bits]

    def _groups(self, inputs: int) -> int:
        """Return the number of groups into which the files divide ``inputs`` inputs."""
        return 1 if self.group is None else up(inputs, self.group) // self.group

    def _check_order(self, parts: Mapping[str, Tensor], inputs: int) -> None:
        """Raise ValueError if the files have groups that do not consist of neighbouring inputs."""
        if self.order is None or self.order not in parts:
            return
        index = _part(parts, self.order, (inputs,), torch.int32, torch.int64)
        if not torch.equal(index.long(), torch.arange(inputs) // (self.group or max(inputs, 1))):
            raise ValueError(f"expected neighbouring inputs in a group, got another order (act-order) in {self.order}")


@dataclass(frozen=True)
class _Gptq(_Integers):
    less: int
    """What must be added to stored zero points: 1 for files of version 1, else 0."""

    parts = (WEIGHT, "qweight", "qzeros", "scales", "g_idx")
    order = "g_idx"

    def _read(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        in_word = 32 // self.code_bits
        words = _part(parts, "qweight", (None, None), torch.int32)
        inputs, outputs = words.shape[0] * in_word, words.shape[1]
        groups = self._groups(inputs)
        zeros = _part(parts, "qzeros", (groups, up(outputs, in_word) // in_word), torch.int32)
        scales = _part(parts, "scales", (groups, outputs), *SCALES)
        self._check_order(parts, inputs)
        stored = _codes(zeros, self.code_bits)[:, :outputs]
        largest = 2**self.code_bits - 1
        if self.less and bool((stored == largest).any()):
            raise ValueError(
                f"expected zero points of 1 to {largest}, got a stored {largest}, which is {largest + 1} to some "
                f"readers of such files and 0 to others"
            )
        return _codes(words.t(), self.code_bits), scales.float().t(), (stored.float() + self.less).t()


class _Awq(_Integers):
    parts = (WEIGHT, "qweight", "qzeros", "scales")

    def _read(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        words = _part(parts, "qweight", (None, None), torch.int32)
        inputs, outputs = words.shape[0], words.shape[1] * len(AWQ_ORDER)
        groups = self._groups(inputs)
        zeros = _part(parts, "qzeros", (groups, words.shape[1]), torch.int32)
        scales = _part(parts, "scales", (groups, outputs), *SCALES)
        codes, stored = (
            _codes(one, self.code_bits).unflatten(1, (-1, len(AWQ_ORDER)))[..., AWQ_ORDER].flatten(1)
            for one in (words, zeros)
        )
        return codes.t().contiguous(), scales.float().t(), stored.float().t()


@dataclass(frozen=True)
class _CompressedTensors(_Integers):
    symmetric: bool
    """Whether all zero points are 0; the files then need not have them."""

    parts = (WEIGHT, "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    order = "weight_g_idx"
    needed = ("weight_packed", "weight_scale", "weight_shape")

    @property
    def _required(self) -> tuple[str, ...]:
        return super()._required + (() if self.symmetric else ("weight_zero_point",))

    def _check_order(self, parts: Mapping[str, Tensor], inputs: int) -> None:
        """Raise ValueError as for other methods, except if an index is -1: compressed-tensors has then set no order."""
        index = parts.get("weight_g_idx")
        if index is None or not bool((index == -1).any()):
            super()._check_order(parts, inputs)

    def _read(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        in_word = 32 // self.code_bits
        shape = _part(parts, "weight_shape", (2,), torch.int64, torch.int32)
        outputs, inputs = (int(size) for size in shape)
        words = _part(parts, "weight_packed", (outputs, up(inputs, in_word) // in_word), torch.int32)
        groups = self._groups(inputs)
        scales = _part(parts, "weight_scale", (outputs, groups), *SCALES)
        self._check_order(parts, inputs)
        if self.symmetric:
            if "weight_zero_point" in parts and bool(parts["weight_zero_point"].any()):
                raise ValueError("expected weight_zero_point of symmetric weights to be 0, got other numbers")
            zeros = torch.full((outputs, groups), 2.0 ** (self.code_bits - 1))
        else:
            stored = _part(parts, "weight_zero_point", (up(outputs, in_word) // in_word, groups), torch.int32)
            zeros = _codes(stored.t(), self.code_bits).t()[:outputs].float()
        return _codes(words, self.code_bits)[:, :inputs].contiguous(), scales.float(), zeros


def _part(parts: Mapping[str, Tensor], part: str, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> Tensor:
    """Return the tensor ``part``; raise ValueError unless it has this shape (None: any) and one of these dtypes."""
    tensor = parts[part]
    sizes = tuple(tensor.shape)
    if len(sizes) != len(shape) or any(one not in (None, size) for one, size in zip(shape, sizes, strict=True)):
        expected = ", ".join("any" if one is None else str(one) for one in shape)
        raise ValueError(f"expected {part} ({expected}), got {sizes}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"expected {part} in {dtypes[0]}, got {tensor.dtype}")
    return tensor


def _codes(words: Tensor, bits: int) -> Tensor:
    """Unpack words, (rows, columns) int32, lowest bits first; return codes, (rows, 32 / bits * columns) uint8."""
    of_words = words.contiguous().view(torch.uint8).view(words.shape[0], 4 * words.shape[1])
    return of_words if bits == 8 else torch.stack([of_words & 15, of_words >> 4], dim=2).flatten(1)


def _gptq(entries: Mapping[str, Any]) -> StoredRows:
    layout = _text(entries, "checkpoint_format", "format") or "gptq"
    if entries.get("is_marlin_format"):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2"):
        raise _refused("GPTQ", "checkpoint_format 'gptq' or 'gptq_v2'", layout)
    less = 1 if layout == "gptq" else 0
    bits, group = entries.get("bits"), entries.get("group_size")
    # Besides the entries for all layers, GPTQModel has rules for layers whose names match a pattern. Layers that match
    # a pattern with the prefix "-:" are not quantised.
    rules = [entries]
    dynamic = _mapping("GPTQ", entries, "dynamic")
    for pattern in (one for one in dynamic if not one.startswith("-:")):
        rules.append(rule := _mapping("GPTQ", dynamic, pattern))
        if (rule.get("bits", bits), rule.get("group_size", group)) != (bits, group):
            raise _refused("GPTQ", "the same bits and group_size for all layers", f"{dict(rule)} for {pattern!r}")
    ordered = any(bool(rule.get("desc_act")) for rule in rules) and group != -1
    return _of_kind(_Gptq, "gptq", "GPTQ", bits, group, ordered=ordered, less=less)


def _awq(entries: Mapping[str, Any]) -> StoredRows:
    layout = _text(entries, "version", "format", "checkpoint_format") or "gemm"
    if layout != "gemm" or entries.get("backend") == "llm-awq":
        raise _refused("AWQ", "version 'gemm'", entries.get("backend") if layout == "gemm" else layout)
    if entries.get("zero_point", True) is not True:
        raise _refused("AWQ", "zero_point", entries["zero_point"])
    if entries.get("bits") != 4:
        raise _refused("AWQ", "bits of 4", entries.get("bits"))
    return _of_kind(_Awq, "awq", "AWQ", 4, entries.get("group_size"), ordered=False)


def _compressed_tensors(entries: Mapping[str, Any]) -> StoredRows:
    name = "compressed-tensors"
    by_name = _mapping(name, entries, "config_groups")
    groups = [_mapping(name, by_name, key) for key in by_name]
    formats = {_text(entries, "format"), *(_text(one, "format") for one in groups if one.get("format"))}
    if formats != {"pack-quantized"}:
        raise _refused(name, "format 'pack-quantized'", sorted(map(str, formats)))
    sparsity = _mapping(name, entries, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise _refused(name, "weights without sparsity", sparsity["format"])
    for key in ("transform_config", "kv_cache_scheme"):
        if entries.get(key):
            raise _refused(name, f"no {key}", entries[key])
    kinds = []
    for one in groups:
        weights = _mapping(name, one, "weights")
        if rounded := [key for key in ("input_activations", "output_activations") if one.get(key)]:
            raise _refused(name, "rows that are not quantised", rounded[0])
        strategy, group = _text(weights, "strategy"), weights.get("group_size")
        if strategy is None:
            strategy = "channel" if group == -1 else "group" if group else "tensor"
        if weights.get("type", "int") != "int" or strategy not in ("group", "channel"):
            raise _refused(name, "integers for groups or channels", f"{weights.get('type')} for each {strategy}")
        group = -1 if strategy == "channel" else group
        ordered = weights.get("actorder") is True or _text(weights, "actorder") in ("group", "dynamic")
        kinds.append((weights.get("num_bits"), group, weights.get("symmetric", True) is True, ordered))
    if not kinds or any(kind != kinds[0] for kind in kinds):
        raise _refused(name, "config_groups with the same bits, groups and symmetry", kinds)
    bits, group, symmetric, ordered = kinds[0]
    return _of_kind(_CompressedTensors, name, name, bits, group, symmetric=symmetric, ordered=ordered)


STORED = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors}
"""By the name of the method, a function that returns the format of a folder from the entries of its configuration. It
raises ValueError if pymoe does not read the format."""


def _of_kind(kind: type[_Integers], method: str, name: str, code_bits: Any, group: Any, **named: Any) -> StoredRows:
    """Return the format for files of the quantisation method ``method``; errors call the method ``name``.

    Among pymoe's formats "affine", take the one with the fewest bits that represents these codes and groups exactly.

    Raises:
        ValueError: no format represents such codes and groups.
    """
    if not isinstance(code_bits, int) or code_bits not in (4, 8):
        raise _refused(name, "bits of 4 or 8", code_bits)
    if not isinstance(group, int) or group < -1 or group == 0 or (group > 0 and group % GROUPS[8]):
        raise _refused(name, f"group_size -1 or a multiple of {GROUPS[8]}", group)
    of_row = group == -1
    bits = code_bits if of_row or group % GROUPS[code_bits] == 0 else 8
    named |= {"code_bits": code_bits, "group": None if of_row else group}
    return kind(method, name, bits, "affine", "", transposed=False, layout="(E, out, in)", **named)


def _mapping(name: str, entries: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an entry that must be a JSON object; an empty mapping if it is null or missing."""
    entry = entries.get(key)
    if entry is not None and not isinstance(entry, Mapping):
        raise _refused(name, f"an object for {key}", repr(entry))
    return entry or {}


def _text(entries: Mapping[str, Any], *keys: str) -> str | None:
    """Return, in lower case, the first of the entries ``keys`` that is not None; None if all are."""
    found = (getattr(entry, "value", entry) for entry in map(entries.get, keys) if entry is not None)
    return next((str(entry).lower() for entry in found), None)


def _refused(name: str, expected: str, got: object) -> ValueError:
    return ValueError(f"from_pretrained: expected a checkpoint of {name} with {expected}, got {got}")
