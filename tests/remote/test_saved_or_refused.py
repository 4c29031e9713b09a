"""A saved state is complete: every kind of state, in every place, is restored exactly from its checkpoint, or refused
by a TypeError that names its place. None is lost silently.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from experts import ROW, WIDTH, mlp, of, unsavable
from safetensors.torch import save_file
from torch import Tensor, nn

from pymoe.remote import ExpertServer, checkpoints, connect
from pymoe.remote.checkpoints import Checkpoint, folder_of, read_checkpoint, read_newest, write_checkpoint
from pymoe.runtime import ExpertBackend

X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
Make = Callable[[int], Any]
"""Makes a value of some kind; different numbers make different values."""


class Own:
    """An object that a checkpoint cannot hold."""


def of_dtype(dtype: torch.dtype) -> Make:
    def make(number: int) -> Tensor:
        bits = torch.arange(4 * dtype.itemsize, dtype=torch.uint8) % 2 ^ number  # 0 and 1, the only bytes of a bool
        return bits.view(dtype)

    return make


def as_quantized(number: int) -> Tensor:
    return torch.quantize_per_tensor(torch.full((3,), float(number)), 0.5, 0, torch.quint8)


DTYPES = {str(one): of_dtype(one) for one in vars(torch).values() if isinstance(one, torch.dtype)}
TENSORS: dict[str, Make] = {
    **DTYPES,
    "0-d": lambda number: torch.tensor(float(number)),
    "empty": lambda number: torch.zeros(0, 3),
    "every other column": lambda number: torch.full((3, 4), float(number))[:, ::2],
    "transposed": lambda number: (torch.arange(6.0).view(2, 3) + number).t(),
    "expanded": lambda number: torch.full((1,), float(number)).expand(5),
    "conjugated": lambda number: torch.full((2,), 1 + 2j * number).conj(),
    "negated": lambda number: torch._neg_view(torch.full((2,), 1.0 + number)),
    "NaN and infinity": lambda number: torch.tensor([math.nan, math.inf, -0.0, float(number)]),
    "sparse COO": lambda number: (torch.eye(3) + number).to_sparse(),
    "sparse CSR": lambda number: (torch.eye(3) + number).to_sparse_csr(),
    "sparse BSR": lambda number: (torch.eye(4) + number).to_sparse_bsr((2, 2)),
    "nested": lambda number: torch.nested.nested_tensor([torch.ones(2), torch.ones(3) * number]),
    "jagged": lambda number: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "masked": lambda number: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    "quantised": as_quantized,
    "meta": lambda number: torch.empty(3, device="meta"),
    "channels last": lambda number: torch.full((1, 2, 3, 3), float(number)).to(memory_format=torch.channels_last),
}
VALUES: dict[str, Make] = {
    "None": lambda number: None if number else 1,
    "bool": bool,
    "int": lambda number: 10**30 + number,
    "int of 5,000 digits": lambda number: 10**5000 + number,
    "float": lambda number: 0.1 + number,
    "text": lambda number: f"\ud800 ü {number}",
    "complex": lambda number: 1j * number,
    "bytes": lambda number: bytes([number]),
    "numpy number": lambda number: np.float64(number),
    "numpy array": lambda number: np.full(2, number),
    "deque": lambda number: collections.deque([number]),
    "set": lambda number: {number},
    "dtype": lambda number: torch.float32,
    "object": lambda number: Own(),
    "function": lambda number: len,
    "nested dict": lambda number: {"a": {1: [2.0, (number, None)], None: {True: torch.full((2,), float(number))}}},
    "named tuple": lambda number: collections.namedtuple("Pair", "a b")(1, number),
    "key that is a tuple": lambda number: {(1, 2): number},
    "63 lists": lambda number: deep(50, number),
    "100 lists": lambda number: deep(100, number),
}


def deep(count: int, number: int) -> Any:
    return [deep(count - 1, number)] if count else number


class Holding(nn.Module):
    def __init__(self, place: str, value: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.value: Any = None
        if place == "parameter":
            self.value = nn.Parameter(value, requires_grad=False)
        elif place == "buffer":
            del self.value
            self.register_buffer("value", value)
        elif place == "extra state":
            self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def get_extra_state(self) -> Any:
        return {"value": None if isinstance(self.value, nn.Parameter) or "value" in self._buffers else self.value}

    def set_extra_state(self, state: Any) -> None:
        if not (isinstance(self.value, nn.Parameter) or "value" in self._buffers):
            self.value = state["value"]


class Keeping(torch.optim.SGD):
    """Keeps a value per parameter, from the start or from its first step on."""

    def __init__(self, parameters: Iterator[nn.Parameter], value: Any, at_start: bool) -> None:
        super().__init__([one for one in parameters if one.requires_grad], 0.1)
        self.value = value
        if at_start:
            self.keep()

    def keep(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["value"] = self.value

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.keep()


PLACES = ("parameter", "buffer", "extra state", "optimizer, at the start", "optimizer, after a step")


def backend_with(place: str, value: Any, moments: int = 0) -> ExpertBackend:
    torch.manual_seed(moments)
    expert = Holding(place, value)
    optimizer: Any = torch.optim.SGD(expert.linear.parameters(), 0.1)
    if place.startswith("optimizer"):
        optimizer = Keeping(expert.parameters(), value, at_start="start" in place)
    return ExpertBackend("e", expert, optimizer, args_schema=[ROW], outputs_schema=ROW)


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, including types and bits."""
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        bits = [
            x.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg() for x in (one, other)
        ]
        return not one.numel() or torch.equal(*(x.reshape(-1).view(torch.uint8) for x in bits))
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def outcome(folder: Path, place: str, make: Make) -> str:
    """Save and load a state; return ``"equal"`` or ``"refused"``."""
    backend = backend_with(place, make(1))
    where = "_extra_state.opt.state.0.value" if place.startswith("optimizer") else "expert."
    try:
        server = ExpertServer(backend, checkpoints=folder)
        backend.backward(X, X)
        server.save()
    except TypeError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert refusal.removeprefix("ExpertServer.save: not saved: ").startswith("'e' cannot be saved in ")
        with contextlib.suppress(RuntimeError, NotImplementedError):
            backend.state_dict()  # if this raises, that is the error
            assert where in refusal or "represented in JSON" in refusal
        assert not list(folder.glob("*/*")), "nothing is left of it"
        return "refused"
    server.drain()
    state = backend.state_dict()
    again = backend_with(place, make(0), moments=1)
    ExpertServer(again, checkpoints=folder)
    assert same(state, again.state_dict())
    return "equal"


