"""Runs maps in a process whose ``pymoe._runtime`` is the sanitized library; started by build_runtime.run.

    runtime_driver.py LIBRARY maps | failures | background | pipes | race

Prints the number of calls and exits with status 0. A report of the sanitizer ends the process with another status.
"""

import ctypes
import sys
import threading
from pathlib import Path

import torch

CLIENTS, WORKERS = 3, 4
GRAPHS = 28  # for each client: every function of random_calls.py four times
SLICES = 40
STEPS = 60

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "parallel"), str(TESTS / "pipe")]

from import_as import import_as  # noqa: E402

import_as("pymoe._runtime", sys.argv[1])

from flaky import CHUNKS, Faults, Planted, expected_grads, grads_of, model, run_step  # noqa: E402
from random_maps import outcome, serial  # noqa: E402

import pymoe  # noqa: E402
from pymoe.pipe import Pipe  # noqa: E402
from pymoe.pipe.execution import plan  # noqa: E402
from pymoe.pipe.schedules import names  # noqa: E402


def on_clients(client):
    """Run ``client(number)`` on several threads at the same time; return the sum of the results, which are numbers of
    calls.
    """
    counts, errors = [], []

    def run(number):
        try:
            counts.append(client(number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts)


def maps():
    """Run random graphs, and return the number of calls in them."""
    counted = threading.Lock()
    calls = 0

    def counting(function, *args_per_call):
        nonlocal calls
        with counted:
            calls += len(args_per_call)
        return pymoe.map_with_parallel_backward(function, *args_per_call)

    def client(number):
        for seed in range(number * GRAPHS, (number + 1) * GRAPHS):
            found, expected = outcome(seed, counting), outcome(seed, serial)
            for name, wanted in expected.gradients.items():
                assert (found.gradients[name] is None) == (wanted is None)
                assert wanted is None or torch.allclose(found.gradients[name], wanted, rtol=1e-4)
        return 0

    on_clients(client)
    return calls


def failures():
    """Run maps, some of them nested, in which some calls raise in forward or in backward."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, number, x):
            if number % 7 == 3:
                raise ValueError(number)
            ctx.number = number
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            if ctx.number % 5 == 3:
                raise KeyError(ctx.number)
            return None, grad * 2

    def nested(number, x):
        return tuple(y for (y,) in pymoe.map_with_parallel_backward(Failing, (number, x), (number + 1, x)))

    def client(number):
        failed = 0
        for turn in range(SLICES):
            x = torch.ones(8, requires_grad=True)
            function = nested if turn % 2 else Failing
            try:
                results = pymoe.map_with_parallel_backward(function, *[(turn + i, x) for i in range(4)])
                torch.stack([result[0].sum() for result in results]).sum().backward()
            except (ValueError, KeyError):
                failed += 1
                assert x.grad is None
        assert failed > 0
        return 4 * SLICES

    return on_clients(client)


def background():
    """Run isolated forward passes in the background, and then their backward passes on other threads."""
    weight = torch.randn(16, 16, requires_grad=True)

    def client(number):
        for turn in range(SLICES):
            x = torch.randn(4, 16, requires_grad=True)
            futures = [
                pymoe.run_in_background(pymoe.run_isolated_forward, lambda a, b: torch.tanh(a @ b), x, weight)
                for _ in range(4)
            ]
            contexts = [future.result() for future in futures]
            backward = [
                pymoe.run_in_background(pymoe.run_isolated_backward, context, torch.ones_like(y))
                for context, (y,) in contexts
            ]
            for future in backward:
                assert future.result()[1].shape == weight.shape
            if turn % 8 == 0:
                with pymoe.runtime.parallel_workers(1 + number):  # the old workers end while the new ones start
                    assert pymoe.run_in_background(int).result() == 0
        return 8 * SLICES

    return on_clients(client)


def pipes():
    """Run steps of pipes with one thread per stage; some steps fail."""
    plan.ALWAYS_THREADS = True
    schedules = names()
    expected = expected_grads()

    def client(number):
        faults = Faults(number, rate=0.003, longest=2e-4)
        pipe = Pipe(model(faults), CHUNKS)
        right = 0
        for turn in range(STEPS):
            faults.step = turn
            try:
                run_step(pipe, faults, schedule=schedules[turn % 4])
            except Planted:
                assert grads_of(pipe) == [None] * len(expected)
                continue
            for found, wanted in zip(grads_of(pipe), expected, strict=True):
                assert torch.allclose(found, wanted, rtol=1e-12)
            right += 1
        assert 0 < right < STEPS
        return STEPS * CHUNKS * len(pipe)

    return on_clients(client)


def race():
    """Run a deliberate race in two calls of a map, which the sanitizer must report."""
    library = ctypes.CDLL(sys.argv[1])
    pymoe.map_with_parallel_backward(lambda: library.pymoe_count_together(), (), ())
    return 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    pymoe.runtime.set_parallel_workers(WORKERS)
    chosen = {f.__name__: f for f in (maps, failures, background, pipes, race)}
    for argument in sys.argv[2:]:
        print(f"{argument}: {chosen[argument]()} calls", flush=True)
