"""A live view of runtimes in a terminal.

    python -m pymoe.runtime.top [--once] [--interval SECONDS] [SOCKET or FOLDER]

shows the pools of all processes of this user that have a runtime with a monitor (``Runtime(..., monitor=True)``, or
``PYMOE_MONITOR=1`` in the environment). ``--once`` prints one plain table. ``python -m pymoe.remote top HOST:PORT``
shows the pools of a server on any machine in the same way. In the program itself,

    with pymoe.runtime.top.live(runtime):
        train()

draws the same view. With rich installed (``pip install rich``), it has colours and is updated in place.
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Protocol

from pymoe._common.command_line import CommandLine
from pymoe._common.seconds import parse_seconds
from pymoe.runtime.monitoring.formatting import COLUMNS, SIZES, Column, is_busy, lost, table
from pymoe.runtime.monitoring.socket_server import FORMAT, SUFFIX, VIEWER_TIMEOUT_S, private_folder
from pymoe.runtime.monitoring.statistics import Bucket, Distribution, PoolStats, StatsReader, pools_followed

MOST_BYTES = 1 << 24
"""Maximum number of bytes of a report; a longer one is refused."""
REPORT_TIMEOUT_S = 5 * VIEWER_TIMEOUT_S
LEAST_NEEDED = ("rows/s", "running", "batch p50", "wait p50 / p99", "queued", "rows/batch", "latency p50 / p99", "lost")
Draw = Callable[[Sequence["Report"]], None]


@dataclass(frozen=True)
class Report:
    """The content of the view for one process: a title, and the statistics of the process's pools."""

    title: str
    pools: tuple[PoolStats, ...]


class NotARuntime(Exception):
    """Raised if the other side answers with something other than a report."""


class Viewer:
    """A connection to the monitor of a runtime."""

    def __init__(self, path: Path) -> None:
        """Connect to the socket; raise OSError if no process listens there."""
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # If many viewers connect at once, connect() fails with Python's timeout set, and waits without it. So the
        # system's own timeout limits connect(), and Python's timeout is set only afterwards.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(REPORT_TIMEOUT_S), 0))
        try:
            self.socket.connect(str(path))
            self.socket.settimeout(REPORT_TIMEOUT_S)
        except OSError:
            self.socket.close()
            raise
        self.lines = self.socket.makefile("rb")

    def read(self) -> Report:
        """Return a report of the time since the previous call.

        Raises:
            OSError: the process has ended or does not answer.
            NotARuntime: the answer is not a report, or is too long.
        """
        self.socket.sendall(b"\n")
        line = self.lines.readline(MOST_BYTES + 1)
        if len(line) > MOST_BYTES:
            raise NotARuntime(f"{self.path}: more than {MOST_BYTES} bytes in a report")
        if not line.endswith(b"\n"):
            raise ConnectionError("the runtime has ended")
        return parse(line, self.path)

    def close(self) -> None:
        """Close the connection."""
        self.lines.close()
        self.socket.close()


