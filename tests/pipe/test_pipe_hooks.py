"""Hooks of the model and of stages, and forward-mode differentiation through a pipe."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from pymoe.pipe import Pipe, Whole

WIDTH = 4


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def double_input(module, args):
    return (args[0] * 2,)


def triple_output(module, args, output):
    return output * 3


def change_gradient(module, inputs, outputs):
    return tuple(gradient * 5 for gradient in inputs)


HOOKS = {
    "register_forward_pre_hook": double_input,
    "register_forward_hook": triple_output,
    "register_full_backward_hook": change_gradient,
}


@pytest.mark.parametrize("hooks", [[name] for name in HOOKS] + [list(HOOKS)], ids="+".join)
@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_call_of_the_pipe_calls_the_models_own_hooks(hooks, copied):
    """The hooks see whole mini-batches, if they are registered before or after the pipe is created."""
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    found = []
    for wrap in (lambda module: module, lambda module: copied(Pipe(module, 3, balance=[2, 1]))):
        module = build()
        if len(hooks) == 1:  # before
            getattr(module, hooks[0])(HOOKS[hooks[0]])
        called = wrap(module)
        if len(hooks) > 1:  # after
            for name in hooks:
                getattr(called, name)(HOOKS[name])
        given = x.clone().requires_grad_()
        y = called(given)
        y.square().sum().backward()
        found.append([y, given.grad, *[p.grad for p in called.parameters()]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_hook_can_be_removed_from_the_model_and_from_the_pipe():
    module = build()
    pipe = Pipe(module, 2)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    plain = module(x)
    handles = [module.register_forward_hook(triple_output), pipe.register_forward_hook(triple_output)]
    torch.testing.assert_close(pipe(x), plain * 9)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(pipe(x), plain)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_hooks_of_a_stage_see_micro_batches(checkpoint):
    """Hooks of a stage's module were never called."""
    pipe = Pipe(build(), 3, checkpoint, balance=[2, 1])
    rows = []
    pipe.get_stage_module(0).register_forward_hook(lambda module, args, output: rows.append(len(output)))
    pipe[1].register_forward_hook(triple_output)
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    pipe.step(x, loss_fn=torch.sum, reduction="sum", schedule="gpipe")
    assert rows == [3, 2, 2] * (1 if checkpoint == "never" else 2)
    torch.testing.assert_close(pipe(x), build()(x) * 3)


def test_hooks_of_state_dicts_are_the_models():
    module = build()
    module.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}version": 3}))
    seen = []
    module.register_load_state_dict_pre_hook(lambda module, state, *_: seen.append(state.pop("version")))
    pipe = Pipe(module, 2)
    pipe.load_state_dict(pipe.state_dict())
    assert seen == [3]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("where", ["input", "Whole", "parameter"])
def test_tangents_go_through_a_pipe(where, gradients, checkpoint):
    """Tangents of inputs were dropped silently."""
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    tangent = torch.randn(4, WIDTH, dtype=torch.float64)
    found = []
    for make in (lambda module: module, lambda module: Pipe(module, 2, checkpoint)):
        module = build()
        called = make(module)
        with forward_ad.dual_level(), torch.set_grad_enabled(gradients):
            if where == "parameter":
                weight = module[0].weight
                del module[0].weight
                module[0].weight = nn.Buffer(forward_ad.make_dual(weight.detach(), tangent))
                y = called(x)
            else:
                dual = forward_ad.make_dual(x, tangent)
                whole = where == "Whole" and called is not module
                y = called(Whole(dual))[:4] if whole else called(dual)
            found.append(forward_ad.unpack_dual(y))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_with_tangents_is_refused():
    pipe = Pipe(build(), 2)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=r"Pipe\.step: forward-mode differentiation .* pipe\(x\)"):
            pipe.step(forward_ad.make_dual(x, x), loss_fn=torch.sum, reduction="sum")
        pipe.step(x, loss_fn=torch.sum, reduction="sum")  # no tensor in the step has a tangent
