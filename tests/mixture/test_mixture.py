"""Tests of a mixture whose backends are all alive: it equals a plain layer, and behaves as a module."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from mixtures import LONG, ROW, WIDTH, Logits, Plain, Scaled, backend, mixture, mlp, scaled
from torch import Tensor, nn

from pymoe.reference import load_balancing_loss
from pymoe.runtime import BatchTensorProto, ExpertBackend, MixtureOfExpertBackends, Runtime


def close(mine: Tensor, its: Tensor) -> None:
    torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


# --- equal to the plain layer ---


@pytest.mark.parametrize("rows", [0, 1, 7, 33])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_outputs_gradients_and_updates_are_those_of_the_plain_mixture(top_k: int, rows: int) -> None:
    backends = [backend(f"e{i}", mlp(i)) for i in range(4)]
    moe = mixture(backends, top_k=top_k)
    plain = Plain(moe)
    optimizer = torch.optim.SGD(plain.experts.parameters(), lr=0.05)
    with Runtime(backends, num_workers=2):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
            grad = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
            mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
            optimizer.zero_grad()
            y, expected = moe(mine), plain(its)
            close(y, expected)
            y.backward(grad)
            if rows:
                expected.backward(grad)
                close(mine.grad, its.grad)
                for one, other in zip(moe.gate.parameters(), plain.gate.parameters(), strict=True):
                    close(one.grad, other.grad)
                    one.grad = other.grad = None
            optimizer.step()
            for one, other in zip(backends, plain.experts, strict=True):
                for parameter, expected_one in zip(one.expert.parameters(), other.parameters(), strict=True):
                    close(parameter, expected_one)
    assert sum(one.forward.rows for one in moe.stats().values()) == 3 * rows * top_k


def test_a_backend_that_no_row_chose_is_not_asked() -> None:
    backends = scaled(None, None, None)
    moe = mixture(backends, gate=Logits([0.0, -1.0, 1.0]), top_k=2)
    with Runtime(backends):
        moe(torch.ones(5, WIDTH, dtype=torch.float64)).sum().backward()
    requests = {name: (one.forward.requests, one.backward.requests) for name, one in moe.stats().items()}
    assert requests == {"e0": (1, 1), "e1": (0, 0), "e2": (1, 1)}
    assert [one.updates for one in backends] == [1, 0, 1]
    assert moe.gate.logits.grad[1] == 0


def test_minus_infinity_is_never_chosen_and_such_a_row_asks_fewer() -> None:
    backends = scaled(None, None, None)
    inf = torch.inf
    gate = Logits([[0.0, -inf, -inf], [0.0, 0.0, -inf], [-inf, -inf, -inf]])
    moe = mixture(backends, gate=gate, top_k=2, on_too_few="fallback")
    with Runtime(backends):
        y = moe(torch.ones(3, WIDTH, dtype=torch.float64))
        y.sum().backward()
    assert y[:, 0].tolist() == [1.0, 1.5, 0.0]
    assert moe.stats()["e2"].forward.requests == 0
    assert torch.isfinite(gate.logits.grad).all()


class Pair(nn.Module):
    """Returns two tensors of different shapes, from a matrix per row, an index into a table, and a keyword argument."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(5, 6).double()

    def forward(self, x: Tensor, index: Tensor, *, scale: Tensor, flag: str) -> dict[str, Any]:
        assert flag == "on"
        mixed = x.flatten(1) * self.table(index) * scale[:, None]
        return {"wide": mixed.view(x.shape), "narrow": (mixed.sum(1), mixed.amax(1))}


