"""Entry point of ``python -m pymoe.bench``."""

import sys

from pymoe.bench.cli import main

sys.exit(main())
