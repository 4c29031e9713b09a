"""Pools and backends that are added to a running runtime, and removed."""

from __future__ import annotations

import concurrent.futures
import logging
import signal
import threading
import time

import pytest
import torch
from mixtures import LONG, Stuck, scaled
from torch import Tensor

from pymoe.runtime import Runtime, TaskPool, top
from pymoe.runtime.monitoring.statistics import StatsReader, pools_followed

ONE = torch.ones(1)


def pool_of(name: str, process: object = lambda x: x + 1, **options: object) -> TaskPool:
    return TaskPool(process, name=name, **options)  # type: ignore[arg-type]


def test_what_is_added_is_served_from_then_on() -> None:
    first, second = pool_of("first"), pool_of("second")
    early = second.submit_task(ONE)
    with Runtime([first], num_workers=1) as runtime:
        assert not second.served
        runtime.add(second)
        assert early.result(LONG) == 2
        assert second.served
        assert runtime.pools == (first, second)
        runtime.add(second)  # again: nothing
        assert runtime.pools == (first, second)
        assert first(ONE) == second(ONE) == 2
    with pytest.raises(RuntimeError, match="closed"):
        second.submit_task(ONE)


def test_what_is_added_before_the_start_or_between_two_is_served_by_the_next() -> None:
    first, second, third = pool_of("first"), pool_of("second"), pool_of("third")
    runtime = Runtime([first])
    runtime.add(second)
    assert not second.served
    with runtime:
        assert second(ONE) == 2
    runtime.remove(first)
    runtime.add(third)
    with runtime:
        assert third(ONE) == 2
        assert runtime.pools == (second, third)
        with pytest.raises(RuntimeError, match="closed"):
            first.submit_task(ONE)


def test_what_is_removed_drains_and_the_others_are_served() -> None:
    stuck = Stuck()
    leaving = pool_of("leaving", lambda x: stuck(x) or x, max_batch_size=1)
    staying = pool_of("staying")
    with Runtime([leaving, staying], num_workers=2) as runtime:
        futures = [leaving.submit_task(ONE) for _ in range(5)]
        assert stuck.begun.wait(LONG)
        remover = threading.Thread(target=runtime.remove, args=(leaving,))
        remover.start()
        while True:  # until it is closed
            try:
                futures.append(leaving.submit_task(ONE))
            except RuntimeError:
                break
        assert staying(ONE) == 2
        assert remover.is_alive()
        stuck.open.set()
        remover.join(LONG)
        assert all(future.result(0) == 1 for future in futures)
        assert runtime.pools == (staying,)
        assert not leaving.served
        assert set(runtime.stats()) == {"staying"}
        runtime.add(leaving)  # opens it again
        assert leaving(ONE) == 1


class Both:
    """A member with two pools, which leave together."""

    def __init__(self, *pools: TaskPool) -> None:
        self.pools = pools

    def get_pools(self) -> tuple[TaskPool, ...]:
        return self.pools


def test_a_hung_batch_does_not_hold_up_who_removes_longer_than_the_timeout() -> None:
    stuck = Stuck()
    idle, hung = pool_of("idle"), pool_of("hung", lambda x: stuck(x) or x, max_batch_size=1)
    staying = pool_of("staying")
    with Runtime([Both(idle, hung), staying], num_workers=2) as runtime:
        futures = [hung.submit_task(ONE) for _ in range(2)]
        assert stuck.begun.wait(LONG)
        for timeout in (0.0, 0.02):
            with pytest.raises(TimeoutError, match=r"requests of \['idle', 'hung'\] are not done after"):
                runtime.remove(Both(idle, hung), timeout=timeout)
            assert runtime.pools == (idle, hung, staying)
            for pool in (idle, hung):
                with pytest.raises(RuntimeError, match="closed"):
                    pool.submit_task(ONE)
            assert staying(ONE) == 2
        runtime.add(Both(idle, hung))  # opens them
        assert idle(ONE) == 2
        futures.append(hung.submit_task(ONE))
        stuck.open.set()
        assert [float(future.result(LONG)) for future in futures] == [1.0] * 3
        runtime.remove(Both(idle, hung), timeout=LONG)
        assert runtime.pools == (staying,)


def test_what_an_interrupted_remove_has_closed_can_be_opened_again() -> None:
    stuck = Stuck()
    hung = pool_of("hung", lambda x: stuck(x) or x)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while True:  # until it is closed
            try:
                hung.submit_task(ONE)
            except RuntimeError:
                signal.pthread_kill(main, signal.SIGINT)
                return

    with Runtime([hung, pool_of("other")], num_workers=2) as runtime:
        future = hung.submit_task(ONE)
        assert stuck.begun.wait(LONG)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                runtime.remove(hung, timeout=LONG)
        finally:
            signal.signal(signal.SIGINT, before)
        runtime.add(hung)
        later = hung.submit_task(ONE)
        stuck.open.set()
        assert later.result(LONG) == future.result(LONG) == 1


def test_without_drain_what_has_not_begun_is_cancelled() -> None:
    never = pool_of("never", min_batch_size=100)
    with Runtime([never, pool_of("other")]) as runtime:
        future = never.submit_task(ONE)
        runtime.remove(never, drain=False)
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(LONG)


def test_what_was_removed_may_go_to_another_runtime() -> None:
    moving, other = pool_of("moving"), pool_of("other")
    with Runtime([moving]) as first, Runtime([other]) as second:
        with pytest.raises(RuntimeError, match="another Runtime"):
            second.add(moving)
        assert second.pools == (other,)
        assert moving(ONE) == other(ONE) == 2
        first.remove(moving)
        second.add(moving)
        assert moving(ONE) == 2
        assert first.pools == ()


