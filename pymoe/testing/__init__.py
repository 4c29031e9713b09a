"""Tools of the tests and benchmarks: one specification an operator, comparison, timing."""
