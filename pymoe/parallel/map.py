"""``map_with_parallel_backward`` runs the forward passes of many calls at the same time, and later their backward
passes.

Each call runs in a graph of its own (``pymoe.autograd.isolated_graph``). One node of the caller's graph represents all
calls: its inputs are the calls' tensors and every leaf that they used, its outputs are the calls' outputs. When
autograd reaches the node, it runs the backward passes of all calls together and returns their gradients, summed in
call order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pymoe._torch_private import get_current_graph_task_keep_graph, unsafe_set_version_counter
from pymoe._transforms import has_tangent, torch_func_is_active
from pymoe.autograd import random_streams
from pymoe.autograd.graph_nodes import add_gradients, apply_directly, once_only
from pymoe.autograd.isolated_graph import (
    SECOND_BACKWARD,
    IsolatedCall,
    as_function,
    as_tuple,
    graphs_are_made,
    isolate,
    map_outputs,
    trace,
)
from pymoe.autograd.random_streams import RandomStream
from pymoe.parallel.run_concurrently import likeness, run_concurrently
from pymoe.parallel.saved_tensors import SavedTensors
from pymoe.parallel.workers import Visit

NAME = "map_with_parallel_backward"


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu or tensor.is_meta


def map_with_parallel_backward(func: Any, *args_per_call: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    """Run ``func(*args)`` concurrently for every ``args`` in ``args_per_call``, and later the backward passes, too.

    The result is the same as that of ``tuple(func(*args) for args in args_per_call)``, in less time: PyTorch's engine
    would run the backward passes of one device one after the other. Useful for calls that wait (for other machines, for
    I/O) or that keep one core busy without the interpreter's lock; see :func:`set_parallel_workers` for the number of
    threads.

    Args:
        func: an ``autograd.Function`` class or its ``apply``, an ``nn.Module`` or any other callable.
        args_per_call: for each call a tuple or list of its positional arguments: tensors of any shape and dtype,
            requiring gradients or not, and anything else. Calls may differ in the number and kind of their arguments,
            and may share tensors.

    Returns:
        For each call the tuple of its outputs: the items of a tuple or list that ``func`` returns, or any other result
        (a tensor, None, a dict) as the only item. ``()`` without calls.

    Guarantees:

    - **Graphs.** Outputs that require gradients have the map as their history: gradients reach arguments, parameters of
      modules and tensors of closures. Autograd goes beyond the map once the backward passes of all calls have ended.
      Gradients are summed in call order, so results do not depend on the number of threads; nothing is accumulated
      before all calls have succeeded. If a call uses a tensor with a history that is not one of its arguments, the
      tensor is differentiated down to its leaves, once per such call, so it is better passed as an argument. (After
      ``retain_grad()`` it must be: torch writes the retained gradient without a lock.) Tensors that leave a call, but
      not as outputs (losses that a module keeps), keep their history, too. All of ``autograd.Function`` works:
      ``save_for_backward`` with version checks, ``needs_input_grad``, ``mark_non_differentiable``, ``mark_dirty``,
      ``set_materialize_grads``, ``setup_context``, ``once_differentiable``. ``retain_graph=True`` works. Forward-mode
      derivatives pass through calls that need no graph. These raise an error: forward-mode derivatives in calls that
      need a graph, differentiating twice, and reentrant checkpointing, which needs ``backward`` while the map needs
      ``autograd.grad`` (``use_reentrant=False`` works, in calls and around the map). With gradients off there is no
      graph.
    - **State.** Calls run in the state of the calling thread: grad mode, inference mode, autocast, default device,
      function and dispatch modes, saved-tensor hooks, context variables, CUDA device and streams, profiler. Backward
      passes run in the state of the backward pass around them. Saved-tensor hooks are called on that thread, in call
      order: to pack after all calls have ended, to unpack before their backward passes. Inside ``torch.func``
      transforms, and with both dispatch modes and saved-tensor hooks (selective checkpointing), calls run one after the
      other.
    - **Random numbers.** Every call has a separate stream, which depends only on the seed and the call's position:
      results are the same for any number of threads, and differ from those of a serial loop. The surrounding stream
      advances by one number if any call draws. Python's and numpy's generators are not isolated.
    - **Side effects.** Calls change everything else, such as the running statistics of a batch norm, at the same time
      and in any order: they must guard it. Calls get aliases of arguments that are floating-point or complex tensors:
      tensors (not Parameters) that share memory and in-place changes with the originals. For leaves that require
      gradients, this is so only if another argument of the call has a history.
    - **CUDA.** Calls queue their work on the caller's streams. Backward passes of calls with CUDA tensors run one after
      the other on the host, on the engine's thread for the device; they must not wait for threads that need this one.
    - **Failures.** All calls end; then the exception of the first call that failed, in call order, is raised with its
      traceback and with notes on the others. On Ctrl-C, calls that have not started are dropped and running calls are
      waited for (a second Ctrl-C does not wait).

    Raises:
        TypeError: ``func`` is not callable, or the arguments of a call are not a tuple or list.
        RuntimeError: a tensor that needs gradients is modified in place by more than one call, or by a call that has
            another argument with the same memory; or the interpreter is exiting.
        NotImplementedError: a call with a forward-mode derivative needs a graph.

    Example:
        >>> inputs = [torch.tensor([float(i)], requires_grad=True) for i in range(3)]
        >>> outputs = pymoe.map_with_parallel_backward(torch.square, *[(x,) for x in inputs])
        >>> sum(y for (y,) in outputs).backward()
        >>> [x.grad.item() for x in inputs]
        [0.0, 2.0, 4.0]
    """
    function = as_function(func)
    for number, args in enumerate(args_per_call):
        if not isinstance(args, (tuple, list)):
            raise TypeError(
                f"{NAME}: the arguments of a call must be a tuple or a list, "
                f"got {type(args).__name__} for call {number}"
            )
    if not args_per_call:
        return ()
    if torch_func_is_active():
        return tuple([as_tuple(function(*args)) for args in args_per_call])
    with Visit():
        return _map(func, function, args_per_call)


def _map(func: Any, function: Any, args_per_call: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    random_streams.install()
    graphs = graphs_are_made()
    calls = isolate(function, args_per_call, graphs, share=True)

    source = random_streams.RandomSource()
    streams = [source.stream(number) for number in range(len(calls))]
    like = likeness(func)
    saved = run_concurrently(f"{NAME} forward", lambda number: calls[number].run(), streams, like)
    if not graphs:
        return tuple([call.outputs for call in calls])
    # Trace on this thread: on several threads, calls that end at the same time would contend for the interpreter's
    # lock.
    fresh = trace(calls, hand_through=True)
    return _join(calls, fresh, streams, like, saved)


class _MapCalls:
    """The calls of a map, and for each call the inputs and outputs of the map's node that correspond to it."""

    def __init__(
        self,
        calls: list[IsolatedCall],
        fresh: list[list[torch.Tensor]],
        streams: Sequence[RandomStream],
        like: int,
        saved: list[SavedTensors],
    ) -> None:
        self.calls: list[IsolatedCall] | None = calls
        self.streams = streams
        self.like = like
        self.saved = saved  # the tensors that each call has saved; empty without hooks
        self.tensors: list[torch.Tensor] = []  # the inputs of the node, each once
        self.targets: list[list[int]] = []  # per call and gradient: the index of the node's input
        self.sources: list[list[int]] = []  # per call and root: the index of the node's output
        self.written: list[int] = []  # indices of the inputs that calls have modified in place
        numbers: dict[int, int] = {}

        def numbered(tensors: list[torch.Tensor]) -> list[int]:
            own = []
            for tensor in tensors:
                number = numbers.setdefault(id(tensor), len(self.tensors))
                if number == len(self.tensors):
                    self.tensors.append(tensor)
                own.append(number)
            return own

        outputs = sum(map(len, fresh))
        first = 0
        for call, own in zip(calls, fresh, strict=True):
            inputs = [alias.original for alias in call.aliases if alias.edge is not None]
            self.targets.append(numbered(inputs + call.leaves))
            self.sources.append(list(range(first, first + len(own))))
            first += len(own)
            if not call.written:
                continue
            written = numbered([alias.original for alias in call.written])
            if not set(written).isdisjoint(self.written) or len(set(written)) < len(written):
                raise RuntimeError(
                    f"{NAME}: a tensor is modified in place by more than one call; only one history can be kept"
                )
            self.sources[-1] += range(outputs + len(self.written), outputs + len(self.written) + len(written))
            self.written += written
        self.inputs = len(self.tensors)
        # A node with tensors on a device other than the CPU runs on the engine's thread for that device. The backward
        # passes of the calls need this thread, too, so they run inline on it, one after the other.
        tensors = [*self.tensors, *[output for own in fresh for output in own]]
        self.inline = not all(map(is_on_host, tensors))


