"""Copies a thread's torch settings to the threads that run its calls.

(``pymoe.autograd.plain_state`` does the opposite: it hides a client's settings from a batch.) torch keeps these
settings per thread and has no public function that copies them to another thread, so each part is copied individually:

- grad mode, inference mode, forward-mode gradients, multithreading and view replay of autograd;
- autocast: for the CPU and the accelerator whether it is on and its dtype, and whether casts are cached; and the level
  of autocast blocks (:func:`autocast_level`), at whose end torch clears the cache of casts;
- function modes (including ``torch.device`` and ``torch.set_default_device``), whether ``__torch_function__`` of
  tensor subclasses is called (``DisableTorchFunction``), dispatch modes;
- hooks on saved tensors, and whether they are forbidden;
- the current CUDA device, and the current stream of every CUDA device: the work of all calls is queued on the streams
  of the calling thread, so it comes after the work that this thread has queued, and before its later work.

Context variables are copied by ``contextvars``, and the profiler's state by ``pymoe._runtime.Profiled``. The default
dtype, anomaly mode, deterministic algorithms and the number of threads are process-wide, so they need no copy.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from pymoe import _torch_canaries as canaries
from pymoe._torch_private import (
    GLOBAL_DEVICE_CONTEXT,
    InferenceMode,
    TorchFunctionState,
    get_current_dispatch_mode_stack,
    get_current_function_mode_stack,
    is_any_autocast_enabled,
    is_fwd_grad_enabled,
    is_multithreading_enabled,
    is_torch_function_all_disabled,
    is_torch_function_enabled,
    is_view_replay_enabled,
    len_torch_dispatch_stack,
    len_torch_function_stack,
    pop_mode,
    pop_saved_tensors_default_hooks,
    pop_torch_function_stack,
    push_mode,
    push_on_torch_function_stack,
    push_saved_tensors_default_hooks,
    saved_tensors_hooks_disable,
    saved_tensors_hooks_enable,
    saved_tensors_hooks_get_disabled_error_message,
    set_fwd_grad_enabled,
    set_grad_enabled,
    set_multithreading_enabled,
    set_torch_function_state,
    set_view_replay_enabled,
    top_saved_tensors_default_hooks,
)
from pymoe.autograd.plain_state import autocast_devices

Result = TypeVar("Result")

_is_inference_mode = torch.is_inference_mode_enabled
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_cache_enabled = torch.is_autocast_cache_enabled
_is_autocast_enabled = torch.is_autocast_enabled
_get_autocast_dtype = torch.get_autocast_dtype
_cuda_is_initialized = torch.cuda.is_initialized


class ThreadState(NamedTuple):
    """The torch settings of a thread. A call behaves the same in equal states."""

    inference: bool
    grad: bool
    forward_grad: bool
    multithreading: bool
    view_replay: bool
    autocast_cache: bool
    autocast: tuple[bool, ...]  # one entry per type in autocast_devices(); empty if autocast is off for all
    autocast_dtypes: tuple[torch.dtype, ...]
    all_functions: bool  # __torch_function__ of tensor subclasses and modes is called
    no_function: bool  # not even __torch_function__ of modes is called
    function_modes: tuple[Any, ...]  # outermost first
    default_device: Any
    dispatch_modes: tuple[Any, ...]
    saved_tensor_hooks: tuple[Any, Any] | None  # the innermost hooks: torch calls only these
    hooks_forbidden: str | None
    cuda: tuple[int, tuple[Any, ...]] | None  # the current device, and each device's stream


def current() -> ThreadState:
    """Return the state of this thread. This function must be fast, as :func:`in_state` calls it for every call."""
    devices = autocast_devices()
    found = (
        _is_inference_mode(),
        _is_grad_enabled(),
        is_fwd_grad_enabled(),
        is_multithreading_enabled(),
        is_view_replay_enabled(),
        _is_autocast_cache_enabled(),
        tuple([_is_autocast_enabled(device) for device in devices]) if is_any_autocast_enabled() else (),
        tuple([_get_autocast_dtype(device) for device in devices]),
        is_torch_function_enabled(),
        is_torch_function_all_disabled(),
        tuple(get_current_function_mode_stack()) if len_torch_function_stack() else (),
        GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context"),
        tuple(get_current_dispatch_mode_stack()) if len_torch_dispatch_stack() else (),
        top_saved_tensors_default_hooks(True),
        saved_tensors_hooks_get_disabled_error_message(),
        _cuda() if _cuda_is_initialized() else None,
    )
    return tuple.__new__(ThreadState, found)


def _cuda() -> tuple[int, tuple[Any, ...]]:
    return torch.cuda.current_device(), tuple(map(torch.cuda.current_stream, range(torch.cuda.device_count())))


class _Known(threading.local):
    state: ThreadState | None = None


known = _Known()
"""``known.state`` is this thread's state while no other code can change it; None if the state must be read again."""


