"""Layers: router, experts, and the mixture-of-experts layer made of them."""
