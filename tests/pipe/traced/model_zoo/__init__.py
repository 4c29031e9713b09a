"""Models to trace, each with examples, a loss and split points."""

from . import architectures, behaviour, language, layers, values
from .case import Batch, Case

__all__ = ["CASES", "Batch", "Case"]

CASES: dict[str, Case] = {
    **layers.CASES,
    **values.CASES,
    **language.CASES,
    **behaviour.CASES,
    **architectures.CASES,
}
