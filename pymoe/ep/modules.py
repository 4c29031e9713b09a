"""ShardedModule: the experts of another package's module, spread over the ranks of a group."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pymoe import ops
from pymoe._common import checks
from pymoe._common.types import FLOATING, Gate, accumulate_dtype, autocast_enabled, cast_operands
from pymoe.ep.experts import ExpertShards
from pymoe.ep.layer import ExpertCall, ShardedLayer, check_mode, check_parameters
from pymoe.ep.sharding import ExpertSharding
from pymoe.nn.apply_experts import activate
from pymoe.nn.options import check_choice
from pymoe.nn.plain_calls import are_called_plainly, attached_to
from pymoe.nn.quantized_experts import QuantizedLinear
from pymoe.nn.stacked_experts import StackedExperts, handlers


class ShardedModule(ShardedLayer, ExpertShards):
    """An experts module of a model of transformers that :func:`pymoe.ep.shard` has spread over the ranks of a group.

    It is both the layer and its experts, as the router is a separate module. Its class is derived from the original
    class of the module, and has the same name. Parameters (``packed`` of quantised weights) keep their names and
    shapes; they are DTensors, cut along the experts. Calls are collective, as :class:`ShardedLayer` describes. Hooks of
    the module see the tokens and outputs of their rank.
    """

    described: StackedExperts
    _sizes: dict[str, tuple[int, ...]]

    @property
    def experts(self) -> ShardedModule:  # type: ignore[override]
        """Return the module itself, which contains the experts."""
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send every token of this rank through its experts, whichever rank has them.

        Args:
            hidden_states: (T, H), any floating dtype; cast to that of the parameters, or by autocast. For quantised
                experts, only float64 is cast, to float32. There may be no tokens; other ranks may have more or fewer.
            top_k_index: (T, K) int32 or int64, the experts of every token.
            top_k_weights: (T, K), the weight of every choice; any floating dtype, float64 only if the parameters are.

        Returns:
            (T, H), the dtype of ``hidden_states``. Differentiable in ``hidden_states``, ``top_k_weights`` and the
            parameters.

        Raises:
            TypeError: an argument or a parameter has the wrong dtype. The other ranks raise :class:`GroupError` then,
                also in the next three cases.
            ValueError: an argument or a parameter has the wrong shape, the module runs another implementation of
                experts, or it has adapters and :func:`pymoe.ep.shard` was given ``clones``.
            IndexError: an index lies outside 0..E-1.
            RuntimeError: called inside a transform of :mod:`torch.func`, or in forward-mode autograd.
            GroupError: the ranks do not make the same call, one of them has failed or died, or a rank would receive
                more rows than ``room``.
        """
        with ExpertCall(self) as call:
            check_mode()
            activation, adapters = self.described.activation(self), self.described.adapters(self)
            if any(adapters) and self.sharding.clones:
                raise ValueError("MoE: experts with adapters must have no clones, got clones in pymoe.ep.shard")
            rows_TH = self._rows(hidden_states)
            check_choice(rows_TH, top_k_index, top_k_weights)
            check_parameters(self.sharding, self, None, rows_TH)
            # This also checks the indices of experts, before other ranks wait for rows.
            routing = ops.build_routing(top_k_index, self.sharding.num_experts)
            weights_TK = top_k_weights.to(accumulate_dtype(rows_TH.dtype))
            kind = "its own" if callable(activation) else activation
            ranks = [[f"{one.up.shape[2]}{' trained' * one.up.requires_grad}" for one in weight] for weight in adapters]
            options = "experts", type(self).__name__, "activation", kind, "ranks of adapters", str(ranks)
            gate = Gate(weights_TK, top_k_index.int(), routing.offsets.diff())
            call.begin(rows_TH, gate, None, options, routing)

            def activated(rows: Tensor) -> Tensor:
                return activate(rows, activation).to(rows.dtype)

            y_TH = call.finish(
                lambda handles, dispatcher, _: self.apply_to_chunks(handles, dispatcher, activated, adapters=adapters),
                weights_TK,
            )
        return y_TH.to(hidden_states.dtype)

    def spread(self, described: StackedExperts, sharding: ExpertSharding, made: dict[int, nn.Parameter]) -> None:
        """Replace the parameters with DTensors that have only this rank's experts in memory.

        Args:
            described: the description of the module's experts.
            sharding: the sharding of these experts.
            made: the DTensors made so far, keyed by the ids of the parameters that they replaced; new ones are added.
        """
        self.described = described
        self.parameter_names = described.names
        names = (name for name in described.names if name is not None)
        # Without sizes, check_parameters checks nothing. Quantised weights need no check here: their products check the
        # operands, and biases may have another dtype than the rows.
        self._sizes = {} if self.is_quantized else {name: getattr(self, name).shape[1:] for name in names}
        self.shard_parameters(sharding, made)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by name, without the leading size E; empty if weights are quantised."""
        return self._sizes

    def operand(self, weight: Tensor) -> Tensor:
        return weight.transpose(1, 2) if self.described.transposed else weight

    def _rows(self, hidden_states: Tensor) -> Tensor:
        """Check ``hidden_states``; return it in the dtype of the products with the weights, as the rows to send."""
        checks.floating("MoE", "hidden_states", hidden_states)
        checks.rank("MoE", "hidden_states", hidden_states, "(T, H)")
        checks.size("MoE", "hidden_states", hidden_states, 1, hidden_size_of(self, self.described), "H of the experts")
        rows = hidden_states
        if self.is_quantized:
            rows = rows.float() if rows.dtype == torch.float64 else rows
        elif not autocast_enabled(rows.device.type):
            rows = rows.to(getattr(self, self.described.names[0]).dtype)
        (rows,) = cast_operands(rows)  # type: ignore[assignment]
        return rows

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle through the original class of the module, since pickle cannot import the derived class."""
        before = _class_before(type(self))
        return super().__reduce_ex__(protocol) if before is None else (_empty, (before,), self.__dict__)


