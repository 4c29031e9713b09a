"""Tests that the numbers that a call draws depend only on the seed and on the call's position."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from limits import LONG
from torch import nn
from torch.utils.checkpoint import checkpoint

from pymoe._torch_private import dispatch_get_all_op_names, dispatch_has_kernel_for_dispatch_key
from pymoe.autograd import random_streams
from pymoe.runtime import map_with_parallel_backward, parallel_workers, run_in_background

x = torch.rand(4, 4)

DRAWS: dict[str, Callable[[], Any]] = {
    "dropout": lambda: F.dropout(x),
    "alpha_dropout": lambda: F.alpha_dropout(x, 0.5, True),
    "dropout2d": lambda: F.dropout2d(x.view(1, 4, 2, 2)),
    "native_dropout": lambda: torch.native_dropout(x, 0.5, True)[0],
    "rand": lambda: torch.rand(5),
    "randn in float64": lambda: torch.randn(5, dtype=torch.float64),
    "randint": lambda: torch.randint(100, (5,)),
    "randperm": lambda: torch.randperm(20),
    "rand_like": lambda: torch.rand_like(x),
    "randn_like": lambda: torch.randn_like(x),
    "randint_like": lambda: torch.randint_like(x, 100),
    "normal of numbers": lambda: torch.normal(0.0, 1.0, (5,)),
    "normal of tensors": lambda: torch.normal(x, x),
    "normal of both": lambda: torch.normal(x, 1.0) + torch.normal(0.0, x),
    "bernoulli": lambda: torch.bernoulli(x),
    "bernoulli_": lambda: torch.empty(5).bernoulli_(0.5),
    "multinomial": lambda: torch.multinomial(torch.ones(30), 5),
    "poisson": lambda: torch.poisson(x * 9),
    "binomial": lambda: torch.binomial(torch.full_like(x, 9), x),
    "gamma": lambda: torch.distributions.Gamma(x, x).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(x).sample(),
    "exponential_": lambda: torch.empty(5).exponential_(),
    "geometric_": lambda: torch.empty(5).geometric_(0.1),
    "cauchy_": lambda: torch.empty(5).cauchy_(),
    "log_normal_": lambda: torch.empty(5).log_normal_(),
    "random_": lambda: torch.empty(5, dtype=torch.int64).random_(),
    "gumbel_softmax": lambda: F.gumbel_softmax(x),
    "rrelu": lambda: F.rrelu(-x, training=True),
    "attention": lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "lstm": lambda: nn.LSTM(4, 4, 2, dropout=0.5)(x)[0],
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(5)),
    "out of place": lambda: torch.ops.aten.uniform(x),
    "in place on a view": lambda: torch.zeros(4, 4)[1:].uniform_(),
}


def drawn(func: Callable[[], Any], workers: int, calls: int = 6, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    with parallel_workers(workers):
        return [out[0].detach() for out in map_with_parallel_backward(func, *[()] * calls)]


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_depends_on_seed_and_position_alone(name: str) -> None:
    first = drawn(DRAWS[name], 1)
    torch.rand(7)
    for workers in (2, 8):
        for one, other in zip(drawn(DRAWS[name], workers), first, strict=True):
            assert torch.equal(one, other)
    assert any(not torch.equal(one, first[0]) for one in first[1:])
    assert any(not torch.equal(one, other) for one, other in zip(drawn(DRAWS[name], 2, seed=1), first, strict=True))
    for one, other in zip(drawn(DRAWS[name], 2, calls=3), first[:3], strict=True):
        assert torch.equal(one, other)


def test_every_operator_that_draws_is_known() -> None:
    """Operators composed of known operators need no entry; operators that torch adds must be added, too."""
    known = set(random_streams.OPERATORS.split())
    composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    has_kernel = dispatch_has_kernel_for_dispatch_key
    missing = set()
    for name in dispatch_get_all_op_names():
        if not name.startswith("aten::") or not has_kernel(name, "CPU"):
            continue
        packet, _, overload = name[len("aten::") :].partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if torch.Tag.nondeterministic_seeded in operator.tags and not any(has_kernel(name, key) for key in composite):
            missing.add(name[len("aten::") :])
    # The first decides which kernel another one uses; the second takes no dropout.
    assert missing - known == {"_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu"}


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_training_with_dropout_is_reproducible(workers: int) -> None:
    def train(count: int) -> bytes:
        torch.manual_seed(5)
        module = nn.Sequential(nn.Linear(4, 16), nn.Dropout(), nn.Linear(16, 4), nn.Dropout(0.1))
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        with parallel_workers(count):
            for _ in range(4):
                optimizer.zero_grad()
                outputs = map_with_parallel_backward(module, *[(torch.randn(3, 4),) for _ in range(5)])
                sum(o.square().sum() for (o,) in outputs).backward()
                optimizer.step()
        return b"".join(p.detach().numpy().tobytes() for p in module.parameters())

    assert train(workers) == train(3)


def test_the_surrounding_stream_moves_on_by_one_number_if_a_call_draws() -> None:
    map_with_parallel_backward(torch.sin, (x,))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    map_with_parallel_backward(torch.sin, (x,), (x,))
    assert torch.equal(torch.get_rng_state(), before)
    map_with_parallel_backward(lambda n: torch.rand(n), (1,), (1000,), (5,))
    after = torch.get_rng_state()
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)


def test_nested_maps_draw_from_their_call() -> None:
    def nested() -> torch.Tensor:
        inner = map_with_parallel_backward(lambda: torch.rand(3), (), ())
        return torch.stack([torch.rand(3), *[out[0] for out in inner], torch.rand(3)])

    first = drawn(nested, 1)
    assert torch.cat(first).unique().numel() == torch.cat(first).numel()
    for workers in (2, 8):
        assert all(torch.equal(one, other) for one, other in zip(drawn(nested, workers), first, strict=True))


def test_checkpointed_dropout_is_repeated_in_the_backward_pass() -> None:
    inputs = [torch.ones(50, requires_grad=True) for _ in range(4)]
    outputs = map_with_parallel_backward(
        lambda tensor: checkpoint(F.dropout, tensor, use_reentrant=False), *[(tensor,) for tensor in inputs]
    )
    sum(o.sum() for (o,) in outputs).backward()
    for tensor, (output,) in zip(inputs, outputs, strict=True):
        assert torch.equal(tensor.grad, output.detach())
    assert not torch.equal(inputs[0].grad, inputs[1].grad)


def test_torchs_functions_speak_of_the_calls_stream() -> None:
    def func() -> torch.Tensor:
        state = torch.get_rng_state()
        one = torch.rand(3)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(3), one)
        with torch.random.fork_rng(devices=[]):
            torch.rand(3)
        two = torch.rand(3)
        torch.manual_seed(7)
        assert torch.initial_seed() == 7
        return torch.cat([two, torch.rand(3)])

    torch.manual_seed(3)
    outside = torch.initial_seed()
    ((one,), (two,)) = map_with_parallel_backward(func, (), ())
    assert torch.initial_seed() == outside
    assert not torch.equal(one[:3], two[:3])
    assert torch.equal(one[3:], two[3:])
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), one[3:])


def test_generators_of_the_caller_stay_his() -> None:
    generator = torch.Generator().manual_seed(1)
    ((seen,),) = map_with_parallel_backward(lambda: torch.rand(3, generator=generator), ())
    assert torch.equal(seen, torch.rand(3, generator=torch.Generator().manual_seed(1)))


def test_threads_that_run_no_call_are_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3), F.dropout(torch.ones(9))
    map_with_parallel_backward(lambda: torch.rand(3), ())
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(F.dropout(torch.ones(9)), expected[1])


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_background_calls_are_reproducible(workers: int) -> None:
    def draws(count: int) -> list[torch.Tensor]:
        torch.manual_seed(2)
        with parallel_workers(count):
            return [future.result() for future in [run_in_background(torch.rand, 3) for _ in range(5)]]

    assert torch.equal(torch.stack(draws(workers)), torch.stack(draws(3)))
    assert torch.stack(draws(workers)).unique().numel() == 15


def test_generators_of_cuda_are_the_calls_too() -> None:
    """Few machines have a CUDA device, so the test checks only the objects that replace its generators."""
    real = torch.Generator()
    generators = random_streams._CudaDefaults([real])
    assert generators[0] is real
    stream = random_streams.RandomSource().stream(0)
    assert random_streams.with_stream(stream, lambda: generators[0]) is stream.generator(real.device)


def test_random_operators_of_transforms_and_compiled_code() -> None:
    def mapped() -> torch.Tensor:
        return torch.vmap(F.dropout, randomness="different")(torch.ones(5, 9))

    first = drawn(mapped, 1)
    assert all(torch.equal(one, other) for one, other in zip(drawn(mapped, 8), first, strict=True))


# --- what is left behind


def shown() -> tuple[type, object]:
    return type(torch.random), vars(torch.random)["default_generator"]


def test_torch_random_is_as_it_was_when_the_last_call_has_ended() -> None:
    assert shown() == (types.ModuleType, torch.default_generator)
    seen = []

    def func(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(shown())
        return F.dropout(tensor)

    inputs = torch.ones(3, requires_grad=True)
    outputs = map_with_parallel_backward(func, *[(inputs,)] * 3)
    assert shown() == (types.ModuleType, torch.default_generator)
    sum(output.sum() for (output,) in outputs).backward()
    assert shown() == (types.ModuleType, torch.default_generator)
    run_in_background(func, inputs).result()
    assert len(seen) == 4
    assert all(kind is random_streams._RandomModule and type(found) is random_streams._Default for kind, found in seen)
    deadline = time.monotonic() + LONG  # a worker may be about to restore it
    while shown()[0] is not types.ModuleType and time.monotonic() < deadline:
        time.sleep(0.001)
    assert shown() == (types.ModuleType, torch.default_generator)


def test_a_failing_call_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError, match="planted"):
        map_with_parallel_backward(planted, (1,), (2,))
    assert shown() == (types.ModuleType, torch.default_generator)


def planted(number: int) -> None:
    raise ValueError(f"planted {number}")


def test_a_generator_that_others_set_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator()

    def func() -> None:
        torch.random.default_generator = own  # type: ignore[assignment]

    try:
        map_with_parallel_backward(func, ())
        assert shown() == (types.ModuleType, own)
    finally:
        torch.random.default_generator = torch.default_generator


def test_threads_outside_of_calls_see_the_generator_of_the_process_while_calls_begin_and_end() -> None:
    """Calls see their own generators, too: maps on three threads end, and restore torch.random, in any order."""
    torch.manual_seed(12345)
    wrong: list[object] = []
    ended = threading.Event()

    def outside() -> None:
        while not ended.is_set():
            if torch.initial_seed() != 12345 or torch.random.default_generator is not torch.default_generator:
                wrong.append("outside")

    def call(number: int) -> None:
        torch.manual_seed(number)
        time.sleep(0)
        if torch.initial_seed() != number:
            wrong.append(number)

    def maps(client: int) -> None:
        for step in range(150):
            map_with_parallel_backward(call, *[(1000 * client + 10 * step + number,) for number in range(1 + step % 3)])

    watcher = threading.Thread(target=outside)
    watcher.start()
    clients = [threading.Thread(target=maps, args=(client,)) for client in range(3)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    ended.set()
    watcher.join()
    assert not wrong
    assert torch.initial_seed() == 12345
    assert shown() == (types.ModuleType, torch.default_generator)


def test_a_call_that_begins_while_torch_random_is_put_back_keeps_its_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call begins after the check for running calls and before torch.random is restored."""
    random_streams.install()
    begun, may_end = threading.Event(), threading.Event()
    seen: list[object] = []

    def call() -> None:
        begun.set()
        may_end.wait(LONG)
        seen.append(shown())

    thread = threading.Thread(target=random_streams.with_stream, args=(random_streams.RandomSource().stream(0), call))

    class Lock:
        def __enter__(self) -> None:
            thread.start()
            begun.wait(LONG)

        def __exit__(self, *error: object) -> None:
            pass

    random_streams.with_stream(random_streams.RandomSource().stream(0), int)
    with monkeypatch.context() as patch:
        patch.setattr(random_streams, "_changing", Lock())
        random_streams.restore()
    may_end.set()
    thread.join()
    assert [(kind, type(found)) for kind, found in seen] == [(random_streams._RandomModule, random_streams._Default)]
    random_streams.restore()
    assert shown() == (types.ModuleType, torch.default_generator)


def test_the_kernels_stay_and_answer_to_calls_alone() -> None:
    """Maps leave behind only kernels for drawing operators, on a key that only threads with a running call include."""
    map_with_parallel_backward(torch.sin, (x,))
    with_kernels = {
        name.removeprefix("aten::")
        for name in dispatch_get_all_op_names()
        if name.startswith("aten::") and dispatch_has_kernel_for_dispatch_key(name, random_streams.KEY)
    }
    listed = set(random_streams.OPERATORS.split())
    assert with_kernels <= listed
    assert {"bernoulli_.float", "native_dropout", "random_"} <= with_kernels
    assert not torch._C._dispatch_tls_is_dispatch_key_included(random_streams._key)
    ((inside,),) = map_with_parallel_backward(
        lambda: torch._C._dispatch_tls_is_dispatch_key_included(random_streams._key), ()
    )
    assert inside
    assert not torch._C._dispatch_tls_is_dispatch_key_included(random_streams._key)
