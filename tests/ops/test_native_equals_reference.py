"""Every operator returns what its reference returns, for every sample of its specification.

Outputs that are promised exactly are compared bit for bit, the others within the specification's tolerance. The same
comparison runs once more in a child process for every narrower instruction set that the machine can run.

All samples run in the first dtype of a specification, one of three in each other dtype, and all in every dtype with
``--level=exhaustive``.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from devices import moved
from limits import EXHAUSTIVE, ISAS
from specs import all_specs, large_cases, samples_of, verify, with_grad

import pymoe
from pymoe.bench.calls import generator

SPECS = {spec.name: spec for spec in all_specs()}
IN_USE = pymoe.build_info()["cpu_isa"]


@cache
def cases(name, dtype):
    return {sample.name: sample for sample in samples_of(SPECS[name], dtype)}


def every_sample(accept=lambda spec, sample: True):
    return [
        pytest.param(
            spec.name,
            dtype,
            name,
            id=f"{spec.name}-{str(dtype)[6:]}-{name}",
            marks=[pytest.mark.exhaustive] if place and number % 3 != place % 3 else [],
        )
        for spec in SPECS.values()
        for place, dtype in enumerate(spec.dtypes)
        for number, (name, sample) in enumerate(cases(spec.name, dtype).items())
        if accept(spec, sample)
    ]


def has_gradients(spec, sample):
    return spec.gradient_samples is not None and with_grad(sample) is not None


@pytest.mark.parametrize(("name", "dtype", "sample"), every_sample())
def test_outputs(name, dtype, sample, device):
    verify.outputs_equal(SPECS[name], dtype, moved(cases(name, dtype)[sample], device))


@pytest.mark.parametrize(("name", "dtype", "sample"), every_sample(has_gradients))
def test_gradients_of_finite_samples(name, dtype, sample, device):
    verify.gradients_equal(SPECS[name], dtype, moved(with_grad(cases(name, dtype)[sample]), device))


LARGE_CASES = [
    pytest.param(spec.name, case, id=f"{spec.name}-{case.name}")
    for spec in SPECS.values()
    for case in large_cases(spec)
]


@pytest.mark.thinned(usual=8)
@pytest.mark.parametrize(("name", "case"), LARGE_CASES)
def test_outputs_of_benchmark_shapes(name, case, device):
    """The shapes are large enough for every loop over blocks and threads to run more than once."""
    verify.outputs_equal(SPECS[name], case.dtype, moved(case.make(generator()), device))


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_specification_has_enough_cases(spec):
    counts = {dtype: sum(1 for _ in samples_of(spec, dtype)) for dtype in spec.dtypes}
    assert all(count >= 40 for count in counts.values()), counts
    for dtype in spec.dtypes:
        assert len(cases(spec.name, dtype)) == counts[dtype], "two samples share a name"


@pytest.mark.slow
@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("isa", ISAS[: ISAS.index(IN_USE)])
def test_same_on_every_narrower_instruction_set(isa):
    environment = {**os.environ, "PYMOE_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(pymoe.__file__).parents[1]), environment["PYTHONPATH"]])
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, count = done.stdout.split()
    assert found == isa
    assert int(count) > 2000


@pytest.mark.only_on("cpu")
def test_the_instruction_set_is_the_one_that_was_asked_for():
    assert os.environ.get("PYMOE_CPU_ISA", IN_USE) == IN_USE


def compare_all():
    """Make every comparison above, without pytest; return their number."""
    outputs = [param.values for param in every_sample() if EXHAUSTIVE or not param.marks]
    gradients = [param.values for param in every_sample(has_gradients) if EXHAUSTIVE or not param.marks]
    large = [param.values for param in LARGE_CASES]
    for test, calls in (
        (test_outputs, outputs),
        (test_gradients_of_finite_samples, gradients),
        (test_outputs_of_benchmark_shapes, large),
    ):
        for call in calls:
            try:
                test(*call, torch.device("cpu"))
            except BaseException:
                print(*call, file=sys.stderr)
                raise
    return len(outputs) + len(gradients) + len(large)


if __name__ == "__main__":
    print(IN_USE, compare_all())
