"""Chooses how many layers each stage of a pipeline gets, to balance measured time or memory.

::

    balance = balance_by_time(2, model, sample)     # a sample as large as a micro-batch
    pipe = Pipe(model, chunks=8, balance=balance)

A copy of the model runs layer by layer to measure what each layer costs, and leaves no trace in the model itself. Names
and arguments are those of torchgpipe (Kim et al., 2020).
"""

from __future__ import annotations

import bisect
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from pymoe._errors import add_note
from pymoe._torch_private import pytree
from pymoe.pipe.skip import Key, tracking
from pymoe.pipe.stages import split

__all__ = [
    "LayerSize",
    "LayerTime",
    "balance_by_size",
    "balance_by_time",
    "balance_cost",
    "profile_sizes",
    "profile_times",
]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Return the layers per stage that minimise the time of the slowest stage, measured by :func:`profile_times`.

    Args:
        partitions: the number of stages.
        module: the model, which stays unchanged.
        sample: an input, preferably as large as a micro-batch, because times need not be proportional to the rows.
        timeout: how long to measure, in seconds.
        device: where to measure; None: on the model's device.

    Returns:
        The argument ``balance`` of ``Pipe``.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or ``partitions`` is not an integer.
        ValueError: there are more stages than layers, or no stage; ``timeout`` is negative.

    Example:
        >>> layers = [torch.nn.Linear(8, 8) for _ in range(4)]
        >>> balance = pymoe.pipe.balance.balance_by_time(2, torch.nn.Sequential(*layers), torch.ones(4, 8))
        >>> len(balance), sum(balance)
        (2, 4)
    """
    _check(partitions, module)
    times = profile_times(module, sample, timeout=timeout, device=device)
    return balance_cost([layer.total for layer in times], partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Return the layers per stage that minimise the size of the largest stage, measured by :func:`profile_sizes`.

    ``param_scale`` is the number of copies of the parameters that training holds: 2 for parameters and gradients (SGD),
    3 with momentum, 4 for Adam.

    Args:
        partitions: the number of stages.
        module: the model, which stays unchanged.
        input: a mini-batch of the size to train with.
        chunks: the number of micro-batches; the activations of one are counted.
        param_scale: see above.
        device: where to measure; None: on the model's device.

    Returns:
        The argument ``balance`` of ``Pipe``.

    Raises:
        TypeError: the model is not an ``nn.Sequential``, or ``partitions`` is not an integer.
        ValueError: there are more stages than layers, or no stage; ``chunks`` is less than 1; ``param_scale`` is
            negative.
    """
    _check(partitions, module)
    if not param_scale >= 0:
        raise ValueError(f"balance_by_size: param_scale must not be negative, got {param_scale}")
    sizes = profile_sizes(module, input, chunks=chunks, device=device)
    return balance_cost([layer.total(param_scale) for layer in sizes], partitions)


def _check(partitions: int, module: nn.Sequential) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"balance: module must be an nn.Sequential, got {type(module).__name__}")
    check_partitions(partitions, len(module))


# Measurements.


@dataclass(frozen=True)
class LayerTime:
    """The times of one layer in seconds: medians over ``passes`` passes."""

    name: str
    forward: float
    """Seconds of one pass."""
    backward: float
    """Seconds of one pass; 0 where nothing requires gradients."""
    forward_spread: float
    """Interquartile range of the forward times, in seconds; 0 after a single pass."""
    backward_spread: float
    passes: int

    @property
    def total(self) -> float:
        """Return the seconds of forward and backward together."""
        return self.forward + self.backward


@dataclass(frozen=True)
class LayerSize:
    """The memory of one layer in bytes. Memory that several layers share is counted for the first of them."""

    name: str
    parameters: int
    """Bytes of parameters that require gradients."""
    fixed: int
    """Bytes of buffers, and of parameters that do not require gradients."""
    activations: int
    """Bytes that autograd saves for the backward of one micro-batch."""

    def total(self, param_scale: float = 1.0) -> float:
        """Return the sum of all bytes, with ``parameters`` multiplied by ``param_scale``."""
        return self.parameters * param_scale + self.fixed + self.activations


