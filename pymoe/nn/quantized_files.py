"""save_quantized and load_quantized: write and read a layer with quantised experts, in one safetensors file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from pymoe._common.contracts import check_format
from pymoe._common.types import ClampedSwiglu
from pymoe.nn.experts import SharedExperts
from pymoe.nn.losses import AuxiliaryLosses
from pymoe.nn.moe import MoE
from pymoe.nn.plain_calls import attached_to
from pymoe.nn.quantized_experts import QuantizedExperts, quantize_experts
from pymoe.nn.router import Router

FORMAT = 2
"""Version of the files: the layout of packed bytes, and the names of tensors and options."""
OLD_INT4 = ", whose integers of 4 bits have another layout: quantise the original weights again"
"""Text of errors about files of version 1, which differs from version 2 only in the layout of 4-bit integers."""

_ROUTER = ("top_k", "score", "renormalize", "bias_update_rate", "num_groups", "topk_groups", "scale")
_KEY = "pymoe"
"""Key in the file's metadata for the version, the format and the layer's options, as JSON."""


def is_read(version: object, *formats: tuple[object, object]) -> bool:
    """Return whether this pymoe can read files of ``version`` with weights of these (format, bits) pairs."""
    return version == FORMAT or (version == 1 and ("int", 4) not in formats)


def save_quantized(layer: MoE, path: str | os.PathLike[str]) -> None:
    """Write a layer whose experts are quantised, with its options, into a safetensors file.

    Args:
        layer: a :class:`MoE` after a call of :func:`quantize_experts`. Statistics are not saved.
        path: path of the file; an existing file is replaced once the new one is complete.

    Raises:
        ImportError: the package safetensors is not installed.
        TypeError: ``layer`` is not a :class:`MoE`, or its class is derived from it.
        ValueError: the experts of ``layer`` are not quantised, their weights have different formats, or the layer has
            something that a file cannot contain: parts of other classes, hooks, a ``forward`` of its own.

    Example:
        >>> import os, tempfile
        >>> layer = pymoe.nn.MoE(64, 128, num_experts=4, top_k=2).eval()
        >>> done = pymoe.nn.quantize_experts(layer, bits=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pymoe.nn.save_quantized(layer, f"{folder}/layer.pt")
        ...     os.listdir(folder)
        ['layer.pt']
    """
    if type(layer) is not MoE:
        raise TypeError(f"save_quantized: layer must be a MoE, got {type(layer).__name__}")
    if not isinstance(layer.experts, QuantizedExperts):
        raise ValueError(
            f"save_quantized: layer must have quantised experts, got {type(layer.experts).__name__}; call "
            f"quantize_experts(layer) first"
        )
    kinds = {"router": Router, "losses": AuxiliaryLosses, "experts": QuantizedExperts, "shared": SharedExperts}
    for name, kind in {"": MoE, **kinds}.items():
        part = layer.get_submodule(name) if name != "shared" or layer.shared is not None else None
        if part is not None and (lost := "another class" if type(part) is not kind else attached_to(part)):
            raise ValueError(f"save_quantized: layer must be as it was made, got {name or 'the layer'} with {lost}")
    tensors = {name: tensor.contiguous() for name, tensor in layer.state_dict().items()}
    experts = layer.experts
    formats = {(part.format, part.bits) for part in (experts, experts.w_in, experts.w_out)}
    if len(formats) > 1:
        raise ValueError(
            f"save_quantized: layer must have weights of one format and as many bits, got {sorted(formats)}"
        )
    described = {"version": FORMAT, "bits": experts.bits, "format": experts.format, "options": _options(layer)}
    path = Path(path)
    part_of_file = path.with_name(path.name + ".part")  # the layer may be mapped from the file at `path`
    _safetensors().torch.save_file(tensors, part_of_file, metadata={"format": "pt", _KEY: json.dumps(described)})
    os.replace(part_of_file, path)


def load_quantized(path: str | os.PathLike[str]) -> MoE:
    """Return the layer that :func:`save_quantized` has written, in evaluation mode, on the CPU.

    Args:
        path: path of the file.

    Returns:
        A layer with the options, packed weights and other parameters of the saved layer.

    Raises:
        ImportError: the package safetensors is not installed.
        OSError: there is no such file.
        ValueError: the file is of another kind or version, contains weights of an unknown format, is cut short, or its
            tensors do not match its options. Files of version 1 are refused only if they contain integers of 4 bits.

    Example:
        >>> import tempfile
        >>> layer = pymoe.nn.MoE(64, 128, num_experts=4, top_k=2).eval()
        >>> done = pymoe.nn.quantize_experts(layer, bits=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pymoe.nn.save_quantized(layer, f"{folder}/layer.pt")
        ...     pymoe.nn.load_quantized(f"{folder}/layer.pt").experts.w_in.bits
        4
    """
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            described = json.loads((file.metadata() or {}).get(_KEY, "{}"))
    except (safetensors.SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"load_quantized: expected a whole file of save_quantized, got {path}: {error}") from error
    version, bits = described.get("version"), described.get("bits")
    form = described.get("format", "int")  # files of earlier versions lack the key
    if not is_read(version, (form, bits)):
        raise ValueError(
            f"load_quantized: expected a file of save_quantized of version {FORMAT}, got {path} with "
            f"{'none' if version is None else version}{OLD_INT4 if version == 1 else ''}"
        )
    try:
        check_format("load_quantized", bits, form)
    except (TypeError, ValueError) as error:
        raise ValueError(f"load_quantized: expected a file of a known format, got {path}: {error}") from error
    options: dict[str, Any] = described["options"]
    if not isinstance(options["activation"], str):
        options["activation"] = ClampedSwiglu(*options["activation"])
    row_invariant = options.pop("row_invariant")
    with torch.device("meta"):
        layer = MoE(**options).eval()
    quantize_experts(layer, bits, form)
    try:
        layer.load_state_dict(safetensors.torch.load_file(path), assign=True)
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"load_quantized: expected the tensors that its options need, got {path}: {problem}"
        ) from error
    layer.router.row_invariant = row_invariant
    return layer


def _options(layer: MoE) -> dict[str, Any]:
    """Return the arguments that construct a layer like ``layer``, and its ``row_invariant``, which is set later."""
    experts, router = layer.experts, layer.router
    shared = 0 if layer.shared is None else layer.shared.ffn_size // experts.ffn_size
    return {
        "hidden_size": layer.hidden_size,
        "ffn_size": experts.ffn_size,
        "num_experts": layer.num_experts,
        **{name: getattr(router, name) for name in _ROUTER},
        "activation": experts.activation,
        "bias": experts.b_in is not None,
        "router_bias": router.bias is not None,
        "score_before_experts": layer.score_before_experts,
        "capacity_factor": layer.capacity_factor,
        "num_shared_experts": shared,
        "shared_gate": layer.shared is not None and layer.shared.gate,
        "aux_loss_coef": layer.losses.aux_loss_coef,
        "z_loss_coef": layer.losses.z_loss_coef,
        "backend": layer.backend,
        "row_invariant": router.row_invariant,
    }


def _safetensors() -> Any:
    """Import and return the package safetensors, with its submodule ``torch``."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("files of quantised layers need the package safetensors: pip install safetensors") from error
    return safetensors
