"""The parts of benchmarks/remote_load.py: experts that are served by other processes, and who else serves some."""
