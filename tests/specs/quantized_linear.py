"""quantized_linear: samples, errors, raw calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType

import torch
from torch import Tensor

from pymoe import reference
from pymoe._common.contracts import QUANTIZED_FLOATING
from pymoe._common.types import QuantizedWeight, number_of
from pymoe.bench.calls import Sample
from pymoe.bench.operators import offsets_of, random_counts
from specs import ErrorInput, RawCall, grouped_linear, specify
from specs.comparison import assert_same_bits
from specs.quantized_weight import (
    EVERY_FORMAT,
    every_stored,
    in_format,
    super_blocks,
    wrong_weights,
)
from specs.samples import expanded, layouts, special_values, sprinkled

SIZES = ((1, 1), (1, 9), (9, 1), (64, 32), (65, 33), (63, 129), (64, 128), (130, 257), (20, 600))


def check_products_with_one_input(
    operators: ModuleType, weight: QuantizedWeight, weights: Tensor, rows: int, places: Iterable[int], flush: bool
) -> None:
    """Check that products with a 1 at one input, and zeros at the others, are the weights of this input, bit for bit.

    Args:
        operators: the backend.
        weight: packed, of one expert.
        weights: (N, H), its values.
        rows: number of rows, all alike.
        places: the inputs.
        flush: let the thread flush subnormal numbers.
    """
    for place in places:
        x = torch.zeros(rows, weight.input_features)
        x[:, place] = 1
        torch.set_flush_denormal(flush)
        try:
            y = operators.quantized_linear(x, weight, offsets_of([rows]))
        finally:
            torch.set_flush_denormal(False)
        expected = weights[:, place] + 0.0  # a sum has no negative zero
        assert_same_bits(y, expected.expand(rows, weight.output_features), f"input {place}")


def _sample(
    name: str,
    counts: list[int],
    sizes: tuple[int, int],
    form: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    bias: bool = True,
    past_the_end: int = 0,
) -> Sample:
    plain = grouped_linear.random_sample(name, counts, sizes, dtype, generator, bias, past_the_end)
    x, weight, *others = plain.args
    return Sample(name, (x, in_format(weight, *EVERY_FORMAT[form]), *others))


def _samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for form in EVERY_FORMAT:

        def make(
            name: str,
            counts: list[int],
            sizes: tuple[int, int],
            bias: bool = True,
            past_the_end: int = 0,
            form: str = form,
        ) -> Sample:
            return _sample(f"{name}_{form}", counts, sizes, form, dtype, generator, bias, past_the_end)

        for outputs, inputs in SIZES:
            yield make(f"N{outputs}_H{inputs}", [5, 0, 17, 2], (outputs, inputs))
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 25, 97, 200):  # around the rows of registers and of chunks
            yield make(f"rows_{rows}", [rows, rows + 1], (70, 40), bias=False)
        for experts in (1, 8, 67):
            yield make(f"E{experts}", random_counts(3 * experts, experts, generator), (10, 40))
        yield make("no_rows", [0, 0, 0], (4, 5))
        yield make("only_rows_past_the_end", [0, 0], (4, 5), past_the_end=6)
        yield make("rows_past_the_end", [3, 0, 8], (12, 11), past_the_end=9)
        yield make("no_inputs", [2, 0, 3], (4, 0))
        yield make("no_inputs_no_bias", [2, 0, 3], (4, 0), bias=False)
        yield make("no_outputs", [2, 0, 3], (0, 4))
        yield make("several_tasks_of_rows", [800, 3], (70, 9))

        for shape in ((), (0,), (1,), (5,), (2, 3), (2, 0, 3), (2, 1, 3)):
            x, weight, _, bias = make("all", [1], (70, 40)).args
            x = torch.randn(*shape, 40, generator=generator).to(dtype)
            name = "x".join(map(str, shape))
            yield Sample(f"all_rows_{name}_{form}", (x, weight, None, bias))
            strided = x.transpose(0, -1).contiguous().transpose(0, -1)
            yield Sample(f"all_rows_{name}_strided_{form}", (strided, weight, None))
        weight = make("all", [1], (5, 0)).args[1]
        yield Sample(f"all_rows_no_inputs_{form}", (torch.zeros(2, 3, 0, dtype=dtype), weight, None))
        x, weight, offsets, bias = make("base", [4, 0, 9], (70, 140)).args
        for name, view in layouts(x):
            yield Sample(f"x_{name}_{form}", (view, weight, offsets, bias))
        for name, view in layouts(bias):
            yield Sample(f"bias_{name}_{form}", (x, weight, offsets, view))
        for name, view in layouts(weight.packed):
            yield Sample(f"packed_{name}_{form}", (x, weight._replace(packed=view), offsets, bias))
        yield Sample(f"x_expanded_{form}", (expanded(x, 13), weight, offsets, bias))
        yield Sample(f"bias_by_name_{form}", (x, weight, offsets), {"bias": bias})
        yield Sample(f"special_{form}", (sprinkled(x, generator, 0.01), weight, offsets, bias))
        yield Sample(f"special_finite_{form}", (sprinkled(x, generator, finite=True), weight, offsets, bias))
        yield Sample(f"all_special_{form}", (special_values(dtype).repeat(13, 10), weight, offsets, bias))
        yield Sample(f"special_bias_{form}", (x, weight, offsets, sprinkled(bias, generator)))
        yield Sample(f"zeros_{form}", (torch.zeros_like(x), weight, offsets))
        steps = (2.0 ** torch.arange(-140.0, 128.0, 268 / 140)).to(dtype)  # a step of each size, where the dtype has it
        yield Sample(f"steps_{form}", (x * steps.clamp(max=torch.finfo(dtype).max / 4), weight, offsets, bias))
        unread = torch.full((20, 140), float("nan"), dtype=dtype)
        unread[:13] = x
        yield Sample(f"nan_past_the_end_{form}", (unread, weight, offsets, bias))
    for name, codes, *others in every_stored(generator):
        weight = reference.pack_weight(codes, *others)
        x = torch.randn(13, weight.input_features, generator=generator).to(dtype)
        cuts = offsets_of(random_counts(13, len(codes), generator)) if len(codes) else offsets_of([])
        yield Sample(f"stored_{name}", (x, weight, cuts))
    for name, weight in super_blocks(generator):
        x = torch.randn(13, weight.input_features, generator=generator).to(dtype)
        yield Sample(name, (x, weight, offsets_of(random_counts(13, len(weight.packed), generator))))


def _error_inputs() -> Iterator[ErrorInput]:
    x, bias = torch.randn(5, 40), torch.randn(2, 70)
    weight = reference.quantize_weight(torch.randn(2, 70, 40), 8)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    on_meta = weight._replace(packed=weight.packed.to("meta"))

    def wrong(name: str, error: type[Exception], match: str, *args: object) -> ErrorInput:
        return ErrorInput(Sample(name, args), error, match)

    def cuts(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    for name, value, error, match in wrong_weights():
        yield wrong(name, error, match, x, value, offsets)
    yield wrong("x_not_tensor", TypeError, "x must be a tensor", [[1.0]], weight, offsets)
    yield wrong("x_integer", TypeError, "x must have dtype float32 or bfloat16 or float16", x.int(), weight, offsets)
    yield wrong("x_double", TypeError, "x must have dtype float32 or bfloat16 or float16", x.double(), weight, offsets)
    yield wrong("x_rank", ValueError, "x must have shape (S, H)", x[0], weight, offsets)
    yield wrong("x_H", ValueError, "x must have size 40 (weight.input_features)", x[:, :9], weight, offsets)
    yield wrong("packed_device", ValueError, "weight.packed must be on the device", x, on_meta, offsets)
    yield wrong("offsets_not_tensor", TypeError, "offsets must be a tensor", x, weight, [0, 2, 5])
    yield wrong("offsets_None", ValueError, "offsets must be a tensor unless E of weight.packed is 1", x, weight, None)
    yield wrong("all_rows_x_rank", ValueError, "x must have shape (..., H), got ()", x[0, 0], weight, None)
    yield wrong("all_rows_x_H", ValueError, "x must have size 40 (weight.input_features)", x[:, :9], weight, None)
    yield wrong("offsets_dtype", TypeError, "offsets must have dtype int32", x, weight, offsets.long())
    yield wrong("offsets_rank", ValueError, "offsets must have shape (E + 1,)", x, weight, offsets[None])
    yield wrong("offsets_size", ValueError, "E + 1 of weight", x, weight, offsets[:2])
    yield wrong("offsets_start", ValueError, "offsets must start at 0, got 1", x, weight, cuts(1, 2, 5))
    yield wrong("offsets_negative", ValueError, "offsets must start at 0, got -1", x, weight, cuts(-1, 2, 5))
    yield wrong("offsets_decrease", ValueError, "offsets must not decrease, got 3", x, weight, cuts(0, 4, 3))
    yield wrong("offsets_past_the_end", IndexError, "offsets must lie in [0, S]", x, weight, cuts(0, 4, 6))
    yield wrong("bias_not_tensor", TypeError, "bias must be a tensor", x, weight, offsets, 1.0)
    yield wrong("bias_dtype", TypeError, "bias must have dtype float32", x, weight, offsets, bias.half())
    yield wrong("bias_rank", ValueError, "bias must have shape (E, N)", x, weight, offsets, bias[0])
    yield wrong("bias_E", ValueError, "E of weight", x, weight, offsets, bias[:1])
    yield wrong("bias_N", ValueError, "weight.output_features", x, weight, offsets, bias[:, :3])


def _raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    for form in EVERY_FORMAT:
        for dtype in (torch.float32, torch.bfloat16):
            x, weight, offsets, bias = _sample("raw", [3, 0, 5], (6, 40), form, dtype, generator, True, 2).args
            number, name = number_of(weight), f"{form}_{str(dtype).removeprefix('torch.')}"
            yield RawCall(f"bias_{name}", "quantized_linear", (x, weight.packed, offsets, bias, number, 6))
            yield RawCall(f"no_bias_{name}", "quantized_linear", (x, weight.packed, offsets, None, number, 6))
            grad = torch.randn(len(x), 6, generator=generator).to(dtype)
            yield RawCall(f"grad_{name}", "quantized_linear_input_grad", (grad, weight.packed, offsets, number, 40))
            one = weight.packed[:1].contiguous()
            yield RawCall(
                f"grad_all_rows_{name}", "quantized_linear_input_grad", (grad[:, None], one, None, number, 40)
            )
            yield RawCall(f"all_rows_{name}", "quantized_linear", (x[:, None], one, None, bias[:1], number, 6))


SPECS = [
    specify(
        "quantized_linear",
        samples=_samples,
        error_inputs=_error_inputs,
        raw_calls=_raw_calls,
        dtypes=QUANTIZED_FLOATING,
    )
]
