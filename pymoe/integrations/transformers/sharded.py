"""Describes experts of transformers to :func:`pymoe.ep.shard`, which spreads them over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.activations import activation_of, place
from pymoe.integrations.transformers.adapters import take
from pymoe.integrations.transformers.outside import FORWARDS, REFUSED
from pymoe.integrations.transformers.quantizer import PymoeQuantizer
from pymoe.nn import QuantizedLinear
from pymoe.nn.apply_experts import Activation
from pymoe.nn.low_rank import LowRank
from pymoe.nn.stacked_experts import StackedExperts, handlers, on_load


def register() -> None:
    """Make :func:`pymoe.ep.shard` work with the experts of transformers. Further calls change nothing.

    ``from_pretrained`` can then read only a rank's own experts, and ``save_pretrained`` refuses to write only those.
    """
    if stacked_experts not in handlers:
        handlers.append(stacked_experts)
    interface.call_before_saving(check_saved_whole)
    interface.call_around_loading(spread_model, check_loaded)


def stacked_experts(module: nn.Module) -> StackedExperts | None:
    """Return the description of an experts module behind transformers' interface; None for other modules.

    Raises:
        ValueError: the module runs an implementation other than pymoe's, has a norm after every expert, is quantised by
            another package, or has experts outside of the interface; or transformers has spread it over ranks.
    """
    if place(type(module)) in FORWARDS or place(type(module)) in REFUSED:
        raise ValueError(
            f"shard: model must have experts behind transformers' interface, got those of {type(module).__name__}, "
            f"which are outside of it"
        )
    flags, kind = interface.flags(module), type(module).__name__
    if interface.is_spread(module):
        raise ValueError(
            f"shard: model must not be spread over ranks by transformers, got {kind} with transformers' own expert or "
            f"tensor parallelism; load it without a tp_plan or distributed_config"
        )
    if not interface.is_behind(module):
        return None
    _check_implementation(module)
    if flags.normed:
        raise ValueError(f"shard: experts must have no norm after every expert, got {kind}, which has post_expert_norm")
    name = "gate_up_proj" if flags.gated else "up_proj"
    weights = [getattr(module, one, None) for one in (name, "down_proj")]
    packed = all(isinstance(one, QuantizedLinear) for one in weights)
    if not packed and not all(isinstance(one, Tensor) for one in weights):
        raise ValueError(f"shard: experts must have weights in tensors or quantised by pymoe, got {kind} with others")
    biases = (f"{name}_bias", "down_proj_bias") if flags.biased else (None, None)
    return StackedExperts((name, "down_proj", *biases), flags.transposed and not packed, _activation, _adapters)


def is_sharded(module: nn.Module) -> bool:
    """Return whether :func:`pymoe.ep.shard` has spread the experts of a module over ranks."""
    return isinstance(getattr(module, "described", None), StackedExperts)


def spread_model(model: nn.Module, quantizer: Any) -> bool:
    """Prepare the loading of a model whose experts will be spread over ranks; call this before its weights are read.

    Without a quantizer, this spreads the experts. With pymoe's quantizer, it makes the quantizer keep only this rank's
    experts.

    Returns:
        True if the model is being loaded in order to be spread; False if it is not, and nothing was done.

    Raises:
        ValueError: the model has a quantizer other than pymoe's.
    """
    loading = on_load.get()
    if loading is None or not loading.begins(model):
        return False
    if quantizer is None:
        loading.spread(model)
    elif isinstance(quantizer, PymoeQuantizer):
        quantizer.own = loading.own
    else:
        raise ValueError(
            f"from_pretrained: expected experts for ranks that pymoe or nobody quantises, got a "
            f"{type(quantizer).__name__}; pass a quantization_config=PymoeConfig(...) that keeps its format"
        )
    return True


def check_loaded(model: nn.Module, lacking: set[str]) -> set[str]:
    """Check that a rank has read its experts, or spread the experts now if they are quantised.

    On a rank without experts, which has nothing to read, set its empty parameters.

    Args:
        model: a model whose weights have been read.
        lacking: the names of the tensors that were not read or have a wrong size in the files.

    Returns:
        The names of the parameters that have been set.

    Raises:
        ValueError: the files lack weights of experts.
        RuntimeError: transformers has read whole weights instead of this rank's parts.
    """
    filled: set[str] = set()
    if not any(map(is_sharded, model.modules())):
        loading = on_load.get()
        assert loading is not None, "spread_model has returned True"
        # The quantizer has kept only this rank's experts.
        loading.spread(model)
        for module in filter(is_sharded, model.modules()):
            # Spreading has replaced the biases' parameters. Mark the new ones, so that transformers keeps their values.
            for parameter in module.parameters():
                interface.mark_initialized(parameter)
        return filled
    for path, module in model.named_modules():
        for own, parameter in list(module.named_parameters(recurse=False)) if is_sharded(module) else ():
            name, spread = f"{path}.{own}".lstrip("."), cast("Any", parameter)
            # Test for DTensor by this attribute, because importing the class would be slow.
            if not hasattr(parameter, "full_tensor"):
                raise RuntimeError(
                    f"from_pretrained: expected a transformers that reads parts of weights, as version 5.23 does, got "
                    f"the whole {name!r}"
                )
            if spread.to_local().numel() == 0:
                empty = torch.empty_like(parameter, device=spread.device_mesh.device_type)
                setattr(module, own, nn.Parameter(empty, parameter.requires_grad))
                interface.mark_initialized(getattr(module, own))
                filled.add(name)
            elif name in lacking:
                raise ValueError(
                    f"from_pretrained: expected the checkpoint to have {name!r} for every expert of the model, got "
                    f"none, another number of experts, or another size"
                )
    return filled


def check_saved_whole(model: nn.Module, state_dict: object) -> None:
    """Raise :class:`ValueError` if ``save_pretrained`` would write only this rank's experts."""
    if state_dict is None:
        for name, module in model.named_modules():
            if is_sharded(module):
                raise ValueError(
                    f"save_pretrained: expected the state dict of a whole model, as {name!r} has only this rank's "
                    f"experts; call get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
                    f"cpu_offload=True)) of torch.distributed.checkpoint.state_dict on every rank, and "
                    f"save_pretrained(..., state_dict=...) with the result on the first rank"
                )


def _activation(module: Any) -> Activation:
    _check_implementation(module)
    return activation_of(module)


def _adapters(module: Any) -> tuple[Sequence[LowRank], Sequence[LowRank]]:
    lent = take(module)
    return lent.get(module.described.names[0], []), lent.get("down_proj", [])


def _check_implementation(module: Any) -> None:
    if interface.implementation(module.config) != interface.NAME:
        raise ValueError(
            f"shard: model must run with experts_implementation='pymoe', got "
            f"{interface.implementation(module.config)!r}; call model.set_experts_implementation('pymoe')"
        )
