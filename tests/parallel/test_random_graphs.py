"""Tests that a map equals the loop over its calls on random graphs, with equal bits in every run.

random_maps.py makes the graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_maps import Outcome, outcome, serial
from torch import Tensor

import pymoe

GRAPHS, REPEATED, REPEATS = 200, 14, 50
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12, torch.complex128: 1e-12}  # relative, in the Frobenius norm


def the_same(found: Any, expected: Any) -> bool:
    """Return whether values are equal; tensors must also agree in dtype and shape."""
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return type(found) is type(expected) and found == expected
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


def close(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    return bool((found - expected).norm() <= ROUNDING[expected.dtype] * expected.norm())


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """Return the differences between a map and a loop. Outputs must be equal bit for bit, because the computations
    are the same.
    """
    if len(found.outputs) != len(expected.outputs):
        return [f"{len(found.outputs)} outputs for {len(expected.outputs)}"]
    names = [
        f"output {i}" for i, pair in enumerate(zip(found.outputs, expected.outputs, strict=True)) if not the_same(*pair)
    ]
    names += [
        f"requires_grad of output {i}: {pair[0]} for {pair[1]}"
        for i, pair in enumerate(zip(found.needs_grad, expected.needs_grad, strict=True))
        if pair[0] != pair[1]
    ]
    names += [
        f"gradient of {name}: {found.gradients[name]} for {wanted}"
        for name, wanted in expected.gradients.items()
        if not close(found.gradients[name], wanted)
    ]
    return names


@pytest.fixture(autouse=True)
def many_workers():
    with pymoe.runtime.parallel_workers(4):
        yield


@pytest.mark.thinned(usual=60)
@pytest.mark.parametrize("seed", range(GRAPHS))
def test_a_map_equals_the_loop(seed):
    assert differences(outcome(seed, pymoe.map_with_parallel_backward), outcome(seed, serial)) == []


@pytest.mark.thinned(usual=6)
@pytest.mark.parametrize("seed", range(REPEATED))
def test_repeats_of_a_map_are_equal_to_the_bit(seed):
    """Calls sleep for random times, so that they end in another order each time."""
    first = outcome(seed, pymoe.map_with_parallel_backward)
    for repeat in range(REPEATS):
        with pymoe.runtime.parallel_workers(1 + repeat % 4):
            found = outcome(seed, pymoe.map_with_parallel_backward)
        assert all(the_same(*pair) for pair in zip(found.outputs, first.outputs, strict=True))
        assert all(the_same(found.gradients[name], wanted) for name, wanted in first.gradients.items())


def test_graphs_are_of_all_kinds():
    """If the graphs lacked variety, the tests above would prove little."""
    outcomes = [outcome(seed, serial) for seed in range(GRAPHS)]
    outputs = [value for one in outcomes for value in one.outputs]
    dtypes = {value.dtype for value in outputs if isinstance(value, Tensor)}
    assert dtypes >= {torch.float32, torch.float64, torch.complex128, torch.int64}
    assert sum(value is None for value in outputs) >= 50
    gradients = [value for one in outcomes for value in one.gradients.values()]
    assert sum(value is None for value in gradients) >= 50
    assert sum(value is not None and bool(value.abs().sum() > 0) for value in gradients) >= 2 * GRAPHS
