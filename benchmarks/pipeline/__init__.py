"""Parts of ``benchmarks.pipeline_schedules``: the work, those who pipeline it, and what is said of the times."""
