"""Side effects of a model in Python: hooks and layers keep having them in a traced pipe, or they are refused."""

import copy
import random

import numpy
import pytest
import torch
from test_guards import Scaled, assert_is_model
from torch import nn
from traced_models import WIDTH, rows

from pymoe import SplitPoint, pipe_split, pipeline
from pymoe.pipe import CaptureError

pytestmark = pytest.mark.usefixtures("doubles")


class TestHooks:
    """Hooks run for every micro-batch, as if the model ran on it."""

    @pytest.mark.thinned(usual=8)
    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize(
        "kind", ["forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook"]
    )
    @pytest.mark.parametrize("split", [SplitPoint.BEGINNING, SplitPoint.END])
    def test_they_run_whenever_the_pipe_runs(self, kind, when, split):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        log = []

        def register():
            return getattr(model[0], f"register_{kind}")(lambda *of_the_call: log.append(kind))

        if when == "before":
            handle = register()
        pipe = pipeline(
            model, (rows(2),), split_spec={"0": split, "2": SplitPoint.BEGINNING}, chunks=3, checkpoint="never"
        )
        assert log == []
        if when == "after":
            handle = register()
        for _ in range(2):
            pipe(rows(6)).sum().backward()
            assert len(log) == 3
            log.clear()
        handle.remove()
        pipe(rows(6)).sum().backward()
        assert log == []

    def test_those_of_a_module_with_boundaries_inside_are_part_of_the_graph(self):
        model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), nn.Tanh())
        model[0].register_forward_hook(lambda module, args, output: output * 3)
        pipe = pipeline(model, (rows(2),), split_spec={"0.1": SplitPoint.BEGINNING}, chunks=3)
        assert pipe.num_stages == 2
        assert_is_model(pipe, model, rows(6))
        log = []
        model[0].register_forward_hook(lambda module, args, output: log.append(output.shape))
        with pytest.raises(CaptureError, match="changes 'log'") as caught:
            pipe(rows(6))
        assert "log.append(output.shape)" in str(caught.value)
        assert log == []

    def test_those_of_the_model_itself_must_leave_no_trace(self):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        pipe = pipeline(model, (rows(2),), chunks=3)
        seen = []
        handle = model.register_forward_hook(lambda *of_the_call: seen.append(1))
        with pytest.raises(CaptureError, match="changes 'seen'"):
            pipe(rows(6))
        handle.remove()
        assert_is_model(pipe, model, rows(6))
        model.register_full_backward_hook(lambda *of_the_call: None)
        with pytest.raises(CaptureError, match="backward hooks of its own"):
            pipe(rows(6))


class Counter:
    step = 1

    def __init__(self):
        self.calls = 0


COUNTER = Counter()
LOG = []
CALLS = 0
NESTED = {"lists": [[1.0]]}


def counts_globally(m, x):
    global CALLS
    CALLS += 1
    return x


def remembers(m, x, seen=[]):  # noqa: B006 (the test needs a mutable default)
    seen.append(1)
    return x


def generated(m, x):
    return x * m.scale.random()


REFUSED = {
    "an attribute": (lambda m, x: setattr(m, "scale", m.scale + 1) or x, "changes attributes .scale."),
    "a list": (lambda m, x: m.shape[1].append(x.mean()) or x, "changes attributes .shape."),
    "an object": (lambda m, x: setattr(m.config, "shift", 1) or x, "changes attributes .config.shift."),
    "a global object": (lambda m, x: setattr(COUNTER, "calls", COUNTER.calls + 1) or x, "changes 'COUNTER'"),
    "a global list": (lambda m, x: LOG.append(1) or x, "changes 'LOG'"),
    "within a global dictionary": (
        lambda m, x: NESTED["lists"][0].append(x.mean()) or x,
        r"changes .NESTED\['lists'\]",
    ),
    "a global variable": (counts_globally, "changes 'CALLS'"),
    "a default": (remembers, "changes .remembers.__defaults__"),
    "random": (lambda m, x: x * random.random(), "Python's `random`"),
    "numpy.random": (lambda m, x: x * float(numpy.random.rand()), "numpy's"),
    "a generator of its own": (lambda m, x: x + torch.rand(WIDTH, generator=torch.Generator()), "torch.Generator"),
    "a seed": (lambda m, x: torch.manual_seed(3) and x + torch.rand(WIDTH), "torch.manual_seed"),
    "the seed": (lambda m, x: x * (torch.initial_seed() % 7), "torch.initial_seed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_would_do_once_is_refused_with_its_line(name):
    how, why = REFUSED[name]
    model = Scaled(how)
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    attributes = dict(vars(model)), copy.deepcopy(model.shape), dict(vars(model.config))
    with pytest.raises(CaptureError, match=why) as caught:
        pipeline(model, (rows(2),))
    number = how.__code__.co_firstlineno
    assert any(f"{__file__}:{number + more}, in " in str(caught.value) for more in range(4))
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert (vars(model), model.shape, vars(model.config)) == attributes
    assert (COUNTER.calls, LOG, CALLS, remembers.__defaults__) == (0, [], 0, ([],))
    assert NESTED == {"lists": [[1.0]]}


@pytest.mark.parametrize("make", [random.Random, numpy.random.default_rng, numpy.random.RandomState])
def test_random_generators_of_ones_own_are_refused(make):
    model = Scaled(lambda m, x: x * float(m.scale.random() if hasattr(m.scale, "random") else m.scale.rand()))
    model.scale = make(3)
    with pytest.raises(CaptureError, match="random numbers from scale"):
        pipeline(model, (rows(2),))
    assert float(model.scale.random()) == float(make(3).random())


class Recurring(nn.Module):
    """Continues from the state in which the last call ended."""

    def __init__(self):
        super().__init__()
        self.linear, self.state = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x):
        self.state = x.detach().mean(0) if self.state is None else self.state + x.detach().mean(0)
        return self.linear(x) * self.state


def test_a_layer_that_keeps_something_goes_on_from_micro_batch_to_micro_batch():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Recurring(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="'1' changes attributes .1.state."):
        pipe = pipeline(model, (rows(2),), split_spec={"2": SplitPoint.BEGINNING}, chunks=3, checkpoint="never")
    assert model[1].state is None
    for _ in range(2):
        expected = torch.cat([plain(part) for part in rows(6).split(2)])
        torch.testing.assert_close(pipe(rows(6)), expected, rtol=0, atol=1e-12)


def test_a_boundary_inside_of_what_is_called_in_one_piece_is_refused():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.first(x)
            pipe_split()
            return self.second(x)

    model = nn.Sequential(nn.Tanh(), Inner())
    assert pipeline(model, (rows(2),)).num_stages == 2
    with pytest.raises(CaptureError, match="stage boundary lies inside '1'") as caught:
        pipeline(model, (rows(2),), opaque=["1"])
    assert "pipe_split()" in str(caught.value)
    model[1].register_full_backward_hook(lambda *of_the_call: None)
    with pytest.raises(CaptureError, match="lies inside '1'"):
        pipeline(model, (rows(2),))


class CountsGlobally(nn.Module):
    def forward(self, x):
        return counts_globally(self, x)


def test_what_an_opaque_layer_does_hides_nothing_that_the_model_has_done():
    model = nn.Sequential(CountsGlobally(), CountsGlobally(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match="changes 'CALLS'"):
        pipeline(model, (rows(2),), opaque=["1"])
    assert CALLS == 0
