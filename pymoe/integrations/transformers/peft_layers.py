"""LoRA of PEFT on models that run on pymoe. Only this file uses private names of PEFT; they are those of PEFT 0.21.

PEFT adapts a parameter (``target_parameters``) with a wrapper around its module. During a call, the wrapper normally
replaces the parameter with the sum of the weights and ``B @ A`` of all experts. Around experts that run on pymoe, it
lends A and B to the experts instead: see :mod:`pymoe.integrations.transformers.adapters`. The wrapper and its
parameters are still PEFT's own, so the files of adapters are, too. PEFT itself computes all other modules.

In a model with quantised weights, PEFT gets stand-ins for the experts' weights, with the memory of a single element
each, and dense layers get a wrapper that is derived from PEFT's own.

pymoe does not import PEFT: it changes PEFT's classes when the program imports them.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.adapters import lend
from pymoe.integrations.transformers.sharded import is_sharded
from pymoe.integrations.transformers.switch import OnPymoe
from pymoe.nn import QuantizedDenseLinear, QuantizedLinear
from pymoe.nn.low_rank import LowRank

MODULE = "peft.tuners.lora.model"
"""The module whose classes are changed, after it has been imported."""

USED = {
    "ParamWrapper": ("_activate_lora", "get_param", "get_delta_factors", "get_base_layer"),
    "LoraModel": ("_inject_parameters", "_create_new_module", "_check_merge_allowed"),
}
"""Methods of PEFT's classes that are replaced or called here."""


