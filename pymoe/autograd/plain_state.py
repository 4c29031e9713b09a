"""Runs batches with torch's default settings, so that they do not depend on the thread that runs them.

A client that waits for its request may itself run the batch that contains it, along with requests of other clients.
Settings of the client's thread must not affect the batch: inference mode, autocast, gradients on or off, a default
device, hooks on saved tensors, a function or dispatch mode, a transform of ``torch.func``, code compiled by
``torch.compile``. :func:`in_plain_state` runs a function without these settings. Moreover, a client whose thread has
such settings leaves its batch to the workers (``csrc/bindings/torch_calls.h`` says how the runtime detects them). A
batch has its own context (``contextvars``) and stack.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from pymoe import _runtime
from pymoe import _torch_canaries as canaries
from pymoe._torch_private import set_grad_enabled

Result = TypeVar("Result")

# Every batch calls these functions directly, because torch's context managers around them cost 2 us.
_is_grad_enabled = torch.is_grad_enabled
_is_plain = _runtime.thread_is_plain


def in_plain_state(grad: bool, function: Callable[..., Result], *args: Any) -> Result:
    """Return ``function(*args)``, run with grad mode ``grad`` and torch's defaults for the thread's other settings."""
    canaries.thread_states()
    if _is_plain():
        return _with_grad(grad, function, *args)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device_type in filter(torch.is_autocast_enabled, autocast_devices()):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if _is_plain():  # only inference mode or autocast was set
            return _with_grad(grad, function, *args)
    return on_a_new_thread(_with_grad, grad, function, *args)


def _with_grad(grad: bool, function: Callable[..., Result], *args: Any) -> Result:
    before = _is_grad_enabled()
    set_grad_enabled(grad)
    try:
        return function(*args)
    finally:
        set_grad_enabled(before)


@functools.cache
def autocast_devices() -> tuple[str, ...]:
    """Return the types of device that may have autocast on this machine."""
    accelerator = torch.accelerator.current_accelerator()
    return tuple(sorted({"cpu", "cuda", *([accelerator.type] if accelerator is not None else [])}))


def on_a_new_thread(function: Callable[..., Result], *args: Any) -> Result:
    """Return ``function(*args)``, run on a new thread, which has torch's default settings.

    A new thread is needed because torch has no public function that switches all modes of a thread off. The runtime
    treats the new thread as this one, so it detects deadlocks as usual. An interrupt (Ctrl-C) is raised after the
    function has ended.

    Raises:
        RuntimeError: no thread can be started.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    ended = threading.Event()
    identity = _runtime.identity_of_this_thread()

    def run() -> None:
        try:
            _runtime.adopt_identity(identity)
            results.append(function(*args))
        except BaseException as error:  # raised again below
            errors.append(error)
        finally:
            ended.set()

    interrupt: BaseException | None = None
    try:
        threading.Thread(target=run, name="pymoe batch in a plain state").start()
    except RuntimeError:  # no thread could be started
        raise
    except BaseException as error:
        interrupt = error
    while not ended.is_set():
        try:
            ended.wait()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    if errors:
        raise errors[0]
    return results[0]


_runtime.set_plain_runner(on_a_new_thread)
