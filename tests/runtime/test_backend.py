"""The passes of an expert backend, called directly: inputs, outputs, and circumstances that must not matter."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pymoe.runtime import BatchTensorProto, ExpertBackend, nested_flatten

X = BatchTensorProto(4)


class Call(nn.Module):
    """A module that calls a given function, with a parameter for it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def sgd(module: nn.Module, lr: float = 0.125) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=lr)


def make(function: Callable[..., Any], *args: Any, opt: bool = True, **options: Any) -> ExpertBackend:
    expert = Call(function)
    return ExpertBackend("expert", expert, sgd(expert) if opt else None, args_schema=args, **options)


def small_expert() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


# --- one backend against plain torch ---


def test_both_passes_are_what_plain_torch_computes() -> None:
    served, plain = small_expert(), small_expert()
    backend = ExpertBackend("e", served, sgd(served), args_schema=[BatchTensorProto(4, dtype=torch.float64)])
    opt = sgd(plain)
    for step in range(5):
        x = torch.randn(step + 1, 4, dtype=torch.float64, requires_grad=True)
        grad = torch.randn(step + 1, 3, dtype=torch.float64)
        (output,) = backend.forward(x)
        expected = plain(x)
        assert torch.equal(output, expected)
        assert not output.requires_grad
        (gradient,) = backend.backward(x, grad)
        opt.zero_grad()
        expected.backward(grad)
        opt.step()
        assert x.grad is not None
        assert torch.equal(gradient, x.grad)
        assert not gradient.requires_grad
        assert backend.updates == step + 1
    for mine, its in zip(served.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_a_backward_pass_needs_no_forward_pass_and_repeats_itself() -> None:
    backend = make(lambda weight, x: weight * x * x, X, opt=False)
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(3):
        (gradient,) = backend.backward(x, grad)
        torch.testing.assert_close(gradient, 4 * x * grad)


def test_callers_tensors_are_left_alone() -> None:
    backend = make(lambda weight, x: weight * x, X, clip_grad_norm=0.1)
    x, grad = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    copies = x.detach().clone(), grad.clone()
    backend.forward(x)
    backend.backward(x, grad)
    assert torch.equal(x, copies[0])
    assert torch.equal(grad, copies[1])
    assert x.grad is None
    assert x.requires_grad
    assert not grad.requires_grad


def test_updates_do_not_write_into_callers_gradients() -> None:
    """Autograd may make a parameter's gradient a view of the caller's tensor, which clipping in place would change."""
    backend = make(lambda weight, x: x + weight.view(1, 4), X, clip_grad_norm=0.001, gradient_reduction="mean")
    grad = torch.full((1, 4), 3.0)
    (gradient,) = backend.backward(torch.zeros(1, 4), grad)
    assert torch.equal(grad, torch.full((1, 4), 3.0))
    assert torch.equal(gradient, torch.full((1, 4), 3.0))


# --- kinds of inputs and outputs ---


def test_integer_inputs_get_zeros_and_the_others_their_gradients() -> None:
    backend = make(lambda weight, x, rows: x * rows[:, None] * weight, X, BatchTensorProto(dtype=torch.int64))
    x, rows, grad = torch.randn(3, 4), torch.tensor([1, 2, 3]), torch.ones(3, 4)
    assert torch.equal(backend.forward(x, rows)[0], x * rows[:, None] * 2)
    gradient, zeros = backend.backward(x, rows, grad)
    assert torch.equal(gradient, rows[:, None] * 2 * grad)
    assert zeros.dtype == torch.int64
    assert zeros.shape == (3,)
    assert not zeros.any()


def test_integer_outputs_do_not_fail_the_backward_pass() -> None:
    backend = make(lambda weight, x: (x.argmax(1), weight * x, x > 0), X)
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    index, product, positive = backend.forward(x)
    assert (index.dtype, product.dtype, positive.dtype) == (torch.int64, torch.float32, torch.bool)
    (gradient,) = backend.backward(x, torch.zeros_like(index), grad, torch.zeros_like(positive))
    assert torch.equal(gradient, 2 * grad)
    assert backend.updates == 1


def test_complex_inputs_get_gradients() -> None:
    backend = make(lambda weight, z: z * weight, BatchTensorProto(4, dtype=torch.complex64))
    z, grad = torch.randn(3, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64)
    (gradient,) = backend.backward(z, grad)
    assert torch.equal(gradient, 2 * grad)


def test_an_input_without_influence_gets_zeros() -> None:
    for opt in (False, True):
        backend = make(lambda weight, x, y: weight * x, X, BatchTensorProto(2), opt=opt)
        _, zeros = backend.backward(torch.randn(3, 4), torch.randn(3, 2), torch.ones(3, 4))
        assert torch.equal(zeros, torch.zeros(3, 2))
        assert not zeros.requires_grad


def test_a_module_of_keyword_arguments_alone() -> None:
    expert = Call(lambda weight, *, scale, x: weight * x + scale)
    schema = {"x": X, "scale": BatchTensorProto(1)}
    backend = ExpertBackend("e", expert, sgd(expert), kwargs_schema=schema)
    scale, x, grad = torch.randn(3, 1), torch.randn(3, 4), torch.randn(3, 4)
    (output,) = backend.forward(scale, x)  # by name
    torch.testing.assert_close(output, 2 * x + scale)
    to_scale, to_x = backend.backward(scale, x, grad)
    torch.testing.assert_close(to_scale, grad.sum(1, keepdim=True))
    torch.testing.assert_close(to_x, 2 * grad)
    assert backend.get_info()["keyword_names"] == ("x", "scale")


def test_positional_and_keyword_arguments_in_nested_structures() -> None:
    def function(weight: Tensor, x: Tensor, pair: Any, constant: Any, *, mask: Any) -> Any:
        assert constant == "gelu"
        return {"sum": x + pair["a"] * mask[0] * weight, "rest": [pair["b"], None]}

    expert = Call(function)
    backend = ExpertBackend(
        "e", expert, args_schema=(X, {"b": X, "a": X}, "gelu"), kwargs_schema={"mask": (BatchTensorProto(4),)}
    )
    x, a, b, mask = torch.randn(4, 3, 4).unbind()
    rest, nothing, total = backend.forward(x, a, b, mask)
    assert nothing is None
    assert torch.equal(rest, b)
    assert torch.equal(total, x + a * mask * 2)
    grads = torch.randn(2, 3, 4).unbind()
    to_x, to_a, to_b, to_mask = backend.backward(x, a, b, mask, *grads)
    assert torch.equal(to_x, grads[1])
    assert torch.equal(to_b, grads[0])
    torch.testing.assert_close(to_a, grads[1] * mask * 2)
    torch.testing.assert_close(to_mask, grads[1] * a * 2)


def test_no_rows_are_no_work() -> None:
    backend = make(lambda weight, x: (1 / 0, x) if len(x) == 0 else (x.argmax(1), weight * x), X)
    index, product = backend.forward(torch.ones(0, 4))
    assert (index.shape, index.dtype) == ((0,), torch.int64)
    assert (product.shape, product.dtype) == ((0, 4), torch.float32)
    (gradient,) = backend.backward(torch.ones(0, 4), index, product)
    assert gradient.shape == (0, 4)
    assert backend.updates == 0
    backend.backward(torch.ones(1, 4), torch.zeros(1, dtype=torch.int64), torch.ones(1, 4))
    assert backend.updates == 1


@pytest.mark.parametrize("state", ["no_grad", "inference_mode", "autocast", "device"])
def test_the_callers_thread_does_not_reach_the_expert(state: str) -> None:
    contexts: dict[str, Callable[[], Any]] = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "device": lambda: torch.device("meta"),
    }
    backend = make(lambda weight, x: x @ torch.diag(weight) + torch.zeros(4), X)
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    with contexts[state]():
        (output,) = backend.forward(x)
        (gradient,) = backend.backward(x.clone() if state == "inference_mode" else x, grad)
        assert not output.is_inference()
    assert output.dtype == torch.float32
    assert output.device.type == "cpu"
    torch.testing.assert_close(output, 2 * x)
    torch.testing.assert_close(gradient, 2 * grad)
    assert backend.updates == 1


