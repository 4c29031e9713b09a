"""grouped_linear and its raw gradients: samples, errors, shapes of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pymoe.bench.calls import Sample
from pymoe.bench.operators import offsets_of, random_counts, uniform
from specs import ErrorInput, RawCall, specify
from specs.samples import expanded, layouts


def random_sample(
    name: str,
    counts: list[int],
    sizes: tuple[int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    bias: bool = True,
    past_the_end: int = 0,
) -> Sample:
    experts, (outputs, inputs) = len(counts), sizes
    x = uniform(sum(counts) + past_the_end, inputs, dtype=dtype, generator=generator)
    weight = uniform(experts, outputs, inputs, dtype=dtype, generator=generator, scale=max(inputs, 1) ** -0.5)
    args = (x, weight, offsets_of(counts))
    return Sample(name, (*args, uniform(experts, outputs, dtype=dtype, generator=generator)) if bias else args)


def ordered(sample: Sample, generator: torch.Generator) -> Sample:
    """Return the sample with its rows in a random order; entries past the last offset name rows that do not exist."""
    x, _, offsets = sample.args[:3]
    order = torch.randperm(x.shape[0], generator=generator).int()
    order[int(offsets[-1]) :] = 2**31 - 1
    return Sample(f"{sample.name}_ordered", sample.args, {**sample.kwargs, "order": order})


def _samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    def make(name: str, counts: list[int], sizes: tuple[int, int], bias: bool = True, past_the_end: int = 0) -> Sample:
        return random_sample(name, counts, sizes, dtype, generator, bias, past_the_end)

    for experts in (1, 3, 8, 64, 160, 257):
        for rows in (experts // 2, 3 * experts + 1):
            yield make(f"E{experts}_S{rows}", random_counts(rows, experts, generator), (10, 7), bias=experts % 2 == 0)
    for outputs, inputs in ((1, 1), (1, 9), (9, 1), (16, 8), (17, 33), (47, 129), (64, 256), (31, 257), (96, 600)):
        yield make(f"N{outputs}_H{inputs}", [5, 0, 17, 2], (outputs, inputs))
    for rows in (1, 2, 5, 6, 7, 13, 14, 15, 29, 97):  # around the sizes of register tiles
        yield make(f"rows_{rows}", [rows, rows + 1], (rows + 2, 20), bias=False)
    yield make("no_rows", [0, 0, 0], (4, 5))
    yield make("no_rows_no_bias", [0], (4, 5), bias=False)
    yield make("only_rows_past_the_end", [0, 0], (4, 5), past_the_end=6)
    yield make("no_inputs", [2, 0, 3], (4, 0))
    yield make("no_inputs_no_bias", [2, 0, 3], (4, 0), bias=False)
    yield make("no_outputs", [2, 0, 3], (0, 4))
    yield make("one_row", [0, 0, 1, 0], (6, 5))
    yield make("all_rows_to_the_first", [300, 0, 0], (40, 30))
    yield make("all_rows_to_the_last", [0, 0, 200], (40, 30))
    yield make("every_other_expert_empty", [4, 0] * 20, (12, 11))
    yield make("rows_past_the_end", [3, 0, 8], (12, 11), past_the_end=9)
    yield make("skewed", random_counts(500, 16, generator, skew=1.5), (33, 21))
    yield make("several_blocks_of_rows", [1000, 3], (18, 9))
    yield make("several_blocks_of_columns", [3, 20], (1100, 9))

    for counts, sizes, past in (
        ([5, 0, 17, 2], (17, 33), 0),
        ([1, 40], (9, 1), 3),
        ([70, 3], (1, 9), 0),
        ([30, 0, 100], (64, 256), 5),
        ([0, 0], (4, 5), 6),
        ([0, 0], (4, 5), 0),
        ([2, 3], (4, 0), 1),
        ([2, 3], (0, 4), 1),
    ):
        name = f"rows_{'_'.join(map(str, counts))}_N{sizes[0]}_H{sizes[1]}_past_{past}"
        yield ordered(make(name, counts, sizes, True, past), generator)

    base = make("base", [4, 0, 9], (19, 23))
    x, weight, offsets, bias = base.args
    for name, view in layouts(x):
        yield Sample(f"x_{name}", (view, weight, offsets, bias))
    for name, view in layouts(weight):
        yield Sample(f"weight_{name}", (x, view, offsets, bias))
    for name, view in layouts(bias):
        yield Sample(f"bias_{name}", (x, weight, offsets, view))
    yield Sample("x_expanded", (expanded(x, 13), weight, offsets, bias))
    yield Sample("weight_expanded", (x, expanded(weight, 3), offsets, bias))
    yield Sample("bias_by_name", (x, weight, offsets), {"bias": bias})
    for name, view in layouts(x):
        yield ordered(Sample(f"x_{name}", (view, weight, offsets, bias)), generator)
    yield ordered(Sample("x_expanded", (expanded(x, 13), weight, offsets, bias)), generator)
    yield ordered(
        Sample("weight_transposed", (x, weight.transpose(1, 2).contiguous().transpose(1, 2), offsets)), generator
    )
    for name, view in layouts(torch.randperm(13, generator=generator).int()):
        yield Sample(f"order_{name}", (x, weight, offsets, bias), {"order": view})

    for name, value in (("nan", float("nan")), ("inf", float("inf")), ("minus_inf", -float("inf"))):
        marked = x.clone()
        marked[5, 3] = value
        yield Sample(f"{name}_in_x", (marked, weight, offsets, bias))
        marked = weight.clone()
        marked[2, 7, 1] = value
        yield Sample(f"{name}_in_weight", (x, marked, offsets, bias))
    unread = torch.full((20, 23), float("nan"), dtype=dtype)
    unread[:13] = x
    yield Sample("nan_past_the_end", (unread, weight, offsets, bias))
    yield Sample("zeros", (torch.zeros_like(x), weight, offsets))
    yield Sample("minus_zeros", (-torch.zeros_like(x), weight.abs(), offsets))


def _error_inputs() -> Iterator[ErrorInput]:
    x, weight, bias = torch.randn(5, 3), torch.randn(2, 4, 3), torch.randn(2, 4)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)

    def wrong(name: str, error: type[Exception], match: str, *args: object) -> ErrorInput:
        return ErrorInput(Sample(name, args), error, match)

    def cuts(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    yield wrong("x_not_tensor", TypeError, "x must be a tensor", [[1.0]], weight, offsets)
    yield wrong("x_integer", TypeError, "x must have dtype", x.int(), weight, offsets)
    yield wrong("x_rank", ValueError, "x must have shape (S, H)", x[0], weight, offsets)
    yield wrong("weight_not_tensor", TypeError, "weight must be a tensor", x, None, offsets)
    yield wrong("weight_dtype", TypeError, "weight must have dtype float32", x, weight.double(), offsets)
    yield wrong("weight_rank", ValueError, "weight must have shape (E, N, H)", x, weight[0], offsets)
    yield wrong("weight_H", ValueError, "H of x", x, weight.transpose(1, 2), offsets)
    yield wrong("weight_device", ValueError, "weight must be on the device", x, weight.to("meta"), offsets)
    yield wrong("offsets_not_tensor", TypeError, "offsets must be a tensor", x, weight, [0, 2, 5])
    yield wrong("offsets_dtype", TypeError, "offsets must have dtype int32", x, weight, offsets.long())
    yield wrong("offsets_rank", ValueError, "offsets must have shape (E + 1,)", x, weight, offsets[None])
    yield wrong("offsets_size", ValueError, "E + 1 of weight", x, weight, offsets[:2])
    yield wrong("offsets_start", ValueError, "offsets must start at 0", x, weight, cuts(1, 2, 5))
    yield wrong("offsets_negative", ValueError, "offsets must start at 0", x, weight, cuts(-1, 2, 5))
    yield wrong("offsets_decrease", ValueError, "offsets must not decrease", x, weight, cuts(0, 4, 3))
    yield wrong("offsets_past_the_end", IndexError, "offsets must lie in [0, S]", x, weight, cuts(0, 4, 6))
    yield wrong("offsets_huge", IndexError, "offsets must lie in [0, S]", x, weight, cuts(0, 2**31 - 1, 2**31 - 1))
    yield wrong("bias_not_tensor", TypeError, "bias must be a tensor", x, weight, offsets, 1.0)
    yield wrong("bias_dtype", TypeError, "bias must have dtype float32", x, weight, offsets, bias.half())
    yield wrong("bias_rank", ValueError, "bias must have shape (E, N)", x, weight, offsets, bias[0])
    yield wrong("bias_E", ValueError, "E of weight", x, weight, offsets, bias[:1])
    yield wrong("bias_N", ValueError, "N of weight", x, weight, offsets, bias[:, :3])

    def wrong_order(name: str, error: type[Exception], match: str, order: object) -> ErrorInput:
        return ErrorInput(Sample(f"order_{name}", (x, weight, offsets), {"order": order}), error, match)

    order = cuts(4, 2, 0, 1, 3)
    yield wrong_order("not_tensor", TypeError, "order must be a tensor", [4, 2, 0, 1, 3])
    yield wrong_order("dtype", TypeError, "order must have dtype int32", order.long())
    yield wrong_order("rank", ValueError, "order must have shape (S,)", order[None])
    yield wrong_order("size", ValueError, "S of x", order[:4])
    yield wrong_order("device", ValueError, "order must be on the device", order.to("meta"))
    yield wrong_order("negative", IndexError, "order must lie in [0, S)", cuts(4, 2, -1, 1, 3))
    yield wrong_order("past_the_end", IndexError, "order must lie in [0, S)", cuts(4, 2, 5, 1, 3))
    yield wrong_order("huge", IndexError, "order must lie in [0, S)", cuts(4, 2, 2**31 - 1, 1, 3))
    yield wrong_order("twice", ValueError, "order must not name a row twice", cuts(4, 2, 0, 2, 3))


def _gradient_samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, sizes, past in (
        ("plain", [2, 0, 3], (4, 3), 0),
        ("past_the_end", [1, 2], (3, 2), 2),
        ("no_rows", [0, 0], (3, 2), 0),
        ("one_feature", [3], (1, 1), 0),
    ):
        for bias in (False, True):
            sample = random_sample(name, counts, sizes, torch.float64, generator, bias, past)
            args = tuple(value.requires_grad_() if value.is_floating_point() else value for value in sample.args)
            sample = Sample(f"{name}_{'bias' if bias else 'no_bias'}", args)
            yield sample
            yield ordered(sample, generator)


def _raw_calls(generator: torch.Generator) -> Iterator[RawCall]:
    for dtype in (torch.float32, torch.bfloat16):
        for past in (0, 3):
            x, weight, offsets, bias = random_sample("raw", [3, 0, 5], (6, 4), dtype, generator, True, past).args
            grad = uniform(x.shape[0], 6, dtype=dtype, generator=generator)
            name = f"{str(dtype).removeprefix('torch.')}_past_{past}"
            yield RawCall(f"bias_{name}", "grouped_linear", (x, weight, offsets, bias))
            yield RawCall(f"no_bias_{name}", "grouped_linear", (x, weight, offsets, None))
            yield RawCall(f"transposed_{name}", "grouped_linear", (grad, weight.transpose(1, 2), offsets, None))
            yield RawCall(f"weight_grad_{name}", "grouped_linear_weight_grad", (grad, x, offsets))
            yield RawCall(f"bias_grad_{name}", "grouped_linear_bias_grad", (grad, offsets))
            order = torch.randperm(x.shape[0], generator=generator).int()
            yield RawCall(f"ordered_{name}", "grouped_linear", (x, weight, offsets, bias, order))
            yield RawCall(f"ordered_weight_grad_{name}", "grouped_linear_weight_grad", (grad, x, offsets, order))
            yield RawCall(f"ordered_bias_grad_{name}", "grouped_linear_bias_grad", (grad, offsets, order))


SPECS = [
    specify(
        "grouped_linear",
        samples=_samples,
        error_inputs=_error_inputs,
        gradient_samples=_gradient_samples,
        raw_calls=_raw_calls,
    )
]
