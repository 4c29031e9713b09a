"""Pipelines: a model cut into stages, and micro-batches that travel through them."""

from pymoe.pipe import skip

__all__ = ["skip"]
