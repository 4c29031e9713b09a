"""Plants faults in the sources, one at a time, and checks whether tests detect them.

    python tests/mutants/run.py cuda                  # in the CUDA kernels: the emulated tests must notice
    python tests/mutants/run.py schedules [WORD ...]  # in the runtime: the seeded schedules must; WORDs choose by name
    python tests/mutants/run.py static                # in the machine code of the kernels: tests/cuda_static must
    python tests/mutants/run.py streams               # from a CUDA tensor to a launch: check_streams.py must notice
    python tests/mutants/run.py python                # in the CPU kernels and operators: pytest must (minutes a fault)

Without a kind, all kinds run. The source tree is not changed. planting.py defines faults, and the files faults_KIND.py
list them. (tests/cuda_ptx/check_kernels.py plants those of faults_ptx.py.) The exit status is 1 if a fault was not
detected, or no longer fits the sources.
"""

from __future__ import annotations

import sys

import cuda
import python
import schedules
import static
import streams
from planting import plant

KINDS = {kind.name: kind for kind in (cuda.KIND, schedules.KIND, static.KIND, streams.KIND, python.KIND)}


def main(arguments: list[str]) -> int:
    names = [arguments.pop(0)] if arguments and arguments[0] in KINDS else list(KINDS)
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return 0
    return 0 if all([plant(KINDS[name], arguments) for name in names]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
