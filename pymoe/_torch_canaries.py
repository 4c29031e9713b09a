"""Tests private names of torch before any result depends on them.

A name may still exist in another version of torch and do something else: a method may never be called, a function may
always return the same answer. Code that relies on a name therefore calls a canary first. A canary tries its names until
they have passed once in the process, on a new thread without modes, transforms or autocast, and raises if one of them
fails.

``tests/test_torch_canaries.py`` gives the reason for each name that no canary exercises. It replaces each of the other
names with one that does nothing, and then the canary must raise.
"""

from __future__ import annotations

import dis
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache, wraps
from types import FunctionType
from typing import Any

import torch
import torch.nn.modules.module as _module
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from pymoe import _torch_private as private

Exercises = Iterator[tuple[str, bool]]
"""Pairs: a name, and whether it works as pymoe expects."""


def canary(exercise: Callable[[], Exercises]) -> Callable[[], None]:
    """Decorate ``exercise`` so that it runs once per process; after it has failed, each call runs it again.

    Args:
        exercise: tests names of torch; yields pairs of a name and whether it works as pymoe expects. The error message
            quotes the first line of its docstring, which says what pymoe uses the names for.

    Returns:
        A function without arguments, which takes about 50 ns once it has passed. It raises RuntimeError if a name does
        not work as pymoe expects, and the error of torch if this process is a fork in which torch cannot run a backward
        pass.
    """

    @cache
    @wraps(exercise)
    def check() -> None:
        lost: list[str] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                lost.extend(name for name, is_heard in exercise() if not is_heard)
            except BaseException as error:
                failure.append(error)

        try:
            # Not a daemon, so that the interpreter waits for it at exit: torch aborts if one of its functions is cut
            # off.
            thread = threading.Thread(target=run, name="pymoe canary", daemon=False)
            thread.start()
        except RuntimeError:  # no thread can start any more, because the interpreter is shutting down
            run()
        else:
            thread.join()
        if failure and "in combination with fork" in str(failure[0]):
            # Raise the error unchanged: that torch cannot run a backward pass in this forked process says nothing about
            # the names.
            raise failure[0]
        if lost or failure:
            about = (exercise.__doc__ or "").partition("\n")[0].rstrip(".")
            names = ", ".join(lost) or "what is tried"
            raise RuntimeError(
                f"pymoe relies on private names of torch, and in torch {torch.__version__} {names} no longer does what "
                f"it did in the versions that were tested ({about}): results would be wrong. Install one of these "
                "(docs: Install, What runs where)"
            ) from (failure[0] if failure else None)

    check.exercise = exercise  # type: ignore[attr-defined]
    return check


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def _leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu", requires_grad=True)


