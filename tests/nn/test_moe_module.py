"""MoE as a module: shapes, dtypes, devices, copies, state, modes, statistics and errors."""

import copy
import io
import warnings

import pytest
import torch
from devices import moved
from moe_layers import BACKENDS, OPTIONS, make_input, make_layer, run
from torch import nn

from pymoe.nn import Experts, MoE, Router, SharedExperts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 2), (1, 1)], ids=str)
def test_takes_any_number_of_dimensions(shape, backend):
    layer = make_layer(backend=backend)
    x = make_input(*shape)
    y = layer(x)
    assert y.shape == x.shape
    rows = torch.stack([layer(row) for row in x.reshape(-1, 12)]).reshape(x.shape)
    torch.testing.assert_close(y, rows, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)], ids=str)
def test_no_tokens_give_no_rows_and_zero_gradients(shape, backend):
    layer = make_layer(backend=backend, **OPTIONS["everything"])
    x = make_input(*shape)
    y, found = run(layer, x)
    assert y.shape == (*shape, 12)
    assert found["x"].shape == x.shape
    assert all((grad == 0).all() for grad in found.values())
    assert layer.stats.load.sum() == 0
    assert layer.stats.load_balancing_loss == 0


def test_non_contiguous_inputs_give_the_same_bits():
    layer = make_layer()
    x = make_input(4, 6).detach()
    expected = layer(x.transpose(0, 1).contiguous())
    assert torch.equal(layer(x.transpose(0, 1)), expected)
    wide = torch.zeros(4, 24, dtype=x.dtype)
    wide[:, ::2] = x[:, 0]
    assert torch.equal(layer(wide[:, ::2]), layer(x[:, 0].contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_output_has_the_dtype_of_the_layer_and_logits_at_least_float32(dtype, device):
    layer = MoE(8, 6, 4, 2, num_shared_experts=1, bias=True, dtype=dtype).to(device)
    x = torch.randn(5, 8, dtype=dtype)
    assert layer(x).dtype == dtype
    gate, logits = layer.router(x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert gate.weights.dtype == logits.dtype == wide
    expected = x.to(wide) @ layer.router.weight.to(wide).T
    if device.type == "cpu":
        assert torch.equal(logits, expected)
    else:  # a product with float32 results sums in another order
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_keeps_the_router_in_float32_and_the_experts_in_bfloat16(backend, device):
    layer = make_layer(dtype=torch.float32, backend=backend, **OPTIONS["everything"])
    x = make_input(20, dtype=torch.float32)
    expected = layer(x)
    load = layer.stats.load
    with torch.autocast(device.type, dtype=torch.bfloat16):
        gate, logits = layer.router(x)
        y = layer(x)
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    assert torch.equal(logits, layer.router(x)[1])
    assert torch.equal(gate.load, load)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_deepcopy_is_equal_and_independent(options):
    layer = make_layer(**options)
    x = make_input(9)
    layer(x).sum().backward()
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    with torch.no_grad():
        twin.experts.w_out.zero_()
        twin(x)
        twin(make_input(4))
    assert layer.experts.w_out.abs().sum() > 0
    assert layer.stats.load.sum() == 9 * layer.top_k
    assert twin.stats.load.sum() == 4 * layer.top_k


@pytest.mark.only_on("cpu", "cuda")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_state_dict_round_trips_strictly(options):
    layer, other = make_layer(seed=0, **options), make_layer(seed=5, **options)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    x = make_input(9)
    assert torch.equal(other(x), layer(x))


def test_state_dict_has_the_documented_keys():
    assert set(make_layer().state_dict()) == {"router.weight", "experts.w_in", "experts.w_out"}
    shapes = {name: tuple(value.shape) for name, value in make_layer(**OPTIONS["everything"]).state_dict().items()}
    assert shapes == {
        "router.weight": (8, 12),
        "router.bias": (8,),
        "router.expert_bias": (8,),
        "experts.w_in": (8, 20, 12),
        "experts.b_in": (8, 20),
        "experts.w_out": (8, 12, 10),
        "experts.b_out": (8, 12),
        "shared.w_in": (20, 12),
        "shared.b_in": (20,),
        "shared.w_out": (12, 10),
        "shared.b_out": (12,),
        "shared.w_gate": (1, 12),
    }
    assert make_layer(activation="relu").experts.w_in.shape == (8, 10, 12)


def test_built_on_the_meta_device_it_becomes_real_without_leftovers(device):
    options = {"bias_update_rate": 0.1, "num_shared_experts": 1, "bias": True, "shared_gate": True, "router_bias": True}
    layer = MoE(8, 6, 4, 2, **options, device="meta")
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    layer = layer.to_empty(device=device)
    layer.reset_parameters()
    assert layer.stats.load.tolist() == [0, 0, 0, 0]
    assert layer.router.counted["load"].tolist() == [0, 0, 0, 0]
    assert layer.router.expert_bias.tolist() == [0, 0, 0, 0]
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    twin = MoE(8, 6, 4, 2, **options, device=device)
    assert all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), twin.state_dict().values(), strict=True))
    layer(torch.randn(3, 8)).sum().backward()
    assert layer.router.counted["load"].sum() == 6


