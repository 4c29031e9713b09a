"""Models that were cut by hand: stages, edges, arguments and outputs of any kind."""

import torch
from torch import nn

from pymoe.pipe.staged import StagedModel
from pymoe.pipe.stages import INPUT, Pipeline, Source, Stage


class ByHand(StagedModel):
    """A module with ``parts``, ``functions`` of them, ``edges``: the sources of each function's arguments, the number
    of their ``outputs``, the ``names`` of its arguments and the ``sources`` of its result.
    """

    def __init__(self, module):
        self.module = module
        self.parts = tuple(module.parts)
        self.devices = (None,) * len(self.parts)
        stages = [
            Stage(function, tuple(Source(*source) for source in inputs), outputs, (part,))
            for function, inputs, outputs, part in zip(
                module.functions(), module.edges, module.outputs, self.parts, strict=True
            )
        ]
        self._pipeline = Pipeline(tuple(stages), len(module.names), tuple(Source(*s) for s in module.sources))

    @property
    def pipeline(self):
        return self._pipeline

    def flatten_inputs(self, args, kwargs):
        given = dict(zip(self.module.names, args, strict=False)) | dict(kwargs)
        return [given[name] for name in self.module.names]

    def unflatten_outputs(self, values):
        return self.module.result(*values)


class Middle(nn.Module):
    """Arguments that later stages take, a value for two stages that are no neighbours, an output of the first stage."""

    names = ("x", "mask", "power", "bias")
    edges = (
        ((INPUT, 0),),
        ((0, 0), (INPUT, 1)),
        ((1, 0), (0, 0), (INPUT, 2), (INPUT, 3)),
    )
    outputs = (2, 1, 1)
    sources = ((2, 0), (0, 1))

    def __init__(self, width=4, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def functions(self):
        first, second, third = self.parts
        return (
            lambda x: [torch.tanh(first(x)), x.square().sum(1)],
            lambda h, mask: [second(h) * mask],
            lambda y, h, power, bias: [third(y) + h**power + bias],
        )

    def result(self, y, norms):
        return {"y": y, "norms": norms}

    def forward(self, x, mask, power, bias):
        functions = self.functions()
        h, norms = functions[0](x)
        (y,) = functions[1](h, mask)
        (y,) = functions[2](y, h, power, bias)
        return self.result(y, norms)


class Objects(nn.Module):
    """All kinds of things between two stages, which change with the micro-batch."""

    names = ("x",)
    edges = (((INPUT, 0),), ((0, 0), (0, 1), (0, 2)))
    outputs = (3, 1)
    sources = ((1, 0),)

    def __init__(self, width=4, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def functions(self):
        first, second = self.parts

        def begin(x):
            h = first(x)
            kept = x[:, 0] > 0  # as many rows as the data have it
            some = {"rows": len(x), "kept": kept, "parts": [h[kept], (h.t(), None, h.expand(2, *h.shape))]}
            return [some, torch.Size(x.shape), x.to(torch.bfloat16)]

        def end(some, shape, rounded):
            part, (turned, nothing, twice) = some["parts"]
            assert nothing is None
            assert shape == rounded.shape
            assert part.shape[0] == int(some["kept"].sum())
            assert rounded.dtype == torch.bfloat16
            y = second(turned.t()) + twice.sum(0) + part.sum() / some["rows"]
            return [y + 0.0 * rounded.sum()]

        return begin, end

    def result(self, y):
        return y

    def forward(self, x):
        functions = self.functions()
        return functions[1](*functions[0](x))[0]