@functools.cache
def sharded_class(cls: Any) -> Any:
    """Return the derived class that a module of the class ``cls`` gets when its experts are spread over ranks."""

    @functools.wraps(cls.forward)
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return ShardedModule.forward(self, hidden_states, top_k_index, top_k_weights)

    body = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": forward}
    return type(cls.__name__, (ShardedModule, cls), body)


def _class_before(cls: type) -> Any:
    return cls.__bases__[1] if cls.__bases__[0] is ShardedModule else None


def _empty(before: Any) -> Any:
    derived = sharded_class(before)
    return derived.__new__(derived)


def modules_of(model: nn.Module) -> dict[str, tuple[nn.Module, StackedExperts]]:
    """Return the experts modules of other packages in a model, by name, with their descriptions.

    Raises:
        TypeError: the parameters of a module are not of a floating dtype, or have different dtypes.
        ValueError: the experts of a module cannot be spread over ranks.
    """
    found = {}
    for name, module in model.named_modules():
        described = next(filter(None, (handler(module) for handler in handlers)), None)
        if described is not None:
            _check(name, module, described)
            found[name] = module, described
    inside = {id(module) for module, _ in found.values()}
    owned = {id(parameter): name for name, (module, _) in found.items() for parameter in module.parameters()}
    for other, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(module) not in inside and id(parameter) in owned:
                raise ValueError(
                    f"shard: experts must share no parameters with other modules, got {owned[id(parameter)]!r} with "
                    f"{f'{other}.{name}'.lstrip('.')!r}"
                )
    return found


def is_quantized(module: nn.Module, described: StackedExperts) -> bool:
    """Return whether the weights of experts are quantised."""
    return isinstance(getattr(module, described.names[0]), QuantizedLinear)


def hidden_size_of(module: nn.Module, described: StackedExperts) -> int:
    """Return H, the width of the rows that the experts take and return."""
    weight = getattr(module, described.names[0])
    if isinstance(weight, QuantizedLinear):
        return weight.input_features
    size: int = weight.shape[1 if described.transposed else 2]
    return size


def num_experts_of(module: nn.Module, described: StackedExperts) -> int:
    """Return E, the number of experts."""
    weight = getattr(module, described.names[0])
    number: int = weight.num_experts if isinstance(weight, QuantizedLinear) else weight.shape[0]
    return number


def _check(name: str, module: nn.Module, described: StackedExperts) -> None:
    if name.rpartition(".")[2] == "base_layer":  # PEFT gives this name to a module that it wraps
        raise ValueError(
            f"shard: model must have experts that nothing adapts, got {name.rpartition('.')[0]!r} with an adapter; "
            f"merge it first (merge_and_unload() in PEFT)"
        )
    if lost := attached_to(module, harmless=lambda hook: True):
        raise ValueError(
            f"shard: experts must have the forward of their class, which is replaced, got {name!r} with {lost}, as "
            f"offloading gives them; remove it first"
        )
    parameters: dict[str, Any] = dict(module.named_parameters())
    weights = [getattr(module, one) for one in described.names[:2]]
    quantized = [one for one in weights if isinstance(one, QuantizedLinear)]
    names = [one for one in described.names[2 if quantized else 0 :] if one is not None]
    if set(parameters) != set(names):
        raise ValueError(
            f"shard: experts must have only the parameters {' and '.join(names)}, got {name!r} with "
            f"{', '.join(parameters) or 'none'}"
        )
    if any(isinstance(one, DTensor) for one in parameters.values()):
        raise ValueError(
            f"shard: experts must have whole parameters, got {name!r} with parameters that are spread over ranks "
            f"already, as fully_shard and tensor parallelism leave them; shard first"
        )
    if quantized:
        _check_quantized(name, quantized)
        return
    w_in, w_out = weights
    for one in names:
        if parameters[one].dtype not in FLOATING or parameters[one].dtype != w_in.dtype:
            seen = ", ".join(str(parameters[other].dtype).removeprefix("torch.") for other in names)
            raise TypeError(f"shard: experts must have parameters of one floating dtype, got {name!r} with {seen}")
    shapes = [tuple(parameters[one].shape) for one in names]
    width = (1, 2) if described.transposed else (2, 1)  # the dimension of size H in w_in, then in w_out
    if w_in.dim() != 3 or w_out.dim() != 3 or w_in.shape[width[0]] != w_out.shape[width[1]]:
        raise ValueError(f"shard: experts must return rows as wide as those they take, got {name!r} with {shapes}")
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"shard: parameters must be stacked along the same experts, got {name!r} with {shapes}")


def _check_quantized(name: str, weights: list[QuantizedLinear]) -> None:
    if any(isinstance(one.packed, DTensor) for one in weights):
        raise ValueError(f"shard: experts must have whole weights, got {name!r} with weights that are on ranks already")
    if len(weights) != 2 or not are_called_plainly(*((one, QuantizedLinear) for one in weights)):
        raise ValueError(
            f"shard: quantised experts must have two QuantizedLinear that nothing is attached to, got {name!r} without"
        )
    w_in, w_out = weights
    if (w_in.num_experts, w_in.input_features) != (w_out.num_experts, w_out.output_features):
        raise ValueError(
            f"shard: experts must return rows as wide as those they take, got {name!r} with {w_in} and {w_out}"
        )