@contextmanager
def autocast_level(level: int, clears: bool = True) -> Iterator[None]:
    """Return a context manager that sets this thread's number of nested autocast blocks to ``level``, then restores it.

    Autocast caches the casts of parameters, in one cache per process. torch clears the cache when the outermost
    autocast block of a thread ends, so that no cast is used after its parameter has changed. Setting only autocast's
    flags does not enter a block: casts that are cached without a block stay until some other block ends.

    Args:
        level: the number of blocks; 0 for code outside of any block: the blocks that this code enters directly are
            then outermost ones.
        clears: clear the cache at the end; False if another thread stays in the block and will clear it.
    """
    before = _set_autocast_level(level)
    try:
        yield
    finally:
        _set_autocast_level(before)
        if clears and level > 0:
            torch.clear_autocast_cache()


def _set_autocast_level(level: int) -> int:
    """Set this thread's number of nested autocast blocks to ``level``, and return the previous number."""
    before = now = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    while now < level:
        now = torch.autocast_increment_nesting()
    while now > level:
        now = torch.autocast_decrement_nesting()
    return before


def in_state(state: ThreadState, function: Callable[..., Result], *args: Any, clears: bool = True) -> Result:
    """Return ``function(*args)``, run in ``state``; then restore this thread's state, even if the function changed it.

    If ``state`` and this thread's state have autocast on for different devices, the function runs in an autocast block
    of its own, or outside of any block if ``state`` has autocast off; for ``clears`` see :func:`autocast_level`.
    """
    canaries.thread_states()
    was_known = known.state
    before = was_known or current()
    known.state = None
    undo: list[Callable[[], object]] = []
    try:
        if before != state:
            change(before, state, undo)
            if before.autocast != state.autocast:
                with autocast_level(1 if state.autocast else 0, clears):
                    return function(*args)
        return function(*args)
    finally:
        # Undo in reverse order: the guard of inference mode was entered first, and its exit restores grad mode, too.
        while undo:
            undo.pop()()
        after = current()
        if after != before:
            change(after, before, [])
        known.state = was_known


def change(before: ThreadState, after: ThreadState, undo: list[Callable[[], object]]) -> None:
    """Change this thread's state from ``before`` to ``after``.

    Append to ``undo`` functions that undo what ``change(after, before)`` would not: the guard of inference mode, and
    hooks on saved tensors.
    """
    if before.inference != after.inference:
        guard = InferenceMode(after.inference)
        guard.__enter__()
        undo.append(functools.partial(guard.__exit__, None, None, None))
        before = current()
    if before.grad != after.grad:
        set_grad_enabled(after.grad)
    if before.forward_grad != after.forward_grad:
        set_fwd_grad_enabled(after.forward_grad)
    if before.multithreading != after.multithreading:
        set_multithreading_enabled(after.multithreading)
    if before.view_replay != after.view_replay:
        set_view_replay_enabled(after.view_replay)
    if before.autocast_cache != after.autocast_cache:
        torch.set_autocast_cache_enabled(after.autocast_cache)
    if before.autocast != after.autocast or before.autocast_dtypes != after.autocast_dtypes:
        devices = autocast_devices()
        for type_, enabled, dtype in zip(
            devices, after.autocast or (False,) * len(devices), after.autocast_dtypes, strict=True
        ):
            torch.set_autocast_enabled(type_, enabled)
            torch.set_autocast_dtype(type_, dtype)
    _change_modes(before, after)
    if before.hooks_forbidden != after.hooks_forbidden:
        saved_tensors_hooks_enable()
    if before.saved_tensor_hooks != after.saved_tensor_hooks:
        _change_hooks(after.saved_tensor_hooks, undo)
    if before.hooks_forbidden != after.hooks_forbidden and after.hooks_forbidden is not None:
        saved_tensors_hooks_disable(after.hooks_forbidden, False)
    if before.cuda != after.cuda and after.cuda is not None:
        for stream in after.cuda[1]:
            torch.cuda.set_stream(stream)  # set_stream changes the current device, too
        torch.cuda.set_device(after.cuda[0])


def _change_modes(before: ThreadState, after: ThreadState) -> None:
    if before.function_modes != after.function_modes:
        while len_torch_function_stack():
            pop_torch_function_stack()
        for mode in after.function_modes:
            push_on_torch_function_stack(mode)
    if (before.all_functions, before.no_function) != (after.all_functions, after.no_function):
        states = TorchFunctionState
        disabled = states.ALL_DISABLED if after.no_function else states.SUBCLASSES_DISABLED
        set_torch_function_state(states.ENABLED if after.all_functions else disabled)
    if before.default_device is not after.default_device:
        GLOBAL_DEVICE_CONTEXT.device_context = after.default_device
    if before.dispatch_modes != after.dispatch_modes:
        for mode in reversed(before.dispatch_modes):
            pop_mode(getattr(mode, "_mode_key", None))
        for mode in after.dispatch_modes:
            push_mode(mode)


def _change_hooks(hooks: tuple[Any, Any] | None, undo: list[Callable[[], object]]) -> None:
    """Push ``hooks`` on the stack of saved-tensor hooks, or remove all hooks from the stack if ``hooks`` is None.

    Append functions that undo this to ``undo``.
    """
    if hooks is not None:
        push_saved_tensors_default_hooks(*hooks)
        undo.append(pop_saved_tensors_default_hooks)
        return
    while (top := top_saved_tensors_default_hooks(True)) is not None:
        pop_saved_tensors_default_hooks()
        undo.append(functools.partial(push_saved_tensors_default_hooks, *top))
