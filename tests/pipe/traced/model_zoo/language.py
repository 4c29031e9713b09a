"""Language models: a tied embedding, mixture-of-experts layers, torch's own encoder, recurrence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pymoe.nn import MoE

from .case import Case, next_token, of_tokens, seeded

VOCABULARY, WIDTH, LENGTH = 11, 8, 5


class Block(nn.Module):
    def __init__(self, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm, self.norm_after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.mix(self.norm(x)).view(rows, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.feed_forward(self.norm_after(x))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Tied(nn.Module):
    """A model whose head has the embedding's weight."""

    def __init__(self, *feed_forward: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.blocks = nn.ModuleList([Block(layer) for layer in feed_forward])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.place[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mixture() -> nn.Module:
    options = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01, "bias_update_rate": 0.01, "num_shared_experts": 1}
    return Tied(*[MoE(WIDTH, 12, 4, 2, **options) for _ in range(3)])


class Encoder(nn.Module):
    """torch's own layers, which take another path in evaluation, and a mask that all stages use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList([layer, nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        hidden = text == 0
        hidden[:, 0] = False
        x = self.embed(text)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=hidden)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        x, _ = self.first(self.embed(text))
        x, (last, _) = self.second(x)
        return self.head(x + last.transpose(0, 1))


BLOCKS = {"blocks.1": "BEGINNING", "blocks.2": "BEGINNING", "norm": "BEGINNING"}
CASES = {
    "tied transformer": Case(
        seeded(lambda: Tied(dense(), dense(), dense())), of_tokens(VOCABULARY, LENGTH), BLOCKS, next_token
    ),
    "mixture of experts": Case(seeded(mixture), of_tokens(VOCABULARY, LENGTH), BLOCKS, next_token, rows_meet=True),
    "torch's encoder": Case(
        seeded(Encoder), of_tokens(VOCABULARY, LENGTH), {"layers.1": "BEGINNING", "head": "BEGINNING"}, next_token
    ),
    "recurrent": Case(
        seeded(Recurrent), of_tokens(VOCABULARY, LENGTH), {"second": "BEGINNING", "head": "BEGINNING"}, next_token
    ),
}
