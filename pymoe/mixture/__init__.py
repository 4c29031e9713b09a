"""A mixture over served experts that goes on when some of them are slow or dead."""

from pymoe.mixture.counts import BackendStats, PassStats
from pymoe.mixture.errors import TooFewAnswersError
from pymoe.mixture.fan_out import AnomalyError, GivenUp
from pymoe.mixture.module import MixtureOfExpertBackends

__all__ = [
    "AnomalyError",
    "BackendStats",
    "GivenUp",
    "MixtureOfExpertBackends",
    "PassStats",
    "TooFewAnswersError",
]
