"""The parts of transformers' interface for experts that pymoe uses, and almost all uses of transformers' private names.

The interface is the decorator ``use_experts_implementation`` of ``transformers.integrations.moe``: it gives an experts
module the flags that :func:`flags` reads, and a forward that looks up an implementation by its name in the module's
configuration.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAME = "pymoe"
"""The name of pymoe among transformers' implementations of experts."""

GATE = "_apply_gate"
"""The name of the method that applies the gate of an experts module."""

OLDEST, OLDEST_WITH_PACKED_FILES = 5, "5.21"
INSTALL = 'pip install "transformers>=5"'


def check_installed() -> None:
    """Raise :class:`ImportError` if transformers is missing or older than version 5, which introduced the interface."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"pymoe.integrations.transformers needs transformers: {INSTALL}") from error
    version = transformers.__version__
    if int(version.split(".")[0]) < OLDEST:
        raise ImportError(
            f"pymoe.integrations.transformers needs transformers {OLDEST} or newer, got {version}: {INSTALL}"
        )


def register(function: Callable[..., Tensor]) -> None:
    """Register ``function`` as the implementation of experts called ``"pymoe"``, in place of an earlier one.

    Args:
        function: takes an experts module, (T, H) hidden states, (T, K) indices and (T, K) weights; returns (T, H).

    Raises:
        ImportError: transformers is missing, or older than version 5, which has no interface for experts.
    """
    check_installed()
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, function)


class Flags(NamedTuple):
    """Describes the parameters of an experts module, and what it does with them."""

    gated: bool
    """True: it has ``gate_up_proj`` and a gate; False: ``up_proj`` and an activation."""
    biased: bool
    transposed: bool
    """True: weights are (E, in, out); False: (E, out, in)."""
    normed: bool
    """True: ``post_expert_norm`` is applied to every expert's output."""
    expert_parallel: bool
    """True: indices of E and above mean experts of other ranks."""


def flags(experts: Any) -> Flags:
    """Return the flags of an experts module, with defaults for those that the version of transformers lacks."""
    return Flags(
        gated=getattr(experts, "has_gate", True),
        biased=getattr(experts, "has_bias", False),
        transposed=getattr(experts, "is_transposed", False),
        normed=getattr(experts, "has_post_expert_norm", False),
        expert_parallel=getattr(experts, "_is_expert_parallel", False),
    )


def is_spread(module: Any) -> bool:
    """Return whether transformers has spread a module over ranks, by expert parallelism or tensor parallelism."""
    return flags(module).expert_parallel or getattr(module, "_tp_size", None) is not None