def test_parameters_start_like_those_of_a_linear_layer_per_expert():
    torch.manual_seed(0)
    layer = MoE(256, 64, 4, 2, num_shared_experts=1)
    for weight in (layer.router.weight, *layer.experts.w_in, *layer.experts.w_out, layer.shared.w_in):
        bound = weight.shape[-1] ** -0.5
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


@pytest.mark.only_on("cpu", "cuda")
def test_train_and_eval_give_the_same_output():
    layer = make_layer(**OPTIONS["everything"])
    x = make_input(9)
    trained = layer(x)
    assert torch.equal(layer.eval()(x), trained)
    with torch.inference_mode():
        assert torch.equal(layer(x), trained)
    layer.train()(x).sum().backward()  # statistics written in inference mode do not stand in the way


def test_stats_are_those_of_the_last_forward_and_do_not_change_afterwards():
    layer = make_layer(capacity_factor=1.0)
    assert [value.sum().item() for value in layer.stats] == [0, 0, 0, 0]
    layer(make_input(9))
    first = layer.stats
    kept = [value.clone() for value in first]
    layer.eval()(make_input(30))
    assert layer.stats.load.sum() == 60
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert not any(value.requires_grad for value in layer.stats)
    assert first.load.dtype == first.dropped.dtype == torch.int32
    assert first.z_loss.dtype == torch.float32


def test_replaces_a_dense_network_in_training(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), MoE(16, 32, 4, 2, aux_loss_coef=0.01), nn.Linear(16, 1)).to(device)
    x = torch.randn(256, 4)
    target = (x[:, :1] * x[:, 1:2]).sign()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_the_router_of_one_choice_learns_without_renormalization():
    layer = make_layer(top_k=1, renormalize=False)
    _, found = run(layer, make_input(9))
    assert found["router.weight"].abs().max() > 0


