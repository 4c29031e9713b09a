"""Pipelines: a model cut into stages, and micro-batches that travel through them."""

from pymoe.pipe import schedules, skip

__all__ = ["schedules", "skip"]
