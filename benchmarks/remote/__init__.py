"""The parts of benchmarks/remote_load.py: pymoe's server and the peers, whose experts run in other processes."""
