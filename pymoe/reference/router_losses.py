"""router_losses: computes the auxiliary losses that keep a router balanced and its logits small."""

from __future__ import annotations

from torch import Tensor

from pymoe._common.contracts import check_logits, check_router_losses
from pymoe._common.types import RouterLosses, Score, accumulate_dtype
from pymoe.reference.fixed_steps import divided_rows, logsumexp, sigmoid, softmax, sum_in_tree
from pymoe.reference.scores import SUM_FLOOR, sum_in_lanes


def _load_balancing(values: Tensor, load: Tensor, score: Score) -> Tensor:
    tokens, num_experts = values.shape
    if score == "softmax":
        probabilities = softmax(values)
    else:
        scores = sigmoid(values)
        probabilities = divided_rows(scores, sum_in_lanes(scores).clamp(min=SUM_FLOOR))
    mean_probability = sum_in_tree(probabilities, 0) / max(tokens, 1)
    fraction = load.to(values.dtype) / load.sum().clamp(min=1).to(values.dtype)
    return num_experts * sum_in_tree(fraction * mean_probability, 0)


def _z(values: Tensor) -> Tensor:
    lse = logsumexp(values)
    return sum_in_tree(lse * lse, 0) / max(values.shape[0], 1)


def load_balancing_loss(logits: Tensor, load: Tensor, *, score: Score = "softmax") -> Tensor:
    """Return the balancing loss of the Switch Transformer (arXiv 2101.03961, equations 4 to 6): E * sum_e f_e * P_e.

    f_e is the fraction of all slots that expert e got, ``load[e] / load.sum()``, and P_e the mean over tokens of its
    probability: the softmax of the logits, or for ``"sigmoid"`` the scores divided by the token's sum of scores,
    floored at 1e-20 (DeepSeek-V3, arXiv 2412.19437). Perfect balance gives 1; T = 0 or a load of zeros gives 0.

    Args:
        logits: (T, E), any floating dtype.
        load: (E,) int32 or int64, the number of slots of each expert: ``Gate.load``, or its sum over ranks or steps.
        score: ``"softmax"`` or ``"sigmoid"``.

    Returns:
        A scalar, float32 (float64 for float64 logits); differentiable in ``logits``.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a rank, size, device or name does not fit.

    Example:
        >>> logits, load = torch.zeros(6, 3), torch.tensor([4, 4, 4], dtype=torch.int32)  # 6 tokens, 2 choices each
        >>> pymoe.ops.load_balancing_loss(logits, load)  # 1 is perfect balance
        tensor(1.)
    """
    check_router_losses("load_balancing_loss", logits, load, score)
    return _load_balancing(logits.to(accumulate_dtype(logits.dtype)), load, score)


def router_z_loss(logits: Tensor) -> Tensor:
    """Return the z-loss of ST-MoE (arXiv 2202.08906, equation 5): the mean over tokens of logsumexp(logits)^2.

    Args:
        logits: (T, E), any floating dtype.

    Returns:
        A scalar, float32 (float64 for float64 logits), 0 for T = 0; differentiable in ``logits``.

    Raises:
        TypeError: the dtype is not floating.
        ValueError: the rank is not 2, or E = 0.

    Example:
        >>> pymoe.ops.router_z_loss(torch.zeros(6, 4))  # the mean square of log(4)
        tensor(1.9218)
    """
    check_logits("router_z_loss", logits)
    return _z(logits.to(accumulate_dtype(logits.dtype)))


def router_losses(logits: Tensor, load: Tensor, *, score: Score = "softmax") -> RouterLosses:
    """Return both auxiliary losses of a router, from one pass over its logits.

    Args:
        logits: (T, E), any floating dtype.
        load: (E,) int32 or int64, as for :func:`load_balancing_loss`.
        score: ``"softmax"`` or ``"sigmoid"``: turns logits into probabilities for the balancing loss.

    Returns:
        RouterLosses of ``load_balancing`` (:func:`load_balancing_loss`) and ``z`` (:func:`router_z_loss`), scalars in
        float32 (float64 for float64 logits); both differentiable in ``logits``. Native results are the same for any
        number of threads and agree with the reference within rounding.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: a rank, size, device or name does not fit.
    """
    check_router_losses("router_losses", logits, load, score)
    values = logits.to(accumulate_dtype(logits.dtype))
    return RouterLosses(_load_balancing(values, load, score), _z(values))
