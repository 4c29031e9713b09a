"""ShardedMoE: the mixture-of-experts layer whose experts are spread over the ranks of a group.

The order of a call: gate; loads announced to all ranks; rows gathered into the send buffer; one read of what all ranks
have announced; rows sent; shared experts; chunk by chunk: wait, compute, send back; the weighted sum. With
``transport="padded"`` nothing is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from pymoe.ep.agreement import Announcement, call_of, tell_failure, while_others_wait
from pymoe.ep.arrangement import Arrangement
from pymoe.ep.duplicates import ShipmentOfTokens
from pymoe.ep.exchange import collect
from pymoe.ep.experts import ShardedExperts
from pymoe.ep.padded import PaddedShipment
from pymoe.ep.parameters import check_parameters
from pymoe.ep.shipment import Shipment
from pymoe.nn.losses import AuxiliaryLosses
from pymoe.nn.moe import MoE
from pymoe.nn.options import operators
from pymoe.nn.record import Record
from pymoe.nn.router import Router
from pymoe.nn.rows import as_rows
from pymoe.ops.transforms import in_torch_func
from pymoe.reference.autocast import cast_operands
from pymoe.reference.types import Gate, RouterLosses


class ShardedMoE(MoE):
    """A :class:`pymoe.nn.MoE` whose experts are spread over ranks; :func:`pymoe.ep.shard` makes it of one.

    Its calls are collective: every rank of the group calls the layer equally often, each with its own tokens, of which
    there may be none, and runs the backward pass of all calls that have one, in the same order: backward passes are not
    compared, and gradients are wrong where ranks run those of several calls in different orders. Attributes, options
    and ``state_dict`` keys are those of :class:`pymoe.nn.MoE`. ``stats`` are of this rank's tokens.

    A rank that raises before its rows are announced (router, shapes, dtypes) tells the others, which read that unless
    rows travel in padded buffers. After that, and in a backward pass, nothing can: they wait for rows that do not come,
    until that process ends or the group's timeout is over, and raise :class:`GroupError` then; the group cannot be used
    any more. So let a process end that has raised.

    It works under ``torch.utils.checkpoint``, autocast and ``torch.compile`` (which leaves a gap in the graph for it),
    and can be differentiated any number of times; not inside the transforms of :mod:`torch.func`, nor in forward mode.
    """

    experts: ShardedExperts
    arrangement: Arrangement
    """Which rank has which experts."""
    last_rows: list[int] | None = None
    """(R,): how many rows each rank computed in the last call, clones among them; None before the first, and with
    ``transport="padded"``."""
    notes: Record
    """What is noted on the device, with ``transport="padded"``."""
    _loads: list[list[int]] | Tensor | None = None

    @property
    def last_loads(self) -> list[list[int]] | None:
        """(R, E): for how many slots of each rank each expert was chosen in the last call; None before the first.

        With ``transport="padded"`` this waits for the device.
        """
        return self._loads.tolist() if isinstance(self._loads, Tensor) else self._loads

    @property
    def overflowed(self) -> Tensor | None:
        """Scalar int64 on the device: how many rows have not fitted, in all calls so far; None with "exact".

        ``overflowed.zero_()`` begins anew. Calls that are recomputed count again.
        """
        return self.notes["overflowed"] if self.arrangement.transport == "padded" else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Send every token of this rank through its experts, wherever they are.

        Args:
            x: (..., H), any number of dimensions from one on, the dtype of the parameters (any but float64
                inside ``torch.autocast``). There may be no tokens; other ranks may have more or fewer.

        Returns:
            The shape and dtype of ``x`` (the autocast dtype inside ``torch.autocast``).

        Raises:
            TypeError: as :class:`pymoe.nn.MoE`; the other ranks raise :class:`GroupError`.
            ValueError: the same.
            RuntimeError: inside a transform of :mod:`torch.func`, or in forward mode.
            GroupError: the ranks do not make the same call, one of them has failed or died, or a rank would receive
                more rows than its room.
        """
        arrangement = self.arrangement
        try:
            _check_mode(x)
            self._check_input(x)
            x_TH = as_rows(x, self.hidden_size)
            gate, logits_TE = self.router(x_TH)
            rows_TH: Tensor
            (rows_TH,) = cast_operands(x_TH)  # type: ignore[assignment]
            check_parameters(arrangement, self.experts, self.shared, rows_TH)
            experts = self.experts.named_parameters()
            options = gate.experts.shape[1], self.capacity_factor, self._compared_options()
            call = call_of(arrangement, rows_TH, gate.weights, experts, *options)
            shipment = self._shipment(gate)
        except Exception as error:
            tell_failure(arrangement, error)
            raise
        announcement = Announcement(arrangement, call, shipment.announced, x_TH.shape[0])
        with while_others_wait(arrangement):
            y_TH = self._exchanged(rows_TH, gate, logits_TE, shipment, announcement)
        output: Tensor = y_TH.reshape(x.shape)
        return output

    def extra_repr(self) -> str:
        arrangement = self.arrangement
        own = _shown(arrangement.own)
        way = ", deduplicate=True" if arrangement.deduplicate else ""
        if arrangement.transport != "exact":
            way = f", transport={arrangement.transport!r}, room={arrangement.room}"
        return f"{super().extra_repr()}, ranks={arrangement.ranks}, own experts: {own}{way}"

    def _weight_of_input_dtype(self) -> Tensor:
        return self.router.weight  # the experts may be cut once more, in a wider dtype, until they are called

    def _compared_options(self) -> tuple[Any, ...]:
        router, losses = self.router, self.losses
        of_router: tuple[Any, ...] = "router", type(router).__name__  # others have options of their own
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

    def _shipment(self, gate: Gate) -> Shipment:
        arrangement = self.arrangement
        options = arrangement, gate, gate.experts.shape[1], self.capacity_factor, operators(self.backend)
        if arrangement.transport == "padded":
            return PaddedShipment(*options, self.notes)
        return ShipmentOfTokens(*options) if arrangement.deduplicate else Shipment(*options)

    def _exchanged(
        self, rows_TH: Tensor, gate: Gate, logits_TE: Tensor, shipment: Shipment, announcement: Announcement
    ) -> Tensor:
        """Return the layer's output (T, H) of rows that have been announced."""
        shipment.pack(rows_TH, announcement)
        weights_TK, losses = self._with_losses(gate, logits_TE, shipment)

        tokens = shipment.depart(weights_TK)
        shared: list[Tensor] = []

        def compute_shared() -> None:
            if self.shared is not None:
                shared.append(self.shared(rows_TH))

        # Weights of clones leave when the experts are called, where FSDP has gathered them; without clones shared
        # experts do not wait for that.
        meanwhile = compute_shared if self.arrangement.clones else None
        if meanwhile is None:
            compute_shared()
        y_SH = collect(self.experts(tokens, shipment.crossing, shipment.home, meanwhile), shipment.home)
        y_TH = shipment.unpack(y_SH, weights_TK)
        for shared_TH in shared:
            y_TH = y_TH + shared_TH

        self._loads, self.last_rows = shipment.loads, shipment.rows_of_ranks()
        self.last.keep(
            load=gate.load, dropped=shipment.dropped(), load_balancing_loss=losses.load_balancing, z_loss=losses.z
        )
        return y_TH

    def _with_losses(self, gate: Gate, logits_TE: Tensor, shipment: Shipment) -> tuple[Tensor, RouterLosses]:
        if self.arrangement.scope == "rank":
            return self.losses(gate, logits_TE)  # type: ignore[no-any-return]
        # The mean over ranks of what each injects is the loss of all tokens, also where ranks have more or fewer of
        # them.
        load, share = shipment.of_group()
        return self.losses(gate, logits_TE, load=load, share=share)  # type: ignore[no-any-return]


def rearrange(model: nn.Module, experts: set[ShardedExperts], **changes: Any) -> None:
    """Give experts, and the layers of a model that have them, an arrangement with other fields."""
    spread: list[ShardedExperts | ShardedMoE] = list(experts)
    spread += [layer for layer in model.modules() if isinstance(layer, ShardedMoE) and layer.experts in experts]
    for one in spread:
        one.arrangement = replace(one.arrangement, **changes)


def _shown(experts: Sequence[int]) -> str:
    """Return ascending numbers as a user reads them: 0 to 3, or 0, 5 and 6."""
    if not experts:
        return "none"
    if len(experts) == 1 or experts[-1] - experts[0] == len(experts) - 1:
        return f"{experts[0]} to {experts[-1]}"
    return f"{', '.join(map(str, experts[:-1]))} and {experts[-1]}"


def _check_mode(x: Any) -> None:
    if in_torch_func() or forward_ad._current_level >= 0:
        raise RuntimeError("MoE: experts on several ranks have no derivatives inside torch.func or in forward mode")
