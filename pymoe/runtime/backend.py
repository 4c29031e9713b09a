"""An expert that is served: batches of requests for its outputs and its gradients, and an update a batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.differentiate import as_leaf, clear_gradients, differentiate, warm_up_autograd
from pymoe.runtime.gradients import GradientRule
from pymoe.runtime.interrupts import uninterrupted
from pymoe.runtime.placement import Placement
from pymoe.runtime.schema import infer_outputs_schema, keep_buffers, tensor_protos, to_schema
from pymoe.runtime.signature import Signature
from pymoe.runtime.task_pool import TaskPool
from pymoe.runtime.thread_state import in_plain_state

_MAY_RETRY = "pymoe_may_retry"  # set on exceptions of the backward pass; pools that isolate look at it too


class ExpertBackend(nn.Module):
    """A module with two pools of requests: one asks for its outputs, the other for gradients of its inputs.

    The **forward pass** runs the expert without gradients. The **backward pass** keeps nothing of an earlier forward
    pass: it runs the expert again on the inputs that come with the request, returns gradients for every input, and
    updates the expert once for the whole batch. A :class:`~pymoe.runtime.Runtime` runs both; they can be called
    directly as well, from any thread: passes and updates of one expert never overlap.

    Args:
        name: what the pools (``NAME_forward``, ``NAME_backward``), statistics and errors call it.
        expert: the module. Its first argument's first dimension, and that of every other tensor that it takes or
            returns, is the batch.
        opt: the optimizer of its parameters. None: the expert is never updated, and its parameters get no gradients.
        args_schema: a nested structure of :class:`BatchTensorProto` for each positional argument; a tensor stands for
            its prototype, and any other leaf is handed to the expert as it is.
        kwargs_schema: the same for keyword arguments. One of the two must name a tensor.
        outputs_schema: the same for what the expert returns; None finds out with one call that leaves no trace (see
            :func:`pymoe.runtime.schema.infer_outputs_schema`).
        gradient_reduction: ``"sum"``: an update follows the sum over all rows of all requests in the batch, as in one
            backward pass over all of them. ``"mean"``: that divided by the number of rows, so that the length of a
            step does not depend on how many requests happened to meet. Gradients of inputs are never scaled.
        accumulate_steps: how many batches' gradients make one update.
        clip_grad_norm: the longest 2-norm of all parameters' gradients together, after the reduction.
        nonfinite_gradients: NaN or infinity in a parameter's gradient would reach every row of every later request
            through the update. ``"raise"`` fails the batch with :class:`NonFiniteGradientError` (with ``isolate=True``
            the bad request alone); ``"skip"`` leaves out the update, every request gets its gradients and the log a
            warning, as loss scaling needs it; ``"step"`` does not look.
        scheduler: its ``step()`` is called after every update (a learning rate scheduler of torch).
        device: where the expert is to be; None leaves it where it is. Inputs that are elsewhere are moved there
            (without waiting, from page-locked memory), and what is returned goes to where the first input was.
        buffers: which passes may change buffers of an expert in training mode. ``"backward"``: an input that is
            trained on counts once in the statistics of batch normalisation, one that is only asked for not at all.
            ``"both"``: whatever runs counts, what is trained on twice.
        pool_options: for both pools, see :class:`~pymoe.runtime.TaskPool`: ``max_batch_size=1024, isolate=True``...

    An expert that draws random numbers (dropout) draws others in the backward pass than in the forward pass.

    Attributes:
        forward_pool: requests are the flat inputs; results are the flat outputs.
        backward_pool: requests are the flat inputs followed by a gradient for each tensor among the flat outputs, of
            its shape and dtype (for integer outputs: zeros); results are gradients for the flat inputs.

    *Flat* is the order of :func:`~pymoe.runtime.nested_flatten` on ``(args, kwargs)``: positional arguments, then
    keyword arguments by name.

    Raises:
        ValueError: no tensor in the schemas, or an option that is none.
        TypeError: ``expert`` is no module, ``opt`` no optimizer, or a pool option that does not exist.
    """

    def __init__(
        self,
        name: str,
        expert: nn.Module,
        opt: Optimizer | None = None,
        *,
        args_schema: Sequence[Any] | None = None,
        kwargs_schema: Mapping[str, Any] | None = None,
        outputs_schema: Any = None,
        gradient_reduction: str = "sum",
        accumulate_steps: int = 1,
        clip_grad_norm: float | None = None,
        nonfinite_gradients: str = "raise",
        scheduler: Any = None,
        device: torch.device | str | None = None,
        buffers: str = "backward",
        **pool_options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(expert, nn.Module):
            raise TypeError(f"ExpertBackend: expert must be an nn.Module, got {type(expert).__name__}")
        if opt is not None and not callable(getattr(opt, "step", None)):
            raise TypeError(f"ExpertBackend: opt must be an optimizer or None, got {type(opt).__name__}")
        if buffers not in ("backward", "both"):
            raise ValueError(f"buffers must be one of 'backward', 'both', got {buffers!r}")
        self.name = name
        self.expert = expert if device is None else expert.to(device)
        self.training = expert.training
        self.opt = opt
        self.scheduler = scheduler
        self._rule = GradientRule(gradient_reduction, accumulate_steps, clip_grad_norm, nonfinite_gradients)
        self._buffers_change_in_forward = buffers == "both"
        self._lock = threading.RLock()

        self.args_schema: tuple[Any, ...] = to_schema(_as_tuple(args_schema))
        self.kwargs_schema: dict[str, Any] = to_schema(dict(kwargs_schema or {}))
        self.forward_schema = (self.args_schema, self.kwargs_schema)
        if not tensor_protos(self.forward_schema):
            raise ValueError(
                f"ExpertBackend {name!r}: args_schema or kwargs_schema must describe at least one tensor, e.g. "
                f"args_schema=(BatchTensorProto(64),) for an expert that takes a tensor of shape (rows, 64)"
            )
        self._placement = Placement(self.expert)
        if outputs_schema is None:
            outputs_schema = infer_outputs_schema(
                self.expert, self.args_schema, self.kwargs_schema, device=self._placement.device
            )
            self._placement = Placement(self.expert)  # a lazy expert has its parameters only now
        self.outputs_schema = to_schema(outputs_schema)
        self._signature = Signature(name, self.args_schema, self.kwargs_schema, self.outputs_schema)

        inputs = _anywhere(tensor_protos(self.forward_schema))
        outputs = _anywhere(tensor_protos(self.outputs_schema))
        device = self._placement.device
        pool_options.setdefault("pin_memory", device is not None and device.type == "cuda")
        self.forward_pool = TaskPool(self.forward, name=f"{name}_forward", schema=inputs, **pool_options)
        self.backward_pool = TaskPool(
            self.backward,
            name=f"{name}_backward",
            schema=inputs + outputs,
            exclusive_with=self.forward_pool,
            **pool_options,
        )
        if self.trains:
            warm_up_autograd()

    # --- what clients need to know ---

    def get_info(self) -> dict[str, Any]:
        """The name, the schemas and the names of keyword arguments: what a client must know; it can be pickled."""
        return {
            "name": self.name,
            "forward_schema": self.forward_schema,
            "outputs_schema": self.outputs_schema,
            "keyword_names": tuple(self.kwargs_schema),
        }

    def get_pools(self) -> tuple[TaskPool, TaskPool]:
        """The pool of the forward pass and that of the backward pass."""
        return self.forward_pool, self.backward_pool

    @property
    def trains(self) -> bool:
        """Whether backward passes update the expert."""
        return self.opt is not None or type(self).apply_gradients is not ExpertBackend.apply_gradients

    @property
    def updates(self) -> int:
        """How many times the expert was updated, in earlier lives (:meth:`load_state_dict`) too."""
        return self._rule.updates

    # --- the passes ---

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        """The flat outputs of the expert for the flat ``inputs``, computed without gradients.

        No rows are no work: the outputs have none either, and the expert is not called.

        Raises:
            ValueError: a wrong number of inputs, or outputs that are not what the schema says.
            Exception: whatever the expert raises.
        """
        self._signature.check_count("forward", inputs, self._signature.num_inputs)
        if not inputs[0].shape[0]:
            return self._signature.empty_outputs(inputs[0].device)
        return in_plain_state(False, self._forward, inputs)

    def backward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Gradients for the flat inputs; updates the expert.

        The expert is called again on the inputs, and what it returns is differentiated. Parameters' gradients of this
        batch, and of no other unless they are to accumulate, make the update; whatever happens, none is left behind.

        Args:
            inputs: the flat inputs, then a gradient for each tensor among the flat outputs, of its shape. Those for
                integer outputs are not looked at.

        Returns:
            for each input a tensor of its shape and dtype on its device: the gradient, or zeros for an input that has
            no influence, or none that can be differentiated (integers). Zeros and not None, because the rows of a
            batch's result go to many requests, and None has no rows.

        Raises:
            ValueError: a wrong number of tensors, or outputs that are not what the schema says.
            NonFiniteGradientError: see ``nonfinite_gradients``.
            Exception: whatever the expert, the optimizer or the scheduler raises.
        """
        signature = self._signature
        self._signature.check_count("backward", inputs, signature.num_inputs + signature.num_output_tensors)
        if not inputs[0].shape[0]:
            return tuple(torch.zeros_like(tensor) for tensor in inputs[: signature.num_inputs])
        with uninterrupted():
            return in_plain_state(True, self._backward, inputs)

    def apply_gradients(self) -> None:
        """Update the expert: one step of the optimizer, then one of the scheduler. Meant to be overridden.

        Called once a batch (every ``accumulate_steps`` batches) by the backward pass, alone: no other pass runs. The
        gradients are in ``.grad`` of the parameters, reduced, checked and clipped as asked, and are cleared afterwards.
        """
        if self.opt is not None:
            self.opt.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def may_retry(self, exception: BaseException) -> bool:
        """Whether a backward pass that raised ``exception`` changed nothing, so that its requests may run once more."""
        return isinstance(exception, Exception) and getattr(exception, _MAY_RETRY, False) is True

    def _forward(self, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        with self._lock:
            if self._placement.is_home_of(inputs):
                return self._run_forward(inputs)
            with self._placement.visit(inputs) as visit:
                return visit.take_back(self._run_forward(visit.tensors))

    def _run_forward(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        args, kwargs = self._signature.pack_inputs(inputs)
        expert = self._modules["expert"]  # an attribute of a module that is a module takes 1 us to find
        assert expert is not None
        if self._buffers_change_in_forward or not self._placement.has_buffers or not expert.training:
            return self._signature.flatten_outputs(expert(*args, **kwargs))
        with keep_buffers(expert):
            return self._signature.flatten_outputs(expert(*args, **kwargs))

    def _backward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with self._lock:
            if self._placement.is_home_of(inputs):
                return self._run_backward(inputs)
            with self._placement.visit(inputs) as visit:
                return visit.take_back(self._run_backward(visit.tensors))

    def _run_backward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        trains = self.trains
        parameters = self._parameters_with_gradients() if trains else ()
        num_inputs = self._signature.num_inputs
        changing = False
        try:
            clear_gradients(parameters)  # of whatever else the module is used for
            with self._undo_buffers_after_errors():
                leaves = [as_leaf(tensor) for tensor in tensors[:num_inputs]]
                args, kwargs = self._signature.pack_inputs(leaves)
                outputs = self._signature.flatten_outputs(self.expert(*args, **kwargs))
                gradients = differentiate(self._signature.tensors(outputs), tensors[num_inputs:], leaves, trains)
                if trains and self._rule.prepare(parameters, len(leaves[0])):
                    changing = True
                    self.apply_gradients()
                    self._rule.updates += 1
            return gradients
        except BaseException as error:
            _mark(error, may_retry=not changing)
            raise
        finally:
            clear_gradients(parameters)

    def _undo_buffers_after_errors(self) -> AbstractContextManager[None]:
        """Nothing to undo where there are no buffers, or none that is expected to change."""
        if self._placement.has_buffers and self.expert.training:
            return keep_buffers(self.expert, only_after_errors=True)
        return nullcontext()

    def _parameters_with_gradients(self) -> list[nn.Parameter]:
        """Whatever may hold a gradient: parameters of the expert and those that the optimizer knows."""
        found = dict.fromkeys(self._placement.parameters)
        for group in getattr(self.opt, "param_groups", ()):
            found.update(dict.fromkeys(group["params"]))
        return list(found)

    # --- the module ---

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of expert, optimizer and scheduler, as it is between two updates.

        Unless ``keep_vars`` is set, tensors are copies: later updates do not change them. Gradients that wait for
        further batches (``accumulate_steps``) are not part of it.
        """
        keep_vars = kwargs.get("keep_vars", args[2] if len(args) > 2 else False)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        with self._lock:
            state = super().state_dict(*args, **kwargs)
            if not keep_vars:
                for key, value in state.items():
                    if key.startswith(prefix) and isinstance(value, Tensor):
                        state[key] = value.clone()
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Take over what :meth:`state_dict` gave, between two updates. Accumulated gradients are dropped.

        The states of optimizer and scheduler are taken over where both sides have one: a backend without an optimizer
        loads the state of one that trains, and the other way round.
        """
        with self._lock:
            result = super().load_state_dict(*args, **kwargs)
            self._placement = Placement(self.expert)
        return result

    def get_extra_state(self) -> dict[str, Any]:
        """What is no parameter or buffer: the states of optimizer and scheduler, and the number of updates."""
        with self._lock:
            states = {name: one.state_dict() for name, one in self._stateful()}
            return {"updates": self._rule.updates, **copy.deepcopy(states)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`get_extra_state` gave."""
        with self._lock:
            self._rule.forget()
            for name, one in self._stateful():
                if name in state:
                    one.load_state_dict(state[name])
            self._rule.updates = state["updates"]

    def _stateful(self) -> list[tuple[str, Any]]:
        pairs: list[tuple[str, Any]] = [("opt", self.opt), ("scheduler", self.scheduler)]
        return [(name, one) for name, one in pairs if hasattr(one, "state_dict")]

    def train(self, mode: bool = True) -> ExpertBackend:
        """Set the expert's mode, between two batches."""
        with self._lock:
            return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertBackend:
        with self._lock:
            super()._apply(fn, recurse)
            self._placement = Placement(self.expert)
            if isinstance(self.opt, Optimizer) and self.opt.state:
                self.opt.load_state_dict(self.opt.state_dict())  # which moves its tensors to where parameters are now
        return self

    def extra_repr(self) -> str:
        return f"name={self.name!r}"


def _as_tuple(args_schema: Sequence[Any] | None) -> tuple[Any, ...]:
    """A lone prototype stands for one argument."""
    return (args_schema,) if isinstance(args_schema, (BatchTensorProto, Tensor)) else tuple(args_schema or ())


def _anywhere(protos: tuple[BatchTensorProto, ...]) -> tuple[BatchTensorProto, ...]:
    """What requests must look like: where their tensors are is up to the client."""
    return tuple(proto.replace(device=None) for proto in protos)


def _mark(error: BaseException, *, may_retry: bool) -> None:
    with suppress(AttributeError):  # an exception that takes no attributes
        setattr(error, _MAY_RETRY, may_retry)
