"""Lists the public names whose docstrings have an example: ``python tests/docstring_examples.py``.

An example is written as for :mod:`doctest`. It begins after ``import torch`` and ``import pymoe``.
"""

from __future__ import annotations

import doctest
import importlib
import sys

from docs_pages import ROOT

FIRST = {
    "pymoe": "BatchTensorProto ExpertBackend MixtureOfExpertBackends Pipe Runtime SplitPoint TaskPool build_info "
    "annotate_split_points map_with_parallel_backward pipe_split pipeline run_in_background",
    "pymoe.nn": "Experts MoE Router SharedExperts apply_experts expert_load load_quantized prefetch_experts "
    "quantize_experts quantize_linears record_routing replay_routing save_quantized set_aux_loss_scale "
    "update_expert_biases",
    "pymoe.ops": "build_routing combine dequantize_weight dispatch expert_activation gate_topk gather_batch "
    "grouped_linear load_balancing_loss pack_weight quantize_weight quantized_linear router_z_loss split_batch "
    "unpack_weight",
    "pymoe.ep": "clip_grad_norm_ data_parallel redistribute shard",
    "pymoe.runtime": "ExpertClient",
    "pymoe.remote": "ExpertServer connect",
    "pymoe.pipe.balance": "balance_by_time",
    "pymoe.pipe.skip": "skippable",
    "pymoe.integrations.transformers": "LoadCallback PymoeConfig add_expert_biases add_router_losses "
    "count_expert_load enable from_transformers to_transformers",
}
FIRST_NAMES = [f"{package}.{name}" for package, names in FIRST.items() for name in names.split()]
"""Public names that users meet first, in README, the quickstart and the tutorials."""


def public_names() -> list[str]:
    """Return the names of ``pymoe`` itself and of every package that has a page in the reference."""
    packages = ["pymoe", *sorted(page.stem for page in (ROOT / "docs/reference/api").glob("pymoe.*.md"))]
    return [f"{package}.{name}" for package in packages for name in importlib.import_module(package).__all__]


def examples(name: str) -> list[doctest.Example]:
    """Return the examples in the docstring of a public name: statements, each with what it prints."""
    package, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(package), attribute)
    own = found.__doc__ if found.__doc__ != type(found).__doc__ else ""  # a number has the docstring of int
    return doctest.DocTestParser().get_examples(own or "")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for name in public_names():
        print(f"{name}: {'yes' if examples(name) else 'no'}")
