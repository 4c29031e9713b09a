"""ShardedMoE: a mixture-of-experts layer whose experts are spread over the ranks of a group.

The order of a call: gate; start of the count exchange; rows gathered into the send buffer; one read of the counts of
all ranks; dispatch started; shared experts; chunk by chunk: wait, compute, start the combine; the weighted sum. With
``transport="padded"`` the host reads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule

from pymoe._common.dtypes import cast_operands
from pymoe._common.types import Gate, RouterLosses
from pymoe._transforms import in_torch_func
from pymoe.ep.agreement import CountExchange, call_signature, report_failure
from pymoe.ep.all_to_all import wait_combine
from pymoe.ep.dispatcher import DeduplicatingDispatcher, PaddedDispatcher, TokenDispatcher
from pymoe.ep.experts import ShardedExperts
from pymoe.ep.failures import while_others_wait
from pymoe.ep.sharding import ExpertSharding, local_tensor
from pymoe.nn.local_tensors import LocalTensors
from pymoe.nn.losses import AuxiliaryLosses
from pymoe.nn.moe import MoE
from pymoe.nn.operands import as_rows, check_parameter
from pymoe.nn.options import operators
from pymoe.nn.router import Router


class ShardedMoE(MoE):
    """A :class:`pymoe.nn.MoE` whose experts are spread over ranks; :func:`pymoe.ep.shard` makes it from one.

    Its calls are collective: every rank of the group calls the layer the same number of times, each with its own tokens
    (possibly none), and runs the backward passes of the same calls in the same order. Backward passes are not compared:
    gradients are wrong if ranks run the backward passes of several calls in different orders. Attributes, options and
    ``state_dict`` keys are those of :class:`pymoe.nn.MoE`. ``stats`` describe this rank's tokens only.

    A rank that raises before its counts are sent (router, shapes, dtypes) tells the others, which read this unless rows
    travel in padded buffers. The others wait for the rows of a rank that raises later: over gloo they raise
    :class:`GroupError` a second after it has raised in this layer's forward or backward pass, or as soon as its process
    has ended, and otherwise when the group's timeout is over. The group cannot be used any more then. So a process that
    has raised should end.

    It works under ``torch.utils.checkpoint``, autocast and ``torch.compile`` (with a graph break), and can be
    differentiated any number of times, but not inside the transforms of :mod:`torch.func`, nor in forward mode.
    """

    experts: ShardedExperts
    sharding: ExpertSharding
    """The ranks of the experts, such as ``owner`` and ``own_experts``, and the options of :func:`pymoe.ep.shard`."""
    last_rows: list[int] | None = None
    """(R,): the number of rows that each rank computed in the last call, including rows of clones; None before the
    first call, and with ``transport="padded"``."""
    notes: LocalTensors
    """Records of differences between ranks, kept on the device; see :func:`~pymoe.ep.dispatcher.device_notes`. Only
    ``transport="padded"`` uses them."""
    _loads: list[list[int]] | Tensor | None = None

    @property
    def last_loads(self) -> list[list[int]] | None:
        """Return (R, E): the number of slots of each rank for each expert in the last call; None before.

        With ``transport="padded"`` this waits for the device.
        """
        return self._loads.tolist() if isinstance(self._loads, Tensor) else self._loads

    @property
    def overflowed(self) -> Tensor | None:
        """Return a scalar int64 on the device: the rows that did not fit in all calls so far; None with "exact".

        ``overflowed.zero_()`` starts a new count. Calls that are recomputed count again.
        """
        return self.notes["overflowed"] if self.sharding.transport == "padded" else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Send every token of this rank through its experts, wherever they are.

        Args:
            x: (..., H), any number of dimensions from one on, the dtype of the parameters (any except float64
                inside ``torch.autocast``). There may be no tokens; other ranks may have more or fewer.

        Returns:
            The shape and dtype of ``x`` (the autocast dtype inside ``torch.autocast``).

        Raises:
            TypeError: as :class:`pymoe.nn.MoE`; the other ranks raise :class:`GroupError`.
            ValueError: the same.
            RuntimeError: inside a transform of :mod:`torch.func`, or in forward mode.
            GroupError: the ranks do not make the same call, one of them has failed or died, or a rank would receive
                more rows than ``room``.
        """
        sharding = self.sharding
        try:
            _check_mode(x)
            self._check_input(x)
            x_TH = as_rows(x, self.hidden_size)
            gate, logits_TE = self.router(x_TH)
            rows_TH: Tensor
            (rows_TH,) = cast_operands(x_TH)  # type: ignore[assignment]
            _check_parameters(sharding, self.experts, self.shared, rows_TH)
            experts = self.experts.named_parameters()
            options = gate.experts.shape[1], self.capacity_factor, self._compared_options()
            signature = call_signature(sharding, rows_TH, gate.weights, experts, *options)
            dispatcher = self._dispatcher(gate)
        except Exception as error:
            report_failure(sharding, error)
            raise
        exchange = CountExchange(sharding, signature, dispatcher.own_counts, x_TH.shape[0])
        with while_others_wait(sharding):
            y_TH = self._exchanged(rows_TH, gate, logits_TE, dispatcher, exchange)
        output: Tensor = y_TH.reshape(x.shape)
        return output

    def extra_repr(self) -> str:
        sharding = self.sharding
        own = _shown(sharding.own_experts)
        way = ", deduplicate=True" if sharding.deduplicate else ""
        if sharding.transport != "exact":
            way = f", transport={sharding.transport!r}, room={sharding.max_recv_rows}"
        return f"{super().extra_repr()}, ranks={sharding.ranks}, own experts: {own}{way}"

    def _weight_of_input_dtype(self) -> Tensor:
        return self.router.weight  # between calls FSDP may keep experts in a wider dtype

    def _compared_options(self) -> tuple[Any, ...]:
        router, losses = self.router, self.losses
        of_router: tuple[Any, ...] = "router", type(router).__name__  # routers of other classes have their own options
        of_losses: tuple[Any, ...] = "losses", type(losses).__name__
        if isinstance(router, Router):
            of_router = (
                *("score", router.score, "renormalize", router.renormalize, "scale", float(router.scale)),
                *("num_groups", router.num_groups, "topk_groups", router.topk_groups),
                *("bias_update_rate", float(router.bias_update_rate)),
            )
        if isinstance(losses, AuxiliaryLosses):
            of_losses = "aux_loss_coef", float(losses.aux_loss_coef), "z_loss_coef", float(losses.z_loss_coef)
        return *of_router, "activation", self.experts.activation, *of_losses

    def _dispatcher(self, gate: Gate) -> TokenDispatcher:
        sharding = self.sharding
        options = sharding, gate, self.capacity_factor, operators(self.backend)
        if sharding.transport == "padded":
            return PaddedDispatcher(*options, self.notes)
        return DeduplicatingDispatcher(*options) if sharding.deduplicate else TokenDispatcher(*options)

    def _exchanged(
        self, rows_TH: Tensor, gate: Gate, logits_TE: Tensor, dispatcher: TokenDispatcher, exchange: CountExchange
    ) -> Tensor:
        """Return the layer's output (T, H) for rows whose counts are being exchanged."""
        rows_SH = dispatcher.pack(rows_TH, exchange)
        weights_TK, losses = self._with_losses(gate, logits_TE, dispatcher)

        handles = dispatcher.start(rows_SH, weights_TK)
        del rows_SH  # the exchange keeps it alive as long as it is needed
        shared: list[Tensor] = []

        def compute_shared() -> None:
            if self.shared is not None:
                shared.append(self.shared(rows_TH))

        # Weights of clones are sent when the experts are called, after FSDP has gathered them; without clones, shared
        # experts need not wait for that.
        meanwhile = compute_shared if self.sharding.clones else None
        if meanwhile is None:
            compute_shared()
        y_SH = wait_combine(self.experts(handles, dispatcher, meanwhile), dispatcher.combine)
        y_TH = dispatcher.unpack(y_SH, weights_TK)
        for shared_TH in shared:
            y_TH = y_TH + shared_TH

        self._loads, self.last_rows = dispatcher.loads, dispatcher.rows_of_ranks()
        self.last.keep(
            load=gate.load, dropped=dispatcher.dropped(), load_balancing_loss=losses.load_balancing, z_loss=losses.z
        )
        return y_TH

    def _with_losses(self, gate: Gate, logits_TE: Tensor, dispatcher: TokenDispatcher) -> tuple[Tensor, RouterLosses]:
        if self.sharding.scope == "rank":
            return self.losses(gate, logits_TE)  # type: ignore[no-any-return]
        # Each rank injects a loss whose mean over ranks is the loss of all tokens, even if ranks have different numbers
        # of tokens.
        load, share = dispatcher.group_load_and_share()
        return self.losses(gate, logits_TE, load=load, share=share)  # type: ignore[no-any-return]


