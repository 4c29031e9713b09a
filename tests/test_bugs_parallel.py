"""Tests of bugs that were found and fixed in parallel calls. Docstrings describe the bugs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from limits import LONG
from processes import run_python
from torch import nn
from torch.autograd import forward_ad

import pymoe
from pymoe.autograd import graph_nodes
from pymoe.parallel import EmulatedAutogradContext
from pymoe.runtime import (
    map_with_parallel_backward,
    parallel_workers,
    run_in_background,
    run_isolated_backward,
    run_isolated_forward,
)


def serial(func: Any, *args_per_call: Any) -> tuple[Any, ...]:
    return tuple([(func(*args),) for args in args_per_call])


def cast_to_nothing(weight: nn.Linear) -> float:
    """Return a zeroed layer's output under autocast, which is not 0 if an old cast of its weight is used."""
    with torch.no_grad():
        for parameter in weight.parameters():
            parameter.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return float(weight(torch.ones(2, 8)).detach().abs().max())


@pytest.mark.parametrize("helps", [False, True], ids=["on a worker", "on the thread that waits"])
def test_a_background_call_that_outlives_its_autocast_block_leaves_no_casts_behind(helps: bool) -> None:
    """Calls had autocast's flags set without being in a block, so the cache of casts was not cleared at their end.

    The cache belongs to the process, so later layers used the weights of the previous step.
    """
    layer, x, release = nn.Linear(8, 8), torch.randn(6, 8), threading.Event()
    with parallel_workers(1):
        if helps:
            blocker = run_in_background(release.wait, LONG)
            while not blocker.running():
                pass
        with torch.autocast("cpu", dtype=torch.bfloat16):
            future = run_in_background(lambda: (helps or release.wait(LONG), layer(x))[1])
        if not helps:
            release.set()
        assert future.result().dtype == torch.bfloat16
        release.set()
    assert cast_to_nothing(layer) == 0


def test_a_call_in_no_autocast_block_that_is_run_within_one_enters_blocks_of_its_own() -> None:
    """The autocast blocks of a call made outside autocast counted as inner blocks of the helping thread, and ended
    without clearing the cache.
    """
    layer, x, release = nn.Linear(8, 8), torch.randn(6, 8), threading.Event()

    def call() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(x)
        return cast_to_nothing(layer)

    with parallel_workers(1):
        blocker = run_in_background(release.wait, LONG)
        while not blocker.running():
            pass
        future = run_in_background(call)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert future.result() == 0
            assert torch.autocast_increment_nesting() == 2
            assert torch.autocast_decrement_nesting() == 1
        release.set()


@pytest.mark.parametrize("first_is_sparse", [False, True])
def test_a_shared_weight_may_have_sparse_and_dense_gradients(first_is_sparse: bool) -> None:
    """Gradients were summed as ``sparse + dense``, which torch refuses; autograd swaps the two."""
    weight, indices = nn.Parameter(torch.randn(5, 3)), torch.tensor([1, 2])

    def call(sparse: bool) -> torch.Tensor:
        return F.embedding(indices, weight, sparse=True).sum() if sparse else (weight * 2).sum()

    found = []
    for mapper in (map_with_parallel_backward, serial):
        weight.grad = None
        ((one,), (other,)) = mapper(call, (first_is_sparse,), (not first_is_sparse,))
        (one + other).backward()
        found.append(weight.grad)
    assert torch.equal(*found)

    class Stage(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            self.weight, self.sparse = weight, sparse

        def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            indices, h = given
            return indices, h + (F.embedding(indices, self.weight, sparse=True) if self.sparse else self.weight.sum(0))

    weight.grad = None
    pipe = pymoe.Pipe(nn.Sequential(Stage(first_is_sparse), Stage(not first_is_sparse)), chunks=2, checkpoint="never")
    pipe.step((torch.tensor([1, 2, 3, 4]), torch.zeros(4, 3)), loss_fn=lambda output: output[1].mean())
    expected = torch.tensor([1.0, 1.25, 1.25, 1.25, 1.25])[:, None].expand(5, 3) / 3
    torch.testing.assert_close(weight.grad, expected)


def test_a_served_expert_may_have_sparse_and_dense_gradients_in_one_update() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.calls = nn.Embedding(5, 3), 0

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return F.embedding(indices, self.embedding.weight, sparse=self.calls % 2 == 1)

    expert = Expert()
    before = expert.embedding.weight.detach().clone()
    backend = pymoe.ExpertBackend(
        "expert",
        expert,
        torch.optim.SGD(expert.parameters(), 0.5),
        args_schema=[pymoe.BatchTensorProto(dtype=torch.long)],
        outputs_schema=pymoe.BatchTensorProto(3),
        accumulate_steps=2,
    )
    expert.calls = 0
    for _ in range(2):
        backend.backward(torch.tensor([1, 2]), torch.ones(2, 3))
    assert backend.updates == 1
    moved = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0])[:, None].expand(5, 3)
    torch.testing.assert_close(before - expert.embedding.weight.detach(), moved)


