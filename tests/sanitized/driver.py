"""Runs operators in a process whose ``pymoe._ops`` is the sanitized library; started by build.run.

    driver.py LIBRARY samples | few_samples | errors | hostile | threads | read_past_end | overflow

Prints the number of calls and exits with status 0. A sanitizer's report ends the process with another status.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from import_as import import_as

import_as("pymoe._ops", sys.argv[1])

from specs import all_raw_calls, all_specs, large_cases, samples_of, verify, with_grad  # noqa: E402
from specs.expert_activation import ACTIVATIONS  # noqa: E402
from specs.hostile import hostile_calls  # noqa: E402

from pymoe.bench.calls import generator, gradients, outputs_of, same_layout_copy  # noqa: E402

EXHAUSTIVE = os.environ.get("PYMOE_EXHAUSTIVE") == "1"
OTHER_ACTIVATIONS = list(ACTIVATIONS)[1:]
BACKWARD_IS_VIEWS = {"gather_batch"}


def samples(stride=10):
    """Run every ``stride``-th sample, forward and backward. Allocations have no slack that could hide an overrun."""
    count, stride = 0, 3 if EXHAUSTIVE else stride
    for spec in all_specs():
        for dtype in spec.dtypes:
            for sample in list(samples_of(spec, dtype))[count % stride :: stride]:
                verify.outputs_equal(spec, dtype, sample)
                if spec.gradient_samples is not None and with_grad(sample) is not None:
                    gradients(spec.native, with_grad(sample))
                count += 1
    return count


def few_samples():
    """Run fewer samples, for the emulator, which is slow."""
    return samples(stride=24)


def errors():
    """Run every invalid input of the specifications."""
    count = 0
    for spec in all_specs():
        for error_input in spec.error_inputs():
            verify.error_raised(spec, spec.native, error_input)
            count += 1
    return count


def hostile():
    """Make every raw call with one invalid argument, which must raise an exception or return a result."""
    count, refused = 0, 0
    for call in all_raw_calls():
        if call.operator == "apply_experts" and call.name in OTHER_ACTIVATIONS and not EXHAUSTIVE:
            continue  # the operators that it consists of are called with every activation
        operator = getattr(torch.ops.pymoe, call.operator)
        for bad in hostile_calls(call):
            try:
                results = operator(*bad.args)
            except (ValueError, IndexError, TypeError, RuntimeError, MemoryError):
                refused += 1
            else:
                for output in outputs_of(results):
                    if output.device.type == "cpu":
                        same_layout_copy(output)  # reads every byte of it
            count += 1
    print(f"{refused} of them refused")
    return count


def threads():
    """Run forward and backward of every kernel at a benchmark shape; print the number of threads that took part."""
    probe = torch.ops.pymoe_probe
    count = 0
    for spec in all_specs():
        cases = [case for case in large_cases(spec, count=9) if case.bytes >= 2 << 20]
        if not cases or spec.native is spec.reference:
            continue
        sample = cases[0].make(generator())
        for size in (1, 2):
            torch.set_num_threads(size)
            probe.observe_threads()
            outputs = outputs_of(spec.native(*sample.args, **sample.kwargs))
            # A loop that runs on one thread need not call the pool.
            print(f"{spec.name} forward: {max(1, probe.count_threads())} of {size}")
            differentiable = with_grad(sample)
            if differentiable is not None and spec.gradient_samples is not None and spec.name not in BACKWARD_IS_VIEWS:
                outputs = outputs_of(spec.native(*differentiable.args, **differentiable.kwargs))
                probe.observe_threads()
                torch.autograd.backward(
                    [o for o in outputs if o.requires_grad], [torch.ones_like(o) for o in outputs if o.requires_grad]
                )
                print(f"{spec.name} backward: {max(1, probe.count_threads())} of {size}")
            count += 1
    return count


def read_past_end():
    """Plant a read past the end, which the sanitizer must report."""
    slot = torch.arange(16, dtype=torch.int32).view(8, 2)
    used = torch.tensor([16], dtype=torch.int32)
    torch.ops.pymoe_probe.read_past_end(torch.zeros(4, 64), slot, used, torch.empty(16, 64))
    return 1


def overflow():
    """Plant an overflow, which the sanitizer must report."""
    torch.ops.pymoe_probe.overflow(2)
    return 1


if __name__ == "__main__":
    chosen = {f.__name__: f for f in (samples, few_samples, errors, hostile, threads, read_past_end, overflow)}
    for argument in sys.argv[2:]:
        print(f"{argument}: {chosen[argument]()} calls", flush=True)
