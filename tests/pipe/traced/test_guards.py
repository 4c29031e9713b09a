"""A traced pipe notices when Python values that it has read change: the next call follows the changed model."""

import copy
import dataclasses
import functools
import os
import pickle
import threading
import types

import pytest
import torch
from limits import LONG
from torch import nn
from torch.nn import functional as F
from traced_models import WIDTH, rows

import pymoe
from pymoe import SplitPoint, pipe_split, pipeline

pytestmark = pytest.mark.usefixtures("doubles")

FACTOR = 2.0
TABLE = {"factors": [1.0, 3.0]}
SETTINGS = types.SimpleNamespace(shift=0.5)


class Times:
    factor = 2.0

    def __call__(self, x):
        return x * self.factor


TIMES = Times()


class Counter:
    step = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    shift: float = 0.25


def helper(x):
    return x * FACTOR


class Scaled(nn.Module):
    """Two stages; ``how`` is the function between them."""

    factor = 1.5

    def __init__(self, how):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.kind, self.shape = 2.0, "tanh", (1.0, [2.0, {"x": 3.0}])
        self.config = types.SimpleNamespace(shift=0.25)
        self.slotted = Slotted()
        self.activation = torch.sin
        self.table = torch.ones(WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.how = how

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.second(self.how(self, x))


def looped(model, x):
    for layer in model.layers:
        x = layer(x)
    return x


def enclosing():
    amount = 2.0

    def read(model, x):
        return x * amount

    def put(value):
        nonlocal amount
        amount = value

    return read, put


READ, PUT = enclosing()


def of_environment(model, x):
    return x * float(os.environ.get("PYMOE_TEST_FACTOR", "1"))


def graph_mode(model, x):
    return x * (2 if torch.is_grad_enabled() else 1)


def mode_of_autocast(model, x):
    return x * (2 if torch.is_autocast_enabled("cpu") else 1)


class Doubled(nn.Module):
    """Reads no dtype, and does nothing to float64 tensors."""

    def forward(self, x):
        return x.double().sin().type_as(x)


class Narrowed(nn.Module):
    """Computes in another precision and converts back, as language models' norms do."""

    def forward(self, x):
        return x.to(torch.float64).sin().to(x.dtype)


CHANGES = {
    "a number": (lambda m, x: x * m.scale, lambda m: setattr(m, "scale", 5.0)),
    "minus zero": (
        lambda m, x: x + torch.tensor(m.scale).sign() * 0 + 1 / (1 + m.scale),
        lambda m: setattr(m, "scale", -0.5),
    ),
    "a string": (lambda m, x: getattr(torch, m.kind)(x), lambda m: setattr(m, "kind", "sin")),
    "in a list in a tuple": (lambda m, x: x * m.shape[1][0], lambda m: m.shape[1].__setitem__(0, 7.0)),
    "in a dictionary": (lambda m, x: x * m.shape[1][1]["x"], lambda m: m.shape[1][1].update(x=8.0)),
    "of an object": (lambda m, x: x + m.config.shift, lambda m: setattr(m.config, "shift", 9.0)),
    "in a slot": (lambda m, x: x + m.slotted.shift, lambda m: setattr(m.slotted, "shift", 9.0)),
    "another object": (
        lambda m, x: x + m.config.shift,
        lambda m: setattr(m, "config", types.SimpleNamespace(shift=3.0)),
    ),
    "a function": (lambda m, x: m.activation(x), lambda m: setattr(m, "activation", torch.cos)),
    "a tensor": (lambda m, x: x * m.table, lambda m: setattr(m, "table", torch.full((WIDTH,), 3.0))),
    "by vars": (lambda m, x: x * vars(m)["scale"], lambda m: setattr(m, "scale", 5.0)),
    "is it there": (lambda m, x: x * (2 if hasattr(m, "more") else 1), lambda m: setattr(m, "more", 1)),
    "is it a parameter": (
        lambda m, x: x * (m.more if hasattr(m, "more") else 1),
        lambda m: m.register_parameter("more", nn.Parameter(torch.full((WIDTH,), 2.0))),
    ),
    "is it a buffer": (
        lambda m, x: x * getattr(m, "more", 1),
        lambda m: m.register_buffer("more", torch.full((WIDTH,), 2.0)),
    ),
    "is it gone": (lambda m, x: x * getattr(m, "scale", 9.0), lambda m: delattr(m, "scale")),
    "of the class": (lambda m, x: x * m.factor, lambda m: setattr(m, "factor", 4.0)),
    "of torch's own layer": (lambda m, x: m.norm(x), lambda m: setattr(m.norm, "eps", 1.0)),
    "a layer": (looped, lambda m: m.layers.append(nn.Linear(WIDTH, WIDTH))),
    "another layer": (looped, lambda m: m.layers.__setitem__(0, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))),
    "a forward": (looped, lambda m: setattr(m.layers[0], "forward", torch.cos)),
    "a bias": (looped, lambda m: setattr(m.layers[0], "bias", None)),
    "a buffer": (lambda m, x: x + m.mean, lambda m: setattr(m, "mean", torch.ones(1, WIDTH))),
    "a hook": (looped, lambda m: m.layers[0].register_forward_hook(lambda module, args, output: output * 2)),
    "a hook before": (looped, lambda m: m.layers[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))),
    "a hook of the model": (looped, lambda m: m.register_forward_hook(lambda module, args, output: output * 2)),
    "of a global object that is called": (lambda m, x: TIMES(x), lambda m: setattr(TIMES, "factor", TIMES.factor + 1)),
    "of a class elsewhere": (lambda m, x: x * Counter.step, lambda m: setattr(Counter, "step", Counter.step + 1)),
    "is a parameter trained": (
        lambda m, x: x * (2 if m.first.weight.requires_grad else 1),
        lambda m: m.first.weight.requires_grad_(False),
    ),
    "a global variable": (lambda m, x: helper(x), lambda m: globals().update(FACTOR=6.0)),
    "in a global dictionary": (
        lambda m, x: x * TABLE["factors"][1],
        lambda m: TABLE["factors"].append(TABLE["factors"].pop(0)),
    ),
    "of a global object": (lambda m, x: x + SETTINGS.shift, lambda m: setattr(SETTINGS, "shift", SETTINGS.shift + 1)),
    "of an enclosing function": (READ, lambda m: PUT(11.0)),
    "the environment": (of_environment, lambda m: os.environ.update(PYMOE_TEST_FACTOR="3")),
}


