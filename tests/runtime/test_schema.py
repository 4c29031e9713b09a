"""Schemas from a dry run: their contents, and that the run leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pymoe.runtime import DUMMY_BATCH_SIZE, BatchTensorProto
from pymoe.runtime.dry_run import infer_outputs_schema, keep_buffers, untouched
from pymoe.runtime.schema import tensor_protos, to_schema

X = BatchTensorProto(4)


class Call(nn.Module):
    """A module that calls a given function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def test_nested_arguments_and_outputs() -> None:
    def function(x: Tensor, pair: Any, constant: Any, *, ids: Tensor) -> Any:
        assert constant is None
        return {"logits": x @ x.new_ones(4, 2) + pair[0], "rest": (ids, None, [pair[1]["mask"]])}

    schema = infer_outputs_schema(
        Call(function),
        (X, (BatchTensorProto(2), {"mask": BatchTensorProto(dtype=torch.bool)}), None),
        {"ids": BatchTensorProto(3, dtype=torch.int64)},
    )
    assert schema == {
        "logits": BatchTensorProto(2, device="cpu"),
        "rest": (
            BatchTensorProto(3, dtype=torch.int64, device="cpu"),
            None,
            [BatchTensorProto(dtype=torch.bool, device="cpu")],
        ),
    }
    assert [proto.dtype for proto in tensor_protos(schema)] == [torch.float32, torch.int64, torch.bool]


def test_the_run_has_zeros_in_evaluation_mode_without_gradients() -> None:
    seen: list[Any] = []

    def function(x: Tensor) -> Tensor:
        seen.append((x.shape, x.any().item(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x

    expert = Call(function).train()
    seen_flags: list[bool] = []
    expert.register_forward_pre_hook(lambda module, _: seen_flags.append(module.training))
    with torch.inference_mode():
        infer_outputs_schema(expert, [X])
    assert seen == [((DUMMY_BATCH_SIZE, 4), False, False, False)]
    assert seen_flags == [False]


class Noisy(nn.Module):
    """Draws from torch's generator and its own, in any mode, and has buffers that it changes and replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.ones(2))
        self.register_buffer("nothing", None)

    def train(self, mode: bool = True) -> Noisy:
        raise AssertionError("nobody asked for another mode")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        noise = torch.rand(x.shape) + torch.rand(x.shape, generator=self.generator)
        mean = nn.functional.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True, momentum=0.5)
        return self.frozen(self.dropout(mean + 1)) + noise


@pytest.mark.parametrize("fails", [False, True])
def test_the_run_leaves_no_trace(fails: bool) -> None:
    expert = Noisy()
    if fails:
        expert.register_forward_hook(lambda *_: 1 / 0)
    before = {name: buffer.clone() for name, buffer in expert.named_buffers()}
    tensors = dict(expert.named_buffers())
    flags = [module.training for module in expert.modules()]
    state, own_state = torch.get_rng_state(), expert.generator.get_state()
    if fails:
        with pytest.raises(ZeroDivisionError):
            infer_outputs_schema(expert, [X])
    else:
        assert infer_outputs_schema(expert, [X]) == X.replace(device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(expert.generator.get_state(), own_state)
    assert [module.training for module in expert.modules()] == flags
    assert flags.count(False) == 1
    for name, buffer in expert.named_buffers():
        assert buffer is tensors[name]
        assert torch.equal(buffer, before[name])
    assert all(parameter.grad is None for parameter in expert.parameters())


def test_what_the_run_is_kept_from_does_happen_without_it() -> None:
    """Shows that the module does leave traces, without which the check above would prove nothing."""
    expert = Noisy()
    before = {name: buffer.clone() for name, buffer in expert.named_buffers()}
    state, own_state = torch.get_rng_state(), expert.generator.get_state()
    expert(torch.zeros(3, 4))
    changed = {name for name, buffer in expert.named_buffers() if not torch.equal(buffer, before[name])}
    assert {"calls", "last", "norm.running_var"} <= changed
    assert not torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(expert.generator.get_state(), own_state)


def test_buffers_are_kept_only_after_errors_where_so_asked() -> None:
    norm = nn.BatchNorm1d(4)
    with keep_buffers(norm, only_after_errors=True):
        norm(torch.randn(5, 4))
    assert norm.num_batches_tracked == 1
    mean = norm.running_mean.clone()
    norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), keep_buffers(norm, only_after_errors=True):
        norm(torch.randn(5, 4))
    assert norm.num_batches_tracked == 1
    assert torch.equal(norm.running_mean, mean)


def test_flags_are_restored_one_by_one() -> None:
    expert = nn.Sequential(nn.Dropout(), nn.Dropout().eval()).train(True)
    expert[1].eval()
    with untouched(expert):
        assert not any(module.training for module in expert.modules())
    assert [module.training for module in expert.modules()] == [True, True, False]


def test_a_lazy_module_is_made_by_the_run() -> None:
    expert = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    assert infer_outputs_schema(expert, [X]) == BatchTensorProto(2, device="cpu")
    assert expert[0].weight.shape == (2, 4)
    assert expert.training


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.sum(0), r"for 3 rows it returned one of shape \(4,\)"),
        (lambda x: x.sum(), r"for 3 rows it returned one of shape \(\)"),
        (lambda x: (x, x[:2]), r"for 3 rows it returned one of shape \(2, 4\)"),
        (lambda x: None, "must return tensors, got None"),
        (lambda x: [], r"must return tensors, got \[\]"),
    ],
)
def test_an_expert_that_returns_no_batch(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infer_outputs_schema(Call(function), [X])


def test_tensors_stand_for_their_prototypes() -> None:
    schema = to_schema({"x": torch.ones(2, 4), "y": [BatchTensorProto(3), None]})
    assert schema == {"x": BatchTensorProto(4, device="cpu"), "y": [BatchTensorProto(3), None]}
