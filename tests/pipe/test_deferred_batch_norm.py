"""DeferredBatchNorm: collects the statistics of whole mini-batches from micro-batches."""

from __future__ import annotations

import pytest
import torch
from deferred import assert_same_statistics, batches, micro_batches, pair, run
from torch import Tensor, nn

from pymoe.pipe import context
from pymoe.pipe.deferred_batch_norm import convert_deferred_batch_norm

CHUNKS = (1, 2, 3, 4, 8)
CASES = {
    "rows": (nn.BatchNorm1d, (11, 3)),
    "1d": (nn.BatchNorm1d, (11, 3, 4)),
    "2d": (nn.BatchNorm2d, (11, 3, 4, 2)),
    "3d": (nn.BatchNorm3d, (11, 3, 2, 2, 2)),
}


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("case", CASES)
def test_running_statistics_are_those_of_the_whole_mini_batch(case, chunks, momentum):
    make, shape = CASES[case]
    if case == "rows" and chunks == 8:
        shape = (19, *shape[1:])  # a single row has no variance
    ordinary, deferred = pair(make(3, momentum=momentum).double())
    for batch in batches(*shape):
        ordinary(batch)
        run(deferred, batch, chunks)
        assert_same_statistics(ordinary, deferred)
    assert deferred.num_batches_tracked == 3


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_each_micro_batch_is_normalised_by_its_own_statistics(case, affine):
    make, shape = CASES[case]
    ordinary, deferred = pair(make(3, affine=affine).double())
    (batch,) = batches(*shape, count=1)
    mine, theirs = batch.clone().requires_grad_(), batch.clone().requires_grad_()
    expected = torch.cat([ordinary(part) for part in theirs.tensor_split(3)])
    output = torch.cat(run(deferred, mine, 3))
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    for result in (output, expected):
        result.square().mul(torch.linspace(0, 1, result.numel(), dtype=result.dtype).view_as(result)).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    for left, right in zip(ordinary.parameters(), deferred.parameters(), strict=True):
        torch.testing.assert_close(right.grad, left.grad, rtol=1e-12, atol=1e-12)


def test_five_rows_in_four_chunks_are_committed():
    ordinary, deferred = pair(nn.BatchNorm1d(2).double())
    (batch,) = batches(5, 2, 6, count=1)
    ordinary(batch)
    run(deferred, batch, 4)
    assert_same_statistics(ordinary, deferred)


def test_nothing_moves_before_the_last_micro_batch():
    deferred = convert_deferred_batch_norm(nn.BatchNorm1d(2).double())
    forward = micro_batches(deferred, *batches(8, 2, count=1), 4)
    for index in range(3):
        forward(index)
        assert_same_statistics(nn.BatchNorm1d(2).double(), deferred)
    forward(3)
    assert deferred.num_batches_tracked == 1


def test_the_number_of_micro_batches_may_change():
    ordinary, deferred = pair(nn.BatchNorm1d(2).double())
    for batch, chunks in zip(batches(12, 2, count=5), (4, 1, 3, 6, 2), strict=True):
        ordinary(batch)
        run(deferred, batch, chunks)
    assert_same_statistics(ordinary, deferred)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_repeated_forward_counts_nothing(checkpointing):
    ordinary, deferred = pair(nn.BatchNorm1d(2).double())
    for batch in batches(9, 2):
        ordinary(batch)
        forward = micro_batches(deferred, batch, 3)
        first = [forward(index, checkpointing=checkpointing) for index in (0, 1)]
        again = [forward(index, recomputing=True) for index in (0, 1)]
        torch.testing.assert_close(again, first, rtol=0, atol=0)
        forward(2, checkpointing=checkpointing)
        forward(2, recomputing=True)
        assert_same_statistics(ordinary, deferred)


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_mini_batch_that_failed_leaves_nothing(done):
    ordinary, deferred = pair(nn.BatchNorm1d(2).double())
    lost, batch = batches(12, 2, count=2)
    forward = micro_batches(deferred, lost, 4)
    for index in range(done):
        forward(index)
    ordinary(batch)
    run(deferred, batch, 4)
    assert_same_statistics(ordinary, deferred)


def test_in_evaluation_it_is_an_ordinary_batch_norm():
    ordinary, deferred = pair(nn.BatchNorm2d(3).double())
    first, second = batches(6, 3, 4, 4, count=2)
    ordinary(first)
    run(deferred, first, 3)
    ordinary.eval(), deferred.eval()
    torch.testing.assert_close(torch.cat(run(deferred, second, 3)), ordinary(second), rtol=1e-12, atol=1e-12)
    assert_same_statistics(ordinary, deferred)


def test_outside_of_a_pipeline_it_is_an_ordinary_batch_norm():
    ordinary, deferred = pair(nn.BatchNorm2d(3).double())
    for batch in batches(6, 3, 4, 4):
        torch.testing.assert_close(deferred(batch), ordinary(batch), rtol=0, atol=0)
    assert_same_statistics(ordinary, deferred, 0)


