"""Runs the tests of operators and layers on every device that torch sees.

Tests are written as if there were one device. If torch sees a GPU, each test of tests/ops, tests/nn and
tests/test_bugs.py is collected a second time for it (``--device`` overrides this). For such a test

* the fixture ``device``, which every test has, is the GPU;
* ``torch`` in the test's module makes tensors there: ``torch.randn(3, 4, generator=g)`` draws on the CPU, so that the
  numbers are the same, and moves the result. Functions of :data:`MAKERS` that the module imported do so too. The
  library under test sees the real ``torch``, and must place its tensors itself;
* samples of a specification, which are made when tests are collected, are moved by :func:`moved`.

``@pytest.mark.only_on("cpu")`` is for tests that concern one device only: threads, instruction sets, sanitizers.

``--device pretended`` needs no GPU: its tensors report another device, cannot be combined with CPU tensors, and are
computed by the CPU kernels (see pretended.py). This tests the tests, not the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from inspect import isgeneratorfunction
from types import FunctionType, ModuleType

import pretended
import torch
from specs import ErrorInput, RawCall
from torch import Tensor

from pymoe.bench.calls import Sample, map_tensors, same_layout_copy

CPU = torch.device("cpu")
DEVICES = {"cpu": CPU, "cuda": torch.device("cuda", 0), "pretended": pretended.DEVICE}
PREPARED = {"cpu": nullcontext, "cuda": nullcontext, "pretended": pretended.pretended}
"""The context in which a test on each device runs."""
FOLDERS = ("ops", "nn", "gpu", "test_bugs.py")
"""The parts of tests/ that run on every device."""

FACTORIES = {"arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"}
FACTORIES |= {"rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}
MAKERS = ("pymoe.bench.operators", "specs.routings", "specs.samples")


def seen() -> list[str]:
    """Return the default devices of tests."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def moved(sample, device):
    """Return a tensor, sample, raw call or error input on ``device``, in the same layout; leaves stay leaves."""
    if device == CPU or not isinstance(sample, (Tensor, Sample, RawCall, ErrorInput)):
        return sample
    if isinstance(sample, ErrorInput):  # a message that names the device names the new one
        return replace(
            sample,
            sample=moved(sample.sample, device),
            match=sample.match.replace("(cpu)", f"({device})").replace("got cpu", f"got {device}"),
        )
    copies: dict[int, Tensor] = {}

    def move(value: Tensor) -> Tensor:
        if value.device != CPU:  # placed on another device on purpose
            return value
        if id(value) not in copies:  # a tensor that occurs twice in a sample stays one tensor
            copies[id(value)] = same_layout_copy(value, device).requires_grad_(value.requires_grad)
        return copies[id(value)]

    if isinstance(sample, Sample):
        return replace(sample, args=map_tensors(sample.args, move), kwargs=map_tensors(sample.kwargs, move))
    if isinstance(sample, RawCall):
        return replace(sample, args=map_tensors(sample.args, move))
    return move(sample)


class TorchOn:
    """Wraps the module ``torch`` so that functions make tensors on ``device`` unless another device is given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str):
        value = getattr(torch, name)
        if name not in FACTORIES:
            return value

        def make(*args, requires_grad=False, **kwargs):
            made = value(*args, **kwargs)
            if kwargs.get("device") is None and not any(isinstance(arg, Tensor) for arg in args):
                made = made.to(self._device)
            return made.requires_grad_(requires_grad) if requires_grad else made

        return make


def replacements(module: ModuleType, device: torch.device) -> Iterator[tuple[ModuleType, str, object]]:
    """Yield (module, name, value) for each name to replace, in a test's module and in the helpers of tests/nn, so that
    tensors are made on ``device``.
    """
    helpers = [sys.modules[name] for name in ("moe_layers", "naive_moe") if name in sys.modules]
    for one in (module, *helpers):
        for name, value in vars(one).items():
            if value is torch:
                yield one, name, TorchOn(device)
            elif isinstance(value, FunctionType) and value.__module__ in MAKERS and not isgeneratorfunction(value):
                yield one, name, lambda *args, make=value, **kwargs: moved(make(*args, **kwargs), device)
