"""Facts that a model's code learns from calls instead of variables: settings of torch, the environment, names that it
looks up, attributes of tensors and of its own class. Captures follow a change, or refuse the call.
"""

import contextlib
import os
import random
import secrets
import sys
import uuid

import numpy
import pytest
import torch
import traced_models
from test_what_capture_has_read import Reads, assert_follows, assert_is_model
from torch import (
    are_deterministic_algorithms_enabled,
    get_float32_matmul_precision,
    get_num_threads,
    is_autocast_enabled,
    is_grad_enabled,
    nn,
)
from traced_models import WIDTH, rows

from pymoe import pipe_split, pipeline
from pymoe.pipe import CaptureError

pytestmark = pytest.mark.usefixtures("doubles")

VALUE = 1.5


class Named(type):
    """A metaclass that gives its classes an attribute."""

    kept = 1.5

    @property
    def computed(cls):
        return Named.kept


class Settings(metaclass=Named):
    pass


class OfClass(Reads):
    scale = 1.5


class Inherits(OfClass):
    __slots__ = ("slot",)


@pytest.fixture(autouse=True)
def as_before():
    threads, variable = torch.get_num_threads(), os.environ.pop("PYMOE_TEST_SCALE", None)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mha.set_fastpath_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    os.environ.pop("PYMOE_TEST_SCALE", None)
    if variable is not None:
        os.environ["PYMOE_TEST_SCALE"] = variable
    Named.kept = OfClass.scale = 1.5
    globals()["VALUE"] = 1.5


def more_threads(m):
    torch.set_num_threads(torch.get_num_threads() + 1)


# Functions by which code reads a setting, and functions that change the setting.
SETTINGS = {
    "threads": (lambda m: torch.get_num_threads(), more_threads),
    "threads by another name": (lambda m: get_num_threads(), more_threads),
    "deterministic": (
        lambda m: 1.0 + are_deterministic_algorithms_enabled(), lambda m: torch.use_deterministic_algorithms(True)
    ),
    "precision": (
        lambda m: 1.0 + (get_float32_matmul_precision() == "high"), lambda m: torch.set_float32_matmul_precision("high")
    ),
    "fast path": (
        lambda m: 1.0 + torch.backends.mha.get_fastpath_enabled(),
        lambda m: torch.backends.mha.set_fastpath_enabled(False),
    ),
    "anomaly mode": (lambda m: 1.0 + torch.is_anomaly_enabled(), lambda m: torch.autograd.set_detect_anomaly(True)),
}  # fmt: skip

ENVIRONMENT = {
    "get": lambda: os.environ.get("PYMOE_TEST_SCALE"),
    "getenv": lambda: os.getenv("PYMOE_TEST_SCALE"),
    "getenvb": lambda: os.getenvb(b"PYMOE_TEST_SCALE"),
    "bytes": lambda: os.environb.get(b"PYMOE_TEST_SCALE"),
    "in": lambda: "PYMOE_TEST_SCALE" in os.environ,
    "dict": lambda: dict(os.environ).get("PYMOE_TEST_SCALE"),
    "copy": lambda: os.environ.copy().get("PYMOE_TEST_SCALE"),
    "items": lambda: dict(os.environ.items()).get("PYMOE_TEST_SCALE"),
    "keys": lambda: "PYMOE_TEST_SCALE" in list(os.environ),
    "union": lambda: (os.environ | {}).get("PYMOE_TEST_SCALE"),
    "number": lambda: len(os.environ) % 2,
}

LOOKED_UP = {
    "globals": lambda m: globals()["VALUE"],
    "eval": lambda m: eval("VALUE"),
    "an expression": lambda m: eval("2 * VALUE"),
    "exec": lambda m: executed(),
}


def executed():
    variables = {}
    exec("made = VALUE", globals(), variables)
    return variables["made"]


