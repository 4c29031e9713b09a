"""Every Python value that has gone into a graph is watched: in any kind of holder, at any depth, from any place. The
next call uses a changed value; values that cannot be watched are refused by name. The captured value is never used
silently.
"""

import argparse
import array
import collections
import contextvars
import ctypes
import dataclasses
import enum
import functools
import hashlib
import itertools
import operator
import queue
import threading
import types
import weakref

import numpy
import pytest
import torch
import traced_models
from torch import nn
from traced_models import WIDTH, rows

from pymoe import pipe_split, pipeline
from pymoe.pipe import CaptureError
from pymoe.pipe.capture.snapshots import Snapshots

pytestmark = pytest.mark.usefixtures("doubles")


class Plain:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Private(Plain):
    """Shows its value only under other names."""

    @property
    def it(self):
        return self.value

    def __getattr__(self, name):
        return self.__dict__["value"] if name == "other" else super().__getattribute__(name)


@dataclasses.dataclass
class Data:
    value: object


class Pair(collections.namedtuple("Pair", ["value", "rest"])):
    pass


class MyList(list):
    pass


class MyDict(dict):
    def __getitem__(self, key):
        return super().__getitem__(key)


class Extra(float):
    """A number with an attribute."""


def with_attribute(holder, value):
    holder.value = value
    return holder


def a_class(value):
    return type("Settings", (), {"value": value})


def an_enumeration(value):
    return enum.Enum("Choice", {"A": Plain(value)})


def a_function(value):
    return with_attribute(lambda: None, value)


def a_default(value):
    def function(given=[value]):  # noqa: B006 (the test needs a mutable default)
        return given

    return function


def a_keyword(value):
    def function(*, given=value):
        return given

    return function


def a_cell(value):
    return lambda: value


def a_partial(value):
    return functools.partial(list, [value])


def a_variable(value):
    variable = contextvars.ContextVar("variable")
    variable.set(value)
    return variable


def put_attribute(holder, value):
    holder.value = value


def put_item(holder, value):
    holder[0] = value


def put_key(holder, value):
    holder["key"] = value


value_of = operator.attrgetter("value")
item_of = operator.itemgetter(0)
key_of = operator.itemgetter("key")

