"""Tests that CUDA kernels return for any indices, since these are not checked before a kernel runs on CUDA.

Accesses outside the tensors are detected elsewhere: on the CPU by the address sanitizer around the emulated kernels
(tests/cuda_on_cpu), and on a GPU by compute-sanitizer (benchmarks/gpu_report.sh).
"""

import pytest
import torch
from devices import moved
from specs import all_raw_calls
from specs.hostile import hostile_calls

from pymoe.bench.calls import outputs_of

CALLS = {f"{call.operator}-{call.name}": call for call in all_raw_calls()}
REFUSALS = (ValueError, IndexError, TypeError, RuntimeError, MemoryError)


@pytest.mark.only_on("cuda", "pretended")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_hostile_calls_leave_the_device_healthy(call, device):
    """Every argument is corrupted in every way, one at a time: the call raises or returns, and the device still
    works.
    """
    operator = getattr(torch.ops.pymoe, call.operator)
    neighbour = torch.full((1 << 16,), 7, dtype=torch.int32)
    for bad in hostile_calls(call):
        try:
            results = operator(*moved(bad, device).args)
        except REFUSALS as error:
            assert "CUDA error" not in str(error), bad.name  # noqa: PT017
        else:
            for output in outputs_of(results):
                if not output.is_meta:
                    output.cpu()  # this waits for the kernel, so its faults show here
    assert bool((neighbour == 7).all())
    operator(*moved(call, device).args)
