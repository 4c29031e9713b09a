"""Put this folder on the path, because its test files share modules in it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
