"""What these tests share with those of parallel calls lies there: that folder goes on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
