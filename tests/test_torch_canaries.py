"""Tests that canaries raise if a private name of torch exists but does nothing.

Each name of pymoe/_torch_private.py is exercised by a canary, or is listed in NOT_EXERCISED with the reason.
"""

import ast
import sys
import threading

import pytest
import torch
from test_torch_private import ATTRIBUTES, LAZY, SOURCE

import pymoe
from pymoe import _torch_canaries as canaries
from pymoe import _torch_private as private
from pymoe import _transforms
from pymoe.autograd import isolated_graph, plain_state, random_streams, thread_state
from pymoe.ep import failures
from pymoe.nn import plain_calls, recorded
from pymoe.ops import function_calls as calls_of_operators
from pymoe.pipe import loss_graph
from pymoe.pipe.capture import interception
from pymoe.pipe.execution import gradients

dispatch = sys.modules["pymoe.ops.dispatch"]
CANARIES = {
    "graphs": canaries.graphs,
    "thread_states": canaries.thread_states,
    "transforms": canaries.transforms,
    "modules": canaries.modules,
    "random_streams": random_streams._numbers_come_from_streams,
    "function_calls": interception._functions_are_heard,
    "dispatch": dispatch._edits_are_counted,
    "backward passes": failures.ends_are_heard,
}
NODES_OF_LOSSES = loss_graph._nodes_tell
"""Exercises no name of pymoe/_torch_private.py, but the attributes of nodes that torch makes of its operators."""

IS_A_CLASS = "a class, for isinstance: what is not recognised raises an assertion, or an error of torch's own"
NOT_EXERCISED = {
    "FakeTensor": IS_A_CLASS,
    "FakeTensorMode": IS_A_CLASS,
    "detect_fake_mode": "capture asserts that there is one",
    "OpOverload": IS_A_CLASS,
    "OpOverloadPacket": IS_A_CLASS,
    "HigherOrderOperator": "a graph without the nodes that it makes cannot be cut",
    "BatchNormBase": IS_A_CLASS,
    "LazyNormBase": IS_A_CLASS,
    "NormBase": IS_A_CLASS,
    "dispatch_get_all_op_names": "it gives CUDA tensors in a build without kernels another message",
    "dispatch_has_kernel_for_dispatch_key": "the same",
    "assert_tensor_metadata": "nodes that are taken out of graphs; left in, they raise for other dtypes",
    "profiler_enabled": "profiles show more or fewer ranges",
    "unwrap_if_dead": "operators unwrap such tensors themselves",
    "PipelineStageBase": "abstract: torch's schedules fail at a stage without the methods that they call",
    "fx_config": "switches without which captures of free sizes raise",
    "_is_exporting_flag": "where it is not heard, exported programs hold what a layer counts, and fail to export",
    "_indices": "of sparse tensors: memory that is counted for balance alone",
    "_values": "the same",
    "_schema": "the names in it are looked up, and must be there",
    "_device_types": "of groups: without a device tensors are sent by way of the CPU",
    "_get_backend": "the same",
    "_set_params_and_buffers_to_ignore_for_model": "DDP raises at a DTensor that it is not told of",
    "_get_default_group": "it is asked for an error where there is none",
}
# The functions behind these names are used while pymoe is imported, or would end the process, so no test can replace
# them.
NOT_REPLACED = {
    "parse_dispatch_key",
    "dispatch_has_backend_fallback",
    "dispatch_tls_set_dispatch_key_excluded",
    "after_ADInplaceOrView_keyset",
}


