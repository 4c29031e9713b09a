"""Router, which chooses the experts of every token, and update_expert_biases, which updates the expert biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pymoe._common import checks
from pymoe._common.names import explain_arguments
from pymoe._common.types import Gate, GateOptions, Routing, Score, autocast_enabled
from pymoe._transforms import in_torch_func
from pymoe.nn.expert_bias import ExpertBias
from pymoe.nn.local_tensors import LocalTensors, count_on_backward
from pymoe.nn.options import (
    MIN_STEPS_TO_WARN,
    OTHER_NAMES,
    Backend,
    check_backend,
    check_dtype,
    check_flag,
    check_model,
    check_number,
    check_place,
    check_size,
    linear,
    operators,
    warn_once,
)
from pymoe.nn.router_product import is_one_node, route, takes, wide_product, without_autocast

_WIDE = (torch.float32, torch.float64)
"""The dtypes of logits; operands that have one of these dtypes need no cast."""


class Router(nn.Module):
    """A linear layer that maps a token to one logit per expert, and the choice of ``top_k`` experts by the logits.

    Logits are computed in float32 (float64 for float64), whatever the dtype of the weights, even inside
    ``torch.autocast``: half precision changes which experts are chosen (selective precision, Switch Transformer,
    arXiv 2101.03961). On a GPU, 16-bit tokens and weights are multiplied without a cast: their products are exact in
    float32, and are summed in float32. In bfloat16 the gradient of the logits is rounded to bfloat16 for the products
    of the backward pass, as in every bfloat16 linear layer. :func:`pymoe.ops.gate_topk` makes the choice, and explains
    the options.

    With ``bias_update_rate > 0`` the router balances its experts without an auxiliary loss (arXiv 2408.15664,
    DeepSeek-V3): a buffer ``expert_bias`` is added to the scores for the choice, never to the weights. Call
    :func:`pymoe.nn.update_expert_biases` after every optimizer step: it raises the bias of experts whose load is below
    the mean, and lowers the bias of those above it. The load is counted in the backward pass, in training mode: once a
    step even under activation checkpointing, summed over micro-batches, and neither in evaluation nor inside a
    transform of :mod:`torch.func`.

    Args:
        hidden_size: H, the size of a row.
        num_experts: E, the number of experts.
        top_k: K, in 1..E.
        score: ``"softmax"`` or ``"sigmoid"``.
        renormalize: divide the weights of a token by their sum. With ``top_k=1`` that makes every weight 1 (before
            ``scale``) and the task's gradient of the router exactly 0: use ``renormalize=False`` there.
        bias_update_rate: the step by which an update moves an expert's bias; 0 for a router without ``expert_bias``.
        num_groups: number of groups of experts (DeepSeek-V3); divides E, and is given together with ``topk_groups``.
        topk_groups: number of best groups from which experts are chosen.
        scale: factor of the weights, the routed scaling factor of DeepSeek-V3.
        bias: add a trained ``bias`` to the logits (GPT-OSS), unlike ``expert_bias``, which affects only the choice.
        backend: ``"native"`` for :mod:`pymoe.ops`, ``"reference"`` for :mod:`pymoe.reference`.
        device: the device of the parameters.
        dtype: the dtype of the parameters. ``expert_bias`` is at least float32, since 16 bits would round updates away.

    Attributes:
        weight: (E, H), initialised like the weight of ``nn.Linear``.
        bias: (E,), initialised like the bias of ``nn.Linear``, or ``None``.
        expert_bias: (E,), a buffer in the ``state_dict``; ``None`` if ``bias_update_rate`` is 0. To freeze a trained
            bias, keep the rate and stop calling the update.
        counted: ``counted["load"]`` (E,) int64, slots since the last update; not in the ``state_dict``.
        row_invariant: if true, the bits of a token's logits do not depend on the other tokens of the batch:
            :func:`pymoe.ops.grouped_linear` computes the logits instead of ``F.linear``. False until a user or
            :func:`pymoe.ep.shard` sets it.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range, or arguments do not fit each other.

    Example:
        >>> router = pymoe.nn.Router(hidden_size=16, num_experts=8, top_k=2)
        >>> gate, logits = router(torch.randn(5, 16))
        >>> gate.experts.shape, torch.allclose(gate.weights.sum(dim=1), torch.ones(5))
        (torch.Size([5, 2]), True)
    """

    bias: nn.Parameter | None
    expert_bias: Tensor | None

    @explain_arguments(**OTHER_NAMES)
    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: Score = "softmax",
        renormalize: bool = True,
        bias_update_rate: float = 0.0,
        num_groups: int | None = None,
        topk_groups: int | None = None,
        scale: float = 1.0,
        bias: bool = False,
        backend: Backend = "native",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("Router", "hidden_size", hidden_size)
        check_size("Router", "num_experts", num_experts)
        checks.integer("Router", "top_k", top_k, 1, num_experts, f"in 1..num_experts ({num_experts})")
        checks.choice("Router", "score", score, ("softmax", "sigmoid"))
        check_flag("Router", "renormalize", renormalize)
        check_number("Router", "bias_update_rate", bias_update_rate, minimum=0)
        check_number("Router", "scale", scale)
        check_flag("Router", "bias", bias)
        check_backend("Router", backend)
        check_dtype("Router", dtype)
        _check_groups(num_experts, top_k, num_groups, topk_groups)
        if top_k == 1 < num_experts and renormalize:
            warn_once(
                "one choice renormalized",
                "Router: top_k=1 with renormalize=True makes every weight 1, so that the loss gives the router a "
                "gradient of exactly 0 and it does not learn; pass renormalize=False, as Switch Transformer does",
                stacklevel=3,  # skip the wrapper of explain_arguments
            )
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.score = score
        self.renormalize = renormalize
        self.bias_update_rate = bias_update_rate
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.scale = scale
        self.backend = backend
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        of_logits = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", of_logits)
        of_choice = None
        if bias_update_rate > 0:
            of_choice = torch.empty(num_experts, device=device, dtype=_at_least_float32(self.weight.dtype))
        self.register_buffer("expert_bias", of_choice)
        self.counted = LocalTensors(load=torch.zeros(num_experts, device=device, dtype=torch.int64))
        self.row_invariant = False
        self.replaced: Callable[[Gate, Tensor], Gate] | None = None
        """If set, takes the gate and logits of a forward, and returns the gate to use instead; see
        :mod:`pymoe.nn.replay`. Only :meth:`forward` calls it, which a layer may bypass unless the router has a hook."""
        self.bias_was_updated = False
        """True once ``update_expert_biases`` has updated the bias, or a state with it was loaded: the bias may then be
        meant to stay fixed."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weight and bias as ``nn.Linear`` does, and set expert bias and counted load to zero."""
        bound = self.hidden_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)
        self.counted.zero_()
        self._version_at_start = _version(self.weight)

    def steps_seen(self) -> int:
        """Return how often the weight was changed in place since its initialisation or loading.

        Every optimizer step counts at least once.
        """
        return _version(self.weight) - self._version_at_start

    def train(self, mode: bool = True) -> Router:
        """Set training or evaluation mode.

        When training ends after 100 steps or more, warn (once per process) if an expert bias was never updated.

        Args:
            mode: true for training, false for evaluation.

        Returns:
            The router.
        """
        if self.training and not mode:
            self._warn_if_never_updated()
        return super().train(mode)

    def _warn_if_never_updated(self) -> None:
        if self.expert_bias is None or self.bias_was_updated or self.steps_seen() < MIN_STEPS_TO_WARN:
            return
        if not self.expert_bias.is_meta and not self.expert_bias.any():  # other code may have updated the bias
            warn_once(
                "bias never updated",
                f"Router: bias_update_rate={self.bias_update_rate} has no effect, because update_expert_biases has not "
                "been called in training so far; call pymoe.nn.update_expert_biases(model) after every "
                "optimizer.step()",
                stacklevel=3,
            )

    def forward(self, x_TH: Tensor) -> tuple[Gate, Tensor]:
        """Choose experts for every token.

        Args:
            x_TH: (T, H).

        Returns:
            The gate (``weights`` (T, K) float32, ``experts`` (T, K) int32, ``load`` (E,) int32) and the logits
            (T, E) float32 from which it was made; float64 in place of float32 if an operand is float64.
        """
        self._check(x_TH)
        logits_TE = self.logits(x_TH)
        gate: Gate = operators(self.backend).gate_topk(
            logits_TE, self.top_k, bias=self.expert_bias, **self.choice_options()
        )
        if self.replaced is not None:
            gate = self.replaced(gate, logits_TE)
        return self._counted(gate), logits_TE

    def route(self, x_TH: Tensor, capacity: int | None, *, alone: bool) -> tuple[Gate, Tensor, Tensor, Routing | None]:
        """Return the results of :meth:`forward`, the tokens to pass to the experts, and the routing of the tokens.

        Either the tokens are ``x_TH`` and the routing is None, or both are outputs of the same autograd node as the
        logits: see :mod:`pymoe.nn.router_product`.

        Args:
            x_TH: (T, H).
            capacity: the maximum number of slots of an expert, or None.
            alone: true if nothing except :func:`pymoe.ops.dispatch` will use the returned tokens.
        """
        usual = self.backend != "native" or self.row_invariant or self.bias is not None
        if usual or not is_one_node(x_TH, self.weight):
            return *self.forward(x_TH), x_TH, None
        self._check(x_TH)
        options = self.gate_options()
        gate, logits_TE, x_TH, routing = route(x_TH, self.weight, self.expert_bias, options, capacity, alone)
        return self._counted(gate), logits_TE, x_TH, routing

    def choice_options(self) -> dict[str, Any]:
        """Return the options of the choice, except K and the bias, as keyword arguments of
        :func:`pymoe.ops.gate_topk`.
        """
        of_weights = {"score": self.score, "renormalize": self.renormalize, "scale": self.scale}
        return of_weights | {"num_groups": self.num_groups, "topk_groups": self.topk_groups}

    def gate_options(self) -> GateOptions:
        """Return the options of the choice as the native gate takes them."""
        groups = (self.num_groups or 0, self.topk_groups or 0)
        return (self.top_k, self.score, self.renormalize, *groups, float(self.scale))

    def _check(self, x_TH: Tensor) -> None:
        """Raise unless weight and biases have the router's sizes and the device of the tokens."""
        check_place("router.weight", self.weight, (self.num_experts, self.hidden_size), x_TH)
        if self.bias is not None:
            check_place("router.bias", self.bias, (self.num_experts,), x_TH)
        if self.expert_bias is not None:
            check_place("router.expert_bias", self.expert_bias, (self.num_experts,), x_TH)

    def _counted(self, gate: Gate) -> Gate:
        self.counted.follow(gate.load.device)
        if self.training and self.expert_bias is not None and not in_torch_func():  # transforms must not change counts
            weights_TK = count_on_backward(gate.weights, gate.load, self.counted["load"])
            gate = Gate(weights_TK, gate.experts, gate.load)
        return gate

    def logits(self, x_TH: Tensor) -> Tensor:
        """Return the logits (T, E) of the tokens, in float32 or float64, inside ``torch.autocast``, too.

        Args:
            x_TH: (T, H).
        """
        weight = self.weight
        bias: Tensor | None = self.bias
        if x_TH.dtype == weight.dtype in _WIDE and not autocast_enabled(x_TH.device.type):
            bias = None if bias is None else bias.to(x_TH.dtype)
            return linear(x_TH, weight, bias, row_invariant=self.row_invariant)
        if takes(x_TH, weight) and not self.row_invariant:
            logits_TE = wide_product(x_TH, weight)
            return logits_TE if bias is None else logits_TE + bias
        dtype = _at_least_float32(torch.promote_types(x_TH.dtype, weight.dtype))
        bias = None if bias is None else bias.to(dtype)
        with without_autocast(x_TH.device.type):
            return linear(x_TH.to(dtype), weight.to(dtype), bias, row_invariant=self.row_invariant)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype.itemsize < 4:
            self.expert_bias = bias.to(self.expert_bias.device)  # bfloat16() and half() must not narrow the bias
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        self._warn_if_never_updated()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape != self.weight.shape:
            experts, size = weight.shape
            args[-1].append(
                f"Router {prefix.removesuffix('.')!r}: the state is of a layer with num_experts={experts} and "
                f"hidden_size={size}, this one has num_experts={self.num_experts} and hidden_size={self.hidden_size}: "
                f"make the layer with the numbers of the state"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._version_at_start = _version(self.weight)
        if self.expert_bias is not None:  # with assign=True, the bias has the checkpoint's dtype
            self.expert_bias = self.expert_bias.to(_at_least_float32(self.expert_bias.dtype))
            self.bias_was_updated = True

    def __repr__(self) -> str:
        """Return the options in one line, without the submodule ``counted``."""
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        bias = "" if self.bias is None else ", bias=True"
        return f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, {self.options_repr()}{bias}"

    def options_repr(self) -> str:
        """Return the options of the choice as text; bias rate, groups and scale only if they are not the default."""
        text = f"top_k={self.top_k}, score={self.score!r}, renormalize={self.renormalize}"
        if self.bias_update_rate > 0:
            text += f", bias_update_rate={self.bias_update_rate}"
        if self.num_groups is not None:
            text += f", num_groups={self.num_groups}, topk_groups={self.topk_groups}"
        if self.scale != 1.0:
            text += f", scale={self.scale}"
        return text


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_groups(num_experts: int, top_k: int, num_groups: int | None, topk_groups: int | None) -> None:
    if (num_groups is None) != (topk_groups is None):
        raise ValueError(
            f"Router: num_groups and topk_groups must be given together, got num_groups={num_groups} and "
            f"topk_groups={topk_groups}"
        )
    if num_groups is None or topk_groups is None:
        return
    checks.integer("Router", "num_groups", num_groups, 1, num_experts, f"in 1..num_experts ({num_experts})")
    if num_experts % num_groups != 0:
        raise ValueError(f"Router: num_groups must divide num_experts ({num_experts}), got {num_groups}")
    checks.integer("Router", "topk_groups", topk_groups, 1, num_groups, f"in 1..num_groups ({num_groups})")
    available = topk_groups * (num_experts // num_groups)
    if available < top_k:
        raise ValueError(f"Router: topk_groups must leave at least top_k = {top_k} experts, got {available}")


# The update of the expert bias, which balances experts without an auxiliary loss.


@torch.no_grad()
def update_expert_biases(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Update the expert bias of every router in ``model`` from the load since the last update.

    Call this after every ``optimizer.step()``. It computes
    ``expert_bias += bias_update_rate * sign(mean load - load)`` (arXiv 2408.15664, algorithm 1; DeepSeek-V3,
    arXiv 2412.19437). The load is the number of slots for which each expert was chosen in all backward passes since
    the last update, over all micro-batches of an optimizer step; each update resets it to zero. The bias of a router
    that saw no tokens stays unchanged.

    A layer does not call this itself, since it cannot know when an optimizer step is complete. If
    ``torch.distributed`` is initialised, the loads of all layers are first summed over ``group`` in one all-reduce, so
    that the ranks' biases stay equal; every rank of the group must then call this for the same routers.

    Args:
        model: any module that contains :class:`pymoe.nn.Router` or :class:`pymoe.nn.MoE` layers, or a model of
            transformers after :func:`pymoe.integrations.transformers.add_expert_biases`. Layers without an
            ``expert_bias`` are skipped; if no layer has one, a ``UserWarning`` is given once.
        group: the ranks of data parallelism, which share the model's tokens; ``None`` means all ranks.

    Example:
        >>> moe = pymoe.nn.MoE(16, 32, num_experts=4, top_k=2, bias_update_rate=0.001)
        >>> moe(torch.randn(64, 16)).sum().backward()  # counts the tokens of each expert
        >>> pymoe.nn.update_expert_biases(moe)  # after optimizer.step()
        >>> moe.router.expert_bias.abs().max()
        tensor(0.0010)
    """
    check_model("update_expert_biases", model)
    all_routers = [module for module in model.modules() if isinstance(module, (Router, ExpertBias))]
    routers = [router for router in all_routers if router.expert_bias is not None]
    if not routers:
        seen = "whose bias_update_rate is 0" if all_routers else "no pymoe.nn.MoE or Router layer"
        has = f"holds {len(all_routers)} router(s) " if all_routers else "holds "
        warn_once(
            "nothing to update",
            f"update_expert_biases: the {type(model).__name__} that it was called with {has}{seen}, so the call has "
            "no effect; build the layers with MoE(..., bias_update_rate=0.001), call add_expert_biases for a model of "
            "transformers, or drop the call",
            stacklevel=3,  # skip the wrapper of torch.no_grad
        )
        return
    loads = [router.counted["load"] for router in routers]
    if dist.is_available() and dist.is_initialized():
        loads = summed_over_ranks(loads, group)
    for router, load_E in zip(routers, loads, strict=True):
        assert router.expert_bias is not None
        # This is sign(mean - load) without rounding the mean.
        direction_E = torch.sign(load_E.sum() - router.num_experts * load_E)
        direction_E = direction_E.to(router.expert_bias.dtype).view_as(router.expert_bias)
        router.expert_bias.add_(direction_E, alpha=router.bias_update_rate)
        router.counted.zero_()
        router.bias_was_updated = True


def summed_over_ranks(loads: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the loads summed over ``group``, with one all-reduce. The loads may be on several devices."""
    flat = torch.cat([load.to(loads[0].device) for load in loads])
    dist.all_reduce(flat, group=group)
    parts = flat.split([load.numel() for load in loads])
    return [part.to(load.device) for part, load in zip(parts, loads, strict=True)]
