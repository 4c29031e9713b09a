"""Fixed bugs of saving and draining: states were silently lost, or reported as saved."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from experts import ROW, WIDTH, mlp, of
from limits import LONG
from torch import Tensor, nn

from pymoe.remote import ExpertServer, checkpoints, connect
from pymoe.remote import server as server_module
from pymoe.remote.checkpoints import FolderLock
from pymoe.runtime import ExpertBackend

X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


@contextmanager
def expert_of(server: ExpertServer, name: str) -> Iterator[Any]:
    with connect(server.address, timeout=LONG) as there:
        yield next(one for one in there.backends() if one.name == name)


def train(server: ExpertServer, name: str = "a", count: int = 1) -> None:
    with expert_of(server, name) as expert:
        for _ in range(count):
            expert.backward_pool.submit_task(X, X).result()


def restored(make: Callable[[], ExpertBackend], folder: Path) -> ExpertBackend:
    backend = make()
    ExpertServer(backend, checkpoints=folder).drain()
    return backend


def test_two_servers_on_one_folder_are_one_too_many(tmp_path: Path) -> None:
    """Each server continued from the state that it had loaded, and the last one to save won: five updates were
    answered, saved, and lost.
    """
    with ExpertServer([mlp("a"), mlp("b")], checkpoints=tmp_path) as first:
        train(first, count=5)
        with pytest.raises(OSError, match=r"'a' cannot be saved in .*expert-a: .*another server, which has not"):
            ExpertServer([mlp("other"), mlp("a")], checkpoints=tmp_path)
        ExpertServer(mlp("other"), checkpoints=tmp_path).drain()  # other names, and a refused server's folder, are free
        first.remove("b")
        ExpertServer(mlp("b"), checkpoints=tmp_path).drain()
    assert restored(lambda: mlp("a"), tmp_path).updates == 5


def test_a_fork_does_not_keep_the_folder_of_its_parent(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        with pytest.raises(BlockingIOError):
            FolderLock(tmp_path)
        lock.release()
        FolderLock(tmp_path).release()  # although the child lives
    finally:
        os.write(writing, b"x")
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_what_a_forward_pass_leaves_in_a_buffer_is_saved(tmp_path: Path) -> None:
    """With buffers="both" and no update, checkpoints kept the statistics of the first save for ever."""

    def make() -> ExpertBackend:
        return of(nn.BatchNorm1d(WIDTH), "a", buffers="both")

    backend = make()
    with ExpertServer(backend, checkpoints=tmp_path, save_every=0.05) as server, expert_of(server, "a") as expert:
        expert.forward_pool.submit_task(X).result()
        assert server.save() + server.counts["saved"] >= 1
        assert server.save() == 0
        before = server.counts["saved"]
        expert.forward_pool.submit_task(X).result()
        deadline = time.monotonic() + LONG
        while server.counts["saved"] == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.counts["saved"] > before, "by itself"
        expert.forward_pool.submit_task(X).result()
    found = restored(make, tmp_path)
    assert int(found.expert.num_batches_tracked) == 3
    assert torch.equal(found.expert.running_mean, backend.expert.running_mean)


def test_what_an_expert_without_updates_counts_is_saved(tmp_path: Path) -> None:
    def make() -> ExpertBackend:
        return of(nn.BatchNorm1d(WIDTH), "a", lr=None)

    with ExpertServer(make(), checkpoints=tmp_path) as server:
        for _ in range(2):
            train(server)
            assert server.save() == 1
    assert int(restored(make, tmp_path).expert.num_batches_tracked) == 2


def test_parameters_that_were_set_by_hand_are_saved(tmp_path: Path) -> None:
    """save() looked only at the number of updates and returned 0, and a restart brought the earlier parameters back."""
    backend = mlp("a")
    with ExpertServer(backend, checkpoints=tmp_path) as server:
        train(server)
        assert server.save() == 1
        with torch.no_grad():
            backend.expert[0].weight.fill_(7)
        assert server.save() == 1
        assert server.save() == 0
        with torch.no_grad():
            backend.expert[0].bias.fill_(8)
    found = restored(lambda: mlp("a"), tmp_path).expert[0]
    assert bool((found.weight == 7).all())
    assert bool((found.bias == 8).all())


def test_a_checkpoint_does_not_undo_updates_without_a_word(tmp_path: Path) -> None:
    """An expert that was removed, trained, and added again was reset to its checkpoint."""
    backend = mlp("a")
    with ExpertServer([backend, mlp("b")], checkpoints=tmp_path) as server:
        train(server)
        server.remove("a")
        server.add(backend)
        server.remove("a")
        backend.backward(X, X)
        with pytest.raises(ValueError, match=r"'a' has seen 2 updates, and its newest checkpoint in .* only 1"):
            server.add(backend)
        assert backend.updates == 2
        server.add(mlp("a"))


def test_an_expert_that_cannot_be_saved_is_not_removed(tmp_path: Path) -> None:
    """The expert was removed from the server anyway, and save() and drain() then reported nothing unsaved."""
    with ExpertServer([mlp("a"), mlp("b")], checkpoints=tmp_path) as server:
        train(server)
        folder = tmp_path / "expert-a"
        while (first := server._service.entries["a"].checkpoints._first_update) is None or not first.done():
            time.sleep(0.001)  # the server tests with a file in the folder whether the state can be saved
        shutil.rmtree(folder)
        folder.write_text("in the way")
        with pytest.raises(OSError, match="'a' cannot be saved"):
            server.remove("a")
        train(server)
        with pytest.raises(OSError, match="'a' cannot be saved"):
            server.save()
        folder.unlink()
        assert server.remove("a").updates == 2
    assert restored(lambda: mlp("a"), tmp_path).updates == 2


@pytest.mark.parametrize("way", ["drain", "remove"])
def test_a_server_that_never_started_saves_too(tmp_path: Path, way: str) -> None:
    backend = mlp("a")
    server = ExpertServer([backend, mlp("b")], checkpoints=tmp_path)
    backend.backward(X, X)
    if way == "remove":
        server.remove("a")
    server.drain()
    assert restored(lambda: mlp("a"), tmp_path).updates == 1


class SlowToSave(nn.Module):
    """Its state_dict() waits until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.asked, self.may = threading.Event(), threading.Event()
        self.may.set()

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x

    def get_extra_state(self) -> dict[str, Any]:
        self.asked.set()
        assert self.may.wait(LONG)
        return {}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_drain_that_is_interrupted_has_not_saved_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C, a further drain() returned as if everything were saved, and a client that had asked for the
    drain was told so.
    """
    module = SlowToSave()
    server = ExpertServer(of(module, "a"), checkpoints=tmp_path, save_every=0)
    server.start()
    train(server, count=3)
    asked = threading.Event()
    monkeypatch.setattr(server._service, "_drain", asked.set)  # only the client waits for the end
    told: list[Any] = []
    with connect(server.address, timeout=LONG, coalesce=False) as there:

        def ask() -> None:
            try:
                told.append(there.drain())
            except RuntimeError as error:
                told.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert asked.wait(LONG)
        module.may.clear()
        module.asked.clear()
        run = server_module.run

        def interrupted(coroutine: Any) -> Any:
            stopping = threading.Thread(target=lambda: run(coroutine_with_its_task(coroutine)), daemon=True)
            stopping.start()
            assert module.asked.wait(LONG)
            server_module.event_loop().call_soon_threadsafe(lambda: tasks[0].cancel())
            stopping.join(LONG)
            raise KeyboardInterrupt

        tasks: list[Any] = []

        async def coroutine_with_its_task(coroutine: Any) -> None:
            import asyncio

            task = asyncio.ensure_future(coroutine)
            tasks.append(task)
            await asyncio.wait([task])

        monkeypatch.setattr(server_module, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            server.drain()
        monkeypatch.setattr(server_module, "run", run)
        asking.join(LONG)
    (answer,) = told
    assert isinstance(answer, RuntimeError), answer
    assert "'a': the drain was interrupted" in str(answer)
    assert server.wait(0)
    threading.Timer(0.3, module.may.set).start()
    server.drain()  # waits, and saves
    assert restored(lambda: of(SlowToSave(), "a"), tmp_path).updates == 3


def test_a_further_drain_saves_what_the_first_could_not(tmp_path: Path) -> None:
    """If an expert had changed without an update, drain() did not try again, and raised the first error once more."""
    backend = mlp("a")
    server = ExpertServer(backend, checkpoints=tmp_path, save_every=0)
    server.start()
    assert server.save() == 1
    with torch.no_grad():
        backend.expert[0].weight.fill_(7)
    folder = tmp_path / "expert-a"
    folder.rename(tmp_path / "away")
    folder.write_text("in the way")
    for _ in range(2):
        with pytest.raises(OSError, match="'a' cannot be saved"):
            server.drain()
    folder.unlink()
    (tmp_path / "away").rename(folder)
    server.drain()
    assert bool((restored(lambda: mlp("a"), tmp_path).expert[0].weight == 7).all())


def test_a_file_system_without_locks_is_warned_of_and_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The release failed like the lock, so drain() raised after everything was saved, and the folder stayed open."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    opened = len(os.listdir("/proc/self/fd"))
    lock = FolderLock(tmp_path)
    assert "cannot be locked" in caplog.text
    lock.release()
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_grace_of_any_length_ends_the_server() -> None:
    """An infinite grace raised OverflowError at the end of drain(), and run() and wait() waited for ever."""
    server = ExpertServer(mlp("a"), grace=math.inf)
    server.start()
    server.drain()
    assert server.wait(0)


@pytest.mark.parametrize("seconds", [-1, math.nan, "soon", True])
def test_what_is_no_number_of_seconds_is_refused_before_anything_ends(tmp_path: Path, seconds: Any) -> None:
    with ExpertServer(mlp("a"), checkpoints=tmp_path) as server:
        for call in (lambda: server.drain(seconds), lambda: server.save(seconds)):
            with pytest.raises((TypeError, ValueError), match="must be a number of seconds"):
                call()
        train(server)


def test_an_optimizer_or_a_buffer_that_two_experts_share_is_refused_with_checkpoints(tmp_path: Path) -> None:
    """Each of two files held the moments of both experts, from different times."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    opt = torch.optim.Adam([*first.parameters(), *second.parameters()])
    backends = [
        ExpertBackend(name, one, opt, args_schema=[ROW], outputs_schema=ROW)
        for name, one in (("a", first), ("b", second))
    ]
    norms = [nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)]
    norms[1].running_mean = norms[0].running_mean
    for members in (backends, [of(norms[0], "a"), of(norms[1], "b")]):
        with pytest.raises(ValueError, match="share parameters, buffers or an optimizer"):
            ExpertServer(members, checkpoints=tmp_path)
        ExpertServer(members).drain()


