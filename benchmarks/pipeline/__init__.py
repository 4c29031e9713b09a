"""Parts of ``benchmarks.pipeline_schedules``: the work, the systems that pipeline it, and the report on times."""
