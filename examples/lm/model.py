"""A decoder-only transformer over bytes: RMSNorm, rotary positions, causal attention, and MoE or dense SwiGLU FFNs.

Names: B batch, C context, T tokens (B * C), D width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pymoe.nn import MoE

from .config import Config

VOCABULARY = 256
ROTARY_BASE = 10_000.0


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
        with torch.no_grad():  # the residual stream grows by 2 * layers terms: keep its variance (GPT-2)
            for block in self.blocks:
                block.attention.out.weight.div_(math.sqrt(2 * config.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Bytes (B, C) int64 to logits (B, C, 256); the head is the embedding's transpose."""
        x = self.embedding(tokens)
        length = tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embedding.weight)

    def moe_layers(self) -> list[MoE]:
        return [block.ffn for block in self.blocks if isinstance(block.ffn, MoE)]

    def loads(self) -> Tensor | None:
        """Slots per expert in the last step, (layers, experts) int32; None for a dense model."""
        layers = self.moe_layers()
        return torch.stack([layer.stats.load for layer in layers]) if layers else None


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
    """The cos and sin of position * frequency, (context, head_size / 2) each (RoFormer, arXiv 2104.09864)."""
    frequency = ROTARY_BASE ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def parameter_counts(model: nn.Module, config: Config) -> dict[str, int]:
    """All parameters, and those that one byte meets: of each MoE layer's experts only ``top_k`` of ``num_experts``."""
    total = active = 0
    for parameter in model.parameters():
        total += parameter.numel()
        routed = parameter.dim() == 3  # experts are stacked (E, out, in)
        active += parameter.numel() * config.top_k // config.num_experts if routed else parameter.numel()
    return {"total": total, "active_per_byte": active}
