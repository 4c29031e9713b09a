"""Parts of ``benchmarks.parallel_backward``: the calls, those who make them, and what is said of the times."""
