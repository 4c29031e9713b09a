"""Command-line interface for servers of experts.

- ``python -m pymoe.remote serve MODULE:FUNCTION`` serves the experts that a function returns, until SIGTERM, Ctrl-C
  or ``drain``;
- ``python -m pymoe.remote info HOST:PORT`` prints the description of a server;
- ``python -m pymoe.remote drain HOST:PORT`` makes a server answer current requests, save, and end;
- ``python -m pymoe.remote top HOST:PORT`` shows a live view of a server's pools.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from pymoe._common.command_line import CommandLine
from pymoe.remote import wire
from pymoe.remote.client import Connection, connect
from pymoe.remote.errors import ProtocolError, ServerLost
from pymoe.remote.security import TLS, check_address
from pymoe.remote.server import ExpertServer
from pymoe.runtime import ExpertBackend
from pymoe.runtime.monitoring.statistics import pool_stats
from pymoe.runtime.top import NotARuntime, Report, add_options, printable, show

PROGRAM = "python -m pymoe.remote"
DRAIN_CHECK_S = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. If it fails, print the error and return 1.

    Raises:
        SystemExit: the options are wrong (status 2, after a message), or ask for help.
    """
    parser = CommandLine(prog=PROGRAM, description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    abouts = {"info": "describe a server", "drain": "make a server save and end", "top": "show a live view"}
    for name, about in abouts.items():
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("address", metavar="HOST:PORT")
        _add_security(command, "authorities for the server's certificate")
        if name == "top":
            add_options(command)
            continue
        seconds = 10.0 if name == "info" else 60.0  # a draining server first answers current requests and saves
        command.add_argument(
            "--timeout", type=float, default=seconds, metavar="SECONDS", help=f"(default: {seconds:g})"
        )
        if name == "info":
            command.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    try:
        return {"serve": serve, "info": info, "drain": drain, "top": watch}[options.command](options)
    except (OSError, ValueError, TypeError, RuntimeError, LookupError, ImportError, OverflowError) as error:
        # A ValueError mostly means a wrong option, and the name of its type would say nothing more.
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        print(printable(f"{PROGRAM} {options.command}: {kind}{error}"), file=sys.stderr)
        return 1


def _add_serve(commands: Any) -> None:
    about = "serve the experts that a function returns"
    parser = commands.add_parser("serve", help=about, description=about)
    parser.add_argument("factory", metavar="MODULE:FUNCTION", help="returns one or several ExpertBackends")
    parser.add_argument("--listen", default="127.0.0.1:7000", metavar="HOST:PORT", help="(default: 127.0.0.1:7000)")
    _add_security(parser, "authorities for clients' certificates")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="folder in which experts are saved")
    parser.add_argument("--save-every", type=float, default=60.0, metavar="SECONDS", help="(default: 60)")
    parser.add_argument("--workers", type=int, metavar="N", help="threads that run batches (default: one per expert)")
    parser.add_argument("--threads", type=int, metavar="N", help="torch's threads within a batch (default: torch's)")
    parser.add_argument(
        "--grace", type=float, default=10.0, metavar="SECONDS", help="time limit of current requests at the end"
    )
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="serve metrics for Prometheus on 127.0.0.1")


def _add_security(parser: argparse.ArgumentParser, authorities: str) -> None:
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="this side's certificate")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help=authorities)
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token")


