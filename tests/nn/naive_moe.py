"""A mixture-of-experts layer written a second time, one token at a time, from the papers and not from pymoe's code.

It reads a layer's parameters and options and shares none of its operators. It is differentiable, and slow.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass
class Naive:
    output: torch.Tensor
    auxiliary: torch.Tensor
    """aux_loss_coef * balancing loss + z_loss_coef * z loss, to be added to the objective."""
    balancing: torch.Tensor
    z: torch.Tensor
    load: list[int]
    dropped: int


def naive_moe(layer, x):
    """Return what ``layer(x)`` must return, with the auxiliary loss spelled out."""
    router = layer.router
    tokens = x.reshape(-1, x.shape[-1])
    bias = 0 if router.bias is None else router.bias
    logits = [router.weight @ token + bias for token in tokens]
    chosen = [choose(router, row) for row in logits]

    load = [0] * router.num_experts
    dropped = 0
    capacity = math.inf
    if layer.capacity_factor is not None:
        capacity = max(1, math.ceil(layer.capacity_factor * (len(tokens) * router.top_k) / router.num_experts))
    outputs = []
    for token, choice in zip(tokens, chosen, strict=True):
        total = torch.zeros_like(token)
        for expert, weight in choice:
            if load[expert] < capacity:
                if layer.score_before_experts:
                    total = total + ffn(layer.experts, weight * token, expert)
                else:
                    total = total + weight * ffn(layer.experts, token, expert)
            else:
                dropped += 1
            load[expert] += 1
        if layer.shared is not None:
            of_all = ffn(layer.shared, token, ...)
            if layer.shared.gate:
                of_all = of_all / (1 + (-layer.shared.w_gate[0] @ token).exp())
            total = total + of_all
        outputs.append(total)
    output = torch.stack(outputs).reshape(x.shape)

    balancing = sum(
        router.num_experts * load[e] / sum(load) * sum(probabilities(router, row)[e] for row in logits) / len(logits)
        for e in range(router.num_experts)
    )
    z = sum(row.exp().sum().log() ** 2 for row in logits) / len(logits)
    auxiliary = layer.losses.aux_loss_coef * balancing + layer.losses.z_loss_coef * z
    return Naive(output, auxiliary, balancing, z, load, dropped)


def scores(router, logits):
    return logits.softmax(0) if router.score == "softmax" else 1 / (1 + (-logits).exp())


def probabilities(router, logits):
    row = scores(router, logits)
    return row / row.sum()


def choose(router, logits):
    """Return the (expert, weight) pairs of one token, best first."""
    score = scores(router, logits)
    wanted = score.detach().clone()
    if router.expert_bias is not None:
        wanted = wanted + router.expert_bias
    candidates = list(range(router.num_experts))
    if router.num_groups is not None:
        size = router.num_experts // router.num_groups
        groups = [candidates[i * size : (i + 1) * size] for i in range(router.num_groups)]
        groups.sort(key=lambda group: -sum(sorted((float(wanted[e]) for e in group), reverse=True)[:2]))
        candidates = sorted(e for group in groups[: router.topk_groups] for e in group)
    experts = sorted(candidates, key=lambda e: -float(wanted[e]))[: router.top_k]
    weights = [score[e] for e in experts]
    if router.renormalize:
        total = sum(weights)
        weights = [weight / total for weight in weights]
    return [(e, weight * router.scale) for e, weight in zip(experts, weights, strict=True)]


def ffn(experts, token, expert):
    """Run one feed-forward network on one token; ``expert`` is an index, or ``...`` if parameters are not stacked."""
    inner = experts.w_in[expert] @ token
    if experts.b_in is not None:
        inner = inner + experts.b_in[expert]
    if experts.activation == "swiglu":
        gate, up = inner.tensor_split(2)
        inner = gate / (1 + (-gate).exp()) * up
    elif experts.activation == "gelu":
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    else:
        inner = F.relu(inner)
    out = experts.w_out[expert] @ inner
    return out if experts.b_out is None else out + experts.b_out[expert]