def test_losses_that_a_module_keeps_when_workers_have_made_more_nodes_than_the_caller() -> None:
    """Autograd said "trying to backward through the graph a second time".

    It takes the latest node first, by a number that each thread counts for itself. Nodes of a busy worker came before
    the map's, which found them freed.
    """
    weight, x = torch.tensor([2.0, 3.0], requires_grad=True), torch.ones(2)
    found: list[Any] = []

    def step() -> None:  # on a new thread, which has made no nodes
        kept: list[torch.Tensor] = []
        barrier = threading.Barrier(3)

        def call(a: torch.Tensor) -> torch.Tensor:
            barrier.wait(LONG)
            y = a * weight
            kept.append(y.square().sum())
            return y

        outputs = map_with_parallel_backward(call, *[(x,)] * 3)
        (torch.stack([y.sum() for (y,) in outputs]).sum() + torch.stack(kept).sum()).backward()
        found.append(weight.grad)

    def work(barrier: threading.Barrier) -> None:
        barrier.wait(LONG)
        y = torch.ones(2, requires_grad=True)
        for _ in range(1000):
            y = y * 1.0

    with parallel_workers(2):
        for future in [run_in_background(work, barrier) for barrier in [threading.Barrier(2)] * 2]:
            future.result(LONG)
        asks = threading.Thread(target=step)
        asks.start()
        asks.join()
    assert found[0].tolist() == [15.0, 21.0]


def test_nodes_of_a_call_keep_their_order_where_some_get_other_numbers() -> None:
    """Nodes made late got the numbers of the call's earlier nodes, so gradients were summed in another order and
    their bits changed.
    """
    x = torch.ones(2, requires_grad=True)
    for _ in range(20):  # these numbers are smaller than all later ones
        x * 2
    for far in (0, 5, 9):
        steps = [x * 2]
        for _ in range(9):
            steps.append(steps[-1] * 2)
        nodes: list[Any] = [step.grad_fn for step in steps]
        limit = nodes[9 - far]._sequence_nr()
        graph_nodes.put_behind(limit, [*nodes[::2], *nodes[1::2], nodes[0].next_functions[0][0]])
        numbers = [node._sequence_nr() for node in nodes]
        assert numbers == sorted(set(numbers))
        assert numbers[-1] < limit
        (x.grad,) = torch.autograd.grad(steps[-1].sum(), x)
        assert x.grad.tolist() == [1024.0] * 2


def test_the_default_generator_stays_a_generator() -> None:
    """The object that replaced the default generator, to give each call its own, could not be passed to torch's
    operators.
    """

    def draw() -> Any:
        generator = torch.random.default_generator
        assert isinstance(generator, torch.Generator)
        torch.utils.data.DataLoader(list(range(4)), shuffle=True, generator=generator)
        return torch.randn(2, generator=generator), torch.randperm(4, generator=generator), generator.initial_seed()

    ((*_, one), (*_, other)) = map_with_parallel_backward(draw, (), ())
    draw()
    assert len({one, other, torch.initial_seed()}) == 3
    assert torch.random.default_generator is torch.default_generator
    torch.manual_seed(3)
    drawn = torch.rand(3, generator=torch.random.default_generator)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), drawn)
    with pytest.MonkeyPatch.context() as patch:
        mine = torch.Generator().manual_seed(5)
        patch.setattr(torch.random, "default_generator", mine)
        assert torch.random.default_generator is mine
        assert torch.initial_seed() == 5
    assert torch.random.default_generator is torch.default_generator
    assert torch.initial_seed() == 3


class Held:
    """An argument."""


def fail(x: torch.Tensor, held: Held) -> None:
    raise ValueError("on purpose")


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: Held) -> torch.Tensor:
        ctx.held = held
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ValueError("on purpose")


def failing_map(x: torch.Tensor, held: Held) -> None:
    map_with_parallel_backward(fail, (x, held), (x, held))


def failing_backward(x: torch.Tensor, held: Held) -> None:
    outputs = map_with_parallel_backward(FailsBackward, (x, held), (x, held))
    torch.stack([y for (y,) in outputs]).sum().backward()


def failing_background(x: torch.Tensor, held: Held) -> None:
    run_in_background(fail, x, held).result()


def failing_background_elsewhere(x: torch.Tensor, held: Held) -> None:
    run_in_background(fail, x, held).result(LONG)


