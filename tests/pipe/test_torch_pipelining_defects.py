"""Tests of promises that torch.distributed.pipelining (2.13) is known to break; each test says what torch does instead.
Promises about processes are tested in distributed/.
"""

import copy
import weakref

import pytest
import torch
from pipe_models import assert_same_gradients
from torch import nn
from torch.nn import functional as F

import pymoe
from pymoe.nn import MoE
from pymoe.pipe import CaptureError
from pymoe.pipe.schedules import Kind, build, names, validate

WIDTH = 4
SCHEDULES = names()
BEGINNING = pymoe.SplitPoint.BEGINNING
pytestmark = [pytest.mark.usefixtures("doubles"), pytest.mark.filterwarnings("ignore:Pipe.step:UserWarning")]


class Chain(nn.Module):
    """Linear layers a, b and c; the forward is a given function of all three and the input."""

    def __init__(self, function=lambda self, x: self.c(self.b(self.a(x).tanh()).tanh())):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.function = function

    def forward(self, x, **kwargs):
        return self.function(self, x, **kwargs)


def rows(count):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, WIDTH, generator=generator) for _ in range(2)]


def traced(model, *args, chunks=4, **options):
    """Return a pipe whose stages begin at layers b and c by default, and a copy of the model."""
    if isinstance(model, Chain) and not {"split_spec", "split_policy"} & options.keys():
        options["split_spec"] = {"b": BEGINNING, "c": BEGINNING}
    plain = copy.deepcopy(model)
    return pymoe.pipeline(model, args or (rows(3)[0],), chunks=chunks, **options), plain


def test_it_runs_in_one_process_without_a_group_and_returns_what_the_model_returns():
    """Torch: every stage needs a process group, and forward returns a tuple."""
    pipe, plain = traced(Chain())
    x, y = rows(8)
    assert not torch.distributed.is_initialized()
    output = pipe(x)
    assert isinstance(output, torch.Tensor)
    torch.testing.assert_close(output, plain(x))
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    F.mse_loss(plain(x), y).backward()
    assert_same_gradients(pipe, plain)


class Counting(nn.Module):
    """Counts calls and rows, as expert balancing does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        self.rows += x.shape[0]
        return x * 2


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_runs_every_layer_once_for_each_micro_batch(schedule, checkpoint):
    """Torch: the first step runs one more forward to infer shapes, which statistics count."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), Counting())
    pipe, _ = traced(model, split_spec={"2": BEGINNING}, checkpoint=checkpoint)
    assert int(model[1].num_batches_tracked) == int(model[3].calls) == 0, "by the capture"
    x, y = rows(14)
    for step in (1, 2):
        pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
        assert int(model[1].num_batches_tracked) == int(model[3].calls) == 4 * step
        assert int(model[3].rows) == 14 * step


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_of_several_steps_add_up(schedule):
    """Torch: the previous step's gradients are scaled once more."""
    pipe, plain = traced(Chain())
    for count in (8, 12):
        x, y = rows(count)
        pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
        F.mse_loss(plain(x), y).backward()
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_uneven_micro_batches_count_by_their_rows_and_sizes_may_change(schedule):
    """Torch: with 7 rows in 4 micro-batches, gradients are 14 % off; a different number of rows in the next step is
    an error.
    """
    pipe, plain = traced(Chain())
    for count in (7, 3, 16, 1):
        x, y = rows(count)
        pipe.zero_grad()
        plain.zero_grad()
        pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
        F.mse_loss(plain(x), y).backward()
        assert_same_gradients(pipe, plain)


def skipping(self, x):
    x = self.a(x)
    kept = x.tanh()
    x = self.b(x) + kept
    return self.c(x) * kept


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_value_may_skip_stages_and_go_to_several_of_them(schedule):
    """Torch: two consumers of a value are refused, and any skip under interleaved and zero-bubble schedules."""
    pipe, plain = traced(Chain(skipping))
    x, y = rows(8)
    pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
    F.mse_loss(plain(x), y).backward()
    assert_same_gradients(pipe, plain)
    takes = [sorted(source.stage for source in stage.takes) for stage in pipe.info().stages]
    assert takes == [[-1], [0, 0], [0, 1]]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, text):
        return self.head(self.middle(self.embed(text)))


