"""Tests of where traced models are cut: markers, annotations, policies."""

import copy

import pytest
import torch
from torch import nn
from traced_models import WIDTH, Counting, Mlp, Tied, furthest, gradients, ids, made, rows

from pymoe import Pipe, PipeSequential, SplitPoint, annotate_split_points, pipe_split, pipeline
from pymoe.pipe import (
    CaptureError,
    PipeSplitWrapper,
    mark_boundary,
    split_by_flops,
    split_by_time,
    split_into_equal_parameters,
)

pytestmark = pytest.mark.usefixtures("doubles")
BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


class Blocks(nn.Module):
    """``count`` residual blocks; the first ``wide`` ones are four times as large."""

    def __init__(self, count=4, wide=0):
        super().__init__()
        self.layers = nn.ModuleList([Block(4 * WIDTH if n < wide else WIDTH) for n in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Marked(nn.Module):
    """Has boundaries at the beginning and the end, and two adjacent ones."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        pipe_split()
        x = self.first(x.view(x.shape[0], WIDTH))
        pipe_split()
        pipe_split()
        x = self.second(x)
        pipe_split()
        return x.view(-1, WIDTH)


def same(pipe, model, x):
    torch.testing.assert_close(pipe(x), model(x), rtol=0, atol=1e-12)
    model.zero_grad()
    model(x).square().mean().backward()
    theirs = gradients(model)
    model.zero_grad()
    pipe.step(x, loss_fn=lambda out: out.square().mean())
    assert furthest(gradients(model), theirs) <= 1e-12


def stages_of(pipe):
    """Return each stage's parameter names."""
    return [[name for name, _ in part.named_parameters()] for part in pipe]


def test_a_boundary_does_nothing_when_the_model_just_runs():
    assert pipe_split() is None
    model, copy = made(Mlp)
    assert torch.equal(model(rows(3)), copy(rows(3)))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(rows(3)), model(rows(3)))


def test_leading_trailing_and_doubled_boundaries_make_no_stages():
    model = Marked()
    pipe = pipeline(model, (rows(2),), chunks=2)
    assert stages_of(pipe) == [["first.weight", "first.bias"], ["second.weight", "second.bias"]]
    assert pipe.num_stages == len(pipe) == 2
    assert pipe.get_stage_module(1) is pipe[1]
    same(pipe, model, rows(5))


def test_a_model_without_boundaries_is_one_stage():
    model = Blocks()
    pipe = pipeline(model, (rows(2),), chunks=2)
    assert pipe.num_stages == 1
    assert pipe[0].layers is model.layers
    same(pipe, model, rows(5))


def test_a_model_that_computes_nothing_is_one_stage():
    pipe = pipeline(nn.Identity(), (rows(2),), chunks=2)
    assert pipe.num_stages == 1
    assert torch.equal(pipe(rows(5)), rows(5))


@pytest.mark.filterwarnings("ignore:pipeline. the model is one stage")
@pytest.mark.parametrize(
    ("spec", "firsts"),
    [
        ({"layers.0": BEGINNING}, ["0"]),
        ({"layers.0": END}, ["0", "1"]),
        ({"layers.3": END}, ["0"]),
        ({"layers.0": END, "layers.1": BEGINNING, "layers.3": BEGINNING}, ["0", "1", "3"]),
        ({"layers.1.up": BEGINNING}, ["0", "1"]),
        ({"": BEGINNING, "layers.2": BEGINNING}, ["0", "2"]),
    ],
)
def test_stages_begin_and_end_at_named_modules(spec, firsts):
    model = Blocks()
    pipe = pipeline(model, (rows(2),), split_spec=spec, chunks=2)
    assert [names[0].split(".")[1] for names in stages_of(pipe)] == firsts
    same(pipe, model, rows(5))


def test_the_same_model_can_be_traced_again_and_again():
    model = Blocks()
    for spec in ({"layers.0": END}, {"layers.0": END}, {"layers.2": BEGINNING}):
        pipe = pipeline(model, (rows(2),), split_spec=spec, chunks=2)
        assert pipe.num_stages == 2
        same(pipe, model, rows(5))


def test_annotations_leave_the_model_as_it_is():
    model = Blocks()
    before = {name: (module, dict(module.__dict__)) for name, module in model.named_modules()}
    output = model(rows(3))
    annotated = annotate_split_points(model, {"layers.1": BEGINNING, "layers.2.up": END})
    assert {name: (module, module.__dict__) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert list(annotated.state_dict()) == list(model.state_dict())
    for ours, theirs in zip(annotated.parameters(), model.parameters(), strict=True):
        assert ours is theirs
    assert annotated.layers[3] is model.layers[3]
    assert torch.equal(annotated(rows(3)), output)
    assert pipeline(annotated, (rows(2),)).num_stages == 3
    assert pipeline(model, (rows(2),)).num_stages == 1


def test_hooks_of_annotated_modules_stay_in_force():
    model = Blocks()
    model.layers[1].register_forward_hook(lambda module, args, output: output * 2)
    pipe = pipeline(model, (rows(2),), split_spec={"layers.1": END}, chunks=2)
    torch.testing.assert_close(pipe(rows(4)), model(rows(4)), rtol=0, atol=1e-12)


def test_split_points_that_cannot_be_are_refused():
    model = Blocks()
    model.unused = nn.Linear(2, 2)
    for spec, error, words in [
        ({"layers.9": END}, ValueError, "has no submodule 'layers.9'"),
        ({"layer.1": END}, ValueError, "did you mean 'layers.1'"),
        ({"layers.1": "end"}, TypeError, "SplitPoint.BEGINNING or SplitPoint.END, got 'end'"),
        ({"unused": END}, ValueError, "does not call 'unused'"),
    ]:
        with pytest.raises(error, match=words):
            pipeline(model, (rows(2),), split_spec=spec)
    with pytest.raises(ValueError, match="not both"):
        pipeline(model, (rows(2),), split_spec={"layers.1": END}, split_policy=split_by_flops(2))
    with pytest.raises(TypeError, match="GraphModule as its result, got NoneType"):
        pipeline(model, (rows(2),), split_policy=lambda graph: None)
    with pytest.raises(ValueError, match="cannot make 1000 stages"):
        pipeline(model, (rows(2),), split_policy=split_by_flops(1000))


def test_a_sequential_with_boundaries_between_its_layers():
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model = PipeSequential.from_sequential(layers)
    assert list(model.state_dict()) == list(layers.state_dict())
    assert torch.equal(model(rows(3)), layers(rows(3)))
    pipe = pipeline(model, (rows(2),), chunks=2)
    assert stages_of(pipe) == [[f"{n}.weight", f"{n}.bias"] for n in range(3)]
    same(pipe, layers, rows(5))


@pytest.mark.parametrize("policy", [split_into_equal_parameters, split_by_flops])
def test_policies_balance(policy):
    even = pipeline(Blocks(8), (rows(2),), split_policy=policy(4))
    assert [names[0].split(".")[1] for names in stages_of(even)] == ["0", "2", "4", "6"]
    # Each of the first two blocks costs as much as three or four others.
    uneven = pipeline(Blocks(8, wide=2), (rows(2),), split_policy=policy(3), chunks=2)
    assert [names[0].split(".")[1] for names in stages_of(uneven)] == ["0", "1", "3"]
    # The residual stream is one value; inside a block there are two.
    assert [stage.gives for stage in uneven.info().stages] == [1, 1, 1]
    same(uneven, uneven.staged.module, rows(5))


def test_measured_time_is_balanced_and_leaves_the_model_alone():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    state = torch.get_rng_state()
    seconds = []
    policy = split_by_time(2)

    def watched(graph):
        seconds.append(policy.cost(graph))
        return policy(graph)

    pipe = pipeline(model, (rows(8),), split_policy=watched)
    assert pipe.num_stages == 2
    assert sum(seconds[0].values()) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert furthest(model.state_dict(), plain.state_dict()) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_policy_of_ones_own():
    def before_every_linear(graph):
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                mark_boundary(node)
        return graph

    model = Blocks(2)
    pipe = pipeline(model, (rows(2),), split_policy=before_every_linear, chunks=2)
    assert pipe.num_stages == 5
    same(pipe, model, rows(5))


def test_what_a_policy_chose_holds_in_every_mode():
    class Switching(Counting):
        def forward(self, x):
            x = self.norm(self.first(x))
            if self.training:
                x = torch.dropout(x, 0.0, True) * 1.0
            return self.second(torch.relu(x))

    asked = []

    def policy(graph):
        asked.append(graph)
        return split_into_equal_parameters(2)(graph)

    model = Switching()
    pipe = pipeline(model, (rows(2),), split_policy=policy, chunks=2)
    before = stages_of(pipe)
    pipe.eval()
    torch.testing.assert_close(pipe(rows(6)), model(rows(6)), rtol=0, atol=1e-12)
    assert stages_of(pipe) == before
    assert len(asked) == 1


def test_the_picture_names_stages_and_edges():
    model, _ = made(Tied)
    info = pipeline(model, (ids(2),)).info()
    assert info.num_stages == 3
    lines = str(info).splitlines()
    assert [line.split()[0] for line in lines] == ["1", "stage", "stage", "stage", "output"]
    assert "words" in lines[1]
    assert "66 parameters" in lines[1]
    assert "takes stage 0: 0" in lines[2]


class Inside(nn.Module):
    """Has boundaries inside blocks without gradients, and in autocast."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])

    def forward(self, x):
        with torch.no_grad():
            frozen = self.layers[0](x)
            pipe_split()
            frozen = torch.tanh(self.layers[1](frozen)) * x.shape[0]
        x = self.layers[2](x + frozen)
        with torch.autocast("cpu", torch.bfloat16):
            low = self.layers[3](x)
            pipe_split()
            both = self.layers[4](low) + low
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            still = self.layers[3](x)
            pipe_split()
            still = still * 2
        return both.float() + x + still.float()


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_boundaries_inside_of_blocks_without_gradients_and_in_autocast():
    model = Inside().float()
    plain = copy.deepcopy(model)
    x = rows(6).float()
    pipe = pipeline(model, (x[:2],), chunks=1)
    assert pipe.num_stages == 4
    torch.testing.assert_close(pipe(x), plain(x), rtol=0, atol=0)
    for twin in (pipe, copy.deepcopy(pipe)):
        twin.zero_grad()
        plain.zero_grad()
        twin.step(x, loss_fn=lambda out: out.square().mean())
        plain(x).square().mean().backward()
        assert twin.layers[0].weight.grad is None
        for name, grad in gradients(plain).items():
            torch.testing.assert_close(gradients(twin)[name], grad, rtol=1e-6, atol=1e-7)


class TestOtherMarks:
    """Boundaries in other packages' notations are recognised."""

    @pytest.mark.parametrize("what", ["pymoe's function", "torch's function", "torch's operator", "mark_boundary"])
    def test_a_policy_inserts_them(self, what):
        torchs = pytest.importorskip("torch.distributed.pipelining._IR")

        def policy(graph):
            for node in graph.graph.nodes:
                if node.target is torch.ops.aten.linear.default:
                    targets = {
                        "pymoe's function": pipe_split,
                        "torch's function": torchs.pipe_split,
                        "torch's operator": torchs.aten_pipe_split_alias,
                    }
                    if what in targets:
                        with graph.graph.inserting_before(node):
                            graph.graph.call_function(targets[what])
                    else:
                        mark_boundary(node)
            return graph

        model = Blocks(2)
        pipe = pipeline(model, (rows(2),), split_policy=policy, chunks=2)
        assert pipe.num_stages == 5
        same(pipe, model, rows(5))
        pipe.eval()
        torch.testing.assert_close(pipe(rows(5)), model(rows(5)), rtol=0, atol=1e-12)

    def test_the_models_code_calls_torchs_own(self):
        torchs = pytest.importorskip("torch.distributed.pipelining")

        class Theirs(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

            def forward(self, x):
                x = self.layers[0](x)
                torchs.pipe_split()
                x = self.layers[1](x)
                with torch.no_grad():
                    still = x.sin()
                    torchs.pipe_split()
                    still = still * 2
                return self.layers[2](x) + still

        model = Theirs()
        pipe = pipeline(model, (rows(2),), chunks=2)
        assert pipe.num_stages == 3
        same(pipe, model, rows(5))
        around = nn.Sequential(nn.Tanh(), model)
        with pytest.raises(CaptureError, match="inside '1'"):
            pipeline(around, (rows(2),), opaque=["1"])
        assert pipeline(around, (rows(2),)).num_stages == 3

    def test_a_mark_is_put_before_a_node(self):
        with pytest.raises(TypeError, match=r"torch\.fx\.Node of a captured graph, got 3"):
            mark_boundary(3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"split_policy": lambda graph: graph}, "split_policy has inserted no boundary.*mark_boundary"),
        ({"split_policy": lambda graph: [mark_boundary(n) for n in list(graph.graph.nodes)[-1:]] and graph}, "at the"),
        (
            {"split_spec": {"layers.0": BEGINNING}},
            r"all split points of split_spec \(layers\.0\) are at the beginning",
        ),
    ],
)
def test_one_stage_where_several_were_asked_for_is_warned_of(options, why):
    with pytest.warns(UserWarning, match=f"one stage: .*{why}") as warned:
        pipe = pipeline(Blocks(), (rows(2),), **options)
    assert pipe.num_stages == 1
    assert warned[0].filename == __file__