def profile_times(
    module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: torch.device | str | int | None = None
) -> list[LayerTime]:
    """Return the times of a model's layers: run a copy layer by layer, forward and backward, repeatedly.

    The model, its gradients and torch's random generators are left as they were; hooks of modules run with the copy.
    Layers are timed in their present mode, training or not. The first pass is not counted; then passes are repeated, at
    least once, until ``timeout`` has passed.

    Args:
        module: the model; layers may be ``@skippable``, and may take and return nested structures.
        sample: an input, preferably a micro-batch of the size to train with.
        timeout: how long to measure, in seconds.
        device: where to run; None: on the model's device.

    Raises:
        TypeError: the model is not an ``nn.Sequential``.
        ValueError: ``timeout`` is negative.
        BaseException: the exception that a layer raised, with a note that names the layer.
    """
    if timeout < 0:
        raise ValueError(f"profile_times: timeout must not be negative, got {timeout}")
    skips = _KeptSkips(_separate)
    with _copied(module, sample, device, skips) as (layers, value, where):
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
    """Run the forward of a copy of a model on the first of ``chunks`` micro-batches; return the memory of each layer.

    Activations are the tensors that autograd saves for the backward pass. Whole storages are counted, so a view counts
    as its base. Tensors that layers keep by other means are not counted. Works on every device; the model and torch's
    random generators are left as they were.

    Args:
        module: the model; layers may be ``@skippable``, and may take and return nested structures.
        input: a mini-batch of the size to train with.
        chunks: the number of micro-batches.
        device: where to run; None: on the model's device.

    Raises:
        TypeError: the model is not an ``nn.Sequential``.
        ValueError: ``chunks`` is not a positive integer.
        BaseException: the exception that a layer raised, with a note that names the layer.
    """
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"profile_sizes: chunks must be a positive integer, got {chunks!r}")
    storages = _Storages()
    micro_batch = split([input], chunks).values[0][0]
    with _copied(module, micro_batch, device, _KeptSkips(lambda value: value)) as (layers, value, _):
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
    """Counts the bytes of storages, each storage once."""

    def __init__(self) -> None:
        self.bytes = 0
        self._seen: dict[int, Any] = {}  # kept alive, so that no other storage gets the same address

    def add(self, tensors: Sequence[torch.Tensor]) -> int:
        """Count the storages of strided and COO tensors. Return the number of bytes that were not counted before."""
        before = self.bytes
        for tensor in tensors:
            for part in _dense(tensor):
                storage = part.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen[storage._cdata] = storage
                    self.bytes += storage.nbytes()
        return self.bytes - before

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd saves. Return it detached, because its graph would form a reference cycle."""
        self.add([tensor])
        return tensor.detach()


def _pass(
    layers: list[tuple[str, nn.Module]], value: Any, device: torch.device, skips: _KeptSkips
) -> list[tuple[float, float]]:
    """Run all layers once. Return the forward and backward times of each layer, in seconds."""
    times = []
    for name, layer in layers:
        skips.stashed.clear()
        value = _separate(value)
        begin = now(device)
        with _naming(f"in layer '{name}'"):
            value = layer(value)
        middle = now(device)
        ends = [tensor for tensor in _tensors_of((value, skips.stashed)) if tensor.requires_grad]
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
        add_note(error, where)
        raise


def now(*devices: torch.device) -> float:
    """Wait until the devices have finished their work. Return ``time.perf_counter()``."""
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


class _KeptSkips:
    """Keeps every stashed skip, so that it can be popped repeatedly; each pop returns ``hand_over(value)``."""

    def __init__(self, hand_over: Callable[[Any], Any]) -> None:
        self.kept: dict[Key, Any] = {}
        self.stashed: list[Any] = []  # values that the running layer has stashed
        self._hand_over = hand_over

    def save(self, key: Key, value: Any) -> None:
        self.kept[key] = value
        self.stashed.append(value)

    def load(self, key: Key) -> Any:
        return self._hand_over(self.kept[key])


@contextmanager
def _copied(
    module: nn.Sequential, value: Any, device: torch.device | str | int | None, skips: _KeptSkips
) -> Iterator[tuple[list[tuple[str, nn.Module]], Any, torch.device]]:
    """Copy a model and its input to a device; yield the named layers of the copy, the input and the device.

    Within the block, gradients are enabled and ``skips`` keeps the skips; afterwards random generators are restored.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"balance: module must be an nn.Sequential, got {type(module).__name__}")
    if device is None:
        tensors = (*module.parameters(), *module.buffers(), *_tensors_of(value))
        where = tensors[0].device if tensors else torch.device("cpu")
    else:
        where = torch.device(device)
    drawn = [] if where.type == "cpu" else [torch.empty(0, device=where).device.index]
    kind = "cuda" if where.type == "cpu" else where.type
    with (
        torch.random.fork_rng(drawn, device_type=kind),
        torch.inference_mode(False),  # this also enables gradients
        tracking(skips),
    ):
        layers = copy.deepcopy(module).to(where)
        given = _map_tensors(lambda x: x.detach().to(where, copy=True).requires_grad_(x.requires_grad), value)
        yield list(layers._modules.items()), given, where  # type: ignore[arg-type]


