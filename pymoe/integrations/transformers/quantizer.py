"""Loads and saves models of transformers with quantised experts.

transformers calls the quantizer of a model, and the quantizer's operations on tensors of the checkpoint:

- ``from_pretrained(name, quantization_config=PymoeConfig(bits=4))``: transformers makes each stacked weight of experts
  from the checkpoint's tensors, and pymoe packs it before the next weight is read.
- ``save_pretrained``: the packed bytes are saved under the name of the weight itself. A program that cannot read them
  therefore finds tensors of unexpected shapes, and raises. ``NAME.sizes`` contains the number of the format and the
  numbers of features.
- ``from_pretrained(folder)`` for files that pymoe has saved: the bytes are taken unchanged.
- ``from_pretrained(name, quantization_config=PymoeConfig(bits=4, format="mxfp"))`` for files of GPT-OSS, whose
  configuration names another method: blocks and scales are laid out for the kernels, one weight after another.
  ``PymoeConfig(bits=8, format="fp")`` does the same for files in FP8, and ``format="affine"`` for files of GPTQ, AWQ
  and compressed-tensors. Dense layers that the files have in the same format keep it; other weights are widened.
- ``from_pretrained(name, gguf_file=file, quantization_config=PymoeConfig(format="stored"))`` for a GGUF file: each
  weight of experts gets the format nearest to its own, and each dense layer keeps its codes if a format represents them
  exactly. So the weights of a model have several formats, and some experts may not be quantised.
"""

from __future__ import annotations