# Functions that make a holder of a value, code that gets the value, and functions that replace it.
HOLDERS = {
    "list": (lambda v: [v], item_of, put_item),
    "list of a thousand": (lambda v: [v, *range(1000)], item_of, put_item),
    "dict": (lambda v: {"key": v}, key_of, put_key),
    "dict of a thousand": (lambda v: {**dict.fromkeys(range(1000)), "key": v}, key_of, put_key),
    "OrderedDict": (lambda v: collections.OrderedDict(key=v), key_of, put_key),
    "defaultdict": (lambda v: collections.defaultdict(int, key=v), key_of, put_key),
    "ChainMap": (lambda v: collections.ChainMap({}, {"key": v}), key_of, lambda h, v: h.maps[1].update(key=v)),
    "UserDict": (lambda v: collections.UserDict(key=v), key_of, put_key),
    "deque": (lambda v: collections.deque([v]), item_of, put_item),
    "list of one's own": (lambda v: MyList([v]), item_of, put_item),
    "its attribute": (lambda v: with_attribute(MyList(), v), value_of, put_attribute),
    "dict of one's own": (lambda v: MyDict(key=v), key_of, put_key),
    "named tuple": (lambda v: Pair([v], 0), lambda h: h.value[0], lambda h, v: put_item(h.value, v)),
    "tuple": (lambda v: ([v], 0), lambda h: h[0][0], lambda h, v: put_item(h[0], v)),
    "object": (Plain, value_of, put_attribute),
    "slots": (Slotted, value_of, put_attribute),
    "property": (Private, operator.attrgetter("it"), put_attribute),
    "__getattr__": (Private, operator.attrgetter("other"), put_attribute),
    "dataclass": (Data, value_of, put_attribute),
    "SimpleNamespace": (lambda v: types.SimpleNamespace(value=v), value_of, put_attribute),
    "argparse": (lambda v: argparse.Namespace(value=v), value_of, put_attribute),
    "class": (a_class, value_of, put_attribute),
    "class of an object": (lambda v: a_class(v)(), value_of, lambda h, v: put_attribute(type(h), v)),
    "enumeration": (an_enumeration, lambda h: h.A.value.value, lambda h, v: put_attribute(h.A.value, v)),
    "attribute of a number": (lambda v: with_attribute(Extra(1.0), v), value_of, put_attribute),
    "attribute of a function": (a_function, value_of, put_attribute),
    "default": (a_default, lambda h: h()[0], lambda h, v: put_item(h.__defaults__[0], v)),
    "other defaults": (a_default, lambda h: h()[0], lambda h, v: setattr(h, "__defaults__", ([v],))),
    "keyword default": (a_keyword, lambda h: h(), lambda h, v: h.__kwdefaults__.update(given=v)),
    "cell": (a_cell, lambda h: h(), lambda h, v: setattr(h.__closure__[0], "cell_contents", v)),
    "partial": (lambda v: functools.partial(dict, key=v), lambda h: h()["key"], lambda h, v: h.keywords.update(key=v)),
    "argument of a partial": (
        lambda v: functools.partial(list, [v]),
        lambda h: h()[0],
        lambda h, v: put_item(h.args[0], v),
    ),
    "bound method": (lambda v: {"key": v}.get, lambda h: h("key"), lambda h, v: put_key(h.__self__, v)),
    "ContextVar": (a_variable, lambda h: h.get(), lambda h, v: h.set(v)),
    "threading.local": (lambda v: with_attribute(threading.local(), v), value_of, put_attribute),
    "array of objects": (lambda v: numpy.array([v, None], dtype=object), item_of, put_item),
    "unregistered module": (
        lambda v: [with_attribute(nn.Identity(), v)],
        lambda h: h[0].value,
        lambda h, v: put_attribute(h[0], v),
    ),
    "attribute of a tensor": (lambda v: with_attribute(torch.zeros(1), v), value_of, put_attribute),
}
KEPT = {}
HOLDERS["view"] = (
    lambda v: types.MappingProxyType({"key": [v]}),
    lambda h: h["key"][0],
    lambda h, v: put_item(h["key"], v),
)
HOLDERS["weak reference"] = (
    lambda v: weakref.ref(KEPT.setdefault(id(v), Plain(v))),
    lambda h: h().value,
    lambda h, v: put_attribute(h(), v),
)


# Holders that can only hold numbers.
OF_NUMBERS = {
    "array": lambda: array.array("d", [1.5]),
    "bytearray": lambda: bytearray(b"\1"),
    "memoryview": lambda: memoryview(bytearray(b"\1")),
    "numpy array": lambda: numpy.full(1000, 1.5),
    "ctypes array": lambda: (ctypes.c_double * 2)(1.5),
}
VALUES = {"a number": (1.5, 2.5), "the sign of zero": (0.0, -0.0), "a type": (1, True), "a string": ("tanh", "sin")}


def nested(depth, make, get, put, value):
    """Return a holder in a holder, and so on, a function that gets the innermost value, and one that replaces it."""
    innermost = holder = make(value)
    for _ in range(depth - 1):
        holder = make(holder)

    def innermost_of(outer):
        for _ in range(depth):
            outer = get(outer)
        return outer

    return holder, innermost_of, lambda new: put(innermost, new)


@pytest.mark.parametrize("depth", [1, 2, 5, 50])
@pytest.mark.parametrize("name", HOLDERS)
def test_no_holder_hides_a_change_at_any_depth(name, depth):
    for before, after in VALUES.values():
        holder, innermost_of, replace = nested(depth, *HOLDERS[name], before)
        snapshots = Snapshots([("it", lambda missing, holder=holder: holder, "{}")], ())
        assert snapshots.change() is None
        replace(after)
        assert repr(innermost_of(holder)) == repr(after)
        assert str(snapshots.change()).startswith("it")
        assert snapshots.change() is not None, "who asks again is told again"
        replace(before)
        assert snapshots.change() is None


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_no_holder_of_numbers_hides_a_change(name):
    holder = OF_NUMBERS[name]()
    snapshots = Snapshots([("it", lambda missing: [holder], "{}")], ())
    assert snapshots.change() is None
    holder[0] = 3
    assert str(snapshots.change()).startswith("it")


