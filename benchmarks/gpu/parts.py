"""Times the router's product and each kernel of a layer's step, and counts the kernels that a layer launches.

    python -m benchmarks.gpu.parts --device cuda --output FILE.json

The router multiplies x (4096, 7168) by its weight (256, 7168), both bfloat16, to float32 logits. The layer's product is
compared with casts to float32 followed by a float32 product, forward only, and forward with backward, in turns. The
launches of a bfloat16 layer's forward and backward are counted by torch's profiler, which also times the kernels of a
step on every shape of the benchmark's layer lines. On the CPU, which launches no kernels, operators take their place.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.stages import write_json
from pymoe.bench.layer import CUDA_SHAPES, SHAPES, inputs_of, layer_of, training_step
from pymoe.bench.timing import measure, timer_for
from pymoe.nn import MoE, Router

GPU_SHAPE, CPU_SHAPE = (4096, 7168, 256), (64, 256, 16)
STEPS = 5
"""Number of steps over which the profiler adds up the times of kernels."""
VIEWS = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "narrow", "new_empty", "permute",
    "select", "slice", "split", "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view", "_reshape_alias",
}  # fmt: skip
"""Operators of torch that launch no kernel."""


def router_product(device: torch.device, budget: float) -> dict[str, Any]:
    """Time the product; return microseconds with quartiles, and the largest error of the logits against float64."""
    tokens, hidden, experts = GPU_SHAPE if device.type == "cuda" else CPU_SHAPE
    torch.manual_seed(0)
    router = Router(hidden, experts, 8, device=device, dtype=torch.bfloat16)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = router.weight
    grad = torch.randn(tokens, experts, device=device)

    def in_float32() -> torch.Tensor:
        return x.float() @ weight.float().T

    def both(logits: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(logits(), (x, weight), grad)

    ways = {"as the layer does it": lambda: router.logits(x), "casts, and a float32 product": in_float32}
    timings = measure(
        {**ways, **{f"{name}, with backward": both(way) for name, way in ways.items()}},
        budget=budget,
        timer=timer_for(device),
    )
    exact = x.detach().double() @ weight.detach().double().T
    errors = {name: float((way().detach().double() - exact).abs().max()) for name, way in ways.items()}
    return {
        "shape": [tokens, hidden, experts],
        "ways": {
            name: {
                "us": 1e6 * one.median, "low": 1e6 * one.spread.low, "high": 1e6 * one.spread.high,
                "largest_error": errors.get(name),
            }
            for name, one in timings.items()
        },
    }  # fmt: skip


class Operators(TorchDispatchMode):
    """Counts the operators that are called inside the context, except :data:`VIEWS`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace != "aten" or name not in VIEWS:
            self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def launched(device: torch.device, function: Callable[[], Any]) -> Counter[str]:
    """Count the kernels and memory operations that a call launches on the GPU, by name; on the CPU, count operators."""
    if device.type != "cuda":
        with Operators() as seen:
            function()
        return seen.names
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize(device)
    on_gpu = [one for one in found.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    return Counter(plain_name(one.name) for one in on_gpu)


def plain_name(name: str) -> str:
    """Return the name of a kernel without result, anonymous namespaces, template arguments and parameters.

    A mangled name, which the profiler leaves as it is if it is long, becomes that of its outermost names.
    """
    if name.startswith("_ZN"):
        parts, rest = [], name[3:]
        while length := re.match(r"\d+", rest):
            end = length.end() + int(length[0])
            parts.append(rest[length.end() : end])
            rest = rest[end:]
        return "::".join(parts)
    plain = name.replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", plain.removeprefix("void ").strip())[0].strip()


def launches_of_a_layer(device: torch.device) -> dict[str, Any]:
    """Count the launches of a layer's forward and backward passes, after one warm-up call."""
    hidden, ffn = (1024, 512) if device.type == "cuda" else (64, 32)
    layer = MoE(hidden, ffn, 64, 8, device=device, dtype=torch.bfloat16)
    x = torch.randn(256, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    outputs: list[torch.Tensor] = []
    forward = launched(device, lambda: outputs.append(layer(x)))
    grad = torch.ones_like(outputs[0])
    parameters = [x, *(one for one in layer.parameters() if one.requires_grad)]
    backward = launched(device, lambda: torch.autograd.grad(outputs[0], parameters, grad, allow_unused=True))
    counted = "kernels and memory operations on the GPU" if device.type == "cuda" else "operators called"
    return {"counted": counted, "forward": dict(forward.most_common()), "backward": dict(backward.most_common())}


def kernels_of_a_step(device: torch.device) -> dict[str, dict[str, float]]:
    """Return the microseconds of each kernel in a training step of the layer, by shape, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, dict[str, float]] = {}
    on_gpu = device.type == "cuda"
    for shape in CUDA_SHAPES if on_gpu else SHAPES[:1]:
        x, grad = inputs_of(shape, torch.bfloat16, device)
        step = training_step(layer_of(shape, torch.bfloat16, device), x, grad)
        for _ in range(3):
            step()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
            for _ in range(STEPS):
                step()
            if on_gpu:
                torch.cuda.synchronize(device)
        times: Counter[str] = Counter()
        for one in seen.key_averages():
            spent = one.self_device_time_total if on_gpu else one.self_cpu_time_total
            times[plain_name(one.key)] += spent / STEPS
        found[f"{shape.name}: {shape}"] = {name: round(spent, 1) for name, spent in times.most_common() if spent >= 1}
    return found


def main() -> int:
    """Measure and count, writing the results after each part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--budget", type=float, default=2.0, metavar="SECONDS", help="for the router's product")
    options = parser.parse_args()
    device = torch.device(options.device)
    found: dict[str, Any] = {"launches": launches_of_a_layer(device)}
    write_json(options.output, found)
    found["router"] = router_product(device, options.budget)
    write_json(options.output, found)
    found["kernels"] = kernels_of_a_step(device)
    write_json(options.output, found)
    for part in ("forward", "backward"):
        print(f"{part}: {sum(found['launches'][part].values())} {found['launches']['counted']}")
    for name, one in found["router"]["ways"].items():
        print(f"router's product, {name}: {one['us']:.1f} us")
    for name, times in found["kernels"].items():
        print(f"{name}: {sum(times.values()):.0f} us in {len(times)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
