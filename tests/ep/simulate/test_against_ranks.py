"""What a simulation counts is what ranks send: bytes of both passes, rows of every chunk, and rows of every rank."""

import pytest
import sent_rows
import torch

from pymoe.ep.simulate import MACHINES, NETWORKS, Block, Layer, Load, simulate
from pymoe.ep.simulate.balance import plans, spreads

WORLD = 4


@pytest.mark.slow
@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_four_ranks_send_what_is_counted(ranks, chunks, deduplicate):
    answers = ranks.run(sent_rows.sent_in_a_step, chunks=chunks, deduplicate=deduplicate)
    block = Block("ranks", sent_rows.HIDDEN, sent_rows.FFN, sent_rows.EXPERTS, sent_rows.TOP_K, dtype="float32")
    load = Load("ranks", ((torch.cat([torch.tensor(chosen) for chosen, *_ in answers]),),), sent_rows.EXPERTS)
    assert all(widths == [block.row_bytes] for _, _, widths, _ in answers)

    machine, network = MACHINES["h100"], NETWORKS["nvlink"]
    found = simulate(block, WORLD, sent_rows.TOKENS, load, machine, network, chunks=(chunks,))
    away = [sum(sum(to) - to[rank] for to in sent) for rank, (_, sent, *_) in enumerate(answers)]
    if chunks == 1 or not deduplicate:  # what travels is of one chunk
        assert found.traffic[deduplicate].bytes == pytest.approx(sum(away) / WORLD * block.row_bytes)
    # 4 bytes for a number, its weight, and the weight's gradient; a row travels four times, these once each.
    beside = sum(answer[3] for answer in answers)
    assert beside == (3 * 4 * sent_rows.TOP_K * sum(away) // 4 if deduplicate else 0)

    (spread,) = spreads("as it is", plans(1)["as it is"], load, WORLD, sent_rows.TOKENS)
    cut = Layer(block, WORLD, machine, network).cut(spread, sent_rows.TOKENS, chunks, deduplicate=deduplicate)
    dispatched = torch.tensor([sent[:chunks] for _, sent, *_ in answers])  # (source, chunk, destination)
    for chunk in range(chunks):
        assert cut.chunks[chunk].received.tolist() == dispatched[:, chunk].sum(0).tolist()
        assert cut.chunks[chunk].gathered * WORLD == int(dispatched[:, chunk].sum())
    if deduplicate:
        return
    filled = dispatched.sum((0, 1))
    assert found.balance.imbalance == pytest.approx(float(filled.max() / filled.double().mean()))


@pytest.mark.slow
@pytest.mark.parametrize("clones", [1, 2])
def test_four_ranks_with_clones_send_what_is_counted(ranks, clones):
    answers = ranks.run(sent_rows.sent_in_a_step, chunks=2, clones=clones)
    block = Block("ranks", sent_rows.HIDDEN, sent_rows.FFN, sent_rows.EXPERTS, sent_rows.TOP_K, dtype="float32")
    load = Load("ranks", ((torch.cat([torch.tensor(chosen) for chosen, *_ in answers]),),), sent_rows.EXPERTS)
    name = f"{clones} clone{'s' * (clones > 1)} a rank"
    options = {"machine": MACHINES["h100"], "network": NETWORKS["nvlink"], "spread": name, "worth": 1}
    found = simulate(block, WORLD, sent_rows.TOKENS, load, **options)
    assert found.balance.clones > 0
    assert found.clones_bytes == sum(answer[3] for answer in answers) / WORLD
    (spread,) = spreads(name, plans(1)[name], load, WORLD, sent_rows.TOKENS)
    cut = Layer(block, WORLD, MACHINES["h100"], NETWORKS["nvlink"]).cut(spread, sent_rows.TOKENS, 2, deduplicate=False)
    dispatched = torch.tensor([sent[:3] for _, sent, *_ in answers])  # (source, chunk, destination)
    for chunk, its in enumerate(cut.chunks):
        assert its.received.tolist() == dispatched[:, chunk].sum(0).tolist()
    assert dispatched.sum(1).tolist() == spread.pairs(False).tolist()
    filled = dispatched.sum((0, 1))
    assert found.balance.imbalance == pytest.approx(float(filled.max() / filled.double().mean()))
