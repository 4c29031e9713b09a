"""Trains a model of the transformers library in pipelines of two and four stages, beside the same model alone.

    python examples/pipeline_traced.py                 # about a minute on two cores
    python examples/pipeline_traced.py --architecture gpt2 --cut flops --schedule zero-bubble
    python -m pymoe.pipe.schedules                     # what each schedule plans

The model is the library's own, built small from a configuration; nothing is downloaded and nothing of it is rewritten.
pymoe.pipeline captures it, and a ready policy says where it is cut. Llama's rotary tables lead from the first stage to
all others, and its head's weight is the embedding's: both cross the stages. All runs start from the same weights and
read the same bytes of the Python manual, first in float64, then in float32; their losses must be the same. The run ends
with checks, and exit status 1 if one fails; it leaves a record and pictures in runs/pipeline_traced.
"""

import sys

from lm import extras

extras.require_pymoe()
extras.require(("rich", "matplotlib", "transformers"))

from traced.command import main  # noqa: E402 (it imports the extras)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__))
