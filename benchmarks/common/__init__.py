"""Code that all benchmarks share: runs and their files, targets, pictures, and processes that answer lines of JSON."""