@pytest.fixture
def as_before(monkeypatch):
    """Restore values outside of models after the test."""
    monkeypatch.setattr(f"{__name__}.FACTOR", 2.0)
    monkeypatch.setenv("PYMOE_TEST_FACTOR", "1")
    monkeypatch.setattr(SETTINGS, "shift", 0.5)
    yield
    PUT(2.0)


def assert_is_model(pipe, model, x):
    torch.testing.assert_close(pipe(x), model(x), rtol=0, atol=1e-12)


def assert_is_model_of_chunks(pipe, model, x):
    # Compare bit for bit, so chunk by chunk: on some processors a product's bits depend on its number of rows.
    assert torch.equal(pipe(x), torch.cat([model(chunk) for chunk in x.chunk(2)]))


@pytest.mark.thinned(usual=6, deep=36)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_the_forward_has_read_is_seen(name, training, as_before):
    how, change = CHANGES[name]
    torch.manual_seed(0)
    model = Scaled(how).train(training)
    pipe = pipeline(model, (rows(2),), chunks=2, checkpoint="never")
    assert_is_model(pipe, model, rows(4))
    before = pipe(rows(4))
    assert len(pipe.staged._variants) == 1
    change(model)
    assert_is_model(pipe, model, rows(4))
    assert not torch.equal(pipe(rows(4)), before), "the change changes nothing, and shows nothing"
    model.zero_grad()
    model(rows(4)).square().mean().backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    pipe.step(rows(4), loss_fn=lambda out: out.square().mean())
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[parameter_name], rtol=0, atol=1e-12)
    assert len(pipe.staged._variants) == 2
    pipe.train(not training)
    assert_is_model(pipe, model, rows(4))


def test_values_come_back_without_another_capture():
    model = Scaled(CHANGES["a number"][0])
    pipe = pipeline(model, (rows(2),), chunks=2)
    for scale in (2.0, 3.0, 2.0, 3.0, float("nan"), 2.0, float("nan")):
        model.scale = scale
        torch.testing.assert_close(pipe(rows(4)), model(rows(4)), rtol=0, atol=1e-12, equal_nan=True)
    assert len(pipe.staged._variants) == 3


