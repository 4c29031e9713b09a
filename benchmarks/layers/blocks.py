"""Builds the expert blocks to measure: transformers' blocks in the sizes of published models, with random weights.

Legend: T tokens, H hidden, F ffn of one expert, E experts, K choices (experts per token), S = T * K slots.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import LeftOut
from pymoe.nn import MoE

PATTERN = 1_048_573
"""Number of random numbers, which the weights repeat; it is prime, so that no two experts have the same weights."""
COPIES = 3
"""Number of copies of the float32 weights that must fit into memory: weights, gradients and quantised copies."""


@dataclass(frozen=True)
class Block:
    """A mixture-of-experts block of transformers."""

    title: str
    hidden: int
    ffn: int
    experts: int
    choices: int
    build: Callable[[Block], nn.Module]
    """Builds the transformers block."""
    options: Mapping[str, Any] | None = field(default_factory=dict)
    """Options with which :class:`pymoe.nn.MoE` computes the same; None if no options do."""
    router: str = "gate"
    """The name of the block's attribute that holds its router."""
    shared: int = 0
    """Number of experts of width F that every token passes through."""
    divisors: tuple[int, int] = (1, 1)
    """Divisors of H and F that are used where the whole block does not fit into memory."""

    def __str__(self) -> str:
        shared = f" and {self.shared} shared" if self.shared else ""
        return f"{self.title}: H{self.hidden} F{self.ffn} E{self.experts}{shared} K{self.choices}"

    @property
    def per_expert(self) -> int:
        """Return the number of weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.ffn

    @property
    def weights(self) -> int:
        """Return the number of weights of all experts."""
        return (self.experts + self.shared) * self.per_expert

    def flops(self, tokens: int, train: bool) -> int:
        """Return the floating-point operations of the experts' products: two per weight and row forward, four
        backward.
        """
        return (6 if train else 2) * tokens * (self.choices + self.shared) * self.per_expert

    def fitting(self, memory: float) -> Block:
        """Return a block that fits into ``memory`` bytes: this one, or a smaller one whose title says so."""
        if COPIES * 4 * self.weights <= memory or self.divisors == (1, 1):
            return self
        of_hidden, of_ffn = self.divisors
        parts = [f"{name}/{by}" for name, by in (("H", of_hidden), ("F", of_ffn)) if by > 1]
        title = f"{self.title} scaled to {', '.join(parts)}"
        return replace(self, title=title, hidden=self.hidden // of_hidden, ffn=self.ffn // of_ffn)


def of_transformers(
    model: str, config: str, sparse: str, ffn: str, experts: str, **options: Any
) -> Callable[[Block], nn.Module]:
    """Return a function that builds a block of transformers.

    Args:
        model: the package of transformers.models.
        config: the class of its configuration.
        sparse: the class of the block.
        ffn: the configuration's name for F.
        experts: the configuration's name for E.
        options: further options of the configuration.
    """

    def build(block: Block) -> nn.Module:
        import transformers

        sizes = {"hidden_size": block.hidden, ffn: block.ffn, experts: block.experts}
        made = getattr(transformers, config)(**sizes, num_experts_per_tok=block.choices, **options)
        modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        module: nn.Module = getattr(modeling, sparse)(made)
        return module

    return build


olmoe = of_transformers(
    *("olmoe", "OlmoeConfig", "OlmoeSparseMoeBlock", "intermediate_size", "num_experts"), norm_topk_prob=False
)
qwen3 = of_transformers(
    *("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", "moe_intermediate_size", "num_experts"),
    norm_topk_prob=True,
)
gpt_oss = of_transformers("gpt_oss", "GptOssConfig", "GptOssMLP", "intermediate_size", "num_local_experts")
"""GPT-OSS has biases, a clamped swiglu over interleaved columns, and weights of shape (E, in, out)."""
mixtral = of_transformers(
    *("mixtral", "MixtralConfig", "MixtralSparseMoeBlock", "intermediate_size", "num_local_experts")
)
deepseek = of_transformers(
    *("deepseek_v3", "DeepseekV3Config", "DeepseekV3MoE", "moe_intermediate_size", "n_routed_experts"),
    n_shared_experts=1,
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
)
"""DeepSeek-V3 has sigmoid scores, the best four of eight groups, scaled weights, and a shared expert."""
DEEPSEEK = {"score": "sigmoid", "num_groups": 8, "topk_groups": 4, "scale": 2.5, "num_shared_experts": 1}
BLOCKS = {
    "olmoe": Block("OLMoE-1B-7B", 2048, 1024, 64, 8, olmoe, {"renormalize": False}),
    "qwen3": Block("Qwen3-30B-A3B", 2048, 768, 128, 8, qwen3),
    "gptoss": Block("GPT-OSS-20B", 2880, 2880, 32, 4, gpt_oss, None, router="router"),
    "mixtral": Block("Mixtral-8x7B", 4096, 14336, 8, 2, mixtral, divisors=(1, 4)),
    "deepseek": Block("DeepSeek-V3", 7168, 2048, 256, 8, deepseek, DEEPSEEK, shared=1, divisors=(4, 4)),
}
TINY = {
    f"tiny-{name}": replace(one, title=f"tiny {one.title}", hidden=64, ffn=32, experts=16, choices=min(one.choices, 4))
    for name, one in BLOCKS.items()
}
"""The same blocks in a tiny size, for quick runs."""


@dataclass(frozen=True)
class Built:
    """A block with its weights, which all contenders share."""

    block: Block
    dtype: torch.dtype
    module: nn.Module
    """The block of transformers, in evaluation mode."""

    @property
    def experts(self) -> nn.Module:
        """Return the experts of the block: parameters ``gate_up_proj`` and ``down_proj``, and biases if there are
        any.
        """
        found: nn.Module = self.module.experts
        return found

    def choice(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return (T, K) experts and (T, K) weights as the block's router chooses them."""
        _, weights, experts = getattr(self.module, self.block.router)(x_TH)
        return experts, weights

    def forward(self, x_TH: Tensor) -> Tensor:
        """Return (T, H): the block under the implementation of experts that is set."""
        result = self.module(x_TH[None])
        return (result[0] if isinstance(result, tuple) else result)[0]

    def under(self, implementation: str) -> Callable[[Tensor], Tensor]:
        """Return :meth:`forward` using one of transformers' implementations of experts."""
        config: Any = self.experts.config

        def forward(x_TH: Tensor) -> Tensor:
            config._experts_implementation = implementation
            return self.forward(x_TH)

        return forward

    def sharing(self) -> Built:
        """Return another module with the same parameters, whose experts run on pymoe and may be replaced."""
        with torch.device("meta"):
            module = self.block.build(self.block)
        module.load_state_dict(self.module.state_dict(), assign=True)
        module.experts.config._experts_implementation = "pymoe"
        return replace(self, module=module.requires_grad_(False).eval())

    @property
    def touched(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return both weights of the experts, (E, ., .) each; a token reads the parts that belong to its experts."""
        return self.experts.gate_up_proj, self.experts.down_proj


def built(block: Block, dtype: torch.dtype, seed: int = 0) -> Built:
    """Build a block with weights that keep the scale of activations; the biases of routers are zero."""
    with torch.device("meta"):
        module = block.build(block)
    module = module.to(dtype).to_empty(device="cpu").eval()
    random = torch.Generator().manual_seed(seed)
    pattern = torch.empty(PATTERN).uniform_(-1, 1, generator=random).to(dtype)
    transposed = getattr(module.experts, "is_transposed", False)
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.zero_()
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
                if name.startswith("experts"):
                    fill(parameter, pattern, 0.1)
            else:
                fan_in = parameter.shape[-2 if transposed and parameter.dim() == 3 else -1]
                fill(parameter, pattern, math.sqrt(3 / fan_in))
    return Built(block, dtype, module)


def fill(parameter: Tensor, pattern: Tensor, scale: float) -> None:
    """Fill ``parameter`` with repetitions of ``pattern`` times ``scale``."""
    scaled, flat = pattern * scale, parameter.view(-1)
    for start in range(0, flat.numel(), len(scaled)):
        part = flat[start : start + len(scaled)]
        part.copy_(scaled[: len(part)])


def as_moe(one: Built) -> MoE:
    """Return the equivalent layer of pymoe, which shares the parameters of ``one``.

    Raises:
        LeftOut: no options of the layer compute the block.
    """
    block, options = one.block, one.block.options
    if options is None:
        raise LeftOut(f"no option of pymoe.nn.MoE computes {block.title}, whose router has a bias")
    layer = nn.utils.skip_init(
        MoE, block.hidden, block.ffn, block.experts, block.choices, dtype=one.dtype, device="cpu", **options
    )
    layer.router.weight = getattr(one.module, block.router).weight
    layer.experts.w_in, layer.experts.w_out = one.touched
    if layer.shared is not None:
        shared: Any = one.module.shared_experts
        with torch.no_grad():
            layer.shared.w_in.copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
        layer.shared.w_out = shared.down_proj.weight
    return layer.eval()
