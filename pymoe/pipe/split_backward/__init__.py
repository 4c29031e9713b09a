"""A backward pass in two parts: gradients of inputs first, those of weights when there is time for them."""

from pymoe.pipe.split_backward.split import SplitBackward

__all__ = ["SplitBackward"]
