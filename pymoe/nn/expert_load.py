"""The load of the experts: for how many slots each expert was chosen in the last forward of every layer of a model.

A :class:`pymoe.nn.MoE` keeps its load itself. A :class:`CountedLoad` keeps the load of other experts: it is attached to
them as a submodule, and its ``count`` is called for every choice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pymoe._transforms import in_torch_func, is_exporting
from pymoe.nn.local_tensors import LocalTensors
from pymoe.nn.moe import MoE
from pymoe.nn.options import check_model


class CountedLoad(LocalTensors):
    """Counts the load of experts outside of :class:`pymoe.nn.MoE` layers, in their last forward.

    Args:
        num_experts: E, the number of experts.
        device: the device of the counts.
    """

    def __init__(self, num_experts: int, device: torch.device | None = None) -> None:
        super().__init__(
            load=torch.zeros(num_experts, device=device, dtype=torch.int32),
            forwards=torch.zeros((), device=device, dtype=torch.int64),
        )

    def count(self, experts_TK: Tensor) -> None:
        """Set the load to that of ``experts_TK``, (T, K), and count a forward.

        Do nothing inside transforms of :mod:`torch.func` or :func:`torch.export`.
        """
        if in_torch_func() or is_exporting():
            return
        self.follow(experts_TK.device)
        with torch.no_grad():
            self["load"].copy_(load_of(experts_TK, self["load"].shape[0]))
            self["forwards"].add_(1)


def load_of(experts_TK: Tensor, num_experts: int) -> Tensor:
    """Return (E,) int32, the number of slots of each expert; indices of E and above are not counted.

    Args:
        experts_TK: (T, K) integers, none negative.
        num_experts: E, the number of experts.
    """
    flat = experts_TK.reshape(-1).clamp(max=num_experts)
    load = flat.new_zeros(num_experts + 1, dtype=torch.int32)
    return load.index_add(0, flat, torch.ones_like(flat, dtype=torch.int32))[:num_experts]


def expert_load(model: nn.Module) -> dict[str, Tensor]:
    """Return the number of slots of each expert in the last forward of every layer, including dropped slots.

    Under activation checkpointing the recomputation leaves the same numbers. With gradient accumulation the numbers are
    those of the last micro-batch.

    Args:
        model: a model that contains :class:`pymoe.nn.MoE` layers, or a model of transformers after
            :func:`pymoe.integrations.transformers.count_expert_load`.

    Returns:
        A load (E,) int32 for each layer, on its device, keyed by the name of the ``MoE`` or of the other library's
        experts within the model (``"moe"`` or ``"experts"`` for the model itself). A ``MoE`` that was not called has a
        load of zero.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: the model has neither ``MoE`` layers nor counted experts.
        RuntimeError: experts have run no forward since ``count_expert_load``, or only code compiled before that call.

    Example:
        >>> model = torch.nn.Sequential(pymoe.nn.MoE(16, 32, num_experts=4, top_k=2))
        >>> output = model(torch.randn(10, 16))
        >>> {name: load.sum().item() for name, load in pymoe.nn.expert_load(model).items()}
        {'0': 20}
    """
    check_model("expert_load", model)
    loads = {}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            loads[name or "moe"] = module.stats.load
        elif isinstance(module, CountedLoad):
            place = name.rpartition(".")[0]
            if not module["forwards"]:
                raise RuntimeError(
                    f"expert_load: expected a forward of {place or 'the experts'} since its experts are counted, got "
                    "none; code that was compiled before count_expert_load does not count"
                )
            loads[place or "experts"] = module["load"].clone()
    if not loads:
        raise ValueError(
            f"expert_load: expected a model with pymoe.nn.MoE layers or counted experts, got {type(model).__name__} "
            "with neither; pymoe.integrations.transformers.count_expert_load(model) counts those of transformers"
        )
    return loads
