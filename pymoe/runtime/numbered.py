"""A pool of backward passes that says which update contains the gradient of a row, and which requests were applied.

A program that saves an expert, and needs to determine which requests the saved state contains, compares the number of a
request's update with the state's number of updates. A request of several batches that failed has no such number, and
some of its rows may have been applied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe.runtime.backend import ExpertBackend, mark
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.task_pool import TaskPool


def numbered_backward_pool(backend: ExpertBackend) -> tuple[TaskPool, set[int]]:
    """Return another pool of the backend's backward pass, and the set of the IDs of requests that it has applied, at
    least in part.

    The pool has the same options and excludes the backend's forward pool. A request has an additional tensor, int64 of
    shape (rows,): an ID, the same in every row, or zeros for a request without one. The pool adds the ID to the set;
    the caller removes it.

    A result is the result of ``backend.backward_pool`` followed by an int64 tensor (rows,): the number of the update
    that contains, or with ``accumulate_steps`` will contain, the gradient of the row. A state whose ``updates`` is at
    least this number contains the gradient. A batch that made no update, because its gradients were not finite and were
    skipped, has the number of the update before it. If a subclass has its own ``backward``, which counts no updates,
    every batch counts as one. If such a ``backward`` raises, an update may have been made: the exception is marked so
    that nothing runs again, unless the backend's ``may_retry`` allows it.
    """
    overridden = type(backend).backward is not ExpertBackend.backward
    counts_itself = not overridden or not backend.trains
    applied: set[int] = set()

    def backward(*tensors_and_names: Tensor) -> tuple[Tensor, ...]:
        *tensors, names = tensors_and_names
        with backend._lock:  # re-entrant; held so that no other pass runs between an update and the read of its number
            before = backend.updates
            try:
                gradients = backend.backward(*tensors)
            except BaseException as error:
                if overridden and not backend.may_retry(error):
                    mark(error, may_retry=False)
                raise
            if not counts_itself and backend.updates == before:
                backend._rule.updates += 1
            number = backend._rule.last_update
        if names.any():
            applied.update(set(names.tolist()) - {0})
        return (*gradients, torch.full((len(tensors[0]),), number, dtype=torch.int64))

    options: dict[str, Any] = backend._pool_options
    schema = (*backend._schema.inputs, *backend._schema.outputs, BatchTensorProto(dtype=torch.int64))
    name = f"{backend.name}_keyed_backward"
    return TaskPool(backward, name=name, schema=schema, exclusive_with=backend.forward_pool, **options), applied
