"""Captures a model as one graph with ``torch.export``: ``capture``, and the ``Captured`` that it returns."""

from pymoe.pipe.capture.capture import Captured, capture
from pymoe.pipe.capture.errors import CaptureError

__all__ = ["CaptureError", "Captured", "capture"]
