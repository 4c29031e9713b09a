"""The models that are measured: configurations of transformers with the sizes of published models.

Nothing is downloaded. Weights are random, so texts are noise; times depend on sizes, and on how many experts tokens
share, which is about the same for random routers and for balanced ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Model:
    """A model by its configuration."""

    title: str
    config: str
    """The configuration's class in transformers."""
    sizes: Mapping[str, Any]
    """The configuration, without its number of layers."""
    layers: int
    """Layers of the published model."""
    mxfp: bool = False
    """Whether the published experts are in MXFP4."""

    def build(self, layers: int) -> Any:
        """Return the configuration with ``layers`` layers."""
        import transformers

        common = {"tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
        if "sliding_window" in self.sizes:
            common["layer_types"] = [("sliding", "full")[number % 2] + "_attention" for number in range(layers)]
        config = getattr(transformers, self.config)(**self.sizes, **common, num_hidden_layers=layers)
        config.dtype = "bfloat16"
        return config


def rope(theta: float) -> dict[str, Any]:
    """Return rotary embeddings without scaling: the scaling of long contexts changes no time."""
    return {"rope_type": "default", "rope_theta": theta}


PUBLISHED = {
    "olmoe": Model(
        "OLMoE-1B-7B",
        "OlmoeConfig",
        {
            **{"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16},
            **{"num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
            "rope_parameters": rope(1e4),
        },
        16,
    ),
    "qwen3": Model(
        "Qwen3-30B-A3B",
        "Qwen3MoeConfig",
        {
            **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128},
            **{"num_experts_per_tok": 8, "norm_topk_prob": True, "rope_parameters": rope(1e6)},
        },
        48,
    ),
    "gptoss": Model(
        "GPT-OSS-20B",
        "GptOssConfig",
        {
            **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64},
            **{"num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
            **{"sliding_window": 128, "rope_parameters": rope(1.5e5)},
        },
        24,
        mxfp=True,
    ),
    "mixtral": Model(
        "Mixtral-8x7B",
        "MixtralConfig",
        {
            **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
            "rope_parameters": rope(1e6),
        },
        32,
    ),
    "deepseek": Model(
        "DeepSeek-V2-Lite",
        "DeepseekV2Config",
        {
            **{"vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408},
            **{"num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2},
            **{"num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None},
            **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_method": "greedy"},
            **{"norm_topk_prob": False, "routed_scaling_factor": 1.0, "rope_parameters": rope(1e4)},
        },
        27,
    ),
}
_SMALL = {
    **{"vocab_size": 256, "hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "num_experts": 8, "num_local_experts": 8},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 32},
    **{"qk_rope_head_dim": 32, "v_head_dim": 32, "sliding_window": 128},
}
MODELS = PUBLISHED | {
    f"tiny-{name}": replace(one, title=f"tiny {one.title}", sizes={k: _SMALL.get(k, v) for k, v in one.sizes.items()})
    for name, one in PUBLISHED.items()
}
"""All models by name; ``tiny-NAME`` is NAME with small sizes, for quick tries."""
