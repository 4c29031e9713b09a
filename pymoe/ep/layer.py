"""ShardedMoE: a mixture-of-experts layer whose experts are spread over the ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe._common.dtypes import accumulate_dtype, cast_operands
from pymoe._common.types import Gate, RouterLosses
from pymoe.ep.call import ExpertCall, ShardedLayer, check_mode, check_parameters
from pymoe.ep.dispatcher import TokenDispatcher
from pymoe.ep.experts import ShardedExperts
from pymoe.nn.apply_experts import check_choice
from pymoe.nn.losses import AuxiliaryLosses
from pymoe.nn.moe import MoE, with_shared
from pymoe.nn.operands import as_rows
from pymoe.nn.router import Router


class ShardedMoE(ShardedLayer, MoE):
    """A :class:`pymoe.nn.MoE` whose experts are spread over ranks; :func:`pymoe.ep.shard` makes it from one.

    Its calls are collective, as :class:`ShardedLayer` describes. Attributes, options and ``state_dict`` keys are those
    of :class:`pymoe.nn.MoE`. ``stats`` describe this rank's tokens only.
    """

    experts: ShardedExperts

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
        with ExpertCall(self) as call:
            check_mode()
            self._check_input(x)
            x_TH = as_rows(x, self.hidden_size)
            gate, logits_TE = self.router(x_TH)
            rows_TH: Tensor
            (rows_TH,) = cast_operands(x_TH)  # type: ignore[assignment]
            self._check_choice(rows_TH, gate.experts, gate.weights)
            wide = accumulate_dtype(rows_TH.dtype)  # weights may travel, in the same dtype from every rank
            gate = gate._replace(weights=gate.weights.to(wide))
            check_parameters(self.sharding, self.experts, self.shared, rows_TH)
            dispatcher = call.begin(rows_TH, gate, self.capacity_factor, self._compared_options())
            weights_TK, losses = self._with_losses(gate, logits_TE, dispatcher)
            if weights_TK is not gate.weights:  # other losses may have changed them
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

    def _with_losses(self, gate: Gate, logits_TE: Tensor, dispatcher: TokenDispatcher) -> tuple[Tensor, RouterLosses]:
        if self.sharding.scope == "rank":
            return self.losses(gate, logits_TE)  # type: ignore[no-any-return]
        # Each rank injects a loss whose mean over ranks is the loss of all tokens, even if ranks have different numbers
        # of tokens.
        load, share = dispatcher.group_load_and_share()
        return self.losses(gate, logits_TE, load=load, share=share)  # type: ignore[no-any-return]