@pytest.mark.thinned(usual=2)
@pytest.mark.parametrize("failing", [failing_map, failing_backward, failing_background, failing_background_elsewhere])
def test_what_a_failed_call_was_given_is_let_go_of_with_the_exception(failing: Callable[..., None]) -> None:
    """The exception's frames kept the list of exceptions, or the future, that kept the exception."""
    gone = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            held = Held()
            event = threading.Event()
            gone.append(event)
            weakref.finalize(held, event.set)
            with pytest.raises(ValueError, match="on purpose"):
                failing(torch.ones(2, requires_grad=True), held)
            del held
        # autograd's engine keeps the last error it raised, and workers release a finished call a little later.
        assert all(event.wait(LONG) for event in gone[:2])
    finally:
        gc.enable()


def test_forward_mode_derivatives_pass_through_a_map_or_are_refused() -> None:
    """Forward-mode derivatives were dropped silently: arguments became aliases without them, and outputs came from
    a node without them.
    """
    x, tangent = torch.randn(3), torch.ones(3)
    weight = torch.full((3,), 2.0, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        ((y,), (z,)) = map_with_parallel_backward(lambda a: a * 2, (dual,), (x,))
        assert forward_ad.unpack_dual(y).tangent.tolist() == [2.0] * 3
        assert forward_ad.unpack_dual(z).tangent is None
        with torch.no_grad():
            ((y,),) = map_with_parallel_backward(lambda a: a * weight, (dual,))
        assert forward_ad.unpack_dual(y).tangent.tolist() == [2.0] * 3
        for argument in (dual, forward_ad.make_dual(x.clone().requires_grad_(), tangent)):
            with pytest.raises(NotImplementedError):
                map_with_parallel_backward(lambda a: a * weight, (argument,), (x,))
    (jvp,) = torch.func.jvp(lambda a: map_with_parallel_backward(torch.sin, (a,))[0], (x,), (tangent,))[1]
    torch.testing.assert_close(jvp, x.cos())


def test_isolated_passes_in_the_words_of_older_code() -> None:
    """Passing the function before the context, as in older code, ended in an AttributeError from pymoe's internals."""
    x = torch.full((2,), 3.0, requires_grad=True)
    context, _ = run_isolated_forward(Squares, x)
    assert isinstance(context, EmulatedAutogradContext)
    assert context.saved_tensors[0].tolist() == [3.0, 3.0]
    with pytest.raises(TypeError, match=r"context must be the IsolatedContext that .* got int"):
        run_isolated_backward(3)  # type: ignore[arg-type]
    assert run_isolated_backward(Squares, context, torch.ones(2))[0].tolist() == [6.0, 6.0]
    assert context.saved_tensors == ()
    by_hand = EmulatedAutogradContext()
    assert by_hand.saved_tensors == ()
    assert Squares.forward(by_hand, x).tolist() == [9.0, 9.0]
    assert Squares.backward(by_hand, torch.ones(2)).tolist() == [6.0, 6.0]
    with pytest.raises(TypeError, match="context must be the IsolatedContext"):
        run_isolated_backward(by_hand, torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["calls", "pipe"])
def test_workers_heed_the_number_of_torchs_threads(how: str) -> None:
    """If a thread's first operation was a matrix product, it used as many threads as there are processors.

    These spin while they wait for each other: on one processor, a step of a pipe took 0.65 s instead of 0.002 s.
    """
    script = """
        import os, threading, time
        os.environ["OMP_NUM_THREADS"] = "4"
        import torch
        from torch import nn
        torch.set_num_threads(1)
        from pymoe.parallel import parallel_workers, map_with_parallel_backward
        from pymoe.pipe import Pipe
        from pymoe.pipe.execution import plan

        class Product(nn.Module):
            def forward(self, x):
                if threading.current_thread() is threading.main_thread():
                    time.sleep(0.2)
                    return x
                with lock:
                    before = set(os.listdir("/proc/self/task"))
                    y = x @ x
                    # A thread that was joined may still be there for a moment, so the new ones are counted.
                    found.append(len(set(os.listdir("/proc/self/task")) - before))
                return y

        def wait(x):  # until both workers have started
            time.sleep(0.2)
            return x

        found, lock, x = [], threading.Lock(), torch.ones(256, 256)
        if {pipe}:
            plan.ALWAYS_THREADS = True
            Pipe(nn.Sequential(nn.Identity(), Product()), chunks=1, checkpoint="never")(x)
        else:
            with parallel_workers(2):
                map_with_parallel_backward(wait, *[(x,)] * 4)
                map_with_parallel_backward(Product(), *[(x,)] * 4)
        print(set(found))
    """
    done = run_python(script.replace("{pipe}", str(how == "pipe")))
    assert done.stdout == "{0}\n", done.stdout + done.stderr


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * grad
