"""The expert blocks of published models, timed: what ``python -m benchmarks.model_layers`` is made of."""