def test_structures_go_in_and_come_out_with_integers_and_constants_among_them() -> None:
    double = torch.float64
    experts = [Pair(i) for i in range(3)]
    backends = [
        ExpertBackend(
            f"p{i}",
            expert,
            torch.optim.SGD(expert.parameters(), lr=0.1),
            args_schema=[BatchTensorProto(2, 3, dtype=double), BatchTensorProto(dtype=torch.int64)],
            kwargs_schema={"scale": BatchTensorProto(dtype=double), "flag": "on"},
        )
        for i, expert in enumerate(experts)
    ]
    moe = mixture(backends, top_k=2)
    plain = copy.deepcopy(moe.gate)
    twins = copy.deepcopy(experts)
    x = torch.randn(6, 2, 3, dtype=double, requires_grad=True)
    index = torch.tensor([0, 1, 2, 3, 4, 0])
    scale = torch.rand(6, dtype=double, requires_grad=True)
    with Runtime(backends):
        mine = moe(x, index, scale=scale, flag="on")
        assert mine["wide"].shape == (6, 2, 3)
        (mine["wide"].sum() + mine["narrow"][1].square().sum()).backward()  # one output gets no gradient
    got = [x.grad, scale.grad, moe.gate.weight.grad]
    x.grad = scale.grad = None
    best = plain(x).topk(2, dim=1)
    every = [twin(x, index, scale=scale, flag="on") for twin in twins]
    weights = torch.zeros(6, 3, dtype=double).scatter(1, best.indices, best.values.softmax(1))

    def mixed(parts: list[Tensor]) -> Tensor:
        return sum(weights[:, i].view(-1, *[1] * (part.dim() - 1)) * part for i, part in enumerate(parts))

    wide, narrow = mixed([one["wide"] for one in every]), mixed([one["narrow"][1] for one in every])
    close(mine["wide"], wide)
    close(mine["narrow"][1], narrow)
    close(mine["narrow"][0], mixed([one["narrow"][0] for one in every]))
    (wide.sum() + narrow.square().sum()).backward()
    for one, other in zip(got, [x.grad, scale.grad, plain.weight.grad], strict=True):
        close(one, other)


def test_repeated_calls_are_bit_equal() -> None:
    backends = [backend(f"e{i}", mlp(i), lr=None) for i in range(4)]
    moe = mixture(backends, top_k=3)
    x = torch.randn(50, WIDTH, dtype=torch.float64)
    results = set()
    with Runtime(backends, num_workers=2):
        for _ in range(10):
            leaf = x.clone().requires_grad_()
            y = moe(leaf)
            y.square().sum().backward()
            results.add((y.detach().numpy().tobytes(), leaf.grad.numpy().tobytes()))
    assert len(results) == 1


@pytest.mark.parametrize("capacity", [None, 1])
def test_a_mixture_inside_an_expert_of_the_same_runtime_needs_no_second_worker(capacity: int | None) -> None:
    """The only worker waits, inside a batch, for requests that no other thread could run."""
    inner = [backend(f"inner{i}", Scaled(i + 1.0), capacity=capacity, max_batch_size=1, lr=0.0) for i in range(2)]
    nested = mixture(inner, gate=Logits([0.0, 0.0]))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return nested(self.weight * x)

    outer = [backend("outer", Outer()), backend("plain", Scaled(2.0))]
    moe = mixture(outer, gate=Logits([0.0, 0.0]))
    x = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True)
    with Runtime([*outer, *inner], num_workers=1):
        y = moe(x)
        y.sum().backward()
    assert torch.equal(y, 1.75 * torch.ones_like(y))
    close(x.grad, torch.full_like(x, 1.75))
    assert outer[0].updates == 1
    assert inner[0].updates > 0


# --- a module ---


def test_the_experts_train_as_a_models_first_layer_and_with_a_frozen_gate() -> None:
    backends = scaled(None, None)
    moe = mixture(backends)
    moe.gate.requires_grad_(False)
    with Runtime(backends):
        moe(torch.ones(3, WIDTH, dtype=torch.float64)).sum().backward()
    assert [one.updates for one in backends] == [1, 1]


def test_frozen_experts_pass_gradients_on() -> None:
    backends = scaled(None, None, lr=None)
    moe = mixture(backends, gate=Logits([0.0, 0.0]))
    x = torch.ones(3, WIDTH, dtype=torch.float64)
    with Runtime(backends):
        moe(x).sum().backward()  # only the gate gets gradients, so no expert is asked for a backward pass
        assert moe.stats()["e0"].backward.requests == 0
        moe(x.requires_grad_()).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 1.5))
    assert [one.updates for one in backends] == [0, 0]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_only_computes(context: Any) -> None:
    backends = scaled(None, None)
    moe = mixture(backends, gate=Logits([0.0, 0.0]))
    with Runtime(backends), context():
        y = moe(torch.ones(3, WIDTH, dtype=torch.float64))
        assert not y.requires_grad
        assert torch.equal(y, torch.full_like(y, 1.5))


