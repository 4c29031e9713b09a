"""Defines the load: two experts, the rows of a request, the number of clients, and the expected answers.

Peers' processes import this file too, so it imports only torch and the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor, nn

EXPERTS = {"small": (64, 256), "big": (1024, 4096)}
"""(hidden, ffn) of each expert by name; an expert is a feed-forward network hidden -> ffn -> hidden."""
DIRECTIONS = ("forward", "backward")
ROWS = (1, 16)
CLIENTS = (1, 8, 64)
KINDS = ("threads", "asyncio")
VARIANTS = 2
"""Number of different requests of each client, sent in turn, so that the answer to the previous request is wrong."""
TOLERANCE = 1e-4
"""Largest permitted error, relative to the largest value; the order of sums depends on the batch size."""


@dataclass(frozen=True, order=True)
class Cell:
    """One load: the expert, the pass, the rows of a request, and the number and kind of clients."""

    expert: str
    direction: str
    rows: int
    clients: int
    kind: str

    def __str__(self) -> str:
        who = "coroutine" if self.kind == "asyncio" else "thread"
        return (
            f"{self.expert} {self.direction} {self.rows} row{'s' * (self.rows > 1)} "
            f"{self.clients} {who}{'s' * (self.clients > 1)}"
        )


def all_cells() -> list[Cell]:
    """Return all combinations, grouped by expert."""
    return [Cell(*choice) for choice in product(EXPERTS, DIRECTIONS, ROWS, CLIENTS, KINDS)]


class Expert:
    """A feed-forward expert and its optimizer."""

    def __init__(self, name: str, learning_rate: float = 0.0) -> None:
        """Make the expert. With learning rate 0 steps have their usual cost, but do not change later answers."""
        hidden, ffn = EXPERTS[name]
        random = torch.Generator().manual_seed(1)
        self.name, self.hidden = name, hidden
        self.module = nn.Sequential(nn.Linear(hidden, ffn), nn.ReLU(), nn.Linear(ffn, hidden))
        with torch.no_grad():
            for parameter in self.module.parameters():
                bound = parameter.shape[-1] ** -0.5
                parameter.uniform_(-bound, bound, generator=random)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=learning_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, (rows, hidden), for ``x``, (rows, hidden)."""
        with torch.no_grad():
            return self.module(x)

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of ``x``, given the output's, both (rows, hidden), and take an optimizer step."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            self.module(x).backward(grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        assert x.grad is not None
        return x.grad

    def parameters(self) -> list[Tensor]:
        """Return the parameters' values."""
        return [parameter.detach() for parameter in self.module.parameters()]


Request = tuple[Tensor, ...]


def requests(cell: Cell) -> list[list[Request]]:
    """Return :data:`VARIANTS` requests for each client; all requests differ."""
    hidden = EXPERTS[cell.expert][0]
    random = torch.Generator().manual_seed(2)
    tensors = 1 if cell.direction == "forward" else 2

    def one() -> Request:
        return tuple(torch.randn(cell.rows, hidden, generator=random) for _ in range(tensors))

    return [[one() for _ in range(VARIANTS)] for _ in range(cell.clients)]


def answers(expert: Expert, asked: list[list[Request]]) -> list[list[Tensor]]:
    """Return the expected answers, computed in batches of one request per client; the learning rate must be 0."""
    return [list(one) for one in zip(*(by_round(expert, one) for one in zip(*asked, strict=True)), strict=True)]


def by_round(expert: Expert, asked: tuple[Request, ...]) -> tuple[Tensor, ...]:
    """Return the answers to one request of every client."""
    batch = tuple(torch.cat(column) for column in zip(*asked, strict=True))
    return call(expert, batch).split([len(request[0]) for request in asked])


@lru_cache(maxsize=2)  # several systems measure a cell in turn
def prepared(cell: Cell) -> tuple[list[list[Request]], list[list[Tensor]]]:
    """Return a cell's requests and the expected answers."""
    asked = requests(cell)
    return asked, answers(Expert(cell.expert), asked)


def call(expert: Expert, request: Request) -> Tensor:
    """Call the expert directly: forward if the request has one tensor, backward if it has two."""
    return expert.forward(*request) if len(request) == 1 else expert.backward(*request)


def is_right(got: object, expected: Tensor) -> bool:
    """Return whether a system's answer has the right shape and values."""
    if not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    return bool((got - expected).abs().max() <= TOLERANCE * expected.abs().max())


def trajectory(learning_rate: float = 0.05, steps: int = 8) -> Iterator[tuple[Request, Tensor, list[Tensor]]]:
    """Yield backward requests of a plain loop, each with its answer and the parameters after its step."""
    expert = Expert("small", learning_rate)
    for asked in requests(Cell("small", "backward", 3, steps, "threads")):
        yield asked[0], expert.backward(*asked[0]), expert.parameters()