def cases() -> list[Any]:
    """Return every kind in every place, except for one: torch's optimizers cannot load values that torch does not
    convert.
    """
    found = []
    for place in PLACES:
        kinds = TENSORS if place in ("parameter", "buffer") else {**TENSORS, **VALUES}
        for kind, make in kinds.items():
            if kind == "torch.float4_e2m1fn_x2" and place.startswith("optimizer"):
                continue
            found.append(pytest.param(place, make, id=f"{place}: {kind}"))
    return found


@pytest.mark.thinned(usual=120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("place", "make"), cases())
def test_what_a_server_says_is_saved_is_saved(tmp_path: Path, place: str, make: Make) -> None:
    """Of 14 kinds of buffers, 4 were accepted and never saved; optimizers' values came back in the parameters'
    dtype.
    """
    try:
        backend_with(place, make(1))
    except (RuntimeError, TypeError) as error:
        pytest.skip(f"torch makes no such state: {str(error).splitlines()[0]}")
    outcome(tmp_path, place, make)


@pytest.mark.parametrize("kind", ["torch.complex64", "torch.uint16", "torch.float8_e4m3fn", "every other column"])
@pytest.mark.parametrize("place", PLACES)
def test_these_come_back(tmp_path: Path, place: str, kind: str) -> None:
    assert outcome(tmp_path, place, TENSORS[kind]) == "equal"


@pytest.mark.parametrize("kind", ["sparse COO", "torch.complex128", "meta"])
def test_these_are_refused_when_the_server_is_made(tmp_path: Path, kind: str) -> None:
    backend = backend_with("buffer", TENSORS[kind](1))
    with pytest.raises(TypeError, match=r"'e' cannot be saved in .*: expert.value holds a tensor of"):
        ExpertServer(backend, checkpoints=tmp_path)


