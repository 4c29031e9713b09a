"""The deadlines of a pool's requests, and how long a batch knows that its clients will wait."""

from __future__ import annotations

import pytest
import torch
from limits import LONG
from torch import Tensor

from pymoe._runtime import patience_of_batch
from pymoe.runtime import Runtime, TaskPool

INFINITY = float("inf")


def test_a_pool_has_a_timeout_for_requests_without_one() -> None:
    pool = TaskPool(lambda x: x, name="pool", request_timeout=0.01)
    late = [pool.submit_task(torch.ones(1)), pool.submit_task(torch.ones(1), timeout=None)]
    patient = pool.submit_task(torch.ones(1), timeout=LONG)
    for one in late:
        with pytest.raises(TimeoutError, match="had not started in time"):
            one.result()
    with Runtime([pool]):
        assert patient.result() == 1


@pytest.mark.parametrize(
    ("timeouts", "least", "most"),
    [
        ([None, LONG / 2], LONG / 2, LONG),
        ([LONG, 3 * LONG], 2 * LONG, 3 * LONG),
        ([None, INFINITY], INFINITY, INFINITY),
    ],
)
def test_a_batch_knows_the_patience_of_those_who_wait_for_it(
    timeouts: list[float | None], least: float, most: float
) -> None:
    seen: list[float | None] = []
    pool = TaskPool(lambda x: (seen.append(patience_of_batch()), x)[1], name="pool", request_timeout=LONG)
    futures = [pool.submit_task(torch.ones(1), timeout=timeout) for timeout in timeouts]
    pool.submit_task(torch.ones(1), timeout=9 * LONG)  # its future was dropped
    with Runtime([pool]):
        assert all(future.result() == 1 for future in futures)
    (found,) = seen
    assert found is not None
    assert least <= found <= most


def test_a_batch_for_which_nobody_waits_has_no_patience_and_one_inside_another_has_its_own() -> None:
    seen: list[float | None] = []

    def ask(x: Tensor) -> Tensor:
        seen.append(patience_of_batch())
        result = inner.submit_task(x, timeout=3 * LONG).result()
        seen.append(patience_of_batch())
        return result  # type: ignore[no-any-return]

    inner = TaskPool(lambda x: (seen.append(patience_of_batch()), x)[1], name="inner")
    pool = TaskPool(ask, name="pool", max_batch_size=1)
    pool.submit_task(torch.ones(1), timeout=LONG)
    with Runtime([pool, inner]):
        assert pool.submit_task(torch.ones(1), timeout=LONG).result() == 1
    nobody, within, nobody_again, *mine = seen
    assert nobody is None
    assert nobody_again is None
    assert within is not None
    assert 2 * LONG < within <= 3 * LONG
    first, second, third = (found or 0.0 for found in mine)
    assert 0 < third <= first <= LONG
    assert 2 * LONG < second <= 3 * LONG
    assert patience_of_batch() is None