def _separate(value: Any) -> Any:
    """Return ``value`` with each tensor copied: the copies have no earlier history and may be written in place."""
    return _map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad).clone(), value)


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, function, value)


def _tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# Cutting a list of costs.


def balance_cost(costs: Sequence[float], partitions: int) -> list[int]:
    """Cut a list of costs into consecutive blocks, so that the greatest block sum is minimal.

    The slowest stage sets the pace of a pipeline, so this sum is minimised exactly. Among several solutions the one
    with the least sum of squared sums is taken (the most even one), and among several of these the one with the most
    even numbers of layers. No block is empty. Sums are exact, even for floats.

    Args:
        costs: the cost of every layer, in any unit; not negative.
        partitions: the number of blocks.

    Returns:
        The number of layers of every block.

    Raises:
        TypeError: ``partitions`` is not an integer.
        ValueError: there are more blocks than layers, or no block, or a cost is negative or not finite.
    """
    check_partitions(partitions, len(costs))
    if any(not math.isfinite(cost) or cost < 0 for cost in costs):
        raise ValueError(f"balance_cost: costs must be finite and not negative, got {list(costs)}")
    sums, _ = _exact_sums(costs)
    limit, layers = _least_maximum(sums, partitions), len(costs)
    Way = tuple[int, int, tuple[int, ...]]
    # The best way to cut the first n layers into the blocks so far, for each n: the least sum of squared block costs,
    # then the least sum of squared block sizes, and the block sizes.
    best: dict[int, Way] = {0: (0, 0, ())}
    for blocks_left in reversed(range(partitions)):
        further: dict[int, Way] = {}
        for start, (squares, size_squares, sizes) in best.items():
            for end in range(start + 1, layers - blocks_left + 1):
                cost, size = sums[end] - sums[start], end - start
                if cost > limit:
                    break
                way = squares + cost * cost, size_squares + size * size, (*sizes, size)
                further[end] = min(way, further.get(end, way))
        best = further
    return list(best[layers][2])


def least_maximum(costs: Sequence[float], partitions: int) -> float:
    """Return the greatest block sum if ``costs`` are cut into blocks as :func:`balance_cost` cuts them."""
    check_partitions(partitions, len(costs))
    sums, unit = _exact_sums(costs)
    return _least_maximum(sums, partitions) / unit


def check_partitions(partitions: int, layers: int) -> None:
    """Raise TypeError or ValueError unless ``partitions`` is from 1 to ``layers``."""
    if not isinstance(partitions, int) or isinstance(partitions, bool):
        raise TypeError(f"balance: partitions must be an integer, got {partitions!r}")
    if not 1 <= partitions <= layers:
        raise ValueError(f"balance: partitions must be from 1 to the number of layers, {layers}, got {partitions}")


def _exact_sums(costs: Sequence[float]) -> tuple[list[int], int]:
    """Return the prefix sums of the costs, scaled to integers by a common factor, and this factor."""
    ratios = [(cost if isinstance(cost, (int, float)) else float(cost)).as_integer_ratio() for cost in costs]
    unit = math.lcm(*[denominator for _, denominator in ratios])
    return [0, *accumulate(numerator * (unit // denominator) for numerator, denominator in ratios)], unit


def _least_maximum(sums: Sequence[int], partitions: int) -> int:
    """Return the smallest possible maximum block sum if the costs are divided into ``partitions`` contiguous blocks.

    ``sums``: 0, then the cumulative sums of the costs.
    """
    low, high = 0, sums[-1]
    while low < high:
        limit, end = (low + high) // 2, 0
        for _ in range(partitions):
            end = bisect.bisect_right(sums, sums[end] + limit) - 1
        low, high = (low, limit) if end == len(sums) - 1 else (limit + 1, high)
    return low
