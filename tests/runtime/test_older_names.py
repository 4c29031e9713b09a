"""Names and keywords of hivemind's classes are accepted where they make sense, and otherwise explained by errors."""

from __future__ import annotations

import threading

import pytest
import torch
from limits import LONG
from torch import nn

from pymoe.runtime import BatchTensorProto, ExpertBackend, TaskPool, TesseractRuntime, nested_map


def test_names_of_the_older_package() -> None:
    """Programs written for hivemind's classes met errors that did not name the replacements."""
    proto = BatchTensorProto((4, 5))
    assert proto == BatchTensorProto([4, 5]) == BatchTensorProto(torch.Size((4, 5))) == BatchTensorProto(4, 5)
    assert proto.shape == (4, 5)
    pool = TaskPool(lambda x: x, name="pool")
    assert pool.empty
    future = pool.submit_task(torch.ones(1, 1))
    assert not pool.empty
    runtime = TesseractRuntime(expert_backends=pool, prefetch_batches=64, sender_threads=1, device=None)
    assert runtime.expert_backends is pool
    assert repr(runtime) == "<Runtime of pool: not running, num_workers=1>"
    thread = threading.Thread(target=runtime.run)
    thread.start()
    assert runtime.ready.wait(LONG)
    assert future.result(LONG).item() == 1
    runtime.shutdown()
    thread.join(LONG)
    assert not thread.is_alive()
    assert not runtime.ready.is_set()
    for option, instead in (("pool_size", "capacity"), ("prefetch_batches", "workers"), ("start", "Runtime")):
        with pytest.raises(TypeError, match=f"'{option}'.*{instead}"):
            TaskPool(lambda x: x, name="pool", **{option: 1})
        with pytest.raises(TypeError, match=f"'{option}'.*{instead}"):
            ExpertBackend("expert", nn.Linear(1, 1), args_schema=[BatchTensorProto(1)], **{option: 1})
    with pytest.raises(TypeError, match="ExpertBackend"):
        TesseractRuntime([pool], device="cuda")
    with pytest.raises(TypeError, match=r"functools\.partial"):
        nested_map(len)
