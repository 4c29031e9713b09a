"""A checkpoint is complete or absent, holds everything that a backend needs to continue, and is read without
running code.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from experts import WIDTH, mlp
from limits import LONG
from torch import Tensor

from pymoe.remote import ExpertServer, checkpoints, connect
from pymoe.remote.checkpoints import Checkpoint, folder_of, read_checkpoint, read_newest, write_checkpoint

KEYS = {"client": (3, [3, 5])}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if isinstance(first, dict):
        return list(first) == list(second) and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


@pytest.mark.parametrize(
    "optimizer",
    [None, torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop],
)
def test_a_backend_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path, optimizer: Any) -> None:
    first = mlp("e", optimizer=optimizer)
    for _ in range(3):
        first.backward(X, X)
    write_checkpoint(tmp_path, Checkpoint(first.state_dict(), first.updates, KEYS))
    found = read_newest(tmp_path)
    assert found is not None
    assert (found.updates, found.keys) == (first.updates, KEYS)
    assert equal(dict(found.state), dict(first.state_dict()))
    second = mlp("e", seed=1, optimizer=optimizer)
    second.load_state_dict(found.state)
    for one in (first, second):
        one.backward(X, X)
    assert torch.equal(first.forward(X)[0], second.forward(X)[0])
    assert first.updates == second.updates


def test_schedulers_and_all_dtypes_are_saved(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(3, 2).bfloat16(), "b": torch.tensor(3, dtype=torch.int64), "c": torch.randn(4, 2)[:, 1],
        "d": torch.zeros(0, 3), "e": torch.tensor([True, False]), "f": [None, (1.5, float("inf"))],
    }  # fmt: skip
    state["shared"] = state["a"]
    write_checkpoint(tmp_path, Checkpoint(state, 1, {}))
    found = read_newest(tmp_path)
    assert found is not None
    assert equal(found.state, state)


def test_a_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, Checkpoint(mlp("e").state_dict(), 0, KEYS))
    with safetensors.safe_open(path, framework="pt") as file:
        content = json.loads(file.get_tensor(checkpoints.CONTENT).numpy().tobytes())
        assert content["keys"] == {"client": [3, [3, 5]]}
        assert len(file.keys()) == 5
    assert b"pickle" not in path.read_bytes()


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for updates in range(5):
        write_checkpoint(tmp_path, Checkpoint({}, updates, {}))
    assert len(list(tmp_path.iterdir())) == checkpoints.KEPT
    found = read_newest(tmp_path)
    assert found is not None
    assert found.updates == 4


@pytest.mark.parametrize("damage", ["cut", "flipped", "keys", "empty", "text"])
def test_a_damaged_file_is_passed_over_for_the_one_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(100)}, 1, KEYS))
    path = write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(100)}, 2, KEYS))
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-10] ^= 1
    keys = bytes(data).replace(b"[3, [3, 5]]", b"[3, [3, 4]]")
    path.write_bytes({"cut": data[:-5], "flipped": data, "keys": keys, "empty": b"", "text": b"hello" * 100}[damage])
    found = read_newest(tmp_path)
    assert found is not None
    assert found.updates == 1
    assert "is damaged, and passed over" in caplog.text


def test_a_folder_whose_checkpoints_are_all_damaged_is_not_begun_anew(tmp_path: Path) -> None:
    path = write_checkpoint(folder_of(tmp_path, "e"), Checkpoint({}, 1, {}))
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="expected a checkpoint that can be read, got 1 that are damaged"):
        ExpertServer(mlp("e"), checkpoints=tmp_path)
    assert path.exists()


def test_a_server_refuses_at_once_an_expert_that_cannot_be_saved(tmp_path: Path) -> None:
    backend = mlp("e")
    backend.opt.param_groups[0]["lr"] = np.float64(0.1)  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=r"'e' cannot be saved in .*opt.param_groups.0.lr holds a float64"):
        ExpertServer(backend, checkpoints=tmp_path)


def test_a_clock_that_is_set_back_does_not_make_a_checkpoint_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or another machine's clock is slow: the file that was just written was taken for the oldest and removed."""
    for updates in range(3):
        write_checkpoint(tmp_path, Checkpoint({}, updates, {}))
    monkeypatch.setattr(checkpoints.time, "time_ns", lambda: 10**18)
    path = write_checkpoint(tmp_path, Checkpoint({}, 3, {}))
    found = read_newest(tmp_path)
    assert path.exists()
    assert found is not None
    assert found.updates == 3


def test_nothing_is_left_of_a_checkpoint_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(3)}, 1, {}))
    before = list(tmp_path.iterdir())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(3)}, 2, {}))
    assert list(tmp_path.iterdir()) == before


def test_what_a_killed_writer_left_is_no_checkpoint_and_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".0123.part").write_bytes(b"half")
    assert read_newest(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "FORMAT", 3)
    path = write_checkpoint(tmp_path, Checkpoint({}, 1, {}))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="expected a checkpoint of format 2, got '3'"):
        read_checkpoint(path)


def test_a_state_that_is_neither_tensors_nor_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^a holds a device: expected tensors"):
        write_checkpoint(tmp_path, Checkpoint({"a": torch.device("cpu")}, 1, {}))


@pytest.mark.parametrize("name", ["../../etc", ".", "a/b", "ü é", "x" * 256, "字" * 256])
def test_any_name_has_a_folder_of_its_own_inside(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, name)
    folder.mkdir()
    assert folder.resolve().parent == tmp_path.resolve()
    assert folder != folder_of(tmp_path, name + "2")


def test_a_write_that_nobody_waits_for_any_more_is_not_overtaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that had timed out wrote its state after a later save, and so took precedence."""
    stalled, go_on, written = threading.Event(), threading.Event(), []

    def write(folder: Path, checkpoint: Checkpoint) -> Path:
        if checkpoint.updates == 1:
            stalled.set()
            assert go_on.wait(LONG)
        written.append(checkpoint.updates)
        return write_checkpoint(folder, checkpoint)

    monkeypatch.setattr("pymoe.remote.checkpoints.write_checkpoint", write)
    with ExpertServer(mlp("e"), checkpoints=tmp_path, save_every=0) as server, connect(server.address) as there:
        (e,) = there.backends()
        e.backward_pool(torch.ones(1, WIDTH), torch.ones(1, WIDTH))
        with pytest.raises(TimeoutError, match="'e' did not answer"):
            server.save(timeout=0.1)
        assert stalled.wait(LONG)
        e.backward_pool(torch.ones(1, WIDTH), torch.ones(1, WIDTH))
        with pytest.raises(TimeoutError, match="'e' did not answer"):  # the save waits for its turn
            server.save(timeout=0.1)
        assert not written
        go_on.set()
        server.save()
    assert written == sorted(written)
    found = read_newest(folder_of(tmp_path, "e"))
    assert found is not None
    assert found.updates == 2