def test_a_sibling_that_is_lost_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would fail if torch alone loaded optimizer states, or if numbers other than the state's were
    written.
    """
    monkeypatch.setattr(checkpoints, "load_exactly", lambda backend, state: backend.load_state_dict(state))
    with pytest.raises(AssertionError):
        outcome(tmp_path / "cast", PLACES[3], DTYPES["torch.int64"])
    real = checkpoints._dense
    monkeypatch.setattr(checkpoints, "_dense", lambda leaf, where: real(leaf.sign(), where))
    with pytest.raises(AssertionError):
        outcome(tmp_path / "other numbers", "buffer", lambda number: torch.full((3,), 2.0 + number))


def test_a_state_that_arises_later_is_refused_when_it_arises(tmp_path: Path) -> None:
    backend = unsavable()
    server = ExpertServer([backend, mlp("well")], checkpoints=tmp_path, save_every=0)
    server.start()
    with connect(server.address, coalesce=False, retries=False) as there:
        e, well = there.backends()
        e.backward_pool(X, X)
        while server._service.entries["e"].checkpoints.cannot_save is None:
            time.sleep(0.005)
        with pytest.raises(
            TypeError, match=r"'e' cannot be saved in .* _extra_state.opt.state.0.history holds a deque"
        ):
            e.backward_pool(X, X)
        assert backend.updates == 1
        e.forward_pool(X)
        well.backward_pool(X, X)
        with pytest.raises(TypeError, match=r"ExpertServer.save: not saved: 'e' cannot be saved in"):
            server.save()
        assert list(folder_of(tmp_path, "well").glob("*.safetensors")), "the others are saved"
        with pytest.raises(RuntimeError, match="not saved: 'e' cannot be saved in"):
            there.drain()
    for _ in range(2):
        with pytest.raises(TypeError, match=r"ExpertServer.drain: not saved: 'e' cannot be saved in"):
            server.drain()
    backend.opt.state.clear()  # type: ignore[union-attr]
    assert server.save() == 1
    server.drain()
    assert not server.runtime.running


def test_an_error_of_the_block_is_not_replaced_by_that_of_the_drain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = unsavable()

    def block() -> None:
        with ExpertServer(backend, checkpoints=tmp_path):
            backend.backward(X, X)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        block()
    assert "not saved: 'e' cannot be saved in" in caplog.text


@pytest.mark.parametrize("under", ["a file", "/proc/nowhere", "no room"])
def test_a_folder_that_cannot_be_written_is_found_when_the_server_is_made(
    tmp_path: Path, under: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    folder = {"a file": tmp_path / "file", "/proc/nowhere": Path("/proc/nowhere"), "no room": tmp_path / "f"}[under]
    if under == "no room":

        def full(*arguments: Any) -> None:
            raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device")

        monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="'a' cannot be saved in "):
        ExpertServer(mlp("a"), checkpoints=folder)


def test_a_scheduler_that_has_no_state_and_an_expanded_buffer_are_refused(tmp_path: Path) -> None:
    class Stepping:
        def step(self) -> None:
            pass

    with pytest.raises(TypeError, match=r"the scheduler, a Stepping, has no state_dict\(\)"):
        ExpertServer(mlp("a", scheduler=Stepping()), checkpoints=tmp_path)
    with pytest.raises(TypeError, match=r"expert.value is an expanded tensor"):
        ExpertServer(backend_with("buffer", torch.ones(1).expand(3)), checkpoints=tmp_path)


class Versioned(nn.Linear):
    """Doubles the values that it loads from an older version of itself."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_a_module_knows_the_version_of_its_state(tmp_path: Path) -> None:
    """The module mistook its own saved state for the state of an older version."""
    one, other = (of(Versioned(WIDTH, WIDTH), "e") for _ in range(2))
    ExpertServer(one, checkpoints=tmp_path).drain()
    ExpertServer(other, checkpoints=tmp_path)
    assert torch.equal(one.expert.weight, other.expert.weight)


def test_many_clients_with_long_names_are_saved(tmp_path: Path) -> None:
    """The clients' keys were in the header, which safetensors limits to 100 MB: saves failed until the keys were
    forgotten.
    """
    keys = {f"{number:06d}" + "\U0001f600" * 60: (0, [1]) for number in range(1000)}
    path = write_checkpoint(tmp_path, Checkpoint({"a": torch.ones(3)}, 1, keys))
    assert int.from_bytes(path.read_bytes()[:8], "little") < 1000, "the header"
    assert read_checkpoint(path).keys == keys


def test_a_file_of_format_1_is_read(tmp_path: Path) -> None:
    state, tensors = {"dict": [["a", {"leaf": "0"}], ["b", 3]]}, {"0": torch.arange(3.0)}
    content = json.dumps({"state": state, "updates": 4, "keys": {"client": [3, [3, 5]]}})
    crc = zlib.crc32(tensors["0"].numpy().tobytes(), zlib.crc32(content.encode()))
    metadata = {"pymoe.remote": content, "format": "1", "crc32": str(crc)}
    save_file(tensors, tmp_path / f"{1:020d}-4.safetensors", metadata)
    found = read_newest(tmp_path)
    assert found is not None
    assert (found.updates, found.keys) == (4, {"client": (3, [3, 5])})
    assert same(dict(found.state), {"a": torch.arange(3.0), "b": 3})


def test_a_dtype_that_was_changed_in_a_file_is_damage(tmp_path: Path) -> None:
    """Only the bytes were checked, so integers were accepted as floating-point numbers."""
    path = write_checkpoint(tmp_path, Checkpoint({"a": torch.arange(3, dtype=torch.int32)}, 1, {}))
    path.write_bytes(path.read_bytes().replace(b'"I32"', b'"F32"'))
    with pytest.raises(ValueError, match="not what was written"):
        read_checkpoint(path)
