"""MoE: the mixture-of-experts layer, a drop-in for a dense feed-forward network."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pymoe._common import checks
from pymoe._common.contracts import check_kind
from pymoe._common.names import explain_arguments
from pymoe._common.types import FLOATING, ActivationKind, RouterLosses, Routing, Score, autocast_enabled, cast_operands
from pymoe._torch_private import FakeTensor
from pymoe._transforms import in_torch_func, is_exporting
from pymoe.nn.apply_experts import (
    Networks,
    apply_experts_fused,
    apply_networks,
    apply_quantized_experts,
    bias_of_product,
    grouped_networks,
    is_one_call,
)
from pymoe.nn.direct import forward_directly
from pymoe.nn.experts import Experts, SharedExperts
from pymoe.nn.local_tensors import LastCall
from pymoe.nn.losses import AuxiliaryLosses
from pymoe.nn.options import (
    MIN_STEPS_TO_WARN,
    OTHER_NAMES,
    Backend,
    as_rows,
    check_choice,
    check_flag,
    check_networks,
    check_number,
    operators,
    warn_once,
)
from pymoe.nn.plain_calls import are_called_plainly
from pymoe.nn.quantized_experts import QuantizedExperts, QuantizedLinear
from pymoe.nn.router import Router, update_expert_biases
from pymoe.ops import raw

MOST_HELD_LOGITS = 1 << 22
"""Maximum number of bytes of logits that a layer keeps until its statistics are read: 4096 tokens and 256 experts in
float32. From larger logits the forward computes the losses immediately; at this size, computing them takes about as
long as launching the kernels."""


class Stats(NamedTuple):
    """Statistics of a layer's last forward: tensors on the layer's device, so reading a field does not synchronise."""

    load: Tensor
    """(E,) int32: number of slots for which each expert was chosen, before any were dropped; sums to T * K."""
    dropped: Tensor
    """Scalar int32: number of slots that exceeded an expert's capacity."""
    load_balancing_loss: Tensor
    """Scalar float32, without its coefficient; 1 is perfect balance."""
    z_loss: Tensor
    """Scalar float32, without its coefficient."""

    def __repr__(self) -> str:
        """Return the values in one line; this waits for the device."""
        load, *scalars = self
        if load.is_meta or isinstance(load, FakeTensor):  # these tensors have no values
            return tuple.__repr__(self)
        if load.numel() <= 16:
            shares = str(load.tolist())
        else:
            shares = f"<{load.numel()} experts, {int(load.min())} to {int(load.max())} slots, {int(load.sum())} in all>"
        dropped, balance, z = (one.item() for one in scalars)
        return f"Stats(load={shares}, dropped={dropped}, load_balancing_loss={balance:.4g}, z_loss={z:.4g})"


