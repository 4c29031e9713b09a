"""Tests of recorded loads: routers' choices in a file, and the errors for a wrong file."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pymoe.ep.simulate import Block, LoadRecorder, load_of, recorded
from pymoe.nn import MoE

BLOCK = Block("two layers", 16, 16, 8, 2)


class TwoLayers(nn.Module):
    def __init__(self, top_k=2, recompute=False):
        super().__init__()
        self.first, self.second = MoE(16, 16, 8, 2), MoE(16, 16, 8, top_k)
        self.recompute = recompute

    def forward(self, x):
        if self.recompute:
            x = x + checkpoint(self.first, x, use_reentrant=False)
            return x + checkpoint(self.second, x, use_reentrant=False)
        x = x + self.first(x)
        return x + self.second(x)


def chosen(model, x):
    """Return the experts that both layers' routers choose, (L, N, K)."""
    first = model.first.router(x)[0].experts
    return torch.stack([first, model.second.router(x + model.first(x))[0].experts])


def test_a_file_has_what_the_routers_chose(tmp_path):
    model, recorder = TwoLayers(), None
    recorder = LoadRecorder(model)
    inputs = [torch.randn(10, 16) for _ in range(3)]
    for x in inputs:
        with recorder:
            y = model(x)
        y.sum().backward()
    recorder.save(tmp_path / "loads.npz")
    load = recorded(BLOCK, tmp_path / "loads.npz")
    assert (load.tokens, load.experts) == (10, 8)
    found = torch.stack([torch.stack(layer) for layer in load.choices], dim=1)  # (S, L, N, K)
    assert found.equal(torch.stack([chosen(model, x) for x in inputs]).long())


def test_the_file_is_numbers_alone(tmp_path):
    """Any numpy can read the file, without pickle."""
    model = TwoLayers()
    recorder = LoadRecorder(model)
    with recorder:
        model(torch.randn(4, 16))
    recorder.save(tmp_path / "loads")
    with np.load(tmp_path / "loads", allow_pickle=False) as found:
        assert {name: (found[name].dtype.kind, found[name].shape) for name in found} == {
            "format": ("i", ()),
            "experts": ("i", ()),
            "layers": ("U", (2,)),
            "choices": ("u", (1, 2, 4, 2)),
        }
        assert found["choices"].dtype == np.uint8
        assert found["layers"].tolist() == ["first", "second"]


def test_micro_batches_are_tokens_of_one_step():
    model = TwoLayers()
    recorder = LoadRecorder(model)
    with recorder:
        model(torch.randn(3, 16))
        model(torch.randn(5, 16))
    assert [step.shape for step in recorder.steps] == [(2, 8, 2)]


def test_recomputed_forwards_are_not_recorded():
    model = TwoLayers(recompute=True)
    recorder = LoadRecorder(model)
    x = torch.randn(6, 16, requires_grad=True)
    with recorder:
        y = model(x)
    y.sum().backward()
    assert recorder.steps[0].shape == (2, 6, 2)


def test_nothing_is_left_on_the_model():
    model = TwoLayers()
    recorder = LoadRecorder(model)
    with pytest.raises(RuntimeError, match="no step"), recorder:
        raise RuntimeError("no step")
    assert recorder.steps == []
    assert not model.first.router._forward_hooks
    with recorder:
        model(torch.randn(3, 16))
    assert len(recorder.steps) == 1
    assert not model.first.router._forward_hooks


def test_a_recorder_refuses_what_it_cannot_write(tmp_path):
    with pytest.raises(ValueError, match="LoadRecorder: expected a model that chooses experts, got Linear with no MoE"):
        LoadRecorder(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="got E 8 K 2, E 8 K 3"):
        LoadRecorder(TwoLayers(top_k=3))
    model = TwoLayers()
    recorder = LoadRecorder(model)
    with pytest.raises(ValueError, match="expected at least one recorded step, got none"):
        recorder.save(tmp_path / "loads.npz")
    with pytest.raises(ValueError, match="expected 3 tokens in layer second, got 0"), recorder:
        model.first(torch.randn(3, 16))
    with recorder:
        model(torch.randn(3, 16))
    with pytest.raises(ValueError, match="expected 3 tokens in layer first, got 4"), recorder:
        model(torch.randn(4, 16))
    with pytest.raises(RuntimeError, match="expected one block at a time"), recorder, recorder:
        pass


def archive(file, **changes):
    arrays = {
        "format": np.int64(1),
        "experts": np.int64(8),
        "layers": np.array(["first"]),
        "choices": np.zeros((1, 1, 4, 2), np.uint8),
        **changes,
    }
    with file.open("wb") as stream:
        np.savez(stream, **{name: value for name, value in arrays.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": np.int64(2)}, "expected format 1, got 2"),
        ({"experts": None}, "expected a file of recorded loads .* KeyError"),
        ({"choices": np.zeros((1, 2, 4, 2), np.uint8)}, r"expected choices \(S, 1, N, K\), got \(1, 2, 4, 2\)"),
        ({"choices": np.zeros((1, 1, 0, 2), np.uint8)}, r"expected choices \(S, 1, N, K\), got \(1, 1, 0, 2\)"),
        ({"choices": np.full((1, 1, 4, 2), 8, np.uint8)}, r"choices must be in 0\.\.7, got 8 to 8"),
        ({"layers": np.array([{}])}, "expected a file of recorded loads .* ValueError"),
    ],
)
def test_a_file_that_is_wrong_says_how(tmp_path, changes, message):
    file = tmp_path / "loads.npz"
    archive(file, **changes)
    with pytest.raises(ValueError, match=message):
        recorded(BLOCK, file)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 but no archive", b"some text"])
def test_a_file_that_is_no_archive_says_so(tmp_path, content):
    file = tmp_path / "loads.npz"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"loads\.npz: expected a file of recorded loads"):
        recorded(BLOCK, file)


def test_a_load_must_fit_the_model(tmp_path):
    archive(tmp_path / "loads.npz")
    assert recorded(BLOCK, tmp_path / "loads.npz").tokens == 4
    with pytest.raises(ValueError, match=r"expected loads of 8 experts and 3 choices .* got 8 experts and 2 choices"):
        recorded(Block("other", 16, 16, 8, 3), tmp_path / "loads.npz")


@pytest.mark.parametrize("text", ["zipf:", "zipf:-1", "zipf:nan", "zipf:x", "normal", "absent.npz"])
def test_a_load_that_nobody_knows_is_refused(text):
    with pytest.raises(ValueError, match=f"load: expected .*, got '{text}'"):
        load_of(text, BLOCK, 64)
