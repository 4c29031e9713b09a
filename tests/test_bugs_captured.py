"""Tests of bugs that were found and fixed in captured models. Docstrings describe the bugs."""

import copy
import pathlib
import random
from collections import Counter

import numpy
import pytest
import torch
from processes import run_python
from torch import nn

import pymoe
from pymoe import SplitPoint, pipe_split, pipeline
from pymoe.pipe import CaptureError


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), 1.0

    def forward(self, x):
        x = self.first(x) * self.scale
        pipe_split()
        return self.second(x)


def test_an_attribute_was_a_constant_in_training_and_followed_in_evaluation():
    """The existing capture silently ignored ``model.scale = 5`` after ``pipeline()``, while the capture for evaluation,
    made later, used it. The Python values that a capture reads were not recorded.
    """
    model = Scaled()
    pipe = pipeline(model, (torch.randn(2, 4),), chunks=3)
    x = torch.randn(6, 4)
    for training, scale in [(True, 5.0), (False, 5.0), (True, 5.0), (True, 7.0), (False, 7.0), (False, 1.0)]:
        model.scale = scale
        pipe.train(training)
        torch.testing.assert_close(pipe(x), model(x))


SHIFT = 0.0


def test_a_global_variable_that_changes_all_the_time_was_not_warned_of(monkeypatch):
    """A text search took a change outside "of the model" for a change of "mode", which causes no warning. So every step
    captured the model again without any explanation.
    """

    class Shifted(Scaled):
        def forward(self, x):
            return super().forward(x) + SHIFT

    pipe = pipeline(Shifted(), (torch.randn(2, 4),))
    for number in range(7):
        monkeypatch.setattr(f"{__name__}.SHIFT", number + 1.0)
        pipe(torch.randn(6, 4))
    monkeypatch.setattr(f"{__name__}.SHIFT", 8.0)
    with pytest.warns(UserWarning, match="8th time, because 'SHIFT' outside of the model has changed"):
        pipe(torch.randn(6, 4))


def test_stochastic_depth_by_pythons_random_numbers_froze():
    """A layer that is skipped if ``random.random() < 0.5`` was always or never in the graph, and the user's random
    stream advanced by one number. Only torch's generators were watched.
    """

    class Depth(Scaled):
        def forward(self, x):
            x = self.first(x)
            return self.second(x) if random.random() < 0.5 else x  # the line

    before = random.getstate()
    with pytest.raises(CaptureError, match="Python's `random`") as caught:
        pipeline(Depth(), (torch.randn(2, 4),))
    assert "# the line" in str(caught.value)
    assert random.getstate() == before


def test_hooks_ran_once_in_the_capture_and_never_again():
    """Forward hooks ran only during ``torch.export``: a hook registered before was called once, and one registered
    after it never, without a warning. Layers with hooks are now opaque calls, and hooks are watched.
    """
    for after in (False, True):
        model, log = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []
        if not after:
            model[0].register_forward_hook(lambda *of_the_call, log=log: log.append(1))
        pipe = pipeline(model, (torch.randn(2, 4),), split_spec={"2": SplitPoint.BEGINNING}, chunks=3)
        if after:
            model[0].register_forward_hook(lambda *of_the_call, log=log: log.append(1))
        assert log == []
        pipe.eval()(torch.randn(6, 4))
        assert len(log) == 3


def test_lists_and_counters_of_a_layer_were_lost():
    """Lists and counters that a forward changes were changed once, during the capture, and restored; after a warning
    the pipe continued without these changes. Such a layer is now an opaque call, and a model that does this itself is
    refused.
    """

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    model = nn.Sequential(nn.Tanh(), Counting(4, 4), nn.Linear(4, 4))
    plain, x = copy.deepcopy(model), torch.randn(6, 4)
    with pytest.warns(UserWarning, match="'1' changes attributes"):
        pipe = pipeline(model, (x[:2],), split_spec={"2": SplitPoint.BEGINNING}, chunks=3, checkpoint="never")
    torch.testing.assert_close(pipe(x), torch.cat([plain(part) for part in x.split(2)]))
    assert model[1].calls == 3
    with pytest.raises(CaptureError, match=r"changes attributes \(calls\)") as caught:
        pipeline(Counting(4, 4), (x,))
    assert "self.calls += 1" in str(caught.value)


def test_a_generator_of_its_own_was_a_cryptic_type_error():
    """``torch.rand(..., generator=g)`` ended in "cannot assign Generator object to buffer '_constant_0_0'"."""

    class Noisy(Scaled):
        def forward(self, x):
            return self.first(x) + torch.rand(4, generator=torch.Generator().manual_seed(0))

    with pytest.raises(CaptureError, match=r"a torch\.Generator of its own") as caught:
        pipeline(Noisy(), (torch.randn(2, 4),))
    assert "generator=torch.Generator()" in str(caught.value)


def test_a_remembered_result_stayed_a_tensor_without_values():
    """A function with ``functools.lru_cache`` that a forward calls kept a FakeTensor from the capture, so that later
    calls of the model failed.
    """
    import functools

    @functools.lru_cache
    def table(size):
        return torch.arange(size) / size

    class Tabled(Scaled):
        def forward(self, x):
            return self.first(x) * table(4)

    model = Tabled()
    pipe = pipeline(model, (torch.randn(2, 4),))
    x = torch.randn(6, 4)
    assert torch.equal(model(x), pipe(x))