import os
import re
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pymoe._common.contracts import check_rounded
from pymoe.integrations.transformers import (
    gguf_files,
    interface,
    mixed_files,
    mxfp4_files,
    quantized_dense,
)
from pymoe.integrations.transformers.configuration import PymoeConfig, configuration_for, configuration_for_gguf
from pymoe.integrations.transformers.quantized import stacked_weights
from pymoe.integrations.transformers.stored_format import AS_STORED, WEIGHT, Format, StoredRows, opened
from pymoe.nn import QuantizedDenseLinear, QuantizedLinear, quantize_experts
from pymoe.ops import quantize_weight

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names that stacked weights have in all models."""

if TYPE_CHECKING:
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers import HfQuantizer
else:
    _, HfQuantizer, ConversionOps = interface.quantizer_bases()


class PymoeQuantizer(HfQuantizer):
    """The quantizer that transformers calls for a model with a :class:`PymoeConfig`.

    Errors of operations are kept and raised after the model has been loaded, since transformers would only write them
    into a table that it logs.
    """

    is_trainable = True

    def __init__(self, quantization_config: PymoeConfig, **named: Any) -> None:
        super().__init__(quantization_config, **named)
        # transformers does not set pre_quantized for GGUF files, because they have no configuration of the method.
        if quantization_config.stored == gguf_files.STORED:
            self.pre_quantized = True
        self.stored = quantization_config.stored if self.pre_quantized else None
        """The format of the files, if another program has quantised their weights; else None."""
        self.weights: set[str] = set()
        """Names, in the model, of the weights that must be packed once it is loaded."""
        self.dense: dict[str, Format] = {}
        """Formats of the dense layers whose weights are in ``weights``, by the paths of the layers."""
        self.missing: set[str] = set()
        """Names of the tensors that the model lacks; transformers' own set."""
        self.floating: set[str] = set()
        """Names of the stacked weights that are not packed in files in which other weights are packed."""
        self.packed: set[str] = set()
        """Names of the weights that have been packed."""
        self.faults: dict[str, str] = {}
        """Errors of weights that could not be packed, by name."""
        self.own: Callable[[int], slice] | None = None
        """Takes a number of experts, and returns those to keep of a stacked weight; None to keep all."""
        self.state_to_save: Any = None
        """The state dict that ``save_pretrained`` was given, until it is written; None for the model's own."""
        self._hooks: list[RemovableHandle] = []
        self._tensors: set[str] = set()
        """Names of the tensors of quantised weights in files whose format is one of rows."""
        self._originals: list[tuple[Any, Any]] = []
        self.gguf: gguf_files.GgufFile | None = None
        """The GGUF file that is read; None for other files."""
        self._config: Any = None
        """The model's configuration, until its GGUF file is read."""

    def is_serializable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        """Return True, because ``generate`` may compile a step that uses a static cache."""
        return True

    def update_attn_implementation(self, config: Any) -> Any:
        """Return ``config``; raise ValueError if it requests an implementation of experts other than pymoe's.

        transformers calls this before it creates the model, so this is also where the quantizer gets the configuration.
        """
        name = interface.implementation(config)
        if name not in (None, interface.NAME):
            raise ValueError(
                f"from_pretrained: expected experts_implementation='pymoe' for quantised experts, got {name!r}"
            )
        self._config = config
        return config

    def read_header(self, gguf_file: str) -> None:
        """Read the header of a GGUF file; transformers calls this once it knows the path."""
        self.gguf = gguf_files.GgufFile(gguf_file)
        if self.gguf.in_parts and "output.weight" in self.gguf.tensors:
            # transformers would tie the head if the first part lacks it, even if another part has it.
            self._config.tie_word_embeddings = False

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return ``dtype``; if it is None, the dtype of the experts in the GGUF file, else torch's default dtype."""
        if dtype is None and self.gguf is not None:
            dtype = self.gguf.dtype
        return torch.get_default_dtype() if dtype is None else dtype

    def get_state_dict(self, _: str, model: Any) -> dict[str, Any]:
        """Return the tensors of the GGUF file by their names in the model.

        Weights that will be packed are empty tensors, because the operation :class:`TakeFromGguf` reads them itself.
        """
        assert self.gguf is not None
        empty = torch.empty(0, dtype=torch.uint8)
        return {**self.gguf.others, **dict.fromkeys(self.gguf.stacked | self.gguf.dense, empty)}

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        files = checkpoint_files or ()
        numbers: dict[str, int | None] = {}
        if isinstance(self.stored, StoredRows):
            self._tensors = self.stored.tensors_in(files)
        elif self.pre_quantized and not self.stored:
            numbers = mixed_files.numbers_in(files, model)
        else:
            for _file in opened(files):
                pass  # opened() raises for truncated files; the other branches also open all files
        model.eval().set_experts_implementation(interface.NAME)
        self.weights = {
            f"{name}.{weight}" for name, one in model.named_modules() for weight in stacked_weights(one) or ()
        }
        if not self.weights:
            raise ValueError(
                f"from_pretrained: expected a model with experts that pymoe quantises, got {type(model).__name__}"
            )
        config = self.quantization_config
        if self.stored:
            self.stored.check_model(model, self.weights, config.bits, config.format)
        elif config.format == AS_STORED and not self.pre_quantized:
            raise ValueError(
                f"from_pretrained: expected a checkpoint with quantised experts for PymoeConfig(format={AS_STORED!r}), "
                f"got {min(self.weights)!r} that is not quantised"
            )
        if self.gguf is not None:
            layers = set() if config.linear_bits is not None else quantized_dense.dense_layers(model)
            self.gguf.plan(model, {name + quantized_dense.ENDING for name in layers})
        if config.linear_bits is not None:
            self.dense = dict.fromkeys(quantized_dense.dense_layers(model), ("int", config.linear_bits))
            if not self.dense:
                raise ValueError(
                    f"from_pretrained: expected a model with dense layers for linear_bits, got {type(model).__name__}"
                )
        elif isinstance(self.stored, StoredRows):
            weights = {f"{name.rpartition('.')[0]}.{WEIGHT}" for name in self._tensors}
            layers = quantized_dense.layers_of(model, set(interface.names_in_model(model, sorted(weights)).values()))
            self.dense = dict.fromkeys(layers, (self.stored.format, self.stored.bits))
        elif self.gguf is not None:
            self.dense = {
                name.removesuffix(quantized_dense.ENDING): one.format for name, one in self.gguf.dense.items()
            }
        else:
            layers = quantized_dense.layers_of(model, numbers)
            formats = mixed_files.formats_of((name + quantized_dense.ENDING for name in layers), numbers)
            self.dense = {name.removesuffix(quantized_dense.ENDING): format for name, format in formats.items()}
        if not self.pre_quantized:
            check_rounded("from_pretrained", config.format)
        else:
            self._place_layers(model, numbers)
            # If the layers are not replaced here, :class:`Pack` replaces each of them when it packs the weight.
            if config.linear_bits is None or not self.stored:
                quantized_dense.place_layers(model, self.dense)
            for layer in model.modules():
                if isinstance(layer, QuantizedLinear):
                    interface.mark_initialized(layer)
                    # Leave the sizes out of the state dict, because transformers expects each of its keys to be a
                    # tensor of a module.
                    self._hooks.append(layer.register_state_dict_post_hook(_without_sizes))
        self.weights |= {name + quantized_dense.ENDING for name in self.dense}

    def _place_layers(self, model: Any, numbers: Mapping[str, int | None]) -> None:
        """Replace the stacked weights of a model with quantised layers on the meta device.

        With the format ``AS_STORED``, replace only the weights that will be packed, and move the names of the others
        from ``weights`` to ``floating``.

        Args:
            model: the model.
            numbers: the formats' numbers, from :func:`mixed_files.numbers_in`; empty if pymoe did not save the files.
        """
        config = self.quantization_config
        if config.format != AS_STORED:
            quantize_experts(model, config.bits, config.format)
            return
        if self.gguf is not None:
            formats = {name: one.format for name, one in self.gguf.stacked.items()}
        else:
            formats = mixed_files.formats_of(sorted(self.weights), numbers)
        mixed_files.place_layers(model, formats)
        self.floating, self.weights = self.weights - formats.keys(), set(formats)

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        return not self.pre_quantized and param_name in self.weights

    def in_folder(self, packed: Tensor) -> Tensor:
        """Return a copy of packed bytes, mapped from an unnamed file in the configuration's folder; return ``packed``
        itself if there is no folder.

        The space on the disk is freed with the last reference to the tensor. If the disk is full, this raises OSError.
        """
        folder = self.quantization_config.folder
        if folder is None:
            return packed
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            # This raises if the disk is full. Writing to the mapped file would end the process with a signal.
            os.posix_fallocate(file.fileno(), 0, packed.numel())
            mapped = torch.from_file(file.name, shared=True, size=packed.numel(), dtype=torch.uint8)
        return mapped.view(packed.shape).copy_(packed)

    def kept(self, layer: QuantizedLinear) -> slice:
        """Return the slice of a weight's experts that this rank keeps: all, unless experts are spread over ranks."""
        alone = self.own is None or isinstance(layer, QuantizedDenseLinear)
        return slice(None) if alone else self.own(layer.num_experts)  # type: ignore[misc]

    def get_quantize_ops(self) -> Any:
        return Pack(self)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        if not self.pre_quantized:
            return weight_conversions
        # pymoe's converters come first, because transformers uses the first converter that matches a name.
        if isinstance(self.stored, StoredRows):
            return self._from_rows(self.stored, weight_conversions, model)
        if self.gguf is not None:
            take = [interface.converter([rf"\.{name}$"], f".{name}.packed", TakeFromGguf(self)) for name in WEIGHTS]
        elif self.stored:
            take = [
                interface.converter(mxfp4_files.sources(name), f".{name}.packed", TakeBlocks(self)) for name in WEIGHTS
            ]
        else:
            take = [
                interface.converter([rf"\.{name}$", rf"\.{name}\.sizes$"], f".{name}.packed", Take(self))
                for name in WEIGHTS
            ]
        dense = []
        for weight, _ in quantized_dense.sources(model, self.dense):
            if self.stored and self.quantization_config.linear_bits is not None:
                dense.append(interface.converter([weight], rf"\1{quantized_dense.ENDING}", AsNamed(), Pack(self)))
            elif self.gguf is not None:
                dense.append(interface.converter([weight], r"\1.packed", TakeFromGguf(self)))
            else:
                sizes = weight.removesuffix("$") + r"\.sizes$"
                dense.append(interface.converter([weight, sizes], r"\1.packed", Take(self)))
        # Saving must not reverse these converters: transformers cannot reverse a target with ``\1``, and saving adds
        # converters of its own.
        self._originals = [(one, None) for one in dense]
        plain = [
            interface.converter([rf"\b{re.escape(own)}$"], own, AsNamed())
            for own in sorted(name.removeprefix(f"{model.base_model_prefix}.") for name in self.floating)
        ]
        return plain + take + dense + weight_conversions

    def _from_rows(self, stored: StoredRows, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Return the converters for files in the format ``stored``: pymoe's own, and transformers', changed so that
        they collect all tensors of a weight.
        """
        first = []
        for one, unbiased in quantized_dense.sources(model, self.dense):
            if self.quantization_config.linear_bits is not None:
                sources, target = stored.sources([one]), rf"\1{quantized_dense.ENDING}"
                first.append(interface.converter(sources, target, Widen(self, [one], Pack(self))))
            else:
                sources = stored.sources([one], unbiased=unbiased)
                first.append(interface.converter(sources, r"\1.packed", TakeRows(self, [one])))
        for name in WEIGHTS:
            whole = [rf"\.{name}$"]
            first.append(interface.converter(stored.sources(whole), f".{name}.packed", TakeRows(self, whole)))
        others = [r"\.weight$"]
        last = interface.converter(stored.sources(others), ".weight", Widen(self, others))
        found = []
        for one in weight_conversions:
            targets: list[str] = list(one.target_patterns)
            if not interface.reads_weights_alone(one):
                found.append(one)
                continue
            weights: list[str] = list(one.source_patterns)
            if targets[0].rpartition(".")[2] in WEIGHTS:
                sources, targets = stored.sources(weights, unbiased=True), [f"{targets[0]}.packed"]
                operation: Any = TakeRows(self, weights, *one.operations)
            else:
                sources, operation = stored.sources(weights), Widen(self, weights, *one.operations)
            found.append(interface.changed(one, sources, targets, operation))
        alone = [one for one in weight_conversions if not interface.reads_weights_alone(one)]
        stored.check_conversions(model, alone, self._tensors, WEIGHTS)
        self._originals = [(one, None) for one in (*first, last)]
        self._originals += zip(found, weight_conversions, strict=True)
        return [*first, *found, last]

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        # Free these, because a model keeps its quantizer: otherwise a copy of the model would also copy the GGUF file.
        self.gguf = self._config = self.own = None
        if self._originals:
            interface.save_as_if_loaded_by(model, self._originals)
        for name in sorted(self.weights - self.packed - self.faults.keys()):
            is_dense = name.removesuffix(quantized_dense.ENDING) in self.dense
            tensor = name + self.stored.ending if self.stored and not is_dense else name
            self.faults[name] = f"expected the checkpoint to have {tensor!r}, got none"
        needed = {f"{name}.bias" for name in self.dense} | {f"{name}_bias" for name in self.weights | self.floating}
        needed |= self.floating
        # transformers renames tensors by patterns, and a pattern may not match the part of a name that takes the place
        # of ``weight``. The weight is then missing, so require all weights of the body.
        if isinstance(self.stored, StoredRows):
            # The files may lack the head, if it is new.
            body = "" if model.base_model is model else f"{model.base_model_prefix}."
            weights = (name for name, _ in model.named_parameters() if name.endswith(quantized_dense.ENDING))
            needed |= {name for name in weights if name.startswith(body)}
        for name in sorted((self.missing & needed) - interface.tied(model) - self.faults.keys()):
            self.faults[name] = f"expected the checkpoint to have {name!r}, got none"
        if self.faults:
            first, *others = self.faults.values()
            raise ValueError(f"from_pretrained: {first}" + (f" (and {len(others)} more)" if others else ""))

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Return the state dict that ``save_pretrained`` writes, under the names in files, and an empty dictionary of
        metadata.

        The state dict is None if only an adapter is saved. Raises ValueError if the state dict that ``save_pretrained``
        was given lacks packed bytes.
        """
        given, self.state_to_save = self.state_to_save, None
        if interface.saves_adapter_alone(model):
            return None, {}
        # FSDP gathers the state on the first rank only, so on other ranks it is empty.
        if given is not None and not given:
            return {}, {}
        state = model.state_dict() if given is None else dict(given)
        quantised = [*_quantised(model), *quantized_dense.quantized_layers(model)]
        if lacking := [name for name, _ in quantised if f"{name}.packed" not in state]:
            raise ValueError(f"save_pretrained: expected a state_dict with {lacking[0] + '.packed'!r}, got none")
        for name, _ in _quantised(model):
            state[name] = state.pop(f"{name}.packed")
        endings = [f".{name}{ending}" for name in WEIGHTS for ending in ("", ".sizes")]
        endings += quantized_dense.name_as_in_files(model, state)
        interface.save_as_named(model, endings, AsNamed())
        return state, {}


class _Known(ConversionOps):
    """An operation that has a reference to its quantizer, in the attribute that transformers expects.

    transformers copies operations. A copy of this one is the object itself, so that the quantizer is not copied.
    """

    def __init__(self, quantizer: PymoeQuantizer) -> None:
        self.hf_quantizer = quantizer

    def __deepcopy__(self, memo: Any) -> _Known:
        return self

    @property
    def reverse_op(self) -> AsNamed:
        """Return the reverse operation that transformers requires for saving; no tensor goes through it."""
        return AsNamed()


class Pack(_Known):
    """Packs weights, after transformers has made them from a checkpoint's tensors."""

    def convert(self, input_dict: dict[str, Any], *, model: Any, missing_keys: set[str], **_: Any) -> dict[str, Any]:
        """Pack the weights that must be packed, and return all tensors by their names in the model.

        Args:
            input_dict: weights, or lists of one weight, by their names in the model.
            model: gets a :class:`QuantizedLinear` in the place of each weight's parameter.
            missing_keys: names of the tensors that the model still lacks.
        """
        found: dict[str, Any] = {}
        for name in list(input_dict):
            weight = input_dict.pop(name)
            if name not in self.hf_quantizer.weights:
                found[name] = weight
                continue
            missing_keys.discard(name)
            self.hf_quantizer.missing = missing_keys
            weight = weight[0] if isinstance(weight, list) else weight
            try:
                packed = self._packed(model, name, weight)
            except (OSError, TypeError, ValueError) as error:
                self.hf_quantizer.faults[name] = f"expected weights that can be packed, got {name!r}: {error}"
                continue
            self.hf_quantizer.packed.add(name)
            found[f"{name.removesuffix(quantized_dense.ENDING)}.packed"] = packed
        return found

    def _packed(self, model: Any, name: str, weight: Tensor) -> Tensor:
        path, _, own = name.rpartition(".")
        experts = model.get_submodule(path)
        expected = getattr(experts, own)
        if weight.shape != expected.shape:
            raise ValueError(f"expected the shape {tuple(expected.shape)}, got {tuple(weight.shape)}")
        # For quantised files, transformers does not cast the weight itself.
        if self.hf_quantizer.stored:
            weight = weight.to(expected.dtype)
        config = self.hf_quantizer.quantization_config
        if path in self.hf_quantizer.dense:
            layer: QuantizedLinear = quantized_dense.packed_in_place(model, path, weight, config.linear_bits)
        else:
            if interface.flags(experts).transposed:
                weight = weight.transpose(1, 2)
            number, outputs, inputs = weight.shape
            form = {"bits": config.bits, "format": config.format}
            layer = QuantizedLinear(inputs, outputs, number, **form, device="meta").eval()
            weight = weight[self.hf_quantizer.kept(layer)]
            layer.packed = quantize_weight(weight, config.bits, config.format).packed
            delattr(experts, own)
            setattr(experts, own, layer)
        layer.packed = self.hf_quantizer.in_folder(layer.packed)
        interface.mark_initialized(layer)
        return layer.packed


class _Takes(_Known):
    """Base class of operations that take weights from files; subclasses make the packed bytes."""

    mapped = False
    """True if the bytes are the file's own, which are mapped and take no memory."""

    @abstractmethod
    def packed(
        self, name: str, layer: QuantizedLinear, tensors: dict[str, list[Tensor]], source_patterns: list[str], **_: Any
    ) -> Tensor:
        """Return the packed bytes of a weight.

        Args:
            name: name of the weight, for errors.
            layer: the quantised layer that will contain the bytes.
            tensors: the tensors of the files, by the patterns that match their names.
            source_patterns: the patterns of the converter.

        Raises:
            ValueError: the tensors do not fit the layer.
        """

    def convert(
        self, input_dict: dict[str, list[Tensor]], *, full_layer_name: str, missing_keys: set[str], **named: Any
    ) -> dict[str, Tensor]:
        """Return the packed bytes by their name in the model, or an empty dictionary if the tensors do not fit the
        model.
        """
        quantizer, path = self.hf_quantizer, full_layer_name.removesuffix(".packed")
        name = path + quantized_dense.ENDING if path in quantizer.dense else path
        missing_keys.discard(full_layer_name)
        quantizer.missing = missing_keys
        layer = named["model"].get_submodule(path)
        named |= {"full_layer_name": full_layer_name, "missing_keys": missing_keys}
        try:
            packed = self.packed(name, layer, input_dict, **named)
            if (kept := quantizer.kept(layer)) != slice(None):
                layer.packed, packed = layer.packed[kept], packed[kept]
                # Copying frees the bytes of the other experts. Mapped bytes need no copy.
                packed = packed if self.mapped else packed.clone()
            packed = quantizer.in_folder(packed)
        except (OSError, ValueError) as error:
            quantizer.faults[name] = str(error)
            return {}
        quantizer.packed.add(name)
        return {full_layer_name: packed}


class Take(_Takes):
    """Takes packed weights from a file unchanged."""

    mapped = True

    def packed(
        self, name: str, layer: QuantizedLinear, tensors: dict[str, list[Tensor]], source_patterns: list[str], **_: Any
    ) -> Tensor:
        """Check the format and sizes of a weight that pymoe has packed, and return its bytes from the file."""
        packed, sizes = (tensors[pattern][0] if pattern in tensors else None for pattern in source_patterns)
        expected = [*layer.sizes.tolist(), *layer.packed.shape]
        seen = [*(() if sizes is None else sizes.flatten().tolist()), *(() if packed is None else packed.shape)]
        if seen != expected or packed is None or packed.dtype != torch.uint8:
            raise ValueError(
                f"expected {name!r} with its format's number, output and input features and packed shape "
                f"{expected}, got {seen}"
            )
        return packed


class TakeBlocks(_Takes):
    """Takes weights from files in MXFP4. It packs blocks and scales without changing them."""

    def packed(
        self, name: str, layer: QuantizedLinear, tensors: dict[str, list[Tensor]], source_patterns: list[str], **_: Any
    ) -> Tensor:
        """Return the packed bytes of a weight, made from its blocks and scales."""
        blocks, scales = (tensors[pattern][0] if pattern in tensors else None for pattern in source_patterns)
        return mxfp4_files.packed_weight(name, blocks, scales, layer)


class TakeFromGguf(_Takes):
    """Takes weights from a GGUF file. The tensor that transformers passes to it is empty."""

    def packed(
        self, name: str, layer: QuantizedLinear, tensors: dict[str, list[Tensor]], source_patterns: list[str], **_: Any
    ) -> Tensor:
        """Return the packed bytes of a weight, made from its tensors in the GGUF file."""
        gguf = self.hf_quantizer.gguf
        assert gguf is not None
        # The tensor is empty, and only shows on which device the weight must be.
        (operand,) = tensors[source_patterns[0]]
        return (gguf.stacked | gguf.dense)[name].packed(name, layer).to(operand.device)


class _WithParts(_Known):
    """Base class of operations that first combine the tensors of each weight, such as codes and scales, into one.

    Then they run the operations with which transformers stacks or concatenates weights.
    """

    def __init__(self, quantizer: PymoeQuantizer, weights: list[str], *operations: Any) -> None:
        super().__init__(quantizer)
        self.stored: StoredRows = quantizer.stored  # type: ignore[assignment]
        self.weights = weights
        """Patterns for the names of weights that are not quantised."""
        self.operations = operations

    def _then(self, tensors: dict[str, Any], source_patterns: list[str], **named: Any) -> dict[str, Any]:
        sources = [pattern for pattern in source_patterns if pattern in tensors]
        for operation in self.operations:
            tensors = operation.convert(tensors, source_patterns=sources, **named)
        return tensors


class TakeRows(_WithParts, _Takes):
    """Takes weights from files with separate experts. It packs codes and scales without changing them."""

    def packed(
        self, name: str, layer: QuantizedLinear, tensors: dict[str, list[Tensor]], source_patterns: list[str], **_: Any
    ) -> Tensor:
        """Return the packed bytes of a weight, made from the codes and scales of its experts."""
        try:
            found = self.stored.collected(tensors, self.weights)
            # Keep no other reference to the tensors, so that each is freed once it has been joined.
            tensors.clear()
            rows = {pattern: [self.stored.joined(parts) for parts in found.pop(pattern)] for pattern in list(found)}
            (all_rows,) = self._then(rows, source_patterns, **_).values()
            all_rows = all_rows[0] if isinstance(all_rows, list) else all_rows
            if isinstance(layer, QuantizedDenseLinear):
                all_rows = all_rows[None]
            return self.stored.packed_weight(name, all_rows, layer)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"expected weights in {self.stored.name}, got {name!r}: {error}") from error


