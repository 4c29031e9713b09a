"""Opaque calls: a captured graph calls autograd Functions, layers with counts, and modules that a user names,
unchanged.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from same_as_model import as_model, assert_captured, run

from pymoe.nn import MoE, update_expert_biases
from pymoe.pipe import DeferredBatchNorm
from pymoe.pipe.capture import CaptureError, capture
from pymoe.pipe.context import MicroBatch, running

pytestmark = pytest.mark.usefixtures("doubles")


class Cubed(torch.autograd.Function):
    """Its backward is not the derivative of its forward, and counts its calls."""

    backwards = 0

    @staticmethod
    def forward(ctx, x, factor, more):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x**3 * factor, more[0] + 1, None

    @staticmethod
    def backward(ctx, grad, *others):
        Cubed.backwards += 1
        (x,) = ctx.saved_tensors
        return 7 * x * grad * ctx.factor, None, None


cubed = Cubed.apply  # bound before any capture


class Twice(torch.autograd.Function):
    """A Function with its own context and one output."""

    @staticmethod
    def forward(x, factor=2):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor + 1, None


class Doubled(torch.autograd.Function):
    """Writes to its argument in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class WithFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y, moved, nothing = cubed(self.linear(x), x.shape[0], [x, 3])
        assert nothing is None
        with torch.no_grad():
            z = Twice.apply(y)
        return Twice.apply(y) + Doubled.apply(y.sin()) + z, moved


def test_functions_keep_their_backward():
    model = WithFunctions()
    assert_captured(model, (torch.randn(5, 4),), None, ((torch.randn(3, 4),), {}))
    captured = capture(model, (torch.randn(5, 4),))
    Cubed.backwards = 0
    run(as_model(captured), model, (torch.randn(5, 4),), {})
    assert Cubed.backwards == 1


def test_functions_are_as_they_were_after_a_capture():
    x = torch.ones(2, requires_grad=True)
    classes = (torch.autograd.function.FunctionMeta, torch.utils.checkpoint.CheckpointFunction)
    before = [dict(vars(kind)) for kind in classes]
    capture(WithFunctions(), (torch.randn(5, 4),))
    assert [dict(vars(kind)) for kind in classes] == before
    Twice.apply(x).sum().backward()
    assert x.grad.tolist() == [3, 3]


