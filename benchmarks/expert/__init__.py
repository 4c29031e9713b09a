"""The parts of benchmarks/expert_parallel.py."""