def update_sharding(model: nn.Module, experts: set[ShardedExperts], **changes: Any) -> None:
    """Change fields of the sharding of experts, and of the layers of a model that have them."""
    changed: list[ShardedExperts | ShardedMoE] = list(experts)
    changed += [layer for layer in model.modules() if isinstance(layer, ShardedMoE) and layer.experts in experts]
    for one in changed:
        one.sharding = replace(one.sharding, **changes)


def _check_parameters(sharding: ExpertSharding, experts: ShardedExperts, shared: Any, rows_TH: Tensor) -> None:
    """Before counts are sent, check shapes, devices and dtypes of parameters, without reading their values.

    After that, other ranks send their rows and wait for answers: an operator that refused parameters then would leave
    them waiting, and a rank without experts would not notice a mistake that all ranks have made.

    Args:
        sharding: the layer's sharding.
        experts: the experts of this rank.
        shared: experts that every rank has, or None.
        rows_TH: (T, H), the tokens as they will travel.

    Raises:
        ValueError: a parameter does not have the layer's shape on this rank, or is on another device; or experts that
            several layers share were moved for only one of the layers.
        TypeError: a parameter has another dtype than the rows, and autocast does not cast it.
    """
    if sharding.order is not experts.sharding.order and sharding.order != experts.sharding.order:
        raise ValueError(
            f"MoE {sharding.title}: layers that share experts must have one placement, got experts that have moved "
            f"with another layer; call redistribute for a model that holds both"
        )
    with torch.no_grad():
        _check_module("experts", experts, rows_TH, (len(sharding.own_experts),))
        if shared is not None:
            _check_module("shared", shared, rows_TH, ())


def _check_module(kind: str, module: Any, rows_TH: Tensor, stack: tuple[int, ...]) -> None:
    if isinstance(module, FSDPModule):
        # outside of calls, FSDP keeps parameters in a wider dtype and smaller parts, so there is nothing to compare
        return
    for name, size in module.sizes().items():
        parameter = getattr(module, name)
        if parameter is not None:
            check_parameter(f"{kind}.{name}", local_tensor(parameter), (*stack, *size), rows_TH, " on this rank")


def _shown(experts: Sequence[int]) -> str:
    """Return ascending numbers as text: "0 to 3", or "0, 5 and 6"."""
    if not experts:
        return "none"
    if len(experts) == 1 or experts[-1] - experts[0] == len(experts) - 1:
        return f"{experts[0]} to {experts[-1]}"
    return f"{', '.join(map(str, experts[:-1]))} and {experts[-1]}"


def _check_mode(x: Any) -> None:
    if in_torch_func() or forward_ad._current_level >= 0:
        raise RuntimeError("MoE: experts on several ranks have no derivatives inside torch.func or in forward mode")
