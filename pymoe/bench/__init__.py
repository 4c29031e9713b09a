"""``python -m pymoe.bench``: properties of the build, and its speed on this machine.

It prints one line for every operator, shape and dtype of :mod:`pymoe.bench.operators`, and for the whole layer. A line
shows time and correctness together: a native operator whose result differs from the reference is never shown as fast.
"""