class Widen(_WithParts):
    """Dequantises weights to the dtype of the model."""

    def convert(self, input_dict: dict[str, list[Tensor]], *, full_layer_name: str, model: Any, **_: Any) -> Any:
        """Return the weights by their names in the model, or an empty dictionary if the tensors of a weight do not fit
        each other.
        """
        path, _dot, own = full_layer_name.rpartition(".")
        dtype = getattr(model.get_submodule(path), own).dtype
        try:
            found = self.stored.collected(input_dict, self.weights)
            wide = {name: [self.stored.widened(parts, dtype) for parts in found[name]] for name in found}
        except ValueError as error:
            self.hf_quantizer.faults[full_layer_name] = (
                f"expected weights in {self.stored.name}, got {full_layer_name!r}: {error}"
            )
            return {}
        # Without operations to combine weights, there is a single weight.
        if not self.operations or isinstance(self.operations[0], Pack):
            return self._then({full_layer_name: next(iter(wide.values()))[0]}, model=model, **_)
        return self._then(wide, full_layer_name=full_layer_name, model=model, **_)


class AsNamed(ConversionOps):
    """Leaves tensors unchanged, both when a model is loaded and when it is saved."""

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, **_: Any) -> dict[str, Any]:
        (tensor,) = input_dict.values()
        return {full_layer_name: tensor}

    @property
    def reverse_op(self) -> AsNamed:
        return self


