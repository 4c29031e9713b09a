"""Trains the language model of train_lm.py in a pipeline over processes, beside the same training in one process.

    torchrun --nproc-per-node 2 examples/pipeline_torchrun.py
    torchrun --nproc-per-node 4 examples/pipeline_torchrun.py                   # four stages
    torchrun --nproc-per-node 4 examples/pipeline_torchrun.py --replicas 2      # two pipelines of two stages, and DDP

The schedule is one of torch.distributed.pipelining's, over gloo. MoE layers in all stages have auxiliary losses and
expert biases, and the head's weight is the embedding's, on another process. The first process trains the model alone
before it joins the others; the losses must be the same. Exit status 1 if they are not.
"""

import sys

from lm import extras

extras.require_pymoe()

from pipelined.torchrun import main  # noqa: E402 (it imports pymoe)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__))
