"""Whole models for ``python -m benchmarks.whole_models``: configurations, files, systems that run them, the report."""