def test_one_stage_that_was_asked_for_is_not_warned_of(recwarn):
    for policy in (split_by_flops(1), None):
        assert pipeline(Blocks(), (rows(2),), split_policy=policy).num_stages == 1
    assert not [one for one in recwarn if "one stage" in str(one.message)]


def test_names_that_pippy_has():
    model = Blocks()
    annotated = annotate_split_points(mod=model, spec={"layers.2": PipeSplitWrapper.SplitPoint.BEGINNING})
    pipe = Pipe.from_tracing(mod=annotated, example_args=(rows(2),), chunks=2)
    assert pipe.num_stages == 2
    same(pipe, model, rows(5))
    assert pipe.get_stage_module(stage_idx=1) is pipe.get_stage_module(stage_index=1) is pipe[1]
    layers = nn.Sequential(nn.Linear(2, 2))
    assert PipeSequential.from_sequential(sequential_instance=layers)[0] is layers[0]
    with pytest.raises(TypeError, match="mod is another name of model, got both"):
        annotate_split_points(model, {}, mod=model, model=model)
    with pytest.raises(AttributeError, match=r"no submodule 'layers\.9'"):
        annotate_split_points(model, {"layers.9": END})
    with pytest.raises(AttributeError, match=r"no split_gm.*get_stage_module.*info\(\)\.graph"):
        _ = pipe.split_gm
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = pipe.other
    with pytest.raises(TypeError, match="annotate_split_points"):
        PipeSplitWrapper(layers)


@pytest.mark.parametrize("index", [-1, 2, 7, True, "0", None])
def test_a_stage_that_is_not_there_is_refused(index):
    pipe = pipeline(Blocks(), (rows(2),), split_spec={"layers.2": BEGINNING})
    with pytest.raises(ValueError, match=rf"invalid stage index, expected 0 to 1, got {index!r}"):
        pipe.get_stage_module(index)


def test_the_graph_of_the_stages_computes_what_the_model_does():
    model, _ = made(Tied)
    pipe = pipeline(model, (ids(2),), chunks=2)
    graph = pipe.info().graph
    graph.lint()
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["submod_0", "submod_1", "submod_2"]
    modules = {f"submod_{number}": part for number, part in enumerate(pipe)}
    (output,) = torch.fx.GraphModule(modules, graph)(ids(4))
    torch.testing.assert_close(output, model(ids(4)), rtol=0, atol=1e-12)
