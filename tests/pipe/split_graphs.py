"""Graphs of stages for tests of split backward passes, and their comparison with whole passes."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pymoe.autograd.graph_nodes import edge_of, find_leaves, has_compiled_nodes
from pymoe.autograd.isolated_graph import differentiate
from pymoe.pipe.split_backward import SplitBackward

_NAMES = "mm addmm bmm convolution embedding_dense_backward _prelu_kernel_backward"
WORK = frozenset([f"aten.{name}" for name in _NAMES.split()])
calls = Counter()


class CountedWork(TorchDispatchMode):
    """Counts expensive operators, and the requested outputs of convolutions and norms."""

    def __init__(self):
        super().__init__()
        self.work = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func.overloadpacket)
        if name.endswith(("convolution_backward", "norm_backward")):
            self.work[name] += sum(args[-1])  # output_mask
        elif name in WORK or name.startswith("pymoe."):
            self.work[name] += 1
        return func(*args, **(kwargs or {}))


class Scaled(torch.autograd.Function):
    """Computes x * w, and counts calls of its backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        calls["Scaled"] += 1
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum_to_size(w.shape)


class Halves(torch.autograd.Function):
    """A Function with two outputs, from a non-tensor, a tensor and a weight; gradients may be missing."""

    @staticmethod
    def forward(ctx, by, x, w):
        ctx.set_materialize_grads(False)
        ctx.by = by
        return x * by, w * by

    @staticmethod
    def backward(ctx, of_x, of_w):
        calls["Halves"] += 1
        return None, None if of_x is None else of_x * ctx.by, None if of_w is None else of_w * ctx.by


class InParts(torch.autograd.Function):
    """Computes x @ w.T; its backward computes only the requested gradients."""

    backward_in_parts = True

    @staticmethod
    def forward(ctx, name, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        _, needs_x, needs_w = ctx.needs_input_grad
        calls["InParts.x"] += needs_x
        calls["InParts.w"] += needs_w
        return None, grad @ w if needs_x else None, grad.t() @ x if needs_w else None


class Boundary(torch.autograd.Function):
    """The node where a stage's graph begins; it must never run."""

    @staticmethod
    def forward(ctx, *tensors):
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError("went past the beginning")


def begin(*tensors):
    made = Boundary.apply(*[tensor.detach().requires_grad_() for tensor in tensors])
    return made, [edge_of(tensor) for tensor in made]


class Case:
    """A graph that ``build(*aliases)`` makes anew for each use, and the results of its backward passes."""

    def __init__(self, build, *inputs):
        self.build, self.inputs = build, inputs

    def graph(self):
        torch.manual_seed(1)
        aliases, edges = begin(*self.inputs) if self.inputs else ((), [])
        outputs = self.build(*aliases)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        roots = [edge_of(output) for output in outputs if output.requires_grad]
        entry = edges[0].node if edges else None
        leaves = find_leaves([root.node for root in roots], entry)
        grads = [torch.cos(output.detach() * 3 + 1) for output in outputs if output.requires_grad]
        return roots, edges, leaves, grads, entry

    def whole(self):
        roots, edges, leaves, grads, entry = self.graph()
        calls.clear()
        with CountedWork() as counted:
            found = differentiate(roots, grads, edges, leaves, entry)
        return found, leaves, dict(calls), counted.work

    def parts(self):
        roots, edges, leaves, grads, entry = self.graph()
        is_compiled = has_compiled_nodes([root.node for root in roots], entry)
        calls.clear()
        with CountedWork() as first:
            split = SplitBackward(roots, grads, edges, leaves, is_compiled)
        with CountedWork() as second:
            of_leaves = split.weight_gradients()
        return (*split.input_gradients, *of_leaves), leaves, dict(calls), first.work, second.work

    def check(self, exact=True):
        """Check that split and whole backward give the same results and do the same work; return the work of both
        parts.
        """
        whole, leaves, whole_calls, whole_work = self.whole()
        parts, part_leaves, part_calls, first, second = self.parts()
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in part_leaves]
        assert [gradient is None for gradient in parts] == [gradient is None for gradient in whole]
        for expected, got in zip(whole, parts, strict=True):
            if expected is not None:
                assert got.shape == expected.shape
                assert got.dtype == expected.dtype
                assert torch.equal(got, expected) if exact else torch.allclose(got, expected, rtol=0, atol=1e-12)
        assert part_calls == whole_calls
        assert first + second == whole_work
        return first, second
