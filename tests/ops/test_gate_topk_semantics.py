"""The promises of gate_topk by name, for the native operator and the reference, against a slow loop in Python."""

import math

import pytest
import torch

import pymoe.ops
import pymoe.reference
from pymoe.reference.scores import exp_in_fixed_steps, scores_in_fixed_steps

both = pytest.mark.parametrize("gate_topk", [pymoe.ops.gate_topk, pymoe.reference.gate_topk], ids=["native", "ref"])
NAN, INF = math.nan, math.inf


def rank_of(value, index):
    """Return the Python sort key for the order of choice: NaN first, then by value (-0 == +0), then the lower index."""
    return (not math.isnan(value), 0.0 if math.isnan(value) else -value, index)


def chosen_by_loop(choice, k, num_groups=None, topk_groups=None):
    """Return the k experts of one token, computed from its choice scores."""
    experts = range(len(choice))
    if num_groups is not None:
        size = len(choice) // num_groups
        scores = []
        for group in range(num_groups):
            members = range(group * size, (group + 1) * size)
            best = sorted(members, key=lambda e: rank_of(choice[e], e))[:2]
            total = torch.tensor([choice[e] for e in best], dtype=torch.float32).sum()
            scores.append(float(total))
        kept = sorted(range(num_groups), key=lambda group: rank_of(scores[group], group))[:topk_groups]
        experts = [e for e in experts if e // size in kept]
    return sorted(experts, key=lambda e: rank_of(choice[e], e))[:k]


def random_logits(tokens, num_experts, seed):
    """Return logits with ties, both zeros, infinities and NaN among ordinary values."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, num_experts, generator=generator).mul(2).round().div(2)
    special = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0])
    picked = special[torch.randint(0, 6, logits.shape, generator=generator)]
    return torch.where(torch.rand(logits.shape, generator=generator) < 0.2, picked, logits)


@both
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (8, 2), (8, 8), (63, 7), (160, 12), (257, 3), (70, 33)])
def test_choice_on_logits_equals_a_loop(gate_topk, num_experts, k):
    logits = random_logits(23, num_experts, seed=num_experts)
    gate = gate_topk(logits, k)
    assert gate.experts.tolist() == [chosen_by_loop(row, k) for row in logits.tolist()]


@both
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("num_experts", "k", "groups"), [(12, 3, (4, 2)), (64, 6, (8, 3)), (9, 4, (9, 5)), (16, 16, (2, 2))]
)
def test_choice_in_groups_with_bias_equals_a_loop(gate_topk, score, num_experts, k, groups):
    logits = random_logits(23, num_experts, seed=k)
    bias = torch.linspace(-1, 1, num_experts).mul(4).round().div(8)
    num_groups, topk_groups = groups
    gate = gate_topk(logits, k, score=score, bias=bias, num_groups=num_groups, topk_groups=topk_groups)
    choice = scores_in_fixed_steps(logits, score) + bias
    assert gate.experts.tolist() == [chosen_by_loop(row, k, num_groups, topk_groups) for row in choice.tolist()]


@both
def test_ties_go_to_the_lower_index(gate_topk):
    assert gate_topk(torch.zeros(3, 40), 12).experts.tolist() == [list(range(12))] * 3
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.0]])
    assert gate_topk(logits, 5).experts.tolist() == [[1, 3, 5, 2, 4]]


@both
def test_ties_of_groups_go_to_the_lower_group(gate_topk):
    gate = gate_topk(torch.zeros(2, 12), 4, score="sigmoid", num_groups=4, topk_groups=2)
    assert gate.experts.tolist() == [[0, 1, 2, 3]] * 2


@both
def test_negative_zero_ties_with_zero(gate_topk):
    assert gate_topk(torch.tensor([[-1.0, -0.0, 0.0, -0.0]]), 3).experts.tolist() == [[1, 2, 3]]


@both
def test_every_nan_comes_first_and_ties_with_every_other(gate_topk):
    payload = torch.tensor([0x7FC00001, -0x00400000 + 5], dtype=torch.int32).view(torch.float32)
    assert payload.isnan().all()
    logits = torch.tensor([[INF, float(payload[0]), 1.0, NAN, -INF, 0.0]])
    logits[0, 4] = payload[1]
    assert gate_topk(logits, 4).experts.tolist() == [[1, 3, 4, 0]]


@both
@pytest.mark.parametrize(
    "options", [{}, {"score": "sigmoid"}, {"renormalize": False}, {"num_groups": 4, "topk_groups": 3}]
)
def test_nan_stays_in_its_token(gate_topk, options):
    clean = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    dirty = clean.clone()
    dirty[5, 3], dirty[17, 2], dirty[20] = NAN, INF, -INF
    others = torch.tensor([t for t in range(40) if t not in (5, 17, 20)])
    for got, wanted in zip(gate_topk(dirty, 3, **options)[:2], gate_topk(clean, 3, **options)[:2], strict=True):
        assert torch.equal(got[others], wanted[others])
    assert gate_topk(dirty, 3, **options).weights[5].isnan().any()


@both
@pytest.mark.parametrize("k", [1, 2, 8, 16, 17, 33])
@pytest.mark.parametrize("fill", [NAN, INF, -INF, 0.0])
def test_experts_of_a_token_are_distinct_whatever_the_logits_hold(gate_topk, k, fill):
    logits = random_logits(30, 33, seed=k)
    logits[:10] = fill
    experts = gate_topk(logits, k).experts.long()
    assert (experts >= 0).all()
    assert (experts < 33).all()
    assert (torch.zeros(30, 33).scatter_add(1, experts, torch.ones(30, k)) <= 1).all()


@both
def test_bias_moves_the_choice_and_never_the_weights(gate_topk):
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    bias = torch.tensor([-100.0, 0.0, 0.0, 0.5])
    for score, scores in (("softmax", torch.softmax(logits, 1)), ("sigmoid", torch.sigmoid(logits))):
        gate = gate_topk(logits, 2, score=score, bias=bias, renormalize=False)
        assert gate.experts.tolist() == [[3, 1]]
        torch.testing.assert_close(gate.weights, scores[:, torch.tensor([3, 1])])
    bias.requires_grad_()
    assert not gate_topk(logits, 2, bias=bias).weights.requires_grad


@both
def test_load_counts_every_slot(gate_topk):
    logits = torch.randn(5000, 24, generator=torch.Generator().manual_seed(1)) + torch.linspace(0, 3, 24)
    gate = gate_topk(logits, 5)
    assert torch.equal(gate.load, torch.bincount(gate.experts.flatten(), minlength=24).int())
    assert int(gate.load.sum()) == 25000


@both
def test_renormalised_weights_add_up_to_the_scale(gate_topk):
    logits = torch.randn(50, 24, generator=torch.Generator().manual_seed(2))
    for score in ("softmax", "sigmoid"):
        total = gate_topk(logits, 5, score=score, scale=2.5).weights.sum(1)
        torch.testing.assert_close(total, torch.full((50,), 2.5))


@both
def test_sum_of_vanishing_scores_is_floored(gate_topk):
    weights = gate_topk(torch.full((1, 4), -60.0), 2, score="sigmoid").weights
    torch.testing.assert_close(weights, torch.full((1, 2), math.exp(-60.0) / 1e-20))
    assert gate_topk(torch.full((1, 4), -200.0), 2, score="sigmoid").weights.tolist() == [[0.0, 0.0]]


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_and_shapes_of_outputs(gate_topk, dtype):
    for tokens in (0, 3):
        gate = gate_topk(torch.zeros(tokens, 6, dtype=dtype), 2)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert [(tuple(part.shape), part.dtype) for part in gate] == [
            ((tokens, 2), wide),
            ((tokens, 2), torch.int32),
            ((6,), torch.int32),
        ]


@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.float32, -105, 90), (torch.float64, -747, 711)])
def test_exp_in_fixed_steps_is_within_two_ulp(dtype, low, high):
    x = torch.linspace(low, high, 200_001, dtype=dtype)
    ours, torchs = exp_in_fixed_steps(x), torch.exp(x.double()).to(dtype)
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    assert int((ours.view(bits) - torchs.view(bits)).abs().max()) <= 2
    special = exp_in_fixed_steps(torch.tensor([NAN, INF, -INF], dtype=dtype))
    assert special[0].isnan()
    assert special[1:].tolist() == [INF, 0.0]
