"""Functions from which the references are built, in steps that round the same on every processor.

The results of torch's ``softmax``, ``gelu`` or ``sum`` depend on the processor's vector units: in the last bits, and
for infinities and values near overflow entirely. A specification must not. The functions here consist of IEEE
additions, multiplications, divisions and comparisons of single elements, in a fixed order; values and gradients are
therefore the same bits on every processor. Except for those whose names end in ``_in_fixed_steps``, they are
differentiable any number of times, backward and forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from pymoe._common.forward_mode import in_forward_mode
from pymoe.reference.scores import exp_in_fixed_steps, scores_in_fixed_steps, sum_in_lanes

# Rational approximations of W. J. Cody (Math. Comp. 23, 1969), highest power first: erf(v) / v in v^2 up to
# 0.46875, erfc(v) e^(v^2) in v up to 4, and beyond that the remainder of its asymptotic series, in 1 / v^2.
_ERF = (
    (1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
_ERFC = (
    (
        2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1,
        2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
        1.23033935479799725e3,
    ),
    (
        1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
        3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3,
    ),
)  # fmt: skip
_ERFC_TAIL = (
    (
        1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
        1.60837851487422766e-2, 6.58749161529837803e-4,
    ),
    (
        1.0, 2.56852019228982242, 1.87295284992346725, 5.27905102951428412e-1, 6.05183413124413191e-2,
        2.33520497626869185e-3,
    ),
)  # fmt: skip

_LOG = (
    1.479819860511658591e-1, 1.531383769920937332e-1, 1.818357216161805012e-1, 2.222219843214978396e-1,
    2.857142874366239149e-1, 3.999999999940941908e-1, 6.666666666666735130e-1,
)  # fmt: skip
"""A minimax polynomial of (log((1 + s) / (1 - s)) / s - 2) / s^2 in s^2, highest power first, as in fdlibm."""


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Tensor) -> Tensor:
    return _polynomial(coefficients[0], x) / _polynomial(coefficients[1], x)


def erfc_in_fixed_steps(v: Tensor) -> Tensor:
    """Return 1 - erf of a float64 tensor, with full relative accuracy in the upper tail, too. Not differentiable."""
    # Beyond 30, erfc underflows to 0. clamp() keeps NaN.
    y = v.abs().clamp(max=30.0)
    small = y.clamp(max=0.46875)
    erf = small * _ratio(_ERF, small * small)
    # e^(-y^2) = e^(-s^2) times a correction, where s is y rounded so that its square is exact
    short = (y * 16.0).trunc() / 16.0
    gauss = exp_in_fixed_steps(-(short * short)) * exp_in_fixed_steps(-(y - short) * (y + short))
    middle = gauss * _ratio(_ERFC, y.clamp(max=4.0))
    large = y.clamp(min=4.0)
    z = 1.0 / (large * large)
    tail = gauss / large * (1.0 / math.sqrt(math.pi) - z * _ratio(_ERFC_TAIL, z))
    complement = torch.where(y <= 4.0, middle, tail)
    near = 1.0 - torch.where(v < 0, -erf, erf)
    return torch.where(y <= 0.46875, near, torch.where(v < 0, 2.0 - complement, complement))


def log_in_fixed_steps(x: Tensor) -> Tensor:
    """Return the natural logarithm of float64 values: positive normal numbers, infinity or NaN.

    Not differentiable. With x = 2^k (1 + f), a polynomial in f / (2 + f) gives log(1 + f).
    """
    bits = x.view(torch.int64)
    # Choose k so that c <= 1 + f < 2 c, where c is 1 / sqrt 2 with the lower 32 bits of its float64 cleared.
    shift = bits - 0x3FE6A09E00000000
    k = shift >> 52
    f = (bits - (k << 52)).view(torch.float64) - 1.0
    s = f / (f + 2.0)
    square = s * s
    half = f * f * 0.5
    rest = s * (half + square * _polynomial(_LOG, square))
    k = k.to(torch.float64)
    value = k * 6.93147180369123816490e-1 - ((half - (rest + k * 1.90821492927058770002e-10)) - f)
    return torch.where(x < math.inf, value, x)


def sum_in_tree(values: Tensor, dim: int) -> Tensor:
    """Return the sum over ``dim``: add the upper half to the lower half, and repeat this until one element is left."""
    count = values.shape[dim]
    if count == 0:
        return values.sum(dim)
    while count > 1:
        half = (count + 1) // 2
        lower, upper = values.narrow(dim, 0, half), values.narrow(dim, half, count - half)
        paired = lower.narrow(dim, 0, count - half) + upper
        values = torch.cat((paired, lower.narrow(dim, count - half, half - (count - half))), dim)
        count = half
    return values.squeeze(dim)


def sum_in_order(values: Tensor, dim: int) -> Tensor:
    """Return the sum over ``dim``, starting from +0 and adding one element after the other."""
    total = torch.zeros_like(values.select(dim, 0)) if values.shape[dim] else values.sum(dim)
    for part in values.unbind(dim):
        total = total + part
    return total


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Return ``function.apply(*args)``.

    Raise NotImplementedError if torch.compile traces the call in forward mode: its graph would have no ``jvp``.
    """
    if is_compiling() and in_forward_mode():
        raise NotImplementedError(
            "pymoe.reference: a graph of torch.compile has no forward-mode derivative (jvp, jacfwd, hessian, "
            "forward_ad) of it; without fullgraph=True it is computed outside of the graph"
        )
    result: Tensor = function.apply(*args)
    return result


