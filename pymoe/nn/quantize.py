"""quantize_experts: the weights of a model's experts in 8 or 4 bits, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pymoe.nn.experts import Experts
from pymoe.nn.options import check_model
from pymoe.nn.plain_calls import attached_to, is_of_its_source
from pymoe.nn.quantized_experts import QuantizedExperts, QuantizedLinear
from pymoe.reference.quantized_weight import check_format
from pymoe.reference.types import WeightFormat


class Quantized(NamedTuple):
    """What :func:`quantize_experts` did."""

    layers: int
    """How many layers of experts were quantised."""
    bytes_before: int
    """Of their weights."""
    bytes_after: int
    """Of their weights."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes their weights take."""
        return self.bytes_before / self.bytes_after


Handler = Callable[[nn.Module], dict[str, Tensor] | None]
"""Takes a module; returns the views (E, out, in) of its stacked weights by the names of their parameters, if the module
also runs with a :class:`QuantizedLinear` in the place of each; None for any other module."""

handlers: list[Handler] = []
"""For modules of other packages: the integrations add theirs."""


def quantize_experts(model: nn.Module, bits: int = 8, format: WeightFormat = "int") -> Quantized:
    """Round the weights of all experts in a model to 8 or 4 bits, in place, for inference.

    Every :class:`Experts` becomes a :class:`QuantizedExperts`. With :mod:`pymoe.integrations.transformers` imported,
    the experts of a model of transformers that runs with ``experts_implementation="pymoe"`` keep their module, in which
    a :class:`QuantizedLinear` takes the place of each stacked weight. Routers, shared experts, biases and all other
    layers stay as they are. The errors are those of :func:`pymoe.ops.quantize_weight`: 0.7 % of the weights' norm with
    8 bits and 7 % with 4 (11.5 % with the format "mxfp"), for normally distributed weights.

    Weights with a parametrization (:mod:`torch.nn.utils.parametrize`) are rounded as it gives them, and it is gone
    then. ``save_pretrained`` of a model of transformers raises once its experts are quantised, since nothing could load
    its files: save the ``state_dict()``.

    Layers are quantised one after another, and the original weights of each are freed before the next one's turn. A
    weight that is not finite is met in the middle of that: its layer and those after it stay as they were, while those
    before it stay quantised. A model on the meta device is quantised too, and then takes the state dict of another one:
    ``load_state_dict(state, assign=True)``.

    Args:
        model: any module in evaluation mode, or whose experts require no gradients; not itself an :class:`Experts`.
        bits: 8 or 4.
        format: "int" or "mxfp", as for :func:`pymoe.ops.quantize_weight`.

    Returns:
        How many layers were quantised, and the bytes of their weights before and after.

    Raises:
        TypeError: ``model`` is not a module, ``bits`` not an int, ``format`` not a str, or weights are float64.
        ValueError: ``bits`` and ``format`` are not as above; there are no experts to quantise; some are in training
            mode and require gradients; an :class:`Experts` has hooks or a ``forward`` of its own, which the
            :class:`QuantizedExperts` would not have; an adapter of PEFT or ``torch.compile`` is around experts; weights
            are offloaded or spread over ranks; or a weight is not finite.
    """
    check_model("quantize_experts", model)
    check_format("quantize_experts", bits, format)
    if isinstance(model, Experts):
        raise ValueError(
            "quantize_experts: model must hold its Experts in a module, got the Experts themselves; use "
            "QuantizedExperts.from_experts"
        )
    found = [(name, module) for name, module in model.named_modules() if _weights_of(module)]
    if not found:
        raise ValueError(
            "quantize_experts: model must hold experts that are not quantised yet, got none (those of a model of "
            "transformers are found once pymoe.integrations.transformers is imported)"
        )
    for name, experts in found:
        _check_weights(name, experts)
    before = after = 0
    for _, experts in found:
        weights = _weights_of(experts)
        before += sum(weight.nbytes for weight in weights.values())
        if isinstance(experts, Experts):
            replacement: nn.Module = QuantizedExperts.from_experts(experts, bits, format)
            _replace(model, experts, replacement)
        else:
            replacement = experts
            _quantize_in_place(experts, bits, format)
        after += sum(getattr(replacement, name).packed.nbytes for name in weights)
        del weights
    return Quantized(len(found), before, after)


def _weights_of(module: nn.Module) -> dict[str, Tensor]:
    if isinstance(module, Experts):
        return {"w_in": module.w_in, "w_out": module.w_out}
    for handler in handlers:
        if weights := handler(module):
            return weights
    return {}


def _check_weights(name: str, experts: nn.Module) -> None:
    weights = _weights_of(experts).values()
    path, _, own = name.rpartition(".")
    if own == "base_layer":  # as PEFT names it
        raise ValueError(
            f"quantize_experts: model must have experts that nothing adapts, got {path!r} with an adapter, which reads "
            f"the weights that it adapts; merge it first (merge_and_unload() in PEFT)"
        )
    if own == "_orig_mod" and isinstance(experts, Experts):  # as torch.compile names it; others keep their module
        raise ValueError(
            f"quantize_experts: model must have experts that torch.compile has not wrapped, got {path!r}, which would "
            f"run the weights that it was made with; quantise first, and compile then"
        )
    if any(hasattr(weight, "full_tensor") for weight in weights):  # a DTensor, whose class would be slow to import
        raise ValueError(
            f"quantize_experts: model must have whole weights, got {name!r} with weights that are spread over ranks, "
            f"as fully_shard leaves them; quantise first"
        )
    if any(weight.is_meta for weight in weights) and (bringing := attached_to(experts)):
        raise ValueError(
            f"quantize_experts: model must have its weights in memory, or all of them on the meta device, got {name!r} "
            f"with {bringing} that may bring them when it is called; load the model without offloading"
        )
    if any(weight.dtype == torch.float64 for weight in weights):
        raise TypeError(
            f"quantize_experts: model must have weights in float32, bfloat16 or float16, as rows are multiplied with "
            f"quantised ones, got float64 in {name!r}"
        )
    if experts.training and any(weight.requires_grad for weight in weights):
        raise ValueError(
            f"quantize_experts: model must be in evaluation mode, got {name!r} in training mode with weights that "
            f"require gradients, which quantised ones have not; call model.eval() first"
        )
    if isinstance(experts, Experts) and (lost := lost_with(experts)):
        raise ValueError(
            f"quantize_experts: model must have Experts that nothing is attached to, as other modules take their "
            f"place, got {name!r} with {lost}; remove it first, and attach it to the QuantizedExperts"
        )


def lost_with(experts: Experts) -> str:
    """Return what replacing a module would take away from its calls; "" if nothing."""
    plain = is_of_its_source(Experts, "forward") and all(
        getattr(type(experts), name) is getattr(Experts, name) for name in ("forward", "__call__", "_call_impl")
    )
    return attached_to(experts) or ("" if plain else "a forward of its own")


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``old`` is, which may be in several places."""
    for parent in model.modules():
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def _quantize_in_place(experts: nn.Module, bits: int, format: WeightFormat) -> None:
    """Replace all weights of a module, or none if one of them is refused."""
    layers = {
        name: QuantizedLinear.from_weight(weight.detach(), bits, format=format).train(experts.training)
        for name, weight in _weights_of(experts).items()
    }
    for name, layer in layers.items():
        if parametrize.is_parametrized(experts, name):
            parametrize.remove_parametrizations(experts, name)
        delattr(experts, name)
        setattr(experts, name, layer)
