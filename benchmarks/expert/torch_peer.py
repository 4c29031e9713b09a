"""Implements the same layer in plain torch: sort, all_to_all_single and index_add, as in torchtitan's dispatcher."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.nn import functional as F

from pymoe import ops
from pymoe.nn import MoE


class TorchExpertParallel(nn.Module):
    """A swiglu layer whose experts are sharded over the ranks of a group.

    ``products="torch"`` multiplies expert by expert with ``F.linear``; ``"pymoe"`` uses pymoe's grouped products and
    activation, so that the layer differs from pymoe's only in how rows are moved.
    """

    def __init__(self, moe: MoE, group: dist.ProcessGroup, products: str) -> None:
        super().__init__()
        self.router, self.products, self.group = moe.router, products, group
        self.top_k, self.ranks = moe.top_k, dist.get_world_size(group)
        own = slice(*(dist.get_rank(group) + step for step in (0, 1)))
        self.w_in = nn.Parameter(moe.experts.w_in.detach().chunk(self.ranks)[own.start].clone())
        self.w_out = nn.Parameter(moe.experts.w_out.detach().chunk(self.ranks)[own.start].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map (T, H) to (T, H)."""
        gate, _ = self.router(x)
        order = torch.argsort(gate.experts.flatten(), stable=True)
        token = order // self.top_k
        sent_counts = gate.load.long()
        with torch.no_grad():
            counts = collectives.all_to_all_single(sent_counts, None, None, self.group)
            sent = sent_counts.view(self.ranks, -1).sum(1).tolist()
            received = counts.view(self.ranks, -1).sum(1).tolist()
        rows = collectives.all_to_all_single_autograd(x[token], received, sent, self.group)
        place = self._by_expert(counts.view(self.ranks, -1))
        out = self._experts(rows[place], counts.view(self.ranks, -1).sum(0))
        back = torch.empty_like(out).index_copy(0, place, out)
        home = collectives.all_to_all_single_autograd(back, sent, received, self.group)
        weights = gate.weights.flatten()[order]
        return torch.zeros_like(x).index_add(0, token, (home * weights[:, None]).to(x.dtype))

    @staticmethod
    def _by_expert(counts: Tensor) -> Tensor:
        """Return the order that groups by expert the rows, which arrive grouped by rank."""
        experts = torch.arange(counts.shape[1]).repeat(counts.shape[0]).repeat_interleave(counts.flatten())
        return torch.argsort(experts, stable=True)

    def _experts(self, rows: Tensor, load: Tensor) -> Tensor:
        if self.products == "pymoe":
            offsets = F.pad(load.cumsum(0), (1, 0)).int()
            inner = ops.expert_activation(ops.grouped_linear(rows, self.w_in, offsets), "swiglu")
            return ops.grouped_linear(inner, self.w_out, offsets)
        outs = []
        for expert, own in enumerate(rows.split(load.tolist())):
            gate, up = F.linear(own, self.w_in[expert]).chunk(2, dim=1)
            outs.append(F.linear(F.silu(gate) * up, self.w_out[expert]))
        return torch.cat(outs)