def test_a_refused_backend_is_not_added_in_part() -> None:
    served, fresh = pool_of("served"), pool_of("fresh")

    class Both:
        def get_pools(self) -> list[TaskPool]:
            return [fresh, served]

    with Runtime([served]), Runtime([pool_of("other")]) as second:
        with pytest.raises(RuntimeError, match="another Runtime"):
            second.add(Both())
        assert not fresh.served
        future = fresh.submit_task(ONE)
        assert not future.done()
        assert served(ONE) == 2
    with Runtime([fresh]):
        assert future.result(LONG) == 2


def test_a_backend_comes_and_goes_with_both_its_pools() -> None:
    one, two = scaled(None, None, lr=None)
    x = torch.ones(2, 4, dtype=torch.float64)
    with Runtime([one], num_workers=1) as runtime:
        runtime.add(two)
        assert torch.equal(two.forward_pool(x)[0], 2 * x)
        assert torch.equal(two.backward_pool(x, x)[0], 2 * x)
        with pytest.raises(ValueError, match="is mutually exclusive with one of"):
            runtime.remove(two.forward_pool)
        runtime.remove(two)
        with pytest.raises(ValueError, match="not served here"):
            runtime.remove(two)
        assert list(runtime.stats()) == ["e0_forward", "e0_backward"]
        runtime.add(two.forward_pool)
        runtime.add(two.backward_pool)  # added together with the other pool
        assert torch.equal(two.backward_pool(x, x)[0], 2 * x)


def test_a_batch_may_add_and_may_not_remove() -> None:
    new = pool_of("new")

    def process(x: Tensor) -> Tensor:
        runtime.add(new)
        with pytest.raises(RuntimeError, match="cannot wait"):
            runtime.remove(new)
        return x

    pool = pool_of("pool", process)
    with Runtime([pool], num_workers=1) as runtime:
        future = pool.submit_task(ONE)
        while not future.done():  # a worker runs it
            time.sleep(0.001)
        assert future.result(0) == 1
        assert new(ONE) == 2


def test_what_has_no_pools_is_refused() -> None:
    with Runtime([pool_of("pool")]) as runtime:
        for function in (runtime.add, runtime.remove):
            with pytest.raises(TypeError, match="get_pools"):
                function(object())


def test_pools_come_and_go_from_many_threads_under_load() -> None:
    base = pool_of("base")
    results: list[float] = []
    errors: list[BaseException] = []

    def come_and_go(number: int) -> None:
        try:
            for round_ in range(15):
                mine = pool_of(f"p{number}", lambda x: x * 2)
                runtime.add(mine)
                futures = [mine.submit_task(ONE * i) for i in range(10)]
                runtime.remove(mine, drain=True)
                results.extend(float(future.result(0)) for future in futures)
                runtime.stats()
                assert base(ONE) == 2, round_
        except BaseException as error:
            errors.append(error)

    with Runtime([base], num_workers=2) as runtime:
        threads = [threading.Thread(target=come_and_go, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        assert runtime.pools == (base,)
    assert not errors
    assert sorted(results) == sorted(2.0 * i for i in range(10) for _ in range(60))


# --- who watches ---


def test_statistics_follow() -> None:
    first, second, twin = pool_of("p"), pool_of("q"), pool_of("p")
    for _ in range(3):
        with Runtime([twin]):
            twin(ONE)
    with Runtime([first]) as runtime:
        recent = StatsReader(pools_followed(runtime), recent=True)
        runtime.add(second)
        runtime.add(twin)
        second(ONE)
        twin(ONE)
        assert {name: one.completed for name, one in runtime.stats().items()} == {"p": 0, "q": 1, "p#2": 4}
        seen = recent.read()
        assert (seen["q"].completed, seen["p#2"].completed) == (1, 1)  # earlier requests do not count
        runtime.remove(first)
        assert set(runtime.stats()) == {"q", "p#2"}  # names stay
        twin(ONE)
        assert recent.read()["p#2"].completed == 1


def test_log_and_live_view_follow(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    late = pool_of("late")
    runtime = Runtime([pool_of("p")], stats_interval=3600.0)
    with caplog.at_level(logging.INFO, "pymoe.runtime"), runtime, top.live(runtime, interval=3600.0):
        runtime.add(late)
        late(ONE)
    assert any(record.message.startswith("late: ") for record in caplog.records)
    assert "late" in capsys.readouterr().out


def test_what_is_still_being_removed_cannot_be_added() -> None:
    stuck = Stuck()
    leaving = pool_of("leaving", lambda x: stuck(x) or x)
    staying = pool_of("staying")
    with Runtime([leaving, staying], num_workers=1) as runtime:
        last = leaving.submit_task(ONE)
        assert stuck.begun.wait(LONG)
        removers = [threading.Thread(target=runtime.remove, args=(leaving,)) for _ in range(2)]
        for remover in removers:
            remover.start()
        deadline = time.monotonic() + LONG
        while len(runtime._leaving) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="'leaving' is still being removed"):
            runtime.add(leaving)
        stuck.open.set()
        for remover in removers:
            remover.join(LONG)
        assert last.result(LONG) == 1
        assert runtime.pools == (staying,)
        runtime.add(leaving)
        assert leaving(ONE) == 1
