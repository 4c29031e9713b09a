"""Separate autograd graphs for calls and stages, and the state and random numbers of the threads that run them.

Nothing here is public: ``pymoe.parallel``, ``pymoe.runtime`` and ``pymoe.pipe`` are built on it.
"""

from pymoe._native import load_runtime

load_runtime()  # raises an error that explains a missing native runtime, before other files fail to import it
