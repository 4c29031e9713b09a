"""Tests of pipelines find the modules that they share."""

import sys
from pathlib import Path

for folder in (Path(__file__).parents[1] / "runtime", Path(__file__).parent):
    sys.path.insert(0, str(folder))
