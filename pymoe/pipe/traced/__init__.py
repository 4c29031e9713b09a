"""Captured models, split into the stages of a pipeline."""
