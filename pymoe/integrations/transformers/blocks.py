"""Tables of the sparse blocks of transformers that :class:`pymoe.nn.MoE` can replace: where weights and options are.

A block is recognised by the name of its class. The entries come from the source code of these classes; the tests
compare each block with the layer that replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pymoe._common.types import Score
from pymoe.integrations.transformers.interface import Flags


@dataclass(frozen=True)
class Plan:
    """Describes how the blocks of a class route tokens, and where they have weights and options.

    Strings such as ``"gate.norm_topk_prob"`` are paths of attributes of the block, or keys of its state dict. Functions
    take the block and return the value.
    """

    score: Score | Callable[[Any], Score] = "softmax"
    renormalize: bool | str | Callable[[Any], bool] = True
    """True, False, the path of the attribute with the value, or a function."""
    router: str = "gate"
    weight: str = "weight"
    """The path of the router's weight, within the router."""
    bias: str | None = None
    """The key of the bias that is added to the scores only for the choice of experts."""
    groups: bool = False
    """True if the router has ``num_group`` and ``topk_group`` and scores a group by the sum of its two best scores."""
    scale: str | Callable[[Any], float] | None = None
    router_bias: str | None = None
    """The key of the bias of the router's logits."""
    score_before_experts: bool = False
    """True if the weights of the choices multiply the inputs of experts, not their outputs."""
    shared: str | None = None
    """The name of the shared experts: a feed-forward network that every token passes through. Some blocks lack it."""
    shared_gate: str | None = None
    """The key of the weight of the gate that multiplies the shared experts' output."""
    outside: Flags | None = None
    """The flags of the experts if they are outside of transformers' interface; their ``act_fn`` is applied to gate."""
    only: dict[str, Any] = field(default_factory=dict)
    """Paths of attributes of a block, with the values that this plan assumes; blocks with other values are refused."""
    only_shared: dict[str, Any] = field(default_factory=dict)
    """More paths and values, which are tested only if the block has shared experts."""


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
_GPT_OSS = Plan(router="router", router_bias="router.bias")
_QWEN2 = replace(_FLAGGED, shared="shared_expert", shared_gate="shared_expert_gate.weight")

PLANS: dict[str, Plan] = {
    "AXK2MoE": replace(_DEEPSEEK_V3, groups=False, only={"gate.num_group": None}),
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
    "Cohere2MoeSparseMoeBlock": Plan(
        score=lambda block: block.gate.expert_selection_fn,
        renormalize=lambda block: block.gate.expert_selection_fn == "softmax" or block.gate.norm_topk_prob,
        shared="shared_experts",
        only_shared={"shared_expert_combination_strategy": "sum"},
    ),
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
    "Glm5NextTextMoE": _DEEPSEEK_V3,
    "GlmMoeDsaMoE": _DEEPSEEK_V3,
    "GptOssMLP": _GPT_OSS,
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
    "Llama4TextMoe": Plan(
        score="sigmoid",
        renormalize=False,
        router="router",
        score_before_experts=True,
        shared="shared_expert",
        outside=Flags(gated=True, biased=False, transposed=True, normed=False, expert_parallel=False),
    ),
    "MellumSparseMoeBlock": _FLAGGED,
    "MiMoV2FlashMoE": replace(_DEEPSEEK_V3, shared=None),
    "MiniMaxM2SparseMoeBlock": replace(_MIXTRAL, score="sigmoid", bias="e_score_correction_bias"),
    "MiniMaxM3VLSparseMoeBlock": Plan(
        score="sigmoid", bias="gate.e_score_correction_bias", scale="routed_scaling_factor", shared="shared_experts"
    ),
    "MiniMaxSparseMoeBlock": _MIXTRAL,
    "Mistral4MoE": replace(_DEEPSEEK_V3, score="softmax", bias=None),
    "MistralLarge4TextMoE": replace(_DEEPSEEK_V3, score="softmax", renormalize=True, bias=None),
    "MixtralSparseMoeBlock": _MIXTRAL,
    "NemotronHMoE": replace(_DEEPSEEK_V3, only={"config.moe_latent_size": None}),
    "OlmoeSparseMoeBlock": _FLAGGED,
    # The router divides the weights by top_k; the block multiplies the sum by num_experts, its own name for top_k.
    "OpenAIPrivacyFilterMLP": replace(_GPT_OSS, scale=lambda block: block.num_experts / block.router.top_k),
    "Qwen2MoeSparseMoeBlock": _QWEN2,
    "Qwen3MoeSparseMoeBlock": _FLAGGED,
    "Qwen3NextSparseMoeBlock": _QWEN2,
    "Qwen3OmniMoeTalkerTextSparseMoeBlock": _QWEN2,
    "Qwen3OmniMoeThinkerTextSparseMoeBlock": _FLAGGED,
    "Qwen3VLMoeTextSparseMoeBlock": Plan(),
    "Qwen3_5MoeSparseMoeBlock": replace(_QWEN2, renormalize=True),
    "Qwen4ExpTextSparseMoeBlock": _QWEN2,
    "SolarOpenMoE": _DEEPSEEK_V3,
    "UnlimitedOcrTextMoe": _DEEPSEEK_V2,
}
"""The plan of each class of blocks, by the name of the class."""

_SOFTPLUS = "its scores are square roots of softplus, neither a softmax nor a sigmoid"
_KINDS_OF_EXPERTS = "images have other experts than text"
_ROUTER_OF_GEMMA = "its router normalises and scales tokens, and every expert has a factor of its weights"

DIFFERENT: dict[str, str] = {
    "AXK1MoE": "it normalises its output",
    "DeepseekV4SparseMoeBlock": _SOFTPLUS + ", and some layers choose experts by token ids",
    "DiffusionGemmaDecoderTextLayer": _ROUTER_OF_GEMMA,
    "DiffusionGemmaEncoderTextLayer": _ROUTER_OF_GEMMA,
    "Ernie4_5_VLMoeMoeBlock": _KINDS_OF_EXPERTS,
    "Ernie4_5_VLMoeSparseMoeBlock": _KINDS_OF_EXPERTS,
    "Gemma4TextDecoderLayer": _ROUTER_OF_GEMMA,
    "HYV4MoE": "its experts clamp what they multiply, and its shared experts do not",
    "Inkling2SparseMoeBlock": _SOFTPLUS,
    "InklingMoE": "the weights of its shared experts are normalised together with those of the choices",
    "Kolibri1SparseMoeBlock": "the bias is added to its logits, not to its scores",
    "Lfm2MoeSparseMoeBlock": "it divides the weights by their sum plus 1e-6",
    "MuseSparkMoE": "its experts lie between two projections, and every output is normalised",
    "PhimoeSparseMoeBlock": "its router masks logits by the sparse mixer of Phi",
    "ZayaSparseMoeBlock": "its router is a network that takes what the router of the layer before has computed",
}
"""Blocks that :class:`pymoe.nn.MoE` cannot replace, with the reason."""