class Direct(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y * Cubed.forward(Context(), y, 1, [x])[0] + cubed(y, 1, [x])[0]


class Context:
    def save_for_backward(self, x):
        pass


def test_a_forward_that_is_called_by_itself_is_traced():
    model = Direct()
    assert_captured(model, (torch.randn(5, 4),), None, ((torch.randn(3, 4),), {}))


class Block(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.moe = MoE(8, 16, 4, 2, aux_loss_coef=0.3, z_loss_coef=0.1, bias_update_rate=0.05, num_shared_experts=1)

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.moe(self.norms[1](x))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def counters(model):
    moved = [module.tensors for module in model.modules() if isinstance(getattr(module, "tensors", None), dict)]
    return [tensor.clone() for tensors in moved for tensor in tensors.values()]


def assert_same_counters(one, other):
    assert len(counters(one)) == len(counters(other)) > 4
    for a, b in zip(counters(one), counters(other), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("training", [True, False])
def test_mixture_of_experts_transformer(training):
    model = Language().train(training)
    tokens, others = torch.randint(13, (3, 5)), torch.randint(13, (4, 7))
    assert_captured(model, (tokens,), None, ((others,), {}))
    eager = copy.deepcopy(model)
    before = counters(model)
    captured = capture(model, (tokens,))
    assert all(torch.equal(a, b) for a, b in zip(counters(model), before, strict=True))
    for _ in range(2):
        run(as_model(captured), model, (others,), {})
        run(eager, eager, (others,), {})
        assert_same_counters(model, eager)
        update_expert_biases(model)
        update_expert_biases(eager)
        assert_same_counters(model, eager)
    assert torch.equal(model.blocks[0].moe.router.expert_bias, eager.blocks[0].moe.router.expert_bias)


def test_opaque_modules_are_the_models_own():
    model = Language()
    captured = capture(model, (torch.randint(13, (3, 5)),))
    assert captured.graph.get_submodule("blocks.1.moe") is model.blocks[1].moe
    assert set(model.state_dict()) - set(captured.graph.state_dict()) == {"head.weight"}  # tied: under its first name
    calls = []
    model.blocks[1].moe.register_forward_hook(lambda *_: calls.append(1))
    captured.graph(torch.randint(13, (2, 6)))
    assert calls == [1]


def test_a_deferred_batch_norm_asks_for_the_micro_batch():
    model = nn.Sequential(nn.Linear(4, 4), DeferredBatchNorm(4))
    captured = capture(model, (torch.randn(5, 4),))
    for index in range(2):
        with running(MicroBatch(index, 2, 0.5)):
            captured.graph(torch.randn(3, 4))
            assert int(model[1].num_batches_tracked) == index


class Noted(nn.Module):
    """Counts its calls and depends on its mode, which a graph could not do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x, *, factor):
        self.calls += 1
        return {"y": self.linear(x) * (factor if self.training else 0), "word": "w", "size": x.shape[0]}


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.after = Noted(), nn.Linear(4, 4)

    def forward(self, x):
        result = self.inner(self.after(x), factor=x[:1] * 2)
        assert result["word"] == "w"
        return self.after(result["y"]) * result["size"]


@pytest.mark.parametrize("opaque", [["inner"], "inner", [Noted], Noted])
def test_modules_that_the_user_names(opaque):
    model = Around()
    captured = assert_captured(model, (torch.randn(5, 4),), None, ((torch.randn(3, 4),), {}), opaque=opaque)
    assert model.inner.calls == 4  # only the graph's runs count; the capture's call is undone
    model.eval()
    assert torch.equal(captured.graph(torch.ones(2, 4))[0], model(torch.ones(2, 4)))


def test_a_parameter_shared_with_an_opaque_module():
    model = Around()
    model.after.weight = model.inner.linear.weight
    assert_captured(model, (torch.randn(5, 4),), opaque=["inner"])


def test_a_module_with_backward_hooks_keeps_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    seen = []
    model[1].register_full_backward_hook(lambda module, grads, out: seen.append(1) or (grads[0] * 2,))
    assert_captured(model, (torch.randn(5, 4),))
    assert len(seen) == 4


@pytest.mark.parametrize(("opaque", "error"), [(["other"], ValueError), ([3], TypeError), ([int], TypeError)])
def test_what_opaque_does_not_take(opaque, error):
    with pytest.raises(error, match="opaque"):
        capture(Around(), (torch.randn(5, 4),), opaque=opaque)


def test_activation_checkpoints_are_looked_into():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=True)
            return torch.utils.checkpoint.checkpoint(self.linear, y, use_reentrant=False)

    captured = assert_captured(Checkpointed(), (torch.randn(5, 4),))
    assert sum(node.target is torch.ops.aten.linear.default for node in captured.graph.graph.nodes) == 2


class Recurrent(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.lstm = nn.LSTM(4, hidden, 2, batch_first=True, dropout=0.2)
        self.gru, self.head = nn.GRU(hidden, 3), nn.Linear(3, 2)

    def forward(self, x):
        y, (last, _) = self.lstm(x)
        return self.head(self.gru(y)[0]), last


def test_recurrent_layers_leave_batch_and_length_free():
    """The result is the same even if the width equals the number of rows or the length of the example."""
    for hidden in (3, 5, 7):
        call = (torch.randn(3, 5, 4),)
        captured = assert_captured(Recurrent(hidden), call, None, ((torch.randn(6, 2, 4),), {}))
        assert not captured.input_checks.conditions


class Merge(nn.Module):
    """Branches on values. Its arguments must have equally many rows, and its result has twice as many."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y):
        if x.sum() > 1e9:
            return x
        return self.linear(torch.cat([x, y * x, x * 0])[: 2 * x.shape[0]]).reshape(-1, 2)


class Merged(nn.Module):
    def __init__(self):
        super().__init__()
        self.merge, self.head = Merge(), nn.Linear(2, 2)

    def forward(self, x, y):
        return self.head(self.merge(x, y)).view(4 * x.shape[0], 2)


def test_sizes_of_an_opaque_result_follow_from_those_of_its_arguments():
    def call(rows):
        return torch.randn(rows, 4), torch.randn(rows, 4)

    captured = assert_captured(Merged(), call(3), None, (call(5), {}), opaque=[Merge])
    with pytest.raises(ValueError, match="dimension 1 of x: expected 4, got 5"):
        captured.input_checks.check([torch.randn(3, 5), torch.randn(3, 5)])


def test_an_opaque_result_of_unknown_size_is_refused():
    class Positive(nn.Module):
        def forward(self, x):
            return x[: x.shape[0] - 7]

    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.chosen = Positive()

        def forward(self, x):
            return torch.cat([self.chosen(x.repeat(20, 1)), x])

    assert_captured(Chosen(), (torch.randn(3, 4),), opaque=[Positive])
    Positive.forward = lambda self, x: x[: x.shape[0] - 7] if x.sum() < 1e9 else x
    with pytest.raises(CaptureError, match="follow from sizes of arguments"):
        capture(Chosen(), (torch.randn(3, 4),), opaque=[Positive])
