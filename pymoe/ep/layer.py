"""Layers whose experts are spread over the ranks of a group, and their calls.

A call does the following in this order: choose experts; start the count exchange; gather rows into the send buffer;
read the counts of all ranks, once; start the dispatch; do work that needs no rows; chunk by chunk, wait, compute and
start the combine; compute the weighted sum. With clones, or a capacity that the group shares, the counts are read
before rows are gathered. With ``transport="padded"`` the host reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pymoe._common.types import Gate, RouterLosses, Routing, accumulate_dtype, cast_operands
from pymoe.ep.dispatcher import DeduplicatingDispatcher, PaddedDispatcher, TokenDispatcher
from pymoe.ep.exchange import CountExchange, call_signature, report_failure, wait_combine
from pymoe.ep.experts import ExpertShards, ShardedExperts, local_tensor
from pymoe.ep.failures import while_others_wait
from pymoe.ep.sharding import ExpertSharding
from pymoe.nn.experts import Experts, SharedExperts
from pymoe.nn.local_tensors import LocalTensors
from pymoe.nn.losses import AuxiliaryLosses
from pymoe.nn.moe import MoE, with_shared
from pymoe.nn.options import as_rows, check_choice, check_parameter, networks_fit, raw_operators
from pymoe.nn.router import Router
from pymoe.ops.function_calls import is_transformed

RunExperts = Callable[[tuple[Tensor, ...], TokenDispatcher, Callable[[], None] | None], tuple[Tensor, ...]]
"""Takes the arguments of :meth:`pymoe.ep.ShardedExperts.forward` and returns its results."""


class ShardedLayer(nn.Module):
    """A layer whose experts :func:`pymoe.ep.shard` has spread over ranks, with statistics that users may read.

    Calls are collective: every rank of the group must call the layer the same number of times, each with its own tokens
    (possibly none), and must run the backward passes of these calls in the same order as the other ranks. The order of
    backward passes is not checked: if it differs between ranks, gradients are wrong.

    If a rank raises before its counts are sent (because of the router, a shape or a dtype), it tells the others, and
    they raise in the same call. If it raises later, or if rows travel in padded buffers, the others wait for its rows.
    Over gloo they check every second, while they wait, whether a rank has raised in this layer's forward or backward
    pass, and raise :class:`GroupError` if so; they raise it within seconds if the rank's process has ended. In all
    other cases they raise when the group's timeout has passed. After that the group is unusable, so a process that has
    raised should end.

    The layer works under ``torch.utils.checkpoint``, autocast and ``torch.compile`` (with a graph break), and can be
    differentiated any number of times (with quantised experts, once), but not inside the transforms of
    :mod:`torch.func`, nor in forward mode.
    """

    experts: ExpertShards
    sharding: ExpertSharding
    """The ranks of the experts, such as ``owner`` and ``own_experts``, and the options of :func:`pymoe.ep.shard`."""
    last_rows: list[int] | None = None
    """(R,): the number of rows, one per choice, that each rank computed in the last call, including rows of clones;
    None before the first call, and with ``transport="padded"``."""
    notes: LocalTensors
    """Records of differences between ranks, kept on the device; see :func:`~pymoe.ep.dispatcher.device_notes`. Only
    ``transport="padded"`` uses them."""
    _loads: list[list[int]] | Tensor | None = None

    @property
    def last_loads(self) -> list[list[int]] | None:
        """Return (R, E): how often the tokens of each rank chose each expert in the last call; None before any call.

        With ``transport="padded"`` this waits for the device.
        """
        return self._loads.tolist() if isinstance(self._loads, Tensor) else self._loads

    @property
    def overflowed(self) -> Tensor | None:
        """Return the number of choices that did not fit in the padded buffers of all calls so far.

        It is a scalar int64 tensor on the layer's device; None with ``transport="exact"``. ``overflowed.zero_()``
        restarts the count. Calls recomputed by checkpointing are counted again.
        """
        return self.notes["overflowed"] if self.sharding.transport == "padded" else None

    def extra_repr(self) -> str:
        sharding = self.sharding
        text = [super().extra_repr(), f"ranks={sharding.ranks}, own experts: {_shown(sharding.own_experts)}"]
        if sharding.deduplicate:
            text.append("deduplicate=True")
        if sharding.transport != "exact":
            text.append(f"transport={sharding.transport!r}, room={sharding.max_recv_rows}")
        return ", ".join(filter(None, text))


class ExpertCall:
    """A call of a layer: a context in which the layer chooses experts, then calls :meth:`begin` and :meth:`finish`.

    On exit, an error that was raised in the context is reported to the other ranks. The count exchange reports an
    Exception that was raised before :meth:`begin` sent counts; a later error is reported to the ranks that wait for
    this rank's rows.

    Args:
        layer: the :class:`ShardedLayer` that is called.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._sharding: ExpertSharding = layer.sharding
        self._waited_for: ExitStack | None = None
        self._dispatcher: TokenDispatcher
        self._rows_SH: Tensor | None = None

    def __enter__(self) -> ExpertCall:
        return self

    def begin(
        self,
        rows_TH: Tensor,
        gate: Gate,
        capacity_factor: float | None,
        options: tuple[Any, ...],
        own_routing: Routing | None = None,
    ) -> TokenDispatcher:
        """Tell the other ranks how many rows will travel, compare the calls of all ranks, and pack the rows.

        Args:
            rows_TH: (T, H), the tokens as they will travel.
            gate: the experts chosen for these tokens.
            capacity_factor: the layer's capacity factor, or None.
            options: all other options on which rows and gradients depend, as alternating names and values.
            own_routing: the routing of the choices to all experts, if the layer has already computed it.

        Returns:
            The dispatcher of the rows, with the counts of all ranks.

        Raises:
            GroupError: as for :meth:`TokenDispatcher.pack`.
        """
        layer, sharding = self._layer, self._sharding
        experts, top_k = layer.experts.stacked(), gate.experts.shape[1]
        signature = call_signature(sharding, rows_TH, gate.weights, experts, top_k, capacity_factor, options)
        ops = raw_operators(layer.backend)
        if sharding.transport == "padded":
            self._dispatcher = PaddedDispatcher(sharding, gate, capacity_factor, ops, layer.notes, own_routing)
        else:
            kind = DeduplicatingDispatcher if sharding.deduplicate else TokenDispatcher
            self._dispatcher = kind(sharding, gate, capacity_factor, ops, own_routing)
        own_counts = self._dispatcher.own_counts
        self._waited_for = ExitStack()
        exchange = CountExchange(sharding, signature, own_counts, rows_TH.shape[0])
        self._waited_for.enter_context(while_others_wait(sharding))
        self._rows_SH = self._dispatcher.pack(rows_TH, exchange)
        return self._dispatcher

    def finish(self, experts: RunExperts, weights_TK: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """Send the rows through the experts; return (T, H), the weighted sum of the experts' outputs for each token.

        Store the loads and the numbers of rows in the layer.

        Args:
            experts: runs this rank's experts.
            weights_TK: (T, K), the weights of the choices.
            meanwhile: called while the first rows travel, to overlap with the exchange.
        """
        dispatcher = self._dispatcher
        assert self._rows_SH is not None
        handles = dispatcher.start(self._rows_SH, weights_TK)
        self._rows_SH = None  # the exchange keeps the tensor alive as long as necessary
        # With clones, `experts` calls `meanwhile` after it has started to send the clones' weights. Sending cannot
        # start earlier, because FSDP gathers the weights only when `experts` is called. Without
        # clones, call `meanwhile` here.
        if meanwhile is not None and not self._sharding.clones:
            meanwhile()
            meanwhile = None
        y_SH = wait_combine(dispatcher.combine, *experts(handles, dispatcher, meanwhile))
        y_TH = dispatcher.unpack(y_SH, weights_TK)
        self._layer._loads, self._layer.last_rows = dispatcher.loads, dispatcher.rows_of_ranks()
        return y_TH

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._waited_for is not None:
            return self._waited_for.__exit__(kind, error, trace)
        if isinstance(error, Exception):
            report_failure(self._sharding, error)
        return None


def update_sharding(model: nn.Module, experts: set[ExpertShards], **changes: Any) -> None:
    """Change fields of the ``sharding`` of the given experts, and of the layers in ``model`` that use these experts."""
    changed: dict[Any, None] = dict.fromkeys(experts)
    changed |= dict.fromkeys(
        layer for layer in model.modules() if isinstance(layer, ShardedLayer) and layer.experts in experts
    )
    for one in changed:
        one.sharding = replace(one.sharding, **changes)


def check_parameters(sharding: ExpertSharding, experts: Any, shared: Any, rows_TH: Tensor) -> None:
    """Check shapes, devices and dtypes of parameters before counts are sent, without reading values.

    Once the counts are sent, other ranks send rows and wait for results. If an operator rejected the parameters then,
    the other ranks would wait in vain, and a rank without experts would not detect a mistake that all ranks have made.
    Parameters that FSDP manages are not checked.

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
        # Outside of calls of the module, FSDP may keep parameters in a wider dtype and in smaller parts: check nothing.
        return
    if isinstance(module, Experts | SharedExperts) and not module.gate:
        own = {name: None if one is None else local_tensor(one) for name, one in module._parameters.items()}
        if networks_fit(module, own, stack, rows_TH):
            return
    for name, size in module.sizes().items():
        parameter = getattr(module, name)
        if parameter is not None:
            check_parameter(f"{kind}.{name}", local_tensor(parameter), (*stack, *size), rows_TH, " on this rank")


def check_mode() -> None:
    """Raise inside transforms of :mod:`torch.func` and in forward-mode autograd, which the exchanges do not support."""
    if is_transformed():
        raise RuntimeError("MoE: experts on several ranks have no derivatives inside torch.func or in forward mode")


def _shown(experts: Any) -> str:
    """Return ascending expert numbers as text: "5", "0 to 3", "0, 5 and 6", or "none"."""
    if not experts:
        return "none"
    if len(experts) == 1:
        return str(experts[0])
    if experts[-1] - experts[0] == len(experts) - 1:
        return f"{experts[0]} to {experts[-1]}"
    return f"{', '.join(map(str, experts[:-1]))} and {experts[-1]}"


class ShardedMoE(ShardedLayer, MoE):
    """A :class:`pymoe.nn.MoE` whose experts :func:`pymoe.ep.shard` has spread over the ranks of a group.

    Its calls are collective, as :class:`ShardedLayer` describes. Attributes, options and ``state_dict`` keys are those
    of :class:`pymoe.nn.MoE`. ``stats`` describe this rank's tokens only, except that with ``scope="group"`` the
    balancing loss is computed with the load of all ranks.
    """

    experts: ShardedExperts

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Send every token of this rank through its experts, whichever rank has them.

        Args:
            x: (..., H), any number of dimensions from one on, the dtype of the parameters (any except float64
                inside ``torch.autocast``). There may be no tokens; other ranks may have more or fewer.

        Returns:
            The shape and dtype of ``x`` (the autocast dtype inside ``torch.autocast``).

        Raises:
            TypeError: as for :class:`pymoe.nn.MoE`; the other ranks raise :class:`GroupError`.
            ValueError: as for :class:`pymoe.nn.MoE`; the other ranks raise :class:`GroupError`.
            RuntimeError: called inside a transform of :mod:`torch.func`, or in forward-mode autograd.
            GroupError: the ranks do not make the same call, one of them has failed or died, or a rank would receive
                more rows than ``room``.
        """
        with ExpertCall(self) as call:
            check_mode()
            self._check_input(x)
            x_TH = as_rows(x, self.hidden_size)
            gate, logits_TE = self.router(x_TH)
            rows_TH: Tensor
            (rows_TH,) = cast_operands(x_TH)  # type: ignore[assignment]
            self._check_choice(rows_TH, gate.experts, gate.weights)
            wide = accumulate_dtype(rows_TH.dtype)  # weights may travel, so every rank must send the same dtype
            gate = gate._replace(weights=gate.weights.to(wide))
            check_parameters(self.sharding, self.experts, self.shared, rows_TH)
            dispatcher = call.begin(rows_TH, gate, self.capacity_factor, self._compared_options())
            weights_TK, losses = self._with_losses(gate, logits_TE, dispatcher)
            if weights_TK is not gate.weights:  # a user's losses may return any weights
                check_choice(rows_TH, gate.experts, weights_TK)
                weights_TK = weights_TK.to(wide)
            shared_TH: Any = None

            def compute_shared() -> None:
                nonlocal shared_TH
                shared_TH = self.shared(rows_TH)  # type: ignore[misc]

            y_TH = call.finish(self.experts, weights_TK, compute_shared if self.shared is not None else None)
            if self.shared is not None:
                y_TH = with_shared(y_TH, shared_TH)
            self.last.keep(
                load=gate.load, dropped=dispatcher.dropped(), load_balancing_loss=losses.load_balancing, z_loss=losses.z
            )
        output: Tensor = y_TH.reshape(x.shape)
        return output

    def _weight_of_input_dtype(self) -> Tensor:
        return self.router.weight  # FSDP may keep the experts in a wider dtype between their calls

    def _compared_options(self) -> tuple[Any, ...]:
        router, losses = self.router, self.losses
        of_router: tuple[Any, ...] = "router", type(router).__name__  # options of other classes are unknown
        of_losses: tuple[Any, ...] = "losses", type(losses).__name__
        if isinstance(router, Router):
            rates = {"scale": float(router.scale), "bias_update_rate": float(router.bias_update_rate)}
            of_router = tuple(chain.from_iterable((router.choice_options() | rates).items()))
        if isinstance(losses, AuxiliaryLosses):
            of_losses = "aux_loss_coef", float(losses.aux_loss_coef), "z_loss_coef", float(losses.z_loss_coef)
        return *of_router, "activation", self.experts.activation, *of_losses

    def _with_losses(self, gate: Gate, logits_TE: Tensor, dispatcher: TokenDispatcher) -> tuple[Tensor, RouterLosses]:
        if self.sharding.scope == "rank":
            return self.losses(gate, logits_TE)  # type: ignore[no-any-return]
        # Scale each rank's loss so that the mean over ranks is the loss of all tokens, even if ranks have different
        # numbers of tokens.
        load, share = dispatcher.group_load_and_share()
        return self.losses(gate, logits_TE, load=load, share=share)  # type: ignore[no-any-return]
