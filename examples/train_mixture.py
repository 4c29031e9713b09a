"""A classifier of handwritten digits trains through four served experts, twice: all well, and with one slow, one dying.

    python examples/train_mixture.py                   # both runs: about a minute on 2 cores
    python examples/train_mixture.py --steps 200 --slow 1000

The experts live in a runtime, each with an optimizer of its own; the model between them asks two of four for every
image. In the second run one expert is 100 times slower from the start, and the runtime of another drops it half way.
Nobody tells the model: it goes on with the answers that come, and its steps stay within their timeouts. The data are
those that scikit-learn brings along. The run ends with checks, and exit status 1 if one fails; it leaves a record and a
picture in runs/train_mixture.
"""

import sys

from lm import extras

extras.require_pymoe()
extras.require(("rich", "matplotlib"))
extras.require(("sklearn",), install=("scikit-learn",))

from digits.command import main  # noqa: E402 (it imports the extras)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__))
