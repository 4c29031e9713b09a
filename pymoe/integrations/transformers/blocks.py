"""Describes the sparse blocks of transformers that :class:`pymoe.nn.MoE` can replace: where they keep weights and
options.

A block is recognised by the name of its class. The table entries were made by reading the source of these classes; the
tests compare each block with the layer that it becomes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pymoe._common.types import Score


@dataclass(frozen=True)
class Plan:
    """Describes how the blocks of one class route, and where they keep weights and options.

    Strings such as ``"gate.norm_topk_prob"`` are paths of attributes of the block, or keys of its state dict.
    """

    score: Score = "softmax"
    renormalize: bool | str = True
    """True, False, or the path of the attribute with this value."""
    router: str = "gate"
    weight: str = "weight"
    """The path of the router's weight, within the router."""
    bias: str | None = None
    """The key of the bias that is added to the scores for the choice only."""
    groups: bool = False
    """True if the router has ``num_group`` and ``topk_group`` and scores a group by the sum of its two best scores."""
    scale: str | None = None
    shared: str | None = None
    """The name of the shared experts: a feed-forward network that every token passes through."""
    only: dict[str, Any] = field(default_factory=dict)
    """Attributes of a block with the values that this plan assumes; blocks with other values are refused."""


_FLAGGED = Plan(renormalize="gate.norm_topk_prob")
_MIXTRAL = Plan(only={"jitter_noise": 0})
_GRANITE = Plan(router="router")
_DEEPSEEK_V2 = Plan(
    renormalize=False, scale="gate.routed_scaling_factor", shared="shared_experts", only={"gate.topk_method": "greedy"}
)
_DEEPSEEK_V3 = Plan(
    score="sigmoid",
    renormalize="gate.norm_topk_prob",
    bias="gate.e_score_correction_bias",
    groups=True,
    scale="gate.routed_scaling_factor",
    shared="shared_experts",
)

PLANS: dict[str, Plan] = {
    "AfmoeSparseMoeBlock": Plan(
        score="sigmoid",
        router="router",
        weight="gate.weight",
        bias="expert_bias",
        scale="router.route_scale",
        shared="shared_experts",
    ),
    "AriaTextMoELayer": Plan(router="router", shared="shared_experts"),
    "BailingHybridMoE": _DEEPSEEK_V3,
    "BeamMoE": replace(_DEEPSEEK_V3, scale="routed_scaling_factor", shared=None),
    "DeepseekOcr2TextMoe": _DEEPSEEK_V2,
    "DeepseekV2Moe": _DEEPSEEK_V2,
    "DeepseekV32MoE": _DEEPSEEK_V3,
    "DeepseekV3MoE": _DEEPSEEK_V3,
    "Dots1MoE": _DEEPSEEK_V3,
    "Dots3NoteTextMoE": _DEEPSEEK_V3,
    "Ernie4_5_MoeSparseMoeBlock": Plan(bias="gate.moe_statics.e_score_correction_bias", shared="shared_experts"),
    "ExaoneMoeSparseMoEBlock": _DEEPSEEK_V3,
    "FlexOlmoSparseMoeBlock": _FLAGGED,
    "FlintSparseMoeBlock": replace(_FLAGGED, score="sigmoid", shared="shared_expert"),
    "Glm4MoeLiteMoE": _DEEPSEEK_V3,
    "Glm4MoeMoE": _DEEPSEEK_V3,
    "Glm4vMoeTextMoE": _DEEPSEEK_V3,
    "GlmMoeDsaMoE": _DEEPSEEK_V3,
    "GraniteMoeHybridMoE": _GRANITE,
    "GraniteMoeMoE": _GRANITE,
    "GraniteMoeSWAMoE": _GRANITE,
    "GraniteMoeSharedMoE": _GRANITE,
    "HYV3MoE": Plan(
        score="sigmoid", bias="e_score_correction_bias", scale="gate.router_scaling_factor", shared="shared_experts"
    ),
    "HunYuanMoEV1Moe": Plan(weight="wg.weight", shared="shared_mlp"),
    "JambaSparseMoeBlock": Plan(router="router", renormalize=False),
    "KimiLinearMoE": _DEEPSEEK_V3,
    "LagunaSparseMoeBlock": Plan(
        score="sigmoid",
        bias="gate.e_score_correction_bias",
        scale="routed_scaling_factor",
        shared="shared_experts",
        only={"gate.router_logit_softcapping": 0},
    ),
    "MellumSparseMoeBlock": _FLAGGED,
    "MiMoV2FlashMoE": replace(_DEEPSEEK_V3, shared=None),
    "MiniMaxM2SparseMoeBlock": replace(_MIXTRAL, score="sigmoid", bias="e_score_correction_bias"),
    "MiniMaxSparseMoeBlock": _MIXTRAL,
    "Mistral4MoE": replace(_DEEPSEEK_V3, score="softmax", bias=None),
    "MistralLarge4TextMoE": replace(_DEEPSEEK_V3, score="softmax", renormalize=True, bias=None),
    "MixtralSparseMoeBlock": _MIXTRAL,
    "OlmoeSparseMoeBlock": _FLAGGED,
    "Qwen3MoeSparseMoeBlock": _FLAGGED,
    "Qwen3OmniMoeThinkerTextSparseMoeBlock": _FLAGGED,
    "Qwen3VLMoeTextSparseMoeBlock": Plan(),
    "SolarOpenMoE": _DEEPSEEK_V3,
    "UnlimitedOcrTextMoe": _DEEPSEEK_V2,
}
"""The plan of each class of blocks, by the name of the class."""

_GATED_SHARED_EXPERT = "a gate multiplies the output of its shared expert"

DIFFERENT: dict[str, str] = {
    "AXK1MoE": "it normalises its output",
    "Cohere2MoeSparseMoeBlock": "the kind of its scores, and of its sum with the shared experts, is an option",
    "DeepseekV4SparseMoeBlock": "its scores are neither a softmax nor a sigmoid",
    "GptOssMLP": "its router has a bias, and its experts have biases and a gate of their own",
    "Kolibri1SparseMoeBlock": "the bias is added to its logits, not to its scores",
    "Lfm2MoeSparseMoeBlock": "it divides the weights by their sum plus 1e-6",
    "Llama4TextMoe": "the scores multiply the input of its experts",
    "PhimoeSparseMoeBlock": "its router masks logits by the sparse mixer of Phi",
    "Qwen2MoeSparseMoeBlock": _GATED_SHARED_EXPERT,
    "Qwen3NextSparseMoeBlock": _GATED_SHARED_EXPERT,
    "Qwen3_5MoeSparseMoeBlock": _GATED_SHARED_EXPERT,
}
"""Blocks that :class:`pymoe.nn.MoE` cannot replace, with the reason."""