def activation(experts: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that the module itself applies between its two products."""
    chosen: Callable[[Tensor], Tensor] = experts._apply_gate if flags(experts).gated else experts.act_fn
    return chosen


def has_default_gate(experts_class: Any) -> bool:
    """Return whether a class has transformers' default gate, which splits its input into halves, gate before up."""
    from transformers.integrations import moe

    return experts_class._apply_gate is getattr(moe, "_default_apply_gate", None)


def has_replaced_gate(experts: Any) -> bool:
    """Return whether ``_apply_gate`` has been replaced on this instance rather than on its class."""
    return GATE in experts.__dict__


def is_behind(module: Any) -> bool:
    """Return whether a module is behind transformers' experts interface, that is, whether
    ``use_experts_implementation`` decorates its class.
    """
    return hasattr(module, GATE) and hasattr(type(module).forward, "__wrapped__") and hasattr(module, "config")


def implementation(config: Any) -> str | None:
    """Return the name of the implementation of experts in the configuration of a model or of an experts module."""
    name: str | None = config._experts_implementation
    return name


def set_implementation(experts: Any, name: str | None) -> None:
    """Set the implementation of experts in a module's configuration, and so in all modules that share this
    configuration.
    """
    experts.config._experts_implementation = name


def records_outputs(hook: Any) -> bool:
    """Return whether a hook is one with which transformers records the outputs of modules.

    Such hooks stay on a model that has returned its router's logits once, for example. They change no results.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


@functools.cache
def call_before_saving(prepare: Callable[[Any, Any], None]) -> None:
    """Make ``save_pretrained`` of all models first call ``prepare(model, state_dict)``, which may raise.

    transformers has no hook before saving. Therefore the method, which ``Trainer`` and ``push_to_hub`` also use, is
    wrapped once for all models. Saving only an adapter does not call ``prepare``, since it saves none of the model's
    own weights.

    Args:
        prepare: takes the model, and the state dict that was passed to ``save_pretrained``, or None.
    """
    from transformers import PreTrainedModel

    save: Callable[..., Any] = PreTrainedModel.save_pretrained

    @functools.wraps(save)
    def save_pretrained(self: Any, *arguments: Any, **named: Any) -> Any:
        if not saves_adapter_alone(self):
            passed = inspect.signature(save).bind(self, *arguments, **named).arguments
            prepare(self, passed.get("state_dict"))
        return save(self, *arguments, **named)

    PreTrainedModel.save_pretrained = save_pretrained


@functools.cache
def call_around_loading(before: Callable[[Any, Any], bool], after: Callable[[Any, set[str]], set[str]]) -> None:
    """Make ``from_pretrained`` of all models call functions before and after it reads weights.

    transformers has a hook there only for quantised models, so its method is wrapped once for all models.

    Args:
        before: takes the model, whose parameters have no memory yet, and its quantizer or None. If it returns False,
            ``after`` is not called.
        after: takes the model, and the names of the tensors that were not read or have a wrong size in the files;
            returns the names of those that it has filled.
    """
    from transformers import PreTrainedModel

    load: Callable[..., Any] = PreTrainedModel._load_pretrained_model

    @functools.wraps(load)
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **named: Any
    ) -> Any:
        spread = before(model, load_config.hf_quantizer)
        found = load(model, state_dict, checkpoint_files, load_config, **named)
        if spread:
            report = found[0]
            for name in after(model, report.missing_keys | {name for name, *_ in report.mismatched_keys}):
                report.missing_keys.discard(name)
                report.conversion_errors.pop(name, None)
        return found

    PreTrainedModel._load_pretrained_model = staticmethod(_load_pretrained_model)


def saves_adapter_alone(model: Any) -> bool:
    """Return whether ``save_pretrained`` would write only the model's adapter, and none of its own weights."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def quantizer_bases() -> tuple[Any, Any, Any]:
    """Return transformers' base classes for the options, the quantizer and the operations of a quantisation method.

    Raises:
        ImportError: transformers is missing, or older than version 5.
    """
    check_installed()
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    return QuantizationConfigMixin, HfQuantizer, ConversionOps


def check_quantizers_see_the_model(what: str) -> None:
    """Raise ImportError if transformers does not pass the model to a quantizer's ``update_weight_conversions``.

    Args:
        what: the name to use in the message: the function or class that needs the model.
    """
    import transformers
    from transformers.quantizers import HfQuantizer

    if "model" not in inspect.signature(HfQuantizer.update_weight_conversions).parameters:
        raise ImportError(
            f"{what}: transformers must be {OLDEST_WITH_PACKED_FILES} or newer, got {transformers.__version__}, which "
            f"cannot read packed weights; without files, quantize_experts works with it"
        )


def trainer_callback() -> Any:
    """Return the base class of ``Trainer`` callbacks."""
    check_installed()
    from transformers.trainer_callback import TrainerCallback

    return TrainerCallback


def register_quantizer(config: type, quantizer: type) -> None:
    """Register the quantisation method ``"pymoe"`` with transformers. Further calls change nothing."""
    from transformers.quantizers import auto

    if auto.AUTO_QUANTIZER_MAPPING.get(NAME) is not quantizer:
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = config
        auto.AUTO_QUANTIZER_MAPPING[NAME] = quantizer


@functools.cache
def call_before_merging(choose: Callable[[dict[str, Any], Any], Any]) -> None:
    """Make ``from_pretrained`` of all models call ``choose(entries, passed)`` for folders of quantised files.

    transformers uses the configuration in the folder. It ignores a configuration that is passed, or raises if the two
    configurations have different classes. So it would raise for a :class:`PymoeConfig` and files of another method.
    transformers has no hook for this, so its method that compares the configurations is wrapped, once for all models.

    Args:
        choose: takes the entries of the folder's configuration, and the configuration that was passed to
            ``from_pretrained``, or None; returns the configuration to use, or None to leave the choice to transformers.
    """
    from transformers.quantizers import AutoHfQuantizer

    merge: Callable[[Any, Any], Any] = AutoHfQuantizer.merge_quantization_configs

    @functools.wraps(merge)
    def merge_quantization_configs(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        entries = (
            quantization_config
            if isinstance(quantization_config, dict)
            else getattr(quantization_config, "__dict__", {})
        )
        chosen = choose(entries, quantization_config_from_args)
        return merge(quantization_config, quantization_config_from_args) if chosen is None else chosen

    AutoHfQuantizer.merge_quantization_configs = staticmethod(merge_quantization_configs)


@functools.cache
def call_for_gguf_files(prepare: Callable[[Any], Any]) -> None:
    """Make ``from_pretrained(..., gguf_file=...)`` of all models call ``prepare(passed)`` first.

    transformers refuses all quantizers except its own for such a file, so the function that refuses them is wrapped.
    This changes nothing in versions of transformers where that function does not get the path of the file.

    Args:
        prepare: takes the configuration that was passed to ``from_pretrained``, or None; returns the configuration
            whose quantizer reads the file, or None to leave the file to transformers.
    """
    from transformers import modeling_utils

    choose: Callable[..., Any] = modeling_utils.get_hf_quantizer
    if "gguf_file" not in inspect.signature(choose).parameters:
        return

    @functools.wraps(choose)
    def get_hf_quantizer(config: Any, quantization_config: Any, *others: Any, gguf_file: Any = None) -> Any:
        chosen = None if gguf_file is None else prepare(quantization_config)
        if chosen is None:
            return choose(config, quantization_config, *others, gguf_file=gguf_file)
        return choose(config, chosen, *others)

    modeling_utils.get_hf_quantizer = get_hf_quantizer


def gguf_metadata(path: str) -> dict[str, Any] | None:
    """Return the metadata of a GGUF file; None if the file is intact but names no architecture.

    If the header is damaged, raise one of the errors ``gguf_files.DAMAGED``.
    """
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        found: dict[str, Any] = read_gguf_metadata(path)[0]
    except ValueError as error:
        # transformers raises this only after it has read all metadata.
        if "has no `general.architecture`" in str(error):
            return None
        raise
    return found


def gguf_names(model: Any, architecture: str, names: Iterable[str]) -> tuple[dict[str, str], Callable[[Any, str], Any]]:
    """Return transformers' names for the tensors of a GGUF file, and its conversion of their values.

    transformers has an old and a new table of architectures, and each architecture is in one of them. The names of
    experts in the result are not those of the model, so do not use them.

    Args:
        model: the model.
        architecture: the architecture that the file names.
        names: names of tensors of the file.

    Returns:
        A dictionary from names in the file to names in the model, and a function that converts values. The function
        takes the values of a tensor and its name in the file, and returns the values of the model's tensor: the same
        object if nothing is converted.
    """
    from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS

    if architecture in GGUF_ARCHS:
        return _gguf_transforms(GGUF_ARCHS[architecture](model.config), names)
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    return get_gguf_hf_weights_map(model, processor), lambda values, name: processor.process(values, name).weights


def _gguf_transforms(transforms: list[Any], names: Iterable[str]) -> tuple[dict[str, str], Callable[[Any, str], Any]]:
    from transformers.core_model_loading import WeightConverter, rename_source_key

    renamings = [one for one in transforms if not isinstance(one, WeightConverter)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found = {name: rename_source_key(name, renamings, converters) for name in names}

    def process(values: Any, name: str) -> Any:
        target, pattern = found[name]
        if pattern is None:
            return values
        # Use the CPU, because transformers may have set the default device to "meta".
        tensor = torch.tensor(values, device="cpu")
        for operation in by_pattern[pattern].operations:
            (tensor,) = operation.convert({name: tensor}, [name], [target]).values()
        return tensor.numpy()

    return {name: target for name, (target, _) in found.items()}, process


def ignores(model: Any, name: str) -> bool:
    """Return whether a transformers model ignores a tensor of a file that would have this name in the model."""
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_unexpected or ())


def converter(sources: list[str], target: str, *operations: Any) -> Any:
    """Return transformers' converter from tensors of a checkpoint to a tensor of a model.

    Args:
        sources: regular expressions that match parts of names in the checkpoint.
        target: what replaces the matched part in the name of the model's tensor.
        operations: applied to the tensors, one after another.
    """
    from transformers.core_model_loading import WeightConverter

    return WeightConverter(sources, target, operations=list(operations))


def names_in_model(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the names that tensors of a checkpoint have in the model, by their names in the checkpoint.

    Renamings are applied, but not conversions, which may give a tensor another name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [copy.deepcopy(one) for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    state = model.state_dict()
    return {name: rename_source_key(name, renamings, [], model.base_model_prefix, state)[0] for name in names}


def reads_weights_alone(transform: Any) -> bool:
    """Return whether a transform converts tensors, rather than renames them, and all its source patterns end in
    "weight".
    """
    from transformers.core_model_loading import WeightConverter

    return isinstance(transform, WeightConverter) and all(
        source.removesuffix("$").endswith("weight") for source in transform.source_patterns
    )


def reads(converter: Any, names: Iterable[str]) -> str | None:
    """Return the first of ``names``, names of a checkpoint's tensors, that ``converter`` would convert; None if there
    is none.
    """
    from transformers.core_model_loading import WeightConverter, build_glob_alternation

    if not isinstance(converter, WeightConverter):
        return None
    return next(filter(build_glob_alternation([converter])[0].search, names), None)


def kept_in_float32(model: Any) -> list[str]:
    """Return the names of parameters that transformers keeps in float32, though the model has another dtype."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(model.dtype)
    kept = build_glob_alternation(list(plan))[0] if plan else None
    return [name for name, _ in model.named_parameters() if kept and kept.search(name)]


def changed(converter: Any, sources: list[str], targets: list[str], operation: Any) -> Any:
    """Return a copy of a converter with other sources, targets and operation, for the same part of a model."""
    return converter.copy(sources, targets, operations=[operation])


def save_as_if_loaded_by(model: Any, originals: list[tuple[Any, Any]]) -> None:
    """Make ``save_pretrained`` reverse converters other than those that loaded the model.

    Args:
        model: a model that has been loaded.
        originals: pairs of a converter that loaded the model and its replacement; None as the replacement removes the
            converter.
    """
    places = {id(one): original for one, original in originals}
    found = [places.get(id(one), one) for one in model._weight_conversions]
    model._weight_conversions = [one for one in found if one is not None]


def save_as_named(model: Any, endings: list[str], operation: Any) -> None:
    """Make ``save_pretrained`` leave tensors unchanged if their names have these endings.

    Without this, transformers would apply the reverse of the model's converters, which match parts of names, and cut a
    packed weight into experts. Of the converters that match a name, transformers uses the last one in the model's list.

    Args:
        model: the model to be saved.
        endings: endings of names in the model, as plain text.
        operation: an operation that returns its tensors unchanged, in both directions.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    found = getattr(model, "_weight_conversions", None)
    # The model was not loaded from files: take the converters that transformers itself would use.
    if found is None:
        found = get_model_conversion_mapping(model, add_legacy=False)
        found = [one for one in found if not isinstance(one, PrefixChange)]
    kept = [one for one in found if not any(isinstance(op, type(operation)) for op in getattr(one, "operations", ()))]
    as_named = [converter([ending], ending.replace(".", r"\.") + "$", operation) for ending in endings]
    model._weight_conversions = kept + as_named


def tied(model: Any) -> set[str]:
    """Return the names of the parameters that a model shares between modules, such as those of a tied head."""
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True)
    return {*pairs, *pairs.values()}


def mark_quantized(model: Any, quantizer: Any) -> None:
    """Set the attributes of a model that ``from_pretrained`` with this quantizer would have set."""
    model.hf_quantizer = quantizer
    model.is_quantized = True
    model.quantization_method = NAME
    quantizer.postprocess_model(model)


def quantizer_of(model: Any) -> Any:
    """Return the quantizer of a model, or None if it has none."""
    return getattr(model, "hf_quantizer", None)


def mark_initialized(layer: Any) -> None:
    """Keep transformers from initialising a parameter, or a module that replaces one, with random numbers."""
    layer._is_hf_initialized = True
