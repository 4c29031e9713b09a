"""``python -m pymoe.bench``: properties of the build, and its speed on this machine.

``run`` prints a line for every case of :mod:`pymoe.bench.operators`, and for the whole layer. A line shows time and
correctness together: the time of a native operator whose result is wrong is shown with ``WRONG`` in the same line.
"""
