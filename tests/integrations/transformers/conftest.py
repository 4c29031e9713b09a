"""Fixtures that the tests of this folder share."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

os.environ["HF_HUB_OFFLINE"] = "1"  # models are built from configurations; nothing is downloaded
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
