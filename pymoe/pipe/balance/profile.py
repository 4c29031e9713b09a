"""Measures what every layer of a sequential model costs: time, and memory.

A copy of the model runs layer by layer, and leaves no trace in the model itself.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pymoe._torch_private import pytree
from pymoe.pipe.micro_batches import split
from pymoe.pipe.skip import tracking
from pymoe.pipe.skip.tracker import Key


@dataclass(frozen=True)
class LayerTime:
    """Seconds that a layer took: medians over several passes."""

    name: str
    forward: float
    """Of one pass."""
    backward: float
    """Of one pass; 0 where nothing requires gradients."""
    forward_spread: float
    """The distance between the quartiles."""
    backward_spread: float
    passes: int

    @property
    def total(self) -> float:
        """The seconds of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class LayerSize:
    """Bytes that a layer holds. What several layers share counts for the first of them."""

    name: str
    parameters: int
    """Those that require gradients."""
    fixed: int
    """Buffers, and parameters that do not require gradients."""
    activations: int
    """What autograd keeps of one micro-batch between forward and backward."""

    def total(self, param_scale: float = 1.0) -> float:
        """Return the sum, with ``param_scale`` times the trained parameters."""
        return self.parameters * param_scale + self.fixed + self.activations


def profile_times(
    module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: torch.device | str | int | None = None
) -> list[LayerTime]:
    """Time the layers of a model: run a copy layer by layer, forward and backward, again and again.

    The model, its gradients and torch's random generators are left as they were; hooks of modules run with the copy.
    Layers are timed in the mode they are in, training or not. After one pass that is not counted, passes are made until
    ``timeout`` is over: at least one.

    Args:
        module: the model; layers may be ``@skippable``, take and return nested structures.
        sample: an input: a micro-batch, best of the size that it will have.
        timeout: seconds.
        device: where to run; None: where the model is.

    Raises:
        TypeError: the model is not an ``nn.Sequential``.
        ValueError: ``timeout`` is negative.
        BaseException: what a layer raised, with a note that names it.
    """
    if timeout < 0:
        raise ValueError(f"profile_times: timeout must not be negative, got {timeout}")
    skips = Skips(separate)
    with copied(module, sample, device, skips) as (layers, value, where):
        _pass(layers, value, where, skips)
        end = now(where) + timeout
        passes = [_pass(layers, value, where, skips)]
        while now(where) < end:
            passes.append(_pass(layers, value, where, skips))
    median = statistics.median
    times = []
    for (name, _), taken in zip(layers, zip(*passes, strict=True), strict=True):
        forward, backward = zip(*taken, strict=True)
        spreads = _spread(forward), _spread(backward)
        times.append(LayerTime(name, median(forward), median(backward), *spreads, len(passes)))
    return times


def profile_sizes(
    module: nn.Sequential, input: Any, *, chunks: int = 1, device: torch.device | str | int | None = None
) -> list[LayerSize]:
    """Run a copy of a model forward once, for the first of ``chunks`` micro-batches, and count what each layer holds.

    Activations are what autograd saves for the backward pass, by storages: a view holds all of what it is a view of.
    Tensors that layers keep by other means are not counted. Works on every device; the model and torch's random
    generators are left as they were.

    Args:
        module: the model; layers may be ``@skippable``, take and return nested structures.
        input: a mini-batch of the size to train with.
        chunks: the number of micro-batches.
        device: where to run; None: where the model is.

    Raises:
        TypeError: the model is not an ``nn.Sequential``.
        ValueError: ``chunks`` is not a positive integer.
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
            keeping = torch.autograd.graph.saved_tensors_hooks(storages.pack, lambda tensor: tensor)
            with keeping, _naming(f"in layer '{name}'"):
                value = layer(value)
            sizes.append(LayerSize(name, trained, fixed, storages.bytes - before))
    return sizes


class _Storages:
    """Counts the bytes of storages, each once."""

    def __init__(self) -> None:
        self.bytes = 0
        self._seen: dict[int, Any] = {}  # kept, so that no other gets the address of one

    def add(self, tensors: Sequence[torch.Tensor]) -> int:
        """Count the tensors. Return how many of their bytes are new."""
        before = self.bytes
        for tensor in tensors:
            for part in _dense(tensor):
                storage = part.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen[storage._cdata] = storage
                    self.bytes += storage.nbytes()
        return self.bytes - before

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count what autograd keeps, and return it without its graph, which would make a reference cycle."""
        self.add([tensor])
        return tensor.detach()


def _pass(
    layers: list[tuple[str, nn.Module]], value: Any, device: torch.device, skips: Skips
) -> list[tuple[float, float]]:
    """Run all layers once. Return the seconds of forward and backward of each."""
    times = []
    for name, layer in layers:
        skips.stashed.clear()
        value = separate(value)
        begin = now(device)
        with _naming(f"in layer '{name}'"):
            value = layer(value)
        middle = now(device)
        ends = [tensor for tensor in tensors_of((value, skips.stashed)) if tensor.requires_grad]
        gradients = [torch.ones_like(tensor) for tensor in ends]
        restart = now(device)
        if ends:
            with _naming(f"in the backward pass of layer '{name}'"):
                torch.autograd.backward(ends, gradients)
        times.append((middle - begin, now(device) - restart if ends else 0.0))
        for parameter in layer.parameters():
            parameter.grad = None
    skips.kept.clear()
    return times


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(where)
        raise


def now(*devices: torch.device) -> float:
    """Return the time in seconds after all that the devices have been given to do."""
    for device in devices:
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


class Skips:
    """Keeps skips for any number of pops; ``hand_over`` makes of a skip what a layer gets."""

    def __init__(self, hand_over: Callable[[Any], Any]) -> None:
        self.kept: dict[Key, Any] = {}
        self.stashed: list[Any] = []  # by the layer that runs
        self._hand_over = hand_over

    def save(self, key: Key, value: Any) -> None:
        self.kept[key] = value
        self.stashed.append(value)

    def load(self, key: Key) -> Any:
        return self._hand_over(self.kept[key])


@contextmanager
def copied(
    module: nn.Sequential, value: Any, device: torch.device | str | int | None, skips: Skips
) -> Iterator[tuple[list[tuple[str, nn.Module]], Any, torch.device]]:
    """Copy the model's layers, with their names, and its input to a device. Yields both, and the device.

    Within the block gradients are on, skips go through ``skips``, and the generators of random numbers are copies.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"balance: module must be an nn.Sequential, got {type(module).__name__}")
    if device is None:
        tensors = (*module.parameters(), *module.buffers(), *tensors_of(value))
        where = tensors[0].device if tensors else torch.device("cpu")
    else:
        where = torch.device(device)
    drawn = [] if where.type == "cpu" else [torch.empty(0, device=where).device.index]
    kind = "cuda" if where.type == "cpu" else where.type
    with (
        torch.random.fork_rng(drawn, device_type=kind),
        torch.inference_mode(False),  # and gradients are on
        tracking(skips),
    ):
        layers = copy.deepcopy(module).to(where)
        given = map_tensors(lambda x: x.detach().to(where, copy=True).requires_grad_(x.requires_grad), value)
        yield list(layers._modules.items()), given, where  # type: ignore[arg-type]


def separate(value: Any) -> Any:
    """Return the same values with a graph that begins here; a layer may write into them."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad).clone(), value)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, function, value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
