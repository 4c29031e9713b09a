"""Batch norms for pipelines: they are called once per micro-batch, but their running statistics describe whole
mini-batches.

Each call normalises its rows by their own statistics. An ordinary batch norm would also update its running statistics
in each call, with a variance that ignores how the means of micro-batches differ, and would count every micro-batch as a
batch. The deferred batch norm collects statistics over a mini-batch and updates the running statistics once, with the
mean and variance of all rows.

Name and idea come from torchgpipe (Kim et al., 2020). Statistics of micro-batches are combined in fp64, as in Chan,
Golub and LeVeque (1979), "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pymoe._torch_private import BatchNormBase, LazyNormBase
from pymoe.autograd.compiler_disable import compiler_disable
from pymoe.pipe import context

Module = TypeVar("Module", bound=nn.Module)

HALF_DTYPES = (torch.float16, torch.bfloat16)


class _Collected(NamedTuple):
    """Statistics of the rows of some micro-batches, for every channel, in float64."""

    rows: int
    mean: Tensor
    squares: Tensor
    """The sum of squared distances from the mean."""

    def plus(self, other: _Collected | None) -> _Collected:
        if other is None:
            return self
        rows = self.rows + other.rows
        apart = self.mean - other.mean
        squares = other.squares + self.squares + apart.square() * (other.rows * self.rows / rows)
        return _Collected(rows, other.mean + apart * (self.rows / rows), squares)


class _StageStatistics:
    """Collects the statistics of the current mini-batch for one module in one stage."""

    def __init__(self) -> None:
        self.forward: context.MicroBatch | None = None
        self.calls = 0
        # Keys: the index of the call, because a forward may call the module several times; then the index of the
        # micro-batch.
        self.collected: dict[int, dict[int, _Collected]] = {}

    def next_call(self, forward: context.MicroBatch) -> int:
        """Count a call in ``forward``, and return its index in that forward, from 0. Also drop the statistics of
        an earlier mini-batch.
        """
        before = self.forward
        if forward is not before:
            is_next = before is not None and forward.mini_batch is before.mini_batch
            if not is_next or (forward.mini_batch is None and before is not None and forward.index <= before.index):
                self.collected.clear()  # statistics of a mini-batch that was not finished
            self.forward, self.calls = forward, 0
        self.calls += 1
        return self.calls - 1


class DeferredBatchNorm(BatchNormBase):
    """A batch norm that updates its running statistics once per mini-batch.

    In a pipeline, in training, each micro-batch is normalised by its own mean and (biased) variance. In the last
    micro-batch the running statistics are updated with the mean and unbiased variance of all rows of the mini-batch,
    and ``num_batches_tracked`` goes up by one, as ``nn.BatchNorm2d`` would do for all rows at once. A recomputed
    forward is not counted. A mini-batch that fails before its last micro-batch changes nothing.

    Outside of a pipeline, in evaluation, with one micro-batch, or without running statistics, the layer works like
    ``nn.BatchNorm2d``. Its parameters, buffers and keys of ``state_dict`` are those of ``nn.BatchNorm2d``.

    Args:
        num_features: the number C of channels.
        eps: added to the variance before the square root.
        momentum: the weight of a mini-batch in the running statistics; None: they are the mean over all mini-batches.
        affine: whether there are a weight and a bias for each channel.
        track_running_stats: whether there are running statistics; without them every batch is normalised by its own
            statistics.

    Input: (N, C) or (N, C, ...); a layer that :func:`convert_deferred_batch_norm` has converted takes the same input as
    before.
    """

    def forward(self, input: Tensor) -> Tensor:
        forward = context.micro_batch()
        if forward is None or not self.training or self.running_mean is None:
            return super().forward(input)
        if forward.recomputing:
            self._check_input_dim(input)
            return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        if forward.count == 1:
            return super().forward(input)
        self._check_input_dim(input)
        output, statistics = self._normalise(input, self.running_mean)
        self._collect(forward, statistics)
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _normalise(self, input: Tensor, running_mean: Tensor) -> tuple[Tensor, _Collected]:
        """Return the input normalised by its own statistics, and these statistics."""
        rows = input.numel() // input.size(1)
        if running_mean.dtype in HALF_DTYPES:  # 16-bit buffers would round the statistics too coarsely
            output = F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
            with torch.no_grad():
                dims = [dim for dim in range(input.dim()) if dim != 1]
                variance, mean = torch.var_mean(input.detach().float(), dims)
        else:
            # With a momentum of 1, batch_norm() also writes this batch's statistics to its arguments, at no extra cost.
            mean, variance = torch.zeros_like(running_mean), torch.zeros_like(running_mean)
            output = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        return output, _Collected(rows, mean.double(), variance.double() * (rows - 1))

    # torch.compile would compile this method anew for every micro-batch, because it treats the index as a constant.
    @compiler_disable
    def _collect(self, forward: context.MicroBatch, statistics: _Collected) -> None:
        stage = self.__dict__.setdefault("_unfinished", {}).setdefault(forward.stage, _StageStatistics())
        call = stage.next_call(forward)
        of_call = stage.collected.setdefault(call, {})
        of_call[forward.index] = statistics
        if forward.index == forward.count - 1 if forward.is_last is None else forward.is_last:
            batch: _Collected | None = None
            for index in sorted(of_call):  # in a fixed order, so that the sums do not depend on threads
                batch = of_call[index].plus(batch)
            assert batch is not None
            del stage.collected[call]
            self._commit(batch)

    def _commit(self, batch: _Collected) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        if momentum is None:
            momentum = 0.0
        for running, seen in ((self.running_mean, batch.mean), (self.running_var, batch.squares / (batch.rows - 1))):
            running.copy_((1 - momentum) * running.double() + momentum * seen)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, state, *rest = reduced
        state = {name: value for name, value in state.items() if name != "_unfinished"}
        base: Any = type(self).__bases__[0]
        # Pickle cannot find a generated class by its name.
        if type(self) is not DeferredBatchNorm and _deferred(base) is type(self):
            make, arguments = _make, (base,)
        return make, arguments, state, *rest


@functools.cache
def _deferred(cls: Any) -> type[DeferredBatchNorm]:
    """Return the class of batch norms that derives from ``cls`` and :class:`DeferredBatchNorm`."""
    own = {"__module__": __name__, "__doc__": DeferredBatchNorm.__doc__}
    return type(f"Deferred{cls.__name__}", (cls, DeferredBatchNorm), own)


def _make(cls: Any) -> DeferredBatchNorm:
    deferred = _deferred(cls)
    return deferred.__new__(deferred)


def convert_deferred_batch_norm(module: Module) -> Module:
    """Make all batch norms in ``module`` update their running statistics once per mini-batch. Return ``module``.

    The layers change in place: they stay the same objects, with their parameters, buffers, hooks, flags and names, and
    are still instances of their former classes.

    Args:
        module: a model, or any part of one.

    Raises:
        TypeError: there is a ``SyncBatchNorm``, which takes its statistics from several processes; a lazy batch norm
            that has not seen an input; or a batch norm whose class has its own ``forward``. No layer is then changed.
    """
    found = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNormBase) and not isinstance(layer, DeferredBatchNorm)
    }
    for name, layer in found.items():
        if why := _why_not(layer):
            raise TypeError(f"convert_deferred_batch_norm: '{name}' is a {type(layer).__name__}{why}")
    for layer in found.values():
        cls: Any = type(layer)
        layer.__class__ = _deferred(cls)
    return module


def _why_not(layer: BatchNormBase) -> str | None:
    if isinstance(layer, nn.SyncBatchNorm):
        return ": its statistics come from several processes, and cannot be deferred in this one"
    if isinstance(layer, LazyNormBase):
        return ", which has not seen an input yet: run it once first"
    if type(layer).forward is not BatchNormBase.forward:
        return ", which has a forward of its own: derive it from DeferredBatchNorm instead"
    return None