class _Spread(torch.autograd.Function):
    """Repeats ``value`` along a new dimension. Its gradient is a sum in a fixed order, unlike that of ``expand``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, dim: int, size: int, in_order: bool) -> Tensor:
        return torch.stack([value] * size, dim) if size else value.unsqueeze(dim).narrow(dim, 0, 0).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *ctx.options = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dim, _, in_order = ctx.options
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        total = sum_in_order(wide, dim) if in_order else sum_in_tree(wide, dim)
        return total.to(grad.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        return _Spread.apply(tangent, *ctx.options)


def spread(value: Tensor, dim: int, size: int, *, in_order: bool = False) -> Tensor:
    """Repeat ``value`` ``size`` times along a new dimension ``dim``; gradients are added in a fixed order.

    The order is that of :func:`sum_in_order` if ``in_order``, else that of :func:`sum_in_tree`; the sum is in float32
    (float64 for float64).
    """
    return _apply(_Spread, value, dim, size, in_order)


def _along_rows(value_T1: Tensor, like_TE: Tensor) -> Tensor:
    return spread(value_T1[:, 0], 1, like_TE.shape[1])


class _SymmetricFunction(torch.autograd.Function):
    """A function with a symmetric Jacobian, so the same product serves as its backward and its forward derivative.

    ``name`` is a key of :data:`_VALUES` and :data:`_PRODUCTS`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        return _VALUES[name](x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        x, ctx.name = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return _PRODUCTS[ctx.name](x, grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return _PRODUCTS[ctx.name](x, tangent)


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": exp_in_fixed_steps,
    "sigmoid": lambda x: scores_in_fixed_steps(x, "sigmoid"),
    "softmax": lambda x: scores_in_fixed_steps(x, "softmax"),
    "silu": lambda x: x / (exp_in_fixed_steps(-x) + 1.0),
    "normal_cdf": lambda x: 0.5 * erfc_in_fixed_steps(x * -math.sqrt(0.5)),
}


def _sigmoid_product(x: Tensor, v: Tensor) -> Tensor:
    s = sigmoid(x)
    return v * (s * (1.0 - s))


def _softmax_product(x: Tensor, v: Tensor) -> Tensor:
    s = softmax(x)
    return s * (v - _along_rows(sum_in_lanes(s * v), v))


def _silu_product(x: Tensor, v: Tensor) -> Tensor:
    s = sigmoid(x)
    return v * (s * (1.0 + x * (1.0 - s)))


_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exp": lambda x, v: v * exp(x),
    "sigmoid": _sigmoid_product,
    "softmax": _softmax_product,
    "silu": _silu_product,
    "normal_cdf": lambda x, v: v * (exp(x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))),
}


def exp(x: Tensor) -> Tensor:
    """Return the exponential function of a float32 or float64 tensor."""
    return _apply(_SymmetricFunction, x, "exp")


def sigmoid(x: Tensor) -> Tensor:
    """Return the logistic function, 1 / (1 + e^-x), of a float32 or float64 tensor."""
    return _apply(_SymmetricFunction, x, "sigmoid")


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of every row of a (T, E) float32 or float64 tensor."""
    return _apply(_SymmetricFunction, x, "softmax")


def silu(x: Tensor) -> Tensor:
    """Return Swish, x / (1 + e^-x), of a float32 or float64 tensor."""
    return _apply(_SymmetricFunction, x, "silu")


def gelu(x: Tensor) -> Tensor:
    """Return x Phi(x), the exact form; Phi, the normal distribution function, is computed in float64 in any case."""
    wide = x.to(torch.float64)
    return (wide * _apply(_SymmetricFunction, wide, "normal_cdf")).to(x.dtype)


def divided_rows(x: Tensor, divisors: Tensor) -> Tensor:
    """Return the rows of ``x``, (T, E), divided by ``divisors``, (T, 1)."""
    return x / _along_rows(divisors, x)


class _LogSumExp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        greatest = x.amax(dim=1)
        total = sum_in_lanes(exp_in_fixed_steps(x - greatest[:, None]))[:, 0]
        value = greatest + log_in_fixed_steps(total.to(torch.float64)).to(x.dtype)
        # If a row's greatest element is infinite, return it: the formula would subtract infinity from infinity.
        return torch.where(greatest.isinf(), greatest, value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return softmax(x) * spread(grad, 1, x.shape[1])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return sum_in_lanes(softmax(x) * tangent)[:, 0]


def logsumexp(x: Tensor) -> Tensor:
    """Return the logarithm of the sum of e^x over every row of a (T, E) float32 or float64 tensor: (T,)."""
    return _apply(_LogSumExp, x)
