"""The options of a mixture: their checks, and the fallback for rows with too few answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from pymoe._common import checks
from pymoe._common.seconds import check_seconds
from pymoe._common.types import FLOATING
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.nested import nested_compare, nested_flatten, nested_map, nested_pack
from pymoe.runtime.protocols import check_is_backend
from pymoe.runtime.schema import under_autocast

NAME = "MixtureOfExpertBackends"
Fallback = Literal["zeros", "input"] | Callable[..., Any]


class Rules(NamedTuple):
    """The arguments of MixtureOfExpertBackends for waiting and failures, with ``raises`` in place of ``on_too_few``."""

    k_min: int
    backward_k_min: int
    forward_timeout: float | None
    timeout_after_k_min: float | None
    backward_timeout: float | None
    rest_after: int | None
    rest: float
    detect_anomalies: bool
    raises: bool
    """True if too few answers are an error (``on_too_few="raise"``)."""


def check_mixture(backends: Sequence[Any], top_k: int, max_experts: int | None, rules: Rules, on_too_few: str) -> int:
    """Check ``backends`` and the options, and return the number of slots; raise TypeError or ValueError."""
    if not backends:
        raise ValueError(f"{NAME}: backends must hold at least one backend, got none")
    if max_experts is None:
        max_experts = len(backends)
    checks.integer(NAME, "max_experts", max_experts, len(backends), None, "at least the number of backends")
    checks.integer(NAME, "top_k", top_k, 1, max_experts, f"in 1..max_experts ({max_experts})")
    checks.integer(NAME, "k_min", rules.k_min, 1, top_k, f"in 1..top_k ({top_k})")
    checks.integer(NAME, "backward_k_min", rules.backward_k_min, 0, top_k, f"in 0..top_k ({top_k})")
    checks.choice(NAME, "on_too_few", on_too_few, ("raise", "fallback"))
    if rules.rest_after is not None:
        checks.integer(NAME, "rest_after", rules.rest_after, 1, None, "at least 1, or None")
    if rules.rest is None:
        raise TypeError(f"{NAME}: rest must be a number of seconds, got None (rest_after=None disables backoff)")
    for name in ("rest", "forward_timeout", "timeout_after_k_min", "backward_timeout"):
        if (seconds := getattr(rules, name)) is None:
            continue
        check_seconds(f"{NAME}: {name}", seconds)
    return max_experts


def check_schemas(backend: Any, expected: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """Return the forward and outputs schemas of ``backend``, a new member of a mixture.

    Raises:
        TypeError: ``backend`` is not a :class:`~pymoe.runtime.Backend`.
        ValueError: its schemas differ from ``expected``, the schemas of the other members, or its outputs cannot be
            weighted.
    """
    check_is_backend(NAME, backend)
    info = backend.get_info()
    schemas = info["forward_schema"], info["outputs_schema"]
    for leaf in nested_flatten(schemas[1]):
        if not isinstance(leaf, BatchTensorProto) or leaf.dtype not in FLOATING:
            raise ValueError(
                f"{NAME}: every output must be a tensor of float32, float64, bfloat16 or float16, to be weighted; "
                f"{backend.name!r} returns {leaf!r}"
            )
    if not nested_flatten(schemas[1]):
        raise ValueError(f"{NAME}: {backend.name!r} returns no tensor")
    if expected is not None:
        for what, wanted, got in zip(("takes", "returns"), expected, schemas, strict=True):
            if not nested_compare(wanted, got) or nested_map(_kind, wanted) != nested_map(_kind, got):
                raise ValueError(f"{NAME}: {backend.name!r} {what} {got!r}, but the other backends {wanted!r}")
    return schemas


def _kind(leaf: Any) -> Any:
    """Return the properties of an item of a schema that must be equal in all backends; devices may differ."""
    if isinstance(leaf, BatchTensorProto):
        return (leaf.size, leaf.dtype)
    return leaf


def check_fallback(fallback: Fallback, first: BatchTensorProto, output_protos: tuple[BatchTensorProto, ...]) -> None:
    """Raise ValueError for an invalid fallback, or for one that does not fit the experts' first input and outputs."""
    if not callable(fallback) and fallback not in ("zeros", "input"):
        raise ValueError(f"{NAME}: fallback must be 'zeros', 'input' or a callable, got {fallback!r}")
    if fallback == "input" and output_protos != (first.replace(device=output_protos[0].device),):
        raise ValueError(f"{NAME}: fallback='input' needs one output like the first tensor, {first!r}")


def fall_back(
    fallback: Fallback,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    arguments: tuple[Any, Any],
    outputs_schema: Any,
    output_protos: Sequence[BatchTensorProto],
    few_T: Tensor,
) -> list[Tensor]:
    """Return ``outputs`` with the rows that the mask ``few_T`` marks replaced with rows of the fallback.

    Args:
        fallback: ``"input"`` or a callable, not ``"zeros"``.
        outputs: the flat outputs of the mixture.
        inputs: the tensors among ``arguments``.
        arguments: the call's (args, kwargs).
        outputs_schema: the structure that a callable must return.
        output_protos: the description of each of ``outputs``.
        few_T: (T,) bool, on the CPU.

    Raises:
        TypeError, ValueError: the callable returns another structure, tensors of other dtypes or shapes, or another
            number of rows.
    """
    rows = few_T.nonzero().flatten().to(inputs[0].device)
    if fallback == "input":
        flat: Sequence[Any] = [inputs[0][rows]]
    else:
        assert callable(fallback)
        leaves = iter([x[rows] for x in inputs])
        args, kwargs = nested_pack(
            [next(leaves) if isinstance(leaf, Tensor) else leaf for leaf in nested_flatten(arguments)], arguments
        )
        result = fallback(*args, **kwargs)
        if not nested_compare(result, outputs_schema):
            raise ValueError(f"{NAME}: the fallback must return {outputs_schema!r}, got {result!r}")
        flat = nested_flatten(result)
    flat = [under_autocast(one, proto) for one, proto in zip(flat, output_protos, strict=True)]
    for proto, one in zip(output_protos, flat, strict=True):
        proto.replace(device=None).check(one, f"{NAME}: what the fallback returns")
        if len(one) != len(rows):
            raise ValueError(f"{NAME}: the fallback must return {len(rows)} rows, got {len(one)}")
    return [output.index_copy(0, rows, one) for output, one in zip(outputs, flat, strict=True)]
