"""Observation of a runtime: statistics, the log, and a socket for ``python -m pymoe.runtime.top``."""
