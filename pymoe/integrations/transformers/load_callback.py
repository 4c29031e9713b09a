"""LoadCallback: adds the load of the experts to the logs of transformers' Trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pymoe.integrations.transformers.interface import trainer_callback
from pymoe.integrations.transformers.routing import Attached, count_expert_load, sparse_experts
from pymoe.nn import expert_load
from pymoe.nn.load_picture import draw_expert_load
from pymoe.nn.moe import moe_layers
from pymoe.nn.router import summed_over_ranks

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    TrainerCallback = trainer_callback()

PICTURE = "experts.png"


class LoadCallback(TrainerCallback):
    """Logs the load of the experts of every layer whenever a ``Trainer`` logs its loss.

    The numbers go to everything that the ``Trainer`` reports to, such as W&B or TensorBoard, under
    ``expert_load/LAYER/...``:

    - ``max_over_mean``: the slots of the busiest expert, as a multiple of an even share; 1 is perfect balance;
    - ``entropy``: the entropy of the experts' shares of slots, divided by that of even shares: 1 is perfect balance,
      and 0 means that one expert gets all slots;
    - ``dropped``: the share of slots that exceeded an expert's capacity, for :class:`pymoe.nn.MoE` layers. Experts of
      transformers drop nothing.

    The numbers cover the last micro-batch of each optimizer step since the last log, on all ranks if
    ``torch.distributed`` is initialised. A layer that got no tokens is left out.

    Args:
        trainer: the ``Trainer`` whose ``log`` is called. Its model has experts behind transformers' interface, which
            are counted during the training (see :func:`count_expert_load`), or ``MoE`` layers, or both.
        folder: if given, ``experts.png`` is written into it at the end of the training, which needs matplotlib. It
            shows, for each layer, the share of slots of each expert from log to log.

    Example:
        >>> import tempfile
        >>> from pymoe.integrations.transformers import LoadCallback
        >>> from transformers import OlmoeConfig, OlmoeForCausalLM, Trainer, TrainingArguments
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64, eos_token_id=0)
        >>> model = OlmoeForCausalLM(OlmoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
        >>> data = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 4
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     options = dict(max_steps=1, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True)
        ...     trainer = Trainer(model, TrainingArguments(folder, use_cpu=True, **options), train_dataset=data)
        ...     trainer.add_callback(LoadCallback(trainer))
        ...     done = trainer.train()
        {'loss': ...}
        >>> [name for log in trainer.state.log_history for name in log if name.startswith("expert_load")]
        ['expert_load/model.layers.0.mlp.experts/max_over_mean', 'expert_load/model.layers.0.mlp.experts/entropy']
    """

    def __init__(self, trainer: Any, folder: str | Path | None = None) -> None:
        self.trainer = trainer
        self.folder = None if folder is None else Path(folder)
        self._counting: Attached | None = None
        self._load: dict[str, Tensor] = {}
        self._dropped: dict[str, Tensor] = {}
        self._frames: list[list[list[float]]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Reset the counts, and start counting."""
        model: nn.Module = self.trainer.model
        self._load, self._dropped, self._frames = {}, {}, []
        # If the previous training run raised, nothing called on_train_end.
        if self._counting is not None:
            self._counting.remove()
            self._counting = None
        if sparse_experts("LoadCallback", model):
            self._counting = count_expert_load(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Add the load of the step's last micro-batch."""
        model: nn.Module = self.trainer.model
        _add(self._load, expert_load(model))
        _add(self._dropped, {name: layer.stats.dropped for name, layer in moe_layers(model).items()})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Log the load whenever the loss of the same steps is logged."""
        # Skip the log of an evaluation, and the log that this method itself makes below.
        if not self._load or "loss" not in (logs or {}):
            return
        found = _on_all_ranks([*self._load.values(), *self._dropped.values()])
        loads = dict(zip(self._load, found, strict=False))
        dropped = dict(zip(self._dropped, found[len(loads) :], strict=True))
        self._load, self._dropped = {}, {}
        self._frames.append([(load * (len(load) / load.sum().clamp(min=1))).tolist() for load in loads.values()])
        self.trainer.log(_numbers(loads, dropped))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the counting and, with a ``folder``, draw the picture on the first rank."""
        if self._counting is not None:
            self._counting.remove()
            self._counting = None
        if self.folder is not None and self._frames and state.is_world_process_zero:
            title = f"Load of every expert: {type(self.trainer.model).__name__}"
            draw_expert_load(self._frames, state.global_step, self.folder / PICTURE, title)


def _add(totals: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        totals[name] = totals[name] + value if name in totals else value.long()


def _on_all_ranks(counts: list[Tensor]) -> list[Tensor]:
    flat = [count.reshape(-1) for count in counts]
    if dist.is_available() and dist.is_initialized():
        flat = summed_over_ranks(flat, None)
    return [count.to("cpu", torch.float64) for count in flat]


def _numbers(loads: dict[str, Tensor], dropped: dict[str, Tensor]) -> dict[str, float]:
    numbers = {}
    for name, load in loads.items():
        slots, experts = load.sum().item(), len(load)
        if slots == 0:
            continue
        shares = load / slots
        entropy = -torch.special.xlogy(shares, shares).sum().item()
        numbers[f"expert_load/{name}/max_over_mean"] = shares.max().item() * experts
        numbers[f"expert_load/{name}/entropy"] = entropy / math.log(experts) if experts > 1 else 1.0
        if name in dropped:
            numbers[f"expert_load/{name}/dropped"] = dropped[name].item() / slots
    return numbers
