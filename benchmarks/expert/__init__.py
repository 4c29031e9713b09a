"""Parts of benchmarks/expert_parallel.py."""
