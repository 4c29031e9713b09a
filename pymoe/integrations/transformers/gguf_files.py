"""Reads GGUF files of llama.cpp: experts and dense layers as packed weights, and the other tensors lazily.

llama-gguf-split cuts a file into parts, ``NAME-00001-of-00003.gguf`` and so on: each is a GGUF file with some of the
tensors, and the first has the metadata.

Layer N has its experts in ``blk.N.ffn_gate_exps.weight``, ``ffn_up_exps`` and ``ffn_down_exps``, (E, out, in) each; the
model has a single weight for gate and up. For all other tensors, transformers' own tables give the names in the model
and the conversion of the values. A dense layer keeps the codes and scales of its tensor if the conversion only moves
rows and whole groups of columns. Every tensor of the file must be one of the model's, unless transformers ignores it,
and vice versa, except that tied weights need a single tensor.
"""

from __future__ import annotations

import functools
import math
import os
import re
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from pymoe._common.types import ClampedSwiglu, up
from pymoe.integrations.transformers import gguf_blocks, interface
from pymoe.integrations.transformers.activations import fused_activation
from pymoe.integrations.transformers.gguf_blocks import Order
from pymoe.integrations.transformers.quantized import stacked_weights
from pymoe.integrations.transformers.stored_format import AS_STORED, Format, StoredFormat
from pymoe.nn import QuantizedLinear

STORED = StoredFormat("gguf", "GGUF", None, AS_STORED, "", transposed=None, layout="")

