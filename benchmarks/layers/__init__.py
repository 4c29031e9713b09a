"""The code behind ``python -m benchmarks.model_layers``, which times the expert blocks of published models."""