SCALE, UNDER = 1.5, {"one": {"two": [1.5]}}
THIS = types.ModuleType("this")
THIS.__file__ = __file__
THIS.inner = types.ModuleType("inner")
THIS.inner.__file__ = __file__


class Settings:
    scale = 1.5

    class Inner:
        scale = 1.5


class Reads(nn.Module):
    """Has two stages, and multiplies by the result of ``how``."""

    kept = 1.5

    def __init__(self, how, held=None):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.how, self.held = how, held

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.second(x * self.how(self))


def imports(m):
    from traced_models import WORDS as words

    return words


def calls(m):
    return of_a_global()


def of_a_global():
    return UNDER["one"]["two"][0]


class Answers:
    """An object whose methods read another value."""

    def answer(self):
        return UNDER["one"]["two"][0]

    def __getitem__(self, key):
        return SCALE


def put_scale(m):
    globals()["SCALE"] = 2.5


def put_under(m):
    UNDER["one"]["two"][0] = 2.5


def put_into(owner):
    return lambda m: setattr(owner, "scale", 2.5)


THIS.scale = THIS.inner.scale = 1.5
PLACES = {
    "a global variable": (lambda m: SCALE, put_scale, None),
    "deep in one": (lambda m: UNDER["one"]["two"][0], put_under, None),
    "of a called function": (calls, put_under, None),
    "imported within": (imports, lambda m: setattr(traced_models, "WORDS", 7), None),
    "another module": (lambda m: THIS.scale, put_into(THIS), None),
    "a module of a module": (lambda m: THIS.inner.scale, put_into(THIS.inner), None),
    "a module by getattr": (lambda m: getattr(THIS, "sca" + "le"), put_into(THIS), None),
    "a class": (lambda m: Settings.scale, put_into(Settings), None),
    "a class in a class": (lambda m: Settings.Inner.scale, put_into(Settings.Inner), None),
    "a class by getattr": (lambda m: getattr(Settings, "sca" + "le"), put_into(Settings), None),
    "a class in an attribute": (lambda m: m.held.scale, put_into(Settings), Settings),
    "the class of the model": (lambda m: m.kept, lambda m: setattr(Reads, "kept", 2.5), None),
    "a method of an object": (lambda m: m.held.answer(), put_under, Answers()),
    "one that Python calls": (lambda m: m.held["key"], put_scale, Answers()),
    "a function in a dictionary": (lambda m: m.held["f"](), put_under, {"f": of_a_global}),
    "the code of a function": (
        lambda m: m.held(), lambda m: setattr(m.held, "__code__", (lambda: 2.5).__code__), lambda: 1.5
    ),
    "the table's thousandth value": (
        lambda m: m.held[999], lambda m: m.held.__setitem__(999, 2.5), [1.5] * 2000
    ),
    "an event": (lambda m: 1.5 if m.held.is_set() else 1.0, lambda m: m.held.set(), threading.Event()),
}  # fmt: skip


@pytest.fixture
def as_before(monkeypatch):
    for owner in (THIS, THIS.inner, Settings, Settings.Inner):
        monkeypatch.setattr(owner, "scale", 1.5)
    monkeypatch.setattr(Reads, "kept", 1.5)
    monkeypatch.setattr(traced_models, "WORDS", traced_models.WORDS)
    yield
    globals()["SCALE"], UNDER["one"]["two"][0] = 1.5, 1.5


def assert_is_model(pipe, model):
    torch.testing.assert_close(pipe(rows(4)), model(rows(4)), rtol=0, atol=1e-12)


def assert_follows(model, change):
    pipe = pipeline(model, (rows(2),), chunks=2)
    assert_is_model(pipe, model)
    before = model(rows(4))
    change(model)
    assert not torch.equal(model(rows(4)), before), "the change changes nothing, and shows nothing"
    assert_is_model(pipe, model)
    assert len(pipe.staged._variants) == 2
    assert_is_model(pipe, model)
    assert len(pipe.staged._variants) == 2


@pytest.mark.thinned(usual=9)
@pytest.mark.parametrize("name", PLACES)
def test_no_place_hides_a_change(name, as_before):
    how, change, held = PLACES[name]
    assert_follows(Reads(how, held), change)


