"""What every system is asked for: two experts, a request's rows, the number of clients, and the right answers.

A peer's own process reads this file too: it needs torch and the standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor, nn

EXPERTS = {"small": (64, 256), "big": (1024, 4096)}
"""Name to (hidden, ffn): a feed-forward network hidden -> ffn -> hidden."""
DIRECTIONS = ("forward", "backward")
ROWS = (1, 16)
CLIENTS = (1, 8, 64)
KINDS = ("threads", "asyncio")
VARIANTS = 2
"""Different requests of every client, which it sends in turn: an answer to the request before is a wrong one."""
TOLERANCE = 1e-4
"""Largest error that is not called wrong, as a share of the largest value: other batches are summed in other orders."""


@dataclass(frozen=True, order=True)
class Cell:
    """One load: who asks for what."""

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
    """Return every combination, an expert's cells together."""
    return [Cell(*choice) for choice in product(EXPERTS, DIRECTIONS, ROWS, CLIENTS, KINDS)]


class Expert:
    """A feed-forward expert and its optimizer, as two functions of a batch."""

    def __init__(self, name: str, learning_rate: float = 0.0) -> None:
        """Make the expert. At learning rate 0 a step costs what any step costs, and answers stay the same."""
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
        """(rows, hidden) to (rows, hidden)."""
        with torch.no_grad():
            return self.module(x)

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of ``x``, given that of the output, both (rows, hidden); the optimizer makes one step."""
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
    """Return for every client its :data:`VARIANTS` requests; no two are alike."""
    hidden = EXPERTS[cell.expert][0]
    random = torch.Generator().manual_seed(2)
    tensors = 1 if cell.direction == "forward" else 2

    def one() -> Request:
        return tuple(torch.randn(cell.rows, hidden, generator=random) for _ in range(tensors))

    return [[one() for _ in range(VARIANTS)] for _ in range(cell.clients)]


def answers(expert: Expert, asked: list[list[Request]]) -> list[list[Tensor]]:
    """Return what each request should get, computed a batch of all clients at a time; the learning rate must be 0."""
    return [list(one) for one in zip(*(by_round(expert, one) for one in zip(*asked, strict=True)), strict=True)]


def by_round(expert: Expert, asked: tuple[Request, ...]) -> tuple[Tensor, ...]:
    """Return the answers to one request of every client."""
    batch = tuple(torch.cat(column) for column in zip(*asked, strict=True))
    return call(expert, batch).split([len(request[0]) for request in asked])


@lru_cache(maxsize=2)  # a cell is measured by many, in turn
def prepared(cell: Cell) -> tuple[list[list[Request]], list[list[Tensor]]]:
    """Return a cell's requests, and their answers."""
    asked = requests(cell)
    return asked, answers(Expert(cell.expert), asked)


def call(expert: Expert, request: Request) -> Tensor:
    """Return the direct call: forward of one tensor, backward of two."""
    return expert.forward(*request) if len(request) == 1 else expert.backward(*request)


def is_right(got: object, expected: Tensor) -> bool:
    """Return whether a system's answer has the right shape and values."""
    if not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    return bool((got - expected).abs().max() <= TOLERANCE * expected.abs().max())


def trajectory(learning_rate: float = 0.05, steps: int = 8) -> Iterator[tuple[Request, Tensor, list[Tensor]]]:
    """A plain loop's backward requests one after another: request, its answer, and the parameters after its step."""
    expert = Expert("small", learning_rate)
    for asked in requests(Cell("small", "backward", 3, steps, "threads")):
        yield asked[0], expert.backward(*asked[0]), expert.parameters()
