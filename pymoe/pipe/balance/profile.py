"""What every layer of a sequential model costs: time, and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pymoe.pipe.balance.layers import Skips, copied, separate, tensors_of
from pymoe.pipe.micro_batches import split

__all__ = ["LayerSize", "LayerTime", "profile_sizes", "profile_times"]


@dataclass(frozen=True)
class LayerTime:
    """Seconds that a layer took, in the middle of several passes."""

    name: str
    forward: float
    """Median."""
    backward: float
    """Median; 0 where nothing requires gradients."""
    forward_spread: float
    """Between the quartiles."""
    backward_spread: float
    passes: int

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class LayerSize:
    """Bytes that a layer holds. What several layers share counts for the first."""

    name: str
    parameters: int
    """That are trained."""
    fixed: int
    """Buffers, and parameters that are not trained."""
    activations: int
    """Of one micro-batch: what autograd keeps between forward and backward."""

    def total(self, param_scale: float = 1.0) -> float:
        """All of it, with ``param_scale`` times the trained parameters."""
        return self.parameters * param_scale + self.fixed + self.activations


def profile_times(
    module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: torch.device | str | int | None = None
) -> list[LayerTime]:
    """Run a copy of a model layer by layer, forward and backward, again and again, and time it.

    The model, its gradients and torch's random generators are left as they were; hooks of modules run with the copy.
    Layers are timed in the mode they are in, training or not. After one pass that is not counted, passes are made until
    ``timeout`` is over: at least one.

    Args:
        module: the model; layers may be ``@skippable``, take and return nested structures.
        sample: an input: a micro-batch, best of the size that it will have.
        timeout: seconds.
        device: where to run; None: where the model is.

    Raises:
        TypeError: the model is no ``nn.Sequential``.
        ValueError: ``timeout`` is negative.
        BaseException: what a layer raised, with a note that names it.
    """
    if timeout < 0:
        raise ValueError(f"profile_times: timeout must not be negative, got {timeout}")
    skips = Skips(separate)
    with copied(module, sample, device, skips) as (layers, value, where):
        _pass(layers, value, where, skips)
        end = _now(where) + timeout
        passes = [_pass(layers, value, where, skips)]
        while _now(where) < end:
            passes.append(_pass(layers, value, where, skips))
    times = []
    for number, (name, _) in enumerate(layers):
        forward, backward = zip(*[taken[number] for taken in passes], strict=True)
        times.append(
            LayerTime(
                name,
                statistics.median(forward),
                statistics.median(backward),
                _spread(forward),
                _spread(backward),
                len(passes),
            )
        )
    return times


def profile_sizes(
    module: nn.Sequential, input: Any, *, chunks: int = 1, device: torch.device | str | int | None = None
) -> list[LayerSize]:
    """Run a copy of a model forward once, for the first of ``chunks`` micro-batches, and count what each layer holds.

    Activations are what autograd saves for the backward pass, by storages: a view holds all of what it is a view of.
    Layers that keep tensors by other means than autograd are not seen doing so. On every device; the model and
    torch's random generators are left as they were.

    Args:
        module: the model; layers may be ``@skippable``, take and return nested structures.
        input: a mini-batch of the size to train with.
        chunks: the number of micro-batches.
        device: where to run; None: where the model is.

    Raises:
        TypeError: the model is no ``nn.Sequential``.
        ValueError: ``chunks`` is no integer from 1 up.
        BaseException: what a layer raised, with a note that names it.
    """
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"profile_sizes: chunks must be a positive integer, got {chunks!r}")
    storages = _Storages()
    micro_batch = split([input], chunks).values[0][0]
    with copied(module, micro_batch, device, Skips(lambda value: value)) as (layers, value, _):
        held = []
        for _, layer in layers:
            trained = storages.add([parameter for parameter in layer.parameters() if parameter.requires_grad])
            held.append((trained, storages.add([*layer.parameters(), *layer.buffers()])))
        sizes = []
        for (name, layer), (trained, fixed) in zip(layers, held, strict=True):
            before = storages.bytes
            with torch.autograd.graph.saved_tensors_hooks(storages.pack, lambda tensor: tensor):
                value = _call(name, layer, value)
            sizes.append(LayerSize(name, trained, fixed, storages.bytes - before))
    return sizes


class _Storages:
    """Counts the bytes of storages, each once."""

    def __init__(self) -> None:
        self.bytes = 0
        self._seen: dict[int, Any] = {}  # kept, so that none gets the place of another

    def add(self, tensors: Sequence[torch.Tensor]) -> int:
        """How many bytes of them are new."""
        before = self.bytes
        for tensor in tensors:
            for part in _dense(tensor):
                storage = part.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen[storage._cdata] = storage
                    self.bytes += storage.nbytes()
        return self.bytes - before

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """What autograd keeps; without its graph, which would go round in a circle."""
        self.add([tensor])
        return tensor.detach()


def _pass(
    layers: list[tuple[str, nn.Module]], value: Any, device: torch.device, skips: Skips
) -> list[tuple[float, float]]:
    """Seconds of forward and backward of every layer."""
    times = []
    for name, layer in layers:
        skips.stashed.clear()
        value = separate(value)
        begin = _now(device)
        value = _call(name, layer, value)
        middle = _now(device)
        ends = [tensor for tensor in tensors_of((value, skips.stashed)) if tensor.requires_grad]
        gradients = [torch.ones_like(tensor) for tensor in ends]
        restart = _now(device)
        if ends:
            _named(f"in the backward pass of layer '{name}'", torch.autograd.backward, ends, gradients)
        times.append((middle - begin, _now(device) - restart if ends else 0.0))
        for parameter in layer.parameters():
            parameter.grad = None
    skips.kept.clear()
    return times


def _call(name: str, layer: nn.Module, value: Any) -> Any:
    return _named(f"in layer '{name}'", layer, value)


def _named(where: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except BaseException as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(where)
        raise


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


def _spread(times: tuple[float, ...]) -> float:
    if len(times) == 1:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return third - first


def _dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return []
