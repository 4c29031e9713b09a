"""A newcomer's mistakes with layers and operators: each message names the mistake and the remedy."""

from __future__ import annotations

import re

import pytest
from newcomer import Table, cases, check, read

BEFORE = """
torch.manual_seed(0)
moe, x = MoE(16, 32, 4, 2), torch.randn(5, 16)
"""
VALUES: Table = {
    "another hidden size": ("moe(torch.randn(3, 8))", r"x must have shape \(\.\.\., H\) with H = 16, got \(3, 8\)"),
    "no dimension": ("moe(torch.tensor(1.0))", r"x must have shape \(\.\.\., H\) with H = 16, got \(\)"),
    "float64": ("moe(x.double())", r"x must have the dtype of the parameters \(torch.float32\), got torch.float64"),
    "bfloat16": ("moe(x.bfloat16())", r"x must have the dtype of the parameters \(torch.float32\), got torch.bfloat16"),
    "integers": ("moe(x.int())", "x must have dtype float32, float64, bfloat16 or float16, got torch.int32"),
    "numpy": ("moe(x.numpy())", "x must be a tensor, got ndarray"),
    "a layer without values": (
        "MoE(16, 32, 4, 2, device='meta')(x)",
        r"got parameters on the meta device: call to_empty\(device=...\), then reset_parameters\(\)",
    ),
    "meta": ("moe(x.to('meta'))", r"x must be on the device of the parameters \(cpu\), got meta"),
    "no experts for a token": ("MoE(16, 32, 4, 0)", r"top_k must be in 1..num_experts \(4\), got 0"),
    "more choices than experts": ("MoE(16, 32, 4, 5)", r"top_k must be in 1..num_experts \(4\), got 5"),
    "a float of experts": ("MoE(16, 32, 4.0, 2)", "num_experts must be an int, got float"),
    "text for capacity": ("MoE(16, 32, 4, 2, capacity_factor='2')", "capacity_factor must be a float, got str"),
    "half of the groups": ("MoE(16, 32, 4, 2, num_groups=2)", "num_groups and topk_groups must be given together"),
    "3 bits": ("quantize_experts(moe.eval(), bits=3)", "bits must be 8 or 4, got 3"),
    "an activation without its gate": ("MoE(16, 32, 4, 2, activation='silu')", "must be one of 'swiglu', 'gelu'"),
    "offsets of int64": (
        "ops.grouped_linear(torch.randn(6, 8), torch.randn(2, 4, 8), torch.tensor([0, 3, 6]))",
        "offsets must have dtype int32, got torch.int64",
    ),
    "offsets past the rows": (
        "ops.grouped_linear(torch.randn(6, 8), torch.randn(2, 4, 8), torch.tensor([0, 3, 9], dtype=torch.int32))",
        r"offsets must lie in \[0, S\] \(S = 6\), got 9",
    ),
}
NAMES: Table = {
    "n_experts": ("MoE(16, 32, n_experts=4, top_k=2)", "there is no argument 'n_experts': did you mean 'num_experts'"),
    "transformers' num_local_experts": (
        "MoE(hidden_size=16, ffn_size=32, num_local_experts=4, top_k=2)",
        r"^TypeError: MoE: there is no argument 'num_local_experts': did you mean 'num_experts'\?",
    ),
    "transformers' intermediate_size": (
        "MoE(hidden_size=16, intermediate_size=32, num_experts=4, top_k=2)",
        r"'intermediate_size': did you mean 'ffn_size'\?",
    ),
    "transformers' num_experts_per_tok": (
        "MoE(hidden_size=16, ffn_size=32, num_experts=4, num_experts_per_tok=2)",
        r"'num_experts_per_tok': did you mean 'top_k'\?",
    ),
    "Megatron's name": ("MoE(16, 32, 4, moe_router_topk=2)", r"'moe_router_topk': did you mean 'top_k'\?"),
    "DeepSpeed's name": ("MoE(16, 32, num_experts=4, k=2)", r"'k': did you mean 'top_k'\?"),
    "DeepSpeed's expert": (
        "MoE(16, expert=nn.Linear(16, 16), num_experts=4, k=2)",
        r"'expert': ffn_size= and activation= describe the experts",
    ),
    "DeepSpeed's use_residual": ("MoE(16, 32, 4, 2, use_residual=True)", r"did you mean 'num_shared_experts'\?"),
    "DeepSpeed's eval_capacity_factor": (
        "MoE(16, 32, 4, 2, eval_capacity_factor=2.0)",
        "'eval_capacity_factor': capacity_factor= holds in training and evaluation",
    ),
    "DeepSpeed's min_capacity": ("MoE(16, 32, 4, 2, min_capacity=4)", "capacity_factor= is the only limit"),
    "DeepSpeed's drop_tokens": ("MoE(16, 32, 4, 2, drop_tokens=False)", "capacity_factor=None, the default, drops no"),
    "DeepSpeed's use_rts": ("MoE(16, 32, 4, 2, use_rts=True)", "an expert past its capacity_factor drops the last"),
    "DeepSpeed's noisy_gate_policy": (
        "MoE(16, 32, 4, 2, noisy_gate_policy='RSample')",
        "the router adds no noise; bias_update_rate= or aux_loss_coef= balance the experts",
    ),
    "another library's name, misspelt": ("MoE(16, 32, 4, moe_routers_topk=2)", r"did you mean 'top_k'\?"),
    "a name like no other": (
        "MoE(16, 32, 4, 2, zzz=1)",
        "there is no argument 'zzz': expected hidden_size, ffn_size, ",
    ),
    "topk of Router": ("Router(16, 4, topk=2)", r"^TypeError: Router: .* 'topk': did you mean 'top_k'\?"),
    "hidden_dim of Experts": ("Experts(hidden_dim=16)", r"^TypeError: Experts: .*did you mean 'hidden_size'\?"),
    "nbits": ("quantize_experts(moe.eval(), nbits=4)", r"there is no argument 'nbits': did you mean 'bits'\?"),
    "load_in_4bit": ("quantize_experts(moe.eval(), load_in_4bit=True)", "'load_in_4bit': bits=4 gives 4 bits"),
    "a name in lower case": ("pymoe.moe", "module 'pymoe' has no attribute 'moe': did you mean 'MoE'"),
    "a name in pymoe": ("pymoe.piplines", "module 'pymoe' has no attribute 'piplines': did you mean 'pipeline'"),
    "hivemind's name": ("pymoe.ModuleBackend", "no attribute 'ModuleBackend': did you mean 'ExpertBackend'"),
    "torch's name": ("pymoe.ScheduleGPipe", "no attribute 'ScheduleGPipe': pymoe.pipeline cuts and runs a model"),
    "British spelling": (
        "pymoe.nn.quantise_experts",
        "module 'pymoe.nn' has no attribute 'quantise_experts': did you mean 'quantize_experts'",
    ),
    "British spelling in pymoe": ("pymoe.quantise_linears", "it is pymoe.nn.quantize_linears$"),
    "torch's nn, replaced": (
        "from pymoe import nn; nn.Linear(2, 2)",
        "module 'pymoe.nn' has no attribute 'Linear': torch.nn has it; this nn is pymoe's",
    ),
    "a name of a part": ("pymoe.Router", "module 'pymoe' has no attribute 'Router': it is pymoe.nn.Router"),
}
USE: Table = {
    "another number of experts in a state": (
        "moe.load_state_dict(MoE(16, 32, 8, 2).state_dict())",
        "the state is of a layer with num_experts=8 and hidden_size=16, this one has num_experts=4 and hidden_size=16: "
        "make the layer with the numbers of the state",
    ),
    "a state in few bits": (
        """
quantize_experts(packed := MoE(16, 32, 4, 2).eval(), bits=8)
moe.load_state_dict(packed.state_dict())
""",
        r"Experts 'experts': the state holds weights in few bits, .*: call quantize_experts\(model, bits=...\) first",
    ),
    "dense layers with names of their own": (
        "pymoe.nn.quantize_linears(nn.Sequential(nn.Linear(64, 64)).eval())",
        "have names of transformers, got none; select=lambda name, layer: True takes all others",
    ),
    "nothing to update": ("update_expert_biases(moe)", r"build the layers with MoE\(\.\.\., bias_update_rate=0.001\)"),
    "quantised in training": ("quantize_experts(moe)", r"call model.eval\(\) first"),
    "quantised without experts": (
        "quantize_experts(nn.Linear(4, 4).eval())",
        "must hold experts .* found once pymoe.integrations.transformers is imported",
    ),
}


