"""A simulation counts what ranks really send: bytes of both passes, rows of every chunk, and rows of every rank."""

import pytest
import sent_rows
import torch

from pymoe.ep.simulate import Block, Load, simulate
from pymoe.ep.simulate.rows import spreads

WORLD = 4


@pytest.mark.slow
@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_four_ranks_send_what_is_counted(ranks, chunks, deduplicate):
    answers = ranks.run(sent_rows.sent_in_a_step, chunks=chunks, deduplicate=deduplicate)
    block = Block("ranks", sent_rows.HIDDEN, sent_rows.FFN, sent_rows.EXPERTS, sent_rows.TOP_K, dtype="float32")
    load = Load("ranks", ((torch.cat([torch.tensor(chosen) for chosen, *_ in answers]),),), sent_rows.EXPERTS)
    assert all(widths == [block.row_bytes] for _, _, widths, _ in answers)

    found = simulate(block, WORLD, sent_rows.TOKENS, load, chunks=(chunks,))
    away = sum(sum(sum(to) - to[rank] for to in sent) for rank, (_, sent, *_) in enumerate(answers))
    beside = sum(answer[3] for answer in answers)  # expert numbers, their weights, and the weights' gradients
    assert found.traffic[deduplicate].bytes == pytest.approx((away * block.row_bytes + beside) / WORLD)

    (spread,) = spreads("contiguous", load, WORLD, sent_rows.TOKENS, 1)
    dispatched = torch.tensor([sent[:chunks] for _, sent, *_ in answers])  # (source, chunk, destination)
    assert spread.pairs(deduplicate, chunks).tolist() == dispatched.transpose(0, 1).tolist()
    if not deduplicate:
        filled = dispatched.sum((0, 1))
        assert found.balance.imbalance == pytest.approx(float(filled.max() / filled.double().mean()))


@pytest.mark.slow
@pytest.mark.parametrize("clones", [1, 2])
def test_four_ranks_with_clones_send_what_is_counted(ranks, clones):
    answers = ranks.run(sent_rows.sent_in_a_step, chunks=2, clones=clones)
    block = Block("ranks", sent_rows.HIDDEN, sent_rows.FFN, sent_rows.EXPERTS, sent_rows.TOP_K, dtype="float32")
    load = Load("ranks", ((torch.cat([torch.tensor(chosen) for chosen, *_ in answers]),),), sent_rows.EXPERTS)
    name = ("1-clone", "2-clones")[clones - 1]
    found = simulate(block, WORLD, sent_rows.TOKENS, load, spread=name, min_rows_to_clone=1)
    assert found.balance.clones > 0
    assert found.clones_bytes == sum(answer[3] for answer in answers) / WORLD
    away = sum(sum(sum(to) - to[rank] for to in sent) for rank, (_, sent, *_) in enumerate(answers))
    assert found.traffic[0].bytes == pytest.approx(away * block.row_bytes / WORLD)
    (spread,) = spreads(name, load, WORLD, sent_rows.TOKENS, 1)
    dispatched = torch.tensor([sent[:3] for _, sent, *_ in answers])  # (source, chunk, destination); clones are last
    assert dispatched.sum(1).tolist() == spread.pairs().sum(0).tolist()
    filled = dispatched.sum((0, 1))
    assert found.balance.imbalance == pytest.approx(float(filled.max() / filled.double().mean()))
