"""Builds small instances of all classes of experts that use the experts interface of the installed transformers.

The classes are found in the sources, so that collecting the tests does not import transformers.
"""

import contextlib
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import NamedTuple

import torch

HIDDEN, FFN, EXPERTS = 48, 40, 8

SMALL = {
    **dict.fromkeys(("hidden_size", "moe_hidden_size", "moe_latent_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size"), FFN),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
}
"""Names of the three sizes in configurations."""

OWN_ARGUMENTS = {"Ernie4_5_VLMoeMoeExperts": {"intermediate_size": FFN}}
"""Arguments of constructors that need more than a configuration."""


class ExpertsClass(NamedTuple):
    """A class, by the names of its model and its own."""

    model: str
    name: str

    @property
    def module(self):
        return importlib.import_module(f"transformers.models.{self.model}.modeling_{self.model}")

    def build(self):
        """Return an instance with random parameters and E, F, H as above; its ``config`` selects the implementation."""
        cls = getattr(self.module, self.name)
        errors = []
        for config in self._configs():
            try:
                experts = cls(config, **OWN_ARGUMENTS.get(self.name, {}))
            except Exception as error:  # the configuration is for another part of the model
                errors.append(f"{type(config).__name__}: {error}")
                continue
            for parameter in experts.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
            return experts
        raise AssertionError(f"{self.name} could not be built: {errors}")

    def _configs(self):
        module = importlib.import_module(f"transformers.models.{self.model}.configuration_{self.model}")
        base = importlib.import_module("transformers").PreTrainedConfig
        for cls in vars(module).values():
            if inspect.isclass(cls) and issubclass(cls, base) and cls.__module__ == module.__name__:
                with contextlib.suppress(Exception):
                    yield shrunk(cls())


def shrunk(config):
    for name, value in SMALL.items():
        if hasattr(config, name):
            with contextlib.suppress(Exception):  # a property, or a list of sizes of layers
                setattr(config, name, value)
    return config


def sources():
    """Yield the name of every model of the installed transformers, and the source of its modules."""
    root = Path(importlib.util.find_spec("transformers").origin).parent
    for path in sorted((root / "models").glob("*/modeling_*.py")):
        if path.stem == f"modeling_{path.parent.name}":
            yield path.parent.name, path.read_text()


def experts_classes():
    """Return all classes behind the interface."""
    pattern = re.compile(r"^@use_experts_implementation[^\n]*\nclass (\w+)", re.MULTILINE)
    return [ExpertsClass(model, name) for model, text in sources() for name in pattern.findall(text)]


def hidden_size(experts):
    """Return H of an experts module."""
    w_out = experts.down_proj
    return w_out.shape[2] if experts.is_transposed else w_out.shape[1]
