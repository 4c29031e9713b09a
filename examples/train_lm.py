"""Trains a byte-level language model whose feed-forward layers are pymoe.nn.MoE, on real English text, on a CPU.

    python examples/train_lm.py                    # about three minutes on two cores
    python examples/train_lm.py --ffn dense        # the dense model of equal FLOPs per token
    python examples/train_lm.py --backend reference
    python examples/train_lm.py --resume runs/moe-native

Without --text it learns the Python manual that the interpreter carries. A run leaves in its folder a checkpoint
(checkpoint.safetensors), a record of everything measured (record.json) and two pictures (loss.png, experts.png).

The reference trains to the same curve. Its losses and those of the native run with the default settings agreed to 5e-7
nats per byte for 30 steps, until rounding changed an expert that a byte is sent to; after that they differed by 0.03 on
average and 0.22 at most on a batch, and by at most 0.04 bits per byte on the held-back text (measured over 700 steps).
"""

import sys

from common import require

require()

from lm.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__))
