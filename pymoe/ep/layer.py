"""ShardedMoE: the mixture-of-experts layer whose experts are spread over the ranks of a group.

The order of a call: gate; loads announced to all ranks; rows gathered into the send buffer; one read of what all ranks
have announced; rows sent; shared experts; chunk by chunk: wait, compute, send back; the weighted sum.
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
from pymoe.ep.cloned_plan import ClonedPlan
from pymoe.ep.exchange import Crossing, collect, depart
from pymoe.ep.experts import ShardedExperts
from pymoe.ep.parameters import check_parameters
from pymoe.ep.plan import Plan
from pymoe.nn.moe import MoE
from pymoe.nn.options import operators
from pymoe.ops.transforms import in_torch_func
from pymoe.reference.autocast import cast_operands
from pymoe.reference.types import Gate, RouterLosses, Routing


class ShardedMoE(MoE):
    """A :class:`pymoe.nn.MoE` whose experts are spread over ranks; :func:`pymoe.ep.shard` makes it of one.

    Its calls are collective: every rank of the group calls the layer equally often, each with its own tokens, of which
    there may be none, and runs the backward pass of all calls that have one, in the same order: backward passes are not
    compared, and gradients are wrong where ranks run those of several calls in different orders. Attributes, options
    and ``state_dict`` keys are those of :class:`pymoe.nn.MoE`. ``stats`` are of this rank's tokens.

    A rank that raises before its rows are announced (router, shapes, dtypes) tells the others. After that, and in
    a backward pass, nothing can: they wait for rows that do not come, until that process ends or the group's timeout is
    over, and raise :class:`GroupError` then; the group cannot be used any more. So let a process end that has raised.

    It works under ``torch.utils.checkpoint``, autocast and ``torch.compile`` (which leaves a gap in the graph for it),
    and can be differentiated any number of times; not inside the transforms of :mod:`torch.func`, nor in forward mode.
    """

    experts: ShardedExperts
    arrangement: Arrangement
    """Which rank has which experts."""
    last_loads: list[list[int]] | None = None
    """(R, E): for how many slots of each rank each expert was chosen in the last call; None before the first."""
    last_rows: list[int] | None = None
    """(R,): how many rows each rank computed in the last call, clones among them; None before the first."""

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
            x_TH = x.reshape(-1, self.hidden_size)
            gate, logits_TE = self.router(x_TH)
            rows_TH: Tensor
            (rows_TH,) = cast_operands(x_TH)  # type: ignore[assignment]
            check_parameters(arrangement, self.experts, self.shared, rows_TH)
            experts: list[Tensor] = list(self.experts.parameters())
            call = call_of(arrangement, rows_TH, experts, self.top_k, self.capacity_factor)
        except Exception as error:
            tell_failure(arrangement, error)
            raise
        announcement = Announcement(arrangement, call, gate.load, x_TH.shape[0])
        with while_others_wait(arrangement):
            y_TH = self._exchanged(rows_TH, gate, logits_TE, announcement)
        output: Tensor = y_TH.reshape(x.shape)
        return output

    def extra_repr(self) -> str:
        arrangement = self.arrangement
        own = _shown(arrangement.own)
        return f"{super().extra_repr()}, ranks={arrangement.ranks}, own experts: {own}"

    def _weight_of_input_dtype(self) -> Tensor:
        return self.router.weight  # the experts may be cut once more, in a wider dtype, until they are called

    def _exchanged(self, rows_TH: Tensor, gate: Gate, logits_TE: Tensor, announcement: Announcement) -> Tensor:
        """Return the layer's output (T, H) of rows that have been announced."""
        routing, rows_SH, plan = self._send_buffer(rows_TH, gate, announcement)
        weights_TK, losses = self._with_losses(gate, logits_TE, plan)

        crossing, home = (Crossing(plan, rows_SH.shape[0], rows_SH) for _ in range(2))
        tokens = depart(rows_SH, crossing)
        shared_TH = None if self.shared is None else self.shared(rows_TH)
        y_SH = collect(self.experts(tokens, crossing, home), home)
        y_TH = operators(self.backend).combine(y_SH, routing, weights_TK)
        if shared_TH is not None:
            y_TH = y_TH + shared_TH

        self.last_loads, self.last_rows = plan.loads, plan.rows_of_ranks()
        dropped = torch.full((), plan.dropped, dtype=torch.int32, device=gate.load.device)
        self.last.keep(load=gate.load, dropped=dropped, load_balancing_loss=losses.load_balancing, z_loss=losses.z)
        return y_TH

    def _send_buffer(self, rows_TH: Tensor, gate: Gate, announcement: Announcement) -> tuple[Routing, Tensor, Plan]:
        """Gather rows into the order in which they are sent, and read meanwhile what all ranks have announced."""
        ops = operators(self.backend)
        arrangement = self.arrangement
        positions = arrangement.positions
        experts_TK = gate.experts if positions is None else positions.to(gate.experts.device)[gate.experts.long()]
        of_group = self.capacity_factor is not None and arrangement.scope == "group"
        capacity = None if of_group else self._capacity(rows_TH.shape[0])
        routing = ops.build_routing(experts_TK, self.num_experts, capacity=capacity)
        if not of_group and not arrangement.clones:  # where rows go does not depend on what the others announce
            rows_SH = ops.dispatch(rows_TH, routing)
            return routing, rows_SH, Plan(arrangement, announcement.read(), self.top_k, self.capacity_factor)
        kind = ClonedPlan if arrangement.clones else Plan
        plan = kind(arrangement, announcement.read(), self.top_k, self.capacity_factor)
        if of_group:
            routing = plan.without_dropped(routing, experts_TK)
        if isinstance(plan, ClonedPlan):
            routing = plan.in_order_of_travel(routing)
        return routing, ops.dispatch(rows_TH, routing), plan

    def _with_losses(self, gate: Gate, logits_TE: Tensor, plan: Plan) -> tuple[Tensor, RouterLosses]:
        if self.arrangement.scope == "rank":
            return self.losses(gate, logits_TE)  # type: ignore[no-any-return]
        # The mean over ranks of what each injects is the loss of all tokens, also where ranks have more or fewer of
        # them.
        everyone = sum(plan.tokens)
        share = self.arrangement.ranks * logits_TE.shape[0] / everyone if everyone else 1.0
        load = torch.tensor(plan.group_load(), dtype=torch.int64).to(gate.load.device)
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
