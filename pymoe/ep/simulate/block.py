"""Block, the sizes of the simulated layers, with presets for published models."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pymoe._common import checks

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def at_least(owner: str, argument: str, value: object, low: int, high: int | None = None) -> None:
    """Raise unless ``value`` is an int from ``low`` to ``high``, or at least ``low`` if ``high`` is None."""
    checks.integer(owner, argument, value, low, high, f"at least {low}" if high is None else f"in {low}..{high}")


@dataclass(frozen=True)
class Block:
    """The sizes of the mixture-of-experts layers of a model, all alike; experts are gated (gate, up and down).

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is out of range or does not fit the others, or the dtype is unknown.
    """

    title: str
    hidden: int
    """H, the size of a token's row."""
    ffn: int
    """F, the inner size of one expert."""
    experts: int
    """E, the number of experts."""
    choices: int
    """K, the number of experts per token."""
    layers: int = 1
    """Number of mixture-of-experts layers; dense layers are not counted."""
    shared_ffn: int = 0
    """Inner size of all shared experts together; every rank computes them for its own tokens."""
    groups: int = 1
    """Number of groups of experts (DeepSeek-V3); 1 means no groups."""
    kept_groups: int = 1
    """Number of best groups, from which the router chooses a token's experts."""
    dtype: str = "bfloat16"
    """Dtype of weights, gradients and rows."""

    def __post_init__(self) -> None:
        """Raise unless all sizes are in range and consistent with each other, and the dtype is known."""
        for name in ("hidden", "ffn", "experts", "layers", "groups"):
            at_least("Block", name, getattr(self, name), 1)
        at_least("Block", "shared_ffn", self.shared_ffn, 0)
        at_least("Block", "choices", self.choices, 1, self.experts)
        at_least("Block", "kept_groups", self.kept_groups, 1, self.groups)
        checks.choice("Block", "dtype", self.dtype, tuple(DTYPES))
        if self.experts % self.groups:
            raise ValueError(f"Block: groups must divide {self.experts} experts, got {self.groups}")
        if self.kept_groups * (self.experts // self.groups) < self.choices:
            left = self.kept_groups * (self.experts // self.groups)
            raise ValueError(f"Block: kept_groups must leave at least {self.choices} experts, got {left}")

    def __str__(self) -> str:
        parts = [f"H {self.hidden}", f"F {self.ffn}", f"E {self.experts}", f"K {self.choices}"]
        if self.shared_ffn:
            parts.append(f"shared F {self.shared_ffn}")
        if self.groups > 1:
            parts.append(f"best {self.kept_groups} of {self.groups} groups")
        plural = "s" * (self.layers != 1)
        return f"{self.title}: {', '.join(parts)}, {self.layers} layer{plural}, {self.dtype}"

    @property
    def itemsize(self) -> int:
        """Return b, the size of one element in bytes."""
        return DTYPES[self.dtype].itemsize

    @property
    def weight_itemsize(self) -> int:
        """Return the size in bytes of a choice's weight; the router computes weights in float32 or float64."""
        return max(4, self.itemsize)

    @property
    def row_bytes(self) -> int:
        """Return H b, the number of bytes that a row takes in a message."""
        return self.hidden * self.itemsize

    @property
    def expert_parameters(self) -> int:
        """Return 3 H F, the number of weights of one expert."""
        return 3 * self.hidden * self.ffn

    @property
    def replicated_parameters(self) -> int:
        """Return H E + 3 H F_shared, the number of weights of router and shared experts; every rank has them."""
        return self.hidden * self.experts + 3 * self.hidden * self.shared_ffn


# Sizes from the published configurations. Dense layers are left out: one of GLM-4.5-Air, three of DeepSeek-V3.
PRESETS = {
    "mixtral-8x7b": Block("Mixtral 8x7B", 4096, 14336, 8, 2, 32),
    "olmoe-1b-7b": Block("OLMoE-1B-7B", 2048, 1024, 64, 8, 16),
    "qwen3-30b-a3b": Block("Qwen3-30B-A3B", 2048, 768, 128, 8, 48),
    "qwen3-235b-a22b": Block("Qwen3-235B-A22B", 4096, 1536, 128, 8, 94),
    "gpt-oss-20b": Block("GPT-OSS-20B", 2880, 2880, 32, 4, 24),
    "gpt-oss-120b": Block("GPT-OSS-120B", 2880, 2880, 128, 4, 36),
    "glm-4.5-air": Block("GLM-4.5-Air", 4096, 1408, 128, 8, 45, shared_ffn=1408),
    "deepseek-v3": Block("DeepSeek-V3", 7168, 2048, 256, 8, 58, shared_ffn=2048, groups=8, kept_groups=4),
}
"""Blocks of published models, by their names for the option ``--model``."""
