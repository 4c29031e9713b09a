"""Language models of the transformers library over bytes, as small as asked for."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

BYTES = 256
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ARCHITECTURES = ("llama", "gpt2", "qwen3")


def build(architecture: str, width: int, layers: int, context: int) -> nn.Module:
    """A new model, its head's weight that of its embedding; ``model(input_ids).logits`` is (rows, context, 256)."""
    if architecture == "gpt2":
        sizes: dict[str, Any] = {"n_embd": width, "n_layer": layers, "n_head": width // 16, "n_positions": context}
        sizes |= NO_DROPOUT
    else:
        sizes = {
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 16,
            "num_key_value_heads": width // 32,
            "head_dim": 16,
            "max_position_embeddings": context,
        }
    config = AutoConfig.for_model(
        architecture,
        vocab_size=BYTES,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    return AutoModelForCausalLM.from_config(config)


def cross_entropy(output: Any, targets: Tensor) -> Tensor:
    """Of the model's output; the mean over all bytes, in nats."""
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