def test_what_nothing_reads_and_equal_values_lead_to_no_capture():
    model = Scaled(lambda m, x: x * m.shape[0] * m.shape[1][0] * m.scale)
    pipe = pipeline(model, (rows(2),), chunks=2)
    for _ in range(3):
        model.kind, model.epoch, model.scale, model.shape = "sin", 3, float("2.0"), (1.0, [2.0, {"x": 3.0}])
        model.first.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        assert_is_model(pipe, model, rows(4))
    assert len(pipe.staged._variants) == 1
    model.shape[1][0] = 4.0  # changes the new tuple
    assert_is_model(pipe, model, rows(4))
    assert len(pipe.staged._variants) == 2


def test_values_that_change_all_the_time_are_warned_of():
    model = Scaled(CHANGES["a number"][0])
    pipe = pipeline(model, (rows(2),), chunks=2)
    for number in range(7):
        model.scale = float(number) + 10
        assert_is_model(pipe, model, rows(4))
    model.scale = 9.0
    with pytest.warns(UserWarning, match="8th time, because 'scale' has changed.*buffer") as warned:
        pipe(rows(4))
    assert [one.filename for one in warned] == [__file__]


@functools.lru_cache
def table(size):
    return torch.arange(size) / size


def test_functions_that_remember_their_results_remember_none_of_a_captures():
    model = Scaled(lambda m, x: x * table(WIDTH))
    pipe = pipeline(model, (rows(2),), chunks=2)
    assert table(WIDTH)[1] == 1 / WIDTH
    assert_is_model(pipe, model, rows(4))


def asks_whether_it_is_trained(model, x):
    return x * (2 if x.requires_grad else 1)


@pytest.mark.parametrize(
    ("how", "block"),
    [
        (asks_whether_it_is_trained, torch.no_grad),
        (graph_mode, torch.no_grad),
        (mode_of_autocast, lambda: torch.autocast("cpu")),
    ],
)
def test_questions_about_the_callers_state_are_answered_as_the_model_is(how, block):
    model = Scaled(how)
    pipe = pipeline(model, (rows(2),), chunks=2)
    assert_is_model(pipe, model, rows(4))
    with block():
        assert_is_model(pipe, model, rows(4))
        inside = pipeline(model, (rows(2),), chunks=2)
        assert_is_model(inside, model, rows(4))
    assert_is_model(pipe, model, rows(4))
    assert_is_model(inside, model, rows(4))


@pytest.mark.parametrize("layer", [Narrowed, Doubled])
def test_another_precision_is_another_capture_where_the_code_asks_for_it(layer):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), nn.Linear(WIDTH, WIDTH))
    pipe = pipeline(model, (rows(2),), split_spec={"2": SplitPoint.BEGINNING}, chunks=2)
    for dtype in (torch.float64, torch.float32, torch.float64):
        pipe.to(dtype)
        x = rows(4).to(dtype)
        assert pipe(x).dtype == dtype
        assert_is_model_of_chunks(pipe, model, x)
    assert len(pipe.staged._variants) == 2
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert_is_model_of_chunks(pipe, model, x)


def test_another_default_dtype_is_seen():
    model = Scaled(lambda m, x: x + torch.ones(WIDTH) / 3 + torch.tensor(0.1))
    pipe = pipeline(model, (rows(2),), chunks=2)
    assert_is_model(pipe, model, rows(4))
    x = rows(4)
    torch.set_default_dtype(torch.float32)  # the fixture restores it
    assert_is_model_of_chunks(pipe, model, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_copies_watch_their_own_model(copied, as_before):
    model = Scaled(reads_much)
    pipe = pipeline(model, (rows(2),), chunks=2)
    twin = copied(pipe)
    assert_is_model(twin, model, rows(4))
    assert len(twin.staged._variants) == 1
    model.scale = 3.0
    assert not torch.equal(twin(rows(4)), model(rows(4)))
    assert_is_model(twin, twin.staged.module, rows(4))
    assert len(twin.staged._variants) == 1
    twin.staged.module.shape[1][0] = 5.0
    assert_is_model(twin, twin.staged.module, rows(4))
    globals().update(FACTOR=6.0)
    assert_is_model(twin, twin.staged.module, rows(4))
    assert len(twin.staged._variants) == 3


def reads_much(m, x):
    return helper(x) * m.scale * m.shape[1][0] * m.factor


def test_a_layer_in_anothers_place_is_the_pipes_as_well():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    pipe = pipeline(model, (rows(2),), split_spec={"2": SplitPoint.BEGINNING}, chunks=2)
    before = model[0]
    for layer in (nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)), before):
        model[0] = layer
        assert_is_model(pipe, model, rows(4))
        assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]
        assert list(pipe.state_dict()) == list(model.state_dict())
    assert pipe[0].get_parameter("0.weight") is model[0].weight
    assert len(pipe.staged._variants) == 3


