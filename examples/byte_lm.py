"""Defines the byte-level language model that train_lm.py and the pipelines train: settings, layers, a training step.

It is a decoder-only transformer with RMSNorm, rotary positions, causal attention, and MoE or dense SwiGLU feed-forward
layers. Legend: B batch, C context, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pymoe.nn import MoE, update_expert_biases

VOCABULARY = 256
ROTARY_BASE = 10_000.0


def setting(default: Any, text: str, group: str = "training", choices: tuple[str, ...] | None = None) -> Any:
    """Return a field of Config, for which train_lm.py makes a flag."""
    return field(default=default, metadata={"help": text, "group": group, "choices": choices})


@dataclass(frozen=True)
class Config:
    """All settings on which the losses of a run depend.

    On one machine, equal configs give equal losses bit for bit.
    """

    ffn: str = setting(
        "moe",
        "feed-forward layers: mixture of experts, or the dense one of equal FLOPs per token (its hidden size is that "
        "of the experts a byte meets)",
        "model",
        ("moe", "dense"),
    )
    backend: str = setting(
        "native",
        "what computes the MoE layers: pymoe's native operators or its pure PyTorch reference",
        "model",
        ("native", "reference"),
    )
    layers: int = setting(4, "transformer blocks", "model")
    width: int = setting(128, "size of the residual stream", "model")
    heads: int = setting(4, "attention heads", "model")
    context: int = setting(256, "bytes that the model sees", "model")
    ffn_size: int = setting(256, "hidden size of one expert", "model")
    num_experts: int = setting(8, "experts in a layer", "model")
    top_k: int = setting(2, "experts that each byte is sent to", "model")
    shared_experts: int = setting(0, "experts besides those that every byte passes through (DeepSeekMoE)", "model")
    aux_loss_coef: float = setting(0.01, "weight of the load-balancing loss (Switch Transformer)", "model")
    bias_update_rate: float = setting(
        0.0, "step of the expert bias that balances load without a loss (DeepSeek-V3); 0 turns it off", "model"
    )
    text: str = setting(
        "", "text file to train on (default: the Python manual that this interpreter carries, pydoc_data.topics)"
    )
    steps: int = setting(1200, "optimizer steps")
    batch_size: int = setting(4, "windows of --context bytes in a step")
    learning_rate: float = setting(3e-3, "peak learning rate of AdamW; linear warm-up, then cosine to zero")
    warmup: int = setting(50, "steps of linear warm-up")
    weight_decay: float = setting(0.1, "weight decay of matrices")
    grad_clip: float = setting(1.0, "largest norm of the gradient")
    seed: int = setting(0, "seed of the weights, of the order of the data and of the sample")
    threads: int = setting(0, "CPU threads (0: what torch chooses); the sums of a run depend on it")

    @property
    def dense_ffn_size(self) -> int:
        """Return the hidden size of all experts together that process one byte."""
        return (self.top_k + self.shared_experts) * self.ffn_size

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of step ``step`` (0-based)."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class LanguageModel(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        cos, sin = rotary_tables(config.context, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        with torch.no_grad():  # the residual stream sums 2 * layers terms; scale them to keep its variance (GPT-2)
            for block in self.blocks:
                block.attention.out.weight.div_(math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes (B, C) int64 to logits (B, C, 256); the head is the embedding's transpose."""
        x = self.embedding(tokens)
        length = tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embedding.weight)

    def moe_layers(self) -> list[MoE]:
        return [block.ffn for block in self.blocks if isinstance(block.ffn, MoE)]


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config.width, config.heads)
        self.ffn_norm = nn.RMSNorm(config.width)
        self.ffn = make_ffn(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


def make_ffn(config: Config) -> nn.Module:
    if config.ffn == "dense":
        return DenseFFN(config.width, config.dense_ffn_size)
    return MoE(
        config.width,
        config.ffn_size,
        config.num_experts,
        config.top_k,
        activation="swiglu",
        renormalize=config.top_k > 1,  # a single weight of 1 would leave the router no gradient from the task
        num_shared_experts=config.shared_experts,
        aux_loss_coef=config.aux_loss_coef,
        bias_update_rate=config.bias_update_rate,
        backend=config.backend,
    )


class DenseFFN(nn.Module):
    def __init__(self, width: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def rotary_tables(context: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * frequency, (context, head_size / 2) each (RoFormer, arXiv 2104.09864)."""
    frequency = ROTARY_BASE ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def parameter_counts(model: nn.Module, config: Config) -> dict[str, int]:
    """Return the number of all parameters, and the number that process one byte, with ``top_k`` of ``num_experts``
    experts.
    """
    total = active = 0
    for parameter in model.parameters():
        total += parameter.numel()
        routed = parameter.dim() == 3  # experts are stacked (E, out, in)
        active += parameter.numel() * config.top_k // config.num_experts if routed else parameter.numel()
    return {"total": total, "active_per_byte": active}


def make_optimizer(model: nn.Module, config: Config, **options: Any) -> torch.optim.AdamW:
    """Return AdamW, fused by default; matrices have weight decay, norms and biases have none."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), **{"fused": True, **options})


def train_step(
    model: LanguageModel, optimizer: torch.optim.Optimizer, config: Config, step: int, inputs: Tensor, targets: Tensor
) -> float:
    """Run forward, backward, clipping and update. MoE layers inject their balancing losses into the gradient."""
    model.train()
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_at(step)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    optimizer.step()
    if config.bias_update_rate:
        update_expert_biases(model)
    return loss.item()


@torch.no_grad()
def generate(
    model: LanguageModel, context: int, prompt: str, length: int, temperature: float, k: int, seed: int
) -> str:
    """Return ``prompt`` and ``length`` more bytes, drawn from the ``k`` most likely ones; temperature 0 takes the most
    likely.

    Bytes that are not valid UTF-8 appear as the replacement character.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode() or b"\n")])
    for _ in range(length):
        logits = model(tokens[:, -context:])[0, -1]
        values, indices = logits.topk(min(k, logits.numel()) if temperature > 0 else 1)
        chances = (values / temperature).softmax(dim=-1) if temperature > 0 else torch.ones(1)
        drawn = indices[torch.multinomial(chances, 1, generator=generator)]
        tokens = torch.cat((tokens, drawn.view(1, 1)), dim=1)
    return bytes(tokens[0].tolist()).decode("utf-8", errors="replace")