@pytest.mark.parametrize(
    ("before", "after"),
    [(torch.optim.SGD, torch.optim.Adam), (torch.optim.Adam, torch.optim.SGD), (torch.optim.Adam, torch.optim.RMSprop)],
)
def test_a_checkpoint_of_another_optimizer_is_refused_when_the_server_is_made(
    tmp_path: Path, before: Any, after: Any
) -> None:
    """The checkpoint was loaded, and every later gradient failed with KeyError: 'betas'."""
    with ExpertServer(mlp("a", optimizer=before), checkpoints=tmp_path) as server:
        train(server)
    with pytest.raises(ValueError, match=f"'a': expected a checkpoint made with the optimizer {after.__name__}"):
        ExpertServer(mlp("a", optimizer=after), checkpoints=tmp_path)
    assert restored(lambda: mlp("a", optimizer=before), tmp_path).updates == 1
    assert restored(lambda: mlp("a", optimizer=None), tmp_path).updates == 1


def test_callers_whose_rows_meet_in_a_message_share_no_block_of_int8() -> None:
    """One caller's NaN turned other callers' results into NaN, and its large numbers turned their small numbers
    into 0.
    """
    server = ExpertServer(of(nn.Identity(), "a", lr=None))
    with server, connect(server.address, encoding="int8", timeout=LONG) as there:
        (expert,) = there.backends()
        for _ in range(20):
            numbers = (0.01, math.nan, 1e6, 0.01)
            sent = [expert.forward_pool.submit_task(torch.full((1, WIDTH), one)) for one in numbers]
            found = [float(one.result()[0][0, 0]) for one in sent]
            assert found[0] == found[3] == pytest.approx(0.01)
            assert math.isnan(found[1])


def test_a_state_that_json_cannot_tell_is_refused_alike_after_a_change_that_is_no_update(tmp_path: Path) -> None:
    """A save after an update raised TypeError, and one after another change raised Python's ValueError."""
    backend = mlp("a")
    with ExpertServer(backend, checkpoints=tmp_path) as server:
        train(server)
        assert server.save() == 1
        backend.opt.param_groups[0]["note"] = 10**5000
        with pytest.raises(TypeError, match="represented in JSON"):
            server.save()
        del backend.opt.param_groups[0]["note"]


def test_a_save_looks_at_the_state_once_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor was copied and hashed for the file, and again for the next comparison."""
    looks: list[str] = []
    dense = checkpoints._dense

    def look(leaf: Any, where: str) -> Tensor:
        looks.append(where)
        return dense(leaf, where)

    monkeypatch.setattr(checkpoints, "_dense", look)
    backend = mlp("a")
    with ExpertServer(backend, checkpoints=tmp_path) as server:
        train(server)
        server.save()
        looks.clear()
        train(server)
        assert server.save() == 1
        assert looks
        assert len(looks) == len(set(looks))