def test_raises_no_warnings():
    layer = make_layer(**OPTIONS["everything"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(layer, make_input(9))


def test_repr_names_every_option():
    text = repr(make_layer(**OPTIONS["everything"], score_before_experts=True))
    assert "\n" not in text
    for part in (
        "hidden_size=12", "ffn_size=10", "num_experts=8", "top_k=2", "score='sigmoid'", "renormalize=True",
        "bias_update_rate=0.01", "num_groups=4", "topk_groups=2", "scale=1.5", "capacity_factor=1.0",
        "activation='swiglu'", "bias=True", "aux_loss_coef=0.5", "z_loss_coef=0.3", "backend='native'",
        "num_shared_experts=1", "shared_gate=True", "router_bias=True", "score_before_experts=True",
    ):  # fmt: skip
        assert part in text
    layer = make_layer(capacity_factor=1.5, score_before_experts=True)
    layer.experts = torch.nn.Sequential()  # the tree of modules is shown now
    assert "score_before_experts=True, capacity_factor=1.5, backend='native'" in repr(layer)
    assert repr(Router(8, 4, 2, bias=True)).endswith("renormalize=True, bias=True)")


def test_repr_shows_parts_that_were_replaced():
    layer = make_layer()
    layer.experts = torch.nn.Sequential(layer.experts)
    assert "(experts): Sequential" in repr(layer)


def test_repr_of_statistics_is_one_line():
    layer = make_layer(num_experts=4)
    run(layer, make_input(9))
    assert repr(layer.stats).startswith(f"Stats(load={layer.stats.load.tolist()}, dropped=0, load_balancing_loss=")
    text = repr(make_layer(num_experts=64).stats)
    assert "load=<64 experts, 0 to 0 slots, 0 in all>" in text
    assert "device='meta'" in repr(make_layer(device="meta").stats)


BAD_ARGUMENTS = [
    ({"hidden_size": 0}, ValueError, "hidden_size must be at least 1, got 0"),
    ({"hidden_size": 8.0}, TypeError, "hidden_size must be an int, got float"),
    ({"ffn_size": -1}, ValueError, "ffn_size must be at least 1, got -1"),
    ({"ffn_size": None}, TypeError, "ffn_size must be an int, got NoneType"),
    ({"num_experts": 0}, ValueError, "num_experts must be at least 1, got 0"),
    ({"num_experts": True}, TypeError, "num_experts must be an int, got bool"),
    ({"top_k": 0}, ValueError, r"top_k must be in 1..num_experts \(8\), got 0"),
    ({"top_k": 9}, ValueError, r"top_k must be in 1..num_experts \(8\), got 9"),
    ({"activation": "tanh"}, ValueError, r"activation must be one of 'swiglu', 'gelu', 'relu', .* got 'tanh'"),
    ({"activation": torch.relu}, TypeError, "activation must be a string or a ClampedSwiglu, got "),
    ({"score": "entmax"}, ValueError, "score must be one of 'softmax', 'sigmoid', got 'entmax'"),
    ({"renormalize": 1}, TypeError, "renormalize must be a bool, got int"),
    ({"bias_update_rate": -0.1}, ValueError, "bias_update_rate must be finite and at least 0, got -0.1"),
    ({"bias_update_rate": "fast"}, TypeError, "bias_update_rate must be a float, got str"),
    ({"num_groups": 2}, ValueError, "num_groups and topk_groups must be given together"),
    ({"topk_groups": 2}, ValueError, "num_groups and topk_groups must be given together"),
    ({"num_groups": 3, "topk_groups": 1}, ValueError, r"num_groups must divide num_experts \(8\), got 3"),
    ({"num_groups": 4, "topk_groups": 5}, ValueError, r"topk_groups must be in 1..num_groups \(4\), got 5"),
    ({"num_groups": 8, "topk_groups": 1}, ValueError, "topk_groups must leave at least top_k = 2 experts, got 1"),
    ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    ({"capacity_factor": 0.0}, ValueError, "capacity_factor must be finite and greater than 0, got 0.0"),
    ({"capacity_factor": float("inf")}, ValueError, "capacity_factor must be finite and greater than 0, got inf"),
    ({"num_shared_experts": -1}, ValueError, "num_shared_experts must be at least 0, got -1"),
    ({"num_shared_experts": 1.5}, TypeError, "num_shared_experts must be an int, got float"),
    ({"shared_gate": True}, ValueError, "num_shared_experts must be at least 1 with shared_gate=True, got 0"),
    ({"shared_gate": 1}, TypeError, "shared_gate must be a bool, got int"),
    ({"router_bias": "no"}, TypeError, "bias must be a bool, got str"),
    ({"score_before_experts": None}, TypeError, "score_before_experts must be a bool, got NoneType"),
    ({"aux_loss_coef": -1.0}, ValueError, "aux_loss_coef must be finite and at least 0, got -1.0"),
    ({"z_loss_coef": None}, TypeError, "z_loss_coef must be a float, got NoneType"),
    ({"bias": "no"}, TypeError, "bias must be a bool, got str"),
    ({"backend": "cuda"}, ValueError, "backend must be one of 'native', 'reference', got 'cuda'"),
    ({"dtype": torch.int32}, TypeError, "dtype must be float32, float64, bfloat16 or float16, got torch.int32"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_ARGUMENTS, ids=[case[2] for case in BAD_ARGUMENTS])
def test_a_bad_constructor_argument_is_named(change, error, message):
    arguments = {"hidden_size": 8, "ffn_size": 4, "num_experts": 8, "top_k": 2, **change}
    with pytest.raises(error, match=message):
        MoE(**arguments)


@pytest.mark.parametrize(
    ("layer", "arguments"),
    [(Router, (8, 4, 5)), (Experts, (8, 0, 4)), (SharedExperts, (8, 0))],
    ids=["Router", "Experts", "SharedExperts"],
)
def test_parts_check_their_arguments_themselves(layer, arguments):
    with pytest.raises(ValueError, match=f"{layer.__name__}: "):
        layer(*arguments)


BAD_INPUTS = [
    (torch.randn(3, 11), ValueError, r"x must have shape \(\.\.\., H\) with H = 12, got \(3, 11\)"),
    (torch.tensor(1.0), ValueError, r"x must have shape \(\.\.\., H\) with H = 12, got \(\)"),
    (torch.randn(12, 0), ValueError, r"x must have shape \(\.\.\., H\) with H = 12, got \(12, 0\)"),
    (torch.zeros(3, 12, dtype=torch.int64), TypeError, "x must have dtype float32, float64"),
    (torch.zeros(3, 12, dtype=torch.bfloat16), TypeError, r"x must have the dtype of the parameters \(torch.float32\)"),
    (torch.zeros(3, 12, dtype=torch.float64), TypeError, r"x must have the dtype of the parameters \(torch.float32\)"),
    (torch.zeros(3, 12, device="meta"), ValueError, r"x must be on the device of the parameters \(cpu\), got meta"),
    ([[0.0] * 12], TypeError, "x must be a tensor, got list"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("x", "error", "message"), BAD_INPUTS, ids=[case[2][:70] for case in BAD_INPUTS])
def test_a_bad_input_is_named(x, error, message, backend, device):
    message = message.replace(r"\(cpu\)", rf"\({device}\)")
    with pytest.raises(error, match=f"MoE: {message}"):
        make_layer(dtype=torch.float32, backend=backend)(moved(x, device))


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_inside_autocast_is_refused(backend, device):
    """Autocast leaves float64 as it is, so that an expert would multiply two dtypes."""
    layer = make_layer(dtype=torch.float32, backend=backend)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert layer(torch.ones(3, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"MoE: x must not be float64 where the parameters are torch\.float32"):
            layer(torch.ones(3, 12, dtype=torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factor", [8, 1e30, 1e308])
def test_a_huge_capacity_factor_drops_nothing(factor, backend):
    layer = make_layer(capacity_factor=factor, backend=backend)
    twin = make_layer(backend=backend)
    x = make_input(9)
    assert torch.equal(layer(x), twin(x))
    assert layer.stats.dropped == 0


@pytest.mark.parametrize("argument", ["scale", "capacity_factor", "aux_loss_coef", "bias_update_rate"])
def test_an_int_too_large_for_a_float_is_refused(argument):
    with pytest.raises(ValueError, match=f"{argument} must be finite"):
        MoE(8, 6, 4, 2, **{argument: 10**400})


def test_a_single_choice_teaches_the_router_only_without_renormalization():
    for renormalize in (False, True):
        layer = make_layer(top_k=1, renormalize=renormalize)
        layer(make_input(9)).square().sum().backward()
        assert bool(layer.router.weight.grad.any()) is not renormalize
