"""Calls every kernel, forward and backward, on a small grid of inputs, for compute-sanitizer to watch.

python -m benchmarks.gpu.grid --device cuda --seconds 10
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice

import torch

from benchmarks.gpu.stages import ROOT
from pymoe.bench.calls import generator, gradients, map_tensors, mapped

sys.path.insert(0, str(ROOT / "tests"))
from specs import all_specs, samples_of, with_grad


def main() -> int:
    """Make calls until the time is up, and print their number."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    device, start, count = torch.device(options.device), time.monotonic(), 0

    def over() -> bool:
        return time.monotonic() - start > options.seconds

    specs = [spec for spec in all_specs() if "cuda" in spec.devices]
    for spec in specs:  # run every kernel once, however long it takes
        for call in spec.raw_calls(generator()) if spec.raw_calls else ():
            arguments = map_tensors(call.args, lambda value: value.to(device))
            getattr(torch.ops.pymoe, call.operator)(*arguments)
            count += 1
    everything = [(spec, samples_of(spec, dtype)) for spec in specs for dtype in spec.dtypes[:3]]
    while everything and not over():
        for spec, samples in list(everything):
            chosen = next(islice(samples, 3, None), None)
            if chosen is None or over():
                everything.remove((spec, samples))
                continue
            sample = (with_grad(chosen) if spec.gradient_samples else None) or chosen
            gradients(
                spec.native,
                mapped(sample, lambda value: value.detach().to(device).requires_grad_(value.requires_grad)),
            )
            count += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{count} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
