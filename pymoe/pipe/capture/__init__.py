"""A model captured as one graph by ``torch.export``: ``capture``, and the ``Captured`` that it returns."""

from pymoe.pipe.capture.capture import Captured, capture
from pymoe.pipe.capture.errors import CaptureError

__all__ = ["CaptureError", "Captured", "capture"]
