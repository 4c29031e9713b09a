"""The update rule of the expert bias, which balances experts without an auxiliary loss."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pymoe.nn.options import check_model, warn_once
from pymoe.nn.router import Router


@torch.no_grad()
def update_expert_biases(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Move the expert bias of every router in ``model`` by the load since its last update. Call it after
    ``optimizer.step()``.

    ``expert_bias += bias_update_rate * sign(mean load - load)`` (arXiv 2408.15664, algorithm 1; DeepSeek-V3,
    arXiv 2412.19437). The load is the number of slots for which each expert was chosen in all backward passes since
    the last update, over all micro-batches of an optimizer step. A router that saw no tokens stays unchanged.

    A layer does not call this by itself, since it cannot know when an optimizer step is complete. If
    ``torch.distributed`` is initialised, the loads of all layers are first summed over ``group`` in one all-reduce, so
    that the ranks' biases stay equal; every rank of the group must then call this for the same routers.

    Args:
        model: any module that holds :class:`pymoe.nn.Router` or :class:`pymoe.nn.MoE` layers. Layers without an
            ``expert_bias`` are skipped; if no layer has one, a ``UserWarning`` is given once.
        group: the ranks of data parallelism, which share the model's tokens; ``None`` means all ranks.
    """
    check_model("update_expert_biases", model)
    all_routers = [module for module in model.modules() if isinstance(module, Router)]
    routers = [router for router in all_routers if router.expert_bias is not None]
    if not routers:
        seen = "whose bias_update_rate is 0" if all_routers else "no pymoe.nn.MoE or Router layer"
        has = f"holds {len(all_routers)} router(s) " if all_routers else "holds "
        warn_once(
            "nothing to update",
            f"update_expert_biases: the {type(model).__name__} that it was called with {has}{seen}, so the call has "
            "no effect; build the layers with MoE(..., bias_update_rate=0.001), or drop the call",
            stacklevel=3,  # one more level for torch.no_grad's wrapper
        )
        return
    loads = [router.counted["load"] for router in routers]
    if dist.is_available() and dist.is_initialized():
        loads = _summed_over_ranks(loads, group)
    for router, load_E in zip(routers, loads, strict=True):
        assert router.expert_bias is not None
        # This is sign(mean - load) without rounding the mean.
        direction_E = torch.sign(load_E.sum() - router.num_experts * load_E)
        router.expert_bias.add_(direction_E.to(router.expert_bias.dtype), alpha=router.bias_update_rate)
        router.counted.zero_()
        router.bias_was_updated = True


def _summed_over_ranks(loads: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the loads, which may lie on several devices, summed over ``group`` in one all-reduce."""
    flat = torch.cat([load.to(loads[0].device) for load in loads])
    dist.all_reduce(flat, group=group)
    parts = flat.split([load.numel() for load in loads])
    return [part.to(load.device) for part, load in zip(parts, loads, strict=True)]
