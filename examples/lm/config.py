"""What decides the losses of a run (``Config``), and the command line made from it.

Every field of ``Config`` is a flag of the same name and is stored in the checkpoint: two runs with equal configs on
one machine have equal losses, bit for bit. Flags that only say where results go or how often they are written are not
in it and may change when a run is resumed.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any

import torch


def _flag(default: Any, text: str, *, group: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "group": group, "choices": choices})


@dataclass(frozen=True)
class Config:
    ffn: str = _flag(
        "moe",
        "feed-forward layers: mixture of experts, or the dense one of equal FLOPs per token "
        "(its hidden size is that of the experts a byte meets)",
        group="model",
        choices=("moe", "dense"),
    )
    backend: str = _flag(
        "native",
        "what computes the MoE layers: pymoe's native operators or its pure PyTorch reference",
        group="model",
        choices=("native", "reference"),
    )
    layers: int = _flag(4, "transformer blocks", group="model")
    width: int = _flag(128, "size of the residual stream", group="model")
    heads: int = _flag(4, "attention heads", group="model")
    context: int = _flag(256, "bytes that the model sees", group="model")
    ffn_size: int = _flag(256, "hidden size of one expert", group="model")
    num_experts: int = _flag(8, "experts in a layer", group="model")
    top_k: int = _flag(2, "experts that each byte is sent to", group="model")
    shared_experts: int = _flag(0, "experts besides those that every byte passes through (DeepSeekMoE)", group="model")
    aux_loss_coef: float = _flag(0.01, "weight of the load-balancing loss (Switch Transformer)", group="model")
    bias_update_rate: float = _flag(
        0.0, "step of the expert bias that balances load without a loss (DeepSeek-V3); 0 turns it off", group="model"
    )
    text: str = _flag(
        "",
        "text file to train on (default: the Python manual that this interpreter carries, pydoc_data.topics)",
        group="training",
    )
    steps: int = _flag(1200, "optimizer steps", group="training")
    batch_size: int = _flag(4, "windows of --context bytes in a step", group="training")
    learning_rate: float = _flag(
        3e-3, "peak learning rate of AdamW; linear warm-up, then cosine to zero", group="training"
    )
    warmup: int = _flag(50, "steps of linear warm-up", group="training")
    weight_decay: float = _flag(0.1, "weight decay of matrices", group="training")
    grad_clip: float = _flag(1.0, "largest norm of the gradient", group="training")
    seed: int = _flag(0, "seed of the weights, of the order of the data and of the sample", group="training")
    threads: int = _flag(0, "CPU threads (0: what torch chooses); the sums of a run depend on it", group="training")

    @property
    def dense_ffn_size(self) -> int:
        """Hidden size of all experts that one byte meets together."""
        return (self.top_k + self.shared_experts) * self.ffn_size

    def learning_rate_at(self, step: int) -> float:
        """The rate of the update that makes step ``step`` (0-based)."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def problem(self) -> str | None:
        """One line that names the first field that makes no sense, or None."""
        positive = ("layers", "width", "heads", "context", "ffn_size", "num_experts", "top_k", "steps", "batch_size")
        for name in positive:
            if getattr(self, name) < 1:
                return f"{flag_name(name)} must be at least 1, got {getattr(self, name)}"
        for name in ("threads", "warmup", "shared_experts", "aux_loss_coef", "bias_update_rate", "weight_decay"):
            if not getattr(self, name) >= 0:  # nor NaN
                return f"{flag_name(name)} must not be negative, got {getattr(self, name)}"
        for name in ("learning_rate", "grad_clip"):
            if not getattr(self, name) > 0:
                return f"{flag_name(name)} must be positive, got {getattr(self, name)}"
        if self.width % (2 * self.heads):
            return f"--width must be a multiple of twice --heads, got {self.width} and {self.heads}"
        if self.top_k > self.num_experts:
            return f"--top-k must be at most --num-experts, got {self.top_k} and {self.num_experts}"
        return None

    def run_name(self) -> str:
        return "dense" if self.ffn == "dense" else f"moe-{self.backend}"


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of Config. Flags that are not given leave no attribute, see :func:`given`."""
    groups: dict[str, Any] = {}
    for item in fields(Config):
        name = item.metadata["group"]
        group = groups.setdefault(name, None) or parser.add_argument_group(f"{name} (stored in the checkpoint)")
        groups[name] = group
        shown = "" if item.default == "" else f" (default: {item.default})"
        choices = item.metadata["choices"]
        group.add_argument(
            flag_name(item.name),
            type=_value_type(item),
            choices=choices,
            metavar=None if choices else {"text": "FILE"}.get(item.name, item.name.split("_")[-1].upper()),
            default=argparse.SUPPRESS,
            help=item.metadata["help"] + shown,
        )


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of Config that stand on the command line."""
    return {item.name: getattr(arguments, item.name) for item in fields(Config) if hasattr(arguments, item.name)}


def differences(saved: Config, wished: dict[str, Any]) -> list[str]:
    """One line per flag that asks for something else than the saved run used."""
    known = asdict(saved)
    return [
        f"{flag_name(name)}: the saved run has {known[name]!r}, the command line says {value!r}"
        for name, value in wished.items()
        if known[name] != value
    ]


def resolve_threads(threads: int) -> int:
    return threads or torch.get_num_threads()


def _value_type(item: Field) -> type:
    return type(item.default)
