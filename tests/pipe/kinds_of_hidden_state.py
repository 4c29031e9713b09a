"""Kinds of state that neither version counters nor attributes of modules show."""

from __future__ import annotations

import itertools
import random
from functools import partial

import numpy
import torch
from kinds_of_state import CHUNKS, LARGE, OPEN_KINDS, InObject, Keeps, Large, ParameterWithoutGradient
from torch import nn

# --- state that is written without a new version of the tensor: it is copied only once this has been noticed ---


class ParameterByData(ParameterWithoutGradient):
    """Updates like the momentum encoders of BYOL and MoCo."""

    def write(self, value):
        self.kept.data.mul_(0).add_(value)


class LargeParameterByData(Large, ParameterByData):
    def make(self, value):
        self.kept = nn.Parameter(value.expand(LARGE).clone(), requires_grad=False)


class TrainedByData(ParameterByData):
    def make(self, value):
        self.kept = nn.Parameter(value)


class CodebookByData(LargeParameterByData):
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


class LargeByData(Large):
    def write(self, value):
        self.kept.data.copy_(value.expand(LARGE))


class LargeByNumpy(Large):
    def write(self, value):
        self.kept.numpy()[...] = value.numpy()


class PlainLargeByNumpy(LargeByNumpy):
    def make(self, value):
        self.kept = value.expand(LARGE).clone()


class StridedByData(LargeByData):
    def make(self, value):
        self.kept = value.expand(LARGE, 3).clone()[:, 1]


class LargeByDataLater(LargeByData):
    begins = CHUNKS + 3


# --- state that is not registered in a module ---


class Anew(Keeps):
    """State that cannot be copied, or that copies would share."""

    def __deepcopy__(self, memo):
        again = type(self)()
        again.linear.load_state_dict(self.linear.state_dict())
        return again


class InClosure(Anew):
    def make(self, value):
        kept = [value]
        self.cell = lambda: kept

    def read(self):
        return self.cell()[0]

    def write(self, value):
        self.cell()[0] = value


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


class TensorInClosure(InClosure):
    def write(self, value):
        self.cell()[0].copy_(value)


class InDefault(Anew):
    def make(self, value):
        def cell(kept=[value]):  # noqa: B006
            return kept

        self.cell = cell

    read, write = InClosure.read, InClosure.write


class InAttributeOfFunction(Anew):
    def make(self, value):
        self.cell = lambda: self.cell.kept
        self.cell.kept = value

    def read(self):
        return self.cell()

    def write(self, value):
        self.cell.kept = value


class InDecorator(Anew):
    """State of a function that torch has wrapped."""

    def make(self, value):
        kept = [value]
        self.cell = torch.no_grad()(lambda: kept)

    read, write = InClosure.read, InClosure.write


class Slots:
    __slots__ = ("unset", "value")

    def __init__(self, value):
        self.value = value

    def read(self):
        return self.value

    def write(self, value):
        self.value = value


class InSlots(InObject):
    def make(self, value):
        self.kept = Slots(value)


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


class InPartial(Keeps):
    def make(self, value):
        self.cell = partial(list.__getitem__, [value])

    def read(self):
        return self.cell(0)

    def write(self, value):
        self.cell.args[0][0] = value


class InSubclassOfDict(Keeps):
    def make(self, value):
        self.kept = WithAttribute()
        self.kept.value = value

    def read(self):
        return self.kept.value

    def write(self, value):
        self.kept.value = value


class WithAttribute(dict):
    pass


class Draws(Anew):
    """Keeps an object that changes when it is read."""

    def make(self, value):
        self.kept = self.begin()

    def write(self, value):
        pass

    def state(self):
        return [self.read()]


class Counts(Draws):
    def begin(self):
        return itertools.count()

    def read(self):
        return torch.tensor(1.0 + 0.1 * next(self.kept))


class Iterates(Counts):
    def begin(self):
        return iter([*range(500)])


class GeneratorFunction(Counts):
    def begin(self):
        return (number for number in range(500))


class Cycles(Counts):
    def begin(self):
        return itertools.cycle([1, 4, 2, 9, 7])


class PythonRandom(Draws):
    def begin(self):
        return random.Random(3)

    def read(self):
        return torch.tensor(1.0 + self.kept.random())


class PythonRandomMethod(Draws):
    def begin(self):
        return random.Random(3).random

    def read(self):
        return torch.tensor(1.0 + self.kept())


