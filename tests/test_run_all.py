"""Tests of the time limit of the project's checks, with simple commands as steps."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import run_all
from limits import LONG
from run_all import Step

HANG = "import os, subprocess, sys; print('begun', flush=True); "
HANG += "subprocess.Popen([sys.executable, '-c', {child!r}], {how})"
SLEEP = f"import time; time.sleep({LONG}); print('left')"
STOPPED, NOT_RUN = "stopped: no time was left", "not run: no time was left"


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    monkeypatch.setattr(run_all, "RESULTS", tmp_path)
    return tmp_path


def step(*programs: str) -> Step:
    return Step("step", "a step", [[sys.executable, "-c", program] for program in programs])


@pytest.mark.parametrize("how", ["", "preexec_fn=os.setpgrp"], ids=["child", "child of ninja"])
@pytest.mark.parametrize("waits", [f"; import time; time.sleep({2 * LONG})", ""], ids=["waits", "has ended"])
def test_a_step_is_stopped_with_all_that_it_has_started(how: str, waits: str, results: Path) -> None:
    """A child that was left would hold the pipe of the step's output, and the run would wait for it. ninja gives each
    of its children a process group of its own.
    """
    end = time.monotonic() + 2.0
    passed, outcome, _ = run_all.run(step(HANG.format(child=SLEEP, how=how) + waits, "print('next')"), end)
    assert (passed, outcome) == (True, STOPPED)
    assert (results / "step.log").read_text() in ("begun\n", "")  # empty: the machine took 2 s to start Python


def test_after_the_end_no_step_is_run(results: Path) -> None:
    passed, outcome, seconds = run_all.run(step("raise SystemExit(1)"), time.monotonic())
    assert (passed, outcome, seconds) == (True, NOT_RUN, 0.0)
    assert not list(results.iterdir())


@pytest.mark.parametrize("end", [None, 1e9], ids=["no end", "an end far away"])
def test_a_step_that_fails_in_time_has_failed(end: float | None, results: Path) -> None:
    passed, outcome, _ = run_all.run(step("print('1 failed'); raise SystemExit(3)", "print('next')"), end)
    assert (passed, outcome) == (False, "1 failed (exit status 3)")
    assert (results / "step.log").read_text() == "1 failed\n"


@pytest.mark.parametrize(
    ("outcomes", "status", "says"),
    [
        ([(True, "1 passed"), (True, STOPPED)], 0, "not finished: second; no other step failed in"),
        ([(True, STOPPED), (True, NOT_RUN)], 0, "not finished: first, second; no other step failed in"),
        ([(False, "1 failed"), (True, NOT_RUN)], 1, "FAILED: first"),
        ([(True, "1 passed"), (True, "2 passed")], 0, "all 2 steps passed in"),
    ],
)
def test_what_was_left_is_named_and_does_not_hide_a_failure(
    outcomes: list[tuple[bool, str]],
    status: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = iter(outcomes)
    monkeypatch.setattr(run_all, "steps_of", lambda level: [Step("first", "", []), Step("second", "", [])])
    monkeypatch.setattr(run_all, "run", lambda step, end: (*next(left), 1.0))
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--seconds", "5"])
    assert run_all.main() == status
    *_, first, second, verdict = capsys.readouterr().out.splitlines()
    assert verdict.startswith(says)
    words = {True: "ok", False: "FAIL"}
    for line, (passed, outcome) in zip((first, second), outcomes, strict=True):
        assert line.split()[0] == ("left" if outcome in (STOPPED, NOT_RUN) else words[passed])