@pytest.mark.thinned(usual=20)
@pytest.mark.parametrize("name", HOLDERS)
def test_pipes_follow_what_any_holder_holds(name):
    holder, innermost_of, replace = nested(2, *HOLDERS[name], 1.5)
    assert_follows(Reads(lambda m: innermost_of(m.held), holder), lambda m: replace(2.5))


def element(m):
    return [0.5, 1.5, 2.5, 3.5][m.held]


# Ways in which the value of a tensor that is not a buffer becomes a Python value.
TAKEN = {
    "item": (lambda m: m.held.item(), 1.5),
    "float": (lambda m: float(m.held), 1.5),
    "int": (lambda m: int(m.held), 1.5),
    "tolist": (lambda m: m.held.tolist(), 1.5),
    "tolist of several": (lambda m: m.held.tolist()[1], [1.5, 2.5]),
    "index": (element, 1),
    "range": (lambda m: len(range(m.held)), 1),
    "slice": (lambda m: torch.arange(9.0)[m.held :][0], 1),
    "position": (lambda m: torch.arange(9.0)[m.held], 1),
    "fill value": (lambda m: torch.full((WIDTH,), m.held), 1.5),
    "factor": (lambda m: torch.add(torch.ones(WIDTH), torch.ones(WIDTH), alpha=m.held), 1.5),
    "part of a new tensor": (lambda m: torch.tensor([m.held, 1.0])[0], 1.5),
    "str": (lambda m: len(str(m.held)), 9.0),
    "equal": (lambda m: 2.0 if torch.equal(m.held, torch.tensor(1.5)) else 1.0, 1.5),
    "computed from it": (lambda m: (m.held * 2).item(), 1.5),
    "within a list": (lambda m: m.held.unsqueeze(0).sum().item(), 1.5),
}


@pytest.mark.thinned(usual=8)
@pytest.mark.parametrize("name", TAKEN)
def test_numbers_made_of_a_tensor_that_is_no_buffer_are_followed(name):
    how, value = TAKEN[name]
    model = Reads(how, torch.tensor(value))
    try:
        pipe = pipeline(model, (rows(2),), chunks=2)
    except CaptureError:
        return
    for _ in range(3):
        assert_is_model(pipe, model)
        model.held += 1


def test_a_tensor_that_no_number_is_made_of_is_followed_without_another_capture():
    model = Reads(lambda m: m.held * m.held.shape[0], torch.ones(WIDTH))
    pipe = pipeline(model, (rows(2),), chunks=2)
    for _ in range(3):
        assert_is_model(pipe, model)
        model.held += 1
    assert len(pipe.staged._variants) == 1


class Steps:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def __next__(self):
        self.count += 1
        return self.count


def filled():
    numbers = queue.Queue()
    for number in range(99):
        numbers.put(number)
    return numbers


CONSUMED = {
    "iterator": (lambda: iter(range(1, 99)), next),
    "counter": (lambda: itertools.count(1), next),
    "generator": (lambda: (number for number in range(1, 99)), next),
    "object with slots": (Steps, next),
    "deque": (lambda: collections.deque(range(1, 99)), collections.deque.popleft),
    "queue": (filled, queue.Queue.get),
}


@pytest.mark.parametrize("name", CONSUMED)
def test_what_gives_another_value_in_every_call_is_refused_by_name(name):
    make, take = CONSUMED[name]
    with pytest.raises(CaptureError, match="held"):
        pipeline(Reads(lambda m: take(m.held), make()), (rows(2),))


def test_an_object_that_does_not_show_its_state_is_refused_by_name():
    held = {"digests": [hashlib.sha256()]}
    model = Reads(lambda m: m.held["digests"][0].digest()[0], held)
    with pytest.raises(CaptureError, match=r"held\['digests'\]\[0\].*HASH does not show its state"):
        pipeline(model, (rows(2),))
    model.how = lambda m: m.first.weight.shape[0]
    assert_is_model(pipeline(model, (rows(2),), chunks=2), model)


def test_the_name_of_what_has_changed_is_its_path():
    model = Reads(lambda m: m.held["a"].value[1], {"a": Plain([1.0, 1.5])})
    pipe = pipeline(model, (rows(2),), chunks=2)
    model.held["a"].value[1] = 2.5
    assert pipe.staged._now.guards.broken() == "\"held['a'].value[1]\""
