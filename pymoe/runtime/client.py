"""A served expert inside somebody's model: its forward and backward passes are requests."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pymoe.runtime.backend import ExpertBackend
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.nested import nested_compare, nested_flatten
from pymoe.runtime.schema import tensor_protos
from pymoe.runtime.signature import Signature


class ExpertClient(nn.Module):
    """Calls the expert of ``backend`` through its pools, as if it were a module of one's own.

    ``client(*args, **kwargs)`` takes and returns what the expert does. The call is a request to the backend's forward
    pool; in the backward pass of what it is a part of, a request to its backward pool gets the gradients of the inputs
    and has the expert updated. So the expert trains with every model that it is a part of, and its parameters are
    none of the client's: the client has none, and a model's optimizer does not see them. A call needs no input that
    requires a gradient for that, and under ``torch.no_grad()`` nothing of the kind happens.

    Under autocast, floating-point inputs are cast to the dtypes that the schema asks for.

    Args:
        backend: whose pools to ask.
        timeout: seconds that a request, of either pass, may take; None: as long as it takes.

    Raises, from a call and from the backward pass:
        TypeError: arguments that the expert does not take, no tensor where one must be, or another dtype.
        ValueError: a tensor of another shape, or tensors of different numbers of rows.
        TimeoutError: not answered in time. The request is cancelled; one that has begun ends without its client.
        Exception: whatever the expert raised.
    """

    def __init__(self, backend: ExpertBackend, *, timeout: float | None = None) -> None:
        super().__init__()
        info = backend.get_info()
        self.name: str = info["name"]
        self.timeout = timeout
        self._structure = info["forward_schema"]
        args_schema, kwargs_schema = self._structure
        self._protos = nested_flatten(self._structure)
        self._input_protos = tensor_protos(self._structure)
        self._output_protos = tensor_protos(info["outputs_schema"])
        self._one_input = not kwargs_schema and len(args_schema) == 1 and isinstance(args_schema[0], BatchTensorProto)
        self._signature = Signature(self.name, args_schema, kwargs_schema, info["outputs_schema"])
        self._forward_pool, self._backward_pool = backend.get_pools()
        self._dummy = torch.empty(0, requires_grad=True, device="cpu")
        # No submodule: its parameters are the server's. A tuple is not looked into.
        self._backend = (backend,)

    @property
    def backend(self) -> ExpertBackend:
        """Whose pools are asked."""
        return self._backend[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The expert's outputs for these arguments."""
        inputs = self._flatten(args, kwargs)
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        future = self._forward_pool.submit_task(*_values(inputs), timeout=self.timeout)
        return self._attach(inputs, _wait(future, deadline))

    def submit(self, *args: Any, **kwargs: Any) -> PendingCall:
        """Send the request and do not wait for the answer: the call's ``result()`` or ``await`` gets it.

        Until then the tensors must not be changed.
        """
        inputs = self._flatten(args, kwargs)
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        future = self._forward_pool.submit_task(*_values(inputs), timeout=self.timeout)
        return PendingCall(self, inputs, future, deadline)

    async def call_async(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling the client, for event loops: waits neither for room in the pool nor for the answer.

        Cancelling the task that awaits this cancels the request. The backward pass waits in its own thread as always.
        """
        inputs = self._flatten(args, kwargs)
        versions = _versions(inputs)
        outputs = await self._forward_pool.submit_async(*_values(inputs), timeout=self.timeout)
        return self._attach(inputs, outputs, versions)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The flat inputs. What is wrong with a tensor the pool says."""
        if self._one_input and len(args) == 1 and not kwargs:
            flat = [args[0]]
        else:
            self._check_names(args, kwargs)
            if not nested_compare((args, kwargs), self._structure):
                raise TypeError(f"{self.name}: the arguments must be built like {self._structure!r}")
            leaves = nested_flatten((args, kwargs))
            pairs = zip(leaves, self._protos, strict=True)
            flat = [leaf for leaf, proto in pairs if isinstance(proto, BatchTensorProto)]
        if torch._C._is_any_autocast_enabled():  # in all of torch's public ways one names a device
            return [_cast(tensor, proto) for tensor, proto in zip(flat, self._input_protos, strict=True)]
        return flat

    def _check_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args_schema, kwargs_schema = self._structure
        if len(args) != len(args_schema):
            raise TypeError(f"{self.name} takes {len(args_schema)} positional arguments, got {len(args)}")
        if kwargs.keys() != kwargs_schema.keys():
            raise TypeError(f"{self.name} takes the keyword arguments {sorted(kwargs_schema)}, got {sorted(kwargs)}")

    def _attach(self, inputs: list[Tensor], outputs: Any, versions: list[int] | None = None) -> Any:
        """What the caller gets for the flat ``outputs``; part of its graph where it records one.

        ``versions`` are those of the inputs when they were sent, if that was not just now.
        """
        outputs = tuple(outputs)
        if torch.is_grad_enabled() and self._is_differentiated(inputs):
            if versions is not None and versions != _versions(inputs):
                raise RuntimeError(f"{self.name}: an input was changed in place while its request was on its way")
            outputs = _ServedCall.apply(self._dummy, self, outputs, *inputs)
        return self._signature.pack_outputs(outputs)

    def _is_differentiated(self, inputs: list[Tensor]) -> bool:
        return self.backend.trains or any([tensor.requires_grad for tensor in inputs])

    def _backward(self, inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Gradients of the flat inputs, from the backward pool."""
        rows, device = len(inputs[0]), inputs[0].device
        grads = [
            proto.make_empty(rows, device=device, requires_grad=False) if grad is None else grad.detach()
            for grad, proto in zip(grad_outputs, self._output_protos, strict=True)
        ]
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        future = self._backward_pool.submit_task(*_values(inputs), *grads, timeout=self.timeout)
        return _wait(future, deadline)

    def extra_repr(self) -> str:
        return f"name={self.name!r}" + ("" if self.timeout is None else f", timeout={self.timeout}")


class PendingCall:
    """A call of a client that may not have been answered yet. Made by :meth:`ExpertClient.submit`."""

    def __init__(self, client: ExpertClient, inputs: list[Tensor], future: Any, deadline: float | None) -> None:
        self._client = client
        self._inputs = inputs
        self._versions = _versions(inputs)
        self._future = future
        self._deadline = deadline

    def result(self) -> Any:
        """Wait for the expert's outputs. Whether they are part of a graph is decided here, and by ``no_grad`` here.

        Whatever ends the wait early (the client's timeout, Ctrl-C) cancels the request.
        """
        return self._client._attach(self._inputs, _wait(self._future, self._deadline), self._versions)

    def done(self) -> bool:
        """Whether :meth:`result` would not wait."""
        return bool(self._future.done())

    def cancel(self) -> bool:
        """Take the request back; False if it has begun."""
        return bool(self._future.cancel())

    def __await__(self) -> Generator[Any, None, Any]:
        outputs = yield from self._future.__await__()
        return self._client._attach(self._inputs, outputs, self._versions)


class _ServedCall(torch.autograd.Function):
    """The graph's node for a call: its outputs are there already, its backward pass is a request.

    ``dummy`` requires a gradient where no input does, so that the expert is trained by a model's first layer too.
    """

    @staticmethod
    def forward(
        ctx: Any, dummy: Tensor, client: ExpertClient, outputs: tuple[Any, ...], *inputs: Tensor
    ) -> tuple[Any, ...]:
        ctx.client = client
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.is_tensor = [isinstance(output, Tensor) for output in outputs]
        # Detached: what is returned here becomes part of the graph, and the request's result must not.
        return tuple([output.detach() if isinstance(output, Tensor) else output for output in outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        of_tensors = [grad for grad, is_tensor in zip(grad_outputs, ctx.is_tensor, strict=True) if is_tensor]
        gradients = ctx.client._backward(inputs, of_tensors)
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *(grad if need else None for grad, need in zip(gradients, needed, strict=True))


def _wait(future: Any, deadline: float | None) -> Any:
    try:
        return future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except BaseException:
        future.cancel()  # nobody waits for it any more; does nothing to one that has ended
        raise


def _values(tensors: Sequence[Any]) -> list[Any]:
    """Without their graphs, of which a pool knows nothing."""
    return [tensor.detach() if isinstance(tensor, Tensor) and tensor.requires_grad else tensor for tensor in tensors]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was changed in place; tensors of inference mode do not count, and cannot be differentiated."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _cast(tensor: Any, proto: BatchTensorProto) -> Any:
    """What autocast does to the arguments of an operation that has a dtype of its own."""
    if not (isinstance(tensor, Tensor) and tensor.is_floating_point() and proto.dtype.is_floating_point):
        return tensor
    return tensor.to(proto.dtype) if torch.is_autocast_enabled(tensor.device.type) else tensor
