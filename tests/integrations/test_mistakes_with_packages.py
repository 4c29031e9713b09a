"""A newcomer's mistakes with transformers, and with packages that are not installed: each message says what to do."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from newcomer import Table, cases, check, read

import pymoe
import pymoe.integrations

MODELS: Table = {
    "a dense model": (
        """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
adapter.enable(LlamaForCausalLM(LlamaConfig(**sizes)))
""",
        "expected a model with experts behind transformers' interface, .* got LlamaForCausalLM with none of them",
    ),
    "another block": (
        "adapter.from_transformers(nn.Linear(3, 3))",
        "got Linear; known are AXK2MoE, ",
    ),
    "5 bits": ("adapter.PymoeConfig(bits=5)", "PymoeConfig: bits must be 8 or 4, got 5"),
    "GPTQ": (
        "adapter.PymoeConfig(format='gptq')",
        "format must be 'int', 'mxfp', 'fp', 'affine', 'symmetric' or 'stored', got 'gptq': "
        "format='stored' keeps the weights of such files as they are",
    ),
    "GGUF in capitals": ("adapter.PymoeConfig(format='GGUF')", "got 'GGUF': format='stored' keeps the weights of such"),
    "NF4": ("adapter.PymoeConfig(format='nf4')", "got 'nf4': bits=4 gives 4 bits"),
    "a function of another part": ("adapter.quantize_experts", "'quantize_experts': it is pymoe.nn.quantize_experts$"),
    "British spelling": ("adapter.quantise_experts", "'quantise_experts': it is pymoe.nn.quantize_experts$"),
    "a cache among the outputs of stages": (
        """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes))
pipeline(model, (torch.randint(32, (2, 5)),), split_spec={"model.layers.1": SplitPoint.BEGINNING})
""",
        r"output\['past_key_values'\] is a DynamicCache, .*; give a model of transformers use_cache=False",
    ),
    "a name on the hub": (
        "import sys, pymoe.quantize as q; q.main(['nobody/no-model', 'out'])",
        "expected a folder with config.json, got nobody/no-model; .*: hf download nobody/no-model --local-dir FOLDER",
    ),
    "a folder that is not there": (
        "import sys, pymoe.quantize as q; q.main(['../no-model', 'out'])",
        "expected a folder with config.json, got ../no-model$",
    ),
    "load_in_4bit": ("adapter.PymoeConfig(load_in_4bit=True)", r"got \{'load_in_4bit': True\}: bits=4 gives 4 bits"),
    "bit": ("adapter.PymoeConfig(bit=4)", r"got \{'bit': 4\}: did you mean 'bits'\?"),
}
PACKAGES = {
    "grpc": ("import pymoe.remote", "needs grpcio, msgspec and safetensors: pip install grpcio msgspec safetensors"),
    "transformers": ("import pymoe.integrations.transformers", 'needs transformers: pip install "transformers>=5"'),
    "ray": ("import pymoe.integrations.ray as one; one.serve('a', list)", "needs ray: pip install ray"),
    "prometheus_client": (
        "import pymoe.integrations.prometheus as one; one.serve(Runtime([TaskPool(len, name='a')]), 1)",
        "needs prometheus-client: pip install prometheus-client",
    ),
}


@cases(MODELS)
def test_the_message_says_what_to_do(capfd: pytest.CaptureFixture[str], code: str, answer: str) -> None:
    pytest.importorskip("transformers")
    check(read(capfd, "import pymoe.integrations.transformers as adapter", code), answer)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_is_missing_is_named_with_its_command(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    code, answer = PACKAGES[package]
    for name in list(sys.modules):
        if name.startswith((f"{package}.", "pymoe.remote", "pymoe.integrations")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    for parent in (pymoe, pymoe.integrations):  # a new import gives them other attributes
        for name, value in list(vars(parent).items()):
            if isinstance(value, ModuleType):
                monkeypatch.setattr(parent, name, value)
    check(read(capfd, "", code), f"^ImportError: .*{answer}")
