"""A step has the gradients of ``loss_fn(model(x), y).backward()`` or raises, whatever the loss does with rows.

The losses that a step refuses are not means over rows of terms that depend on one row each. Every loss here is tried
with even and uneven micro-batches, and with one row each.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pymoe.pipe import Pipe

D, ROWS, WIDTH = torch.float64, 8, 5


def normalised(z: Tensor) -> Tensor:
    return F.normalize(z, dim=-1)


def contrastive(z: Tensor, y: Tensor) -> Tensor:
    z = normalised(z)
    return F.cross_entropy(z @ (z + y).T / 0.1, torch.arange(len(z)))


def covariance(z: Tensor, y: Tensor) -> Tensor:
    centred = z - z.mean(0)
    return (centred.T @ centred / len(z)).square().sum()


def of_views(z: Tensor, y: Tensor) -> Tensor:
    """SimCLR: the two halves of a batch are views of the same objects."""
    one, other = normalised(z).chunk(2)
    return F.cross_entropy(one @ other.T, torch.arange(len(one)))


def row_by_row(z: Tensor, y: Tensor) -> Tensor:
    return sum([(a - b).norm() for a, b in zip(z, y, strict=True)]) / len(z)


def row_by_row_stacked(z: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.mse_loss(z[i], y[i]).sqrt() for i in range(len(z))]).mean()


def pairs_by_hand(z: Tensor, y: Tensor) -> Tensor:
    return sum([(z[i] - z[i - 1]).square().sum() for i in range(len(z))]) / len(z)


def hard_examples(z: Tensor, y: Tensor) -> Tensor:
    losses = (z - y).square().mean(1)
    return losses.topk(max(1, len(z) // 2)).values.mean()


def concordance(z: Tensor, y: Tensor) -> Tensor:
    a, b = z[:, 0] - z[:, 0].mean(), y[:, 0] - y[:, 0].mean()
    return 1 - (a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt() + 1)


def dice(z: Tensor, y: Tensor) -> Tensor:
    p = z.sigmoid()
    return 1 - 2 * (p * y).sum() / (p + y.square()).sum()


def dice_by_row(z: Tensor, y: Tensor) -> Tensor:
    p = z.sigmoid()
    return (1 - 2 * (p * y).sum(1) / (p + y.square()).sum(1)).mean()


def softmax_by_hand(z: Tensor, y: Tensor) -> Tensor:
    e = (z - z.max(1, keepdim=True).values).exp()
    return -((e / e.sum(1, keepdim=True)).log() * y.softmax(1)).sum(1).mean()


def column_means(z: Tensor, y: Tensor) -> Tensor:
    mask = (y > 0).to(D)
    return ((z * mask).sum(0) / (mask.sum(0) + 1)).mean()


def hard_examples_by_gather(losses: Tensor) -> Tensor:
    return losses.gather(0, losses.detach().topk(len(losses) // 2).indices).mean()


REFUSED = {
    "norm": lambda z, y: z.norm(),
    "distance": lambda z, y: torch.dist(z, y),
    "max": lambda z, y: (z - y).abs().max(),
    "amax": lambda z, y: (z - y).amax(),
    "median": lambda z, y: (z - y).square().median(),
    "quantile": lambda z, y: torch.quantile((z - y).square(), 0.5),
    "quantiles of columns": lambda z, y: torch.quantile((z - y).square(), 0.3, dim=0).mean(),
    "first row": lambda z, y: (z - y).square().sum(1)[0],
    "first of the rows": lambda z, y: (z - y).square().unbind(0)[0].mean(),
    "all rows but the last": lambda z, y: (z - y)[:-1].square().mean(),
    "worst row": lambda z, y: (z - y).square().sum(1)[(z - y).detach().square().sum(1).argmax()],
    "worst rows by gather": lambda z, y: hard_examples_by_gather((z - y).square().sum(1)),
    "std": lambda z, y: z.std(),
    "var": lambda z, y: z.var(),
    "logsumexp": lambda z, y: torch.logsumexp(z.flatten(), 0),
    "prod": lambda z, y: z.prod(),
    "sum": lambda z, y: (z - y).square().sum(),
    "half a sum": lambda z, y: 0.5 * (z - y).square().sum(),
    "sum of means": lambda z, y: (z - y).square().mean(1).sum(),
    "mean of sums": lambda z, y: (z - y).square().sum(0).mean(),
    "sums in a stack": lambda z, y: torch.stack([z.sum(), (z * y).sum()]).mean(),
    "dot product": lambda z, y: torch.dot(z.flatten(), y.flatten()),
    "product of means": lambda z, y: z.mean() * (z * y).mean(),
    "square of a mean": lambda z, y: (z - y).mean() ** 2,
    "quotient of means": lambda z, y: z.square().mean() / (1 + (z * y).square().mean()),
    "difference of means squared": lambda z, y: (z.mean(0) - y.mean(0)).square().sum(),
    "features match": lambda z, y: F.mse_loss(z.mean(0), y.mean(0)),
    "entropy of the mean": lambda z, y: (z.softmax(1).mean(0) * z.softmax(1).mean(0).log()).sum(),
    "hinge of means": lambda z, y: F.relu((z * y).mean(0)).sum(),
    "contrastive": contrastive,
    "triplets with a roll": lambda z, y: F.triplet_margin_loss(z, z + y, (z + y).roll(1, 0)),
    "triplets with an order": lambda z, y: F.mse_loss(z, z[torch.arange(len(z)).flip(0)]),
    "pairs of distances": lambda z, y: torch.cdist(z, z).mean(),
    "differences of all pairs": lambda z, y: (z[:, None] - z[None]).square().mean(),
    "cosines of all pairs": lambda z, y: F.cosine_similarity(z[:, None], z[None], dim=-1).square().mean(),
    "pairs by einsum": lambda z, y: torch.einsum("ik,jk->ij", z, z).exp().mean(),
    "pairs by hand": pairs_by_hand,
    "neighbours": lambda z, y: (z[1:] - z[:-1]).square().sum() / len(z),
    "views": of_views,
    "covariance": covariance,
    "variance of features": lambda z, y: F.relu(1 - z.std(0, correction=0)).mean(),
    "normalised over rows": lambda z, y: (F.normalize(z, dim=0) * y).sum(1).mean(),
    "softmax over rows": lambda z, y: (z.softmax(0) * y).sum(1).mean(),
    "log softmax over rows": lambda z, y: F.nll_loss(z.T.log_softmax(1), torch.zeros(WIDTH, dtype=torch.long)),
    "softmax of everything": lambda z, y: (z.flatten().softmax(0) * y.flatten()).mean(),
    "centred": lambda z, y: (z - z.mean(0)).square().mean(),
    "hard examples": hard_examples,
    "sorted": lambda z, y: (z.sort(0).values - y.sort(0).values).abs().mean(),
    "running total": lambda z, y: z.cumsum(0).square().mean(),
    "correlation": concordance,
    "dice of a batch": dice,
    "weights of their own": lambda z, y: (z.sigmoid() * y.square()).sum() / z.sigmoid().sum(),
    "means of columns with masks": column_means,
}
EQUAL = {
    "rows one by one": lambda z, y: sum((a - b).square().mean() for a, b in zip(z.unbind(0), y, strict=True)) / len(z),
    "rows by their places": lambda z, y: sum((z[i] - y[i]).square().mean() for i in range(len(z))) / len(z),
    "rows in two slices": lambda z, y: (torch.cat([z[:1], z[1:]]) - y).square().mean(),
    "a row that is also among all": lambda z, y: (z - y).square().mean() + 0.0 * z[0].sum(),
    "mean": lambda z, y: (z - y).square().mean(),
    "mean of a flat view": lambda z, y: (z - y).view(-1).square().mean(),
    "sum over rows divided": lambda z, y: (z - y).square().sum() / len(z),
    "sum over elements divided": lambda z, y: (z - y).square().sum() / z.numel(),
    "sum of features, mean of rows": lambda z, y: (z - y).square().sum(1).mean(),
    "mean of rows, sum of features": lambda z, y: (z - y).square().mean(0).sum(),
    "mean of rows, weighted sum": lambda z, y: (z.square().mean(0) * torch.arange(WIDTH)).sum(),
    "norm of each row": lambda z, y: (z - y).norm(dim=1).mean(),
    "max of each row": lambda z, y: (z - y).max(1).values.mean(),
    "variance of each row": lambda z, y: z.var(1).mean(),
    "sorted features": lambda z, y: (z.sort(1).values - y.sort(1).values).abs().mean(),
    "logsumexp of each row": lambda z, y: z.logsumexp(1).square().mean(),
    "softmax by hand": softmax_by_hand,
    "cross entropy of a transpose": lambda z, y: -(z.T.log_softmax(0) * y.T).mean(),
    "chosen classes": lambda z, y: -z.log_softmax(1)[torch.arange(len(z)), y.argmax(1)].mean(),
    "gathered classes": lambda z, y: -z.log_softmax(1).gather(1, y.argmax(1, keepdim=True)).mean(),
    "row by row": row_by_row,
    "row by row, stacked": row_by_row_stacked,
    "several losses": lambda z, y: torch.stack([F.mse_loss(z, y), z.abs().mean()]).sum(),
    "weighted losses": lambda z, y: (torch.stack([F.mse_loss(z, y), z.mean()]) * torch.tensor([1.0, 0.2])).sum(),
    "prototypes": lambda z, y: torch.cdist(z, torch.eye(WIDTH, dtype=D)).min(1).values.mean(),
    "scores of constant classes": lambda z, y: F.cross_entropy(normalised(z) @ torch.eye(WIDTH, dtype=D), y.argmax(1)),
    "products of features": lambda z, y: (z[:, :, None] @ z[:, None]).square().mean(),
    "products by einsum": lambda z, y: torch.einsum("bi,bj->bij", z, y).exp().mean(),
    "all at once by einsum": lambda z, y: torch.einsum("bi,bi->", z, y) / len(z),
    "positives and negatives": lambda z, y: F.softplus(torch.cat([z[:, :2], -z[:, 2:]], 1)).mean(),
    "dice of each row": dice_by_row,
    "mean products": lambda z, y: (z.T @ y / len(z)).trace(),
    "unsqueezed": lambda z, y: (z.unsqueeze(1).squeeze(1) - y).square().mean(),
    "folded features": lambda z, y: z.view(len(z), WIDTH, 1).permute(1, 0, 2).logsumexp(2).mean(),
    "nothing": lambda z, y: (z - y).square().mean() + 0 * z.sum(),
    "a constant": lambda z, y: z.mean() + y.std() * 0 + 3,
    "cosine": lambda z, y: 1 - F.cosine_similarity(z, y).mean(),
    "clamped": lambda z, y: (z - y).square().mean(1).clamp(max=2).mean(),
    "layer norm": lambda z, y: F.layer_norm(z, (WIDTH,)).mul(y).mean(),
}


torch.manual_seed(5)
LSTM = nn.LSTM(1, 3, batch_first=True, dtype=D)
ATTENTION = nn.MultiheadAttention(2, 2, batch_first=True, dtype=D)


def with_attention(z: Tensor, y: Tensor) -> Tensor:
    parts = z[:, :4].view(-1, 2, 2)
    return ATTENTION(parts, parts, parts)[0].square().mean()


def focal(z: Tensor, y: Tensor) -> Tensor:
    chosen = z.softmax(1).gather(1, y.argmax(1)[:, None])[:, 0]
    return ((1 - chosen) ** 2 * F.cross_entropy(z, y.argmax(1), reduction="none")).mean()


def gradient_penalty(z: Tensor, y: Tensor) -> Tensor:
    return torch.autograd.grad((z**3).sum(), z, create_graph=True)[0].norm(dim=1).mean()


EQUAL |= {
    "a recurrent network": lambda z, y: LSTM(z[:, :, None])[0].square().mean(),
    "its last state": lambda z, y: LSTM(z[:, :, None])[1][0].square().mean(),
    "attention": with_attention,
    "focal": focal,
    "gradient penalty": gradient_penalty,
    "tokens in rows": lambda z, y: F.cross_entropy(
        z[:, None].expand(-1, 3, -1).reshape(-1, WIDTH), y.argmax(1).repeat_interleave(3)
    ),
    "rows mapped": lambda z, y: torch.vmap(lambda a, b: (a - b).norm())(z, y).mean(),
    "nested": lambda z, y: torch.nested.as_nested_tensor([*z]).to_padded_tensor(0.0).square().mean(),
    "log densities": lambda z, y: torch.distributions.Normal(z, 1.0).log_prob(y).mean(),
}


class Uncertainty(nn.Module):
    """Kendall et al. (2018): the weights of several losses are learnt. Also a regulariser of its parameters."""

    def __init__(self, weighted) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([0.3, -0.2], dtype=D))
        self.weighted = weighted

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        losses = [z.square().mean(), z.abs().mean() if y is None else F.mse_loss(z, y)]
        return sum([self.weighted(s, loss) for s, loss in zip(self.scales, losses, strict=True)])


LEARNT = {
    "exponentials": lambda s, loss: torch.exp(-s) * loss + s,
    "quotients": lambda s, loss: loss / (2 * s.exp() ** 2) + torch.log(1 + s.exp() ** 2),
    "the factors themselves": lambda s, loss: loss * (0.5 * s) + s.square(),
    "softplus": lambda s, loss: F.softplus(s) * loss,
    "a norm": lambda s, loss: s * loss + 0.1 * torch.linalg.vector_norm(s.expand(3)),
}


@pytest.mark.parametrize("chunks", [2, 3, ROWS])
@pytest.mark.parametrize("name", LEARNT)
def test_losses_may_have_learnt_weights(name: str, chunks: int) -> None:
    """A factor on the loss is also a path to the weight; it was mistaken for a sign of unequal losses."""
    loss_fn = Uncertainty(LEARNT[name])
    plain = copy.deepcopy(loss_fn)
    model = model_of()
    of_plain = copy.deepcopy(model)
    x, y = torch.randn(ROWS, 3, dtype=D), torch.randn(ROWS, WIDTH, dtype=D)
    plain(of_plain(x), y).backward()
    Pipe(model, chunks, balance=[2, 1]).step(x, target=y, loss_fn=loss_fn)
    pairs = [*zip([*model.parameters(), loss_fn.scales], [*of_plain.parameters(), plain.scales], strict=True)]
    torch.testing.assert_close([a.grad for a, _ in pairs], [b.grad for _, b in pairs])


@pytest.mark.parametrize("balance", [[1, 3], [3, 1]])
@pytest.mark.parametrize("name", LEARNT)
def test_a_models_own_loss_may_have_learnt_weights(name: str, balance: list[int]) -> None:
    model = nn.Sequential(*model_of(), Uncertainty(LEARNT[name]))
    plain, called = copy.deepcopy(model), copy.deepcopy(model)
    x = torch.randn(ROWS, 3, dtype=D)
    plain(x).backward()
    Pipe(model, 3, balance=balance).step(x)
    Pipe(called, 3, balance=balance).step(x, reduction=len)
    expected = [parameter.grad for parameter in plain.parameters()]
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
    torch.testing.assert_close([parameter.grad for parameter in called.parameters()], expected)


@pytest.mark.parametrize("chunks", [2, 3])
def test_learnt_weights_hide_no_loss_that_is_no_mean(chunks: int) -> None:
    """A weight that depends on the target, and a weighted sum, are still detected."""
    scale = nn.Parameter(torch.tensor(0.3, dtype=D))
    of_target = nn.Linear(WIDTH, 1).to(D)
    assert outcome(lambda z, y: scale.exp() * (z - y).square().sum(), chunks) == "refused"
    assert outcome(lambda z, y: of_target(y).mean() * z.square().mean(), chunks) == "refused"
    assert outcome(lambda z, y: scale * z.square().mean() / (y > 0).sum(), chunks) == "refused"
    embedding = nn.Embedding(4, 2)
    for function in (torch.linalg.vector_norm, lambda x: x.mean() * x.exp().mean(), lambda x: scale * x.mean().exp()):
        pipe = Pipe(nn.Sequential(embedding, Last(function)), 2)
        with pytest.raises(ValueError, match="the loss"):
            pipe.step(torch.tensor([0, 1, 2, 3]))


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, WIDTH)).to(D)


def outcome(loss_fn, chunks: int, **options) -> str:
    model = model_of()
    plain = copy.deepcopy(model)
    x, y = torch.randn(ROWS, 3, dtype=D), torch.randn(ROWS, WIDTH, dtype=D)
    loss_fn(plain(x), y).backward()
    try:
        Pipe(model, chunks, balance=[2, 1]).step(x, target=y, loss_fn=loss_fn, **options)
    except ValueError as error:
        refused = str(error)
        assert refused.startswith("Pipe.step: the loss")
        assert all([parameter.grad is None for parameter in model.parameters()])
        return "refused"
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return "equal" if all([torch.allclose(a.grad, b.grad, rtol=1e-10, atol=1e-13) for a, b in pairs]) else "different"


OF_SEVERAL_ROWS = {"views", "neighbours", "pairs by hand", "pairs by einsum"}
OF_SEVERAL_ROWS |= {"first row", "first of the rows", "worst row", "quantiles of columns"}
"""These need an even number of rows, or compute something else for one row."""


@pytest.mark.thinned(usual=60)
@pytest.mark.parametrize("chunks", [2, 3, ROWS])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mean_over_rows_is_refused(name: str, chunks: int) -> None:
    if name in OF_SEVERAL_ROWS:
        chunks = min(chunks, 4) // 2 * 2
    assert outcome(REFUSED[name], chunks) == "refused"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("chunks", [2, 3, ROWS])
@pytest.mark.parametrize("name", EQUAL)
def test_means_over_rows_of_any_making_have_the_gradients_of_the_model(name: str, chunks: int) -> None:
    assert outcome(EQUAL[name], chunks) == "equal"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_other_gradients_in_micro_batches(name: str) -> None:
    """Forcing the refused losses to be treated as means over rows gives wrong gradients, so the refusals are right."""
    assert outcome(REFUSED[name], 4, reduction=len) == "different"
    assert outcome(REFUSED[name], 1) == "equal"  # one micro-batch is the whole mini-batch


def test_an_output_whose_rows_are_not_its_dimension_0_is_not_judged() -> None:
    class TimeFirst(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.unflatten(1, (3, 1)).transpose(0, 1)  # (3, rows, 1)

    model = nn.Sequential(nn.Linear(3, 3), TimeFirst()).to(D)
    plain = copy.deepcopy(model)
    x = torch.randn(ROWS, 3, dtype=D)

    def smooth(z: Tensor) -> Tensor:
        return (z - z.mean(0)).square().mean()  # a mean over time

    smooth(plain(x)).backward()
    Pipe(model, 4).step(x, loss_fn=smooth)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


class Last(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("function", [torch.linalg.vector_norm, torch.max, lambda x: x.square().mean().sqrt()])
def test_a_models_own_loss_that_is_one_number_of_a_whole_micro_batch_is_refused(function) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(3, 2), Last(function)), 4)
    with pytest.raises(ValueError, match=r"of a whole micro-batch|is the Sqrt of a mean"):
        pipe.step(torch.randn(ROWS, 3))
    pipe.step(torch.randn(ROWS, 3), reduction=len)