def parse(line: bytes, path: Path) -> Report:
    """Parse a line that a monitor has sent; raise :class:`NotARuntime` if it is not a report of this format."""
    try:
        found = json.loads(line)
        if found["format"] != FORMAT:
            raise NotARuntime(f"{path}: format {found['format']}, this pymoe reads {FORMAT}")
        title = f"{found['program']} (process {int(found['pid'])}, {float(found['seconds']):.0f} s)"
        return Report(printable(title), tuple(from_dict(PoolStats, one) for one in found["pools"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotARuntime(f"{path}: not a report ({type(error).__name__}: {error})") from None


def from_dict(kind: Any, found: dict[str, Any]) -> Any:
    """Return an instance of the dataclass ``kind`` from ``found``, the result of ``dataclasses.asdict``."""
    return kind(**{one.name: READ[str(one.type)](found[one.name]) for one in fields(kind)})


def printable(text: str) -> str:
    """Return ``text`` with ``?`` for unprintable characters: a terminal would interpret control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)


READ: dict[str, Callable[[Any], Any]] = {
    "str": lambda name: printable(str(name)),
    "int": int,
    "float": float,
    "Distribution": lambda one: from_dict(Distribution, one),
    "tuple[Bucket, ...]": lambda several: tuple(from_dict(Bucket, one) for one in several),
}
"""Functions that convert the JSON of a field of the statistics, by the name of the field's type."""


class Watched:
    """Reads the monitor at a socket, or those at all sockets in a folder; each read also finds new sockets."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.viewers: dict[Path, Viewer] = {}

    def read(self) -> list[Report]:
        """Return a report for every process that answers."""
        paths = sorted(self.where.glob(f"*{SUFFIX}")) if self.where.is_dir() else [self.where]
        for path in paths:
            if path not in self.viewers:
                try:
                    self.viewers[path] = Viewer(path)
                except OSError:
                    continue  # probably left by a process that was killed
        reports = []
        for path, viewer in list(self.viewers.items()):
            try:
                reports.append(viewer.read())
            except OSError:
                viewer.close()
                del self.viewers[path]
        return reports

    def close(self) -> None:
        """Close all connections."""
        for viewer in self.viewers.values():
            viewer.close()


class Watching(Protocol):
    """A source of reports for :func:`show`: the processes of this user, or a server."""

    where: Any
    """A socket, a folder or an address, for messages."""

    def read(self) -> list[Report]:
        """Return the current reports; raise NotARuntime if an answer is not a report."""

    def close(self) -> None:
        """Close the connections."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = CommandLine(prog="python -m pymoe.runtime.top", description=description)
    parser.add_argument("where", nargs="?", type=Path, metavar="SOCKET|FOLDER", help="default: this user's runtimes")
    add_options(parser)
    options = parser.parse_args(arguments)
    try:
        watched = Watched(private_folder() if options.where is None else options.where)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return show(watched, options, must_be_there=options.where is not None)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options that :func:`show` uses."""
    parser.add_argument("--once", action="store_true", help="print one plain table and end")
    help_ = "between two views (default: 1)"
    parser.add_argument("--interval", type=parse_seconds, default=1.0, metavar="SECONDS", help=help_)


def show(watched: Watching, options: argparse.Namespace, must_be_there: bool) -> int:
    """Draw the reports of ``watched`` until Ctrl-C, or print them once; return the exit status, 1 after an error.

    Args:
        watched: the source of the reports. It is closed at the end.
        options: the parsed options of :func:`add_options`.
        must_be_there: whether to fail if there is nothing to show at first, instead of waiting; with ``--once``, it
            always fails.
    """
    try:
        if not watched.read() and (options.once or must_be_there):
            print(f"no runtime with a monitor at {watched.where}; see Runtime(..., monitor=True)", file=sys.stderr)
            return 1
        time.sleep(options.interval if options.once else 0.0)
        if options.once:
            print(text(watched.read()))
            return 0
        with drawing(sys.stdout) as draw:
            while True:
                draw(watched.read())
                time.sleep(options.interval)
    except KeyboardInterrupt:
        return 0
    except NotARuntime as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        watched.close()


@contextmanager
def live(runtime: Any, *, interval: float = 0.5, file: IO[str] | None = None) -> Iterator[None]:
    """Draw the pools of ``runtime`` every ``interval`` seconds while the block runs, and once at its end.

    Args:
        runtime: a Runtime, or another object with an attribute ``pools``.
        interval: seconds between two views.
        file: where to draw; None: standard output.
    """
    reader = StatsReader(pools_followed(runtime), recent=True)
    end = threading.Event()

    def run() -> None:
        with drawing(file or sys.stdout) as draw:
            ended = False
            while not ended:
                ended = end.wait(interval)
                draw([Report("", tuple(reader.read().values()))])

    thread = threading.Thread(target=run, name="pymoe-top", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def text(reports: Sequence[Report]) -> str:
    """Return all reports as plain tables, or a line that says that there are none."""
    if not reports:
        return "no runtime with a monitor; see Runtime(..., monitor=True)"
    return "\n\n".join((f"{one.title}\n" if one.title else "") + table(one.pools) for one in reports)


@contextmanager
def drawing(file: IO[str]) -> Iterator[Draw]:
    """Return a context manager that yields a function to draw reports.

    With rich, the function updates the view in place. If ``file`` is not a terminal or rich is not installed, it prints
    one plain table after the other.
    """
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        console = None
    else:
        console = Console(file=file)
    if console is None or not console.is_terminal:
        yield plain_drawing(file)
        return
    with Live(console=console, auto_refresh=False) as display:
        yield lambda reports: display.update(coloured(reports, console.width), refresh=True)


def plain_drawing(file: IO[str]) -> Draw:
    """Return a function that prints reports as plain tables; while there are none, the function says so only once."""
    said = False

    def draw(reports: Sequence[Report]) -> None:
        nonlocal said
        if reports or not said:
            print(text(reports), file=file, flush=True)
        said = not reports

    return draw


def coloured(reports: Sequence[Report], width: int) -> Any:
    """Return an object that rich can print, with all reports, and with as many columns as fit into ``width``."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not reports:
        return Text(text(reports), style="dim")
    columns = fitting([pool for one in reports for pool in one.pools], width)
    tables = []
    for one in reports:
        shown = Table(title=one.title or None, title_justify="left", box=None, header_style="bold", pad_edge=False)
        for column in columns:
            shown.add_column(column.heading, justify="left" if column.is_text else "right", no_wrap=True)
        for pool in one.pools:
            cells = [Text(column.cell(pool), style="green" if column is SIZES else "") for column in columns]
            shown.add_row(*cells, style="red" if lost(pool) else "" if is_busy(pool) else "dim")
        tables.append(shown)
    return Group(*tables)


def fitting(pools: Sequence[PoolStats], width: int) -> list[Column]:
    """Return the columns to show: those in ``LEAST_NEEDED`` are dropped in turn until the others fit into ``width``."""
    widths = {one: max(map(len, (one.heading, *map(one.cell, pools)))) + 2 for one in COLUMNS}
    for name in LEAST_NEEDED:
        if sum(widths.values()) <= width + 2:
            break
        widths = {one: needed for one, needed in widths.items() if one.heading != name}
    return list(widths)


if __name__ == "__main__":
    sys.exit(main())