OF_CLASSES = {
    "type": lambda m: type(m).scale,
    "__class__": lambda m: m.__class__.scale,
    "order of bases": lambda m: type(m).__mro__[1].scale,
    "vars": lambda m: vars(OfClass)["scale"],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_torch_is_watched_by_whatever_name_it_is_asked(name):
    assert_follows(Reads(SETTINGS[name][0]), SETTINGS[name][1])


def test_the_callers_modes_are_told_by_whatever_name_they_are_asked():
    grad = Reads(lambda m: 1.0 + is_grad_enabled())
    autocast = Reads(lambda m: 1.0 + is_autocast_enabled("cpu"))
    for model, mode in ((grad, torch.no_grad()), (autocast, torch.autocast("cpu", torch.float16))):
        pipe = pipeline(model, (rows(2),), chunks=2)
        for surroundings in (contextlib.nullcontext(), mode, contextlib.nullcontext()):
            with surroundings:
                assert_is_model(pipe, model)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_the_environment_is_watched_however_it_is_read(name):
    ask = ENVIRONMENT[name]
    assert_follows(Reads(lambda m: 2.5 if ask() else 1.5), lambda m: os.environ.update(PYMOE_TEST_SCALE="1"))


@pytest.mark.parametrize("name", LOOKED_UP)
def test_variables_that_the_code_looks_up_by_a_text_are_watched(name):
    assert_follows(Reads(LOOKED_UP[name]), lambda m: globals().update(VALUE=2.5))


@pytest.mark.parametrize(
    "how", [lambda m: sys.modules["traced_models"].WORDS, lambda m: __import__("traced_models").WORDS]
)
def test_variables_of_modules_that_the_code_looks_up_are_watched(how, monkeypatch):
    assert_follows(Reads(how), lambda m: monkeypatch.setattr(traced_models, "WORDS", 7))


@pytest.mark.parametrize("name", OF_CLASSES)
def test_attributes_of_the_models_class_are_watched_when_they_are_read_from_it(name):
    assert_follows(Inherits(OF_CLASSES[name]), lambda m: setattr(OfClass, "scale", 2.5))


def test_a_counter_in_the_models_class_is_refused():
    class Counts(OfClass):
        def forward(self, x):
            type(self).scale += 1
            return super().forward(x)

    before = OfClass.scale
    with pytest.raises(CaptureError, match="scale"):
        pipeline(Counts(lambda m: 1.0), (rows(2),))
    assert OfClass.scale == before


@pytest.mark.parametrize("how", [lambda m: m.held.kept, lambda m: m.held.computed, lambda m: Settings.kept])
def test_what_a_class_has_of_its_own_class_is_watched(how):
    assert_follows(Reads(how, Settings), lambda m: setattr(Named, "kept", 2.5))


def test_a_slot_of_a_module_is_watched():
    model = Inherits(lambda m: m.slot)
    model.slot = 1.5
    assert_follows(model, lambda m: setattr(m, "slot", 2.5))


@pytest.mark.parametrize("of", ["first.weight", "state"])
def test_attributes_that_somebody_has_put_on_parameters_and_buffers_are_there_and_watched(of):
    def tensor(m):
        return m.first.weight if of == "first.weight" else m.state

    model = Reads(lambda m: getattr(tensor(m), "scale", [1.0])[0])
    model.register_buffer("state", torch.zeros(1))
    assert_follows(model, lambda m: setattr(tensor(m), "scale", [1.5]))
    assert_follows(model, lambda m: tensor(m).scale.__setitem__(0, 2.5))
    replaced = nn.Parameter(model.first.weight.detach().clone()) if of == "first.weight" else torch.zeros(1)
    owner = model.first if of == "first.weight" else model
    assert_follows(model, lambda m: setattr(owner, of.rpartition(".")[2], replaced))


@pytest.mark.parametrize("is_before", [False, True])
def test_hooks_of_all_modules_are_watched(is_before):
    def doubled(module, args, output):
        return 2 * output if type(module) is nn.Linear else None

    register = nn.modules.module.register_module_forward_hook
    handles = []
    try:
        if is_before:
            handles.append(register(doubled))
            assert_follows(Reads(lambda m: 1.5), lambda m: handles.pop().remove())
        else:
            assert_follows(Reads(lambda m: 1.5), lambda m: handles.append(register(doubled)))
    finally:
        for handle in handles:
            handle.remove()


class TwoHeads(nn.Module):
    """Initially has one weight in two places."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.second(x)


def test_a_parameter_that_is_no_longer_tied_is_used_and_trained():
    model = TwoHeads()
    pipe = pipeline(model, (rows(2),), chunks=2)
    pipe.step(rows(4), loss_fn=lambda y: y.square().mean())
    for tied in (False, True, False):
        weight = model.first.weight if tied else nn.Parameter(torch.randn(WIDTH, WIDTH))
        model.second.weight = weight
        for _ in range(2):
            assert_is_model(pipe, model)
        model.zero_grad()
        model(rows(4)).square().mean().backward()
        expected = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        pipe.step(rows(4), loss_fn=lambda y: y.square().mean())
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


def test_a_capture_that_was_left_for_a_shape_learns_that_a_parameter_is_no_longer_tied():
    """The capture noted the parameter, but postponed the check of sharing to the next call, which then saw no
    replacement.
    """
    model = TwoHeads()
    pipe = pipeline(model, (rows(2),), chunks=2)
    assert_is_model(pipe, model)
    bias = model.second.bias
    model.second.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    model.second.bias = nn.Parameter(torch.randn(1))
    assert_is_model(pipe, model)
    model.second.bias = bias
    assert_is_model(pipe, model)


ENTROPY = {
    "a generator of Python": lambda: random.Random().random(),
    "the system's": lambda: random.SystemRandom().random(),
    "secrets": lambda: secrets.randbelow(9),
    "urandom": lambda: os.urandom(1)[0],
    "uuid4": lambda: uuid.uuid4().int % 9,
    "a generator of numpy": lambda: numpy.random.default_rng().random(),
}


@pytest.mark.parametrize("name", ENTROPY)
def test_random_numbers_of_a_generator_without_a_seed_are_refused(name):
    with pytest.raises(CaptureError, match="random numbers from the operating system"):
        pipeline(Reads(lambda m: 1.0 + ENTROPY[name]()), (rows(2),))


def test_a_generator_with_a_seed_gives_the_same_numbers_in_every_call():
    model = Reads(lambda m: random.Random(3).random() + numpy.random.default_rng(3).random())
    assert_is_model(pipeline(model, (rows(2),), chunks=2), model)


def packs(m):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: 2 * tensor, lambda tensor: tensor):
        return m.first.bias.square()


LOST = {
    "gradient": lambda m: 1.0 if m.first.weight.grad is None else 2.0,
    "grad_fn": lambda m: 1.0 if (2 * m.first.bias).grad_fn is None else 2.0,
    "leaf": lambda m: 1.0 if (2 * m.first.bias).is_leaf else 2.0,
    "version": lambda m: 1.0 + m.first.bias._version,
    "packs": packs,
}


@pytest.mark.parametrize("name", LOST)
def test_what_stand_ins_cannot_answer_or_a_graph_would_lose_is_refused(name):
    with pytest.raises(CaptureError, match=name):
        pipeline(Reads(LOST[name]), (rows(2),))


@pytest.mark.parametrize(("given", "other"), [(0.0, -0.0), (1.0, 1), (1.0, True), (float("nan"), 1.0)])
def test_another_constant_is_refused_also_if_it_is_equal(given, other):
    model = TwoHeads()
    model.forward = lambda x, scale: nn.Module.__getattr__(model, "first")(x) * scale
    pipe = pipeline(model, (rows(2), given))
    torch.testing.assert_close(pipe(rows(2), given), model(rows(2), given), equal_nan=True)
    with pytest.raises(ValueError, match="as in the capture"):
        pipe(rows(2), other)