class NumpyGenerator(PythonRandom):
    def begin(self):
        return numpy.random.default_rng(3)


class NumpyMersenne(PythonRandom):
    def begin(self):
        return numpy.random.Generator(numpy.random.MT19937(3))


class NumpyRandomState(PythonRandom):
    def begin(self):
        return numpy.random.RandomState(3)

    def read(self):
        return torch.tensor(1.0 + abs(self.kept.standard_normal()))  # of which it keeps every other number


class Array(Keeps):
    def make(self, value):
        self.kept = numpy.full(self.size(), float(value))

    def size(self):
        return 3

    def read(self):
        return torch.tensor(self.kept[1])

    def write(self, value):
        self.kept[...] = float(value)


class LargeArray(Array):
    def size(self):
        return LARGE


class StridedArray(Array):
    def make(self, value):
        self.kept = numpy.full((3, 3), float(value))[:, 1]


class ReversedArray(Array):
    """An array with negative strides, which torch does not have."""

    def make(self, value):
        self.kept = numpy.full(3, float(value))[::-2]


class ViewedArray(Array):
    """A read-only view of a writable array."""

    def make(self, value):
        base = numpy.full(3, float(value))
        self.kept = base[:]
        self.kept.flags.writeable = False

    def write(self, value):
        self.kept.base[...] = float(value)

    def __deepcopy__(self, memo):
        return Anew.__deepcopy__(self, memo)


class ArrayOfObjects(Array):
    def make(self, value):
        self.kept = numpy.array([value, value, None], dtype=object)

    def read(self):
        return self.kept[1]

    def write(self, value):
        self.kept[1] = value


class StructuredArray(Array):
    def make(self, value):
        self.kept = numpy.full(3, float(value)).view([("first", "f8")])

    def read(self):
        return torch.tensor(self.kept["first"][1])

    def write(self, value):
        self.kept["first"] = float(value)


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


KINDS = {
    **OPEN_KINDS,
    **{kind.__name__: kind for kind in [ParameterByData, LargeParameterByData, TrainedByData, CodebookByData]},
    **{kind.__name__: kind for kind in [NormalisedByData, LargeByData, LargeByNumpy, PlainLargeByNumpy, StridedByData]},
    **{kind.__name__: kind for kind in [LargeByDataLater, InClosure, InVariableOfClosure, TensorInClosure, InDefault]},
    **{kind.__name__: kind for kind in [InAttributeOfFunction, InDecorator, InSlots, InBoundMethod, InBuiltinMethod]},
    **{kind.__name__: kind for kind in [InPartial, InSubclassOfDict, Counts, Iterates, GeneratorFunction, Cycles]},
    **{kind.__name__: kind for kind in [PythonRandom, PythonRandomMethod, NumpyGenerator, NumpyMersenne]},
    **{kind.__name__: kind for kind in [NumpyRandomState, Array, LargeArray, StridedArray, ReversedArray, ViewedArray]},
    **{kind.__name__: kind for kind in [ArrayOfObjects, StructuredArray]},
    "ClassNumber": of_class(lambda: 1.0, lambda kind, value: setattr(kind, "kept", float(value))),
    "ClassTensor": of_class(lambda: torch.ones(()), lambda kind, value: kind.kept.copy_(value)),
    "ClassTensorByData": of_class(lambda: torch.ones(LARGE)[0], lambda kind, value: kind.kept.data.copy_(value)),
    "ClassList": of_class(lambda: [torch.ones(())], lambda kind, value: kind.kept.append(value)),
    "ReplacedClassTensor": of_class(lambda: torch.ones(()), lambda kind, value: setattr(kind, "kept", value)),
    "InMethod": in_method,
}
MAY_FAIL = {"LargeLaterInTheStep", "LargeByDataLater"}
"""With these, a step may fail if writes begin in the middle of it."""
FOREIGN = {
    *("InObject", "InClosure", "InVariableOfClosure", "InDefault", "InAttributeOfFunction", "InDecorator", "InSlots"),
    *("InBoundMethod", "InSubclassOfDict", "Counts", "Iterates", "GeneratorFunction", "Cycles", "ReversedArray"),
    *("ArrayOfObjects", "ClassNumber", "ClassList", "ReplacedClassTensor", "InMethod"),
}
"""Kinds of state that cannot be restored."""
