"""Random layers and tokens, and the results of one process for the tokens of all ranks."""

import random
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from rank_setup import full

from pymoe import ep, ops
from pymoe._common.types import Gate
from pymoe.ep.placement import Placement
from pymoe.ep.sharding import shard_ranges
from pymoe.nn import MoE, apply_experts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
H = 12


@dataclass
class Case:
    """One layer, and tokens for every rank."""

    world: int
    tokens: list[int]
    dtype: str
    experts: int
    top_k: int
    chunks: int = 1
    scope: str = "rank"
    unchosen: bool = False
    seed: int = 0
    options: dict = field(default_factory=dict)
    clones: int = 0
    min_rows_to_clone: int = 1
    placed: bool = False

    @property
    def has_losses(self):
        return self.options.get("aux_loss_coef", 0) > 0 or self.options.get("z_loss_coef", 0) > 0

    def layer(self):
        """Return the whole layer, which is the same on every rank."""
        torch.manual_seed(self.seed)
        moe = MoE(H, 10, self.experts, self.top_k, dtype=DTYPES[self.dtype], **self.options)
        if moe.router.expert_bias is not None:
            moe.router.expert_bias.uniform_(-0.2, 0.2)
        if self.unchosen:  # feature 0 is positive in all tokens
            with torch.no_grad():
                moe.router.weight[-1].zero_()
                moe.router.weight[-1, 0] = -50.0
        return moe

    def rows(self):
        """Return tokens and output gradients by rank."""
        generator = torch.Generator().manual_seed(self.seed + 1)

        def draw(count):
            return torch.randn(count, H, generator=generator, dtype=torch.float64).to(DTYPES[self.dtype])

        x = [draw(count) for count in self.tokens]
        for one in x:
            one[:, 0] = one[:, 0].abs() + 1
        return x, [draw(count) for count in self.tokens]

    def spread(self, group, **options):
        """Return the layer spread over a group, possibly with experts on other ranks than initially."""
        options = {
            "chunks": self.chunks,
            "scope": self.scope,
            "clones": self.clones,
            "min_rows_to_clone": self.min_rows_to_clone,
            **options,
        }
        layer = ep.shard(self.layer(), group, **options)
        return ep.redistribute(layer, shuffled(self.experts, dist.get_world_size(group))) if self.placed else layer


def shuffled(experts, ranks, seed=0):
    """Return a random placement with as many experts on each rank as initially."""
    order = list(range(experts))
    random.Random(seed + experts).shuffle(order)
    hosts = [()] * experts
    for rank, span in enumerate(shard_ranges(experts, ranks)):
        for position in span:
            hosts[order[position]] = (rank,)
    return Placement(tuple(hosts), ranks)


def in_order(experts, tensor):
    """Return a whole expert parameter, or its gradient, with each expert at its original place."""
    order, whole = experts.sharding.order, full(tensor)
    return whole if order is None else whole[torch.tensor(order).argsort()]


def drawn(seed):
    """Return a random case."""
    r = random.Random(seed)
    world = r.choice([1, 2, 3, 4, 4])
    experts = r.randint(1, 9)
    options = {
        "bias": r.random() < 0.5,
        "num_shared_experts": r.choice([0, 1, 2]),
        "activation": r.choice(["swiglu", "gelu", "relu"]),
        "score": r.choice(["softmax", "sigmoid"]),
        "renormalize": r.random() < 0.5,
        "bias_update_rate": r.choice([0.0, 0.05]),
    }
    top_k = r.randint(1, min(experts, 4))
    if experts % 2 == 0 and top_k <= experts // 2 and r.random() < 0.4:
        options |= {"num_groups": 2, "topk_groups": 1}
    if r.random() < 0.4:
        options["capacity_factor"] = r.choice([0.3, 0.8, 1.2])
    if r.random() < 0.3:
        options |= {"aux_loss_coef": 0.1, "z_loss_coef": 0.01}
    case = Case(
        world=world,
        tokens=[r.choice([0, 1, r.randint(2, 9), r.randint(10, 40)]) for _ in range(world)],
        dtype=r.choice(["float32", "float32", "bfloat16", "bfloat16", "float64"]),
        experts=experts,
        top_k=top_k,
        chunks=r.choice([1, 1, 2, 3, 4]),
        scope=r.choice(["rank", "group"]),
        unchosen=experts > top_k and "num_groups" not in options and r.random() < 0.4,
        seed=seed,
        options=options,
    )
    case.clones, case.min_rows_to_clone, case.placed = r.choice([0, 0, 1, 2]), r.choice([1, 1, 3]), r.random() < 0.5
    return case


def alone(case):
    """Return the output, the input's gradient, and the layer with its gradients, from one process with all ranks'
    tokens.
    """
    moe = case.layer()
    moe.router.row_invariant = True
    if moe.shared is not None:
        moe.shared.row_invariant = True
    tokens, directions = case.rows()
    x = torch.cat(tokens).requires_grad_()
    each_rank_by_itself = case.scope == "rank" and (case.has_losses or moe.capacity_factor is not None)
    y = by_rank(moe, x, case.tokens) if each_rank_by_itself else moe(x)
    (y * torch.cat(directions)).sum().backward()
    return y.detach(), x.grad, moe


def by_rank(moe, x, tokens):
    """Return the layer's output when every rank has its own capacity and losses."""
    gate, logits = moe.router(x)
    weights, experts = [], []
    parts = zip(gate.weights.split(tokens), gate.experts.split(tokens), logits.split(tokens), strict=True)
    for count, (own_weights, own_experts, own_logits) in zip(tokens, parts, strict=True):
        load = torch.bincount(own_experts.flatten(), minlength=moe.num_experts).int()
        weights.append(moe.losses(Gate(own_weights, own_experts, load), own_logits)[0])
        slot = ops.build_routing(own_experts, moe.num_experts, capacity=moe._capacity(count, moe.top_k)).slot
        experts.append(torch.where(slot < 0, moe.num_experts, own_experts))  # an expert of another rank: adds nothing
    one = moe.experts
    y = apply_experts(
        *(x, torch.cat(experts), torch.cat(weights), one.w_in, one.w_out),
        b_in=one.b_in,
        b_out=one.b_out,
        activation=one.activation,
        foreign_experts=True,
    )
    return y if moe.shared is None else y + moe.shared(x)
