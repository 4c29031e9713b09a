"""The autograd engine in the child of a fork.

torch replaces its autograd engine when the child first uses it, without a lock: if two threads use it first at the same
time, both destroy the old engine (torch 2.11 and 2.13), and the process crashes.

An engine with threads for devices cannot be replaced: torch refuses every backward pass of the child. The first
backward pass of a process starts one such thread for each device that torch sees. A build of torch for CUDA that sees
no GPU pretends to have one after ``torch.export`` or ``torch.compile`` has made tensors without values (2.11.0 and
2.15.0). A build for CPUs does not.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import torch

from pymoe import _native

_lock = threading.Lock()
_is_stale = os.getpid() != _native.PROCESS  # forks before this file was imported went unnoticed
_is_started = False


def renew_engine() -> None:
    """Make torch replace its autograd engine, if this is the child of a fork; call it before threads are started.

    If torch refuses backward passes, as in a child of a process that computed gradients on a machine with a GPU, this
    returns nevertheless: code without gradients works, and the first backward pass raises torch's error.
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
    """Have torch start its autograd engine, if it sees no GPU; call it before tensors without values are made."""
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
