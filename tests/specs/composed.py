"""Raw calls of operators that are composed of other operators, and so have no kernel and no specification."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pymoe import reference
from pymoe._common.types import activation_options, is_gated, number_of
from pymoe.bench.operators import uniform
from specs import RawCall, routings
from specs.expert_activation import ACTIVATIONS
from specs.quantized_weight import FORMATS


def raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    experts = routings.distinct(6, 2, 4, generator)
    weights = uniform(6, 2, dtype=torch.float32, generator=generator)
    for name, kind in ACTIVATIONS.items():
        number, *numbers = activation_options(kind)
        dtype = torch.bfloat16 if number == 0 else torch.float32
        x = uniform(6, 5, dtype=dtype, generator=generator)
        w_in = uniform(4, 6 if is_gated(kind) else 3, 5, dtype=dtype, generator=generator)
        w_out = uniform(4, 5, 3, dtype=dtype, generator=generator)
        b_in, b_out = w_in[:, :, 0].contiguous(), w_out[:, :, 0].contiguous()
        network = (w_in, b_in, w_out, b_out, number)
        yield RawCall(name, "apply_experts", (x, experts, weights, *network, None, False, *numbers))
        logits = uniform(6, 4, dtype=torch.float32, generator=generator)
        gate = (None, 2, "softmax", True, 0, 0, 1.0)
        yield RawCall(name, "apply_chosen_experts", (x, logits, *gate, *network, None, *numbers))
        yield RawCall(name, "apply_experts_recorded", (x, experts, weights, *network, None, False, *numbers))
        yield RawCall(name, "apply_chosen_experts_recorded", (x, logits, *gate, *network, None, *numbers))
    one = (x[:1], experts[:1], weights[:1], w_in, None, w_out, None, number)
    yield RawCall("capacity", "apply_experts", (*one, 1, False, *numbers))
    yield RawCall("capacity", "apply_chosen_experts", (x, logits, *gate, *network, 1, *numbers))
    yield RawCall("capacity", "apply_experts_recorded", (*one, 1, False, *numbers))
    yield RawCall("capacity", "apply_chosen_experts_recorded", (x, logits, *gate, *network, 1, *numbers))
    yield RawCall("foreign", "apply_experts", (one[0], one[1].long() + 2, *one[2:], None, True, *numbers))
    for form, options in FORMATS.items():
        w_in, w_out = (
            reference.quantize_weight(uniform(*shape, dtype=torch.float32, generator=generator), *options)
            for shape in ((4, 6, 5), (4, 5, 3))
        )
        x = uniform(6, 5, dtype=torch.float32, generator=generator)
        quantized = (x, experts, weights, w_in.packed, None, w_out.packed, None)
        layout = [number_of(w_in), 6, number_of(w_out), 5]
        yield RawCall(form, "apply_quantized_experts", (*quantized, layout, 0, None, False, 0.0, 1.0, 0.0, False))
        chosen = (x, logits, *gate, *quantized[3:])
        yield RawCall(form, "apply_chosen_quantized_experts", (*chosen, layout, 0, None, 0.0, 1.0, 0.0, False))
        yield RawCall(f"{form}_capacity", "apply_quantized_experts", (*quantized, layout, 0, 2, False))
