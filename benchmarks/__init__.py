"""Programs that measure pymoe. It is a package so that Python does not find another package of this name first."""
