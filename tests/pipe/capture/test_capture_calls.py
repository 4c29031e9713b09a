"""Calls that a captured graph accepts: free sizes, conditions on them, ways to pass arguments; and its errors for
others.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from same_as_model import assert_captured

from pymoe.pipe.capture import capture

pytestmark = pytest.mark.usefixtures("doubles")


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask=None, *, scale=2, flags=(True, "mean"), **more):
        y = self.linear(x) * scale
        if mask is not None:
            y = y * mask
        return y.mean(0) if flags[0] else y + more["shift"]


def test_sizes_are_free_where_the_model_leaves_them():
    captured = assert_captured(
        nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)),
        (torch.randn(5, 6, 4),),
        None,
        *[((torch.randn(rows, length, 4),), {}) for rows, length in [(1, 1), (2, 9), (9, 2)]],
    )
    captured.input_checks.check([torch.randn(0, 3, 4)])
    captured.input_checks.check([torch.randn(3, 3, 4, dtype=torch.float32)])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.ones(5, 3), torch.ones(5, 1)), "dimension 1 of x: expected 4, got 3 .fixed"),
        ((torch.ones(5, 4, 1), torch.ones(5, 1)), "x: expected 2 dimensions"),
        ((torch.ones(5, 4, dtype=torch.int64), torch.ones(5, 1)), "x: expected a floating point dtype"),
        ((torch.ones(5, 4), torch.ones(6, 1)), "dimension 0 of mask: expected 5, as dimension 0 of x, got 6"),
        ((torch.ones(5, 4), torch.ones(5, 2)), "dimension 1 of mask: expected 1, got 2"),
        ((torch.ones(5, 4), None), "mask: expected a tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_named(args, words):
    captured = capture(Pair(), (torch.ones(3, 4), torch.ones(3, 1)))
    with pytest.raises(ValueError, match=words):
        captured.input_checks.check(captured.arguments.flatten(args, {}))


def test_a_fixed_size_names_the_line_that_fixed_it():
    class Fixes(nn.Module):
        def forward(self, x):
            return x @ torch.ones(4, 2)

    captured = capture(Fixes(), (torch.ones(9, 4),))
    with pytest.raises(ValueError, match=rf"dimension 1 of x: expected 4, got 5 \(fixed at {__file__}:\d+\)"):
        captured.input_checks.check([torch.ones(6, 5)])


def test_other_constants_are_named():
    x, mask = torch.ones(3, 4), torch.ones(3, 1)
    captured = capture(Pair(), (x,), {"mask": mask, "scale": 3})
    captured.input_checks.check(captured.arguments.flatten((x, mask), {"scale": 3}))
    for scale in (4, 3.0):
        with pytest.raises(ValueError, match=rf"scale: expected 3, as in the capture, got {scale}"):
            captured.input_checks.check(captured.arguments.flatten((x, mask), {"scale": scale}))
    with pytest.raises(TypeError, match="the default"):
        captured.arguments.flatten((x, mask), {"scale": 3, "flags": (False, "mean")})
    with pytest.raises(TypeError, match=r"expected \(x, mask, scale\), got \(x, mask, scale, flags\)"):
        captured.arguments.flatten((x, mask), {"scale": 3, "flags": [False]})
    with pytest.raises(TypeError, match=r"x: structure differs from the captured one: expected \*, got \[\*, \*\]"):
        captured.arguments.flatten(([x, x], mask), {"scale": 3})
    with pytest.raises(TypeError, match="too many positional"):
        captured.arguments.flatten((x, mask, 1, 2), {})


def test_arguments_in_any_way_that_means_the_same():
    x, mask, shift = torch.randn(3, 4), torch.randn(3, 1), torch.randn(4)
    captured = capture(Pair(), (x, mask), {"flags": (False, "mean"), "shift": shift, "scale": 2})
    expected = [x, mask, False, "mean", shift, 2]
    for args, kwargs in [
        ((x, mask), {"flags": (False, "mean"), "shift": shift, "scale": 2}),
        ((x,), {"shift": shift, "mask": mask, "flags": (False, "mean")}),
        ((), {"scale": 2, "shift": shift, "mask": mask, "flags": (False, "mean"), "x": x}),
    ]:
        leaves = captured.arguments.flatten(args, kwargs)
        assert all(a is b for a, b in zip(leaves, expected, strict=True))


class Branches(nn.Module):
    def forward(self, x):
        if x.shape[0] > 4:
            return x * 2
        if x.shape[0] == 1:
            return x * 3
        return x


def test_branches_on_sizes_are_conditions_of_the_graph():
    """Branches on size 1, which torch.export takes for granted, become conditions, too."""
    captured = assert_captured(Branches(), (torch.ones(3, 4),), None, ((torch.ones(2, 5),), {}))
    for rows in (5, 1):
        with pytest.raises(ValueError, match=rf"dimension 0 of x = {rows} \({__file__}:\d+\)"):
            captured.input_checks.check([torch.ones(rows, 4)])


class Halves(nn.Module):
    def forward(self, x):
        return x.view(x.shape[0] // 2, 8)


def test_sizes_that_must_divide():
    captured = assert_captured(Halves(), (torch.randn(6, 4),), None, ((torch.randn(2, 4),), {}))
    with pytest.raises(ValueError, match="dimension 0 of x = 5"):
        captured.input_checks.check([torch.randn(5, 4)])


def test_dynamic_shapes_as_torch_export_has_them():
    from torch.export import Dim

    x, mask = torch.ones(3, 4), torch.ones(3, 1)
    batch = Dim("batch", min=2, max=8)
    for shapes in (
        {"x": {0: batch}, "mask": {0: batch}},
        ({0: batch}, {0: batch}),
        {"x": {0: batch}, "mask": (batch, None)},
    ):
        captured = capture(Pair(), (x, mask), dynamic_shapes=shapes)
        captured.input_checks.check([torch.ones(8, 4), torch.ones(8, 1)])
        with pytest.raises(ValueError, match="dimension 0 of x: expected at most 8, got 9"):
            captured.input_checks.check([torch.ones(9, 4), torch.ones(9, 1)])
    captured = capture(Pair(), (x, mask), dynamic_shapes={"x": None, "mask": None})
    with pytest.raises(ValueError, match="dimension 0 of x: expected 3, got 4"):
        captured.input_checks.check([torch.ones(4, 4), torch.ones(4, 1)])
    with pytest.raises(ValueError, match="dynamic_shapes"):
        capture(Pair(), (x, mask), dynamic_shapes=({0: batch},))


def test_an_example_of_one_row_fixes_it_and_says_so():
    captured = capture(nn.Linear(4, 4), (torch.ones(1, 4),))
    with pytest.raises(ValueError, match="capture with an example of at least 2"):
        captured.input_checks.check([torch.ones(3, 4)])


def test_nodes_know_modules_lines_and_shapes():
    captured = capture(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh())), (torch.randn(3, 4),))
    (node,) = [node for node in captured.graph.graph.nodes if node.target is torch.ops.aten.tanh.default]
    assert [path for path, _ in node.meta["nn_module_stack"].values()] == ["", "1", "1.0"]
    assert node.meta["val"].shape[1] == 4
    kinds = [node.op for node in captured.graph.graph.nodes]
    assert kinds == sorted(kinds, key=["placeholder", "get_attr", "call_function", "output"].index)


def attention(config_class, model_class, **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, config_class)(**options)
    return getattr(transformers, model_class)(config)


SMALL = {"vocab_size": 17, "attn_implementation": "eager", "use_cache": False}


@pytest.mark.thinned(usual=1)
@pytest.mark.parametrize(
    "build",
    [
        lambda: attention("GPT2Config", "GPT2LMHeadModel", n_embd=8, n_layer=2, n_head=2, n_positions=32, **SMALL),
        lambda: attention(
            "LlamaConfig",
            "LlamaForCausalLM",
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            **SMALL,
        ),
    ],
    ids=["GPT-2", "Llama"],
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:the model's forward changes attributes")
def test_language_models_of_transformers(build, training):
    model = build().double().train(training)

    def call(rows, length):
        tokens = torch.randint(17, (rows, length))
        return (), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}

    assert_captured(model, *call(2, 7), call(3, 5), steps=1)


class Fixed(nn.Module):
    """Takes no tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x=1, y=2):
        return self.linear(torch.ones(2, 4) * x).sin() * y


@pytest.mark.parametrize(("args", "kwargs"), [((), None), ((3, 4), None), ((3,), {"y": 0.5})])
def test_a_call_without_a_tensor(args, kwargs):
    captured = assert_captured(Fixed(), args, kwargs)
    if args:
        with pytest.raises(ValueError, match="x: expected 3"):
            captured.input_checks.check([7, *captured.arguments.flatten(args, kwargs or {})[1:]])
