"""Tests that a model of transformers with pymoe's experts hands its products to a package that was chosen."""

import pytest
import tiny_models
import torch
from stand_in_packages import installed, taken_for_a_gpu

import pymoe.integrations.transformers  # noqa: F401

pytestmark = pytest.mark.only_on("cpu")


@pytest.mark.parametrize("package", ["deep_gemm", "quack"])
@torch.no_grad()
def test_a_model_hands_its_products_over(monkeypatch, package):
    model = tiny_models.build("qwen3_moe").bfloat16()
    ids = tiny_models.tokens()
    model.set_experts_implementation("pymoe")
    expected = model(ids).logits
    with taken_for_a_gpu(monkeypatch):
        module = installed(monkeypatch, package)
        got = model(ids).logits
        assert len(module.calls) == 2 * model.config.num_hidden_layers
    torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2 * expected.abs().max().item())
    model(ids)
    assert len(module.calls) == 2 * model.config.num_hidden_layers