def test_half_of_a_model_stayed_in_the_old_precision():
    """``x.to(x.dtype)``, as in norms of language models, was fixed to the dtype of the capture: after
    ``pipe.bfloat16()`` the graph computed in float32, or failed.
    """

    class Norm(nn.Module):
        def forward(self, x):
            return torch.nn.functional.normalize(x.double()).to(x.dtype)

    model = nn.Sequential(nn.Linear(4, 4), Norm(), nn.Tanh())
    pipe = pipeline(model, (torch.randn(2, 4),), split_spec={"2": SplitPoint.BEGINNING}, chunks=3)
    pipe.to(torch.bfloat16)
    x = torch.randn(6, 4).bfloat16()
    assert pipe(x).dtype == torch.bfloat16
    assert torch.equal(pipe(x), model(x))


def test_boundaries_that_others_write_were_ignored():
    """Calls of ``pymoe.pipe_split`` and of torch's ``pipe_split`` in a graph were ignored, so the model silently became
    one stage.
    """
    torchs = pytest.importorskip("torch.distributed.pipelining")

    def policy(graph):
        tanh = next(node for node in graph.graph.nodes if "tanh" in node.name)
        with graph.graph.inserting_before(tanh):
            graph.graph.call_function(pymoe.pipe_split)
        with graph.graph.inserting_after(tanh):
            graph.graph.call_function(torchs.pipe_split)
        return graph

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    assert pipeline(model, (torch.randn(2, 4),), split_policy=policy).num_stages == 3


def test_a_model_without_a_tensor_among_its_arguments_could_not_be_captured():
    """``torch.export`` was given shapes for arguments that it did not have."""

    class Made(Scaled):
        def forward(self, rows=2):
            return super().forward(torch.ones(rows, 4))

    model = Made()
    for args in ((), (3,)):
        pipe = pipeline(model, args)
        assert pipe.num_stages == 2
        assert torch.equal(pipe(*args), model(*args))


def test_a_counter_that_the_forward_counts_with_kept_its_counts():
    """A capture restores the user's containers, and restored a ``collections.Counter`` by ``update(pairs)``, which
    counts the pairs themselves: ``Counter(x=1)`` came back as ``Counter({("x", 1): 1})``, and the model was refused for
    attributes that it does not have.
    """

    class Counts(Scaled):
        def __init__(self):
            super().__init__()
            self.calls = Counter(x=1)

        def forward(self, x):
            self.calls["y"] += 1
            return self.second(self.first(x))

    model = nn.Sequential(Counts(), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match=r"'0' changes attributes .0\.calls"):
        pipeline(model, (torch.randn(2, 4),))
    assert model[0].calls == Counter(x=1)


# The first lines of a test's own script: imports of the modules that tests share.
SHARED = f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\n"


def test_a_capture_before_the_first_backward_pass_left_children_of_a_fork_without_gradients():
    """``torch.export`` makes fake tensors, for which a CUDA build of torch claims to have a GPU on machines without
    one. The first backward pass after the export started a thread for that GPU, and from then on torch refused backward
    passes in forked children. CPU builds were not affected.
    """
    script = """
    import warnings
    import torch
    import pymoe
    from processes import in_child

    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    pipe = pymoe.pipeline(model, (torch.ones(2, 2),), split_spec={"1": pymoe.SplitPoint.BEGINNING}, chunks=2)

    def step():
        pipe.step(torch.ones(4, 2), loss_fn=torch.mean)

    step()
    assert in_child(step) == 0
    """
    ended = run_python(script, SHARED)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(torch.version.cuda is None, reason="torch's build for CPUs refuses no backward pass in a child")
def test_where_torch_refuses_gradients_in_a_child_all_else_works():
    """The start of a runtime, or of a map's workers, has torch replace its engine in the child of a fork. Where torch
    refuses that, because the parent's engine has threads for devices, the start failed, also without any gradients.
    """
    script = """
    import warnings
    import pytest
    import torch
    from torch._subclasses import FakeTensorMode
    import pymoe
    from processes import in_child

    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
    with FakeTensorMode():
        pass  # a GPU is there, or pretended from now on
    torch.ones((), requires_grad=True).exp().backward()

    def check():
        pool = pymoe.TaskPool(torch.square, name="squares")
        with pymoe.Runtime([pool]):
            assert pool.submit_task(torch.full((1, 1), 3.0)).result(60).item() == 9
        outputs = pymoe.map_with_parallel_backward(lambda t: t * 2, *[(torch.ones(2),)] * 5)
        assert all(y.tolist() == [2, 2] for (y,) in outputs)
        with pytest.raises(RuntimeError, match="autograd's threading in combination with fork"):
            torch.ones((), requires_grad=True).exp().backward()

    assert in_child(check) == 0
    """
    ended = run_python(script, SHARED)
    assert ended.returncode == 0, ended.stderr


def test_a_change_in_an_array_of_objects_is_seen_after_one_of_numbers_was_looked_at():
    """The method for comparing arrays was remembered by class: after an array of numbers had come first, an array of
    objects was compared only by the addresses of its objects, and a pipe continued with the contents that these had in
    the capture.
    """

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.numbers = numpy.ones(2)
            self.objects = numpy.array([[2.0], None], dtype=object)

        def forward(self, x):
            return x * self.objects[0][0] * float(self.numbers[0])

    model = Scaled()
    pipe = pipeline(model, (torch.ones(2),))
    assert pipe(torch.ones(2)).tolist() == [2, 2]
    model.objects[0][0] = 3.0
    assert pipe(torch.ones(2)).tolist() == [3, 3]


def test_a_hook_without_a_module_is_captured():
    """The module of a function that exec made in a plain dictionary is None, and was asked how it begins."""
    made = {}
    exec("def triple(module, args, output): return output * 3", made)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[1].register_forward_hook(made["triple"])
    x = torch.randn(6, 4)
    pipe = pymoe.pipeline(model, (x,), split_spec={"1": pymoe.SplitPoint.BEGINNING}, chunks=2)
    torch.testing.assert_close(pipe(x), model(x))
