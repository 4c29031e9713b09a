"""Architectures of the transformers library, made small by their configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Batch, Case, of_tokens, seeded, tokens

VOCABULARY, LENGTH = 23, 6
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(**SMALL, intermediate_size=12, num_key_value_heads=1, tie_word_embeddings=True, use_cache=False)
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=8,
            n_layer=2,
            n_head=2,
            n_positions=16,
            use_cache=False,
            **NO_TOKENS,
            **no_dropout,
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(**SMALL, intermediate_size=12, max_position_embeddings=16, num_labels=3, **no_dropout)
    )


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            **SMALL,
            intermediate_size=12,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            use_cache=False,
            experts_implementation="batched_mm",
        )
    )


def masked(rows: int, generator: torch.Generator) -> Batch:
    """Return sentences of several lengths, and the class of each sentence."""
    lengths = 1 + tokens(generator, LENGTH, rows)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return Batch(
        (),
        {"input_ids": tokens(generator, VOCABULARY, rows, LENGTH), "attention_mask": mask},
        tokens(generator, 3, rows),
    )


def next_token(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def best_class(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


TEXT = of_tokens(VOCABULARY, LENGTH)
LAYERS = {"model.layers.1": "BEGINNING", "lm_head": "BEGINNING"}
CASES = {
    "Llama": Case(seeded(llama), TEXT, LAYERS, next_token, least_rows=2),
    "GPT-2": Case(
        seeded(gpt2), TEXT, {"transformer.h.0": "END", "transformer.ln_f": "BEGINNING"}, next_token, least_rows=2
    ),
    "BERT": Case(
        seeded(bert),
        masked,
        {"bert.encoder.layer.1": "BEGINNING", "bert.pooler": "BEGINNING"},
        best_class,
    ),
    "Mixtral": Case(seeded(mixtral), TEXT, LAYERS, next_token, least_rows=2),
}