def on_a_thread(function):
    """Return the result of ``function()`` on a thread without any torch state."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def names_of(canary):
    return on_a_thread(lambda: [name for name, _ in CANARIES[canary].exercise()])


random_streams.install()  # the kernels to which streams are known
EXERCISED = {canary: names_of(canary) for canary in CANARIES}


def test_each_private_name_is_exercised_or_says_why_not():
    offered = {name for _, name in ATTRIBUTES} | set(LAZY)
    for statement in ast.parse(SOURCE).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            offered.add(ast.unparse(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target))
    offered -= {"_C", "_LAZY", "ATTRIBUTES"}
    exercised = set().union(*EXERCISED.values())
    assert offered - exercised == set(NOT_EXERCISED), "exercise them, or say why no result rests on them"
    assert exercised <= offered
    assert not exercised & set(NOT_EXERCISED)


@pytest.mark.parametrize("canary", [*CANARIES.values(), NODES_OF_LOSSES], ids=lambda canary: canary.__name__)
def test_this_torch_does_what_pymoe_relies_on(canary):
    canary()


def test_a_node_of_a_loss_that_saves_its_weight_under_another_name_is_told(monkeypatch):
    monkeypatch.setattr(loss_graph, "_saved", lambda node, name: None)
    with pytest.raises(RuntimeError, match="private names of torch"):
        NODES_OF_LOSSES.__wrapped__()


class Nothing:
    """A stand-in for a torch class that has changed: its objects do nothing."""

    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __call__(self, *tensors):
        return tensors[0].exp()


def silent(name):
    """Return a replacement for a name that takes the same arguments and does nothing."""
    real = getattr(private, name)
    special = {
        "CALL_HOOKS": (),
        "global_call_hooks": [],
        "pytree": type("pytree", (), {"tree_flatten": lambda tree: ([tree], 0), "tree_unflatten": lambda *_: None}),
        "local_scalar_dense": object(),
        "GLOBAL_DEVICE_CONTEXT": type("Context", (), {"device_context": None})(),
        "TorchFunctionState": type("States", (), dict.fromkeys(["SUBCLASSES_DISABLED", "ALL_DISABLED", "ENABLED"])),
        "FunctionBase": object,
        "SingleLevelFunction": object,
    }
    if name in special:
        return special[name]
    if isinstance(real, type) or name in ("disable_current_modes", "temporarily_clear_interpreter_stack"):
        return Nothing
    if name.startswith(("is_", "are_", "len_", "peek_", "top_", "get_")) or name.endswith("_message"):
        answer = on_a_thread(lambda: real(*[True] * name.startswith("top_")))
        return lambda *_: answer
    return lambda *_, **__: None


PLANTED = [
    (canary, name)
    for canary, names in EXERCISED.items()
    for name in names
    if hasattr(private, name) and name not in NOT_REPLACED
]


@pytest.mark.parametrize(("canary", "name"), sorted(set(PLANTED)))
def test_a_name_that_does_nothing_is_told(canary, name, monkeypatch):
    check, replaced = CANARIES[canary], getattr(private, name)
    by_nothing = silent(name)
    monkeypatch.setattr(private, name, by_nothing)
    for module in (random_streams, interception):
        for bound in [bound for bound, value in vars(module).items() if value is replaced]:
            monkeypatch.setattr(module, bound, by_nothing)
    with pytest.raises(RuntimeError, match=r"private names of torch.*results would be wrong") as told:
        check.__wrapped__()
    assert name in str(told.value) or told.value.__cause__ is not None


def test_a_change_of_what_dispatch_writes_to_that_is_not_counted_is_told(monkeypatch):
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda _: None)
    with pytest.raises(RuntimeError, match="after_ADInplaceOrView_keyset"):
        dispatch._edits_are_counted.__wrapped__()


@pytest.mark.parametrize("function", ["enter_dual_level", "exit_dual_level"])
def test_a_level_of_forward_mode_that_is_kept_elsewhere_is_told(function, monkeypatch):
    monkeypatch.setattr(torch.autograd.forward_ad, function, lambda: 0)
    with pytest.raises(RuntimeError, match="_current_level"):
        canaries.transforms.__wrapped__()


def test_names_are_tried_while_the_process_is_at_a_level_of_forward_mode():
    """The first operator of a process was refused inside a dual level, since the canary entered a nested one."""
    with torch.autograd.forward_ad.dual_level():
        canaries.transforms.__wrapped__()


def with_gradient(_):
    return torch.ones(2, requires_grad=True)


USES = {
    "graphs": (isolated_graph.canaries, lambda: pymoe.map_with_parallel_backward(lambda x: 2 * x, [with_gradient(0)])),
    "graphs of leaves that calls find": (
        isolated_graph.canaries,
        lambda: pymoe.map_with_parallel_backward(lambda x: x * with_gradient(0), [torch.ones(2)]),
    ),
    "graphs of calls that write in place": (
        isolated_graph.canaries,
        lambda: pymoe.map_with_parallel_backward(lambda x: x.mul_(3), [with_gradient(0).clone()]),
    ),
    "graphs of stages": (gradients.canaries, gradients.LeafSums),
    "transforms around maps": (_transforms.canaries, _transforms.in_torch_func),
    "thread_states": (plain_state.canaries, lambda: plain_state.in_plain_state(True, int)),
    "thread_states of nodes": (recorded.canaries, lambda: recorded.is_one_node(torch.zeros(1))),
    "thread_states of maps": (
        thread_state.canaries,
        lambda: thread_state.in_state(thread_state.current(), int),
    ),
    "transforms": (_transforms.canaries, lambda: calls_of_operators.is_recorded(1)),
    "modules": (
        plain_calls.canaries,
        lambda: plain_calls.are_called_plainly((torch.nn.Linear(1, 1), torch.nn.Linear)),
    ),
    "_numbers_come_from_streams": (random_streams, random_streams.install),
    "_functions_are_heard": (interception, lambda: interception.FunctionCalls(int, bool).intercepted()),
    "_nodes_tell": (loss_graph, lambda: loss_graph.read_loss(with_gradient(0).sum(), None)),
    "_edits_are_counted": (
        dispatch,
        lambda: pymoe.ops.dispatch(
            torch.ones(1, 1), pymoe.ops.build_routing(torch.zeros(1, 1, dtype=torch.int32), 1), out=torch.empty(1, 1)
        ),
    ),
}


@pytest.mark.parametrize("use", USES)
def test_what_relies_on_a_name_calls_its_canary_first(use, monkeypatch):
    def told():
        raise RuntimeError("told first")

    module, function = USES[use]
    monkeypatch.setattr(module, use.split(" ")[0], told)
    monkeypatch.setattr(plain_calls, "_as_written", {})
    with pytest.raises(RuntimeError, match="told first"):
        function()


def test_threads_that_try_names_at_the_same_time_do_not_disturb_each_other():
    """One class counted the calls of all threads, so a map in several threads sometimes failed in its first calls."""
    failures = []
    interval = sys.getswitchinterval()

    def run():
        try:
            for check in CANARIES.values():
                if check is not CANARIES["function_calls"]:  # captures run one after the other
                    check.__wrapped__()
        except RuntimeError as error:
            failures.append(error)

    try:
        sys.setswitchinterval(1e-6)
        for _ in range(10):
            threads = [threading.Thread(target=run) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
