"""A served expert: it computes outputs and gradients for batches of requests, and makes one update per batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pymoe._common.names import keywords_of, no_such_argument
from pymoe._errors import add_note
from pymoe.autograd.plain_state import in_plain_state
from pymoe.runtime.differentiate import as_leaf, clear_gradients, lend, run_backward_pass, warm_up_autograd, zero_grad
from pymoe.runtime.dry_run import infer_outputs_schema, keep_buffers
from pymoe.runtime.expert_device import ExpertDevice
from pymoe.runtime.gradients import GradientRule, check_one_of
from pymoe.runtime.interrupts import uninterrupted
from pymoe.runtime.parameters import check_steps, check_updates, lock_of, optimized
from pymoe.runtime.schema import RequestSchema, as_arguments, tensor_protos, to_schema
from pymoe.runtime.task_pool import REPLACED, TaskPool

if TYPE_CHECKING:
    from typing_extensions import Self

OTHER_NAMES = {
    "optimizer": "opt",
    "module": "expert",
    "model": "expert",
    "lr_scheduler": "scheduler",
    "clip_grad": "clip_grad_norm",
    "max_grad_norm": "clip_grad_norm",
    "grad_accumulation_steps": "accumulate_steps",
}
"""Names that arguments have in hivemind and in trainers, each with the argument's name here."""
_POOLS = ("forward_pool", "backward_pool")
_MAY_RETRY = "pymoe_may_retry"  # attribute of exceptions of the backward pass; pools with ``isolate`` also read it


