"""Tests that references do not depend on the processor's vector instructions, by restricting those that torch may use.

With other instructions, torch's own functions differ in the last bits, and for infinities and values near overflow even
more: oneDNN, which computes gelu on machines with AVX-512, returns NaN for infinity. Child processes compute all
references and their gradients from the same stored inputs, under each ``ATEN_CPU_CAPABILITY`` that the machine
supports. The inputs are the samples of every specification, and the same shapes filled with special values.
"""

import os
import subprocess
import sys

import pytest
import torch
from limits import LONG, rounds
from specs import all_specs, samples_of, with_grad
from specs.comparison import assert_close, assert_same_bits
from specs.samples import special_values

from pymoe.bench.calls import call, generator, gradients_of, leaves, mapped, outputs_of
from pymoe.bench.correctness import same_bits

pytestmark = pytest.mark.only_on("cpu")
SPECS = {spec.name: spec for spec in all_specs()}
CAPABILITIES = {
    "default": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
"""The variables also restrict the libraries that torch calls, since each library queries the processor itself."""
ROUNDED = {"grouped_linear": {torch.float32: 4e-6, torch.float64: 8e-15, torch.bfloat16: 8e-3, torch.float16: 1e-3}}
"""The references that promise results up to rounding, with the largest permitted difference between two processors,
relative to one plus the greatest result of the call (sums of up to 1100 terms). All others promise equal bits."""

FINITE = {"quantize_weight"}
"""The references that refuse special values."""


def hostile(sample, overflows, random):
    """Return ``sample`` with special values in a third of its elements, including the largest finite ones if
    ``overflows``.
    """

    def sprinkle(value):
        if value.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return value
        special = special_values(value.dtype)
        if not overflows:
            special = special[~(special.abs() == torch.finfo(value.dtype).max)]
        chosen = special[torch.randint(0, len(special), value.shape, generator=random)]
        return torch.where(torch.rand(value.shape, generator=random) < 0.3, chosen, value.detach())

    return mapped(sample, sprinkle)


def inputs():
    """Return calls by (operator, dtype, name)."""
    random = generator()
    stride = rounds(4, 1)
    found = {}
    for spec in SPECS.values():
        for dtype in spec.dtypes:
            for number, sample in enumerate(samples_of(spec, dtype)):
                if number % (stride if dtype == spec.dtypes[0] else 2 * stride):
                    continue
                found[spec.name, dtype, sample.name] = sample
                if number % 3 == 0 and "out" not in sample.kwargs and spec.name not in FINITE:
                    bad = hostile(sample, spec.name not in ROUNDED, random)
                    found[spec.name, dtype, f"{sample.name} with special values"] = bad
    return found


def results(calls):
    """Return outputs and gradients of the references, by the keys of ``calls``."""
    found = {}
    for (name, dtype, sample_name), sample in calls.items():
        spec = SPECS[name]
        parts = list(outputs_of(call(spec.reference, sample)))
        differentiable = with_grad(mapped(sample, lambda value: value))
        if differentiable is None and "special values" in sample_name:
            differentiable = mapped(
                sample, lambda value: value.detach().requires_grad_() if value.is_floating_point() else value
            )
        if spec.gradient_samples is not None and differentiable is not None and leaves(differentiable):
            parts += gradients_of(outputs_of(call(spec.reference, differentiable)), leaves(differentiable))
        found[name, dtype, sample_name] = [part.detach().clone() for part in parts]
    return found


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory):
    """Return the results by capability, for the capabilities that the machine has."""
    folder = tmp_path_factory.mktemp("processors")
    torch.save(inputs(), folder / "inputs")
    found = {}
    for capability, of_libraries in CAPABILITIES.items():
        environment = {**os.environ, **of_libraries, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, folder / "inputs", folder / capability]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=6 * LONG, check=False)
        assert done.returncode == 0, done.stderr
        if done.stdout.split()[-1].lower() == capability:  # otherwise the machine does not have it
            found[capability] = torch.load(folder / capability, weights_only=False)
    if len(found) < 2:
        pytest.skip("the processor has no vectors to leave out")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_a_reference_is_the_same_on_every_processor(everywhere, name):
    first, *others = everywhere
    compared = 0
    for key, expected in everywhere[first].items():
        if key[0] != name:
            continue
        for other in others:
            for i, (got, wanted) in enumerate(zip(everywhere[other][key], expected, strict=True)):
                what = f"{key}: result {i} under {other} and {first}"
                if name in ROUNDED:
                    assert_within_rounding(got, wanted, ROUNDED[name][key[1]], what)
                else:
                    assert_same_bits(got, wanted, what)
                compared += 1
    assert compared > 40


def assert_within_rounding(got, wanted, tolerance, what):
    finite = wanted[wanted.isfinite()]
    scale = 1.0 + (float(finite.abs().max()) if finite.numel() else 0.0)
    assert_close(got, wanted, (0.0, tolerance * scale), what)


@pytest.mark.slow
def test_torch_itself_does_depend_on_the_processor(everywhere):
    """If torch's own results did not differ, the tests above would prove nothing."""
    torchs = [found["torch"] for found in everywhere.values()]
    different = [not bool(same_bits(a, b).all()) for a, b in zip(torchs[0], torchs[1], strict=True)]
    assert any(different)


def torch_functions():
    """Return results of torch functions from which the references could have been built."""
    x = (torch.arange(4096, dtype=torch.float64) / 64 - 32).float().reshape(16, -1)
    return [torch.softmax(x, 1), torch.nn.functional.gelu(x), torch.sigmoid(x), torch.logsumexp(x, 1), (x * 1.1).sum(1)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    computed = results(torch.load(sys.argv[1], weights_only=False))
    torch.save({**computed, "torch": torch_functions()}, sys.argv[2])
    print(torch.backends.cpu.get_cpu_capability())
