"""A model as one graph: ``capture`` and what it gives."""

from pymoe.pipe.capture.capture import capture
from pymoe.pipe.capture.captured import Captured
from pymoe.pipe.capture.errors import CaptureError

__all__ = ["CaptureError", "Captured", "capture"]
