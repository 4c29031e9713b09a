"""pymoe.ops.check_indices: bad indices on a CUDA device raise what they raise on the CPU.

No GPU is needed: the tests act as if the kernel had no check of its own, as on CUDA, and look where an error comes
from: from the shared Python checks in debug mode, otherwise from the CPU kernel.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pymoe
from pymoe.ops import index_checks

pytestmark = pytest.mark.only_on("cpu")  # where the kernels check too; on CUDA: test_errors.py
TOKENS, CHOICES, EXPERTS, HIDDEN = 6, 2, 4, 8
ROWS = TOKENS * CHOICES


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Let only the debug mode check indices, as with CUDA tensors."""
    monkeypatch.setattr(index_checks, "_kernel_checks", lambda index: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pymoe.ops.check_indices(False):
        yield


def experts():
    return torch.arange(ROWS, dtype=torch.int32).view(TOKENS, CHOICES) % EXPERTS


def routing(bad_slot=None):
    good = pymoe.ops.build_routing(experts(), EXPERTS)
    if bad_slot is not None:
        good.slot[2, 1] = bad_slot
    return good


def bad_experts(value):
    named = experts()
    named[2, 1] = value
    return named


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


def grouped_linear(api, *bounds, order=None):
    return api.grouped_linear(torch.ones(8, HIDDEN), torch.ones(EXPERTS, 3, HIDDEN), offsets(*bounds), order=order)


def ordered(api, *order):
    return grouped_linear(api, 0, 2, 2, 6, 7, order=torch.tensor(order, dtype=torch.int32))


BAD_CALLS = {
    "build_routing-below": lambda api: api.build_routing(bad_experts(-1), EXPERTS),
    "build_routing-E": lambda api: api.build_routing(bad_experts(EXPERTS), EXPERTS),
    "build_routing-wide": lambda api: api.build_routing(bad_experts(1).long() + 2**32, EXPERTS),
    "build_routing-capacity": lambda api: api.build_routing(bad_experts(99), EXPERTS, capacity=2),
    "dispatch-below": lambda api: api.dispatch(torch.ones(TOKENS, HIDDEN), routing(-2)),
    "dispatch-S": lambda api: api.dispatch(torch.ones(TOKENS, HIDDEN), routing(ROWS)),
    "dispatch-out": lambda api: api.dispatch(
        torch.ones(TOKENS, HIDDEN), routing(2**31 - 1), out=torch.empty(ROWS, HIDDEN)
    ),
    "combine-below": lambda api: api.combine(torch.ones(ROWS, HIDDEN), routing(-2)),
    "combine-weights": lambda api: api.combine(torch.ones(ROWS, HIDDEN), routing(ROWS), torch.ones(TOKENS, CHOICES)),
    "grouped_linear-start": lambda api: grouped_linear(api, 1, 2, 4, 6, 8),
    "grouped_linear-order": lambda api: grouped_linear(api, 0, 3, 2, 6, 8),
    "grouped_linear-end": lambda api: grouped_linear(api, 0, 2, 4, 6, 9),
    "grouped_linear-below": lambda api: ordered(api, 7, 6, 5, -1, 3, 2, 1, 0),
    "grouped_linear-S": lambda api: ordered(api, 7, 6, 5, 4, 3, 2, 8, 0),
    "grouped_linear-twice": lambda api: ordered(api, 7, 6, 5, 4, 3, 7, 1, 0),
}
GOOD_CALLS = {
    "build_routing": lambda: pymoe.ops.build_routing(experts(), EXPERTS),
    "build_routing-no_tokens": lambda: pymoe.ops.build_routing(experts()[:0], EXPERTS),
    "dispatch": lambda: pymoe.ops.dispatch(torch.ones(TOKENS, HIDDEN), routing()),
    "dispatch-dropped": lambda: pymoe.ops.dispatch(torch.ones(TOKENS, HIDDEN), routing(-1)),
    "combine": lambda: pymoe.ops.combine(torch.ones(ROWS, HIDDEN), routing()),
    "grouped_linear": lambda: grouped_linear(pymoe.ops, 0, 2, 2, 6, 8),
    "grouped_linear-ordered": lambda: ordered(pymoe.ops, 7, 6, 5, 4, 3, 2, 1, -9),
}


def error_of(call, *arguments):
    with pytest.raises((IndexError, ValueError)) as caught:
        call(*arguments)
    raised_in = Path(caught.traceback[-1].path)
    return type(caught.value), str(caught.value), "_common" in raised_in.parts


@pytest.mark.parametrize("name", BAD_CALLS)
def test_raises_what_the_cpu_and_the_reference_raise(name, as_on_cuda):
    call = BAD_CALLS[name]
    of_reference = error_of(call, pymoe.reference)
    with pymoe.ops.check_indices():
        of_debug_mode = error_of(call, pymoe.ops)
    assert of_debug_mode == of_reference
    assert of_debug_mode[2], "the debug mode found it, not the kernel"
    of_kernel = error_of(call, pymoe.ops)
    assert not of_kernel[2], "without the debug mode the kernel found it"
    assert of_kernel[:2] == of_debug_mode[:2]


@pytest.mark.parametrize("name", GOOD_CALLS)
def test_leaves_good_indices_alone(name, as_on_cuda):
    with pymoe.ops.check_indices():
        GOOD_CALLS[name]()


@pytest.mark.parametrize("name", BAD_CALLS)
def test_cpu_tensors_are_left_to_their_kernels(name):
    with pymoe.ops.check_indices():
        *_, from_python = error_of(BAD_CALLS[name], pymoe.ops)
    assert not from_python


def test_is_a_switch_and_a_context(as_on_cuda):
    assert index_checks._enabled is False
    pymoe.ops.check_indices(True)
    assert index_checks._enabled is True
    with pymoe.ops.check_indices(False):
        assert index_checks._enabled is False
        with pytest.raises(ZeroDivisionError), pymoe.ops.check_indices():
            raise ZeroDivisionError
        assert index_checks._enabled is False
    assert index_checks._enabled is True


def test_refuses_what_is_no_bool():
    with pytest.raises(TypeError, match="check_indices: enabled must be a bool, got int"):
        pymoe.ops.check_indices(1)


def test_refuses_to_check_during_capture(as_on_cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with (
        pymoe.ops.check_indices(),
        pytest.raises(RuntimeError, match=r"^build_routing: .* CUDA graph .*check_indices\(False\)$"),
    ):
        pymoe.ops.build_routing(experts(), EXPERTS)
    pymoe.ops.build_routing(experts(), EXPERTS)  # without the debug mode nothing waits


def test_compiled_code_is_whole_and_does_not_depend_on_the_mode(as_on_cuda):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()

    def layer(x, named, weight):
        way = pymoe.ops.build_routing(named, EXPERTS)
        return pymoe.ops.combine(pymoe.ops.grouped_linear(pymoe.ops.dispatch(x, way), weight, way.offsets), way)

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    arguments = torch.ones(TOKENS, HIDDEN), experts(), torch.ones(EXPERTS, HIDDEN, HIDDEN)
    with pymoe.ops.check_indices():
        inside = compiled(*arguments)
    assert torch.equal(inside, compiled(*arguments))
    assert torch.equal(inside, layer(*arguments))
    assert len(graphs) == 1


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize(("text", "expected"), [("", "False"), ("0", "False"), ("1", "True")])
def test_the_environment_sets_the_first_mode(text, expected):
    result = import_with(text)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == expected


def test_the_environment_is_not_guessed_at():
    result = import_with("yes")
    assert result.returncode != 0
    assert "PYMOE_CHECK_INDICES must be 0 or 1, got 'yes'" in result.stderr


def import_with(text):
    program = "from pymoe.ops import index_checks; print(index_checks._enabled)"
    environment = {**os.environ, "PYMOE_CHECK_INDICES": text}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