# --- what clients are told, and misuse ---


def test_info_says_what_a_client_must_know() -> None:
    expert = Call(lambda weight, x, *, mask: {"y": weight * x * mask})
    backend = ExpertBackend("e", expert, args_schema=(X,), kwargs_schema={"mask": X})
    info = pickle.loads(pickle.dumps(backend.get_info()))
    assert info == {
        "name": "e",
        "forward_schema": ((X,), {"mask": X}),
        "outputs_schema": {"y": X.replace(device="cpu")},
        "keyword_names": ("mask",),
    }
    assert backend.get_pools() == (backend.forward_pool, backend.backward_pool)
    assert backend.forward_pool.name == "e_forward"
    assert backend.backward_pool.name == "e_backward"


def test_schemas_may_be_given_by_example() -> None:
    expert = Call(lambda weight, x: weight * x)
    for schema in (torch.ones(7, 4), [torch.ones(7, 4)], X, (X,)):
        backend = ExpertBackend("e", expert, args_schema=schema)
        assert [proto.size for proto in nested_flatten(backend.args_schema)] == [(4,)]


def test_a_given_outputs_schema_saves_the_dry_run() -> None:
    expert = Call(lambda weight, x: 1 / 0)
    assert ExpertBackend("e", expert, args_schema=[X], outputs_schema=X).outputs_schema == X
    with pytest.raises(ZeroDivisionError):
        ExpertBackend("e", expert, args_schema=[X])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"args_schema": None}, ValueError, "must describe at least one tensor"),
        ({"args_schema": ()}, ValueError, "'e': args_schema or kwargs_schema must describe at least one tensor"),
        ({"expert": lambda x: x}, TypeError, "expert must be an nn.Module, got function"),
        ({"opt": 0.1}, TypeError, "opt must be an optimizer or None, got float"),
        ({"gradient_reduction": "max"}, ValueError, "gradient_reduction must be one of 'sum', 'mean', got 'max'"),
        ({"accumulate_steps": 0}, ValueError, "ExpertBackend: accumulate_steps must be a positive integer, got 0"),
        ({"accumulate_steps": 1.5}, ValueError, "accumulate_steps must be a positive integer"),
        ({"clip_grad_norm": 0.0}, ValueError, "clip_grad_norm must be a positive number or None, got 0.0"),
        ({"clip_grad_norm": float("nan")}, ValueError, "clip_grad_norm must be a positive number"),
        ({"nonfinite_gradients": "no"}, ValueError, "must be one of 'raise', 'skip', 'step', got 'no'"),
        ({"buffers": "never"}, ValueError, "buffers must be one of 'backward', 'both', got 'never'"),
        ({"no_such_option": 1}, TypeError, "no_such_option"),
    ],
)
def test_misuse_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"name": "e", "expert": Call(lambda weight, x: x), "args_schema": [X]} | change
    with pytest.raises(error, match=message):
        ExpertBackend(**arguments)


