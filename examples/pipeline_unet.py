"""Trains a U-Net in pipelines of two and four stages, beside the same training by a plain loop.

    python examples/pipeline_unet.py                   # less than a minute on two cores
    python examples/pipeline_unet.py --schedule zero-bubble --checkpoint always
    python -m pymoe.pipe.schedules                     # what each schedule plans

The network finds the strokes of handwritten digits (those that scikit-learn brings along), several to a picture:
turned, shifted, faint, under noise. Its skips lead from every level on the way down to the same level on the way up,
across the stages between. It is cut where balance_by_time says. All runs start from the same weights and see the same
micro-batches, first in float64, then in float32; their losses must be the same. The run ends with checks, and exit
status 1 if one fails; it leaves a record, what the network sees, and pictures of the last step in runs/pipeline_unet.
"""

import sys

from lm import extras

extras.require_pymoe()
extras.require(("rich", "matplotlib"))
extras.require(("sklearn",), install=("scikit-learn",))

from unet.command import main  # noqa: E402 (it imports the extras)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__))
