"""``python -m pymoe.runtime.top``, which :mod:`pymoe.runtime.monitoring.top` is."""

import sys

from pymoe.runtime.monitoring.top import live, main

__all__ = ["live", "main"]

if __name__ == "__main__":
    sys.exit(main())
