"""Tests of the launches of a bfloat16 layer on a GPU of compute capability 9.x. Run with the plugin ``emulated_ops``.

The lists below are complete and in order; one launch more or fewer fails a test. docs/concepts/proof_without_a_gpu.md
shows them as a table.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import pretended
from kernel_launches import GROUPED, Launches, elsewhere

from pymoe.nn import MoE
from pymoe.ops import raw

FORWARD = [
    "torch: mm, dtype",  # logits in float32 of operands in bfloat16
    "pymoe: gate_topk",
    "pymoe: build_routing",
    "pymoe: dispatch",
    *GROUPED,  # w_in
    "pymoe: expert_activation",
    *GROUPED,  # w_out
    "pymoe: combine",
]
BACKWARD = [
    "pymoe: combine_backward",
    *GROUPED,  # the rows that w_out multiplied
    *GROUPED,  # w_out
    "pymoe: expert_activation_backward",
    *GROUPED,  # the rows that w_in multiplied
    *GROUPED,  # w_in
    "pymoe: combine",  # the tokens, from the experts
    "pymoe: gate_topk_backward",
    "torch: mm",  # the router's weight
    "torch: addmm_",  # the tokens, from the router
]


@pytest.fixture(autouse=True)
def on_the_pretended_device():
    with pretended.pretended():
        yield


def make(tokens=20, seed=0, **options):
    """Return a layer, its input and a gradient of its output."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    layer = MoE(64, 32, 8, 2, dtype=torch.bfloat16, **options).to(pretended.DEVICE)
    x, grad = (torch.randn(tokens, 64, generator=generator).bfloat16().to(pretended.DEVICE) for _ in range(2))
    return layer, x.requires_grad_(), grad


def step(layer, x, grad):
    """Return the launches of a forward and a backward pass, and their results."""
    with Launches() as forward:
        y = layer(x)
    with Launches() as backward:
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], grad)
    return forward.names, backward.names, [y.detach(), *gradients]


def test_a_training_step_launches_this_and_no_more():
    forward, backward, _ = step(*make())
    assert forward == FORWARD
    assert backward == BACKWARD
    assert (len(FORWARD), len(BACKWARD)) == (10, 14)


@pytest.mark.parametrize("tokens", [1, 20, 400])
def test_any_number_of_tokens_launches_the_same(tokens):
    """With several blocks, the gate used to clear memory for its counts, which was an additional launch."""
    forward, backward, _ = step(*make(tokens))
    assert forward == FORWARD
    assert backward == BACKWARD


def test_a_forward_without_gradients_launches_the_same():
    layer, x, _ = make()
    with Launches() as forward, torch.no_grad():
        layer(x)
    assert sorted(forward.names) == sorted(FORWARD)


@pytest.mark.parametrize(
    ("options", "forward", "backward"),
    [
        ({"score": "sigmoid", "bias_update_rate": 0.01}, 10, 15),  # the load is counted: add_
        ({"num_groups": 4, "topk_groups": 2}, 10, 14),
        ({"aux_loss_coef": 0.01}, 10 + 3, 14 + 6),  # the losses, scalars, and the sum of two gradients of the logits
        ({"num_shared_experts": 1}, 10 + 4, 14 + 7),
        ({"capacity_factor": 1.0}, 10 + 4, 14 + 8),  # rows are dropped: plans, and zeros where no expert writes
        ({"activation": "gelu"}, 10, 14),
    ],
    ids=str,
)
def test_options_cost_what_they_compute(options, forward, backward):
    found = step(*make(**options))
    assert (len(found[0]), len(found[1])) == (forward, backward), found[:2]


def test_one_launch_more_is_noticed(monkeypatch):
    """The planted fault converts the offsets of every product, which takes two more launches each."""
    product = raw.grouped_linear
    monkeypatch.setattr(raw, "grouped_linear", lambda *args, **_: product(*args, whole=False))
    forward, backward, _ = step(*make())
    assert (len(forward), len(backward)) == (10 + 4, 14 + 8)


@pytest.mark.parametrize(
    "options", [{}, {"capacity_factor": 0.5}, {"num_shared_experts": 1}, {"aux_loss_coef": 0.1}], ids=str
)
def test_the_step_computes_what_the_reference_does(options):
    """Rows that no product wrote are NaN here, so nothing may read them; experts without tokens get zero gradients."""
    check_step(**options)


# For versions of torch whose machine code was read, nothing is cleared again. For others, a plan and zeros are added
# for each of the two gradients. Products that were not measured, or for which torch has no fast kernel, run on pymoe's
# own kernels.
@pytest.mark.parametrize(
    ("capability", "version", "by_torch", "more"),
    [
        *((90, (2, minor), True, 0) for minor in (11, 12, 13)),
        *((90, version, True, 4) for version in ((2, 10), (2, 14), (3, 0), (3, 12))),
        (100, (2, 13), True, 4),
        (103, (2, 13), False, 0),
        (110, (2, 13), False, 0),
        (80, (2, 13), False, 0),
    ],
)
def test_torch_is_trusted_where_its_machine_code_was_read(capability, version, by_torch, more):
    """One wheel serves every later version of torch, whose product may leave any values in the gradient of an expert
    without rows. On compute capability 10.3 (B300), unexplained NaN gradients have been reported
    (pytorch/pytorch#193633).
    """
    with elsewhere(capability, version, clears_idle_experts=by_torch and more == 0):
        forward, backward = check_step()
    products = sum(name == "torch: grouped product" for name in forward + backward)
    assert products == (6 if by_torch else 0)
    assert len(backward) == 14 + more
    assert (backward == BACKWARD) == (by_torch and more == 0)


def check_step(**options):
    """Compare a training step, in which an expert has no tokens, with the reference; return its launches."""
    layer, x, grad = make(**options)
    with torch.no_grad():
        layer.router.weight[3] = 0
        layer.router.weight[3, 0] = -100  # no token chooses this expert
        x[:, 0] = 1
    forward, backward, found = step(layer, x, grad)
    twin = MoE(64, 32, 8, 2, dtype=torch.float64, backend="reference", **options)
    twin.load_state_dict({name: value.inner.double() for name, value in layer.state_dict().items()})
    leaf = x.detach().inner.double().requires_grad_()
    y = twin(leaf)
    expected = [y.detach(), *torch.autograd.grad(y, [leaf, *twin.parameters()], grad.inner.double())]
    assert int(layer.stats.load.inner[3]) == 0
    for value, wanted in zip(found, expected, strict=True):
        error = (value.inner.double() - wanted).abs().max() / wanted.abs().max()
        assert error < 0.03
    for name, value in zip(["w_in", "w_out"], found[3:5], strict=True):
        assert not value.inner[3].any(), name
    return forward, backward


def test_statistics_are_computed_when_somebody_asks():
    layer, x, grad = make(capacity_factor=0.5)
    step(layer, x, grad)
    with Launches() as asked:
        stats = layer.stats
    assert len(asked.names) > 0
    twin = MoE(64, 32, 8, 2, dtype=torch.bfloat16, capacity_factor=0.5)
    twin.load_state_dict({name: value.inner for name, value in layer.state_dict().items()})
    twin(x.detach().inner)
    for found, wanted in zip(stats, twin.stats, strict=True):
        torch.testing.assert_close(found.inner, wanted)
