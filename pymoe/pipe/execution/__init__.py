"""Runs a pipeline: threads, plans, and one micro-batch in one stage, in both passes."""
