"""Tests of the plugin that makes the rounding of torch's products depend on shape and layout."""

from pathlib import Path

from processes import run_python


def test_products_of_other_shapes_and_layouts_have_other_bits_and_the_same_have_the_same():
    script = """
    import torch
    import other_products

    x, weight = torch.randn(6, 16), torch.randn(16, 32)
    for product in (torch.mm, lambda x, weight: torch.nn.functional.linear(x, weight.t(), torch.ones(32))):
        assert torch.equal(product(x, weight), product(x, weight))
        assert not torch.equal(product(x, weight)[:5], product(x[:5], weight))
        torch.testing.assert_close(product(x, weight)[:5], product(x[:5], weight))
        assert not torch.equal(product(x, weight), product(x, weight.t().contiguous().t()))
    """
    ended = run_python(script, f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n")
    assert ended.returncode == 0, ended.stderr
