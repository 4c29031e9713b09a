"""Builds tiny instances of the models of transformers whose experts use its experts interface."""

import importlib
import inspect

import torch

TINY = dict(
    # sizes
    hidden_size=64,
    intermediate_size=48,
    moe_intermediate_size=40,
    shared_expert_intermediate_size=80,
    shared_experts_intermediate_size=40,
    shared_intermediate_size=48,
    vocab_size=128,
    max_position_embeddings=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=32,
    router_hidden_size=32,
    # attention with compressed keys and values
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    qk_head_dim=32,
    v_head_dim=16,
    index_n_heads=2,
    index_head_dim=32,
    index_topk=16,
    # state spaces and linear attention
    mamba_d_state=8,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_num_heads=8,
    mamba_head_dim=16,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    attn_layer_period=2,
    attn_layer_offset=0,
    # experts
    num_local_experts=8,
    num_experts=8,
    n_routed_experts=8,
    moe_num_experts=8,
    num_experts_per_tok=3,
    moe_topk=3,
    moe_k=3,
    top_k_experts=3,
    n_group=2,
    topk_group=1,
    n_shared_experts=1,
    num_shared_experts=1,
    moe_num_shared_experts=1,
    # which layers have them
    first_k_dense_replace=1,
    num_dense_layers=1,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    expert_layer_period=1,
    expert_layer_offset=0,
    use_moe=True,
    enable_moe_block=True,
    moe_layer_start_index=1,
    moe_layer_end_index=-1,
    moe_layer_interval=1,
    # no end before the tests' own
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=False,
)
"""Arguments of configurations; each model gets the arguments that its configuration knows."""

ROPE = {"rope_type": "default", "rope_theta": 1e4}
EVERY_HEAD_ITS_OWN = {"num_key_value_heads": 4}
LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
OWN = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32"), EVERY_HEAD_ITS_OWN),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "mistral4", "mistral_large4"), EVERY_HEAD_ITS_OWN),
    **dict.fromkeys(("granitemoehybrid", "qwen3_5_moe", "qwen3_next"), LINEAR_AND_FULL),
    "bailing_hybrid": LINEAR_AND_FULL | EVERY_HEAD_ITS_OWN,
    "beam": SPARSE,
    "deepseek_ocr2": SPARSE | {"rope_parameters": ROPE},
    "dbrx": {
        **dict(d_model=64, n_layers=2, n_heads=4),
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 3},
    },
    "dots3_note": EVERY_HEAD_ITS_OWN,
    "ernie4_5_vl_moe": {"moe_intermediate_size": [40, 24], "rope_parameters": ROPE | {"mrope_section": [3, 3, 2]}},
    "gemma4": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16, **SPARSE},
    "glm4v_moe": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    "glm5_next": EVERY_HEAD_ITS_OWN | SPARSE | LINEAR_AND_FULL | {"qk_rope_head_dim": 0},
    "kimi_linear": LINEAR_AND_FULL | EVERY_HEAD_ITS_OWN,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": EVERY_HEAD_ITS_OWN
    | dict(num_layers=2, num_hidden_layers=4, expert_ffn_hidden_size=40, ffn_hidden_size=48, zero_expert_num=4),
    "qwen4_exp": {
        "layer_types": ["linear_attention", "indexed_attention"],
        **dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4),
    },
    "step3p7": SPARSE | {"swiglu_limits": [0.0, 0.5], "share_expert_dim": 40},
    "zaya": {"num_experts_per_tok": 1},
}
"""Arguments that a model needs in addition or instead."""


OUTSIDE = {"DbrxExperts", "JetMoeMoE", "JetMoeMoA", "Llama4TextExperts", "LongcatFlashExperts", "Step3p7Experts"}
"""Classes that hold the experts of models that have no interface for them."""


def build(model):
    """Return a model with random parameters, in evaluation mode, that passed one forward."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    errors = []
    for cls in classes(module):
        try:
            return built(cls, configuration(cls.config_class, OWN.get(model, {})))
        except Exception as error:
            errors.append(f"{cls.__name__}: {type(error).__name__}: {str(error)[:300]}")
    raise AssertionError(f"{model} could not be built: " + "\n    ".join(errors))


def classes(module):
    """Yield the classes that a tiny model may have: classes with a head, which can generate, before classes without."""
    own = [cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == module.__name__]
    for ending in ("ForCausalLM", "TextModel", "Model"):
        yield from (
            c
            for c in own
            if c.__name__.endswith(ending) and hasattr(c, "config_class") and not c.__name__.endswith("PreTrainedModel")
        )


def configuration(config_class, own):
    arguments = {**TINY, **own}
    known = set(inspect.signature(config_class.__init__).parameters) | set(
        getattr(config_class, "__dataclass_fields__", ())
    )
    known |= {name for name in arguments if hasattr(config_class, name)}
    return config_class(**{name: value for name, value in arguments.items() if name in known})


def built(cls, config):
    torch.manual_seed(0)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in cls(config).parameters())
    assert parameters < 3e7, f"{parameters / 1e6:.0f} million parameters"
    model = cls(config).eval()
    experts = [
        module
        for module in model.modules()
        if hasattr(module, "_is_expert_parallel") or type(module).__name__ in OUTSIDE
    ]
    assert experts, "no experts"
    for module in experts:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        model(input_ids=tokens())
    return model


def tokens(length=12):
    return torch.randint(3, 100, (2, length), generator=torch.Generator().manual_seed(length))
