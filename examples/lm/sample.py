"""Text written by the model, one byte at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .model import LanguageModel


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: str, length: int, *, context: int, temperature: float, top_k: int, seed: int
) -> str:
    """``prompt`` and ``length`` more bytes, drawn from the ``top_k`` likeliest; temperature 0 takes the likeliest.

    Bytes that make no UTF-8 character appear as the replacement character.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode() or b"\n")])
    for _ in range(length):
        logits = model(tokens[:, -context:])[0, -1]
        tokens = torch.cat((tokens, _draw(logits, temperature, top_k, generator).view(1, 1)), dim=1)
    return bytes(tokens[0].tolist()).decode("utf-8", errors="replace")


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    if temperature <= 0:
        return logits.argmax()
    values, indices = logits.topk(min(top_k, logits.numel()))
    return indices[torch.multinomial((values / temperature).softmax(dim=-1), 1, generator=generator)]
