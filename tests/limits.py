"""How long tests wait for what is meant to happen at once: a guard against hanging, never a measurement.

PYMOE_TEST_TIME_SCALE stretches it where that is not enough, on an emulated processor for example.
"""

from __future__ import annotations

import os

LONG = int(300 * float(os.environ.get("PYMOE_TEST_TIME_SCALE", "1")))  # seconds
