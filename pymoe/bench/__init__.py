"""``python -m pymoe.bench``: what was built, and how fast it is on this machine.

There is one line for every operator, shape and dtype of :mod:`pymoe.bench.operators`, and for the whole layer. A line
shows time and correctness together: a native operator that returns something other than the reference is never shown
as fast.
"""
