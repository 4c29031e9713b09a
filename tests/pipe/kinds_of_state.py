"""Kinds of state: layers that read a value that they keep, and then write to it. Some writes show neither in version
counters nor in attributes of modules.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy
import torch
from torch import nn
from torch.ao import quantization

from pymoe.pipe.execution import held_values

CHUNKS = 4
LARGE = held_values.SMALL_BYTES // 8 + 1
KINDS = {}
MAY_FAIL = {"LargeLaterInTheStep", "LargeByDataLater"}
"""With these, a step may fail if writes begin in the middle of it: earlier micro-batches' state was not copied."""
FOREIGN = set()
"""Kinds of state that cannot be restored."""


def kind(name, base, *, foreign=False, **members):
    """Define a kind of state: a subclass of ``base`` with these methods and attributes."""
    KINDS[name] = type(name, (base,), members)
    if foreign:
        FOREIGN.add(name)
    return KINDS[name]


def put(self, value):
    self.kept = value


class Keeps(nn.Module):
    """Divides by a kept value, and then changes it; ``on``: whether it does."""

    begins = 0
    """The number of the forward, after it was switched on, in which it begins to write."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.on = True
        self.forwards = 0
        self.make(torch.ones(()))

    def forward(self, x):
        y = self.linear(x) / self.read().clone()
        self.forwards += self.begins > 0  # counted only if needed, as a counter is itself state
        if self.on and self.forwards >= self.begins:
            with torch.no_grad():
                self.write(0.9 * self.read() + 0.1 * x.abs().mean())
        return y

    def make(self, value):
        self.register_buffer("kept", value)

    def read(self):
        return self.kept

    def write(self, value):
        self.kept.copy_(value)

    def state(self):
        return [self.read().clone()]


class Holds(Keeps):
    """Keeps what ``begin`` returns in an attribute."""

    def begin(self, value):
        return value

    def make(self, value):
        self.kept = self.begin(value)


class Anew(Holds):
    """State that cannot be copied, or that copies would share."""

    def __deepcopy__(self, memo):
        again = type(self)()
        again.linear.load_state_dict(self.linear.state_dict())
        return again


Buffer = kind("Buffer", Keeps)
kind("ReplacedBuffer", Keeps, write=put)
kind("Counter", Keeps, begins=1)  # counts forwards in a number from which nothing is computed
kind("LaterInTheStep", Keeps, begins=CHUNKS + 3)
kind("BehindTheCounter", Keeps, write=lambda self, value: self.kept.data.copy_(value))
kind("ByNumpy", Keeps, write=lambda self, value: self.kept.numpy().fill(value.numpy()))
kind("PlainTensor", Holds)
kind("ReplacedTensor", Holds, write=put)
kind(
    "AttributeThatComes",
    Keeps,
    make=lambda self, value: None,
    read=lambda self: getattr(self, "kept", torch.ones(())),
    write=put,
)

InList = kind(
    "InList",
    Holds,
    begin=lambda self, value: [value],
    read=lambda self: self.kept[0],
    write=lambda self, value: self.kept[0].copy_(value),
)
kind("ReplacedInList", InList, write=lambda self, value: self.kept.__setitem__(0, value))
grown = {"read": lambda self: self.kept[-1], "write": lambda self, value: self.kept.append(value)}
kind("ListThatGrows", InList, **grown)
kind(
    "InDeque",
    InList,
    begin=lambda self, value: deque([value, value], maxlen=2),
    write=lambda self, value: self.kept.append(value),
)
InDict = kind(
    "InDict",
    Holds,
    begin=lambda self, value: {"a": {"b": (value,)}},
    read=lambda self: self.kept["a"]["b"][0],
    write=lambda self, value: self.read().copy_(value),
)
kind("ReplacedInDict", InDict, write=lambda self, value: self.kept["a"].update(b=(value,)))
InObject = kind(
    "InObject",
    Holds,
    foreign=True,
    begin=lambda self, value: SimpleNamespace(value=value),
    read=lambda self: self.kept.value,
    write=lambda self, value: setattr(self.kept, "value", value),
)
kind(
    "Number",
    Holds,
    begin=lambda self, value: float(value),
    read=lambda self: torch.tensor(self.kept),
    write=lambda self, value: setattr(self, "kept", float(value)),
)
kind(
    "Generator",
    Anew,
    begin=lambda self, value: torch.Generator().manual_seed(3),
    read=lambda self: 1 + torch.rand((), generator=self.kept),
    write=lambda self, value: None,
    state=lambda self: [self.kept.get_state()],
)


def frozen(self, value):
    return nn.Parameter(value, requires_grad=False)


ParameterWithoutGradient = kind("ParameterWithoutGradient", Holds, begin=frozen)  # updates like a momentum encoder
kind("ParameterData", ParameterWithoutGradient, write=lambda self, value: setattr(self.kept, "data", value))


class ParameterOfAnUnregisteredModule(ParameterWithoutGradient):
    def make(self, value):
        self.inside = [Keeps.__new__(Keeps)]
        nn.Module.__init__(self.inside[0])
        self.inside[0].kept = nn.Parameter(value, requires_grad=False)

    def read(self):
        return self.inside[0].kept

    def write(self, value):
        self.read().copy_(value)


class Large(Keeps):
    def make(self, value):
        self.register_buffer("kept", value.expand(LARGE).clone())

    def read(self):
        return self.kept[0]


class LastOutput(Keeps):
    """Keeps its last output with its history."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Norm(nn.Module):
    """A batch norm; ``on``: whether it is in training mode."""

    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm, self.on = nn.Linear(4, 4), norm, True

    def forward(self, x):
        self.norm.train(self.on)
        return self.norm(self.linear(x))

    def state(self):
        return [value.clone() for value in self.norm.buffers()]


