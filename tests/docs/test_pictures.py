"""Tests that the pictures in docs are those that docs/draw_pictures.py draws, and that pages show all of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import PAGES, ROOT

PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))


def test_the_pictures_are_what_the_program_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    program = [sys.executable, str(ROOT / "docs/draw_pictures.py"), str(tmp_path)]
    subprocess.run(program, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    drawn = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert drawn.keys() == {file.name for file in PICTURES}
    changed = [file.name for file in PICTURES if file.read_bytes() != drawn[file.name]]
    assert not changed, f"run python docs/draw_pictures.py and look at {changed}"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda file: file.stem)
def test_a_page_shows_the_picture(picture: Path) -> None:
    assert any(f"pictures/{picture.name})" in page.read_text() for page in PAGES)
