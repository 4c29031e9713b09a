"""Put the folder of the tests of parallel calls on the path, because these tests share modules in it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