class MoE(nn.Module):
    """A mixture-of-experts feed-forward network: (..., H) to (..., H).

    Every token goes to the ``top_k`` experts that the router chooses for it. The weights of the choice multiply the
    experts' outputs as they are summed (:func:`pymoe.ops.combine`), or their inputs with ``score_before_experts``.
    Shared experts see every token; their output is added unweighted, or weighted by a gate of their own with
    ``shared_gate``. The layer adds no residual connection.

    **Auxiliary losses** need not be added to the model's loss: in training mode ``loss.backward()`` of any loss that
    depends on the output also adds the gradients of ``aux_loss_coef * balancing loss + z_loss_coef * z loss``, whatever
    factor scales ``loss``; see :func:`pymoe.nn.set_aux_loss_scale` for gradient accumulation and loss scaling. Each
    rank of data parallelism computes them over its own tokens, and averaging the gradients averages the losses.

    **Expert bias**: with ``bias_update_rate > 0`` call :func:`pymoe.nn.update_expert_biases` after every
    ``optimizer.step()``; see :class:`Router`.

    **Capacity**: with a ``capacity_factor`` an expert takes at most ``ceil(capacity_factor * (T * K) / E)`` slots, at
    least 1 (GShard, arXiv 2006.16668; Megatron-LM's ``get_capacity``), where T is the number of tokens of one call.
    Further slots, in the order of tokens, are dropped: they add nothing to the output, and the token's other weights
    stay unchanged.

    **Precision**: logits, scores, losses and the final sum are computed in float32 (float64 in a float64 layer), even
    with bfloat16 parameters and inside ``torch.autocast``. Inside autocast, the experts compute in the autocast dtype,
    and the output has that dtype, as for ``nn.Linear``.

    **Experts on several ranks**: :func:`pymoe.ep.shard` spreads the experts of a model over a process group. With
    ``expert_parallel`` the ranks of the group construct such a layer together, a :class:`pymoe.ep.ShardedMoE`: with the
    same seed on all ranks, it has the initial values of a layer in one process. Each rank allocates only its own
    experts.

    The layer works under ``torch.utils.checkpoint`` (the load for the expert bias is counted once, gradients are
    equal bit for bit), ``torch.compile`` (``fullgraph=True`` with the native backend), ``copy.deepcopy`` and
    ``DistributedDataParallel``, and can be built on the meta device. Calls of one layer must not run in several threads
    at the same time.

    Under :mod:`torch.func` the native layer supports ``grad``, ``vjp``, ``jacrev`` and ``vmap``, which computes the
    elements of the batch one after the other. Forward mode (``jvp``, ``jacfwd``, ``hessian``, ``forward_ad``) raises
    ``NotImplementedError``; the layer with ``backend="reference"`` supports it, but has no ``vmap`` over tokens or
    parameters. ``torch.compile`` leaves calls inside forward mode out of its graphs, or raises if ``fullgraph=True``.
    But the backward pass of a compiled graph silently drops tangents of its incoming gradients, as in a ``jvp`` of the
    function that a compiled ``vjp`` returned.

    Args:
        hidden_size: H, the size of a row.
        ffn_size: F, the inner size of one expert.
        num_experts: E, the number of experts.
        top_k: K, experts per token, in 1..E. It is an attribute of the router, and may be set between calls.
        activation: a kind of :func:`pymoe.ops.expert_activation`: ``"swiglu"``, ``"gelu"``, ``"relu"`` and others.
        score: ``"softmax"`` or ``"sigmoid"`` of the logits.
        renormalize: divide the weights of a token by their sum. With ``top_k=1`` that makes every weight 1 (before
            ``scale``) and the task's gradient of the router exactly 0: use ``renormalize=False`` there, as Switch
            Transformer does.
        bias_update_rate: step of the expert bias; 0 for none. DeepSeek-V3 trains with 0.001.
        num_groups: choose from the best ``topk_groups`` of this many groups of experts (DeepSeek-V3).
        topk_groups: see ``num_groups``; both must be given, or neither.
        scale: factor of the weights (the routed scaling factor of DeepSeek-V3).
        router_bias: add a trained bias to the router's logits (GPT-OSS).
        score_before_experts: multiply the inputs of experts by the weights of the choices, not their outputs (Llama 4;
            the name is torchtitan's). This copies every token ``top_k`` times, and rounds the products to the dtype of
            the tokens.
        capacity_factor: see above; ``None`` drops nothing.
        num_shared_experts: experts of size F that every token passes through (DeepSeekMoE, arXiv 2401.06066).
        shared_gate: multiply the output of the shared experts by a sigmoid of a linear function of the token
            (Qwen2-MoE, arXiv 2407.10671).
        aux_loss_coef: coefficient of the balancing loss (Switch Transformer, arXiv 2101.03961, which uses 0.01).
        z_loss_coef: coefficient of the z loss (ST-MoE, arXiv 2202.08906, which uses 0.001).
        bias: add biases to the experts' linear layers.
        backend: ``"native"`` for :mod:`pymoe.ops`, ``"reference"`` for :mod:`pymoe.reference`, pure PyTorch. Native
            operators without a CUDA kernel in this build raise ``RuntimeError`` for CUDA tensors; the reference works.
        device: the device of the parameters.
        dtype: the dtype of the parameters: float32, float64, bfloat16 or float16.
        expert_parallel: a mesh of one dimension or a process group over which the experts are spread, as by
            :func:`pymoe.ep.shard` without options; to set options, call that function instead. None: not spread.

    ``state_dict`` keys: ``router.weight`` (E, H); ``router.bias`` (E,) if ``router_bias``; ``router.expert_bias`` (E,)
    if ``bias_update_rate > 0``; ``experts.w_in`` (E, 2F, H), or (E, F, H) without a gate; ``experts.w_out`` (E, H, F);
    ``shared.w_in`` and ``shared.w_out`` if there are shared experts, and ``shared.w_gate`` (1, H) if ``shared_gate``;
    and ``b_in``, ``b_out`` next to each pair if ``bias``.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument is out of range, or arguments do not fit each other, or torch cannot use the device.

    Example:
        >>> moe = pymoe.nn.MoE(hidden_size=64, ffn_size=128, num_experts=8, top_k=2)
        >>> x = torch.randn(4, 10, 64)
        >>> moe(x).shape
        torch.Size([4, 10, 64])
        >>> moe.stats.load.sum()  # 40 tokens, with 2 choices each
        tensor(80)
    """

    shared: SharedExperts | None
    _shard: ClassVar[Callable[[MoE, DeviceMesh | dist.ProcessGroup], object]]
    """Keeps only this rank's experts. The function is in :mod:`pymoe.ep`, which imports this package; so ``pymoe``
    assigns it to this attribute."""

    @explain_arguments(**OTHER_NAMES)
    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: ActivationKind = "swiglu",
        score: Score = "softmax",
        renormalize: bool = True,
        bias_update_rate: float = 0.0,
        num_groups: int | None = None,
        topk_groups: int | None = None,
        scale: float = 1.0,
        router_bias: bool = False,
        score_before_experts: bool = False,
        capacity_factor: float | None = None,
        num_shared_experts: int = 0,
        shared_gate: bool = False,
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        bias: bool = False,
        backend: Backend = "native",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        expert_parallel: DeviceMesh | dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        checks.integer("MoE", "num_shared_experts", num_shared_experts, 0, None, "at least 0")
        check_flag("MoE", "shared_gate", shared_gate)
        if shared_gate and num_shared_experts == 0:
            raise ValueError("MoE: num_shared_experts must be at least 1 with shared_gate=True, got 0")
        check_flag("MoE", "score_before_experts", score_before_experts)
        if capacity_factor is not None:
            check_number("MoE", "capacity_factor", capacity_factor, above=0)
        if device is not None:
            checks.usable_device(device, "MoE: device")
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.score_before_experts = score_before_experts
        self.capacity_factor = capacity_factor
        self.backend = backend
        place: dict[str, Any] = {"backend": backend, "device": device, "dtype": dtype}
        self.router = Router(
            hidden_size,
            num_experts,
            top_k,
            score=score,
            renormalize=renormalize,
            bias_update_rate=bias_update_rate,
            num_groups=num_groups,
            topk_groups=topk_groups,
            scale=scale,
            bias=router_bias,
            **place,
        )
        self.losses = AuxiliaryLosses(aux_loss_coef, z_loss_coef, score=score, backend=backend)
        if expert_parallel is not None:
            place["device"] = "meta"  # no memory yet: _spread allocates only this rank's experts
        self.experts = Experts(hidden_size, ffn_size, num_experts, activation=activation, bias=bias, **place)
        self.shared = None
        if num_shared_experts > 0:
            shared_size = num_shared_experts * ffn_size
            self.shared = SharedExperts(
                hidden_size, shared_size, activation=activation, bias=bias, gate=shared_gate, **place
            )
        self.last = LastCall(
            load=torch.zeros(num_experts, device=device, dtype=torch.int32),
            dropped=torch.zeros((), device=device, dtype=torch.int32),
            load_balancing_loss=torch.zeros((), device=device, dtype=torch.float32),
            z_loss=torch.zeros((), device=device, dtype=torch.float32),
        )
        if expert_parallel is not None:
            self._spread(expert_parallel)

    def reset_parameters(self) -> None:
        """Initialise all parameters as the constructor does, and set expert bias, counts and statistics to zero."""
        self.router.reset_parameters()
        self.experts.reset_parameters()
        if self.shared is not None:
            self.shared.reset_parameters()
        self.last.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Send every token through its experts.

        Args:
            x: (..., H), any number of dimensions from one on, the dtype of the parameters (any but float64
                inside ``torch.autocast``). There may be no tokens.

        Returns:
            The shape and dtype of ``x`` (the autocast dtype inside ``torch.autocast``).

        Raises:
            TypeError: ``x`` is not a floating tensor; ``x`` and the parameters have different dtypes outside of
                ``torch.autocast``; or some of them are float64 and others are not, since autocast does not cast
                float64.
            ValueError: the last dimension of ``x`` is not H, or a parameter does not have the layer's sizes or is on
                another device than ``x``.
        """
        if type(self) is MoE:
            direct = forward_directly(self, x)
            if direct is not None:
                return direct
        self._check_input(x)
        x_TH = as_rows(x, self.hidden_size)

        routing: Routing | None = None
        if are_called_plainly((self.router, Router)):
            capacity = self._capacity(x_TH.shape[0], self.router.top_k)
            alone = self.shared is None and not self.score_before_experts
            gate, logits_TE, x_TH, routing = self.router.route(x_TH, capacity, alone=alone)
        else:
            gate, logits_TE = self.router(x_TH)
            capacity = self._capacity(*gate.experts.shape)
        weights_TK, losses = gate.weights, None
        if not are_called_plainly((self.losses, AuxiliaryLosses)) or self.losses.injects():
            weights_TK, losses = self.losses(gate, logits_TE)
        rows_TH: Tensor
        (rows_TH,) = cast_operands(x_TH)  # type: ignore[assignment]  # once per token, not once per choice
        if self.score_before_experts:
            y_TH = self._apply_experts_to_scaled(rows_TH, gate.experts, weights_TK, capacity)
        else:
            y_TH = self._apply_experts(rows_TH, gate.experts, weights_TK, capacity, routing)
        if y_TH.shape[1] != self.hidden_size:  # experts that a user has put in may return any width
            seen = y_TH.shape[1]
            raise ValueError(f"MoE: experts must return rows (S, H) with H = {self.hidden_size}, got {seen} features")
        if self.shared is not None:
            y_TH = self._with_shared(y_TH, rows_TH)

        self._keep_stats(gate.load, logits_TE, capacity, losses)
        output: Tensor = y_TH.reshape(x.shape)
        return output

    def train(self, mode: bool = True) -> MoE:
        """Set training or evaluation mode.

        When training ends after 100 steps or more, warn (once per process) if nothing has balanced the experts.

        Args:
            mode: true for training, false for evaluation.

        Returns:
            The layer.
        """
        if self.training and not mode:
            self._warn_if_unbalanced()
        return super().train(mode)

    @property
    def top_k(self) -> int:
        """Return K, the number of experts per token, from the router."""
        return self.router.top_k

    @top_k.setter
    def top_k(self, value: int) -> None:
        self.router.top_k = value

    @property
    def stats(self) -> Stats:
        """Return load, dropped slots and losses of the last forward, in training or evaluation; zero before the first.

        They are detached copies, which do not change when the layer runs again. Losses that the forward itself did not
        need are computed when they are read. Until then, or until its next forward, the layer keeps the router's logits
        if they take at most 4 MiB; if they take more, it computes the losses in the forward. Under activation
        checkpointing the recomputation leaves the same values. A forward inside a transform of :mod:`torch.func` or in
        a program of :func:`torch.export` does not change the statistics.
        """
        return Stats(**self.last.copies())

    def update_bias(self) -> None:
        """Update the expert bias of this layer: ``update_expert_biases(self)``."""
        update_expert_biases(self)

    def __repr__(self) -> str:
        """Return the main options in one line, or the module tree if a part was replaced."""
        parts = (self.router, self.losses, self.experts, *(() if self.shared is None else (self.shared,)))
        if any(type(part) not in (Router, AuxiliaryLosses, Experts, SharedExperts) for part in parts):
            return super().__repr__()
        text = [f"{self.experts.extra_repr()}, {self.router.options_repr()}"]
        if self.router.bias is not None:
            text.append("router_bias=True")
        if self.shared is not None:
            text.append(f"num_shared_experts={self.shared.ffn_size // self.experts.ffn_size}")
            if self.shared.gate:
                text.append("shared_gate=True")
        text += [
            f"{name}={value}" for name in ("aux_loss_coef", "z_loss_coef") if (value := getattr(self.losses, name))
        ]
        return f"{type(self).__name__}({', '.join([*text, self.extra_repr()])})"

    def extra_repr(self) -> str:
        """Return the options of the layer that are not options of its router, losses or experts."""
        text = ["score_before_experts=True"] if self.score_before_experts else []
        if self.capacity_factor is not None:
            text.append(f"capacity_factor={self.capacity_factor}")
        return ", ".join([*text, f"backend={self.backend!r}"])

    def _spread(self, ranks: DeviceMesh | dist.ProcessGroup) -> None:
        """Keep only this rank's experts; then allocate and initialise them and the shared experts.

        If the router is on the meta device, all of them stay there, too.
        """
        self._shard(ranks)
        device = self.router.weight.device
        if device.type != "meta":
            for part in (self.experts, *(() if self.shared is None else (self.shared,))):
                part.to_empty(device=device).reset_parameters()  # type: ignore[operator]

    def _save_to_state_dict(self, *args: Any) -> None:
        self._warn_if_unbalanced()
        super()._save_to_state_dict(*args)

    def _warn_if_unbalanced(self) -> None:
        router, losses = self.router, self.losses
        # A router or losses of another class, which a user has put in, may balance the experts.
        if not (isinstance(router, Router) and isinstance(losses, AuxiliaryLosses)):
            return
        balanced = losses.aux_loss_coef > 0 or router.expert_bias is not None
        if not balanced and router.top_k < self.num_experts and router.steps_seen() >= MIN_STEPS_TO_WARN:
            warn_once(
                "no balancing",
                "MoE: the layer was trained without anything that balances its experts, so a few may take all tokens; "
                "set aux_loss_coef (0.01 is usual), or bias_update_rate and call update_expert_biases; moe.stats.load "
                "shows the balance",
                stacklevel=3,
            )

    def _capacity(self, tokens: int, choices: int) -> int | None:
        """Return the maximum number of slots of an expert for ``tokens`` with ``choices`` each; None for no limit."""
        if self.capacity_factor is None:
            return None
        factor = min(self.capacity_factor, self.num_experts)  # with num_experts, an expert may already take every slot
        slots = factor * (tokens * choices) / self.num_experts
        if isinstance(tokens, torch.SymInt):  # torch.export cannot save a program with a math.ceil
            whole = torch.sym_int(slots)
            return torch.sym_max(1, torch.sym_ite(slots > whole, whole + 1, whole))  # type: ignore[no-any-return]
        return max(1, math.ceil(slots))

    def _apply_experts(
        self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, capacity: int | None, routing: Routing | None
    ) -> Tensor:
        experts: Any = self.experts
        if self._stands_in_for_quantized(experts, x_TH.device):
            self._check_choice(x_TH, experts_TK, weights_TK)
            arguments: tuple[Any, ...] = (
                *(experts.w_in.weight, experts.w_out.weight),
                *(_in_dtype_of(x_TH, experts.b_in), _in_dtype_of(x_TH, experts.b_out)),
                *(experts.activation, capacity),
            )
            return apply_quantized_experts(x_TH, experts_TK, weights_TK, *arguments)
        networks: Networks = experts
        whose = operators(self.backend)
        left: Tensor | None = None
        if self._stands_in_for(experts, Experts):
            self._check_choice(x_TH, experts_TK, weights_TK)
            check_networks("experts", experts, (self.num_experts,), x_TH)
            parameters = (experts.w_in, experts.w_out, experts.b_in, experts.b_out)
            if routing is None and is_one_call(x_TH, weights_TK, *parameters):
                arguments = (*cast_operands(*parameters), experts.activation, capacity)
                return apply_experts_fused(x_TH, experts_TK, weights_TK, *arguments)
            w_in, w_out, b_in, b_out = parameters
            b_out, left = bias_of_product(x_TH, b_out)
            networks = grouped_networks(w_in, w_out, b_in, b_out, experts.activation, whole=capacity is None)
            whose = raw  # without checks: the arguments have been checked above
        return apply_networks(
            x_TH,
            experts_TK,
            weights_TK,
            self.num_experts,
            networks,
            capacity=capacity,
            operators=whose,
            routing=routing,
            bias=left,
        )

    def _apply_experts_to_scaled(
        self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, capacity: int | None
    ) -> Tensor:
        """Return, for each token, the sum of its experts' outputs for inputs scaled by the weights of the choices."""
        check_choice(x_TH, experts_TK, weights_TK)
        scaled_TKH = (x_TH[:, None] * weights_TK[..., None]).to(x_TH.dtype)
        experts_S1 = experts_TK.reshape(-1, 1)  # each choice becomes a token with one choice of weight 1
        ones_S1 = torch.ones_like(experts_S1, dtype=weights_TK.dtype)
        rows_SH = self._apply_experts(scaled_TKH.flatten(0, 1), experts_S1, ones_S1, capacity, None)
        rows_TKH = rows_SH.reshape(*experts_TK.shape, rows_SH.shape[1])
        return rows_TKH.sum(dim=1, dtype=rows_TKH.dtype)  # without a dtype, autocast on CUDA would return float32

    def _check_choice(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> None:
        """Raise unless the kernels accept the activation and the choice; a user's router or losses may return any."""
        check_choice(x_TH, experts_TK, weights_TK)
        check_kind("MoE", "experts.activation", self.experts.activation)

    def _with_shared(self, y_TH: Tensor, x_TH: Tensor) -> Tensor:
        """Return the routed experts' output plus the shared experts' output."""
        shared: Any = self.shared
        return with_shared(y_TH, shared(x_TH))

    def _stands_in_for(self, part: Any, kind: type[nn.Module]) -> bool:
        """Return whether one native call of the layer may do the work of ``part`` in place of a call of ``part``."""
        return self.backend == "native" and are_called_plainly((part, kind)) and part.backend == "native"

    def _stands_in_for_quantized(self, experts: Any, device: torch.device) -> bool:
        """Return whether one native call on ``device`` may do the work of quantised experts and their linear layers."""
        return (
            self._stands_in_for(experts, QuantizedExperts)
            and all(self._stands_in_for(weight, QuantizedLinear) for weight in (experts.w_in, experts.w_out))
            and experts.fits(self.num_experts, self.hidden_size, device)
        )

    def _keep_stats(self, load: Tensor, logits_TE: Tensor, capacity: int | None, losses: RouterLosses | None) -> None:
        # A transform must not write to tensors outside of it, and may run one call for many inputs. An exported
        # program contains the layer's parameters, but not its statistics.
        if not (in_torch_func() or is_exporting()):
            self._keep_stats_of(load, logits_TE, capacity, losses)

    def _keep_stats_of(
        self, load: Tensor, logits_TE: Tensor, capacity: int | None, losses: RouterLosses | None
    ) -> None:
        logits: Tensor | None = None
        how: tuple[Any, ...] = ()
        if losses is None:
            auxiliary = self.losses
            how = (auxiliary.score, auxiliary.backend)
            logits = logits_TE.detach() if logits_TE.requires_grad else logits_TE
            # Do not keep large logits: autograd frees them at the end of the backward pass, but this reference would
            # keep them until the next forward, which may be much later.
            if logits_TE.numel() * logits_TE.element_size() > MOST_HELD_LOGITS:
                losses, logits = _losses(logits, load, *how), None
        self.last.keep_pending(partial(_statistics, load, capacity, losses, logits, *how), load)

    def _check_input(self, x: Tensor) -> None:
        weight = self._weight_of_input_dtype()
        if isinstance(x, Tensor) and self._fits(x, weight):
            return
        checks.floating("MoE", "x", x)
        if x.dim() < 1 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"MoE: x must have shape (..., H) with H = {self.hidden_size}, got {tuple(x.shape)}")
        if weight is None:
            return
        if weight.is_meta and not x.is_meta:
            raise ValueError(
                f"MoE: the parameters must have values for x on {x.device}, got parameters on the meta device: call "
                f"to_empty(device=...), then reset_parameters() or load_state_dict(...)"
            )
        checks.same_device("MoE", "x", x, "the parameters", weight)
        if x.dtype != weight.dtype and not autocast_enabled(x.device.type):
            raise TypeError(f"MoE: x must have the dtype of the parameters ({weight.dtype}), got {x.dtype}")
        if x.dtype == torch.float64 != weight.dtype:
            raise TypeError(
                f"MoE: x must not be float64 where the parameters are {weight.dtype}: autocast leaves float64 as it is"
            )

    def _fits(self, x: Tensor, weight: Tensor | None) -> bool:
        """Return true only if :meth:`_check_input` would accept ``x``; see :mod:`pymoe._common.contracts`."""
        return (
            weight is not None
            and x.dtype == weight.dtype
            and x.dtype in FLOATING
            and x.dim() > 0
            and x.shape[-1] == self.hidden_size
            and x.device == weight.device
        )

    def _weight_of_input_dtype(self) -> Tensor | None:
        """Return a parameter with the dtype and device that ``x`` must have; None if only the parts can check ``x``."""
        experts: Any = self.experts
        if are_called_plainly((experts, Experts)):
            return experts.w_in  # type: ignore[no-any-return]
        # Quantised weights accept rows of several dtypes, so compare with the dtype of the router.
        if type(experts) is QuantizedExperts and are_called_plainly((self.router, Router)):
            return self.router.weight
        return None


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """Return the layers of a model by their names within it; a model that is a layer itself is called "moe"."""
    return {name or "moe": module for name, module in model.named_modules() if isinstance(module, MoE)}


