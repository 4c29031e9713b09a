"""A module that represents a served expert in a model: its forward and backward passes are requests to the expert."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pymoe.autograd.graph_nodes import ANCHOR, once_only, version_of
from pymoe.runtime.awaiting import outcome
from pymoe.runtime.future import Future, wait
from pymoe.runtime.protocols import Backend, RequestPool, check_is_backend
from pymoe.runtime.schema import RequestSchema
from pymoe.runtime.timers import deadline_after, seconds_left

UNSERVED_WARNING_DELAY_S = 2.0
"""Seconds after which a client without a timeout warns that no runtime serves its pool."""

# Attributes that are not copied: a deep copy of a client uses the same backend, pools and schemas.
SHARED = {"_backend", "_forward_pool", "_backward_pool", "_schema"}


class ExpertClient(nn.Module):
    """Calls the expert of ``backend`` through its pools, as if it were a local module.

    ``client(*args, **kwargs)`` takes the arguments of the expert and returns its outputs. The call is a request to the
    backend's forward pool. In the backward pass, a request to the backward pool returns the gradients of the inputs
    and, if the backend trains, updates the expert. So the expert is trained by every model that contains a client of
    it. The update happens even if no input requires a gradient, but not if the call was made under
    ``torch.no_grad()``. ``torch.autograd.grad`` through a client also updates the expert. Second derivatives through a
    client raise an error. A client has no parameters: the optimizer of the model does not update the expert.

    Arguments that are constants in the schema must have the same value in every call. A copy of a client, as made by
    ``copy.deepcopy`` of a model, sends its requests to the same backend. Outputs may be views of the outputs of a whole
    batch: a view keeps the batch in memory, and saving it saves the batch; use ``clone()`` for outputs that are kept.

    Under autocast, floating-point inputs are cast to the dtypes in the schema.

    On a GPU, batches are assembled in the device's default stream, and results become ready there. So call a client
    under that stream (``torch.cuda.stream(torch.cuda.default_stream())``); autograd then runs its backward pass there,
    too, and orders it with the work of other streams. If a client is called under another stream, neither pass is
    ordered with the server's work. Then make the two streams wait for each other before and after the call, and before
    and after the call's autograd node, which requests the gradients in the backward pass.

    A call and its backward pass raise the errors below. (The constructor raises TypeError if ``backend`` is not a
    backend.)

    Args:
        backend: the backend that receives the requests.
        timeout: the maximum number of seconds for a request, in either pass; None: no limit, except the
            ``request_timeout`` of the pool.

    Raises:
        TypeError: the arguments do not have the structure of the schema, or a tensor is missing or has another dtype.
        ValueError: a tensor has another shape than in the schema, tensors have different numbers of rows, or a value
            differs from the constant in the schema.
        TimeoutError: the request was not done in time. It is cancelled; if it has begun, it runs to its end, and its
            result is dropped.
        RuntimeError: the pool is closed, because its runtime was shut down.
        Exception: any exception of the expert.

    Example:
        >>> expert = torch.nn.Linear(8, 8)
        >>> backend = pymoe.ExpertBackend("expert", expert, None, args_schema=[pymoe.BatchTensorProto(8)])
        >>> x = torch.randn(3, 8, requires_grad=True)
        >>> with pymoe.Runtime([backend]):
        ...     pymoe.runtime.ExpertClient(backend)(x).sum().backward()
        >>> torch.allclose(x.grad[0], expert.weight.sum(dim=0))
        True
    """

    def __init__(self, backend: Backend, *, timeout: float | None = None) -> None:
        super().__init__()
        check_is_backend("ExpertClient", backend)
        info = backend.get_info()
        self.name: str = info["name"]
        self.timeout = timeout
        self._schema = RequestSchema(self.name, info["forward_schema"], info["outputs_schema"])
        self._forward_pool, self._backward_pool = backend.get_pools()
        # The tuple hides the backend from nn.Module: a submodule's parameters would be among those of the client.
        self._backend = (backend,)
        self._warned = False

    @property
    def backend(self) -> Backend:
        """Return the backend that receives the requests."""
        return self._backend[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the expert's outputs for these arguments."""
        inputs = self._schema.flatten_arguments(args, kwargs)
        return self._attach(inputs, self._ask(self._forward_pool, _values(inputs)))

    def submit(self, *args: Any, **kwargs: Any) -> PendingCall:
        """Send the request and return a ``PendingCall``; its ``result()``, or ``await``, waits for the outputs.

        This blocks while the pool is full. Do not change the tensors before the call has its result.
        """
        call = PendingCall(self, self._schema.flatten_arguments(args, kwargs))
        call._future = self._forward_pool.submit_task(*_values(call._inputs), timeout=self.timeout)
        return call

    async def call_async(self, *args: Any, **kwargs: Any) -> Any:
        """Return the expert's outputs for these arguments, like a call of the client, without blocking the event loop.

        Cancelling the task that awaits this cancels the request. The backward pass blocks its thread, as for any call.
        """
        call = PendingCall(self, self._schema.flatten_arguments(args, kwargs))
        call._future = await self._forward_pool._queue(_values(call._inputs), self.timeout)
        return await call

    def _attach(self, inputs: list[Tensor], outputs: Any, versions: list[int] | None = None) -> Any:
        """Convert the flat ``outputs`` to the expert's result.

        In grad mode, the result becomes part of the autograd graph if the backend trains or an input requires a
        gradient. ``versions`` are the version counters of the inputs at the time when they were sent; None: do not
        check them.

        Raises:
            RuntimeError: an input was changed in place after it was sent, and the result is part of the graph.
        """
        outputs = tuple(outputs)
        if torch.is_grad_enabled() and (self.backend.trains or any([tensor.requires_grad for tensor in inputs])):
            if versions is not None and versions != [*map(version_of, inputs)]:
                raise RuntimeError(f"{self.name}: an input was changed in place while its request was pending")
            outputs = ServedCall.apply(ANCHOR, self._backward, outputs, *inputs)
        return self._schema.pack_outputs(outputs)

    def _backward(
        self, inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Request an update of the expert and the inputs' gradients; return these, or None for each not ``needed``."""
        rows, device = len(inputs[0]), inputs[0].device
        grads = [
            proto.make_empty(rows, device=device, requires_grad=False) if grad is None else grad.detach()
            for grad, proto in zip(grad_outputs, self._schema.outputs, strict=True)
        ]
        gradients: Sequence[Tensor] = self._ask(self._backward_pool, [*_values(inputs), *grads])
        return [grad if need else None for grad, need in zip(gradients, needed, strict=True)]

    def _ask(self, pool: RequestPool, tensors: Sequence[Any]) -> Any:
        deadline = deadline_after(self.timeout)
        return self._wait(pool, pool.submit_task(*tensors, timeout=self.timeout), deadline)

    def _wait(self, pool: RequestPool, future: Future, deadline: float | None) -> Any:
        try:
            if deadline is None and not (self._warned or pool.served):
                self._wait_for_a_runtime(pool, future)
            return future.result(seconds_left(deadline))
        except BaseException as error:
            future.cancel()  # nobody needs the result any more; a batch that has begun still runs to its end
            if isinstance(error, TimeoutError):
                self._explain(error, pool, future)
            raise

    def _wait_for_a_runtime(self, pool: RequestPool, future: Future) -> None:
        """Wait for a short time, then warn if the request is not done and no runtime serves the pool.

        This thread runs no batch meanwhile, because it waits with :func:`~pymoe.runtime.future.wait`.
        """
        wait([future], timeout=UNSERVED_WARNING_DELAY_S)
        if not (future.done() or pool.served):
            self._warned = True
            pool._idle_is_known()
            warnings.warn(
                f"{pool.name}: a client waits for an answer, but {pool.why_unserved}", RuntimeWarning, stacklevel=7
            )

    def _explain(self, error: TimeoutError, pool: RequestPool, future: Future) -> None:
        """Raise a TimeoutError with more details, unless the request has ended with ``error`` itself."""
        if not future.done() or future.cancelled():
            why = "" if pool.served else f"; {pool.why_unserved}"
            raise TimeoutError(f"{pool.name}: the request is not done within {self.timeout} s{why}") from error

    def __copy__(self) -> ExpertClient:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertClient:
        made = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            made.__dict__[name] = value if name in SHARED else copy.deepcopy(value, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"ExpertClient {self.name!r} cannot be pickled: it asks a backend of this process. "
            f"Save the state_dict of the model, and that of the backend."
        )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return an empty iterator, and warn that an optimizer of a client would train nothing.

        There is no warning for ``parameters()`` of a model that contains clients, nor with ``recurse=False``, which DDP
        uses for each module.
        """
        if recurse:
            warnings.warn(
                f"ExpertClient {self.name!r} has no parameters: the server updates the expert in every backward pass, "
                f"by the optimizer of ExpertBackend(name, expert, opt); an optimizer here is for the model's own "
                f"parameters",
                stacklevel=2,
            )
        return super().parameters(recurse)

    def extra_repr(self) -> str:
        return f"name={self.name!r}" + ("" if self.timeout is None else f", timeout={self.timeout}")


class PendingCall:
    """A call of a client that may not have been answered yet. Made by :meth:`ExpertClient.submit`."""

    _future: Future

    def __init__(self, client: ExpertClient, inputs: list[Tensor]) -> None:
        self._client = client
        self._inputs = inputs
        self._versions = [*map(version_of, inputs)]
        self._deadline = deadline_after(client.timeout)

    def result(self) -> Any:
        """Wait for the expert's outputs and return them, as a call of the client does, with the same errors.

        If the wait ends early, with the client's timeout or Ctrl-C, the request is cancelled.

        Raises:
            RuntimeError: an input was changed in place meanwhile, and the outputs would be part of an autograd graph.
        """
        outputs = self._client._wait(self._client._forward_pool, self._future, self._deadline)
        return self._client._attach(self._inputs, outputs, self._versions)

    def done(self) -> bool:
        """Return whether :meth:`result` would return without waiting."""
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel the request, or those of its batches that have not begun; return False if all have begun."""
        return self._future.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            outputs = yield from outcome(self._future, seconds_left(self._deadline))
        except TimeoutError as error:
            self._client._explain(error, self._client._forward_pool, self._future)
            raise
        return self._client._attach(self._inputs, outputs, self._versions)


Gradients = Callable[[Sequence[Tensor], Sequence[Tensor | None], Sequence[bool]], Sequence[Tensor | None]]
"""Function that takes inputs, output gradients and a mask of needed gradients, and returns input gradients."""


class ServedCall(torch.autograd.Function):
    """The autograd node of a call. Its forward returns aliases of ``outputs``, and its backward calls ``gradients``.

    ``anchor`` requires a gradient even if no input does, so that experts in a model's first layer are trained, too.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, gradients: Gradients, outputs: tuple[Any, ...], *inputs: Tensor
    ) -> tuple[Any, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.is_tensor = [isinstance(output, Tensor) for output in outputs]
        return detached(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        of_tensors = [grad for grad, is_tensor in zip(grad_outputs, ctx.is_tensor, strict=True) if is_tensor]
        with torch.no_grad():
            gradients = ctx.gradients(ctx.saved_tensors, of_tensors, ctx.needs_input_grad[3:])
        # Grad mode is on only with create_graph=True. Refuse second derivatives then, even if no incoming gradient
        # requires one, because the expert itself is not linear.
        return None, None, None, *(once_only("a served expert", gradients) if torch.is_grad_enabled() else gradients)


def detached(outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return aliases of ``outputs`` for a node's forward, so that the tensors in the request's result get no graph.

    An output that overlaps with an earlier one becomes a view of the earlier one. If one of the two is changed in place
    and the other is used afterwards, autograd raises an error instead of computing with old values. If the two differ
    in dtype, or only one of them is conjugated or negated, the later one is cloned.
    """
    made: list[Any] = []
    for place, output in enumerate(outputs):
        if not isinstance(output, Tensor):
            made.append(output)
            continue
        same = [one for one in made[:place] if isinstance(one, Tensor) and overlap(one, output)]
        if not same:
            made.append(output.detach())
        elif _reading(same[0]) == _reading(output):
            made.append(same[0].as_strided(output.shape, output.stride(), output.storage_offset()))
        else:
            made.append(output.detach().clone())
    return tuple(made)


def overlap(first: Tensor, second: Tensor) -> bool:
    """Return whether the two tensors share an element in memory, or True if that is hard to determine."""
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return False
    if not (first.numel() and second.numel()):
        return False
    one, other = _extent(first), _extent(second)
    if first.dtype == second.dtype and first.stride() == second.stride() and first.dim() >= 2:
        # Columns of one matrix, as from chunk(), are disjoint if their ranges within a row are.
        row = max(first.stride(0) * first.itemsize, 1)
        rows = _extent(first[:1]), _extent(second[:1])
        one, other = (range(part.start % row, part.start % row + len(part)) for part in rows)
        if max(one.stop, other.stop) > row:
            return True
    return one.start < other.stop and other.start < one.stop


def _reading(tensor: Tensor) -> tuple[torch.dtype, bool, bool]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _extent(tensor: Tensor) -> range:
    """Return the range of storage bytes from the first element of ``tensor``, which must not be empty, to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.itemsize
    return range(begin, begin + (last + 1) * tensor.itemsize)


def _values(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors, detached from their graphs."""
    return [tensor.detach() if isinstance(tensor, Tensor) and tensor.requires_grad else tensor for tensor in tensors]
