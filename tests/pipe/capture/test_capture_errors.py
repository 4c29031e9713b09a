"""Errors of failed captures: they name the line of the user's code, the reason, and the alternatives."""

import dataclasses
import inspect
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from same_as_model import assert_captured

from pymoe.pipe.capture import CaptureError, capture

pytestmark = pytest.mark.usefixtures("doubles")


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Branch(Linear):
    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:  # the line
            return y * 2
        return y


class Empty(Linear):
    """A loop over experts, as many models have."""

    def forward(self, x):
        y = torch.zeros_like(x)
        for column in range(2):
            rows = (x[:, column] > 0).nonzero()[:, 0]
            if rows.numel() == 0:  # the line
                continue
            y = y.index_add(0, rows, self.linear(x[rows]))
        return y


class Numpy(Linear):
    def forward(self, x):
        y = self.linear(x)
        return y + torch.from_numpy(numpy.sin(x.detach().numpy()))  # the line


class Hooked(Linear):
    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda grad: grad * 2)  # the line
        return y


class Differentiated(Linear):
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self.linear(x).pow(3).sum()
            return torch.autograd.grad(y, x, create_graph=True)[0]  # the line


class Frozen(Linear):
    """torch.export drops a no_grad block, so that unwanted gradients appear."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
            with torch.no_grad():  # the line
                scale = y.abs().amax()
            return y / scale


class Wrong(Linear):
    def forward(self, x):
        return self.linear(x) + torch.ones(7)  # the line


class Deep(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.before, self.layers = nn.Linear(4, 4), nn.ModuleList([nn.Tanh(), inner])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.before(x)


def the_line(kind):
    lines, first = inspect.getsourcelines(kind)
    (number,) = [number for number, line in enumerate(lines) if "# the line" in line]
    return first + number, lines[number].strip()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Branch, "on the value of a tensor"),
        (Empty, "on the value of a tensor"),
        (Numpy, "out of torch"),
        (Hooked, "hook"),
        (Differentiated, "gradient within the forward"),
        (Frozen, "within a block of autocast"),
        (Wrong, "Error"),
    ],
)
def test_the_message_names_the_line_and_the_ways_out(kind, why, capfd):
    with pytest.raises(CaptureError) as caught:
        capture(Deep(kind()), (torch.randn(5, 4),))
    message = str(caught.value)
    number, text = the_line(kind)
    assert f"{__file__}:{number}, in forward" in message
    assert text in message
    assert why in message
    assert "opaque=" in message
    assert "Pipe.from_stages" in message
    assert capfd.readouterr() == ("", "")  # torch prints nothing itself


@pytest.mark.parametrize("kind", [Branch, Empty, Numpy])
def test_what_cannot_be_captured_can_be_opaque(kind):
    model = Deep(kind())
    captured = assert_captured(model, (torch.randn(6, 4),), None, ((torch.randn(9, 4),), {}), opaque=[kind])
    assert captured.input_checks.sizes[0][1:] == (4,)


class Bag:
    def __init__(self, x):
        self.x = x


@dataclasses.dataclass
class Result:
    y: torch.Tensor


class Objects(Linear):
    def forward(self, bag, *, more=None):
        return {"y": self.linear(bag.x), "bag": bag}


class Returns(Linear):
    def forward(self, x):
        return {"results": [Result(self.linear(x))]}


def test_arguments_and_results_of_unknown_classes_are_named():
    with pytest.raises(CaptureError, match=r"its argument bag is a Bag.*register_pytree_node"):
        capture(Objects(), (Bag(torch.randn(5, 4)),))
    with pytest.raises(CaptureError, match=r"its output\['results'\]\[0\] is a Result"):
        capture(Returns(), (torch.randn(5, 4),))


def test_a_buffer_of_another_shape_is_named():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen = torch.cat([self.seen, x.sum()[None]])
            return x * 2

    with pytest.raises(CaptureError, match=r"buffer 'layers\.1\.seen'"):
        capture(Deep(Grows()), (torch.randn(5, 4),))


def test_backward_hooks_of_the_whole_model_are_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="backward hooks"):
        capture(model, (torch.randn(5, 4),))


class Counts(Linear):
    def __init__(self):
        super().__init__()
        self.calls, self.log, self.last = 0, [], None

    def forward(self, x):
        self.calls += 1
        self.log.append(x.shape)
        self.last = x
        return self.linear(x)


def test_a_layer_that_changes_its_attributes_is_called_as_it_is():
    model = Deep(Counts())
    with pytest.warns(UserWarning, match=r"'layers\.1' .*layers\.1\.calls, layers\.1\.last, layers\.1\.log") as warned:
        captured = capture(model, (torch.randn(5, 4),))
    assert warned[0].filename == __file__
    counts = model.layers[1]
    assert (counts.calls, counts.log, counts.last) == (0, [], None)
    x = torch.randn(3, 4)
    captured.graph(x)
    assert (counts.calls, counts.log) == (1, [x.shape])
    assert torch.equal(counts.last, x.tanh())


def test_a_model_that_changes_its_attributes_is_refused():
    model = Counts()
    with pytest.raises(CaptureError, match=r"changes attributes \(calls, last, log\)") as caught:
        capture(model, (torch.randn(5, 4),))
    assert "self.calls += 1" in str(caught.value)
    assert (model.calls, model.log, model.last) == (0, [], None)


def test_free_dimensions_that_the_code_fixes_are_named():
    class Viewed(nn.Module):
        def forward(self, x):
            return x.view(4, 2, 8)

    with pytest.raises(
        CaptureError, match=r"dynamic_shapes leaves dimensions free that.*b as dynamic.*torch suggests b = 8"
    ):
        capture(Viewed(), (torch.randn(8, 8),), dynamic_shapes=({0: torch.export.Dim("b")},))
