"""The whole layer, forward and backward, compared with its floor: the same operations in dense ``torch.mm``.

Legend: T tokens, H hidden, F ffn, E experts, K choices (experts per token), S = T * K slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pymoe.bench.calls import Target, generator
from pymoe.bench.cold import Rotating
from pymoe.bench.correctness import Verdict, max_error
from pymoe.bench.floor import Floor, Rates, floor_for
from pymoe.bench.lines import Candidates, Line
from pymoe.nn import MoE
from pymoe.nn.options import Backend

SLOWDOWN_ALLOWED = 1.15
"""Target of the layer's lines: the layer takes at most this multiple of the time of the dense products."""
RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest error, relative to the largest value, with which results of two backends count as close."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a MoE layer with the activation swiglu, and of its input."""

    name: str
    tokens: int
    hidden: int
    ffn: int
    experts: int
    choices: int

    def __str__(self) -> str:
        return f"T{self.tokens} H{self.hidden} F{self.ffn} E{self.experts} K{self.choices}"

    @property
    def slots(self) -> int:
        """Return S, the number of rows that the experts compute: a row for each choice of each token."""
        return self.tokens * self.choices

    @property
    def flops(self) -> int:
        """Return the FLOPs of forward and backward: two per weight and row in each of three products."""
        return 6 * (self.slots * 3 * self.ffn * self.hidden + self.tokens * self.hidden * self.experts)

    @property
    def elements(self) -> int:
        """Return the number of elements of the experts' weights, the input, the output and their gradients."""
        return 2 * (3 * self.experts * self.ffn * self.hidden) + 4 * self.tokens * self.hidden

    def bytes_moved(self, dtype: torch.dtype) -> int:
        """Return the approximate minimum number of bytes that a forward pass moves: those of the input, the output,
        and the weights of the chosen experts. The number of chosen experts is its expectation for random choices.
        """
        reached = self.experts * (1 - (1 - self.choices / self.experts) ** self.tokens)
        return round((reached * 3 * self.ffn * self.hidden + 2 * self.tokens * self.hidden) * dtype.itemsize)


SHAPES = (
    Shape("small language model", 2048, 256, 512, 8, 2),
    Shape("wide", 1024, 1024, 1024, 16, 2),
)
CUDA_SHAPES = (
    Shape("Qwen3-30B: Liger-Kernel", 8192, 2048, 768, 128, 8),
    Shape("SonicMoE Fig. 13", 16384, 1536, 1024, 16, 2),
    Shape("few tokens", 256, 2048, 768, 128, 8),
)
FEW_TOKENS = tuple(Shape("Qwen3-30B", tokens, 2048, 768, 128, 8) for tokens in (1, 16, 64, 512))
"""Shapes for which CUDA measures only the forward pass, in evaluation mode: steps of generation, and a short prompt."""
INPUTS = 8
"""Number of inputs that forwards of few tokens use in turn; with a single one, its experts would be in the cache."""


def layer_lines() -> Iterator[Line]:
    """Yield the benchmark lines of the whole layer."""
    target = Target("floor", 1 / SLOWDOWN_ALLOWED)
    for device, shapes, dtype, targets in (
        ("cpu", SHAPES, torch.float32, {"cpu": target}),
        ("cuda", CUDA_SHAPES, torch.bfloat16, {}),
    ):
        for shape in shapes:
            yield Line(
                "MoE",
                str(shape),
                dtype,
                "forward+backward",
                shape.elements * dtype.itemsize,
                shape.flops,
                shape.name,
                targets,
                partial(candidates_of, shape, dtype),
                devices=(device,),
            )
    for shape in FEW_TOKENS:
        yield Line(
            "MoE", str(shape), torch.bfloat16, "forward", shape.bytes_moved(torch.bfloat16), 0, shape.name, {},
            partial(forward_candidates_of, shape, torch.bfloat16), devices=("cuda",),
        )  # fmt: skip


