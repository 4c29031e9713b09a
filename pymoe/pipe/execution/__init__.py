"""Runs a pipeline: plans of actions, the threads that run them, and the passes of one micro-batch through one stage."""
