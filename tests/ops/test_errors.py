"""A caller's mistake raises exactly the promised exception, the same one from the operator and its reference."""

from functools import cache

import pytest
from devices import moved
from specs import all_specs, verify

from pymoe.ops import check_indices

SPECS = {spec.name: spec for spec in all_specs()}


@cache
def cases(name):
    return {error_input.sample.name: error_input for error_input in SPECS[name].error_inputs()}


EVERY_MISTAKE = [pytest.param(name, case, id=f"{name}-{case}") for name in SPECS for case in cases(name)]


@pytest.mark.parametrize(("name", "case"), EVERY_MISTAKE)
def test_raises_the_promised_error(name, case, device):
    spec, mistake = SPECS[name], moved(cases(name)[case], device)
    with check_indices():  # on CUDA, values of indices are checked only in debug mode
        of_native = verify.error_raised(spec, spec.native, mistake)
    of_reference = verify.error_raised(spec, spec.reference, mistake)
    assert of_native == of_reference


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("name", SPECS)
def test_specification_has_enough_mistakes(name):
    assert len(cases(name)) >= 12
    assert len(cases(name)) == sum(1 for _ in SPECS[name].error_inputs()), "two mistakes share a name"