def security_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments ``tls`` and ``token`` of a server or connection, from a command's options.

    The token is read from a file, because other users can see the options of a process.
    """
    files = (options.tls_cert, options.tls_key, options.tls_ca)
    tls = TLS(*files) if any(files) else None
    token = None if options.token_file is None else options.token_file.read_text().strip()
    return {"tls": tls, "token": token}


def serve(options: argparse.Namespace) -> int:
    """Serve until a signal or a client's ``drain`` ends the server, and return the exit status 0.

    If experts were not saved, raise the error of :meth:`ExpertServer.drain`. But if an expert still hangs by then, end
    the process at once, with status 1, instead of waiting for the expert.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    check_address("--listen", options.listen)
    make = function_of(options.factory)
    _say(f"making the experts of {options.factory}")
    backends = made_by(make, options.factory)
    _say(f"{len(backends)} made: {', '.join(one.name for one in backends)}")
    server = ExpertServer(
        backends,
        options.listen,
        **security_of(options),
        checkpoints=options.checkpoints,
        save_every=options.save_every,
        workers=options.workers,
        grace=options.grace,
    )
    if options.metrics_port is not None:
        prometheus = importlib.import_module("pymoe.integrations.prometheus")
        prometheus.serve(server, options.metrics_port)
        _say(f"metrics for Prometheus at http://127.0.0.1:{options.metrics_port}/metrics")
    try:
        server.run(ready=lambda: _say(f"serving at {server.address}; Ctrl-C or SIGTERM ends it"))
    except Exception as error:
        if not server.stuck:
            raise
        print(printable(f"{PROGRAM} serve: {error}"), file=sys.stderr, flush=True)
    _say(f"served {server.counts['forward']} forward and {server.counts['backward']} backward requests")
    if server.stuck:
        _say("an expert hangs: the process ends without it")
        logging.shutdown()
        os._exit(1)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def function_of(factory: str) -> Callable[[], Any]:
    """Import and return the function that ``factory`` names. First add the current folder to ``sys.path``.

    Raises:
        ValueError: ``factory`` is not of the form ``MODULE:FUNCTION``.
        ImportError: there is no such module or function.
    """
    module, colon, function = factory.partition(":")
    if not (module and colon and function):
        raise ValueError(f"expected MODULE:FUNCTION, got {factory!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    make = getattr(importlib.import_module(module), function, None)
    if not callable(make):
        raise ImportError(f"there is no function {function!r} in {module}")
    return make  # type: ignore[no-any-return]


def made_by(make: Callable[[], Any], factory: str) -> list[ExpertBackend]:
    """Call ``make`` and return its backends as a list; raise TypeError if it returns something else."""
    made = make()
    backends = [made] if isinstance(made, ExpertBackend) else list(made) if isinstance(made, Iterable) else [made]
    for one in backends:
        if not isinstance(one, ExpertBackend):
            raise TypeError(f"{factory} must return ExpertBackends, got {type(one).__name__}")
    return backends


def _connection(options: argparse.Namespace) -> Connection:
    return connect(options.address, timeout=options.timeout, coalesce=False, **security_of(options))


def info(options: argparse.Namespace) -> int:
    """Print the description of a server."""
    with _connection(options) as there:
        found = there.info()
    if options.json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        print(described(options.address, found))
    return 0


def described(address: str, found: wire.Info) -> str:
    """Return the description of a server as text."""
    state = "draining" if found.draining else "serving"
    lines = [f"{address}: {state} for {found.seconds:.0f} s, pymoe {found.version}, process {found.pid}"]
    for name, one in found.experts.items():
        trains = f"{one.updates} updates" if one.trains else "does not train"
        try:
            takes, returns = wire.read_schema(one.forward_schema), wire.read_schema(one.outputs_schema)
        except ValueError as error:
            raise ProtocolError(f"{address}: the schema of {name!r} cannot be read: {error}") from None
        lines.append(f"  {name}: {trains}; takes {takes!r}, returns {returns!r}")
    if found.counts:
        lines.append("  calls: " + ", ".join(f"{count} {what}" for what, count in sorted(found.counts.items())))
    return "\n".join(map(printable, lines))


class WatchedServer:
    """Reads the statistics of a server's pools repeatedly; each report covers the time since the previous one.

    The constructor raises the errors of :func:`~pymoe.remote.connect`.
    """

    def __init__(self, address: str, **security: Any) -> None:
        self.where = address
        self._connection = connect(address, coalesce=False, **security)
        self._before: dict[str, wire.Counters] = {}
        self._time = time.monotonic()

    def read(self) -> list[Report]:
        """Return a list of one report, or an empty list while the server is gone.

        Raise NotARuntime if the report is malformed.
        """
        try:
            found = self._connection.info()
        except (ServerLost, TimeoutError):
            self._before = {}
            return []
        except ProtocolError as error:
            raise NotARuntime(str(error)) from None
        now = time.monotonic()
        seconds, self._time = now - self._time, now
        try:
            pools = tuple(
                pool_stats(printable(name), self._before.get(name, counters), counters, seconds, recent=True)
                for name, counters in found.pools.items()
            )
        except (KeyError, TypeError, ValueError) as error:
            raise NotARuntime(f"{self.where}: not a report ({type(error).__name__}: {error})") from None
        self._before = found.pools
        return [Report(printable(f"{self.where} (process {found.pid}, {found.seconds:.0f} s)"), pools)]

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()


def watch(options: argparse.Namespace) -> int:
    """Show the pools of a server until Ctrl-C, or once with ``--once``."""
    return show(WatchedServer(options.address, **security_of(options)), options, must_be_there=True)


def drain(options: argparse.Namespace) -> int:
    """Drain a server and wait for its end. Return 1 if experts were not saved or the server still answers, else 0."""
    deadline = time.monotonic() + options.timeout
    with _connection(options) as there:
        _say(f"{options.address} drains")
        saved = True
        try:
            there.drain()
        except RuntimeError as error:
            saved = False
            print(printable(f"{PROGRAM} drain: {error}"), file=sys.stderr)
        while time.monotonic() < deadline:
            time.sleep(DRAIN_CHECK_S)
            try:
                there.info(timeout=options.timeout)
            except ServerLost:
                _say(f"{options.address} has ended")
                return 0 if saved else 1
    print(f"{options.address} still answers after {options.timeout:g} s", file=sys.stderr)
    return 1
