"""Every raw operator behaves as PyTorch expects of one: schema, autograd registration, fake kernel, AOT dispatch."""

import pytest
import torch
from devices import moved
from specs import all_raw_calls

import pymoe  # noqa: F401

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CALLS = {f"{call.operator}-{call.name}": call for call in all_raw_calls()}


@pytest.mark.thinned(usual=40)
@pytest.mark.only_on("cpu", "cuda")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_opcheck(call, device):
    operator = getattr(torch.ops.pymoe, call.operator).default
    result = torch.library.opcheck(operator, moved(call, device).args, test_utils=CHECKS)
    assert result == dict.fromkeys(CHECKS, "SUCCESS")


@pytest.mark.only_on("cpu")
def test_every_registered_operator_is_checked():
    registered = {
        name.removeprefix("pymoe::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("pymoe::")
    }
    assert registered == {call.operator for call in CALLS.values()}
