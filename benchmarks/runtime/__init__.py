"""Parts of benchmarks/runtime_load.py: the requests, the systems that answer them, the clients, and the report."""