class _ParallelMap(torch.autograd.Function):
    """The node of a map in the caller's graph; its backward runs the backward passes of all calls."""

    @staticmethod
    def forward(
        ctx: Any, plan: _MapCalls, outputs: list[torch.Tensor], tied: set[int], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        written = [tensors[number] for number in plan.written]
        ctx.mark_dirty(*written)
        detached = [output.detach() for output in outputs]
        for number, output in enumerate(outputs) if tied else ():
            if id(output) in tied:
                # Return a view: torch then refuses in-place changes of this output, which it could not record for the
                # other tensors in the same memory.
                detached[number] = detached[number].view_as(output)
        return *detached, *written

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        plan: _MapCalls = ctx.plan
        calls = plan.calls
        if calls is None:
            raise RuntimeError(SECOND_BACKWARD)
        keep = get_current_graph_task_keep_graph()
        gradients: list[Sequence[torch.Tensor | None]] = [()] * len(calls)

        def backward(number: int) -> None:
            gradients[number] = calls[number].gradients([grads[output] for output in plan.sources[number]], keep)

        saved = [
            of_call
            for of_call, sources in zip(plan.saved, plan.sources, strict=False)
            if any([grads[output] is not None for output in sources])
        ]
        try:
            for of_call in saved:
                of_call.fetch()
            run_concurrently(f"{NAME} backward", backward, plan.streams, plan.like, plan.inline)
        finally:
            for of_call in saved:
                of_call.release()
        totals: list[torch.Tensor | None] = [None] * plan.inputs
        for targets, own in zip(plan.targets, gradients, strict=True):
            for target, gradient in zip(targets, own, strict=True):
                if gradient is not None:
                    before = totals[target]
                    totals[target] = gradient if before is None else add_gradients(before, gradient)
        if not keep:
            plan.calls = None
            plan.saved = []
        return None, None, None, *(once_only(NAME, totals) if torch.is_grad_enabled() else totals)


def _join(
    calls: list[IsolatedCall],
    fresh: list[list[torch.Tensor]],
    streams: list[RandomStream],
    like: int,
    saved: list[SavedTensors],
) -> tuple[tuple[Any, ...], ...]:
    """Return for each call the tuple of its outputs, with one common node (:class:`_ParallelMap`) as their history."""
    plan = _MapCalls(calls, fresh, streams, like, saved)
    inner = [output for own in fresh for output in own]
    tied = set().union(*[call.tied for call in calls if call.tied])
    outer: dict[int, torch.Tensor] = {}
    if inner or plan.written:
        written = tuple([plan.tensors[number] for number in plan.written])
        versions = tuple([tensor._version for tensor in written])
        if any(map(has_tangent, inner)):
            raise NotImplementedError(
                f"{NAME}: an output has a forward-mode derivative and requires gradients, too: differentiate under "
                "torch.no_grad() or with torch.func.jvp"
            )
        joined = apply_directly(_ParallelMap, plan, inner, tied, *plan.tensors)
        if written:
            # Restore the version counters: mark_dirty has incremented them, and a tensor that a call saved after
            # modifying it in place would seem to have been modified since.
            unsafe_set_version_counter(written, versions)
        outer = dict(zip(map(id, inner), joined, strict=False))
    plan.tensors = []
    results = []
    for call in calls:
        results.append(map_outputs(lambda output: outer.get(id(output), output), call.outputs))
        call.outputs = ()
        call.forget_arguments()
    return tuple(results)
