"""Runs child processes that answer each line of JSON on their standard input with a line on their standard output.

This file imports only the standard library, since children run in other environments.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ANSWER_LIMIT_S = 600.0
"""Maximum seconds to wait for a child's answer; on a busy machine, starting a child takes minutes."""


class ChildError(RuntimeError):
    """Raised when a child fails, ends early, or does not answer."""


class Child:
    """A process that runs ``command`` in the root of this tree.

    Args:
        command: the program and its arguments.
        variables: variables of its environment, in addition to this process's.
        limit: maximum seconds to wait for an answer.
        quiet: whether to discard the child's standard error.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        variables: Mapping[str, str] | None = None,
        *,
        limit: float = ANSWER_LIMIT_S,
        quiet: bool = True,
    ) -> None:
        self.limit = limit
        self._received = b""
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            env={**os.environ, **(variables or {})},
        )

    def send(self, request: Any) -> None:
        """Send a request; :func:`answers` or :meth:`answer` returns the reply."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise ChildError("its process ended") from None

    def answer(self) -> Any:
        """Return the next answer."""
        return answers([self])[0]

    def ask(self, request: Any) -> Any:
        """Send a request and return its answer."""
        self.send(request)
        return self.answer()

    def receive(self) -> bool:
        """Read the available output; return whether a whole line has arrived."""
        assert self.process.stdout is not None
        part = os.read(self.process.stdout.fileno(), 1 << 16)
        if not part:
            raise ChildError("its process ended")
        self._received += part
        return b"\n" in self._received

    def take(self) -> Any:
        """Return the line that has arrived, parsed."""
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def end(self, patience: float = 10.0) -> None:
        """Close the child's standard input, and kill the process if it does not end by itself."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(patience)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()

    def kill(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def answers(children: Sequence[Child]) -> list[Any]:
    """Return the next answer of each child, in their order.

    An answer that is a dictionary with ``"failure"`` ends the wait for the others, which may wait for that child.
    """
    found: dict[int, Any] = {}
    limit = min(child.limit for child in children)
    deadline = time.monotonic() + limit
    with selectors.DefaultSelector() as selector:
        for number, child in enumerate(children):
            assert child.process.stdout is not None
            selector.register(child.process.stdout, selectors.EVENT_READ, number)
        while len(found) < len(children):
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                raise ChildError(f"no answer within {limit:.0f} s")
            for key, _ in events:
                if children[key.data].receive():
                    selector.unregister(key.fd)
                    found[key.data] = children[key.data].take()
                    if isinstance(found[key.data], dict) and "failure" in found[key.data]:
                        raise ChildError(found[key.data]["failure"])
    return [found[number] for number in range(len(children))]


def serve(start: Callable[[], Callable[[Any], Any]]) -> None:
    """Call ``start``, and answer every request with the function that it returns, until the input ends.

    Output of libraries goes to standard error. An exception is answered by a dictionary with ``"failure"``.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = start()
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"failure": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
        print(json.dumps(reply), file=replies, flush=True)
