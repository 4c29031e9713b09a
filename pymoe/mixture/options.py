"""Checks of what a mixture is made with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pymoe.reference import checks
from pymoe.reference.checks import FLOATING
from pymoe.runtime.backend import ExpertBackend
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.nested import nested_compare, nested_flatten, nested_map

NAME = "MixtureOfExpertBackends"


def check_options(
    backends: Sequence[Any],
    top_k: int,
    max_experts: int | None,
    k_min: int,
    backward_k_min: int,
    on_too_few: str,
    rest_after: int | None,
    *,
    rest: float,
    **timeouts: float | None,
) -> int:
    """Raises ValueError or TypeError; returns how many slots there are."""
    if not backends:
        raise ValueError(f"{NAME}: at least one backend is needed")
    if max_experts is None:
        max_experts = len(backends)
    checks.integer(NAME, "max_experts", max_experts, len(backends), None, "at least the number of backends")
    checks.integer(NAME, "top_k", top_k, 1, max_experts, f"in 1..max_experts ({max_experts})")
    checks.integer(NAME, "k_min", k_min, 1, top_k, f"in 1..top_k ({top_k})")
    checks.integer(NAME, "backward_k_min", backward_k_min, 0, top_k, f"in 0..top_k ({top_k})")
    checks.choice(NAME, "on_too_few", on_too_few, ("raise", "fallback"))
    if rest_after is not None:
        checks.integer(NAME, "rest_after", rest_after, 1, None, "at least 1, or None")
    if rest is None:
        raise TypeError(f"{NAME}: rest must be a number of seconds; rest_after=None is how nobody rests")
    for name, seconds in {"rest": rest, **timeouts}.items():
        if seconds is None:
            continue
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(f"{NAME}: {name} must be a number of seconds or None, got {type(seconds).__name__}")
        if not seconds >= 0:
            raise ValueError(f"{NAME}: {name} must be at least 0 seconds, got {seconds}")
    return max_experts


def check_schemas(backend: Any, expected: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """The forward and outputs schemas of ``backend``, if a mixture can use it beside those with the ``expected`` ones.

    Raises:
        TypeError: no ExpertBackend.
        ValueError: other schemas, or outputs that cannot be weighted.
    """
    if not isinstance(backend, ExpertBackend):
        raise TypeError(f"{NAME}: a backend must be an ExpertBackend, got {type(backend).__name__}")
    info = backend.get_info()
    schemas = info["forward_schema"], info["outputs_schema"]
    for leaf in nested_flatten(schemas[1]):
        if not isinstance(leaf, BatchTensorProto) or leaf.dtype not in FLOATING:
            raise ValueError(
                f"{NAME}: every output must be a tensor of float32, float64, bfloat16 or float16, to be weighted; "
                f"{backend.name!r} returns {leaf!r}"
            )
    if not nested_flatten(schemas[1]):
        raise ValueError(f"{NAME}: {backend.name!r} returns nothing")
    if expected is not None:
        for what, mine, its in zip(("takes", "returns"), expected, schemas, strict=True):
            if not nested_compare(mine, its) or nested_map(_kind, mine) != nested_map(_kind, its):
                raise ValueError(f"{NAME}: {backend.name!r} {what} {its!r}, and the other backends {mine!r}")
    return schemas


def _kind(leaf: Any) -> Any:
    """What must be equal in all backends: where tensors lie does not matter."""
    if isinstance(leaf, BatchTensorProto):
        return (leaf.size, leaf.dtype)
    return leaf
