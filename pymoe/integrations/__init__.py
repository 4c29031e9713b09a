"""Bridges to other packages, each in a module of its own that says what it needs; none is imported by itself."""
