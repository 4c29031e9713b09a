"""Checks that a captured graph equals the model bit for bit: outputs, gradients, buffers and random numbers."""

import copy

import torch
from torch.utils import _pytree

from pymoe.pipe.capture import capture


def run(function, model, args, kwargs, seed=3):
    """Return (outputs, gradients of inputs, gradients by name, buffers by name, the next random numbers)."""
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    leaves = [
        leaf.detach().clone().requires_grad_(leaf.is_floating_point()) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    args, kwargs = _pytree.tree_unflatten(leaves, spec)
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    output = function(*args, **kwargs)
    after = torch.rand(())
    tensors = [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    torch.manual_seed(seed)
    loss = sum((leaf * torch.rand_like(leaf)).sum() for leaf in tensors if leaf.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    return {
        "output": output,
        "input gradients": [getattr(leaf, "grad", None) for leaf in leaves],
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "random": after,
    }


def assert_same(one, other):
    left, left_spec = _pytree.tree_flatten_with_path(one)
    right, right_spec = _pytree.tree_flatten(other)
    assert left_spec == right_spec
    for (path, a), b in zip(left, right, strict=True):
        where = _pytree.keystr(path)
        if isinstance(a, torch.Tensor):
            assert isinstance(b, torch.Tensor), where
            assert (a.dtype, a.shape) == (b.dtype, b.shape), where
            assert torch.equal(a, b), where
        else:
            assert (type(a), a) == (type(b), b), where


def as_model(captured):
    """Return a function that calls the captured graph like the model."""

    def call(*args, **kwargs):
        leaves = captured.arguments.flatten(args, kwargs)
        captured.input_checks.check(leaves)
        return _pytree.tree_unflatten(captured.graph(*leaves), captured.out_spec)

    return call


def assert_captured(model, args, kwargs=None, *others, steps=2, **options):
    """Capture with ``args, kwargs``, and check that the graph equals the model for these and for ``others``."""
    eager = copy.deepcopy(model)
    captured = capture(model, args, kwargs, **options)
    call = as_model(captured)
    for other_args, other_kwargs in [(args, kwargs or {}), *others]:
        for seed in range(steps):
            expected = run(eager, eager, other_args, other_kwargs, seed)
            assert_same(run(call, model, other_args, other_kwargs, seed), expected)
    return captured
