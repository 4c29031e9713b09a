"""Parts of gpu_report.sh."""