def register() -> None:
    """Register :class:`PymoeConfig` with transformers, for loading and saving. Further calls change nothing."""
    interface.register_quantizer(PymoeConfig, PymoeQuantizer)
    interface.call_before_merging(configuration_for)
    interface.call_for_gguf_files(configuration_for_gguf)
    interface.call_before_saving(prepare_to_save)


def prepare_to_save(model: nn.Module, state_dict: object = None) -> None:
    """Make ``save_pretrained`` write files that ``from_pretrained`` reads, even for models of ``quantize_experts``.

    Raises:
        ValueError: the files cannot describe the model's quantised weights: only one of an expert's weights is
            quantised, an expert outside of transformers' interface is quantised, the model has no experts or has
            adapters, a quantised dense layer is tied, or another method quantised weights, too.
    """
    layers = dict(_quantised(model))
    linear_bits = quantized_dense.bits_to_save(model)
    quantizer = interface.quantizer_of(model)
    dense = any(quantized_dense.quantized_layers(model))
    if not layers and not dense and not isinstance(quantizer, PymoeQuantizer):
        return
    place = "save_pretrained: expected a model"
    others = [
        name
        for name, one in model.named_modules()
        if isinstance(one, QuantizedLinear) and not isinstance(one, QuantizedDenseLinear) and name not in layers
    ]
    if others:
        raise ValueError(f"{place} with quantised weights in experts of transformers alone, got {others[0]!r}")
    formats: set[Any] = {(layer.bits, layer.format) for layer in layers.values()}
    whole = [f"{n}.{weight}".lstrip(".") for n, one in model.named_modules() for weight in _unquantised(one)]
    packed = {name.rpartition(".")[0] for name in layers}
    for name in whole:
        if name.rpartition(".")[0] in packed:
            raise ValueError(
                f"{place} whose experts' weights are both quantised or both not, got {name!r}, which is not; save "
                f"model.state_dict()"
            )
    if whole:
        formats.add((None, AS_STORED))
    if not formats:
        raise ValueError(
            f"{place} with experts if its dense layers are quantised, got {type(model).__name__}; save "
            f"model.state_dict()"
        )
    for name, parameter in model.named_parameters():
        # In PEFT, base_layer is the name of the module inside a wrapper.
        if ".base_layer." in f".{name}":
            raise ValueError(
                f"{place} without adapters, got {name!r}; merge them first (merge_and_unload() in PEFT), or save them "
                f"alone by the PeftModel"
            )
        # Do not raise for a DTensor, which has both attributes.
        if hasattr(parameter, "__tensor_flatten__") and not hasattr(parameter, "full_tensor"):
            raise ValueError(
                f"{place} quantised by pymoe alone, got {name!r} of the class {type(parameter).__name__}, which "
                f"another method leaves; save model.state_dict()"
            )
    if quantizer is not None and not isinstance(quantizer, PymoeQuantizer):
        raise ValueError(f"{place} quantised by pymoe alone, got one of {type(quantizer).__name__}, too")
    config = PymoeConfig(*(formats.pop() if len(formats) == 1 else (None, AS_STORED)), linear_bits=linear_bits)
    if quantizer is None or quantizer.quantization_config.to_dict() != config.to_dict():
        interface.mark_quantized(model, PymoeQuantizer(config, pre_quantized=True))
    interface.quantizer_of(model).state_to_save = state_dict


def _quantised(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield the quantised weights of experts of transformers, by their names."""
    for name, module in model.named_modules():
        if interface.is_behind(module):
            for weight in WEIGHTS:
                layer = getattr(module, weight, None)
                if isinstance(layer, QuantizedLinear):
                    yield f"{name}.{weight}".lstrip("."), layer


def _unquantised(module: nn.Module) -> list[str]:
    """Return the names of an experts module's stacked weights that are still parameters."""
    if not interface.is_behind(module):
        return []
    return [name for name in WEIGHTS if isinstance(getattr(module, name, None), Tensor)]


def _without_sizes(layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state.pop(f"{prefix}sizes", None)