def with_shared(y_TH: Tensor, shared_TH: Any) -> Tensor:
    """Return the output of the routed experts plus ``shared_TH``, the output of the shared experts.

    Raises:
        ValueError: ``shared_TH``, from shared experts that a user has put in, is not a tensor of the shape of ``y_TH``.
    """
    if not isinstance(shared_TH, Tensor) or shared_TH.shape != y_TH.shape:  # torch would broadcast another shape
        seen = tuple(shared_TH.shape) if isinstance(shared_TH, Tensor) else type(shared_TH).__name__
        raise ValueError(f"MoE: shared experts must return rows (T, H) = {tuple(y_TH.shape)}, got {seen}")
    return y_TH + shared_TH


def _losses(logits_TE: Tensor | None, load: Tensor, score: Score, backend: Backend) -> RouterLosses:
    return operators(backend).router_losses(logits_TE, load, score=score)  # type: ignore[no-any-return]


def _statistics(
    load: Tensor, capacity: int | None, losses: RouterLosses | None, logits_TE: Tensor | None, *how: Any
) -> dict[str, Tensor]:
    """Return the fields of the :class:`Stats` of a call, by name.

    If ``losses`` is None, compute the losses from the logits; ``how`` is (score, backend).
    """
    if losses is None:
        losses = _losses(logits_TE, load, *how)
    dropped = load.new_zeros(()) if capacity is None else (load - capacity).clamp_(min=0).sum()
    return {"load": load, "dropped": dropped, "load_balancing_loss": losses.load_balancing, "z_loss": losses.z}


def _in_dtype_of(x: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)