def test_with_one_micro_batch_it_is_an_ordinary_batch_norm():
    ordinary, deferred = pair(nn.BatchNorm2d(3))
    for batch in batches(6, 3, 4, 4, dtype=torch.float32):
        torch.testing.assert_close(run(deferred, batch, 1)[0], ordinary(batch), rtol=0, atol=0)
        run(deferred, batch, 1, recomputing=True)
    assert_same_statistics(ordinary, deferred, 0)


@pytest.mark.parametrize("training", [True, False])
def test_without_running_statistics_there_are_none(training):
    ordinary, deferred = pair(nn.BatchNorm1d(2, track_running_stats=False).double().train(training))
    (batch,) = batches(9, 2, count=1)
    expected = [ordinary(part) for part in batch.tensor_split(3)]
    torch.testing.assert_close(run(deferred, batch, 3), expected, rtol=0, atol=0)
    assert not list(deferred.buffers())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("whole", [True, False], ids=["half layer", "half input"])
def test_half_inputs_have_statistics_in_the_dtype_of_the_layer(dtype, whole):
    layer = nn.BatchNorm2d(3).to(dtype if whole else torch.float32)
    ordinary, deferred = pair(layer)
    for batch in batches(10, 3, 8, 8, dtype=dtype):
        ordinary(batch)
        assert all(part.dtype == dtype for part in run(deferred, batch, 3))
    assert_same_statistics(ordinary, deferred, 2 * torch.finfo(layer.running_mean.dtype).eps)
    assert deferred.running_mean.dtype == layer.running_mean.dtype


def test_means_between_the_numbers_of_a_half_layer_leave_its_variance_right():
    deferred = convert_deferred_batch_norm(nn.BatchNorm1d(1, momentum=1.0).bfloat16())
    batch = batches(64, 1, count=1)[0].mul(2).add(400).bfloat16()  # multiples of 2, unlike the means of parts
    run(deferred, batch, 8)
    torch.testing.assert_close(deferred.running_var, batch.double().var(0).bfloat16(), rtol=0, atol=0)


def test_means_far_from_zero_leave_the_variance_right():
    deferred = convert_deferred_batch_norm(nn.BatchNorm1d(4, momentum=1.0))
    batch = batches(512, 4, count=1)[0].add(1e4).float()
    run(deferred, batch, 8)
    torch.testing.assert_close(deferred.running_var.double(), batch.double().var(0), rtol=1e-3, atol=0)


def test_autocast_changes_nothing():
    ordinary, deferred = pair(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in batches(8, 3, 6, 6, dtype=torch.float32):
            ordinary(batch)
            run(deferred, batch, 4)
    assert_same_statistics(ordinary, deferred, 1e-5)


def test_it_learns_statistics_in_inference_mode():
    ordinary, deferred = pair(nn.BatchNorm1d(2).double())
    first, second = batches(9, 2, count=2)
    with torch.inference_mode():
        run(deferred, first, 3)
    run(deferred, second, 3)
    ordinary(first), ordinary(second)
    assert_same_statistics(ordinary, deferred)


def test_a_layer_called_twice_updates_as_often():
    # The second call normalises the first call's output, which must be equal for parts and whole here.
    ordinary, deferred = pair(nn.BatchNorm1d(2, momentum=0.3).double())
    for batch in batches(12, 2):
        ordinary(batch)
        ordinary(batch * 2)
        run(lambda part: (deferred(part), deferred(part * 2)), batch, 4)
        assert_same_statistics(ordinary, deferred)
    assert deferred.num_batches_tracked == 6


def test_a_layer_called_twice_forgets_an_unfinished_mini_batch():
    ordinary, deferred = pair(nn.BatchNorm1d(2, momentum=0.3).double())
    lost, batch = batches(12, 2, count=2)

    def twice(part: Tensor) -> None:
        deferred(part), deferred(part * 2)

    for done in (0, 1, 2):
        for index in range(done):
            with context.running(context.MicroBatch(index, 4, 0.25)):
                twice(lost)
        with context.running(context.MicroBatch(done, 4, 0.25)):
            deferred(lost)  # a failure between the two calls
        ordinary(batch), ordinary(batch * 2)
        run(twice, batch, 4)
        assert_same_statistics(ordinary, deferred)


def test_a_layer_in_two_stages_keeps_them_apart():
    ordinary, deferred = pair(nn.BatchNorm1d(2, momentum=0.3).double())
    (batch,) = batches(12, 2, count=1)
    parts = batch.tensor_split(4)
    ordinary(batch), ordinary(batch * 2)
    for stage, index in [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (0, 3), (1, 2), (1, 3)]:  # in the order of a pipeline
        with context.running(context.MicroBatch(index, 4, 0.25, stage=stage)):
            deferred(parts[index] * (1 + stage))
    assert_same_statistics(ordinary, deferred)
