"""Code that benchmarks share: runs and their files, targets, pictures, and child processes that exchange JSON lines."""