def forward_candidates_of(shape: Shape, dtype: torch.dtype, device: torch.device, rates: Rates) -> Candidates:
    """Return the calls to time for an inference line: the forward pass without gradients, and its floor.

    There is a call for each backend and for plain torch.
    """
    random = generator()
    inputs = [torch.randn(shape.tokens, shape.hidden, generator=random).to(device, dtype) for _ in range(INPUTS)]
    native = layer_of(shape, dtype, device).eval()
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "native": native,
        "reference": layer_of(shape, dtype, device, backend="reference").eval(),
        "baseline": with_torch_alone(native),
    }

    def without_gradients(way: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.no_grad():
            return way(x)

    def verify() -> Verdict:
        found, expected = (without_gradients(ways[name], inputs[0]) for name in ("native", "reference"))
        return verdict_of((found,), (expected,), ("output",), RELATIVE_ERROR[dtype])

    calls = {name: Rotating([partial(without_gradients, way, x) for x in inputs]) for name, way in ways.items()}
    return Candidates(calls, floor_for(shape.bytes_moved(dtype), 0, dtype, device, rates), verify)


def candidates_of(shape: Shape, dtype: torch.dtype, device: torch.device, rates: Rates) -> Candidates:
    """Return the calls to time for a training line: forward and backward in both backends, with equal weights, and a
    floor.

    On CUDA there is also a baseline: the same layer in plain torch.
    """
    x, grad = inputs_of(shape, dtype, device)
    native = layer_of(shape, dtype, device)
    reference = layer_of(shape, dtype, device, backend="reference")
    calls = {"native": training_step(native, x, grad), "reference": training_step(reference, x, grad)}
    if device.type == "cuda":
        calls["baseline"] = training_step(native, x, grad, with_torch_alone(native))
    names = ("output", "gradient of x", *(f"gradient of {name}" for name, _ in native.named_parameters()))
    return Candidates(
        calls,
        dense_floor(shape, rates.fastest_mm(dtype), device),
        lambda: verdict_of(calls["native"](), calls["reference"](), names, RELATIVE_ERROR[dtype]),
    )


def layer_of(shape: Shape, dtype: torch.dtype, device: torch.device, backend: Backend = "native") -> MoE:
    """Return a layer with random weights that depend only on ``shape`` and the type of the device."""
    sizes = (shape.hidden, shape.ffn, shape.experts, shape.choices)
    layer = MoE(*sizes, activation="swiglu", backend=backend, device=device)
    random = generator(device)
    with torch.no_grad():
        for parameter in layer.parameters():
            bound = parameter.shape[-1] ** -0.5
            parameter.uniform_(-bound, bound, generator=random)
    return layer.to(dtype)


def inputs_of(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random tokens (T, H), as a leaf that requires a gradient, and a random gradient of the output (T, H)."""
    random = generator()
    x = torch.randn(shape.tokens, shape.hidden, generator=random)
    grad = torch.randn(shape.tokens, shape.hidden, generator=random)
    return x.to(device, dtype).requires_grad_(), grad.to(device, dtype)


def training_step(
    layer: nn.Module, x: Tensor, grad: Tensor, forward: Callable[[Tensor], Tensor] | None = None
) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that runs forward and backward, and returns the output and the gradients.

    Args:
        layer: the module whose parameters get gradients.
        x: the input, which gets a gradient, too.
        grad: the gradient of the output.
        forward: the function to run; None means ``layer`` itself.
    """
    leaves = [x, *layer.parameters()]
    forward = forward or layer

    def step() -> tuple[Tensor, ...]:
        output = forward(x)
        return (output.detach(), *torch.autograd.grad(output, leaves, grad))

    return step


def with_torch_alone(layer: MoE) -> Callable[[Tensor], Tensor]:
    """Return the layer's forward in plain torch with the same parameters: sort, index, grouped_mm, index_add."""
    router, w_in, w_out = layer.router.weight, layer.experts.w_in, layer.experts.w_out
    k = layer.top_k

    def forward(x: Tensor) -> Tensor:
        scores = (x.float() @ router.float().T).softmax(1)
        weights, experts = scores.topk(k, dim=1)
        weights = weights / weights.sum(1, keepdim=True)
        expert, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(1, layer.num_experts + 1, device=x.device)).int()
        token = order // k
        gate, up = nn.functional.grouped_mm(x[token], w_in.transpose(1, 2), offs=ends).chunk(2, dim=1)
        rows = nn.functional.grouped_mm(nn.functional.silu(gate) * up, w_out.transpose(1, 2), offs=ends)
        weighted = rows * weights.flatten()[order, None].to(rows.dtype)
        return torch.zeros_like(x).index_add(0, token, weighted)

    return forward


def dense_floor(shape: Shape, dtype: torch.dtype, device: torch.device) -> Floor:
    """Return, as a floor, the products of the layer as if a single expert had all S rows.

    These are the forward and both backward products of the input, output and router weights, on contiguous matrices,
    without activation, routing or allocation of results: no implementation of the layer can be much faster.
    """
    s, t, h, f, e = shape.slots, shape.tokens, shape.hidden, shape.ffn, shape.experts
    sizes = []
    for rows, inputs, outputs in ((s, h, 2 * f), (s, f, h), (t, h, e)):
        sizes += [(rows, inputs, outputs), (rows, outputs, inputs), (outputs, rows, inputs)]
    random = generator(device)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=random).to(dtype)

    products = [(matrix(m, k), matrix(k, n)) for m, k, n in sizes]
    results = [torch.empty(m, n, device=device, dtype=dtype) for m, _, n in sizes]

    def run() -> None:
        for (left, right), out in zip(products, results, strict=True):
            torch.mm(left, right, out=out)

    return Floor(f"mm {str(dtype).removeprefix('torch.')}", run, shape.flops, shape.flops)


def verdict_of(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], names: tuple[str, ...], tolerance: float
) -> Verdict:
    """Return whether each result in ``actual`` agrees with ``expected``, as a verdict.

    An error may be at most ``tolerance`` times the largest magnitude in the expected result, because sums may run in
    different orders. The ``names`` of the results are for messages.
    """
    for name, got, wanted in zip(names, actual, expected, strict=True):
        error = max_error([(got, wanted)])
        allowed = tolerance * float(wanted.abs().max())
        if not bool(got.isfinite().all()) or error > allowed:
            return Verdict("WRONG", error, f"{name}: off by {error:.3g}, allowed {allowed:.3g}")
    return Verdict("close", max_error(zip(actual, expected, strict=True)))