@canary
def graphs() -> Exercises:
    """Exercise the names that build the graphs of isolated calls and of stages, and that notice edits of tensors."""
    leaf = _leaf(3.0)
    kept: list[bool] = []
    output = leaf * 2
    assert output.grad_fn is not None
    tasks: list[int] = []
    output.register_hook(lambda grad: kept.append(private.get_current_graph_task_keep_graph()))
    output.register_hook(lambda grad: tasks.append(private.current_graph_task_id()))
    edges = GradientEdge(output.grad_fn, 0), torch.autograd.graph.get_gradient_edge(leaf)
    one = torch.ones_like(leaf)
    found = [
        private.run_backward((edges[0],), (one,), keep, False, (edges[1],), True, accumulate_grad=False)
        for keep in (True, False)
    ]
    yield "run_backward", [grad.tolist() for (grad,) in found] == [[2.0], [2.0]] and leaf.grad is None
    yield "get_current_graph_task_keep_graph", kept == [True, False]
    yield "current_graph_task_id", len({*tasks, -1}) == 3 and private.current_graph_task_id() == -1

    squared = super(torch.autograd.Function, _Square).apply(leaf)  # type: ignore[misc]
    own = isinstance(squared.grad_fn, private.FunctionBase) and not isinstance(output.grad_fn, private.FunctionBase)
    yield "FunctionBase", own
    above = super(private.SingleLevelFunction, _Square).apply(leaf)
    yield "SingleLevelFunction", torch.autograd.grad(above, leaf)[0].tolist() == [6.0]

    failing = private.DelayedError("told", 1)(leaf)
    try:
        failing.grad_fn(one)
        is_told = False
    except RuntimeError as error:
        is_told = "told" in str(error)
    yield "DelayedError", is_told

    number = private.get_sequence_nr()
    early, late = leaf.exp(), leaf.exp()
    numbers = [node._sequence_nr() for node in (early.grad_fn, late.grad_fn)]  # type: ignore[union-attr]
    yield "_sequence_nr", numbers[1] == numbers[0] + 1
    yield "get_sequence_nr", numbers[0] == number and private.get_sequence_nr() > numbers[1]
    order: list[str] = []
    for name, exponential in (("early", early), ("late", late)):
        exponential.grad_fn.register_prehook(lambda _, name=name: order.append(name))  # type: ignore[union-attr]
    late.grad_fn._set_sequence_nr(numbers[0] - 1)  # type: ignore[union-attr]
    torch.autograd.grad(early + late, leaf)
    yield "_set_sequence_nr", order == ["early", "late"]
    shapes = [tuple(about.shape) for about in early.grad_fn._input_metadata]  # type: ignore[union-attr]
    yield "_input_metadata", shapes == [(1,)]

    # exp() saves its result for the backward pass.
    saved = leaf.exp()
    version = saved._version
    saved.detach().mul_(1)
    yield "_version", saved._version == version + 1 == saved.view(-1)._version
    private.unsafe_set_version_counter((saved,), (version,))
    is_back = saved._version == version
    torch.autograd.grad(saved, leaf, retain_graph=True)
    private.unsafe_set_version_counter((saved,), (version + 1,))
    try:
        torch.autograd.grad(saved, leaf)
        is_back = False
    except RuntimeError:
        pass
    yield "unsafe_set_version_counter", is_back

    view = saved.view(-1)
    yield "_is_view", view._is_view() and not saved._is_view()
    yield "_base", view._base is saved and saved._base is None
    storages = [tensor.untyped_storage()._cdata for tensor in (saved, view, saved.clone())]
    yield "_cdata", storages[0] == storages[1] != storages[2]
    hooked = _leaf(1.0)
    was_empty = not hooked._backward_hooks
    hooked.register_hook(lambda grad: None)
    yield "_backward_hooks", was_empty and bool(hooked._backward_hooks)
    sums, added = [torch.ones_like(one), torch.ones_like(one)], [one, 2 * one]
    private.foreach_add_(sums, added)
    yield "foreach_add_", [total.item() for total in sums] == [2.0, 3.0]
    leaves, spec = private.pytree.tree_flatten({"b": (1, None), "a": [2]})
    yield "pytree", private.pytree.tree_unflatten(leaves, spec) == {"b": (1, None), "a": [2]} and leaves == [1, None, 2]


class _Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _switches(get: Callable[[], bool], put: Callable[[bool], Any]) -> bool:
    """Return whether ``get`` returns the value that ``put`` has just set, for True and for False; restore the
    original value.
    """
    usual, answers = get(), []
    for value in (not usual, usual):
        put(value)
        answers.append(get())
    return answers == [not usual, usual]


@canary
def thread_states() -> Exercises:
    """Exercise the names that carry the state of a calling thread to the threads that work for it."""
    leaf = _leaf(1.0)
    private.set_grad_enabled(False)
    yield "set_grad_enabled", not torch.is_grad_enabled() and not (leaf * 2).requires_grad
    torch.set_grad_enabled(True)
    guard = private.InferenceMode(True)
    guard.__enter__()
    inside = torch.is_inference_mode_enabled()
    guard.__exit__(None, None, None)
    yield "InferenceMode", inside and not torch.is_inference_mode_enabled()

    for switch in ("fwd_grad", "multithreading", "view_replay"):
        is_right = _switches(getattr(private, f"is_{switch}_enabled"), getattr(private, f"set_{switch}_enabled"))
        yield f"is_{switch}_enabled", is_right
        yield f"set_{switch}_enabled", is_right
    with torch.autograd.set_multithreading_enabled(False):
        yield "is_multithreading_enabled", not private.is_multithreading_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = private.is_any_autocast_enabled()
    yield "is_any_autocast_enabled", inside and not private.is_any_autocast_enabled()
    torch.set_default_device("meta")
    context = private.GLOBAL_DEVICE_CONTEXT
    is_there = getattr(context, "device_context", None) is not None and torch.empty(0).is_meta
    context.device_context.__exit__(None, None, None)
    context.device_context = None
    yield "GLOBAL_DEVICE_CONTEXT", is_there and torch.empty(0).is_cpu

    yield from _function_modes()
    yield from _dispatch_modes()
    yield from _saved_tensor_hooks()


