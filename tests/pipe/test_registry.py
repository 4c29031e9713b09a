"""A decorated function becomes a schedule; unknown names, options and invalid numbers are refused."""

import pytest

from pymoe.pipe.schedules import Action, Kind, Schedule, ScheduleError, build, names, options, register, schedule


@pytest.fixture(autouse=True)
def _names_as_they_were(monkeypatch):
    monkeypatch.setattr(schedule, "_builders", dict(schedule._builders))


def test_there_are_four_schedules():
    assert names() == ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")
    limited = ("live_limit",)
    assert [options(name) for name in names()] == [(), limited, ("virtual_stages",), limited]


def one_after_the_other(stages, micro_batches, *, repeats=1):
    """Return a schedule with one worker, which runs one micro-batch after the other."""
    forth = range(stages)
    order = [
        step
        for i in range(micro_batches)
        for step in [Action(s, i, Kind.FORWARD) for s in forth] + [Action(s, i, Kind.BACKWARD) for s in forth[::-1]]
    ]
    return Schedule("mine", micro_batches, (0,) * stages, (tuple(order * repeats),))


def test_a_decorated_function_is_a_schedule():
    assert register("mine")(one_after_the_other) is one_after_the_other
    assert names()[-1] == "mine"
    assert options("mine") == ("repeats",)
    assert str(build("mine", 2, 1)) == "mine: 2 stages, 1 micro-batches\nworker 0: 0F0 1F0 1B0 0B0"
    assert build("mine", 2, 1, repeats=None) == build("mine", 2, 1)


def test_what_a_builder_makes_is_judged():
    register("mine")(one_after_the_other)
    with pytest.raises(ScheduleError, match="worker 0, position 4, action 0F0: done before, at position 0"):
        build("mine", 2, 1, repeats=2)
    register("smaller")(lambda stages, micro_batches: one_after_the_other(stages, micro_batches - 1))
    with pytest.raises(ScheduleError, match="'smaller': asked for 2 stages and 3 micro-batches, got 2 and 2"):
        build("smaller", 2, 3)


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match=r"'gpipe' is registered already, by pymoe\.pipe\.schedules\.schedule"):
        register("gpipe")(one_after_the_other)


@pytest.mark.parametrize(
    ("arguments", "chosen", "match"),
    [
        (("gpip", 2, 2), {}, "no schedule 'gpip': there are gpipe, 1f1b, interleaved-1f1b, zero-bubble"),
        (("gpipe", 2, 2), {"live_limit": 1}, "schedule 'gpipe' has no live_limit: it has no options"),
        (("1f1b", 2, 2), {"virtual_stages": 1}, "schedule '1f1b' has no virtual_stages: it has live_limit"),
        (("1f1b", 0, 2), {}, "stages must be a positive integer, got 0"),
        (("1f1b", 2, -1), {}, "micro_batches must be a positive integer, got -1"),
        (("1f1b", 2, 2.0), {}, r"micro_batches must be a positive integer, got 2\.0"),
        (("1f1b", True, 2), {}, "stages must be a positive integer, got True"),
        (("1f1b", 2, 2), {"live_limit": 0}, "live_limit must be a positive integer, got 0"),
        (("interleaved-1f1b", 2, 2), {"virtual_stages": 0}, "virtual_stages must be a positive integer, got 0"),
    ],
)
def test_a_wrong_call_is_refused(arguments, chosen, match):
    with pytest.raises(ValueError, match=match):
        build(*arguments, **chosen)


def test_a_schedule_cannot_be_changed():
    schedule = build("1f1b", 2, 2)
    with pytest.raises(AttributeError):
        schedule.name = "mine"
    assert hash(schedule) == hash(build("1f1b", 2, 2))