class ExpertBackend(nn.Module):
    """A module with two pools for requests: one computes outputs, the other computes gradients of inputs and trains.

    The **forward pass** runs the expert without gradients, and keeps nothing for the backward pass. The **backward
    pass** runs the expert again on the inputs in the request, returns gradients of every input, and updates the expert
    once for the whole batch. A :class:`~pymoe.runtime.Runtime` runs both passes; they can also be called directly, from
    any thread. Passes and updates of one expert never overlap, nor do those of experts that share parameters, directly
    or through an optimizer, unless one waits for the other. A backend can be copied and pickled: a copy has its own
    pools.

    Args:
        name: name of the backend in the pools (``NAME_forward``, ``NAME_backward``), statistics and errors.
        expert: the module. The first dimension of its first argument, and of every other tensor that it takes or
            returns, is the batch.
        opt: the optimizer of the expert's parameters. None: the expert is never updated, and its parameters get no
            gradients, unless a subclass overrides :meth:`apply_gradients`.
        args_schema: for each positional argument, a nested structure of :class:`BatchTensorProto`. A tensor is replaced
            by its prototype. Any other leaf is a constant, which is passed to the expert unchanged.
        kwargs_schema: the same for keyword arguments. One of the two must contain a prototype.
        outputs_schema: the same for the expert's results. None: it is determined by a trial call (see
            :func:`pymoe.runtime.dry_run.infer_outputs_schema`).
        gradient_reduction: ``"sum"``: an update uses the sum over all rows of all requests in the batch, as in one
            backward pass over all of them. ``"mean"``: this sum is divided by the number of rows, so that the length of
            a step does not depend on the number of requests in a batch. Gradients of inputs are never scaled.
        accumulate_steps: the number of batches whose gradients make one update.
        clip_grad_norm: the maximum 2-norm of the gradients of all parameters together, after the reduction; larger
            gradients are scaled down to it.
        nonfinite_gradients: what to do if a parameter's gradient (or their norm, with ``clip_grad_norm``) contains NaN
            or infinity, which the update would pass on to all later requests. ``"raise"``: the batch fails with
            :class:`NonFiniteGradientError` (with ``isolate=True`` only the bad request, unless the norm of accumulated
            gradients is not finite: then those of all ``accumulate_steps`` batches are dropped). ``"skip"``: there is
            no update and a warning is logged, but every request receives its gradients, as loss scaling requires.
            ``"step"``: gradients are not checked.
        scheduler: a learning-rate scheduler of torch, or another object whose ``step()`` is called after every update.
        device: the device of the expert; None leaves it on its current one. Inputs on another device are moved there
            (asynchronously from page-locked memory), and results go to the device of the first input.
        buffers: the passes that may change buffers of an expert in training mode. ``"backward"``: the statistics of
            batch normalisation count an input once, in its backward pass; without a backward pass, it does not count.
            ``"both"``: every pass counts, so an input with a backward pass counts twice.
        pool_options: options of both pools, such as ``max_batch_size=1024, isolate=True``; see
            :class:`~pymoe.runtime.TaskPool`. With ``isolate=True``, a backward batch that failed before it changed
            anything is run again in halves, and so may make several updates. A backward request of more than
            ``max_batch_size`` rows also makes several updates, and may fail after some of them.

    A backward batch that trains sets ``.grad`` of the parameters to None, even if other code has put gradients there. A
    backend can be moved to another device, but not converted to another dtype, because clients use its schemas: convert
    the expert first.

    An expert that draws random numbers (dropout) draws different ones in the backward pass and the forward pass.

    Attributes:
        forward_pool: requests are the flat inputs; results are the flat outputs.
        backward_pool: requests are the flat inputs, followed by a gradient of each tensor among the flat outputs, in
            its shape and dtype (for integer outputs: zeros). Results are gradients of the flat inputs.

    *Flat* inputs are in the order of :func:`~pymoe.runtime.nested_flatten` on ``(args, kwargs)``: positional arguments,
    then keyword arguments sorted by name.

    Raises:
        ValueError: the schemas of the arguments contain no prototype, an option has an invalid value, or ``opt``
            updates none of the parameters.
        TypeError: ``expert`` is not a module, ``opt`` or ``scheduler`` has no ``step()``, or a pool option does not
            exist; or this ``step()`` needs arguments, and :meth:`apply_gradients` is not overridden.
        Exception: any exception of the expert in the trial call for ``outputs_schema``.

    Example:
        >>> expert = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(expert.parameters(), lr=0.1)
        >>> backend = pymoe.ExpertBackend("expert", expert, optimizer, args_schema=[pymoe.BatchTensorProto(8)])
        >>> with pymoe.Runtime([backend]):
        ...     (output,) = backend.forward_pool.submit_task(torch.ones(2, 8)).result()
        >>> torch.equal(output, expert(torch.ones(2, 8)))
        True
    """

    # true while apply_gradients() is called by _run_backward(), which clears the gradients itself
    _clears_itself = False

    def __init__(
        self,
        name: str,
        expert: nn.Module,
        opt: Optimizer | None = None,
        *,
        args_schema: Sequence[Any] | None = None,
        kwargs_schema: Mapping[str, Any] | None = None,
        outputs_schema: Any = None,
        gradient_reduction: Literal["sum", "mean"] = "sum",
        accumulate_steps: int = 1,
        clip_grad_norm: float | None = None,
        nonfinite_gradients: Literal["raise", "skip", "step"] = "raise",
        scheduler: Any = None,
        device: torch.device | str | None = None,
        buffers: Literal["backward", "both"] = "backward",
        **pool_options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(expert, nn.Module):
            raise TypeError(f"ExpertBackend: expert must be an nn.Module, got {type(expert).__name__}")
        of_pools = keywords_of(TaskPool) if pool_options else ()
        for option in pool_options:
            if option not in of_pools:
                known = (*keywords_of(ExpertBackend), *of_pools)
                raise no_such_argument("ExpertBackend", option, known, OTHER_NAMES | REPLACED)
        check_steps(opt, scheduler, alone=not self._updates_itself())
        check_one_of("buffers", buffers, ("backward", "both"))
        self.name = name
        self.expert = expert if device is None else expert.to(device)
        self.training = expert.training
        self.opt = opt
        self.scheduler = scheduler
        self._rule = GradientRule(gradient_reduction, accumulate_steps, clip_grad_norm, nonfinite_gradients)
        self._buffers_change_in_forward = buffers == "both"

        self.args_schema: tuple[Any, ...] = to_schema(as_arguments(args_schema))
        self.kwargs_schema: dict[str, Any] = to_schema(dict(kwargs_schema or {}))
        self.forward_schema = (self.args_schema, self.kwargs_schema)
        if not tensor_protos(self.forward_schema):
            raise ValueError(
                f"ExpertBackend {name!r}: args_schema or kwargs_schema must describe at least one tensor, e.g. "
                f"args_schema=(BatchTensorProto(64),) for an expert that takes a tensor of shape (rows, 64); got "
                f"args_schema={args_schema!r}, kwargs_schema={kwargs_schema!r}, in which nothing is a BatchTensorProto "
                f"and everything a constant that the expert is called with"
            )
        self._expert_device = ExpertDevice(self.expert)
        self._lock = lock_of([*self._expert_device.parameters, *optimized(opt)])
        if not self._updates_itself():
            check_updates(name, opt, self._expert_device.parameters, ())
        if outputs_schema is None:
            outputs_schema = self._find_outputs_schema()
        self.outputs_schema = to_schema(outputs_schema)
        self._schema = RequestSchema(name, self.forward_schema, self.outputs_schema)

        self._pool_options = pool_options
        self._make_pools()
        if self.trains:
            warm_up_autograd()

        self.register_load_state_dict_post_hook(look_again)

    def _find_outputs_schema(self) -> Any:
        try:
            with self._lock:
                schema = infer_outputs_schema(
                    self.expert, self.args_schema, self.kwargs_schema, device=self._expert_device.device
                )
        except Exception as error:
            add_note(
                error,
                f"ExpertBackend {self.name!r}: the expert raised this in a call on zeros with the shapes of "
                f"args_schema={self.args_schema!r}, kwargs_schema={self.kwargs_schema!r}: a BatchTensorProto must have "
                f"the shape of one row that the expert takes, without the number of rows",
            )
            raise
        self._expert_device = ExpertDevice(self.expert)  # the call has initialised the parameters of a lazy expert
        return schema

    def _make_pools(self) -> None:
        inputs, outputs = self._schema.inputs, self._schema.outputs
        options = self._options_of_pools()
        self.forward_pool = TaskPool(self.forward, name=f"{self.name}_forward", schema=inputs, **options)
        self.backward_pool = TaskPool(
            self.backward,
            name=f"{self.name}_backward",
            schema=inputs + outputs,
            exclusive_with=self.forward_pool,
            **options,
        )

    def _options_of_pools(self) -> dict[str, Any]:
        """Return the options of the backend's pools: ``pool_options``, with a default that depends on the device."""
        device = self._expert_device.device
        return {"pin_memory": device is not None and device.type == "cuda", **self._pool_options}

    # --- information for clients ---

    def get_info(self) -> dict[str, Any]:
        """Return the information for clients: a picklable dictionary of the name, the schemas and the keyword names."""
        return {
            "name": self.name,
            "forward_schema": self.forward_schema,
            "outputs_schema": self.outputs_schema,
            "keyword_names": tuple(self.kwargs_schema),
        }

    def get_pools(self) -> tuple[TaskPool, TaskPool]:
        """Return the pool of the forward pass and the pool of the backward pass."""
        return self.forward_pool, self.backward_pool

    @property
    def backward_schema(self) -> tuple[Any, ...]:
        """Return the schema of a backward request: ``(forward_schema, outputs_schema)``."""
        return self.forward_schema, self.outputs_schema

    @property
    def trains(self) -> bool:
        """True if backward passes update the expert."""
        return self.opt is not None or self._updates_itself()

    @property
    def updates(self) -> int:
        """Return the number of updates of the expert.

        :meth:`load_state_dict` sets it to the number in the loaded state, unless that is the state of a plain module.
        """
        return self._rule.updates

    # --- the passes ---

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        """Return the flat outputs of the expert for the flat ``inputs``, computed without gradients.

        If the inputs have 0 rows, the outputs have 0 rows, and the expert is not called. The expert works on copies of
        the inputs, so the inputs do not change. Results that share memory with parameters or buffers are copied.
        Results in other memory that the expert keeps, such as a cache, are copied only if the call goes through a pool.

        Raises:
            ValueError: the number of inputs is wrong, the first input has no dimensions, or the outputs do not match
                the schema.
            Exception: any exception of the expert.
        """
        self._schema.check_count("forward", inputs, len(self._schema.inputs))
        if not inputs[0].shape[0]:
            return self._schema.empty_outputs(inputs[0].device)
        return in_plain_state(False, self._run_alone, self._run_forward, inputs)

    def backward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Update the expert, and return gradients of the flat inputs.

        The expert runs again on the inputs, and its results are differentiated. The update uses the gradients of this
        batch, or of the last ``accumulate_steps`` batches. Afterwards, ``.grad`` of the parameters is None. Unless
        :attr:`trains` is true, the parameters and their ``.grad`` do not change. If the inputs have 0 rows, the expert
        is neither called nor updated.

        Args:
            inputs: the flat inputs, followed by a gradient of each tensor among the flat outputs, in the same shape.
                Gradients of integer outputs are ignored.

        Returns:
            For each flat input, its gradient: a tensor of the same shape and dtype, on the device of the first input.
            It is zeros for an input that has no gradient: an integer input, or one that does not influence the outputs.
            (None could not be divided among the requests of a batch.)

        Raises:
            ValueError: the number of tensors is wrong, the first has no dimensions, or the outputs do not match the
                schema.
            NonFiniteGradientError: see ``nonfinite_gradients``.
            Exception: any exception of the expert, the optimizer or the scheduler.
        """
        num_inputs = len(self._schema.inputs)
        self._schema.check_count("backward", inputs, num_inputs + len(self._schema.outputs))
        if not inputs[0].shape[0]:
            return tuple(torch.zeros_like(tensor) for tensor in inputs[:num_inputs])
        with uninterrupted():
            return in_plain_state(True, self._run_alone, self._run_backward, inputs)

    def apply_gradients(self) -> None:
        """Update the expert: one step of the optimizer, then one of the scheduler. Subclasses may override this.

        The backward pass calls this once per batch (or every ``accumulate_steps`` batches), while no other pass runs.
        The gradients are in ``.grad`` of the parameters: reduced, checked and clipped according to the options. After
        the update, ``opt.zero_grad()`` is called and ``.grad`` is set to None. The backward pass does this, or this
        method itself if it is called from an overriding :meth:`backward`.
        """
        if self.opt is not None:
            self.opt.step()
            self._rule.updates += 1  # before the scheduler's step, which may raise: the update has been made
            if not self._clears_itself:
                zero_grad(self.opt)
                clear_gradients([*self._expert_device.parameters, *optimized(self.opt)])
        if self.scheduler is not None:
            self.scheduler.step()

    def may_retry(self, exception: BaseException) -> bool:
        """Return whether ``exception`` is an Exception that a backward pass raised before it changed anything.

        The pass has then changed neither parameters, buffers nor accumulated gradients, so it may run again.
        """
        return isinstance(exception, Exception) and getattr(exception, _MAY_RETRY, False) is True

    def _run_alone(
        self, function: Callable[[Sequence[Tensor]], tuple[Any, ...]], tensors: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        with self._lock:
            if self._expert_device.is_home_of(tensors):
                return function(tensors)
            return self._expert_device.run(function, tensors)

    def _run_forward(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        args, kwargs = self._schema.pack_arguments(lend(inputs))
        expert = self._modules["expert"]  # self.expert would take 1 us longer
        assert expert is not None
        if self._buffers_change_in_forward or not self._expert_device.has_buffers or not expert.training:
            outputs = self._schema.flatten_outputs(expert(*args, **kwargs))
        else:
            with keep_buffers(expert):
                outputs = self._schema.flatten_outputs(expert(*args, **kwargs))
        return self._expert_device.copy_own(outputs)

    def _run_backward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        trains = self.trains
        parameters = self._parameters_with_gradients() if trains else ()
        num_inputs = len(self._schema.inputs)
        changing, accumulated = False, self._rule.batches
        try:
            clear_gradients(parameters)  # other uses of the module may have left gradients
            with self._undo_buffers_after_errors():
                leaves = [as_leaf(tensor) for tensor in tensors[:num_inputs]]
                args, kwargs = self._schema.pack_arguments(lend(leaves))
                outputs = self._schema.flatten_outputs(self.expert(*args, **kwargs))
                gradients = run_backward_pass(
                    self._schema.output_tensors(outputs), tensors[num_inputs:], leaves, trains
                )
                if trains and self._rule.prepare(parameters, len(leaves[0])):
                    changing = True
                    before = self._rule.updates
                    self._clears_itself = True
                    self.apply_gradients()
                    self._rule.updates = before + 1
                    zero_grad(self.opt)
            return gradients
        except BaseException as error:
            # If the accumulated gradients have changed, another run could neither remove this batch's gradients from
            # them, nor restore those of earlier batches, which are dropped if the norm of all is not finite.
            mark(error, may_retry=not changing and self._rule.batches == accumulated)
            raise
        finally:
            self._clears_itself = False
            clear_gradients(parameters)

    def _undo_buffers_after_errors(self) -> AbstractContextManager[None]:
        if self._expert_device.has_buffers and self.expert.training:
            return keep_buffers(self.expert, only_after_errors=True)
        return nullcontext()

    def _updates_itself(self) -> bool:
        """Return whether :meth:`apply_gradients` is overridden."""
        return type(self).apply_gradients is not ExpertBackend.apply_gradients

    def _parameters_with_gradients(self) -> list[nn.Parameter]:
        """Return the parameters that may have a gradient: those of the expert, and those that the optimizer updates."""
        if not self._expert_device.is_current(self.expert):
            self._look_again()
        found = dict.fromkeys(self._expert_device.parameters)
        found.update(dict.fromkeys(optimized(self.opt)))
        return list(found)

    # --- the state, read and loaded between two updates: no pass runs meanwhile ---

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of expert, optimizer and scheduler between two updates.

        Unless ``keep_vars`` is set, tensors are copies, which later updates do not change. Gradients that are being
        accumulated (``accumulate_steps``) are not included.
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
        """Load the result of :meth:`state_dict`, between two updates. Accumulated gradients are dropped.

        The states of optimizer and scheduler are loaded if the backend and the loaded state both have them: a backend
        without an optimizer can load the state of one that trains, and vice versa.
        """
        with self._lock:
            return super().load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        """Load this module's own entries of ``state_dict``, for ``load_state_dict`` of this or of a containing module.

        Raises:
            ValueError: ``load_state_dict`` was called with ``assign=True``, and the backend has an optimizer.
        """
        if self.opt is not None and local_metadata.get("assign_to_params_buffers"):
            raise ValueError(
                f"ExpertBackend {self.name!r}: load_state_dict(assign=True) would replace the parameters that opt "
                f"updates; load without assign=True"
            )
        with self._lock:
            self._rule.forget()
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        missing_keys = args[1]
        if (key := f"{prefix}_extra_state") in missing_keys:  # the state of a plain module lacks this key
            missing_keys.remove(key)

    def get_extra_state(self) -> dict[str, Any]:
        """Return a dictionary of the states of optimizer and scheduler, and the number of updates."""
        with self._lock:
            states = {name: one.state_dict() for name, one in self._stateful()}
            return {"updates": self._rule.updates, **copy.deepcopy(states)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Drop the accumulated gradients, and load the result of :meth:`get_extra_state`."""
        with self._lock:
            self._rule.forget()
            for name, one in self._stateful():
                if name in state:
                    one.load_state_dict(state[name])
            self._rule.updates = state["updates"]

    def _stateful(self) -> list[tuple[str, Any]]:
        pairs: list[tuple[str, Any]] = [("opt", self.opt), ("scheduler", self.scheduler)]
        return [(name, one) for name, one in pairs if hasattr(one, "state_dict")]

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the backend and its expert, between two batches."""
        with self._lock:
            return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with self._lock:
            self._refuse_conversion(fn)
            super()._apply(fn, recurse)
            self._expert_device = ExpertDevice(self.expert)
            if isinstance(self.opt, Optimizer) and self.opt.state:
                self.opt.load_state_dict(self.opt.state_dict())  # move the optimizer's tensors to the new device
        return self

    def _refuse_conversion(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Raise TypeError if ``fn`` changes a dtype, because clients and pools use schemas with the old dtype."""
        own = [*self.expert.parameters(), *self.expert.buffers()]
        for dtype, device in {(tensor.dtype, tensor.device): None for tensor in own if not is_lazy(tensor)}:
            made = fn(torch.empty(0, dtype=dtype, device=device)).dtype
            if made != dtype:
                raise TypeError(
                    f"ExpertBackend {self.name!r}: the expert cannot be converted from {dtype} to {made} once it is "
                    f"served, since its schemas, which clients know, say what it takes and returns: convert it first, "
                    f"and make a backend of it with schemas of that dtype"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except the lock and the pools. A copy gets its own pools, which no runtime serves."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", *_POOLS)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = lock_of([*self._expert_device.parameters, *optimized(self.opt)])
        self._make_pools()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin: Self = type(self).__new__(type(self))
        memo[id(self)] = twin
        with self._lock:
            twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def _look_again(self) -> None:
        """Update the list of the expert's parameters after some were replaced; check that ``opt`` updates them.

        See :func:`check_updates` for the check, which may warn or raise ValueError. It is omitted if
        :meth:`apply_gradients` is overridden.
        """
        before, self._expert_device = self._expert_device.parameters, ExpertDevice(self.expert)
        if not self._updates_itself():
            check_updates(self.name, self.opt, self._expert_device.parameters, before)

    def extra_repr(self) -> str:
        return f"name={self.name!r}"


def look_again(backend: ExpertBackend, incompatible_keys: Any) -> None:
    """Update the list of the backend's parameters after loading a state into the backend or a module that contains it.

    This is a hook for ``register_load_state_dict_post_hook``.
    """
    backend._look_again()


def mark(error: BaseException, *, may_retry: bool) -> None:
    """Record in an attribute of ``error`` whether the batch that raised it may run again."""
    with suppress(AttributeError):  # the exception does not accept attributes
        setattr(error, _MAY_RETRY, may_retry)
