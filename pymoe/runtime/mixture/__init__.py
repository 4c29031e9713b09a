"""A mixture over served experts that goes on when some of them are slow or dead."""

from pymoe.runtime.mixture.counts import BackendStats, PassStats
from pymoe.runtime.mixture.errors import TooFewAnswersError
from pymoe.runtime.mixture.fan_out import AnomalyError, GivenUp
from pymoe.runtime.mixture.module import MixtureOfExpertBackends

__all__ = [
    "AnomalyError",
    "BackendStats",
    "GivenUp",
    "MixtureOfExpertBackends",
    "PassStats",
    "TooFewAnswersError",
]
