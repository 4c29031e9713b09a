"""Plans with clones match: what one rank sends, another receives, and every row has its place."""

import pytest
import torch
from expert_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from pymoe.ep.clones import RowPlanWithClones, plan_clones
from pymoe.ep.exchange import ExchangedCounts
from pymoe.ep.sharding import ExpertSharding
from pymoe.ops import build_routing

MANY = examples(60)


class Mesh:
    """A stand-in for the part of a mesh that a sharding uses."""

    def __init__(self, ranks, rank):
        self._ranks, self._rank = ranks, rank

    def size(self):
        return self._ranks

    def get_local_rank(self):
        return self._rank


@st.composite
def calls(draw):
    """Draw a sharding's fields, and the choices of every rank."""
    ranks, experts = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    fields = {
        "chunks": draw(st.integers(1, -(-experts // ranks))),
        "clones": draw(st.integers(1, 3)),
        "order": draw(st.none() | st.permutations(range(experts)).map(tuple)),
    }
    favourite = st.integers(0, experts - 1) | st.just(0)
    choices = [draw(st.lists(favourite, max_size=30)) for _ in range(ranks)]
    return fields, experts, [torch.tensor(one, dtype=torch.int32).reshape(-1, 1) for one in choices]


def plans(fields, experts, choices):
    """Return the plan of every rank."""
    loads = [torch.bincount(one.flatten(), minlength=experts).tolist() for one in choices]
    exchanged = ExchangedCounts(loads, [len(one) for one in choices], [[] for _ in choices])
    options = {"layer": "", "num_experts": experts, "scope": "rank", "max_recv_rows": None, **fields}
    return [
        RowPlanWithClones(ExpertSharding(mesh=Mesh(len(choices), rank), **options), exchanged, 1, None)
        for rank in range(len(choices))
    ]


@MANY
@given(calls())
def test_ranks_receive_what_others_send(call):
    made = plans(*call)
    for rank, one in enumerate(made):
        for other, its in enumerate(made):
            assert [sent[other] for sent in one.counts.sent] == [received[rank] for received in its.counts.received]
            lent, taken = (
                (0, 0)
                if one.weight_sends is None
                else (one.weight_sends.counts.sent[0][other], its.weight_sends.counts.received[0][rank])
            )
            assert lent == taken
    assert len({plan.weight_sends is None for plan in made}) == 1


@MANY
@given(calls())
def test_ranks_compute_what_the_plan_of_clones_says(call):
    fields, experts, choices = call
    made = plans(*call)
    counts = torch.stack([torch.bincount(one.flatten(), minlength=experts) for one in choices])
    owner = made[0].sharding.owner
    expected = plan_clones(counts, fields["clones"], owner=owner).destinations().sum(0).tolist()
    for rank, one in enumerate(made):
        assert one.rows_of_ranks() == expected
        assert sum(map(sum, one.counts.received)) == expected[rank]


@MANY
@given(calls())
def test_rows_are_sorted_by_where_they_go(call):
    _, experts, choices = call
    for rank, plan in enumerate(plans(*call)):
        order = torch.empty(experts, dtype=torch.int32)
        order[torch.tensor(plan.sharding.send_order)] = torch.arange(experts, dtype=torch.int32)
        routing = plan.in_send_order(build_routing(order[choices[rank].long()], experts))
        slot = routing.slot.flatten().long()
        assert slot.sort().values.tolist() == list(range(len(slot)))
        assert routing.token[slot].tolist() == list(range(len(slot)))
        expert = choices[rank].flatten()[routing.token.long()].tolist()
        start = 0
        for chunk, sent in enumerate(plan.counts.sent):
            for to, rows in enumerate(sent):
                here = set(expert[start : start + rows])
                start += rows
                own = plan.sharding.chunk_experts[chunk][to] if chunk < plan.sharding.chunks else ()
                assert here <= set(own) or (not own and not here & set(plan.sharding.experts_of_ranks[to]))
        assert start == len(slot)


def test_an_unnecessary_clone_is_not_taken():
    even = [torch.tensor([[0], [1]], dtype=torch.int32)] * 2
    for plan in plans({"chunks": 1, "clones": 1}, 2, even):
        assert plan.weight_sends is None
        assert plan.counts.sent == [[1, 1]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hot_expert_is_divided(rank):
    """Expert 0 has six rows from rank 0 and two from rank 1: rank 1 keeps its two and gets two more."""
    hot = [torch.zeros(6, 1, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)]
    plan = plans({"chunks": 1, "clones": 1}, 2, hot)[rank]
    assert plan.counts.sent == ([[4, 0], [0, 2]] if rank == 0 else [[0, 0], [0, 2]])
    assert plan.weight_sends.experts == ([[], [0]] if rank == 0 else [[], []])
    assert plan.weight_sends.counts.received == ([[0, 0]] if rank == 0 else [[1, 0]])
    assert plan.rows_by_expert[1] == ([[], []] if rank == 0 else [[2], [2]])
