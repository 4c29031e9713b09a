"""Runs the command ``python -m pymoe.ep``; see :mod:`pymoe.ep.simulate`."""

import sys

from pymoe.ep.simulate.cli import main

if __name__ == "__main__":
    sys.exit(main())
