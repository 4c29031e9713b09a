"""Tests that ThreadSanitizer finds no race in the runtime under maps and pipes, and finds a planted one.

Only pymoe's own code is instrumented. Of torch and Python, ThreadSanitizer sees locks, threads and allocations.
"""

import re

import pytest


@pytest.fixture(scope="module")
def run_watched(watched):
    """Build the runtime with ThreadSanitizer; return a function that runs tests/sanitized/runtime_driver.py on it."""
    watched.build()
    return watched.run


def test_no_race_in_random_graphs_failures_and_background_functions(run_watched):
    result = run_watched("maps", "failures", "background")
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[:6000]
    calls = {name: int(count) for name, count in re.findall(r"^(\w+): (\d+) calls$", result.stdout, re.MULTILINE)}
    assert calls.keys() == {"maps", "failures", "background"}
    assert sum(calls.values()) >= 1500


def test_no_race_in_the_threads_of_pipes(run_watched):
    result = run_watched("pipes")
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[:6000]
    assert int(re.search(r"^pipes: (\d+) calls$", result.stdout, re.MULTILINE)[1]) >= 1000


def test_a_race_that_is_planted_in_two_calls_of_a_map_is_reported(run_watched, watched):
    result = run_watched("race")
    assert result.returncode == watched.RACE_FOUND
    assert "ThreadSanitizer: data race" in result.stderr
    assert "pymoe_count_together" in result.stderr


def test_suppressions_are_few_and_each_has_its_reason(watched):
    lines = watched.SUPPRESSIONS.read_text().splitlines()
    suppressed = [line for line in lines if line and not line.startswith("#")]
    assert len(suppressed) <= 20
    assert all(lines[lines.index(line) - 1].startswith("#") for line in suppressed)
