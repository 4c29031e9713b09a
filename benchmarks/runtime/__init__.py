"""The parts of benchmarks/runtime_load.py: what is asked, who answers, how it is measured and shown."""
