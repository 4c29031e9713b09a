"""Parts of ``benchmarks.parallel_backward``: the calls, the ways to make them, and the report on times."""
