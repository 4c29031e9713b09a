"""gate_topk: softmax and sigmoid, with bias and groups, on ties and on everything that is not a number."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

import pymoe.ops
import pymoe.reference
from pymoe.bench.calls import Sample
from pymoe.bench.operators import uniform
from specs import ErrorInput, RawCall, specify
from specs.samples import expanded, layouts, special_values, sprinkled, tied

SHAPES = (
    (0, 8, 2), (1, 1, 1), (7, 3, 2), (33, 3, 3), (40, 8, 2), (21, 8, 8), (64, 64, 1), (65, 64, 2), (31, 64, 6),
    (50, 64, 64), (30, 100, 3), (37, 160, 8), (9, 160, 16), (11, 160, 17), (5, 160, 160), (19, 257, 4), (18, 257, 10),
    (3, 257, 257), (2, 1500, 40),
)  # fmt: skip


def _options(num_experts: int, k: int, bias: Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield options for calls of the operator; every case of :func:`samples` uses a share of them in turn."""
    yield "", {}
    yield "sigmoid", {"score": "sigmoid"}
    yield "plain", {"renormalize": False, "scale": 2.5}
    yield "sigmoid_plain", {"score": "sigmoid", "renormalize": False, "scale": 0.25}
    yield "bias", {"bias": bias}
    yield "sigmoid_bias", {"score": "sigmoid", "bias": bias, "scale": -1.5}
    for num_groups in (2, 4, 8, num_experts):
        if num_experts % num_groups == 0:
            size = num_experts // num_groups
            topk_groups = max((k + size - 1) // size, num_groups // 2, 1)
            groups = {"num_groups": num_groups, "topk_groups": topk_groups}
            yield f"groups{topk_groups}of{num_groups}", groups
            yield f"sigmoid_bias_groups{topk_groups}of{num_groups}", {"score": "sigmoid", "bias": bias, **groups}


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for i, (tokens, num_experts, k) in enumerate(SHAPES):
        logits = uniform(tokens, num_experts, dtype=dtype, generator=generator, scale=4.0)
        bias = uniform(num_experts, dtype=torch.float32, generator=generator, scale=0.3)
        for name, options in islice(_options(num_experts, k, bias), i % 3, None, 3):
            yield Sample(f"T{tokens}_E{num_experts}_K{k}_{name}", (logits, k), options)
    bias = uniform(64, dtype=torch.float32, generator=generator, scale=0.3)
    special = special_values(dtype).repeat(9, 5)[:, :64]
    logits = uniform(45, 64, dtype=dtype, generator=generator, scale=4.0)
    hard = (
        ("tied", tied(45, 64, dtype=dtype, generator=generator)),
        ("equal", torch.zeros(20, 64, dtype=dtype)),
        ("negative_zeros", torch.full((20, 64), -0.0, dtype=dtype)),
        ("special", sprinkled(logits, generator)),
        ("special_finite", sprinkled(logits, generator, finite=True)),
        ("mostly_special", sprinkled(logits, generator, share=0.9)),
        ("all_special", special),
        ("nan", torch.full((9, 64), float("nan"), dtype=dtype)),
        ("masked", torch.where(torch.rand(45, 64, generator=generator) < 0.95, -torch.inf, logits)),
        ("large", logits * 1000),
        ("skewed", logits + torch.linspace(0, 30, 64).to(dtype)),
        *layouts(logits),
        ("token_expanded", expanded(logits, 45)),
        ("expert_expanded", expanded(logits, 64, dim=1)),
    )
    for i, (name, value) in enumerate(hard):
        for option, options in islice(_options(64, 6, bias), i % 3, None, 3):
            yield Sample(f"{name}_{option}", (value, 6), options)
    for name, value in (
        ("special", sprinkled(bias, generator)),
        ("tied", tied(64, dtype=torch.float32, generator=generator)),
        ("masking", torch.where(torch.arange(64) % 3 > 0, -torch.inf, bias)),
        ("bfloat16", bias.bfloat16()),
        ("float64", bias.double()),
        *layouts(bias),
        ("expanded", expanded(bias, 64)),
    ):
        yield Sample(f"bias_{name}", (logits, 6), {"bias": value})
        groups = {"num_groups": 8, "topk_groups": 3}
        yield Sample(f"bias_{name}_groups", (logits, 6), {"bias": value, "score": "sigmoid", **groups})


def error_inputs() -> Iterator[ErrorInput]:
    logits, bias = torch.zeros(4, 6), torch.zeros(6)
    for name, args, options, error, match in (
        ("logits_list", ([[1.0]], 1), {}, TypeError, "logits must be a tensor, got list"),
        ("logits_int", (logits.int(), 1), {}, TypeError, "logits must have dtype float32"),
        ("logits_flat", (logits[0], 1), {}, ValueError, "logits must have shape (T, E), got (6,)"),
        ("logits_three_dimensions", (logits[None], 1), {}, ValueError, "logits must have shape (T, E), got (1, 4, 6)"),
        ("no_experts", (logits[:, :0], 1), {}, ValueError, "k must be in 1..E (E = 0), got 1"),
        ("k_zero", (logits, 0), {}, ValueError, "k must be in 1..E (E = 6), got 0"),
        ("k_negative", (logits, -1), {}, ValueError, "k must be in 1..E (E = 6), got -1"),
        ("k_too_large", (logits, 7), {}, ValueError, "k must be in 1..E (E = 6), got 7"),
        ("k_float", (logits, 2.0), {}, TypeError, "k must be an int, got float"),
        ("k_bool", (logits, True), {}, TypeError, "k must be an int, got bool"),
        ("too_many_slots", (logits[:1].expand(2**30, 6), 2), {}, ValueError, "T * k must be below 2**31"),
        ("score_unknown", (logits, 2), {"score": "tanh"}, ValueError, "one of 'softmax', 'sigmoid', got 'tanh'"),
        ("score_none", (logits, 2), {"score": None}, TypeError, "score must be a string, got NoneType"),
        ("renormalize_int", (logits, 2), {"renormalize": 1}, TypeError, "renormalize must be a bool, got int"),
        ("scale_string", (logits, 2), {"scale": "1"}, TypeError, "scale must be a float, got str"),
        ("scale_infinite", (logits, 2), {"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
        ("scale_huge", (logits, 2), {"scale": 10**400}, ValueError, "scale must be finite, got 1000"),
        ("scale_nan", (logits, 2), {"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
        ("bias_list", (logits, 2), {"bias": [0.0] * 6}, TypeError, "bias must be a tensor, got list"),
        ("bias_int", (logits, 2), {"bias": bias.int()}, TypeError, "bias must have dtype float32"),
        ("bias_rank", (logits, 2), {"bias": logits}, ValueError, "bias must have shape (E,), got (4, 6)"),
        ("bias_size", (logits, 2), {"bias": bias[1:]}, ValueError, "bias must have size 6 (E of logits)"),
        ("bias_device", (logits, 2), {"bias": bias.to("meta")}, ValueError, "bias must be on the device of logits"),
        ("groups_alone", (logits, 2), {"num_groups": 2}, ValueError, "must be given together, got num_groups=2"),
        ("topk_groups_alone", (logits, 2), {"topk_groups": 2}, ValueError, "must be given together"),
        ("groups_uneven", (logits, 2), {"num_groups": 4, "topk_groups": 2}, ValueError, "must divide E (E = 6), got 4"),
        ("groups_zero", (logits, 2), {"num_groups": 0, "topk_groups": 0}, ValueError, "num_groups must be in 1..E"),
        ("groups_float", (logits, 2), {"num_groups": 2.0, "topk_groups": 1}, TypeError, "num_groups must be an int"),
        (
            "topk_groups_many",
            (logits, 2),
            {"num_groups": 2, "topk_groups": 3},
            ValueError,
            "topk_groups must be in 1..num_groups, got 3",
        ),
        ("groups_too_few", (logits, 3), {"num_groups": 3, "topk_groups": 1}, ValueError, "at least k = 3 experts"),
    ):
        yield ErrorInput(Sample(name, args, options), error, match)


def gradient_samples(generator: torch.Generator) -> Iterator[Sample]:
    bias = torch.linspace(0.3, -0.2, 6)
    for tokens, k in ((5, 2), (3, 6), (4, 1)):
        logits = uniform(tokens, 6, dtype=torch.float64, generator=generator).requires_grad_()
        for score in ("softmax", "sigmoid"):
            for renormalize in (True, False):
                options: dict[str, Any] = {"score": score, "renormalize": renormalize, "scale": 1.7}
                name = f"T{tokens}_K{k}_{score}{'_renormalize' * renormalize}"
                yield Sample(name, (logits, k), options)
                if k == 2:
                    yield Sample(f"{name}_bias", (logits, k), {**options, "bias": bias})
                    groups = {"num_groups": 3, "topk_groups": 1}
                    yield Sample(f"{name}_groups", (logits, k), {**options, **groups})


def raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        logits = uniform(9, 12, dtype=dtype, generator=generator)
        bias = uniform(12, dtype=wide, generator=generator)
        grad = uniform(9, 2, dtype=wide, generator=generator)
        experts = pymoe.reference.gate_topk(logits, 2).experts
        for score in ("softmax", "sigmoid"):
            name = f"{dtype}_{score}"
            yield RawCall(name, "gate_topk", (logits, None, 2, score, True, 0, 0, 1.0))
            yield RawCall(f"{name}_bias", "gate_topk", (logits, bias, 2, score, False, 4, 2, 2.5))
            yield RawCall(name, "gate_routing", (logits, None, 2, score, True, 0, 0, 1.0, None))
            yield RawCall(f"{name}_bias", "gate_routing", (logits, bias, 3, score, False, 4, 2, 2.5, 2))
            for on_logits in (True, False):
                args = (grad, logits, experts, score, True, on_logits, 1.0)
                yield RawCall(f"{name}_{on_logits}", "gate_topk_backward", args)
    yield RawCall("empty", "gate_topk", (torch.zeros(0, 5), None, 2, "softmax", True, 0, 0, 1.0))
    yield RawCall("empty", "gate_routing", (torch.zeros(0, 5), None, 2, "softmax", True, 0, 0, 1.0, 1))
    wide = uniform(300, 65, dtype=torch.float32, generator=generator)  # several tiles of the gate
    yield RawCall("tiles", "gate_routing", (wide, None, 8, "softmax", True, 0, 0, 1.0, 30))
    yield RawCall(
        "many experts",
        "gate_routing",
        (uniform(2, 1025, dtype=torch.float32, generator=generator), None, 8, "softmax", True, 0, 0, 1.0, None),
    )
    yield RawCall("many", "gate_topk", (torch.zeros(3, 40), None, 20, "softmax", True, 0, 0, 1.0))


SPECS = [
    specify(
        "gate_topk",
        samples=samples,
        error_inputs=error_inputs,
        gradient_samples=gradient_samples,
        raw_calls=raw_calls,
    )
]
