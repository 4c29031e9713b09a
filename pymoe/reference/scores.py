"""Scores of a router's logits, and the order in which experts are chosen.

A choice must not depend on the last bit of some library's ``exp``. If experts are chosen by their scores (with a bias
or groups), the scores are therefore computed by a fixed sequence of IEEE additions, multiplications and divisions:
the same here, in the CPU kernels for every instruction set, and in the CUDA kernels. The choice is then exact too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe._common.types import Score

SUM_LANES = 16
"""Number of interleaved lanes in which sums over experts run; a balanced tree then adds up the lanes."""


SUM_FLOOR = 1e-20
"""Smallest divisor: it replaces smaller sums of scores (as in TransformerEngine and DeepSeek-V3)."""


def exp_in_fixed_steps(x: Tensor) -> Tensor:
    """Return e^x within 2 ulp, by steps that round alike everywhere (Cody-Waite reduction and a polynomial).

    With x = n ln 2 + r and |r| <= ln 2 / 2, e^x is 2^n e^r. A polynomial computes e^r (from Cephes' expf for float32,
    the Taylor series to degree 13 for float64). It is multiplied by 2^n in two factors, so that subnormal results round
    once. The result is not differentiable.
    """
    if x.dtype == torch.float64:
        low, high, magic = -746.0, 710.0, 6755399441055744.0
        ln2_high, ln2_low = 6.93145751953125e-1, 1.42860682030941723212e-6
        coefficients = [1.0]
        for degree in range(2, 14):
            coefficients.append(coefficients[-1] * degree)
        coefficients = [1.0 / factorial for factorial in reversed(coefficients[1:])]
        integer, bias, mantissa = torch.int64, 1023, 52
    else:
        low, high, magic = -104.0, 89.0, 12582912.0
        ln2_high, ln2_low = 0.693359375, -2.12194440e-4
        coefficients = [
            1.9875691500e-4,
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ]
        integer, bias, mantissa = torch.int32, 127, 23
    # clamp() keeps NaN.
    clamped = x.clamp(low, high)
    # Adding and subtracting ``magic`` rounds to an integer.
    n = (clamped * 1.44269504088896341 + magic) - magic
    r = (clamped - n * ln2_high) - n * ln2_low
    p = torch.full_like(r, coefficients[0])
    for coefficient in coefficients[1:]:
        p = p * r + coefficient
    p = (p * (r * r) + r) + 1.0
    exponent = torch.where(x == x, n, 0.0).to(integer)
    half = exponent >> 1
    scale_a = ((half + bias) << mantissa).view(x.dtype)
    scale_b = ((exponent - half + bias) << mantissa).view(x.dtype)
    return (p * scale_a) * scale_b


def sum_in_lanes(values: Tensor) -> Tensor:
    """Return the sum (T, 1) of the rows of (T, E) values, added in 16 lanes.

    Lane i adds the values i, i + 16, and so on. Then lane i + 8 is added to lane i, then i + 4, i + 2 and i + 1.
    """
    lanes = values.new_zeros((values.shape[0], SUM_LANES))
    for chunk in values.split(SUM_LANES, dim=1):
        lanes = lanes + torch.nn.functional.pad(chunk, (0, SUM_LANES - chunk.shape[1]))
    while lanes.shape[1] > 1:
        lower, upper = lanes.chunk(2, dim=1)
        lanes = lower + upper
    return lanes


def scores_in_fixed_steps(logits: Tensor, score: Score) -> Tensor:
    """Return the (T, E) scores of float32 or float64 logits, in steps that round the same everywhere.

    Not differentiable.
    """
    if score == "sigmoid":
        return 1.0 / (exp_in_fixed_steps(-logits) + 1.0)
    e = exp_in_fixed_steps(logits - logits.amax(dim=1, keepdim=True))
    return e / sum_in_lanes(e)


def order_key(values: Tensor) -> Tensor:
    """Return integers that sort as the gate ranks values: -0 ties with +0; NaNs tie with each other, above all numbers.

    The key of a float32 is an int32, the key of a float64 an int64. No value has the least integer as its key, so the
    gate uses that integer as the key of experts that must not be chosen.
    """
    integer = torch.int64 if values.dtype == torch.float64 else torch.int32
    largest = torch.iinfo(integer).max
    bits = torch.where(values == 0, 0.0, values).view(integer)
    key = torch.where(bits < 0, bits ^ largest, bits)
    return torch.where(values != values, largest, key)
