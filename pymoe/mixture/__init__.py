"""Mixtures over served experts, which return outputs even if some of the experts are slow or dead."""

from pymoe.mixture.fan_out import AnomalyError, GivenUp, TooFewAnswersError
from pymoe.mixture.module import MixtureOfExpertBackends
from pymoe.mixture.stats import BackendStats, PassStats

__all__ = [
    "AnomalyError",
    "BackendStats",
    "GivenUp",
    "MixtureOfExpertBackends",
    "PassStats",
    "TooFewAnswersError",
]
