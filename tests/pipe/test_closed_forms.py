"""Bubbles and live activations of the schedules agree with their papers."""

import math

import pytest
from any_schedule import examples
from hypothesis import given
from hypothesis import strategies as st

from pymoe.pipe.schedules import Kind, Times, build, names, simulate

SHAPES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 8, 9, 16, 17)]
TIME = st.integers(1, 9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_the_bubble_of_gpipe_and_1f1b(name, p, m):
    record = simulate(build(name, p, m))
    assert record.bubble == pytest.approx([(p - 1) / (m + p - 1)] * p)
    assert record.mean_bubble == pytest.approx((p - 1) / (m + p - 1))
    assert record.speed_up == pytest.approx(p * m / (m + p - 1))
    assert (record.makespan, record.ideal) == (3 * (m + p - 1), 3 * m)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SHAPES if m >= p])
def test_interleaving_divides_the_bubble_by_the_virtual_stages(v, p, m):
    """The formula also holds if the number of micro-batches is not a multiple of the workers. A stage takes 1/v of
    the time.
    """
    whole = simulate(build("1f1b", p, m), Times(v, v, v))
    record = simulate(build("interleaved-1f1b", p * v, m, virtual_stages=v), Times(1, 1, 1))
    assert record.ideal == whole.ideal
    assert record.makespan - record.ideal == (whole.makespan - whole.ideal) / v
    assert record.mean_bubble == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SHAPES if m < p])
def test_interleaving_with_few_micro_batches_is_no_slower_than_1f1b(v, p, m):
    whole = simulate(build("1f1b", p, m), Times(v, v, v))
    assert simulate(build("interleaved-1f1b", p * v, m, virtual_stages=v)).makespan <= whole.makespan


@examples(60)
@given(p=st.integers(1, 7), more=st.integers(0, 9), f=TIME, i=TIME, w=TIME)
def test_the_bubble_of_zero_bubble(p, more, f, i, w):
    m = p + more
    record = simulate(build("zero-bubble", p, m), Times(f, i, w))
    assert record.makespan - record.ideal == (p - 1) * max(f, i, f + i - w)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SHAPES if m >= p > 1])
def test_zero_bubble_has_a_third_of_the_bubble_of_1f1b(p, m):
    plain, split = (simulate(build(name, p, m)) for name in ("1f1b", "zero-bubble"))
    assert plain.makespan - plain.ideal == 3 * (split.makespan - split.ideal)
    assert {order[-1].end for order in split.spans} == {split.makespan}, "all workers end together"


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_peaks_of_live_activations(p, m):
    def peaks(name, **options):
        return simulate(build(name, p, m, **options)).peak_live

    assert peaks("gpipe") == (m,) * p
    assert peaks("1f1b") == tuple(min(m, p - stage) for stage in range(p))
    assert peaks("zero-bubble") == (min(m, p),) * p
    for limit in (1, 2, p):
        assert peaks("1f1b", live_limit=limit) == tuple(min(m, p - stage, limit) for stage in range(p))
        assert max(peaks("zero-bubble", live_limit=limit)) <= min(m, p, limit)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SHAPES if p in (1, 2, 4)])
def test_live_limits_are_what_is_held(name, p, m):
    schedule = build(name, p, m)
    assert schedule.live_limits == simulate(schedule).peak_live


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_peaks_of_live_activations_when_interleaved(p, m, v):
    """Micro-batches form groups of p, or larger ones if p does not divide their number, which hold more."""
    record = simulate(build("interleaved-1f1b", p * v, m, virtual_stages=v))
    group = math.ceil(m / max(1, m // p))
    assert record.peak_live == tuple(min(m * v, 2 * (p - r - 1) + (v - 1) * group + 1) for r in range(p))


def test_a_split_backward_keeps_what_the_weights_need():
    """ZB-H1 holds p activations on every worker; if the backward of inputs frees half of each, worker r holds p - r
    activations and r halves.
    """
    record = simulate(build("zero-bubble", 4, 8))
    assert record.peak_memory() == (4, 4, 4, 4)
    assert record.peak_memory(kept=0.5) == (4, 3.5, 3, 2.5)
    assert simulate(build("1f1b", 4, 8)).peak_memory(kept=0.5) == (4, 3, 2, 1)


@pytest.mark.parametrize("m", [1, 3, 5, 8])
@pytest.mark.parametrize("name", names())
def test_gradients_are_summed_in_the_order_of_micro_batches(name, m):
    """Every schedule sums a stage's gradients in the same order, so the sums are equal to the last bit."""
    schedule = build(name, 4, m)
    for stage, worker in enumerate(schedule.placement):
        for kind in Kind:
            row = [a.micro_batch for a in schedule.orders[worker] if a.stage == stage and a.kind is kind]
            assert row in ([], list(range(m)))


def test_stages_that_workers_do_not_divide():
    """With five stages, two per worker, the last worker has one stage."""
    schedule = build("interleaved-1f1b", 5, 4, virtual_stages=2)
    assert schedule.placement == (0, 1, 2, 0, 1)
    assert [len(order) for order in schedule.orders] == [16, 16, 8]
