"""Autograd graphs of their own for calls and stages, and the state and random numbers of the threads that run them.

Nothing here is public: ``pymoe.parallel``, ``pymoe.runtime`` and ``pymoe.pipe`` stand on it.
"""

from pymoe._native import load_runtime

load_runtime()  # says what to do where the native runtime is missing, before a file that needs it fails to import
