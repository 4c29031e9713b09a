"""torch.compile(fullgraph=True) traces every operator, forward and backward, and changes no result."""

from itertools import islice

import pytest
import torch
from devices import moved
from specs import all_specs, in_dtype, samples_of
from specs.comparison import assert_close, assert_same_bits

from pymoe.bench.calls import generator, gradients, leaves

pytestmark = pytest.mark.only_on("cpu", "cuda")  # the compiler supports no other device
SPECS = {spec.name: spec for spec in all_specs()}


def some_samples(spec, count, device):
    """Return a few samples: the gradient checks' samples if there are any, in float32."""
    if spec.gradient_samples is not None:
        samples = (in_dtype(sample, torch.float32) for sample in spec.gradient_samples(generator()))
    else:
        samples = samples_of(spec, spec.dtypes[0])
    return (moved(sample, device) for sample in islice(samples, count))


def compare(spec, sample, backend):
    torch._dynamo.reset()
    eager_outputs, eager_gradients = gradients(spec.native, sample)
    compiled = torch.compile(spec.native, fullgraph=True, backend=backend)
    outputs, found = gradients(compiled, sample)
    tolerance = spec.tolerances.get(torch.float32, (0.0, 0.0))
    for i, (got, wanted) in enumerate(zip(outputs, eager_outputs, strict=True)):
        assert got.requires_grad == wanted.requires_grad
        if spec.is_exact(i):
            assert_same_bits(got, wanted, f"output {i}")
        else:
            assert_close(got, wanted, tolerance, f"output {i}")
    for i, (got, wanted) in enumerate(zip(found, eager_gradients, strict=True)):
        assert_close(got, wanted, tolerance, f"gradient {i}")
    return len(leaves(sample))


@pytest.mark.thinned(usual=5)
@pytest.mark.parametrize("name", SPECS)
def test_traced_whole_and_equal_to_eager(name, device):
    for sample in some_samples(SPECS[name], 3, device):
        compare(SPECS[name], sample, "aot_eager")


@pytest.mark.thinned(usual=5)
@pytest.mark.parametrize("name", SPECS)
def test_one_graph_serves_any_number_of_tokens(name, device):
    """With dynamic shapes the traced graph is not specialised to the sizes of its first call."""
    spec = SPECS[name]
    torch._dynamo.reset()
    compiled = torch.compile(spec.native, fullgraph=True, backend="aot_eager", dynamic=True)
    for sample in some_samples(spec, 4, device):
        expected, _ = gradients(spec.native, sample)
        outputs, _ = gradients(compiled, sample)
        for i, (got, wanted) in enumerate(zip(outputs, expected, strict=True)):
            assert_close(got, wanted, spec.tolerances.get(torch.float32, (0.0, 0.0)), f"{sample.name}: output {i}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ("dispatch", "gate_topk") if name in SPECS])
def test_inductor_equals_eager(name, device):
    compare(SPECS[name], next(some_samples(SPECS[name], 1, device)), "inductor")
