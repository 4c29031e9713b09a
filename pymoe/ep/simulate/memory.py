"""Memory of a rank: what the mixture layers of a model need under expert parallelism, and without."""

from __future__ import annotations

from dataclasses import dataclass

from pymoe.ep.simulate.balance import Balance
from pymoe.ep.simulate.block import Block


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank; all mixture layers of the model, nothing else of it."""

    weights: float
    gradients: float
    optimizer: float
    """States of the optimizer, and master weights where it keeps them."""
    activations: float
    """What a forward leaves for the backward."""
    buffers: float
    """What one layer needs while it runs, beside that."""

    @property
    def total(self) -> float:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def optimizer_bytes_of(block: Block) -> int:
    """Return the bytes of AdamW a parameter: two float32 moments, and float32 weights beside narrower ones.

    Of float64 parameters the moments are float64.
    """
    if block.itemsize == 8:
        return 16
    return 12 if block.itemsize < 4 else 8


def expert_parallel(
    block: Block, balance: Balance, tokens: float, optimizer_bytes: float, *, deduplicate: bool, recompute: bool
) -> Memory:
    """Return the memory of the fullest rank under expert parallelism.

    Placed experts and their replicas have weights, gradients and states on every rank that holds them. Clones are held
    from the forward to the backward, as activations, and their gradients as buffers of one layer.

    Args:
        block: the layers.
        balance: rows and experts of the fullest rank.
        tokens: T, of a rank.
        optimizer_bytes: a parameter.
        deduplicate: rows arrive once a token and are copied for each expert.
        recompute: the forward runs again in the backward (activation checkpointing of each layer).
    """
    cloned = balance.clones > 0
    own = -(-block.experts // balance.ranks) if cloned else balance.experts
    clones = (balance.experts - own) * block.expert_parameters * block.itemsize if cloned else 0.0
    rows = (balance.rows, balance.gathered_once if deduplicate else tokens * block.choices)
    layer = _activations(block, *rows, tokens, copied=deduplicate)
    parameters = block.layers * (own * block.expert_parameters + block.replicated_parameters)
    return _memory(block, parameters, optimizer_bytes, layer + clones, rows, tokens, recompute, clones)


def data_parallel(block: Block, tokens: float, optimizer_bytes: float, *, recompute: bool) -> Memory:
    """Return the memory of a rank that holds all experts (DistributedDataParallel)."""
    return _alone(block, 1, 0.0, tokens, optimizer_bytes, recompute)


def fully_sharded(block: Block, ranks: int, tokens: float, optimizer_bytes: float, *, recompute: bool) -> Memory:
    """Return the memory of a rank that holds 1 / R of every parameter and gathers a layer at a time (FSDP).

    The buffers hold the whole weights of one layer and their whole gradients.
    """
    whole = block.experts * block.expert_parameters + block.replicated_parameters
    return _alone(block, ranks, 2.0 * whole * block.itemsize, tokens, optimizer_bytes, recompute)


def _alone(block: Block, ranks: int, gathered: float, tokens: float, optimizer_bytes: float, recompute: bool) -> Memory:
    rows = tokens * block.choices
    layer = _activations(block, rows, rows, tokens, copied=False)
    whole = block.layers * (block.experts * block.expert_parameters + block.replicated_parameters)
    return _memory(block, whole / ranks, optimizer_bytes, layer, (rows, rows), tokens, recompute, gathered)


def _activations(block: Block, computed: float, returned: float, tokens: float, *, copied: bool) -> float:
    """What one layer's forward saves, with w the bytes of the router's numbers: float32, or float64.

    w T (H + E) for the router: its rows and logits. b rows (H + 3 F) for the experts: before and after the first
    product, and before the second. b H of each row that came back, for the weights of the choices. b T (H + 3 F_shared)
    for shared experts, less b T H if their rows are the router's. 16 T K for choices, weights and the order of rows.
    Rows that are copied where they arrive are also summed there, which saves the experts' outputs: b H more of each.
    """
    wide = max(4, block.itemsize)
    saved = wide * tokens * (block.hidden + block.experts) + 16.0 * tokens * block.choices
    inner = computed * ((2 if copied else 1) * block.hidden + 3 * block.ffn)
    saved += block.itemsize * (inner + returned * block.hidden)
    if block.shared_ffn:
        rows = 0 if block.itemsize == wide else block.hidden
        saved += block.itemsize * tokens * (rows + 3 * block.shared_ffn)
    return saved


def _memory(
    block: Block,
    parameters: float,
    optimizer_bytes: float,
    layer: float,
    rows: tuple[float, float],
    tokens: float,
    recompute: bool,
    more: float,
) -> Memory:
    """Sum up: a layer's backward holds gradients of the rows sent, b H each, and of those computed, b (H + 3 F)."""
    computed, sent = rows
    buffers = block.itemsize * (sent * block.hidden + computed * (block.hidden + 3 * block.ffn)) + more
    activations = block.layers * layer
    if recompute:
        activations = block.layers * tokens * block.row_bytes
        buffers += layer
    numbers = parameters * block.itemsize
    return Memory(numbers, numbers, parameters * optimizer_bytes, activations, buffers)