def register() -> None:
    """Change PEFT's classes, now or when PEFT is imported. Further calls change nothing."""
    if module := sys.modules.get(MODULE):
        change(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """An import finder that finds PEFT's module as the other finders do, and changes the module once it is executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def change(module: Any) -> None:
    """Change the classes in PEFT's module. If this version of PEFT lacks names in ``USED``, warn and change nothing."""
    lacking = [
        f"{kind}.{name}"
        for kind, names in USED.items()
        for name in names
        if not hasattr(getattr(module, kind, None), name)
    ]
    if lacking:
        warnings.warn(
            f"pymoe.integrations.transformers: PEFT has no {lacking[0]}, so LoRA on experts takes a copy of their "
            f"weights, and quantised layers cannot be adapted; PEFT 0.21 is known to work",
            stacklevel=2,
        )
        return
    if getattr(module.LoraModel, "changed_by_pymoe", False):
        return
    module.LoraModel.changed_by_pymoe = True
    _change_wrapper(module.ParamWrapper)
    _change_model(module.LoraModel, _dense_layer(module))


# --- Experts


def _change_wrapper(kind: Any) -> None:
    activate, get_param = kind._activate_lora, kind.get_param

    @contextmanager
    def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
        active = [name for name in active_adapters if name in self.lora_A]
        experts = self.get_base_layer()
        packed = isinstance(getattr(experts, self.parameter_name), QuantizedLinear)
        if active and (packed or _is_by_rows(experts, self.parameter_name)):
            with lend(experts, self.parameter_name, [_low_rank(self, experts, name) for name in active]):
                yield
        elif active and is_sharded(experts):
            raise ValueError(
                f"LoRA: expected stacked weights of experts that are on ranks, got {self.parameter_name!r} of "
                f"{type(experts).__name__}; adapt {' and '.join(stacked_names(experts))} only"
            )
        else:
            with activate(self, active_adapters):
                yield

    def _get_param(self: Any) -> Any:
        param = get_param(self)
        if isinstance(param, QuantizedLinear):
            transposed = interface.flags(self.get_base_layer()).transposed
            return _stand_in(param, transposed, next(self.lora_A.parameters()).dtype)
        return param

    kind._activate_lora = functools.wraps(activate)(_activate_lora)
    kind.get_param = functools.wraps(get_param)(_get_param)


def _is_by_rows(experts: Any, name: str) -> bool:
    """Return whether ``experts`` run on pymoe and take adapters of the parameter ``name``.

    Warn once for each class if they run on pymoe but do not take the adapters.
    """
    if interface.is_behind(experts):
        on_pymoe = interface.implementation(experts.config) == interface.NAME
        by_rows = on_pymoe and name in stacked_names(experts)
    else:
        on_pymoe, by_rows = isinstance(experts, OnPymoe), False
    if on_pymoe and not by_rows:
        # During a call, PEFT parametrizes the module, which adds "Parametrized" to the name of its class.
        _warn_once(type(experts).__name__.removeprefix("Parametrized"))
    return by_rows


@functools.cache
def _warn_once(kind: str) -> None:
    warnings.warn(
        f"pymoe: adapters of {kind} are computed as PEFT does it, by a copy of the adapted parameter in every call; "
        f"pymoe computes those of stacked weights behind transformers' interface for experts by rows",
        stacklevel=2,
    )


def _low_rank(wrapper: Any, experts: Any, adapter: str) -> LowRank:
    # PEFT adds left @ right to the parameter, in the layout in which the parameter is stored.
    left, right, scaling = wrapper.get_delta_factors(adapter)
    if interface.flags(experts).transposed:
        return LowRank(left.transpose(1, 2), right.transpose(1, 2), scaling)
    return LowRank(right, left, scaling)


def stacked_names(experts: Any) -> tuple[str, str]:
    """Return the names of the two stacked weights of a module behind transformers' interface."""
    return "gate_up_proj" if interface.flags(experts).gated else "up_proj", "down_proj"


def _stand_in(layer: QuantizedLinear, transposed: bool, dtype: torch.dtype) -> Tensor:
    """Return a tensor that stands for a layer's unpacked weight: it has the weight's shape and device, but the memory
    of a single element.
    """
    sizes = (layer.output_features, layer.input_features)
    shape = (layer.num_experts, *(sizes[::-1] if transposed else sizes))
    return torch.zeros((), dtype=dtype, device=layer.packed.device).expand(shape)


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Give the model stand-in parameters for the weights of quantised experts, until the context ends.

    PEFT looks for the parameters to adapt among the model's parameters. The order of the parameters is that
    in unquantised experts.
    """
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32)
    places: list[tuple[dict[str, Any], str]] = []
    for experts in model.modules():
        if not interface.is_behind(experts):
            continue
        own, transposed = experts._parameters, interface.flags(experts).transposed
        for name in stacked_names(experts):
            layer = experts._modules.get(name)
            if not isinstance(layer, QuantizedLinear):
                continue
            own[name] = nn.Parameter(_stand_in(layer, transposed, dtype), requires_grad=False)
            places.append((own, name))
            if (bias := f"{name}_bias") in own:
                # Move the bias behind its weight, as in unquantised experts.
                own[bias] = own.pop(bias)
    try:
        yield
    finally:
        for parameters, name in places:
            del parameters[name]


# --- Models and dense layers


def _change_model(kind: Any, dense_layer: Any) -> None:
    inject, create, check_merge = kind._inject_parameters, kind._create_new_module, kind._check_merge_allowed

    def _inject_parameters(self: Any, peft_config: Any, model: nn.Module, *others: Any, **named: Any) -> Any:
        with _stand_ins(model):
            return inject(self, peft_config, model, *others, **named)

    def _create_new_module(lora_config: Any, adapter_name: str, target: Any, **named: Any) -> Any:
        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        if isinstance(base, QuantizedDenseLinear):
            return dense_layer(target, adapter_name, config=lora_config, **named)
        return create(lora_config, adapter_name, target, **named)

    def _check_merge_allowed(self: Any) -> None:
        for name, module in self.model.named_modules():
            layer = module.get_base_layer() if hasattr(module, "get_base_layer") else None
            if layer is not None and is_sharded(layer):
                raise ValueError(
                    f"merge_adapter: expected experts on one rank, got {name!r}, which pymoe.ep.shard has spread over "
                    f"ranks; save the adapter, and merge it into the whole model"
                )
            layer = getattr(layer, getattr(module, "parameter_name", ""), layer)
            if isinstance(layer, QuantizedLinear):
                raise ValueError(
                    f"merge_adapter: expected weights that are not quantised, got {name!r} in {layer.bits} bits; "
                    f"keep the adapter next to them, or merge it into the whole model and quantise the result"
                )
        check_merge(self)

    kind._inject_parameters = functools.wraps(inject)(_inject_parameters)
    kind._create_new_module = staticmethod(functools.wraps(create)(_create_new_module))
    kind._check_merge_allowed = functools.wraps(check_merge)(_check_merge_allowed)


def _dense_layer(module: Any) -> Any:
    """Return a subclass of ``lora.Linear`` for quantised dense layers, without the features that read the weight."""

    class LoraQuantizedDenseLinear(sys.modules[f"{module.__package__}.layer"].Linear):  # type: ignore[misc]
        @property
        def lora_variants(self) -> dict[tuple[str, ...], None]:
            # No variants, since DoRA and the others read the weight.
            return {(): None}

        def _get_in_out_features(self, module: Any) -> tuple[int, int]:
            # PEFT's own method would warn, because it does not recognise the class of the layer.
            return module.in_features, module.out_features

    return LoraQuantizedDenseLinear
