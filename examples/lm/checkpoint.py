"""A run in one safetensors file, from which it continues to the same losses bit for bit.

``model.*`` parameters and buffers, ``optimizer.*`` AdamW's moments and counts by parameter name, ``rng`` torch's
generator, ``history.*`` what the run measured; config, text and the data's position are JSON in the file's metadata.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .config import Config
from .trainer import Trainer

FILE_NAME = "checkpoint.safetensors"
FORMAT = 1


class CheckpointError(Exception):
    """The checkpoint cannot be used; the message says why in one line."""


def save(trainer: Trainer, folder: Path) -> Path:
    """Writes beside the old checkpoint and renames: an interrupted save leaves the old one whole."""
    history = trainer.history
    tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in trainer.model.state_dict().items()}
    for name, parameter in trainer.model.named_parameters():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    tensors["rng"] = torch.get_rng_state()
    tensors["history.loss"] = torch.tensor(history.loss, dtype=torch.float64)
    tensors["history.seconds"] = torch.tensor(history.seconds, dtype=torch.float64)
    tensors["history.validation_step"] = torch.tensor(history.validation_step, dtype=torch.int64)
    tensors["history.validation_bits"] = torch.tensor(history.validation_bits, dtype=torch.float64)
    if history.load:
        tensors["history.load"] = torch.stack(history.load)
    facts = {
        "format": FORMAT,
        "config": asdict(trainer.config),
        "text_sha256": trainer.text.sha256,
        "steps_done": trainer.steps_done,
        "windows_read": trainer.steps_done * trainer.config.batch_size,
    }
    path = folder / FILE_NAME
    fresh = path.with_name(FILE_NAME + ".new")
    save_file({k: v.detach().contiguous() for k, v in tensors.items()}, fresh, metadata={"pymoe": json.dumps(facts)})
    os.replace(fresh, path)
    return path


def read_config(folder: Path) -> Config:
    """The config of the run that was saved in ``folder``."""
    return Config(**_facts(folder)["config"])


def load(trainer: Trainer, folder: Path) -> None:
    """Puts a trainer that was made from the saved config and text where the saved run stood."""
    facts = _facts(folder)
    if facts["text_sha256"] != trainer.text.sha256:
        raise CheckpointError(
            f"the text differs from the one that the run in {folder} was trained on ({trainer.text.name} has changed, "
            "or this is another version of Python, with another manual)"
        )
    with safe_open(folder / FILE_NAME, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    trainer.model.load_state_dict(_under("model.", tensors))
    for name, parameter in trainer.model.named_parameters():
        state = _under(f"optimizer.{name}.", tensors)
        if state:
            trainer.optimizer.state[parameter] = state
    history = trainer.history
    history.loss = tensors["history.loss"].tolist()
    history.seconds = tensors["history.seconds"].tolist()
    history.validation_step = tensors["history.validation_step"].tolist()
    history.validation_bits = tensors["history.validation_bits"].tolist()
    history.load = list(tensors["history.load"]) if "history.load" in tensors else []
    torch.set_rng_state(tensors["rng"])


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _facts(folder: Path) -> dict:
    path = folder / FILE_NAME
    if not path.exists():
        raise CheckpointError(f"there is no {FILE_NAME} in {folder}")
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["pymoe"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of this example: {error}") from error
    if facts["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {facts['format']}, this example reads {FORMAT}")
    return facts