@pytest.mark.parametrize("how", list(pymoe.MultiUseParameterConfig))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_tied_parameter_gets_the_whole_gradient(schedule, how):
    """Torch: each stage has a part of the gradient, and nothing sums them; the option for transmission is ignored."""
    text, target = torch.randint(10, (8,)), torch.randint(10, (8,))
    spec = {"middle": BEGINNING, "head": BEGINNING}
    pipe, plain = traced(Tied(), text[:3], split_spec=spec, multi_use_param_spec=how)
    pipe.step(text, target=target, loss_fn=F.cross_entropy, schedule=schedule)
    F.cross_entropy(plain(text), target).backward()
    assert_same_gradients(pipe, plain)
    replicated = how == pymoe.MultiUseParameterConfig.REPLICATE
    assert [sorted(where) for where in pipe.replicated_params] == ([[0, 2]] if replicated else [])
    assert len(list(pipe.parameters())) == 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_loss_may_be_part_of_what_is_traced(schedule):
    """Torch: no public function looks for the loss."""
    model = Chain()
    plain = copy.deepcopy(model)
    x, y = rows(8)
    wrapped = pymoe.TrivialLossWrapper(model, F.mse_loss)
    wrapped = pymoe.pipe.annotate_split_points(wrapped, {"module.b": BEGINNING})
    pipe = pymoe.Pipe.from_tracing(wrapped, (x[:3], y[:3]), output_loss_value_spec=True, chunks=4)
    assert pipe.has_loss_and_backward
    assert pipe.num_stages == 2
    losses = pipe.step(x, y, schedule=schedule)
    loss = F.mse_loss(plain(x), y)
    loss.backward()
    torch.testing.assert_close(losses.mean(), loss.detach())
    assert_same_gradients(model, plain)


def with_marks(*marks):
    """Return a model with markers before a, between a and b, or after b."""

    def function(self, x):
        for times, layer in zip(marks, (self.a, self.b, None), strict=True):
            for _ in range(times):
                pymoe.pipe_split()
            x = x if layer is None else layer(x)
        return x

    return function


@pytest.mark.parametrize(("marks", "stages"), [((1, 1, 1), 2), ((0, 3, 0), 2), ((2, 0, 2), 1), ((0, 0, 0), 1)])
def test_marks_first_last_and_doubled_make_no_empty_stages(marks, stages):
    """Torch: stages are then called pp_1 and pp_3, and the first is inaccessible."""
    pipe, plain = traced(Chain(with_marks(*marks)), split_spec=None)
    assert pipe.num_stages == stages
    assert [len(list(pipe.get_stage_module(i).parameters())) for i in range(stages)] == [4 // stages] * stages
    x, _ = rows(5)
    torch.testing.assert_close(pipe(x), plain(x))


def test_a_model_can_be_traced_again_and_is_never_changed():
    """Torch: the model keeps the markers, and tracing it twice recurses without end."""
    model = Chain()
    before = dict(vars(model.b))
    x, _ = rows(5)
    for spec, stages in (({"b": BEGINNING}, 2), ({"b": BEGINNING, "c": BEGINNING}, 3), ({"c": BEGINNING}, 2)):
        pipe, plain = traced(model, split_spec=spec)
        assert pipe.num_stages == stages
        torch.testing.assert_close(pipe(x), plain(x))
        assert vars(model.b) == before
        assert type(model.b) is nn.Linear
    assert (
        traced(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2)]), split_spec={"0": BEGINNING})[0].num_stages
        == 1
    )


