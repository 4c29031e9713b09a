"""Bridges to other packages, one module each; none is imported automatically."""
