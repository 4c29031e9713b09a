"""Models that a pipeline is made of by tracing, each with examples, a loss and where it is split."""

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