def masked(self, x, *, mask, scale):
    return self.c(self.b(self.a(x)) * mask * scale)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_keyword_arguments_reach_the_stage_that_uses_them(schedule):
    """Torch: the first rank refuses arguments that only a later stage takes."""
    x, y = rows(7)
    mask, _ = rows(7)
    model = Chain(masked)
    plain = copy.deepcopy(model)
    kwargs = {"mask": mask[:3], "scale": 0.5}
    spec = {"b": BEGINNING, "c": BEGINNING}
    pipe = pymoe.pipeline(model, (x[:3],), kwargs, split_spec=spec, chunks=3)
    pipe.step(x, mask=mask, scale=0.5, target=y, loss_fn=F.mse_loss, schedule=schedule)
    F.mse_loss(plain(x, mask=mask, scale=0.5), y).backward()
    assert_same_gradients(pipe, plain)


class Routed(nn.Module):
    """A hand-written mixture, in which the number of rows per expert depends on the data."""

    def __init__(self, checks):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.checks = checks

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if self.checks and row.numel() == 0:
                continue
            output = output.index_add(0, row, expert(x[row]) * weights[row, place].unsqueeze(-1))
        return output


@pytest.mark.parametrize("checks", [False, True])
def test_a_hand_written_mixture_can_be_traced_and_takes_any_number_of_rows(checks):
    """Torch: data-dependent control flow cannot be traced. Here the layer is called unchanged instead."""
    options = {"split_spec": {"1": BEGINNING}}
    if checks:
        with pytest.raises(CaptureError, match=r"if self\.checks and row\.numel\(\) == 0:(?s:.)*opaque"):
            traced(nn.Sequential(Routed(True), Routed(True)), **options)
        options["opaque"] = (Routed,)
    pipe, plain = traced(nn.Sequential(Routed(checks), Routed(checks)), **options)
    for count in (9, 24):
        x, y = rows(count)
        pipe.zero_grad()
        plain.zero_grad()
        pipe.step(x, target=y, loss_fn=F.mse_loss)
        F.mse_loss(plain(x), y).backward()
        assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_crosses_may_have_a_shape_that_depends_on_data(schedule):
    """Torch: stages need to know the shapes beforehand."""

    def function(self, x):
        x = self.a(x)
        kept = x[x.sum(1) > 0]
        return self.c(self.b(kept)).sum().view(1) / x.shape[0]

    pipe, plain = traced(Chain(function))
    x, _ = rows(16)
    pipe.step(x, loss_fn=torch.sum, schedule=schedule)
    plain(x).sum().backward()
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_auxiliary_loss_of_a_stage_in_the_middle_reaches_its_router(schedule):
    """Torch: the router's gradient is None, because only the last stage has a loss."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), MoE(WIDTH, 6, 3, 1, z_loss_coef=0.1, aux_loss_coef=0.0), nn.Linear(WIDTH, WIDTH)]
    spec = {"1": BEGINNING, "2": BEGINNING}
    pipe, plain = traced(nn.Sequential(*layers), split_spec=spec)
    assert pipe.num_stages == 3
    x, _ = rows(10)
    pipe.step(x, loss_fn=lambda output: output.sum() * 0, schedule=schedule)
    (plain(x).sum() * 0).backward()
    assert plain[1].router.weight.grad.abs().sum() > 0
    assert_same_gradients(pipe, plain)


class Times(torch.autograd.Function):
    """A product whose backward passes are counted."""

    calls = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        Times.calls += 1
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


def test_zero_bubble_runs_a_functions_backward_once_and_hooks_once():
    """Torch: both parts of the backward run all of it, and hooks of parameters are skipped."""

    def function(self, x):
        return self.c(Times.apply(self.a(x), self.b.weight)) + self.b.bias

    pipe, plain = traced(Chain(function), split_spec={"a": pymoe.SplitPoint.END, "c": BEGINNING})
    seen = []
    for name, parameter in pipe.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    x, y = rows(8)
    Times.calls = 0
    pipe.step(x, target=y, loss_fn=F.mse_loss, schedule="zero-bubble")
    assert Times.calls == 4
    assert sorted(seen) == sorted(name for name, _ in pipe.named_parameters())
    F.mse_loss(plain(x), y).backward()
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("stages", [2, 4])
def test_every_worker_of_a_1f1b_schedule_begins_with_the_first_micro_batch(stages):
    """Torch: the last rank's order contains forwards 1 to m, but not forward 0."""
    plan = build("1f1b", stages, 6)
    validate(plan)
    for stage, order in enumerate(plan.orders):
        forwards = [action.micro_batch for action in order if action.kind is Kind.FORWARD]
        assert forwards == [*range(6)], f"stage {stage}"


