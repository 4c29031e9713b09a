"""Programs that measure pymoe. This is a package so that Python finds no other one of this name first."""
