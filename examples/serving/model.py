"""Four served experts, and a model around them that predicts a byte from the bytes before it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pymoe.runtime import BatchTensorProto, ExpertBackend, ExpertClient

EXPERTS = 4
CONTEXT = 8  # bytes that a prediction looks back on
BYTES = 256


def served_experts(width: int, ffn: int, learning_rate: float) -> list[ExpertBackend]:
    """Feed-forward experts with an optimizer each, which is the server's business alone."""
    backends = []
    for i in range(EXPERTS):
        expert = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, ffn), nn.GELU(), nn.Linear(ffn, width))
        optimizer = torch.optim.Adam(expert.parameters(), lr=learning_rate)
        row = BatchTensorProto(width)
        backends.append(
            # A step as long as the mean asks for, however many requests happened to meet in a batch.
            ExpertBackend(f"expert{i}", expert, optimizer, args_schema=(row,), gradient_reduction="mean")
        )
    return backends


class NextByte(nn.Module):
    """Bytes to logits of the next one; in between each row goes to the expert that its last byte belongs to.

    That choice is a fixed one (a "hash layer"), so that the example is about serving and not about routing: the
    library's learned router is ``pymoe.nn.MoE``.
    """

    def __init__(self, experts: Sequence[ExpertClient], width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width // 2)
        self.mix = nn.Linear(CONTEXT * (width // 2), width)
        self.head = nn.Linear(width, BYTES)
        self.experts = nn.ModuleList(experts)

    def forward(self, contexts: Tensor) -> Tensor:
        """(rows, CONTEXT) int64 to (rows, BYTES)."""
        x, rows = self.read(contexts)
        calls = [expert.submit(x[own]) for expert, own in zip(self.experts, rows, strict=True)]
        return self.write(x, rows, [call.result() for call in calls])

    async def forward_async(self, contexts: Tensor) -> Tensor:
        """The same, for coroutines."""
        x, rows = self.read(contexts)
        calls = (expert.call_async(x[own]) for expert, own in zip(self.experts, rows, strict=True))
        return self.write(x, rows, await asyncio.gather(*calls))

    def read(self, contexts: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What the experts look at, and which rows are whose; an expert may have none."""
        x = self.mix(self.embedding(contexts).flatten(1))
        expert = contexts[:, -1] % EXPERTS
        return x, [(expert == i).nonzero().flatten() for i in range(EXPERTS)]

    def write(self, x: Tensor, rows: list[Tensor], outputs: Sequence[Tensor]) -> Tensor:
        """The predictions."""
        return self.head(x.index_add(0, torch.cat(rows), torch.cat(tuple(outputs))))


class Windows:
    """Random places of a text: what stands before, and the byte that comes next."""

    def __init__(self, text: Tensor, seed: int) -> None:
        self.text, self.random = text, torch.Generator().manual_seed(seed)

    def draw(self, rows: int) -> tuple[Tensor, Tensor]:
        """(rows, CONTEXT) and (rows,), both int64."""
        starts = torch.randint(len(self.text) - CONTEXT, (rows, 1), generator=self.random)
        window = self.text[starts + torch.arange(CONTEXT + 1)].long()
        return window[:, :-1], window[:, -1]
