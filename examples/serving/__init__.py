"""The parts of serve_experts.py."""
