"""Keeps torch's autograd engine usable in the child of a fork.

torch replaces its autograd engine when the child first uses it, without a lock: if two threads use it first at the same
time, both destroy the old engine (torch 2.11 and 2.13), and the process crashes. So :func:`renew_engine` uses the
engine once before the child starts threads.

An engine that has threads for devices cannot be replaced, so torch refuses every backward pass in the child. The first
backward pass of a process starts one such thread for each device that torch reports. A build of torch for CUDA on a
machine without a GPU reports one device, wrongly, after ``torch.export`` or ``torch.compile`` has made fake tensors
(2.11.0 and 2.15.0; a build for CPUs does not). So :func:`start_engine` runs a backward pass before then.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import torch

from pymoe import _native

_lock = threading.Lock()
_is_stale = os.getpid() != _native.PROCESS  # true in the child of a fork, until its engine is renewed
_is_started = False


def renew_engine() -> None:
    """Make torch replace its autograd engine, if this is the child of a fork. Call this before threads are started.

    If torch refuses backward passes, as in a child of a process that computed gradients on a machine with a GPU, this
    function raises nothing: code without gradients works, and the child's first backward pass raises torch's error.
    """
    global _is_stale
    if not _is_stale:
        return
    with _lock:
        if _is_stale:
            with suppress(RuntimeError):
                _use_engine()
            _is_stale = False


def start_engine() -> None:
    """Make torch start its autograd engine, if there is no GPU. Call this before fake tensors are made."""
    global _is_started
    renew_engine()
    if not _is_started and not torch.cuda.is_available():
        _use_engine()
        _is_started = True


def _use_engine() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        one = torch.ones((), device="cpu", requires_grad=True)
        torch.autograd.grad(one * one, one)


def _forget() -> None:
    global _lock, _is_stale
    _lock, _is_stale = threading.Lock(), True


os.register_at_fork(after_in_child=_forget)