def _function_modes() -> Exercises:
    # A new class for each call, because it counts calls, and several threads may run this function at the same time.
    class CountingTensor(Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    plain = torch.ones(1, dtype=torch.float64, device="cpu")
    mode, other = _Counting(), plain.as_subclass(CountingTensor)
    private.push_on_torch_function_stack(mode)
    torch.add(plain, 1)
    yield "push_on_torch_function_stack", mode.calls == 1
    yield "len_torch_function_stack", private.len_torch_function_stack() == 1
    yield "get_current_function_mode_stack", list(private.get_current_function_mode_stack()) == [mode]
    with private.DisableTorchFunction():
        torch.add(plain, 1)
    yield "DisableTorchFunction", mode.calls == 1
    popped = private.pop_torch_function_stack()
    torch.add(plain, 1)
    yield "pop_torch_function_stack", popped is mode and mode.calls == 1 and private.len_torch_function_stack() == 0
    states = private.TorchFunctionState
    asked = []
    for state in (states.SUBCLASSES_DISABLED, states.ALL_DISABLED, states.ENABLED):
        private.set_torch_function_state(state)
        before = CountingTensor.calls
        torch.add(other, 1)
        about = private.is_torch_function_enabled(), private.is_torch_function_all_disabled()
        asked.append((CountingTensor.calls > before, *about))
    heard = [heard for heard, _, _ in asked] == [False, False, True]
    yield "set_torch_function_state", heard
    yield "TorchFunctionState", heard
    yield "is_torch_function_enabled", [enabled for _, enabled, _ in asked] == [False, False, True]
    yield "is_torch_function_all_disabled", [disabled for _, _, disabled in asked] == [False, True, False]


def _dispatch_modes() -> Exercises:
    heard: list[Any] = []

    class Hearing(private.TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Returning True would make torch import its compiler.
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func)
            return func(*args, **(kwargs or {}))

    plain = torch.ones(1, dtype=torch.float64, device="cpu")
    mode = Hearing()
    private.push_mode(mode)
    plain.item()
    yield "push_mode", bool(heard)
    yield "TorchDispatchMode", issubclass(private.FakeTensorMode, private.TorchDispatchMode)
    yield "local_scalar_dense", private.local_scalar_dense in heard
    yield "len_torch_dispatch_stack", private.len_torch_dispatch_stack() == 1
    yield "get_current_dispatch_mode_stack", list(private.get_current_dispatch_mode_stack()) == [mode]
    count = len(heard)
    with private.disable_current_modes():
        torch.add(plain, 1)
    yield "disable_current_modes", len(heard) == count
    private.pop_mode(None)
    torch.add(plain, 1)
    yield "pop_mode", len(heard) == count and private.len_torch_dispatch_stack() == 0


def _saved_tensor_hooks() -> Exercises:
    leaf = _leaf(1.0)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    private.push_saved_tensors_default_hooks(pack, unpack)
    leaf.exp()
    yield "push_saved_tensors_default_hooks", len(packed) == 1
    yield "top_saved_tensors_default_hooks", private.top_saved_tensors_default_hooks(True) == (pack, unpack)
    private.pop_saved_tensors_default_hooks()
    leaf.exp()
    yield "pop_saved_tensors_default_hooks", len(packed) == 1
    private.saved_tensors_hooks_disable("not now", False)
    message = private.saved_tensors_hooks_get_disabled_error_message()
    is_refused = _raises(lambda: private.push_saved_tensors_default_hooks(pack, unpack))
    yield "saved_tensors_hooks_disable", is_refused
    yield "saved_tensors_hooks_get_disabled_error_message", message == "not now"
    private.saved_tensors_hooks_enable()
    yield "saved_tensors_hooks_enable", not _raises(lambda: private.push_saved_tensors_default_hooks(pack, unpack))


def _raises(function: Callable[[], object]) -> bool:
    try:
        function()
    except RuntimeError:
        return True
    return False


@canary
def transforms() -> Exercises:
    """Exercise the names that tell whether a call runs inside a transform of torch.func or in forward mode."""
    x = torch.ones(2, dtype=torch.float64, device="cpu")
    seen: list[Any] = []

    def look(value: Tensor) -> Tensor:
        with private.temporarily_clear_interpreter_stack():
            seen.append(private.are_functorch_transforms_active())
        seen.append(private.are_functorch_transforms_active())
        return value

    torch.vmap(look)(x)
    cleared, inside = seen
    yield "are_functorch_transforms_active", inside and not private.are_functorch_transforms_active()
    yield "temporarily_clear_interpreter_stack", cleared is False
    # Inspect the functions that set the level of forward mode, and do not open a level: levels are process-wide, so
    # another thread may have one, and torch refuses to open a second.
    sets_level = [
        ("STORE_GLOBAL", "_current_level") in [(step.opname, step.argval) for step in dis.get_instructions(function)]
        for function in (forward_ad.enter_dual_level, forward_ad.exit_dual_level)
    ]
    yield "_current_level", all(sets_level) and forward_ad._current_level >= -1


class _Called(nn.Module):
    """Records which of its methods torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu"))
        self.register_buffer("kept", torch.ones(1, device="cpu"))
        self.register_buffer("passing", torch.ones(1, device="cpu"), persistent=False)
        self.child = nn.Identity()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.heard.append("_apply")
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, *args: Any) -> None:
        self.heard.append("_save_to_state_dict")
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.heard.append("_load_from_state_dict")
        self.metadata = args[2]
        super()._load_from_state_dict(*args)


@canary
def modules() -> Exercises:
    """Exercise the names of a module's attributes, and of the methods that call, move, save and load a module."""
    part = _Called()
    yield "_parameters", list(part._parameters) == ["weight"] and part._parameters["weight"] is part.weight
    yield "_buffers", list(part._buffers) == ["kept", "passing"] and part._buffers["kept"] is part.kept
    yield "_modules", list(part._modules) == ["child"] and part._modules["child"] is part.child
    state = part.state_dict()
    yield "_non_persistent_buffers_set", part._non_persistent_buffers_set == {"passing"} and "passing" not in state
    yield "_save_to_state_dict", part.heard == ["_save_to_state_dict"]
    metadata = state._metadata  # type: ignore[attr-defined]
    part.load_state_dict(state)
    yield "_load_from_state_dict", part.heard[1:] == ["_load_from_state_dict"]
    yield "_metadata", metadata[""].get("version") == 1 and part.metadata.get("version") == 1
    part.to(torch.float64)
    yield "_apply", "_apply" in part.heard and part.weight.dtype == torch.float64

    # Register hooks without running a module: hooks for all modules would also run in other modules of the process.
    part.__dict__["_call_impl"] = lambda *args: ("called", *args)
    yield "_call_impl", part(1) == ("called", 1)
    part.__dict__["_compiled_call_impl"] = lambda *args: ("compiled", *args)
    yield "_compiled_call_impl", part(1) == ("compiled", 1)
    kinds = {
        "register_forward_pre_hook": "_forward_pre_hooks",
        "register_forward_hook": "_forward_hooks",
        "register_full_backward_pre_hook": "_backward_pre_hooks",
        "register_full_backward_hook": "_backward_hooks",
    }
    filled = {}
    for register, expected in kinds.items():
        hooked = nn.Identity()
        getattr(hooked, register)(print)
        filled[expected] = [name for name in private.CALL_HOOKS if getattr(hooked, name)]
        yield expected, bool(getattr(hooked, expected))
    yield "CALL_HOOKS", all(expected in names for expected, names in filled.items())
    yield "global_call_hooks", all(map(_is_known_of_all_modules, kinds))


def _is_known_of_all_modules(register: str) -> bool:
    """Return whether ``global_call_hooks`` contains the registries that the global form of ``register`` fills.

    The global form adds a hook for all modules. It runs here with separate registries, so no module runs the hook.
    """
    function = getattr(_module, register.replace("register_", "register_module_"))
    registries = [name for name, value in vars(_module).items() if isinstance(value, dict)]
    own: dict[str, Any] = {name: OrderedDict() for name in registries if name.startswith("_global_")}
    copied = FunctionType(function.__code__, {**vars(_module), **own}, argdefs=function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied(print)
    known = {id(hooks) for hooks in private.global_call_hooks}
    filled = [name for name, hooks in own.items() if hooks and not name.endswith(("_with_kwargs", "_always_called"))]
    return bool(filled) and all(id(vars(_module)[name]) in known for name in filled)