class Observer(Norm):
    """A quantisation observer; ``on``: whether it observes and quantises."""

    def forward(self, x):
        self.norm.apply(quantization.enable_observer if self.on else quantization.disable_observer)
        self.norm.apply(quantization.enable_fake_quant if self.on else quantization.disable_fake_quant)
        return self.norm(self.linear(x).float()).to(x.dtype)


class OwnStatistics(Norm):
    """A user's class whose statistics ``F.batch_norm`` updates."""

    def __init__(self):
        super().__init__(nn.Module())
        self.norm.register_buffer("running_mean", torch.zeros(4))
        self.norm.register_buffer("running_var", torch.ones(4))

    def forward(self, x):
        return nn.functional.batch_norm(
            self.linear(x), self.norm.running_mean, self.norm.running_var, training=self.on, momentum=0.3
        )


def observer(made):
    return lambda: Observer(made(quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255).float())


kind("LargeLaterInTheStep", Large, begins=CHUNKS + 3)
KINDS.update(
    {
        **{one.__name__: one for one in (ParameterOfAnUnregisteredModule, Large, LastOutput, OwnStatistics)},
        "BatchNorm": lambda: Norm(nn.BatchNorm1d(4)),
        "SpectralNorm": lambda: Norm(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
        "FakeQuantize": observer(quantization.FakeQuantize),
        "FusedFakeQuantize": observer(quantization.FusedMovingAvgObsFakeQuantize),
    }
)

# --- state that is written without a new version of the tensor: it is copied only once this has been noticed ---


def by_data(self, value):
    self.kept.data.copy_(value.expand_as(self.kept))


def by_numpy(self, value):
    self.kept.numpy()[...] = value.numpy()


ParameterByData = kind(  # updates like the momentum encoders of BYOL and MoCo
    "ParameterByData", ParameterWithoutGradient, write=lambda self, value: self.kept.data.mul_(0).add_(value)
)
large = {"read": Large.read, "begin": lambda self, value: frozen(self, value.expand(LARGE).clone())}
kind("LargeParameterByData", ParameterByData, **large)
kind("TrainedByData", ParameterByData, begin=lambda self, value: nn.Parameter(value))
LargeByData = kind("LargeByData", Large, write=by_data)
kind("LargeByDataLater", LargeByData, begins=CHUNKS + 3)
kind("LargeByNumpy", Large, write=by_numpy)
kind("PlainLargeByNumpy", Holds, begin=lambda self, value: value.expand(LARGE).clone(), read=Large.read, write=by_numpy)
kind("StridedByData", LargeByData, make=lambda self, value: put(self, value.expand(LARGE, 3).clone()[:, 1]))


class CodebookByData(ParameterByData):
    """That of a VQ-VAE."""

    def make(self, value):
        self.codebook = nn.Embedding(LARGE // 4 + 1, 4)
        self.codebook.weight.data.fill_(value)

    def read(self):
        return self.codebook.weight[1, 1].detach()

    def write(self, value):
        self.codebook.weight.data.copy_(value.expand_as(self.codebook.weight))


class NormalisedByData(Keeps):
    """Writes before it reads, so that its graph keeps the written value."""

    def forward(self, x):
        if self.on:
            weight = self.linear.weight
            weight.data.copy_(nn.functional.normalize(weight.data))
        return self.linear(x)

    def state(self):
        return [self.linear.weight.detach().clone()]


KINDS.update((one.__name__, one) for one in (CodebookByData, NormalisedByData))

# --- state that is not registered in a module ---


def enclosing(kept):
    return lambda: kept


InClosure = kind(
    "InClosure",
    Anew,
    foreign=True,
    begin=lambda self, value: enclosing([value]),
    read=lambda self: self.kept()[0],
    write=lambda self, value: self.kept().__setitem__(0, value),
)
kind("TensorInClosure", InClosure, write=lambda self, value: self.kept()[0].copy_(value))
kind("InDefault", InClosure, foreign=True, begin=lambda self, value: lambda kept=[value]: kept)
# State of a function that torch has wrapped.
kind("InDecorator", InClosure, foreign=True, begin=lambda self, value: torch.no_grad()(enclosing([value])))


class InVariableOfClosure(Anew):
    def make(self, value):
        def read():
            return value

        def write(other):
            nonlocal value
            value = other

        self.functions = read, write

    def read(self):
        return self.functions[0]()

    def write(self, value):
        self.functions[1](value)


class InAttributeOfFunction(Anew):
    def make(self, value):
        self.cell = lambda: self.cell.kept
        self.cell.kept = value

    def read(self):
        return self.cell()

    def write(self, value):
        self.cell.kept = value


class Slots:
    __slots__ = ("unset", "value")

    def __init__(self, value):
        self.value = value

    def read(self):
        return self.value

    def write(self, value):
        self.value = value


class InBoundMethod(Anew):
    def make(self, value):
        kept = Slots(value)
        self.read, self.write = kept.read, kept.write


class InBuiltinMethod(Anew):
    def make(self, value):
        kept = [value]
        self.add, self.take = kept.append, kept.__getitem__

    def read(self):
        return self.take(-1)

    def write(self, value):
        self.add(value)


class WithAttribute(dict):
    pass


class InSubclassOfDict(InObject):
    def make(self, value):
        self.kept = WithAttribute()
        self.kept.value = value


kind("InSlots", InObject, foreign=True, begin=lambda self, value: Slots(value))
kind(
    "InPartial",
    Holds,
    begin=lambda self, value: partial(list.__getitem__, [value]),
    read=lambda self: self.kept(0),
    write=lambda self, value: self.kept.args[0].__setitem__(0, value),
)
KINDS.update(
    (one.__name__, one)
    for one in (InVariableOfClosure, InAttributeOfFunction, InBoundMethod, InBuiltinMethod, InSubclassOfDict)
)
FOREIGN |= {"InVariableOfClosure", "InAttributeOfFunction", "InBoundMethod", "InSubclassOfDict"}


class Draws(Anew):
    """Keeps an object that changes when it is read."""

    def read(self):
        return torch.tensor(1.0 + 0.1 * next(self.kept))

    def write(self, value):
        pass

    def state(self):
        return [self.read()]


kind("Counts", Draws, foreign=True, begin=lambda self, value: itertools.count())
kind("Iterates", Draws, foreign=True, begin=lambda self, value: iter([*range(500)]))
kind("GeneratorFunction", Draws, foreign=True, begin=lambda self, value: (number for number in range(500)))
kind("Cycles", Draws, foreign=True, begin=lambda self, value: itertools.cycle([1, 4, 2, 9, 7]))
drawn = {"read": lambda self: torch.tensor(1.0 + self.kept.random())}
kind("PythonRandom", Draws, begin=lambda self, value: random.Random(3), **drawn)
kind(
    "PythonRandomMethod",
    Draws,
    begin=lambda self, value: random.Random(3).random,
    read=lambda self: torch.tensor(1.0 + self.kept()),
)
kind("NumpyGenerator", Draws, begin=lambda self, value: numpy.random.default_rng(3), **drawn)
kind("NumpyMersenne", Draws, begin=lambda self, value: numpy.random.Generator(numpy.random.MT19937(3)), **drawn)
kind(
    "NumpyRandomState",
    Draws,
    begin=lambda self, value: numpy.random.RandomState(3),
    read=lambda self: torch.tensor(1.0 + abs(self.kept.standard_normal())),  # of which it keeps every other number
)

Array = kind(
    "Array",
    Holds,
    begin=lambda self, value: numpy.full(3, float(value)),
    read=lambda self: torch.tensor(self.kept[1]),
    write=lambda self, value: self.kept.fill(float(value)),
)
kind("LargeArray", Array, begin=lambda self, value: numpy.full(LARGE, float(value)))
kind("StridedArray", Array, begin=lambda self, value: numpy.full((3, 3), float(value))[:, 1])
# Negative strides, which torch does not have.
kind("ReversedArray", Array, foreign=True, begin=lambda self, value: numpy.full(3, float(value))[::-2])
kind(
    "ArrayOfObjects",
    Array,
    foreign=True,
    begin=lambda self, value: numpy.array([value, value, None], dtype=object),
    read=lambda self: self.kept[1],
    write=lambda self, value: self.kept.__setitem__(1, value),
)
kind(
    "StructuredArray",
    Array,
    begin=lambda self, value: numpy.full(3, float(value)).view([("first", "f8")]),
    read=lambda self: torch.tensor(self.kept["first"][1]),
    write=lambda self, value: self.kept.__setitem__("first", float(value)),
)


class ViewedArray(Array):
    """A read-only view of a writable array."""

    def make(self, value):
        self.kept = self.begin(value)[:]
        self.kept.flags.writeable = False

    def write(self, value):
        self.kept.base[...] = float(value)

    __deepcopy__ = Anew.__deepcopy__


def of_class(begin, change):
    """Return a layer with its own class, which holds ``kept``."""

    def make():
        class OfClass(Keeps):
            kept = begin()

            def make(self, value):
                pass

            def read(self):
                kept = self.kept
                return torch.as_tensor(kept[-1] if isinstance(kept, list) else kept)

            def write(self, value):
                change(type(self), value)

            def __deepcopy__(self, memo):
                again = make()
                again.linear.load_state_dict(self.linear.state_dict())
                return again

        return OfClass()

    return make


def in_method():
    """Return a layer whose forward encloses a variable."""
    kept = [torch.ones(())]

    class InMethod(Keeps):
        def make(self, value):
            pass

        def read(self):
            return kept[0]

        def write(self, value):
            kept[0] = value

        def __deepcopy__(self, memo):
            again = in_method()
            again.linear.load_state_dict(self.linear.state_dict())
            return again

    return InMethod()


KINDS |= {
    "ViewedArray": ViewedArray,
    "ClassNumber": of_class(lambda: 1.0, lambda kind, value: setattr(kind, "kept", float(value))),
    "ClassTensor": of_class(lambda: torch.ones(()), lambda kind, value: kind.kept.copy_(value)),
    "ClassTensorByData": of_class(lambda: torch.ones(LARGE)[0], lambda kind, value: kind.kept.data.copy_(value)),
    "ClassList": of_class(lambda: [torch.ones(())], lambda kind, value: kind.kept.append(value)),
    "ReplacedClassTensor": of_class(lambda: torch.ones(()), lambda kind, value: setattr(kind, "kept", value)),
    "InMethod": in_method,
}
FOREIGN |= {"ClassNumber", "ClassList", "ReplacedClassTensor", "InMethod"}