def test_mixtures_of_experts_are_watched_from_outside():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), pymoe.nn.MoE(WIDTH, 8, 4, 2, aux_loss_coef=0.1), nn.Tanh())
    pipe = pipeline(model, (rows(2),), split_spec={"1": SplitPoint.BEGINNING}, chunks=2)
    for _ in range(3):
        pipe.step(rows(4), loss_fn=lambda out: F.mse_loss(out, torch.zeros_like(out)))
    assert len(pipe.staged._variants) == 1


def test_variables_of_one_name_in_several_files_are_told_apart():
    homes = []
    for value in (1.0, 2.0):
        variables = {"AMOUNT": value, "nn": nn}
        exec(compile("def read(m, x): return x * AMOUNT", __file__, "exec"), variables)
        homes.append(variables)
    first, second = (home["read"] for home in homes)
    model = Scaled(lambda m, x: second(m, first(m, x)))
    pipe = pipeline(model, (rows(2),), chunks=2)
    for home, value in zip(homes, (3.0, 5.0), strict=True):
        captures = len(pipe.staged._variants)
        assert_is_model(pipe, model, rows(4))
        assert len(pipe.staged._variants) == captures
        home["AMOUNT"] = value
        assert_is_model(pipe, model, rows(4))
        assert len(pipe.staged._variants) == captures + 1


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*weight_norm")
def test_weights_that_torch_computes_in_every_call_are_no_new_values(norm):
    model = nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).eval()
    pipe = pipeline(model, (rows(2),), split_spec={"2": SplitPoint.BEGINNING}, chunks=2)
    for _ in range(3):
        assert_is_model(pipe, model, rows(4))
    assert len(pipe.staged._variants) == 1


def test_threads_that_call_at_once_after_a_change_make_one_capture():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    pipe = pipeline(model, (rows(2),), split_spec={"2": SplitPoint.BEGINNING}, chunks=2)
    pipe.eval()
    x, results, start = rows(4), [], threading.Barrier(4)

    def call():
        start.wait(LONG)
        results.append(pipe(x))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, model(x), rtol=0, atol=1e-12)
    assert len(pipe.staged._variants) == 2


@pytest.mark.parametrize("file", ["<stdin>", "<python-input-3>", "<ipython-input-3-0123456789ab>"])
def test_code_that_somebody_types_is_watched_as_that_of_files_is(file):
    variables = {"AMOUNT": 2.0, "torch": torch}
    code = "def read(m, x):\n    return x * AMOUNT * (2 if torch.is_grad_enabled() else 1)"
    exec(compile(code, file, "exec"), variables)
    model = Scaled(variables["read"])
    pipe = pipeline(model, (rows(2),), chunks=2)
    variables["AMOUNT"] = 3.0
    assert_is_model(pipe, model, rows(4))
    with torch.no_grad():
        assert_is_model(pipe, model, rows(4))


class Base(nn.Module):
    """The method that subclasses override reads a global variable, and so does a property."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return helper(self.linear(x))

    @property
    def shift(self):
        return SETTINGS.shift


class Derived(Base):
    def forward(self, x):
        return super().forward(x) + self.shift


def test_what_overridden_methods_and_properties_read_is_seen(as_before):
    model = Derived()
    pipe = pipeline(model, (rows(2),), chunks=2)
    globals().update(FACTOR=6.0)
    assert_is_model(pipe, model, rows(4))
    SETTINGS.shift = 7.0
    assert_is_model(pipe, model, rows(4))
    assert len(pipe.staged._variants) == 3
