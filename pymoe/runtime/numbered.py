"""A pool for backward requests that also returns, for each row, the number of the update with the row's gradient.

A server saves an expert together with the list of requests whose updates the saved state includes. A request belongs in
the list if the number of its update is at most the state's number of updates. If a request of several batches fails, it
returns no number although some of its rows may have been applied; so the pool also records which requests were applied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pymoe.runtime.backend import ExpertBackend, mark
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.task_pool import TaskPool


def numbered_backward_pool(backend: ExpertBackend) -> tuple[TaskPool, set[int]]:
    """Return a second pool for the backward pass of ``backend``, and a set of the IDs of applied requests.

    The pool has the options of the backend's pools, and its batches never overlap with those of these pools. A request
    has one more tensor than in ``backend.backward_pool``, int64 of shape (rows,), with the request's ID in every row or
    0 if the request needs no ID. After every batch that did not raise, the pool adds the IDs of the batch's requests to
    the set. The caller removes them again.

    A result is the result of ``backend.backward_pool``, followed by an int64 tensor of shape (rows,): the number of the
    update that includes the gradient of the row, or that will include it once ``accumulate_steps`` batches have been
    accumulated. A state with at least this number of ``updates`` includes the gradient. If a batch makes no update
    because its gradients are not finite, the number is that of the previous update, or of the next one while other
    batches are accumulated.

    If a subclass of ExpertBackend that trains overrides ``backward`` without counting updates, each batch counts as one
    update. If the overriding method raises, an update may have been made: the exception is marked so that the batch
    does not run again, unless ``backend.may_retry`` allows it.
    """
    overridden = type(backend).backward is not ExpertBackend.backward
    counts_itself = not overridden or not backend.trains
    applied: set[int] = set()

    def backward(*tensors_and_names: Tensor) -> tuple[Tensor, ...]:
        *tensors, names = tensors_and_names
        with backend._lock:  # no other pass may update the expert before the number is read
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

    schema = (*backend._schema.inputs, *backend._schema.outputs, BatchTensorProto(dtype=torch.int64))
    name = f"{backend.name}_keyed_backward"
    options = backend._options_of_pools()
    return TaskPool(backward, name=name, schema=schema, exclusive_with=backend.forward_pool, **options), applied
