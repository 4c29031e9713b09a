"""A pool of backward passes that says in which update each row's gradient is, and of which requests it applied rows.

Whoever saves an expert, and must know which requests the saved state holds, compares the number of a request's update
with that of the state. A request of several batches that failed has no such number, and some of its rows may have been
applied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pymoe.runtime.backend import ExpertBackend, mark
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.task_pool import TaskPool


def numbered_backward_pool(backend: ExpertBackend) -> tuple[TaskPool, set[int]]:
    """Return another pool of the backend's backward pass, of the same options, that excludes its forward pool; and the
    set of requests of which it has applied rows.

    A request has one tensor more, int64 of shape (rows,): its name, in every row the same number, which the set gets
    and whoever reads it takes out; or zeros for a request without a name.

    A result is that of ``backend.backward_pool`` and behind it an int64 tensor (rows,): the number of the update that
    holds, or with ``accumulate_steps`` will hold, the gradient of the row. A state with ``updates`` of that number or
    more has seen it. A batch that made no update, since its gradients were not finite and are skipped, has the number
    of the update before it. Of a subclass whose own ``backward`` counts no updates every batch is one. Where that
    raises, an update may have been made: the exception says that nothing may run again, unless ``may_retry`` knows
    better.
    """
    overridden = type(backend).backward is not ExpertBackend.backward
    counts_itself = not overridden or not backend.trains
    applied: set[int] = set()

    def backward(*tensors_and_names: Tensor) -> tuple[Tensor, ...]:
        *tensors, names = tensors_and_names
        with backend._lock:  # it is re-entrant: no other pass comes between the update and its number
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
