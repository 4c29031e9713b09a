"""One file an operator; each offers ``SPECS``, a list of :class:`pymoe.testing.spec.OpSpec`."""

from __future__ import annotations

import importlib
import pkgutil

from pymoe.testing.spec import OpSpec


def all_specs() -> list[OpSpec]:
    """Every specification, in the order of the files' names."""
    specs: list[OpSpec] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        specs.extend(importlib.import_module(f"{__name__}.{module.name}").SPECS)
    return specs
