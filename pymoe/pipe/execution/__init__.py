"""How a pipeline runs: threads, plans, and what becomes of one micro-batch in one stage, in both passes."""
