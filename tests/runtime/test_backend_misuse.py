"""Wrong uses of an expert backend are refused with a message, or do no harm."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from limits import LONG
from torch import Tensor, nn

from pymoe.runtime import BatchTensorProto, ExpertBackend, Runtime

X = BatchTensorProto(4)
ONES = torch.ones(2, 4)


def make(expert: nn.Module | None = None, cls: type[ExpertBackend] = ExpertBackend, **options: Any) -> ExpertBackend:
    expert = expert or nn.Linear(4, 4)
    opt = torch.optim.SGD(expert.parameters(), lr=0.1)
    return cls(**{"name": "e", "expert": expert, "opt": opt, "args_schema": [X]} | options)


class Overridden(ExpertBackend):
    def apply_gradients(self) -> None:
        self.seen = [None if p.grad is None else p.grad.clone() for p in self.expert.parameters()]


# --- parameters that are not the optimizer's ---


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    opt = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="'e': opt updates none of the expert's parameters"):
        make(opt=opt)
    make(cls=Overridden, opt=opt)  # allowed, as it overrides apply_gradients


def test_a_state_is_not_assigned_to_a_backend_that_trains() -> None:
    backend = make()
    before = list(backend.parameters())
    for module in (backend, nn.ModuleDict({"part": backend})):
        with pytest.raises(ValueError, match="assign=True"):
            module.load_state_dict(module.state_dict(), assign=True)
    assert all(one is other for one, other in zip(before, backend.parameters(), strict=True))


def test_replaced_parameters_keep_no_gradients() -> None:
    backend = make(expert := nn.Linear(4, 4))
    nn.utils.parametrizations.weight_norm(expert)
    with pytest.warns(UserWarning, match="2 parameters of the expert were replaced"):
        backend.backward(ONES, ONES)
    backend.backward(ONES, ONES)
    assert [parameter.grad for parameter in expert.parameters()] == [None] * 3
    expert.bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="opt updates none"):
        backend.backward(ONES, ONES)


def test_a_parent_may_assign_a_state_to_a_backend_that_does_not_train() -> None:
    backend = make(opt=None)
    parent = nn.ModuleDict({"part": backend})
    parent.load_state_dict(
        {
            key: value + 1 if "weight" in key else value
            for key, value in parent.state_dict().items()
            if isinstance(value, Tensor)
        },
        assign=True,
    )
    assert backend._expert_device.is_current(backend.expert)


def test_the_state_of_a_bare_expert_can_be_loaded() -> None:
    backend, other = make(), nn.Linear(4, 4)
    backend.load_state_dict({f"expert.{key}": value for key, value in other.state_dict().items()})
    assert torch.equal(backend.expert.weight, other.weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        backend.load_state_dict({})


# --- experts that work in place ---


class Negate(nn.Module):
    """Changes its input in place, and nothing shows that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x.neg_() * self.weight


@pytest.mark.parametrize("backward_first", [False, True])
@pytest.mark.parametrize("layer", [nn.ReLU(inplace=True), Negate()])
def test_experts_that_work_in_place_are_served_and_change_no_clients_tensor(
    layer: nn.Module, backward_first: bool
) -> None:
    expert = nn.Sequential(copy.deepcopy(layer), nn.Linear(4, 4))
    backend = make(expert, outputs_schema=X, opt=None)
    x = torch.tensor([[-1.0, 2.0, -3.0, 4.0]])
    original, leaf = x.clone(), x.clone().requires_grad_()
    output = expert(leaf.clone())
    (expected,) = torch.autograd.grad(output.sum(), leaf)
    for _ in range(2):
        if not backward_first:
            torch.testing.assert_close(backend.forward(x)[0], output)  # a batch may have another memory layout
        torch.testing.assert_close(backend.backward(x, torch.ones(1, 4))[0], expected)
        torch.testing.assert_close(backend.forward(x)[0], output)
        assert torch.equal(x, original)


# --- conversions ---


@pytest.mark.parametrize("way", ["to", "method", "parent"])
def test_a_served_expert_is_not_converted(way: str) -> None:
    """The schema kept the old dtype, so no request of either dtype was served any more."""
    backend = make()
    convert: Callable[[], Any] = {
        "to": lambda: backend.to(torch.bfloat16),
        "method": backend.bfloat16,
        "parent": lambda: nn.ModuleList([backend]).to(torch.bfloat16),
    }[way]
    with pytest.raises(TypeError, match=r"'e': the expert cannot be converted from torch.float32 to torch.bfloat16"):
        convert()
    assert {parameter.dtype for parameter in backend.parameters()} == {torch.float32}
    backend.float().to("cpu")
    assert backend.backward(ONES, ONES)[0].dtype == torch.float32
    assert backend.updates == 1


# --- steps ---


