"""Kinds of state: layers that read a value that they keep, and then write to it."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import torch
from torch import nn
from torch.ao import quantization

from pymoe.pipe.execution import held_values

CHUNKS = 4
LARGE = held_values.SMALL_BYTES // 8 + 1


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


class Buffer(Keeps):
    pass


class ReplacedBuffer(Keeps):
    def write(self, value):
        self.kept = value


class PlainTensor(Keeps):
    def make(self, value):
        self.kept = value


class ReplacedTensor(PlainTensor):
    def write(self, value):
        self.kept = value


class AttributeThatComes(Keeps):
    def make(self, value):
        pass

    def read(self):
        return getattr(self, "kept", torch.ones(()))

    def write(self, value):
        self.kept = value


class InList(Keeps):
    def make(self, value):
        self.kept = [value]

    def read(self):
        return self.kept[0]

    def write(self, value):
        self.kept[0].copy_(value)


class ReplacedInList(InList):
    def write(self, value):
        self.kept[0] = value


class ListThatGrows(InList):
    def read(self):
        return self.kept[-1]

    def write(self, value):
        self.kept.append(value)


class InDict(Keeps):
    def make(self, value):
        self.kept = {"a": {"b": (value,)}}

    def read(self):
        return self.kept["a"]["b"][0]

    def write(self, value):
        self.read().copy_(value)


class ReplacedInDict(InDict):
    def write(self, value):
        self.kept["a"]["b"] = (value,)


class InDeque(InList):
    def make(self, value):
        self.kept = deque([value, value], maxlen=2)

    def write(self, value):
        self.kept.append(value)


class InObject(Keeps):
    def make(self, value):
        self.kept = SimpleNamespace(value=value)

    def read(self):
        return self.kept.value

    def write(self, value):
        self.kept.value = value


class ParameterWithoutGradient(Keeps):
    """Updates a parameter without gradients, like a momentum encoder."""

    def make(self, value):
        self.kept = nn.Parameter(value, requires_grad=False)


class ParameterData(ParameterWithoutGradient):
    def write(self, value):
        self.kept.data = value


class ParameterOfAnUnregisteredModule(ParameterWithoutGradient):
    def make(self, value):
        self.inside = [Keeps.__new__(Keeps)]
        nn.Module.__init__(self.inside[0])
        self.inside[0].kept = nn.Parameter(value, requires_grad=False)

    def read(self):
        return self.inside[0].kept

    def write(self, value):
        self.read().copy_(value)


class Number(Keeps):
    def make(self, value):
        self.kept = float(value)

    def read(self):
        return torch.tensor(self.kept)

    def write(self, value):
        self.kept = float(value)


class Generator(Keeps):
    def make(self, value):
        self.kept = torch.Generator().manual_seed(3)

    def read(self):
        return 1 + torch.rand((), generator=self.kept)

    def write(self, value):
        pass

    def state(self):
        return [self.kept.get_state()]

    def __deepcopy__(self, memo):
        again = type(self)()
        again.linear.load_state_dict(self.linear.state_dict())
        return again


class Counter(Keeps):
    """Counts forwards in a number from which nothing is computed."""

    begins = 1


class BehindTheCounter(Keeps):
    def write(self, value):
        self.kept.data.copy_(value)


class ByNumpy(Keeps):
    def write(self, value):
        self.kept.numpy()[...] = value.numpy()


class Large(Keeps):
    def make(self, value):
        self.register_buffer("kept", value.expand(LARGE).clone())

    def read(self):
        return self.kept[0]


class LaterInTheStep(Keeps):
    begins = CHUNKS + 3


class LargeLaterInTheStep(Large):  # earlier micro-batches' state was not copied: the step may fail
    begins = CHUNKS + 3


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


def observer(kind):
    return lambda: Observer(kind(quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255).float())


OPEN_KINDS = {
    **{kind.__name__: kind for kind in [Buffer, ReplacedBuffer, PlainTensor, ReplacedTensor, AttributeThatComes]},
    **{kind.__name__: kind for kind in [InList, ReplacedInList, ListThatGrows, InDict, ReplacedInDict, InDeque]},
    **{kind.__name__: kind for kind in [InObject, ParameterWithoutGradient, ParameterData, Number, Generator]},
    **{kind.__name__: kind for kind in [ParameterOfAnUnregisteredModule, BehindTheCounter, ByNumpy, Large, Counter]},
    **{kind.__name__: kind for kind in [LaterInTheStep, LargeLaterInTheStep, LastOutput, OwnStatistics]},
    "BatchNorm": lambda: Norm(nn.BatchNorm1d(4)),
    "SpectralNorm": lambda: Norm(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
    "FakeQuantize": observer(quantization.FakeQuantize),
    "FusedFakeQuantize": observer(quantization.FusedMovingAvgObsFakeQuantize),
}
