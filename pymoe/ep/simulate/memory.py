"""Memory of a rank: the needs of a model's mixture layers with expert parallelism and without it."""

from __future__ import annotations

from dataclasses import dataclass

from pymoe.ep.simulate.block import Block
from pymoe.ep.simulate.rows import Balance


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank for all mixture layers of the model, and nothing else of the model."""

    weights: float
    gradients: float
    optimizer: float
    """Bytes of the optimizer's states, and of master weights if it keeps them."""
    activations: float
    """Bytes that a forward leaves for the backward."""
    buffers: float
    """Additional bytes that one layer needs while it runs."""

    @property
    def total(self) -> float:
        """Return the sum of all parts in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def optimizer_bytes_of(block: Block) -> int:
    """Return the bytes per parameter of AdamW: two float32 moments, and float32 weights in addition to narrower ones.

    The moments of float64 parameters are float64.
    """
    if block.itemsize == 8:
        return 16
    return 12 if block.itemsize < 4 else 8


def expert_parallel(
    block: Block,
    ranks: int,
    balance: Balance,
    tokens: float,
    optimizer_bytes: float,
    gathered: float | None,
    recompute: bool,
) -> Memory:
    """Return the memory of the fullest rank under expert parallelism.

    Clones are kept from the forward to the backward, as activations, and their gradients as buffers of one layer.

    Args:
        block: the layers.
        ranks: R, the number of ranks.
        balance: rows and experts of the fullest rank.
        tokens: T, per rank.
        optimizer_bytes: bytes of the optimizer per parameter.
        gathered: rows in a rank's send buffer if a token travels once per rank, where it is copied for each expert;
            None: every choice is a row.
        recompute: the forward runs again in the backward (activation checkpointing of each layer).
    """
    own = -(-block.experts // ranks) if balance.clones else balance.experts
    clones = (balance.experts - own) * block.expert_parameters * block.itemsize
    rows = (balance.rows, tokens * block.choices if gathered is None else gathered)
    layer = _activations(block, *rows, tokens, copied=gathered is not None)
    parameters = block.layers * (own * block.expert_parameters + block.replicated_parameters)
    return _memory(block, parameters, optimizer_bytes, layer + clones, rows, tokens, recompute, clones)


def data_parallel(block: Block, tokens: float, optimizer_bytes: float, *, recompute: bool) -> Memory:
    """Return the memory of a rank that holds all experts (DistributedDataParallel)."""
    return _alone(block, 1, 0.0, tokens, optimizer_bytes, recompute)


def fully_sharded(block: Block, ranks: int, tokens: float, optimizer_bytes: float, *, recompute: bool) -> Memory:
    """Return the memory of a rank that holds 1 / R of every parameter (FSDP); buffers hold one whole layer twice."""
    whole = block.experts * block.expert_parameters + block.replicated_parameters
    return _alone(block, ranks, 2.0 * whole * block.itemsize, tokens, optimizer_bytes, recompute)


def _alone(block: Block, ranks: int, gathered: float, tokens: float, optimizer_bytes: float, recompute: bool) -> Memory:
    rows = tokens * block.choices
    layer = _activations(block, rows, rows, tokens, copied=False)
    whole = block.layers * (block.experts * block.expert_parameters + block.replicated_parameters)
    return _memory(block, whole / ranks, optimizer_bytes, layer, (rows, rows), tokens, recompute, gathered)


def _activations(block: Block, computed: float, returned: float, tokens: float, *, copied: bool) -> float:
    """Return the bytes that the forward of one layer saves.

    With w the bytes of a number of the router (float32 or float64), they are w T (H + E) for the router: its rows and
    logits; b rows (H + 3 F) for the experts: before and after the first product, and before the second; b H for each
    row that came back, for the weights of the choices; b T (H + 3 F_shared) for shared experts, less b T H if they
    share the router's rows; and 16 T K for choices, weights and the order of rows. Rows that are copied on arrival are
    also summed there, which saves the experts' outputs: b H more for each.
    """
    wide = block.weight_itemsize
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
    """Return the memory of a rank.

    The backward of a layer needs buffers for the gradients of rows: b H bytes per row that was sent, b (H + 3 F) per
    row that was computed.
    """
    computed, sent = rows
    buffers = block.itemsize * (sent * block.hidden + computed * (block.hidden + 3 * block.ffn)) + more
    activations = block.layers * layer
    if recompute:
        activations = block.layers * tokens * block.row_bytes
        buffers += layer
    numbers = parameters * block.itemsize
    return Memory(numbers, numbers, parameters * optimizer_bytes, activations, buffers)
