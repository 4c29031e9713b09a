"""A training script and an inference load share four experts for a minute, and the experts learn meanwhile.

    python examples/serve_experts.py                   # with a live view of the experts' pools
    python examples/serve_experts.py --seconds 20 --plain
    python -m pymoe.runtime.top                        # the same view, from another terminal

The experts are served: a runtime gathers what everybody asks for into batches. An ordinary training loop calls them as
modules of its model, which predicts the next byte of a text (the Python manual that the interpreter carries); their
gradients and updates happen on the server's side. Threads and coroutines ask the same model about text that it is not
trained on. The run ends with checks (the loss fell, that of the unseen text too, the experts did it, nothing was lost,
batches formed) and exit status 1 if one fails; it leaves a record and a picture in runs/serve_experts.
"""

import sys

from lm import extras

extras.require_pymoe()
extras.require(("rich", "matplotlib"))

from serving.command import main  # noqa: E402 (it imports the extras)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__))
