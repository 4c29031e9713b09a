"""The monitor: a Unix socket for this user only, and the terminal view that reads it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import counted
import pytest
from limits import LONG

from pymoe.runtime import top
from pymoe.runtime.monitoring import socket_server as monitor
from pymoe.runtime.monitoring.observers import Observers
from pymoe.runtime.monitoring.socket_server import Monitor
from pymoe.runtime.monitoring.statistics import StatsReader

PATIENCE = 30.0


@pytest.fixture
def pool():
    return counted.CountedPool("expert.forward")


@pytest.fixture
def listening(pool, tmp_path):
    """Provide a monitor of one pool."""
    one = Monitor([pool], tmp_path / "m")
    one.start()
    yield one
    one.stop()


@pytest.fixture
def viewer(listening):
    """Provide a connection to the monitor, whose first report was read."""
    one = top.Viewer(listening.path)
    one.read()
    yield one
    one.close()


def test_only_this_user_may_connect(listening):
    assert stat.S_IMODE(listening.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(listening.path.parent.stat().st_mode) == 0o700


def test_another_user_is_hung_up_on(listening, monkeypatch):
    mine = os.getuid()
    monkeypatch.setattr(monitor.os, "getuid", lambda: mine + 1)
    monkeypatch.setattr(monitor.struct, "unpack", lambda *_: (1, mine + 2, 1))
    with pytest.raises(OSError, match=r"ended|reset|Broken pipe"):
        top.Viewer(listening.path).read()


def test_a_folder_that_others_may_write_to_is_refused(pool, tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="nobody else may write"):
        Monitor([pool], tmp_path).start()


def test_a_link_in_place_of_the_folder_is_refused(pool, tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="must be a folder"):
        Monitor([pool], tmp_path / "link").start()


def test_a_path_too_long_for_a_socket_is_named(pool, tmp_path):
    with pytest.raises(OSError, match="cannot listen at"):
        Monitor([pool], tmp_path / ("x" * 120)).start()


def test_each_viewer_sees_what_happened_since_it_last_looked(listening, pool, viewer):
    other = top.Viewer(listening.path)
    other.read()
    pool.batch(4, 8, wait=0.001, process=0.002)
    (mine,) = viewer.read().pools
    pool.batch(2, 2, wait=0.001, process=0.002)
    (theirs,) = other.read().pools
    assert (mine.name, mine.batches, mine.rows, mine.completed) == ("expert.forward", 1, 8, 4)
    assert (theirs.batches, theirs.rows) == (2, 10)
    other.close()


def test_a_report_comes_back_as_it_was_sent(pool):
    pool.batch(4, 8, wait=0.001, process=0.002)
    pool.add(expired=2, running=1)
    reader = StatsReader([pool])
    sent = monitor.report(reader, 0.0)
    got = top.parse(json.dumps(sent).encode(), Path("s"))
    (again,) = StatsReader([pool]).read().values()
    (one,) = got.pools
    assert one.wait == again.wait
    assert one.batch_sizes == again.batch_sizes
    assert (one.expired, one.running, one.completed) == (2, 1, 4)
    assert f"process {os.getpid()}" in got.title


def test_a_viewer_that_leaves_does_not_keep_others_from_reading(listening, pool, viewer):
    for _ in range(10):
        several = [top.Viewer(listening.path) for _ in range(4)]
        for one in several:
            one.socket.sendall(b"\n")
            one.close()
        viewer.read()
    pool.batch(4, 8, wait=0.001, process=0.002)
    assert viewer.read().pools[0].batches == 1


def test_only_so_many_viewers_are_served(listening):
    viewers = []
    for _ in range(monitor.MOST_VIEWERS):
        viewers.append(top.Viewer(listening.path))
        viewers[-1].read()
    one_more = top.Viewer(listening.path)
    with pytest.raises(OSError, match=r"ended|reset|Broken pipe"):
        one_more.read()
    for one in (*viewers, one_more):
        one.close()


def test_a_viewer_that_never_reads_is_hung_up_on(listening, pool, viewer, monkeypatch):
    monkeypatch.setattr(monitor, "VIEWER_TIMEOUT_S", 0.01)
    monkeypatch.setattr(monitor, "report", lambda reader, began: {"more than fits on the way": "x" * 10_000_000})
    deaf = top.Viewer(listening.path)
    deaf.socket.sendall(b"\n")
    while deaf.socket.recv(1, socket.MSG_PEEK) == b"":  # until an answer arrives
        pass
    monkeypatch.undo()
    pool.batch(4, 8, wait=0.001, process=0.002)
    assert viewer.read().pools[0].batches == 1
    deaf.close()


def test_nothing_that_is_sent_does_harm(listening, pool, viewer):
    for hostile in (b"\0" * 10_000, b"GET / HTTP/1.1\r\n\r\n", b'{"a": ' * 1000, b"\n" * 5000):
        with contextlib.closing(top.Viewer(listening.path)) as one, contextlib.suppress(OSError):
            one.socket.sendall(hostile)
    pool.batch(4, 8, wait=0.001, process=0.002)
    assert viewer.read().pools[0].batches == 1


def test_stop_hangs_up_removes_the_socket_and_ends_the_thread(pool, tmp_path):
    one = Monitor([pool], tmp_path / "m")
    one.start()
    one.start()
    path, viewer = one.path, top.Viewer(one.path)
    one.stop()
    one.stop()
    assert not path.exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "pymoe-monitor"]
    with pytest.raises(OSError, match=r"ended|reset|Broken pipe"):
        viewer.read()


def test_two_runtimes_of_a_process_have_sockets_of_their_own(pool, tmp_path):
    first, second = Monitor([pool], tmp_path / "m"), Monitor([pool], tmp_path / "m")
    first.start()
    second.start()
    assert first.path != second.path
    watched = top.Watched(tmp_path / "m")
    assert len(watched.read()) == 2
    first.stop()
    assert len(watched.read()) == 1
    watched.close()
    second.stop()


def test_the_child_of_a_fork_leaves_the_parents_socket_alone(listening):
    child = os.fork()
    if child == 0:
        listening.stop()
        os._exit(0 if listening.path.exists() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    top.Viewer(listening.path).close()


@pytest.mark.parametrize(("value", "wanted"), [("", False), ("0", False), ("1", True), ("some/folder", "some/folder")])
def test_the_environment_can_ask_for_a_monitor(monkeypatch, value, wanted):
    monkeypatch.setenv("PYMOE_MONITOR", value)
    assert monitor.monitor_from_environment() == wanted


def test_a_runtime_takes_the_environment_unless_told_otherwise(monkeypatch, pool, tmp_path):
    monkeypatch.setenv("PYMOE_MONITOR", str(tmp_path / "m"))
    told = Observers([pool], monitor=False)
    told.start()
    assert told.socket is None
    asked = Observers([pool])
    asked.start()
    assert asked.socket is not None
    assert asked.socket.parent == tmp_path / "m"
    asked.stop()
    assert asked.socket is None


def test_the_default_folder_belongs_to_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert monitor.private_folder() == tmp_path / "pymoe"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert monitor.private_folder().name == f"pymoe-{os.getuid()}"


# --- the view ---


def top_process(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "pymoe.runtime.top", *arguments],
        capture_output=True, text=True, timeout=LONG, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])} | environment,
    )  # fmt: skip


def test_top_once_prints_a_table_from_another_process(listening, pool):
    pool.add(queued=5)
    found = top_process("--once", "--interval", "0.05", str(listening.path))
    assert found.returncode == 0, found.stderr
    title, heading, row = found.stdout.splitlines()
    assert f"process {os.getpid()}" in title
    assert heading.split()[:3] == ["pool", "queued", "running"]
    assert row.split()[:3] == ["expert.forward", "5", "0"]
    assert found.stderr == ""


def test_top_finds_runtimes_in_the_users_folder(pool, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    one = Monitor([pool], None)
    one.start()
    found = top_process("--once", "--interval", "0.05")
    one.stop()
    assert "expert.forward" in found.stdout


def test_top_says_that_there_is_nothing(tmp_path):
    found = top_process("--once", str(tmp_path))
    assert found.returncode == 1
    assert found.stdout == ""
    assert "no runtime with a monitor" in found.stderr


def test_a_socket_that_was_left_behind_is_passed_over(listening, tmp_path, capsys):
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(tmp_path / "m" / "1-1.sock"))
    left.close()
    assert top.main(["--once", "--interval", "0.01", str(tmp_path / "m")]) == 0
    assert "expert.forward" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        b"hello\n",
        b"[]\n",
        b'{"format": 2, "pid": 1, "program": "p", "seconds": 1, "pools": []}\n',
        b'{"format": 1, "pid": 1, "program": "p", "seconds": 1, "pools": [{"name": "p"}]}\n',
        b'{"format": 1, "pid": 1, "program": "p", "seconds": 1, "pools": 3}\n',
        b"\xff\n",
    ],
)
def test_what_is_no_monitor_is_named(tmp_path, line, capsys):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "s.sock"))
    listener.listen()

    def serve():
        other, _ = listener.accept()
        other.recv(16)
        other.sendall(line)
        other.recv(16)
        other.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert top.main(["--once", str(tmp_path / "s.sock")]) == 1
    assert str(tmp_path / "s.sock") in capsys.readouterr().err
    thread.join()
    listener.close()


def test_a_report_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(top, "MOST_BYTES", 1000)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "s.sock"))
    listener.listen()
    viewer = top.Viewer(tmp_path / "s.sock")
    other, _ = listener.accept()
    other.sendall(b"x" * 5000)
    with pytest.raises(top.NotARuntime, match="more than 1000 bytes"):
        viewer.read()
    for one in (viewer, other, listener):
        one.close()


def test_names_cannot_command_the_terminal(pool):
    pool.name = "evil\x1b[2J\u202e\n"
    sent = monitor.report(StatsReader([pool]), 0.0)
    (one,) = top.parse(json.dumps(sent).encode(), Path("s")).pools
    assert one.name == "evil?[2J??"


class Served:
    """The part of a runtime that live() uses."""

    def __init__(self, *pools):
        self.pools = pools


def test_live_draws_while_the_block_runs(pool):
    out = io.StringIO()
    with top.live(Served(pool), interval=0.01, file=out):
        pool.batch(4, 8, wait=0.001, process=0.002)
    assert re.search(r"expert\.forward +0 +0 ", out.getvalue())
    assert "▁" not in out.getvalue().splitlines()[0]
    assert not [thread for thread in threading.enumerate() if thread.name == "pymoe-top"]


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_live_draws_in_colours_on_a_terminal(pool, monkeypatch, columns):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    with top.live(Served(pool), interval=0.01, file=out):
        pool.batch(4, 8, wait=0.001, process=0.002)
        pool.add(failed=1)
    assert "\x1b[" in out.getvalue()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "expert.forward" in text  # complete even on a narrow terminal, where other columns are dropped
    assert "req/s" in text
    assert ("1 failed" in text) == (columns > 60)
    assert ("rows/s" in text) == (columns > 100)


def test_live_draws_without_rich_too(pool, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    out = io.StringIO()
    with top.live(Served(pool), interval=0.01, file=out):
        pass
    assert "expert.forward" in out.getvalue()


def test_live_ends_when_the_block_raises(pool):
    with pytest.raises(KeyError), top.live(Served(pool), interval=0.01, file=io.StringIO()):
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name == "pymoe-top"]
