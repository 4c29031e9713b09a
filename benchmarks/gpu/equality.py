"""Compares calls on the device bit for bit with the same calls on the tests' emulator.

    python -m benchmarks.gpu.equality --device cuda --output FILE.json --seconds 60

A child process runs samples of every operator's specification, forward and backward, with the library whose kernels
are the CUDA kernels compiled for the CPU (tests/cuda_on_cpu), until its time is up. Then the same samples run on the
device. Results that the specification calls exact must be equal bit for bit. Other results must lie within the
specification's tolerance, and the number of bitwise equal ones is reported.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.stages import ROOT, write_json

STRIDE = 7
"""The samples of a specification are taken with this stride, so that a run that is cut short has covered all parts."""


def samples() -> Iterator[tuple[str, Any, torch.dtype, Any]]:
    """Return an iterator over (name, specification, dtype, sample), in the same order in every process.

    All specifications and dtypes take turns. Listing the samples takes seconds. It is done when this returns, so that a
    caller can give all of its time to calls.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from specs import all_specs, samples_of

    specs = [spec for spec in all_specs() if spec.native is not spec.reference and "cuda" in spec.devices]
    listed = [
        [(f"{spec.name} {str(dtype)[6:]} {sample.name}", spec, dtype, sample) for sample in samples_of(spec, dtype)]
        for spec in specs
        for dtype in spec.dtypes
    ]
    columns = [[one for phase in range(STRIDE) for one in column[phase::STRIDE]] for column in listed]
    return (one for turn in zip_longest(*columns) for one in turn if one is not None)


def results(spec: Any, sample: Any, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the native operator for a sample on ``device``; return its outputs and gradients on the CPU."""
    from specs import with_grad

    from pymoe.bench.calls import gradients, map_tensors, mapped, same_layout_copy

    wanted = (with_grad(sample) if spec.gradient_samples is not None else None) or sample
    copies: dict[int, torch.Tensor] = {}

    def move(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in copies:
            copies[id(value)] = same_layout_copy(value, device).requires_grad_(value.requires_grad)
        return copies[id(value)]

    outputs, found = gradients(spec.native, mapped(wanted, move))
    return map_tensors((list(outputs), found), lambda value: value.detach().cpu())


def emulated(file: Path, seconds: float) -> None:
    """Run samples on the emulator for ``seconds``, and write the results to ``file``; called in the child process."""
    sys.path.insert(0, str(ROOT / "tests" / "cuda_on_cpu"))
    import emulated_ops  # noqa: F401, before pymoe

    torch.set_num_threads(1)
    everything, kept = samples(), {}
    start = time.monotonic()
    for name, spec, _, sample in everything:
        if time.monotonic() - start > seconds:
            break
        kept[name] = results(spec, sample, torch.device("cpu"))
    torch.save(kept, file)


def compare(kept: dict[str, Any], device: torch.device) -> dict[str, dict[str, Any]]:
    """Return one record per specification: the number of compared calls and tensors, the number of bitwise equal
    tensors, and the errors.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from specs.comparison import assert_close, assert_same_bits

    from pymoe.bench.correctness import same_bits
    from pymoe.bench.report import in_a_line

    records: dict[str, dict[str, Any]] = {}
    for name, spec, dtype, sample in samples():
        empty: dict[str, Any] = {"calls": 0, "tensors": 0, "same_bits": 0, "wrong": []}
        record = records.setdefault(spec.name, empty)
        if name not in kept:
            continue
        record["calls"] += 1
        try:
            found = results(spec, sample, device)
            for kind, mine, theirs in zip(("output", "gradient"), found, kept[name], strict=True):
                for i, (got, wanted) in enumerate(zip(mine, theirs, strict=True)):
                    record["tensors"] += 1
                    if bool(same_bits(got, wanted).all()):
                        record["same_bits"] += 1
                    elif kind == "output" and spec.is_exact(i):
                        assert_same_bits(got, wanted, f"{kind} {i}")
                    else:
                        assert_close(got, wanted, spec.tolerances.get(dtype, (0.0, 0.0)), f"{kind} {i}")
        except Exception as error:
            record["wrong"].append(f"{name}: {in_a_line(error)}")
    for record in records.values():
        if not record["calls"]:
            record["wrong"].append("there was no time for a single call")
    return records


def main() -> int:
    """Run and compare both sides; return 1 if any result is wrong, otherwise 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0, help="once the emulator is built")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--emulate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.emulate:
        emulated(options.emulate, options.seconds)
        return 0
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "emulated.pt"
        command = [sys.executable, "-m", "benchmarks.gpu.equality", "--emulate", str(file), "--output", "-"]
        begin = time.monotonic()
        subprocess.run([*command, "--seconds", str(0.3 * options.seconds)], cwd=ROOT, check=True)
        print(f"emulator, built and run: {time.monotonic() - begin:.0f} s", flush=True)
        records = compare(torch.load(file), device)
    write_json(options.output, {"device": options.device, "operators": records})
    for name, record in records.items():
        print(f"{name}: {record['calls']} calls, {record['same_bits']} of {record['tensors']} tensors in every bit")
        for wrong in record["wrong"][:5]:
            print(f"  WRONG {wrong}")
    return int(any(record["wrong"] for record in records.values()))


if __name__ == "__main__":
    sys.exit(main())