def test_second_derivatives_are_refused() -> None:
    backends = scaled(None, None)
    moe = mixture(backends)
    x = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True)
    with Runtime(backends):
        (grad,) = torch.autograd.grad(moe(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            grad.sum().backward()


def test_under_autocast_inputs_are_cast_and_the_gate_is_not() -> None:
    seen = []
    proto = BatchTensorProto(WIDTH)
    backends = [
        backend(f"e{i}", Scaled(2.0, lambda x: seen.append(x.dtype)).float(), args_schema=[proto], outputs_schema=proto)
        for i in range(2)
    ]
    moe = MixtureOfExpertBackends(backends, top_k=2)
    x = torch.randn(3, WIDTH, requires_grad=True)
    with Runtime(backends):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = moe(x.bfloat16())
        y.sum().backward()
    assert set(seen) == {torch.float32}
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, 2 * x.bfloat16().float())


def test_a_copy_has_a_gate_of_its_own_and_asks_the_same_backends() -> None:
    backends = scaled(None, None)
    moe = mixture(backends)
    twin = copy.deepcopy(moe)
    assert twin.backends == moe.backends
    assert twin.gate.weight is not moe.gate.weight
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    with Runtime(backends):
        assert torch.equal(twin(x), moe(x))
        assert twin.stats()["e0"].forward.requests == moe.stats()["e0"].forward.requests
        twin.remove_backend("e0")
        assert list(moe.backends) == ["e0", "e1"]
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(moe)


def test_its_state_is_that_of_the_gate_and_says_whose_columns_are_whose() -> None:
    first, second, third = scaled(None, None, None)
    moe = mixture([first, second], max_experts=3)
    moe.remove_backend("e0")
    moe.add_backend(third)
    assert moe.slots == {"e2": 0, "e1": 1}
    state = moe.state_dict()
    assert set(state) == {"gate.weight", "gate.bias", "_extra_state"}
    other = mixture([first, second, third], max_experts=3)
    other.load_state_dict(state)
    assert other.slots == {"e2": 0, "e1": 1, "e0": 2}
    assert torch.equal(other.gate.weight, moe.gate.weight)
    del state["_extra_state"]
    other.load_state_dict(state)  # the state of a bare gate leaves the slots unchanged
    assert other.slots == {"e2": 0, "e1": 1, "e0": 2}
    assert list(moe.parameters()) == list(moe.gate.parameters())


def test_the_balancing_loss_reaches_the_gate_by_itself() -> None:
    backends = scaled(None, None, None)
    moe = mixture(backends, aux_loss_coef=0.1, max_experts=4)
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    with Runtime(backends):
        (0 * moe(x)).sum().backward()
        with_loss = moe.gate.weight.grad.clone()
        assert with_loss[:3].abs().sum() > 0
        assert with_loss[3].abs().sum() == 0
        moe.gate.weight.grad = None
        moe.eval()
        (0 * moe(x)).sum().backward()
        assert moe.gate.weight.grad.abs().sum() == 0
        logits = moe.gate(x)[:, :3]
    load = torch.bincount(logits.topk(2).indices.flatten(), minlength=3)
    torch.testing.assert_close(moe.router_losses.load_balancing, load_balancing_loss(logits, load))


def test_the_balancing_loss_counts_only_the_rows_that_are_sent() -> None:
    """Choices with a logit of minus infinity were part of the load, although no backend gets them.

    So the loss of a gate that sends all rows to one of two backends was 1, that of perfect balance.
    """
    backends = scaled(None, None)
    moe = mixture(backends, gate=Logits([0.0, -torch.inf]), top_k=2, aux_loss_coef=0.1)
    with Runtime(backends):
        moe(torch.ones(6, WIDTH, dtype=torch.float64))
    assert moe.stats()["e1"].forward.requests == 0
    assert moe.router_losses.load_balancing == 2


def test_many_threads_train_through_one_mixture() -> None:
    backends = [backend(f"e{i}", mlp(i), lr=0.0) for i in range(4)]
    moe = mixture(backends, top_k=2)
    moe.gate.requires_grad_(False)
    plain = Plain(moe)
    errors: list[BaseException] = []

    def client(seed: int) -> None:
        try:
            for step in range(8):
                generator = torch.Generator().manual_seed(100 * seed + step)
                x = torch.randn(5, WIDTH, dtype=torch.float64, generator=generator)
                mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
                moe(mine).square().sum().backward()
                plain_grad = torch.autograd.grad(plain(its).square().sum(), its)[0]
                close(mine.grad, plain_grad)
        except BaseException as error:
            errors.append(error)

    with Runtime(backends, num_workers=2):
        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
    assert not errors
    stats = moe.stats().values()
    assert sum(one.forward.rows for one in stats) == 6 * 8 * 5 * 2
    assert all(one.forward.requests == one.forward.answered for one in stats)


# --- what is refused ---


def test_wrong_arguments_raise_and_nobody_is_asked() -> None:
    backends = scaled(None, None)
    moe = mixture(backends)
    ones = torch.ones(3, WIDTH, dtype=torch.float64)
    with Runtime(backends):
        for wrong, error in ((ones.float(), TypeError), (ones[:, :2], ValueError), ("x", TypeError)):
            with pytest.raises(error, match="MixtureOfExpertBackends"):
                moe(wrong)
        with pytest.raises(TypeError, match="expected 1 positional"):
            moe(ones, ones)
    assert all(one.forward.requests == 0 for one in moe.stats().values())


def test_wrong_options_are_named() -> None:
    good = scaled(None, None)
    for options, error, text in (
        ({"top_k": 0}, ValueError, "top_k"),
        ({"top_k": 3}, ValueError, "top_k"),
        ({"k_min": 3}, ValueError, "k_min"),
        ({"backward_k_min": -1}, ValueError, "backward_k_min"),
        ({"max_experts": 1}, ValueError, "max_experts"),
        ({"forward_timeout": -1.0}, ValueError, "forward_timeout"),
        ({"backward_timeout": "1"}, TypeError, "backward_timeout"),
        ({"rest_after": 0}, ValueError, "rest_after"),
        ({"rest": -1.0}, ValueError, "rest"),
        ({"rest": None}, TypeError, "rest_after=None"),
        ({"on_too_few": "ignore"}, ValueError, "on_too_few"),
        ({"fallback": "no"}, ValueError, "fallback"),
    ):
        with pytest.raises(error, match=text):
            mixture(good, **options)
    with pytest.raises(ValueError, match="at least one backend, got none"):
        MixtureOfExpertBackends([], top_k=1)
    with pytest.raises(TypeError, match="ExpertBackend"):
        MixtureOfExpertBackends([nn.Identity()], top_k=1)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="already"):
        mixture([*good, good[0]])
    with pytest.raises(ValueError, match="to be weighted"):
        mixture([backend("ints", nn.Identity(), None, outputs_schema=BatchTensorProto(WIDTH, dtype=torch.int64))])
    table = backend("table", nn.Embedding(3, WIDTH).double(), args_schema=[BatchTensorProto(dtype=torch.int64)])
    with pytest.raises(ValueError, match="gate="):
        mixture([table])


def test_backends_must_be_alike_and_gates_fit() -> None:
    backends = scaled(None, None)
    other = backend("other", nn.Identity(), None, args_schema=[BatchTensorProto(3)], outputs_schema=BatchTensorProto(3))
    with pytest.raises(ValueError, match="takes"):
        mixture([*backends, other])
    moe = mixture(backends, gate=Logits([0.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match="max_experts"):
        moe(torch.ones(3, WIDTH, dtype=torch.float64))


def test_its_repr_names_backends_and_limits() -> None:
    text = repr(mixture(scaled(None, None), k_min=2, on_too_few="fallback"))
    assert "['e0', 'e1']" in text
    assert "k_min=2" in text
    assert "fallback" in text
    assert ROW.size == torch.Size([WIDTH])
