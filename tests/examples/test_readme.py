"""The README's examples are the files that are tested."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["quickstart", "served_expert", "mixed_experts", "staged_model", "captured_model"])
def test_the_readme_shows_the_example(name: str) -> None:
    body = (ROOT / "examples" / f"{name}.py").read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{body}```" in (ROOT / "README.md").read_text()
