"""The shapes of what an opaque call returns, where fake tensors do not pass through it: it runs on real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from pymoe._torch_private import pytree
from pymoe.pipe.capture.errors import CaptureError


def infer_by_running(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], fake_mode: Any
) -> Any:
    """Return what ``function`` returns for fake arguments, inferred from what it returns for real ones of two sizes.

    Every dimension of its results must be a number, a free dimension of the arguments, a product of two, or a multiple
    or part of these.

    Raises:
        CaptureError: one is not.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    free = {size.node.expr: size for size in symbolic_sizes(leaves) if not size.node.expr.is_number}
    sizes = list(free.values())
    hints = {symbol: _hint(size, symbol) for size in sizes for symbol in sorted(size.node.expr.free_symbols, key=str)}
    first, form = _run(function, leaves, spec, hints)
    others, second = hints, first
    for trial in _other_sizes(hints):
        sizes_now = {**others, **trial}
        try:
            second, _ = _run(function, leaves, spec, sizes_now)
        except Exception:  # these sizes are not free, or not each by itself
            continue
        others = sizes_now
        _settle([size for size in sizes if size.node.expr in trial and len(set(trial.values())) < len(trial)])
        if len(trial) == len(hints):
            break
    for size in sizes:
        if _value(size, others) == _value(size, hints):
            _settle([size, _value(size, hints)])
    known = [(size, _value(size, hints), _value(size, others)) for size in sizes]
    known = [(size, one, two) for size, one, two in known if one != two]
    known += [(one[0] * two[0], one[1] * two[1], one[2] * two[2]) for one, two in combinations(known, 2)]
    grad = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves) or _trains(function)
    grad = grad and torch.is_grad_enabled()
    return pytree.tree_unflatten(
        [_fake(one, two, known, grad, fake_mode) for one, two in zip(first, second, strict=True)], form
    )


def _hint(size: Any, symbol: Any) -> int:
    """Return the value of a symbol in the example."""
    environment = size.node.shape_env
    values = getattr(environment, "backed_var_to_val", None) or environment.var_to_val
    return int(values[symbol])


def _other_sizes(hints: dict[Any, int]) -> Iterator[dict[Any, int]]:
    """Yield sizes to try in place of ``hints``: all changed, one changed, and those that are equal changed together."""
    others = {symbol: hint * (number + 2) for number, (symbol, hint) in enumerate(hints.items())}
    yield others
    for symbol, other in others.items():
        yield {symbol: other}
    for hint in dict.fromkeys(hints.values()):
        alike = [symbol for symbol in hints if hints[symbol] == hint]
        if len(alike) > 1:
            yield dict.fromkeys(alike, others[alike[0]])


def _settle(sizes: list[Any]) -> None:
    """Make the capture require that these are equal."""
    for size in sizes[1:]:
        assert bool(sizes[0] == size)


def symbolic_sizes(leaves: list[Any]) -> Iterator[Any]:
    """Yield the sizes among leaves, and of tensors among them, that are no numbers."""
    for leaf in leaves:
        for size in leaf.shape if isinstance(leaf, Tensor) else [leaf]:
            if isinstance(size, torch.SymInt):
                yield size


def _run(function: Callable[..., Any], leaves: list[Any], spec: Any, numbers: dict[Any, int]) -> tuple[list[Any], Any]:
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        args, kwargs = pytree.tree_unflatten([_real(leaf, numbers) for leaf in leaves], spec)
        return pytree.tree_flatten(function(*args, **kwargs))


def _real(leaf: Any, numbers: dict[Any, int]) -> Any:
    if isinstance(leaf, torch.SymInt):
        return _value(leaf, numbers)
    if not isinstance(leaf, Tensor):
        return leaf
    return example_tensor([_value(size, numbers) for size in leaf.shape], leaf)


def example_tensor(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return random floats, or zeros that are valid indices, of the dtype and device of ``like``."""
    make = torch.rand if like.is_floating_point() or like.is_complex() else torch.zeros
    return make(shape, dtype=like.dtype, device=like.device)


def _value(size: Any, numbers: dict[Any, int]) -> int:
    if isinstance(size, int):
        return size
    value = size.node.expr.xreplace(numbers)
    return int(size.node.hint) if getattr(value, "free_symbols", None) else int(value)


def _fake(one: Any, two: Any, known: list[tuple[Any, int, int]], grad: bool, fake_mode: Any) -> Any:
    if isinstance(one, Tensor):
        if one.dim() != two.dim():
            raise CaptureError(
                "the number of dimensions of what an opaque call returns depends on the sizes of its arguments"
            )
        shape = [_size(a, b, known) for a, b in zip(one.shape, two.shape, strict=True)]
        with fake_mode:
            made = torch.empty(shape, dtype=one.dtype, device=one.device)
        return made.requires_grad_(grad and (one.is_floating_point() or one.is_complex()))
    return _size(one, two, known) if type(one) is int else one


def _size(one: int, two: int, known: list[tuple[Any, int, int]]) -> Any:
    if one == two:
        return one
    for size, a, b in known:
        if (a, b) == (one, two):
            return size
    for size, a, b in known:
        if a and one % a == 0 and one // a * b == two:
            return size * (one // a)
        if one and a % one == 0 and a // one * two == b:
            return size // (a // one)
    shown = ", ".join(f"{a} and {b}" for _, a, b in known)
    raise CaptureError(
        f"an opaque call returns a dimension of {one} or {two} where free dimensions of its arguments are {shown}: "
        "sizes of results must follow from sizes of arguments"
    )


def _trains(function: Any) -> bool:
    return isinstance(function, nn.Module) and any(parameter.requires_grad for parameter in function.parameters())
