"""Trains the language model of train_lm.py in a pipeline of stages, beside the same training by a plain loop.

    python examples/pipeline_moe_lm.py                 # less than a minute on two cores
    python examples/pipeline_moe_lm.py --stages 3 --schedule zero-bubble
    python -m pymoe.pipe.schedules                     # what each schedule plans

The model is an nn.Sequential of embedding, blocks with MoE layers, and a head whose weight is the embedding's. It is
cut into stages with a thread of its own each. MoE layers in all stages have auxiliary losses and expert biases. Both
runs start from the same weights and read the same micro-batches, first in float64, then in float32; their losses must
be the same. The run ends with checks, and exit status 1 if one fails; it leaves a record and a picture of the last
step in runs/pipeline_moe_lm.
"""

import sys

from lm import extras

extras.require_pymoe()
extras.require(("rich", "matplotlib"))

from pipelined.command import main  # noqa: E402 (it imports the extras)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__))
