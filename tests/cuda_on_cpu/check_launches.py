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

from pymoe.nn import Experts, MoE, apply_experts
from pymoe.ops import ClampedSwiglu, raw

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


def make_biased(tokens=20, seed=0, **options):
    """Return the same as :func:`make`, with experts that have biases."""
    activation = options.pop("activation", "swiglu")
    layer, x, grad = make(tokens, seed, **options)
    torch.manual_seed(seed)
    layer.experts = Experts(64, 32, 8, activation=activation, bias=True, dtype=torch.bfloat16).to(pretended.DEVICE)
    with torch.no_grad():
        for bias in (layer.experts.b_in, layer.experts.b_out):
            bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(seed + 1)).bfloat16())
    return layer, x, grad


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


BIAS_GRAD = ["pymoe: grouped_linear"] * 2  # the plan and the sum over each expert's rows
WITH_BIASES = [
    *BACKWARD[:1],
    *BIAS_GRAD,  # b_out: sums what combine_backward wrote
    *BACKWARD[1:6],
    *BIAS_GRAD,  # b_in
    *BACKWARD[6:],
]


def by_pymoe(names):
    """Return the launches if pymoe's own kernel and its plan make the products that torch makes in ``names``."""
    return ["pymoe: grouped_linear" if name in GROUPED else name for name in names]


def test_biases_launch_nothing_but_their_gradients():
    """The bias of the first product is added by expert_activation, that of the second by combine; so torch makes the
    products, which add no bias. Without this, pymoe's own kernel and its plan would make all products, as they do on
    capability 8.0.
    """
    forward, backward, _ = step(*make_biased())
    assert forward == FORWARD
    assert sorted(backward) == sorted(WITH_BIASES)
    with elsewhere(80, (2, 13), clears_idle_experts=False):
        forward, backward, _ = step(*make_biased())
    assert forward == by_pymoe(FORWARD)
    assert sorted(backward) == sorted(by_pymoe(WITH_BIASES))
    layer, x, _ = make_biased()
    with Launches() as alone, torch.no_grad():
        layer(x)
    assert sorted(alone.names) == sorted(FORWARD)


def test_a_fixed_bias_launches_nothing_in_the_backward():
    layer, x, grad = make_biased()
    parameters = [value for name, value in layer.named_parameters() if "b_" not in name]
    layer.experts.b_in.requires_grad_(False)
    layer.experts.b_out.requires_grad_(False)
    y = layer(x)
    with Launches() as backward:
        torch.autograd.grad(y, [x, *parameters], grad)
    assert backward.names == BACKWARD


def with_biases(x, experts, weights, parameters, **options):
    w_in, w_out, b_in, b_out = parameters
    return apply_experts(x, experts, weights, w_in, w_out, b_in=b_in, b_out=b_out, **options)


@pytest.mark.parametrize(
    ("options", "capability", "by_torch"),
    [
        ({}, 90, 2),
        ({"capacity": 6}, 90, 2),
        ({"foreign_experts": True}, 90, 2),
        ({"activation": "gelu"}, 100, 2),
        ({"activation": ClampedSwiglu(7.0, alpha=1.702, up_offset=1.0, interleaved=True)}, 90, 2),
        ({"activation": lambda rows: rows * rows}, 90, 1),  # a function gets rows with their bias
        ({}, 80, 0),
        ({}, 103, 0),
    ],
    ids=str,
)
def test_biases_added_later_are_right(options, capability, by_torch):
    """Compare outputs and all gradients with a computation in float64. An expert has no token, and if a bias were that
    of a neighbour, were not weighted or came twice, or if a row without an expert counted, the results would be off.
    """
    generator = torch.Generator().manual_seed(3)
    inner = 32 if callable(options.get("activation")) or options.get("activation") == "gelu" else 64
    shapes = [(20, 64), (20, 2), (6, inner, 64), (6, 64, 32), (6, inner), (6, 64)]
    values = [torch.randn(shape, generator=generator) * 0.5 for shape in shapes]
    experts = torch.rand(20, 8 if "foreign_experts" in options else 6, generator=generator)
    experts[:, 3] = -1
    experts = experts.argsort(1, descending=True)[:, :2].int()
    grad = torch.randn(20, 64, generator=generator).bfloat16()
    x, weights, w_in, w_out, b_in, b_out = (value if i == 1 else value.bfloat16() for i, value in enumerate(values))
    results = []
    for device, dtype in ((pretended.DEVICE, None), ("cpu", torch.float64)):
        tensors = [x, weights, w_in, w_out, b_in * 4, b_out * 4]
        leaves = [value.to(device, dtype or value.dtype).requires_grad_() for value in tensors]
        arguments = (leaves[0], experts.to(device), leaves[1], leaves[2:])
        with Launches() as launches, elsewhere(capability, (2, 13), clears_idle_experts=capability == 90):
            y = with_biases(*arguments, **options)
            forward = list(launches.names)
            with torch.no_grad():
                again = with_biases(*arguments, **options)
            gradients = torch.autograd.grad(y, leaves, grad.to(device, y.dtype))
        if dtype is None:
            assert forward.count("torch: grouped product") == by_torch, forward
            assert torch.equal(again.inner, y.inner), "the native call and the operators differ"
        found = (y.detach(), *gradients)
        results.append([(value.inner if dtype is None else value).double() for value in found])
    for found, wanted in zip(*results, strict=True):
        assert ((found - wanted).abs().max() / wanted.abs().max()) < 0.02
    assert not results[0][-1][3].any()


def test_biases_have_the_bits_of_the_operators_and_of_every_run():
    layer, x, grad = make_biased(400)
    first, second = step(layer, x, grad)[2], step(layer, x, grad)[2]
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.inner, other.inner)


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