def test_direct_calls_with_wrong_tensors_or_outputs() -> None:
    answers: list[Any] = [{"a": torch.ones(3, 4)}]
    backend = make(lambda weight, x: answers[-1], X)
    answers += [[torch.ones(3, 4)], {"b": torch.ones(3, 4)}, {"a": None}, torch.ones(3, 4)]
    while len(answers) > 1:
        with pytest.raises(ValueError, match=r"outputs_schema expects .*BatchTensorProto\(4.*, got"):
            backend.forward(torch.ones(3, 4))
        answers.pop()
    with pytest.raises(ValueError, match=r"^expert: forward takes 1 tensors, got 2"):
        backend.forward(torch.ones(3, 4), torch.ones(3, 4))
    with pytest.raises(ValueError, match="backward takes 2 tensors, got 1"):
        backend.backward(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"counts rows, got one of shape \(\)"):
        backend.forward(torch.ones(()))


def test_passes_of_many_threads_never_overlap() -> None:
    inside: list[int] = []

    def function(weight: Tensor, x: Tensor) -> Tensor:
        inside.append(1)
        assert len(inside) == 1
        threading.Event().wait(0.001)
        inside.pop()
        return weight * x

    backend = make(function, X)
    errors: list[BaseException] = []

    def client() -> None:
        try:
            for _ in range(10):
                backend.forward(torch.ones(2, 4))
                backend.backward(torch.ones(2, 4), torch.ones(2, 4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert backend.updates == 40