def test_compiled_stages_train_under_zero_bubble():
    """Torch: refuses compiled stages."""
    pipe, plain = traced(Chain())
    for number in range(pipe.num_stages):
        pipe.get_stage_module(number).compile(backend="aot_eager")
    x, y = rows(8)
    pipe.step(x, target=y, loss_fn=F.mse_loss, schedule="zero-bubble")
    F.mse_loss(plain(x), y).backward()
    assert_same_gradients(pipe, plain)


def test_hooks_do_not_pile_up():
    """Torch: a hook on a stage's input is called 3, 4, 6, 8 times in steps of two micro-batches."""
    calls = []

    class Hooked(nn.Linear):
        def forward(self, x):
            if x.requires_grad:
                x.register_hook(lambda grad: calls.append(grad.shape))
            return super().forward(x)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Hooked(WIDTH, WIDTH))
    pipe, _ = traced(model, split_spec={"1": BEGINNING}, opaque=(Hooked,), chunks=2, checkpoint="never")
    x, y = rows(8)
    for _ in range(4):
        calls.clear()
        pipe.step(x, target=y, loss_fn=F.mse_loss)
        assert len(calls) == 2


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("saved", torch.full((WIDTH,), 0.5))
        self.register_buffer("unsaved", torch.full((WIDTH,), 2.0), persistent=False)

    def forward(self, x):
        between = {"x": self.a(x) * self.saved, "times": 3, "rows": x.shape[0]}
        return {"y": self.b(between["x"] * between["times"]) * self.unsaved, "rows": between["rows"]}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buffers_keep_their_persistence_and_dictionaries_and_numbers_cross(schedule):
    """Torch: all buffers become persistent, a dictionary cannot be a target, and numbers and dictionaries cannot
    cross.
    """
    pipe, plain = traced(Scaled(), split_spec={"b": BEGINNING})
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert "unsaved" not in pipe.state_dict()
    assert "unsaved" not in {name for i in range(2) for name in pipe.get_stage_module(i).state_dict()}
    x, y = rows(8)

    def loss_fn(output, target):
        return F.mse_loss(output["y"], target["y"]) * target["times"] + 0 * output["rows"]

    target = {"y": y, "times": 2}
    pipe.step(x, target=target, loss_fn=loss_fn, schedule=schedule)
    loss_fn(plain(x), target).backward()
    assert_same_gradients(pipe, plain)


def test_outputs_of_a_micro_batch_go_when_its_backward_has_run():
    """Torch: the stage holds all outputs until the step has ended."""
    alive = []
    most = []

    def loss_fn(output, target):
        alive.append(weakref.ref(output))
        most.append(sum(one() is not None for one in alive))
        return F.mse_loss(output, target)

    pipe, _ = traced(Chain(), chunks=8, checkpoint="never")
    x, y = rows(16)
    pipe.step(x, target=y, loss_fn=loss_fn, schedule="1f1b")
    assert len(most) == 8
    assert max(most) == 1


@torch.library.custom_op("pymoe_tests::steep_product", mutates_args=())
def steep_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


@steep_product.register_fake
def _(x, weight):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _steep(ctx, grad):
    x, weight = ctx.saved_tensors
    return 3 * grad * weight, (grad * x).sum(0)


steep_product.register_autograd(_steep, setup_context=_keep)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_custom_operators_have_the_gradient_that_was_registered(schedule):
    """Torch gets this right, too."""
    pipe, plain = traced(Chain(lambda self, x: self.c(steep_product(self.b(self.a(x)), self.b.bias))))
    x, y = rows(7)
    pipe.step(x, target=y, loss_fn=F.mse_loss, schedule=schedule)
    F.mse_loss(plain(x), y).backward()
    assert_same_gradients(pipe, plain)