MODELS = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen35moe": "qwen3_5_moe_text",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
}
"""transformers' model types, by the architecture that a file names."""
PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""The tensors of a file that together have the rows of a stacked weight, in order."""
ENTRIES: dict[str, Callable[[Any], Any]] = {
    "block_count": lambda config: config.num_hidden_layers,
    "expert_used_count": lambda config: config.num_experts_per_tok,
    "attention.head_count": lambda config: config.num_attention_heads,
    "attention.head_count_kv": lambda config: config.num_key_value_heads,
    "attention.key_length": lambda config: (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ),
    "attention.layer_norm_rms_epsilon": lambda config: config.rms_norm_eps,
    "attention.sliding_window": lambda config: getattr(config, "sliding_window", None),
    "rope.freq_base": lambda config: config.rope_parameters["rope_theta"],
    "rope.dimension_count": lambda config: int(
        ENTRIES["attention.key_length"](config) * config.rope_parameters.get("partial_rotary_factor", 1.0)
    ),
    "ssm.group_count": lambda config: getattr(config, "linear_num_key_heads", None),
    "ssm.time_step_rank": lambda config: getattr(config, "linear_num_value_heads", None),
    "ssm.state_size": lambda config: getattr(config, "linear_key_head_dim", None),
    "rope.scaling.type": lambda config: {"default": "none"}.get(
        config.rope_parameters["rope_type"], config.rope_parameters["rope_type"]
    ),
    "rope.scaling.factor": lambda config: config.rope_parameters.get("factor", 1.0),
    "rope.scaling.original_context_length": lambda config: config.rope_parameters.get(
        "original_max_position_embeddings", config.max_position_embeddings
    ),
}
"""Entries of the metadata (without the architecture's prefix) that the sizes of tensors do not imply, each with a
function that returns the value from a model's configuration."""
SPLIT = ("split.no", "split.count", "split.tensors.count")
"""Entries of the metadata of a part: its index, the number of parts, and the number of tensors in all parts."""
Process = Callable[[Any, str], Any]
"""Takes the values of a tensor of the file and its name there; returns the values of the model's tensor."""
DAMAGED = (ArithmeticError, LookupError, MemoryError, TypeError, ValueError, struct.error)
"""Errors that header readers raise for a damaged header."""


def package() -> Any:
    """Return the package gguf.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError("reading GGUF files needs the package gguf: pip install gguf") from error
    return gguf


class Weight(NamedTuple):
    """A weight of the model (stacked, or of a dense layer) or the bias of a stacked weight, with its tensors in the
    file.
    """

    tensors: tuple[Any, ...]
    """Tensors of ``GGUFReader``: a single one, or gate and up."""
    format: Format
    interleaved: bool = False
    """Whether rows of gate and up alternate in the model."""
    order: Order | None = None
    """The order of rows and columns of a dense layer's weight; None for a stacked weight."""

    @property
    def types(self) -> list[str]:
        """Return the GGUF types of the tensors, such as ``"Q4_K"``."""
        return [one.tensor_type.name for one in self.tensors]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Join an expert's rows from each tensor, (N, ...) each, into the rows of the model's weight."""
        return torch.stack(parts, dim=1).flatten(0, 1) if self.interleaved else torch.cat(parts)

    def packed(self, name: str, layer: QuantizedLinear) -> Tensor:
        """Return the packed bytes of this weight.

        Args:
            name: name of the weight in the model, for errors.
            layer: a layer that has the format and sizes of the weight.

        Raises:
            ValueError: a scale or weight is not a finite number.
        """
        assert (layer.format, layer.bits) == self.format
        try:
            if self.order is not None:
                shape = layer.output_features, layer.input_features
                return gguf_blocks.packed_rows(self.tensors[0], shape, self.format, self.order, package())
            return gguf_blocks.packed_weight(self.tensors, self.format, self.join, package())
        except ValueError as error:
            names = " and ".join(repr(one.name) for one in self.tensors)
            raise ValueError(f"expected weights that can be packed, got {names} for {name!r}: {error}") from error

    def bias(self) -> Tensor:
        """Return the bias that the tensors contain, (E, N) float32."""
        parts = [torch.from_numpy(_values(one)).T for one in self.tensors]
        return self.join(parts).T.contiguous()

    def whole(self, transposed: bool) -> Tensor:
        """Return the weight as (E, N, H), or as (E, H, N) if ``transposed``. None of its tensors may be quantised."""
        weight = gguf_blocks.floating_weight(self.tensors, self.join)
        return weight.mT.contiguous() if transposed else weight


class LazyTensor:
    """A tensor that is read only when transformers indexes it, as transformers does with slices of safetensors."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self.read = read

    def get_dtype(self) -> str:
        """Return safetensors' name for float32, although the values of unquantised experts may have another dtype."""
        return "F32"

    def __getitem__(self, _: Any) -> Tensor:
        return self.read()


class GgufFile:
    """A GGUF file, or all parts of one, whose headers have been read and checked.

    Args:
        path: path of the file, or of its first part.

    Raises:
        ImportError: the package gguf is not installed.
        OSError: there is no such file.
        ValueError: a header is damaged, a tensor is not where llama.cpp would look for it, a file is truncated or has
            trailing bytes, a part is missing or is part of another file, or pymoe does not read the architecture.
    """

    def __init__(self, path: str) -> None:
        self.tensors: dict[str, Any] = {}
        metadata, said = self._read(path)
        count = said[1]
        self.in_parts = count not in (None, 0, 1)
        if self.in_parts:
            self._read_parts(path, said)
        if metadata is None:
            raise ValueError(f"from_pretrained: expected a GGUF file that names its architecture, got {path}")
        self.metadata = metadata
        self.architecture = str(metadata["general.architecture"])
        if self.architecture not in MODELS:
            raise ValueError(
                f"from_pretrained: expected a GGUF file of the architecture {', '.join(map(repr, MODELS))}, got "
                f"{self.architecture!r}: {path}"
            )
        self.stacked: dict[str, Weight] = {}
        """Stacked weights by their names in the model, from :meth:`plan`."""
        self.dense: dict[str, Weight] = {}
        """Weights of dense layers that stay quantised."""
        self.others: dict[str, LazyTensor] = {}
        """All other tensors of the model."""
        self.floating: dict[str, Weight] = {}
        """The stacked weights among ``others``."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the experts' weights in the file; None if some are quantised or their dtypes differ."""
        types = {one.tensor_type.name for name, one in self.tensors.items() if name.endswith("_exps.weight")}
        return gguf_blocks.FLOATING.get(types.pop()) if len(types) == 1 else None

    def _read(self, path: str, part: list[Any] | None = None) -> tuple[dict[str, Any] | None, list[Any]]:
        """Read the header of a file and add its tensors to ``tensors``; return the metadata and the values of the keys
        ``SPLIT``.

        The metadata are None if they name no architecture.

        Args:
            path: path of the file.
            part: the values that the file must have for the keys ``SPLIT``; None allows any values.
        """
        gguf = package()
        try:
            # GGUFReader trusts the lengths in the header; gguf_metadata checks them against the size of the file.
            metadata = interface.gguf_metadata(path)
            reader = gguf.GGUFReader(path, "c")
            said = [reader.fields[key].contents() if key in reader.fields else None for key in SPLIT]
        except DAMAGED as error:
            raise ValueError(f"from_pretrained: expected a whole GGUF file, got {path}: {error}") from error
        if part not in (None, said):
            raise ValueError(
                f"from_pretrained: expected a GGUF file whose {', '.join(SPLIT)} are {part}, got {said}: {path}"
            )
        expected = reader.data_offset
        for one in reader.tensors:
            size, shape = gguf.GGML_QUANT_SIZES[one.tensor_type][0], one.shape
            if one.data_offset != expected or not len(shape) or int(shape[0]) % size or 0 in shape:
                raise ValueError(
                    f"from_pretrained: expected a GGUF file with whole blocks of {one.name!r} at byte {expected}, got "
                    f"shape {shape.tolist()} in {one.tensor_type.name} at byte {one.data_offset} of {path}"
                )
            expected = up(expected + int(one.n_bytes), int(reader.alignment))
            if one.name in self.tensors:
                raise ValueError(f"from_pretrained: expected {one.name!r} in one part of a GGUF file, got two: {path}")
            self.tensors[one.name] = one
        if len(reader.data) > expected:
            raise ValueError(
                f"from_pretrained: expected a GGUF file of {expected} bytes, got {len(reader.data)}: {path}"
            )
        return metadata, said

    def _read_parts(self, path: str, said: list[Any]) -> None:
        """Add the tensors of all parts except the first to ``tensors``.

        Args:
            path: path of the first part.
            said: the values of the keys ``SPLIT`` in the first part.
        """
        number, count, total = said
        ending = f"-00001-of-{count!s:0>5}.gguf"
        if number != 0 or not isinstance(count, int) or not path.endswith(ending):
            raise ValueError(
                f"from_pretrained: expected the first of {count} parts of a GGUF file, split.no 0 in a file whose name "
                f"ends in {ending!r}, got split.no {number}: {path}"
            )
        for number in range(1, count):
            part = path.removesuffix(ending) + f"-{number + 1:05}-of-{count:05}.gguf"
            if not os.path.isfile(part):
                raise ValueError(f"from_pretrained: expected {count} parts of a GGUF file in a folder, got no {part}")
            self._read(part, [number, count, total])
        if total != len(self.tensors):
            raise ValueError(
                f"from_pretrained: expected parts of a GGUF file with {total} tensors, got {len(self.tensors)}: {path}"
            )

    def plan(self, model: Any, dense: Container[str]) -> None:
        """Assign the tensors of the file to the weights of a model, before its experts and dense layers are replaced.

        Warn about weights of experts that will be rounded: once about those whose types have no format in pymoe, and
        once about those whose values the model's dtype cannot represent.

        Args:
            model: the model, not yet quantised.
            dense: names of dense layers' weights that should stay quantised where pymoe has a format for them.

        Raises:
            ValueError: the model has another architecture, or its config contradicts the file; a tensor is missing,
                unknown or of another size, or has a type that cannot be widened; or the config ties two parameters,
                and the file has a tensor for each of them.
        """
        if model.config.model_type != MODELS[self.architecture]:
            raise ValueError(
                f"from_pretrained: expected a model of type {MODELS[self.architecture]!r} for a GGUF file of "
                f"{self.architecture!r}, got {model.config.model_type!r}"
            )
        for key, value_of in ENTRIES.items():
            name = f"{self.architecture}.{key}"
            value, expected = value_of(model.config), self.metadata.get(name)
            # ``block_count`` includes layers that predict further tokens, which transformers' models lack.
            if key == "block_count":
                further = self.metadata.get(f"{self.architecture}.nextn_predict_layers")
                value += further if isinstance(further, int) else 0
            if expected is not None and not _equal(value, expected):
                raise ValueError(
                    f"from_pretrained: expected a config that agrees with {name} = {expected} of the GGUF file, got "
                    f"{value}"
                )
        left = dict(self.tensors)
        for path, module in model.named_modules():
            self._plan_experts(path, module, left)
        names, process = interface.gguf_names(model, self.architecture, left)
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in self.stacked}
        for name, tensor in left.items():
            # If a parameter is not called weight, transformers' table has its name without this suffix.
            bare = names.get(name.removesuffix(".weight"))
            target = names.get(name, bare) or ""
            if target in state and target not in self.others and target not in self.dense:
                expected = tuple(state[target].shape)
                if [*filter((1).__ne__, expected)] != [*filter((1).__ne__, _shape(tensor))]:
                    raise _other_size(tensor, expected, target)
                if target in dense and (weight := dense_weight(tensor, process, expected)):
                    self.dense[target] = weight
                else:
                    _check_widened([tensor])
                    self.others[target] = LazyTensor(functools.partial(_processed, tensor, process, expected))
            elif not interface.ignores(model, target):
                raise ValueError(
                    f"from_pretrained: expected a GGUF file whose tensors {type(model).__name__} has, got {name!r}"
                )
        tied = interface.tied(model)
        shared = sorted(tied & self.others.keys())
        if len(shared) > 1:
            raise ValueError(
                f"from_pretrained: expected a config that does not tie {shared[0]!r} and {shared[1]!r}, as the GGUF "
                f"file has both, got one that does"
            )
        found = self.others.keys() | self.dense.keys()
        missing = [name for name in state if name not in found and not (shared and name in tied)]
        if missing:
            raise ValueError(f"from_pretrained: expected a GGUF file with a tensor for {missing[0]!r}, got none")
        self._warn(model)

    def _plan_experts(self, path: str, module: Any, left: dict[str, Any]) -> None:
        """Assign the tensors of a module's experts to its stacked weights, and remove these tensors from ``left``."""
        kind = fused_activation(module) if interface.is_behind(module) else None
        interleaved = isinstance(kind, ClampedSwiglu) and kind.interleaved
        planned: dict[str, Weight] = {}
        for own, weight in (stacked_weights(module) or {}).items():
            layer = re.search(r"\blayers\.(\d+)\.", path)
            prefixes = [f"blk.{layer[1] if layer else path}.ffn_{part}_exps" for part in PARTS[own]]
            for name, ending, shape in (
                (f"{path}.{own}", ".weight", tuple(weight.shape)),
                (f"{path}.{own}_bias", ".bias", tuple(weight.shape[:2])),
            ):
                if ending == ".bias" and not interface.flags(module).biased:
                    continue
                tensors = []
                for key in (prefix + ending for prefix in prefixes):
                    if key not in left:
                        raise ValueError(f"from_pretrained: expected a GGUF file with {key!r} for {name!r}, got none")
                    tensors.append(left.pop(key))
                    expected = (shape[0], shape[1] // len(prefixes), *shape[2:])
                    if _shape(tensors[-1]) != expected:
                        raise _other_size(tensors[-1], expected, name)
                format = gguf_blocks.format_of(one.tensor_type.name for one in tensors)
                if format == gguf_blocks.ROUNDED or ending == ".bias":
                    _check_widened(tensors)
                found = Weight(tuple(tensors), format, interleaved and len(tensors) > 1)
                if ending == ".bias":
                    self.others[name] = LazyTensor(found.bias)
                else:
                    planned[name] = found
        if all(kind in gguf_blocks.FLOATING for one in planned.values() for kind in one.types):
            transposed = interface.flags(module).transposed
            self.others |= {name: LazyTensor(functools.partial(one.whole, transposed)) for name, one in planned.items()}
            self.floating |= planned
        else:  # pack both weights if one of them must be packed
            self.stacked |= planned

    def _warn(self, model: Any) -> None:
        eight = [one for one in self.stacked.values() if one.format == gguf_blocks.ROUNDED]
        dtypes = {name: model.get_parameter(name).dtype for name in self.floating}
        cast = [one for name, one in self.floating.items() if not gguf_blocks.is_held(one.types, dtypes[name])]
        for found, result in (
            (eight, "8 bits, as pymoe has no format for their types"),
            (cast, f"the dtype of the model, {model.dtype}"),
        ):
            if found:
                types = Counter(" and ".join(sorted(set(one.types))) for one in found)
                counts = ", ".join(f"{count} in {name}" for name, count in sorted(types.items()))
                warnings.warn(
                    f"from_pretrained: {len(found)} of {len(self.stacked) + len(self.floating)} weights of experts are "
                    f"rounded to {result}: {counts}; the first is {found[0].tensors[0].name!r}",
                    stacklevel=2,
                )


def _equal(value: Any, expected: Any) -> bool:
    """Return whether ``value``, from a model's configuration, equals ``expected``, from a file's metadata.

    ``expected`` may have any type. Numbers are equal within a relative error of 1e-6.
    """
    if isinstance(value, str):
        return bool(value == expected)
    return all(isinstance(one, int | float) for one in (value, expected)) and math.isclose(
        value, expected, rel_tol=1e-6
    )


def _shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor of ``GGUFReader`` in torch's order of dimensions."""
    return tuple(reversed(tensor.shape.tolist()))


def _other_size(tensor: Any, expected: Iterable[int], name: str) -> ValueError:
    return ValueError(
        f"from_pretrained: expected a GGUF file with {tensor.name!r} of shape {tuple(expected)} for {name!r}, got "
        f"{_shape(tensor)}; where its metadata lacks sizes, pass the model's config"
    )


def _check_widened(tensors: Iterable[Any]) -> None:
    """Raise ValueError if the package gguf cannot widen the type of one of the tensors."""
    gguf = package()
    for one in tensors:
        try:
            _, size = gguf.GGML_QUANT_SIZES[one.tensor_type]
            gguf.dequantize(one.data.reshape(-1)[: size // one.data.itemsize], one.tensor_type)
        except (KeyError, NotImplementedError) as error:
            raise ValueError(
                f"from_pretrained: expected a GGUF file whose types can be widened, got {one.name!r} in "
                f"{one.tensor_type.name}"
            ) from error


def dense_weight(tensor: Any, process: Process, shape: tuple[int, ...]) -> Weight | None:
    """Return the weight of a dense layer that can stay quantised; None if no format can keep its codes and scales.

    Args:
        tensor: a tensor of ``GGUFReader``, (N, H).
        process: converts the tensor's values to those of the model's weight.
        shape: (N, H).
    """
    order = _order(tensor.name, process, shape) if tensor.tensor_type.name in gguf_blocks.KEPT else None
    if order is None:
        return None
    format = gguf_blocks.format_of([tensor.tensor_type.name], order.keeps_groups)
    return None if format == gguf_blocks.ROUNDED else Weight((tensor,), format, order=order)


def _order(name: str, process: Process, shape: tuple[int, ...]) -> Order | None:
    """Return the order in which ``process`` puts the rows and columns of a matrix; None if it does anything else.

    To find out, call ``process`` with a matrix of row indices and a matrix of column indices. The indices are negative,
    as they are counted from the end. If ``process`` computes with values, it returns other values, or reverses the
    order of the columns; a reversed order breaks up all groups, so that no format fits.
    """
    places = [numpy.arange(-size, 0, dtype=numpy.int32) for size in shape]
    given = [numpy.broadcast_to(one, shape) for one in (places[0][:, None], places[1])]
    rows, columns = found = [process(one, name) for one in given]
    if rows is given[0]:
        return Order()
    if any(one.shape != shape for one in found):
        return None
    if (rows != rows[:, :1]).any() or (columns != columns[:1]).any():
        return None
    order = list(zip((rows[:, 0], columns[0]), places, strict=True))
    if any((numpy.sort(one) != all_of_them).any() for one, all_of_them in order):
        return None
    indices = (
        None if (one == same).all() else torch.from_numpy(one.astype(numpy.int64) + len(one)) for one, same in order
    )
    return Order(*indices)


def _processed(tensor: Any, process: Process, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of the model that ``process`` makes of the file's tensor, in float32 and of shape ``shape``."""
    values = process(_values(tensor), tensor.name).reshape(shape)
    # The package gguf returns float32 values without a copy: they are still mapped from the file, so copy them.
    of_file = isinstance(values, numpy.memmap)
    return torch.from_numpy(values.astype(numpy.float32, order="C", copy=of_file))


def _values(tensor: Any) -> numpy.ndarray[Any, Any]:
    """Return the values of a tensor of ``GGUFReader``, dequantised to float32."""
    values: numpy.ndarray[Any, Any] = package().dequantize(tensor.data, tensor.tensor_type)
    return values
