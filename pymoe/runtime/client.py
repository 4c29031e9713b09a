"""A module that stands for a served expert in a model: its forward and backward passes are requests."""

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

# Attributes that copies of a client share: the backend, its pools and its schemas.
SHARED = {"_backend", "_forward_pool", "_backward_pool", "_schema"}


class ExpertClient(nn.Module):
    """Calls the expert of ``backend`` through its pools, as if it were a local module.

    ``client(*args, **kwargs)`` takes and returns the same as the expert. The call is a request to the backend's forward
    pool. In the backward pass, a request to its backward pool returns the gradients of the inputs and updates the
    expert. The expert therefore trains with every model that contains it. The client has no parameters, so an optimizer
    of the model does not update the expert's. The update happens even if no input requires a gradient, but not under
    ``torch.no_grad()``. ``torch.autograd.grad`` through a client is such a backward pass and updates the expert too.
    There are no second derivatives through it.

    Arguments that the schema gives as constants (no tensors) must be the same in every call. A copy of a client
    (``copy.deepcopy`` of the model around it) sends its requests to the same backend. Outputs are views of their batch:
    keeping or saving one keeps or saves the rows of the whole batch, unless it is a ``clone()``.

    Under autocast, floating-point inputs are cast to the dtypes in the schema.

    On a GPU, batches are assembled in the device's default stream, and results become ready there: call a client under
    that stream (``torch.cuda.stream(torch.cuda.default_stream())``). Autograd then runs its backward pass there, too,
    and orders it with the work of other streams. If a client is called on another stream, neither pass is ordered with
    the server's work: the two streams must wait for each other around the call, and again around its node in the
    backward pass, where gradients are requested.

    A call and its backward pass raise the errors below.

    Args:
        backend: the backend whose pools are asked.
        timeout: the maximum number of seconds for a request, in either pass and however it is waited for; None: no
            limit.

    Raises:
        TypeError: arguments that the expert does not take, a missing tensor, or another dtype.
        ValueError: a tensor of another shape, tensors of different numbers of rows, or a value that differs from the
            schema's constant.
        TimeoutError: not answered in time. The request is cancelled; if it has begun, it runs on, and its result is
            dropped.
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
        # In a tuple, the backend does not become a submodule, whose parameters would be the client's.
        self._backend = (backend,)
        self._warned = False

    @property
    def backend(self) -> Backend:
        """Return the backend to whose pools requests are sent."""
        return self._backend[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the expert's outputs for these arguments."""
        inputs = self._schema.flatten_arguments(args, kwargs)
        return self._attach(inputs, self._ask(self._forward_pool, _values(inputs)))

    def submit(self, *args: Any, **kwargs: Any) -> PendingCall:
        """Send the request without waiting for the answer; get it with ``result()`` or ``await`` of the returned call.

        The tensors must not be changed before the call has its result.
        """
        call = PendingCall(self, self._schema.flatten_arguments(args, kwargs))
        call._future = self._forward_pool.submit_task(*_values(call._inputs), timeout=self.timeout)
        return call

    async def call_async(self, *args: Any, **kwargs: Any) -> Any:
        """Call the client from an event loop, without blocking it while the pool is full or the answer is pending.

        Cancelling the task that awaits this cancels the request. The backward pass waits in its own thread as always.
        """
        call = PendingCall(self, self._schema.flatten_arguments(args, kwargs))
        call._future = await self._forward_pool._queue(_values(call._inputs), self.timeout)
        return await call

    def _attach(self, inputs: list[Tensor], outputs: Any, versions: list[int] | None = None) -> Any:
        """Return the caller's result for the flat ``outputs``, as part of the autograd graph if grad mode is on.

        ``versions`` are the version counters that the inputs had when they were sent, to detect in-place changes since
        then; None for no check.

        Raises:
            RuntimeError: an input was changed in place, and a graph is needed.
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
        """Request gradients from the backward pool, which updates the expert; return None for those not ``needed``."""
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
            future.cancel()  # its result is no longer needed; cancelling has no effect if it has ended
            if isinstance(error, TimeoutError):
                self._explain(error, pool, future)
            raise

    def _wait_for_a_runtime(self, pool: RequestPool, future: Future) -> None:
        """Wait for a short time, then warn if the request is not done and no runtime serves the pool.

        (A thread that waits with a time limit never runs a batch itself.)
        """
        wait([future], timeout=UNSERVED_WARNING_DELAY_S)
        if not (future.done() or pool.served):
            self._warned = True
            pool._idle_is_known()
            warnings.warn(
                f"{pool.name}: a client waits for an answer, but {pool.why_unserved}", RuntimeWarning, stacklevel=7
            )

    def _explain(self, error: TimeoutError, pool: RequestPool, future: Future) -> None:
        """Raise a TimeoutError with more detail, unless ``error`` came from the expert."""
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
        """Return an iterator over no parameters, and warn: an optimizer of a client would train nothing.

        There is no warning for ``parameters()`` of a model that contains clients, nor with ``recurse=False``, as DDP
        calls it on each module.
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
        """Wait for the expert's outputs and return them, as part of an autograd graph if grad mode is on here.

        Everything that ends the wait early (the client's timeout, Ctrl-C) cancels the request.
        """
        outputs = self._client._wait(self._client._forward_pool, self._future, self._deadline)
        return self._client._attach(self._inputs, outputs, self._versions)

    def done(self) -> bool:
        """Return whether :meth:`result` would return without waiting."""
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel the request; return False if it has begun."""
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
    """The autograd node of a call: its outputs exist already, and its backward pass calls ``gradients``, which asks for
    the inputs' gradients.

    ``anchor`` requires a gradient even if no input does, so that experts in a model's first layer are trained too.
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
        # Under create_graph=True, even if no incoming gradient has a history: the expert itself is not linear.
        return None, None, None, *(once_only("a served expert", gradients) if torch.is_grad_enabled() else gradients)


def detached(outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return aliases of ``outputs`` for a node's forward: the request's result must not become part of the graph.

    An output that overlaps with an earlier one becomes a view of the earlier one. If one of the two is changed in place
    and the other is used afterwards, autograd raises an error instead of computing with old values. An output that
    cannot be a plain view (because it has another dtype, or is conjugated or negated) is cloned.
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
    """Return the range of bytes in the tensor's storage from its first to its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.itemsize
    return range(begin, begin + (last + 1) * tensor.itemsize)


def _values(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors without their graphs, which a pool does not use."""
    return [tensor.detach() if isinstance(tensor, Tensor) and tensor.requires_grad else tensor for tensor in tensors]
