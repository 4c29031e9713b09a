"""Names and behaviour of torchgpipe, PiPPy and ``torch.distributed.pipelining`` exist here, or errors name the
replacements.
"""

import typing
import warnings

import pytest
import torch
from torch import nn

import pymoe
from pymoe.pipe import MultiUseParameterConfig, skip, split_into_equal_parameters
from pymoe.pipe.skip import pop, skippable, stash
from pymoe.pipe.traced import split_points

WIDTH = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).relu())


X = torch.randn(2, WIDTH)
AT_B = {"b": pymoe.SplitPoint.BEGINNING}


def test_the_type_of_multi_use_specifications_has_its_name():
    of_all, by_name = typing.get_args(pymoe.pipe.MultiUseParamSpec)
    assert of_all is MultiUseParameterConfig
    assert typing.get_args(by_name) == (str, MultiUseParameterConfig)


def test_a_policy_may_insert_the_alias_of_pipe_split():
    def policy(module):
        last = [node for node in module.graph.nodes if node.target is torch.ops.aten.linear.default][-1]
        with module.graph.inserting_before(last):
            module.graph.call_function(pymoe.pipe.aten_pipe_split_alias)
        return module

    assert len(pymoe.pipeline(Net(), (X,), split_policy=policy)) == 2


def test_a_pipe_has_pippys_attributes_or_says_what_replaces_them():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            y = self.net(x)
            return {"y": y, "loss": y.mean()}

    pipe = pymoe.pipeline(WithLoss(), (X,), output_loss_value_spec={"loss": True})
    assert pipe.loss_spec == {"loss": True}
    assert pymoe.Pipe(nn.Sequential(nn.Linear(2, 2))).loss_spec is None
    for name, words in {"executor": r"pipe\.step", "split_gm": r"get_stage_module\(0\)"}.items():
        with pytest.raises(AttributeError, match=words):
            getattr(pipe, name)
        assert not hasattr(pipe, name)


def test_replicated_parameters_are_found_by_pippys_names_of_stages():
    pipe = pymoe.pipeline(Net(), (X,), split_spec=AT_B)
    (shared,) = pipe.replicated_params
    assert shared == {0: "a.weight", 1: "b.weight"} or shared == {0: "a.weight", 1: "a.weight"}
    assert [shared["submod_0"], shared["submod_1"]] == [shared[0], shared[1]]
    for unknown in ("submod_2", "submod_", "stage_0", 2):
        with pytest.raises(KeyError):
            shared[unknown]


def test_a_split_specification_and_a_policy_are_refused_together_even_if_it_is_empty():
    for spec in ({}, AT_B):
        with pytest.raises(ValueError, match="split_spec or split_policy, not both"):
            pymoe.pipeline(Net(), (X,), split_spec=spec, split_policy=split_into_equal_parameters(2))


def test_pipe_says_where_models_go_that_it_does_not_take():
    with pytest.raises(TypeError, match=r"got Net: pymoe\.pipeline\(model, example_args\) makes a pipe"):
        pymoe.Pipe(Net())
    with pytest.raises(TypeError, match=r"got OptimizedModule: give Pipe the model itself.*pipe\[0\]\.compile\(\)"):
        pymoe.Pipe(torch.compile(nn.Sequential(nn.Linear(2, 2))))


class TestAnnotatedSplitPoints:
    """PiPPy changes the model and returns None; pymoe returns a copy."""

    WORDS = "capture what annotate_split_points returns"

    def test_a_result_that_is_dropped_is_warned_of(self):
        model = Net()
        pymoe.annotate_split_points(model, AT_B)
        with pytest.warns(UserWarning, match=self.WORDS) as caught:
            assert len(pymoe.pipeline(model, (X,))) == 1
        assert caught[0].filename == __file__
        with warnings.catch_warnings():  # once
            warnings.simplefilter("error")
            pymoe.pipeline(model, (X,))

    def test_a_result_that_is_used_is_not(self):
        model = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(pymoe.pipeline(pymoe.annotate_split_points(model, AT_B), (X,))) == 2
            pymoe.pipeline(model, (X,))
            pymoe.pipeline(model, (X,), split_spec=AT_B)
            pymoe.pipeline(model, (X,))
            twice = pymoe.annotate_split_points(pymoe.annotate_split_points(model, AT_B), {})
            assert len(pymoe.pipeline(twice, (X,))) == 2
            del twice
            pymoe.pipeline(model, (X,))
            kept = pymoe.annotate_split_points(model, AT_B)
            pymoe.pipeline(model, (X,))
        del kept
        assert not [model for model, copied in split_points._annotated.items() if copied() is not None]


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


@skippable(stash=["past"])
class Down(Scale):
    def forward(self, x):
        yield stash("past", x)
        return x * self.weight


@skippable(pop=["past"])
class Up(Scale):
    def forward(self, x):
        return x + (yield pop("past"))


class Around(nn.Module):
    """Wraps the decorated module, as torchgpipe's skippable modules do."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class TestSkips:
    def test_checkpoints_of_modules_that_wrap_the_decorated_one_are_loaded(self):
        theirs = nn.Sequential(Around(Scale()), nn.Sequential(nn.Linear(3, 3), Around(Scale())))
        ours = nn.Sequential(Down(), nn.Sequential(nn.Linear(3, 3), Up()))
        state = theirs.state_dict()
        assert "1.1.module.inner.0.weight" in state
        ours.load_state_dict(state)
        own = {name.replace(".module.", "."): value for name, value in state.items()}
        torch.testing.assert_close(dict(ours.state_dict()), own, rtol=0, atol=0)
        pymoe.Pipe(ours).load_state_dict(state)
        ours.load_state_dict(ours.state_dict())
        with pytest.raises(RuntimeError, match=r'"0\.unknown"'):
            ours.load_state_dict({**state, "0.module.unknown": torch.ones(1)})

    def test_there_is_no_module_within(self):
        with pytest.raises(AttributeError, match="wraps none, so it has the parameters itself"):
            _ = Down().module

    def test_the_value_of_a_stash_can_be_set_under_both_names(self):
        command = stash("past", 1)
        command.tensor = 2
        assert command.value == 2

    def test_the_tracker_of_a_thread_has_torchgpipes_name(self):
        assert skip.current_skip_tracker() is skip.current_tracker()
