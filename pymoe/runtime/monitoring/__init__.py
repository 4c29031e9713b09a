"""What tells how a runtime is doing: statistics, the log, and a socket for ``python -m pymoe.runtime.top``."""
