"""Skip connections of a sequential model, declared where they begin and end.

::

    @skippable(stash=["features"])
    class Down(nn.Module):
        def forward(self, x):
            yield stash("features", x)
            return self.conv(x)

    @skippable(pop=["features"])
    class Up(nn.Module):
        def forward(self, x):
            features = yield pop("features")
            return self.conv(torch.cat([x, features], dim=1))

    model = nn.Sequential(Down(), Middle(), Up())

The modules in between do not know of the skip. The model runs like any other; when it is cut into stages, a skip goes
from the stage of its stash straight to the stages of its pops.

The interface is that of torchgpipe (Kim et al., 2020: "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant
Models"), with any number of pops for a stash.
"""

from pymoe.pipe.skip.skippable import Skippable, pop, skippable, stash
from pymoe.pipe.skip.tracker import Namespace, SkipTracker, current_skip_tracker, current_tracker, tracking
from pymoe.pipe.skip.verify import SkipRoute, skip_routes, verify_skippables

__all__ = [
    "Namespace",
    "SkipRoute",
    "SkipTracker",
    "Skippable",
    "current_skip_tracker",
    "current_tracker",
    "pop",
    "skip_routes",
    "skippable",
    "stash",
    "tracking",
    "verify_skippables",
]