@cases(VALUES | NAMES | USE)
def test_the_message_says_what_to_do(capfd: pytest.CaptureFixture[str], code: str, answer: str) -> None:
    check(read(capfd, BEFORE, code), answer)


def test_the_layer_is_where_it_is_looked_for(capfd: pytest.CaptureFixture[str]) -> None:
    """``from pymoe import MoE`` failed, and Python's own message cannot be replaced."""
    assert not read(capfd, "", "from pymoe import MoE\nassert MoE is pymoe.nn.MoE").strip()


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="this machine has CUDA")
def test_a_device_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    check(
        read(capfd, BEFORE, "MoE(16, 32, 4, 2, device='cuda')"),
        r"MoE: device must be a device of this machine, got 'cuda'",
    )


def test_one_choice_that_cannot_learn(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pymoe.nn.options._warned", set())  # it warns once in a process
    check(read(capfd, BEFORE, "MoE(16, 32, 4, 1)"), "the router a gradient of exactly 0 .*; pass renormalize=False")


def test_other_libraries_names_stand_for_arguments_that_exist() -> None:
    """A translation into a name that does not exist would be as wrong as none."""
    from pymoe._common.names import keywords_of
    from pymoe.integrations.transformers import configuration
    from pymoe.nn import MoE
    from pymoe.nn.options import OTHER_NAMES
    from pymoe.pipe.sequential import OTHER_NAMES_IN_STEP, STEP_OPTIONS
    from pymoe.runtime import ExpertBackend, backend

    assert {name for name in OTHER_NAMES.values() if " " not in name} <= {*keywords_of(MoE)}
    sentences = " ".join(meant for meant in OTHER_NAMES.values() if " " in meant)
    assert {*re.findall(r"(\w+)=", sentences)} <= {*keywords_of(MoE)}
    assert {*backend.OTHER_NAMES.values()} <= {*keywords_of(ExpertBackend)}
    assert {*OTHER_NAMES_IN_STEP.values()} <= {*STEP_OPTIONS} <= {*keywords_of(__import__("pymoe").Pipe.step)}
    assert {name for name in configuration.OTHER_NAMES.values() if " " not in name} <= {"bits"}
