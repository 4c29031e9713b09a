"""``python -m pymoe.remote``: see :mod:`pymoe.remote.cli`."""

import sys

from pymoe.remote.cli import main

if __name__ == "__main__":
    sys.exit(main())
