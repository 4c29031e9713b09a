"""Counts, choices and settings for property tests of plans and simulations."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from limits import rounds


def examples(number):
    """Decorate a property test to run ``number`` examples, the same in every run, and ten times as many
    exhaustively.
    """
    return settings(max_examples=rounds(number, 10 * number), deadline=None, derandomize=True, database=None)


@st.composite
def counts(draw):
    """Draw the (R, E) rows from each source rank for each expert."""
    ranks, experts = draw(st.integers(1, 9)), draw(st.integers(1, 16))
    row = st.lists(st.integers(0, 40) | st.integers(0, 400), min_size=experts, max_size=experts)
    return torch.tensor(draw(st.lists(row, min_size=ranks, max_size=ranks)))


def random_choices(tokens, experts, top_k, seed, skew=0.0):
    """Draw the distinct experts of each token, (N, K) int64."""
    random = torch.Generator().manual_seed(seed)
    popularity = -skew * torch.arange(1, experts + 1).log()
    noise = -torch.empty(tokens, experts).exponential_(generator=random).log()
    return (popularity + noise).topk(top_k, dim=1).indices