def test_steps_that_cannot_be_called_are_refused_at_construction() -> None:
    expert = nn.Linear(4, 4)
    opt = torch.optim.SGD(expert.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
    with pytest.raises(TypeError, match="opt must be an optimizer or None, got the class SGD itself"):
        make(expert, opt=torch.optim.SGD)
    with pytest.raises(TypeError, match=r"opt.step\(\) of LBFGS .* override ExpertBackend.apply_gradients"):
        make(expert, opt=torch.optim.LBFGS(expert.parameters()))
    with pytest.raises(TypeError, match=r"scheduler.step\(\) of ReduceLROnPlateau .* override"):
        make(expert, opt=opt, scheduler=plateau)
    make(expert, Overridden, opt=opt, scheduler=plateau)
    make(expert, opt=opt, scheduler=torch.optim.lr_scheduler.StepLR(opt, 1))


def test_an_update_counts_even_if_the_scheduler_fails_after_it() -> None:
    class Failing:
        def step(self) -> None:
            raise ZeroDivisionError

    backend = make(scheduler=Failing())
    with pytest.raises(ZeroDivisionError):
        backend.backward(ONES, ONES)
    assert backend.updates == 1
    assert make(cls=Overridden).updates == 0


def test_sparse_gradients_are_clipped() -> None:
    norms = []
    for sparse in (False, True):
        expert = nn.Embedding(5, 4, sparse=sparse)
        backend = make(expert, Overridden, args_schema=[BatchTensorProto(dtype=torch.int64)], clip_grad_norm=0.5)
        backend.backward(torch.tensor([1, 1, 3]), torch.ones(3, 4))
        norms.append(backend.seen[0].to_dense())
    assert norms[1].norm().item() == pytest.approx(0.5, abs=1e-4)
    torch.testing.assert_close(norms[0], norms[1])


# --- schemas ---


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (BatchTensorProto(8), r"expects shape \(rows, 8\) .* for output 0, got shape \(2, 4\)"),
        (BatchTensorProto(4, dtype=torch.float64), "dtype torch.float64 for output 0, .* dtype torch.float32"),
        ([X, BatchTensorProto(3)], r"expects shape \(rows, 3\) .* for output 1"),
    ],
)
def test_outputs_that_are_not_what_the_schema_says(schema: Any, message: str) -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return [y, y] if isinstance(schema, list) else y

    with pytest.raises(ValueError, match=message):
        make(Pair(4, 4), outputs_schema=schema).forward(ONES)


def test_errors_of_the_dry_run_say_where_they_come_from() -> None:
    with pytest.raises(RuntimeError, match="shapes") as caught:
        make(args_schema=[BatchTensorProto(5)])
    notes = getattr(caught.value, "__notes__", None)
    if hasattr(caught.value, "add_note"):
        assert notes is not None
        assert "ExpertBackend 'e'" in notes[0]
        assert "must have the shape of one row" in notes[0]
    with pytest.raises(ValueError, match=r"got args_schema=\(4,\).* constant"):
        make(args_schema=(4,))


# --- sharing and copies ---


def test_backends_that_share_parameters_never_overlap() -> None:
    shared, own = nn.Linear(4, 4), nn.Linear(4, 4)
    wrong: list[Any] = []

    class Checking(ExpertBackend):
        def apply_gradients(self) -> None:
            if shared.bias.grad is None or shared.bias.grad[0].item() != 2:
                wrong.append(shared.bias.grad)

    backends = [make(nn.Sequential(shared, *more), Checking, name=str(len(more))) for more in ([], [nn.Identity()])]
    third = make(nn.Sequential(own), name="third")
    assert backends[0]._lock is backends[1]._lock
    assert third._lock is not backends[0]._lock
    both = make(nn.Sequential(shared, own), name="both")
    with Runtime([*backends, third, both], num_workers=2):

        def ask(backend: ExpertBackend) -> None:
            for _ in range(200):
                backend.backward_pool.submit_task(ONES, ONES).result(timeout=LONG)

        threads = [threading.Thread(target=ask, args=(backend,)) for backend in [*backends, third]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        both.backward_pool.submit_task(ONES, ONES).result(timeout=LONG)
    assert not wrong

    entered = threading.Event()
    with both._lock:
        helper = threading.Thread(target=lambda: (third.forward(ONES), entered.set()))
        helper.start()
        assert not entered.wait(0.05)  # it holds the locks of both other backends
    helper.join()
    assert entered.is_set()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_trains_by_itself(duplicate: Any) -> None:
    expert = nn.Linear(4, 4)
    opt = torch.optim.Adam(expert.parameters(), lr=0.1)
    backend = make(expert, opt=opt, scheduler=torch.optim.lr_scheduler.StepLR(opt, 1), max_batch_size=7)
    backend.backward(ONES, ONES)
    twin = duplicate(backend)
    before = expert.weight.detach().clone()
    with Runtime([twin]):
        twin.backward_pool(ONES, ONES)
        backend.backward(ONES, ONES)  # an unserved backend may be called directly
        assert (twin.updates, backend.updates) == (2, 2)
    assert not torch.equal(before, expert.weight)
    assert torch.equal(twin.expert.weight, expert.weight)
    assert twin.expert.weight is not expert.weight
    assert twin._lock is not backend._lock
    assert twin.forward_pool.max_batch_size == 7
