"""The autograd engine in the child of a fork.

torch replaces its autograd engine when the child first uses it, without a lock: if two threads use it first at the same
time, both destroy the old engine (torch 2.11 and 2.13), and the process crashes.
"""

from __future__ import annotations

import os
import threading

import torch

_lock = threading.Lock()
_is_stale = False


def renew_engine() -> None:
    """Make torch replace its autograd engine, if this is the child of a fork; call it before threads are started."""
    global _is_stale
    if not _is_stale:
        return
    with _lock:
        if _is_stale:
            with torch.inference_mode(False), torch.enable_grad():
                one = torch.ones((), device="cpu", requires_grad=True)
                torch.autograd.grad(one * one, one)
            _is_stale = False


def _forget() -> None:
    global _lock, _is_stale
    _lock, _is_stale = threading.Lock(), True


os.register_at_fork(after_in_child=_forget)
