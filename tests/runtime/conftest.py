"""What several test files here share lies beside them, or beside those of mixtures: both folders go on the path."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "mixture")]
