"""A model captured as one graph by ``torch.export``: ``capture``, and the ``Captured`` that it returns."""

from pymoe.pipe.capture.capture import capture
from pymoe.pipe.capture.errors import CaptureError
from pymoe.pipe.capture.graph import Captured

__all__ = ["CaptureError", "Captured", "capture"]
