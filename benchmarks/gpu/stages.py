"""Runs the stages of a long report one after another, each in a separate process, within one time limit.

If a stage fails, hangs or crashes, the results of earlier stages are already written and later stages still run. Each
stage has reserved time, so that a slow stage cannot starve later ones, and may also use time that earlier stages left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TAIL_LINES = 40
SECONDS = "{seconds}"
"""Placeholder in a command for the seconds the stage is given, less a margin for writing its results."""
PASSED, FAILED, TIMED_OUT, DID_NOT_RUN = "passed", "failed", "timed out", "did not run"


@dataclass(frozen=True)
class Stage:
    """One command, which writes its results to its own file while it runs."""

    name: str
    about: str
    command: Sequence[str]
    reserved: float
    """Seconds that are reserved for this stage."""
    most: float
    """Maximum seconds that this stage may take if earlier stages left time."""
    after: tuple[str, ...] = ()
    """Stages that must pass before this one can run."""
    missing: str = ""
    """The reason why this stage cannot run on this machine; empty if it can."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """The result of a stage."""

    stage: str
    about: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    allowed: float = 0.0
    tail: list[str] = field(default_factory=list)


def run_stages(stages: Sequence[Stage], folder: Path, limit: float, reserve: float = 0.0) -> list[Outcome]:
    """Run ``stages`` within ``limit`` seconds; write ``stage_NAME.json`` into ``folder`` as each one ends."""
    start = time.monotonic()
    outcomes: list[Outcome] = []
    for number, stage in enumerate(stages):
        later = sum(one.reserved for one in stages[number + 1 :] if not one.missing)
        left = limit - reserve - (time.monotonic() - start)
        allowed = min(stage.most, max(left - later, min(stage.reserved, left)))
        outcome = refused(stage, outcomes, allowed) or run(stage, allowed)
        outcome.allowed = round(max(allowed, 0.0), 1)
        outcomes.append(outcome)
        write_json(folder / f"stage_{stage.name}.json", asdict(outcome))
        print(
            f"    {outcome.status}{': ' + outcome.reason if outcome.reason else ''} ({outcome.seconds:.0f} s)",
            flush=True,
        )
    return outcomes


def refused(stage: Stage, before: Sequence[Outcome], allowed: float) -> Outcome | None:
    """Return the outcome of a stage that cannot be started; None if it can."""
    reason = stage.missing
    status = {outcome.stage: outcome.status for outcome in before}
    for name in stage.after:
        if not reason and status.get(name, PASSED) != PASSED:
            reason = f"{name} {status[name]}"
    if not reason and allowed < min(stage.reserved, 5.0):
        reason = "no time was left"
    if not reason:
        return None
    print(f"=== {stage.name}: {stage.about}", flush=True)
    return Outcome(stage.name, stage.about, DID_NOT_RUN, scrubbed(reason))


def run(stage: Stage, allowed: float) -> Outcome:
    """Run a stage for at most ``allowed`` seconds; end every process that it started along with it."""
    print(f"=== {stage.name}: {stage.about} (at most {allowed:.0f} s)", flush=True)
    start = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment}
    reason, status, text = "", PASSED, ""
    command = [part if part != SECONDS else f"{0.85 * allowed:.1f}" for part in stage.command]
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Outcome(stage.name, stage.about, FAILED, scrubbed(f"could not be started: {error}"))
    try:
        text, _ = process.communicate(timeout=allowed)
        if process.returncode != 0:
            status, reason = FAILED, ended(process.returncode)
    except subprocess.TimeoutExpired:
        status, reason = TIMED_OUT, f"after {allowed:.0f} s"
        text = stop(process)
    finally:
        end_session(process, signal.SIGKILL)  # end any processes that the stage left behind
    tail = [scrubbed(line) for line in text.splitlines()[-TAIL_LINES:]]
    return Outcome(stage.name, stage.about, status, reason, round(time.monotonic() - start, 1), tail=tail)


def stop(process: subprocess.Popen[str]) -> str:
    """End a process and its children; return what it printed."""
    end_session(process, signal.SIGTERM)
    try:
        return process.communicate(timeout=3)[0]
    except subprocess.TimeoutExpired:
        end_session(process, signal.SIGKILL)
    try:
        return process.communicate(timeout=3)[0]
    except subprocess.TimeoutExpired as error:  # a process outside the session holds the pipe
        output = error.stdout or ""
        return output.decode(errors="replace") if isinstance(output, bytes) else output


def end_session(process: subprocess.Popen[str], by: signal.Signals) -> None:
    """Send a signal to every process of the session that ``run`` gave a stage.

    A signal to the process group would miss compilers, because ninja starts each in a group of its own.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) == process.pid:
                    os.kill(int(entry.name), by)


def ended(status: int) -> str:
    """Return an exit status in words."""
    if status < 0:
        return f"ended by signal {signal.Signals(-status).name}"
    return f"exit status {status}"


PLACES = sorted(
    {(str(ROOT), "."), (str(Path.home()), "~"), (sys.prefix, "python"), (sys.base_prefix, "python")},
    key=lambda pair: -len(pair[0]),
)
HOST = re.compile(rf"\b{re.escape(os.uname().nodename or 'localhost')}\b")
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])/(?:[\w.+@=-]+/)+(?=[\w.+@=-])")


def scrubbed(text: str) -> str:
    """Return ``text`` without this machine's name and paths: only the last part of an absolute path remains."""
    for place, name in PLACES:
        if len(place) > 1:
            text = text.replace(place, name)
    return HOST.sub("host", ABSOLUTE_PATH.sub("", text))


def scrubbed_value(value: Any) -> Any:
    """Apply :func:`scrubbed` to every string in a JSON value."""
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, Mapping):
        return {key: scrubbed_value(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrubbed_value(part) for part in value]
    return value


def write_json(file: Path, value: Any) -> None:
    """Write ``value`` atomically, with the machine's name and paths removed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".unfinished")
    unfinished.write_text(json.dumps(scrubbed_value(value), indent=1) + "\n")
    unfinished.replace(file)


def read_json(file: Path) -> Any:
    """Return the value in a JSON file; None if the file is missing or malformed."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
