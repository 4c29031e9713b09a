"""A layer notices any code between itself and its parts, put there by any means of torch or of other packages.

The means are read from torch. A kind of hook that a later torch adds fails here until it has been put into one of the
lists: until then, the layer treats it as a hook that calls run.
"""

import inspect
import re
from contextlib import contextmanager, nullcontext

import pytest
import torch
from moe_layers import make_input, make_layer
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from pymoe._torch_private import CALL_HOOKS, global_call_hooks
from pymoe.nn import Experts, MoE, Router
from pymoe.nn.losses import AuxiliaryLosses
from pymoe.nn.plain_calls import are_called_plainly

pytestmark = pytest.mark.only_on("cpu")

PARTS = {"router": Router, "experts": Experts, "losses": AuxiliaryLosses}

CALLS = {"_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"}
OPTIONS_OF_CALLS = {
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
}
STATES = {
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
}
REGISTRATIONS = {f"_global_{kind}_registration_hooks" for kind in ("buffer", "module", "parameter")}
OF_MODULES = CALLS | OPTIONS_OF_CALLS | STATES
OF_ALL = {f"_global{name}" for name in CALLS | OPTIONS_OF_CALLS} - {"_global_forward_pre_hooks_with_kwargs"}
READ_BY_CALLS = (
    OF_MODULES
    | OF_ALL
    | {
        "_call_impl",
        "_compiled_call_impl",
        "_get_backward_hooks",
        "_get_backward_pre_hooks",
        "_maybe_warn_non_full_backward_hook",
        "_slow_forward",  # used by torch.jit.trace, which records names of modules there and calls ``forward``
    }
)
"""The attributes that a module's call reads in addition to ``forward``."""


def hook_names(module, everywhere):
    """Return the names of module attributes and torch globals that concern hooks."""
    own = {name for name in vars(module) | vars(type(module)) if re.search(r"_hooks?(_|$)", name)}
    own = {name for name in own if not callable(getattr(module, name))}
    return own | {name for name in everywhere if re.fullmatch(r"_global_\w*hooks?\w*", name)}


def test_every_kind_of_hook_of_torch_is_classified():
    known = OF_MODULES | OF_ALL | REGISTRATIONS
    assert hook_names(nn.Module(), vars(torch_module)) <= known
    assert set(CALL_HOOKS) == CALLS
    names = {name for name, value in vars(torch_module).items() if any(value is one for one in global_call_hooks)}
    assert names == {f"_global{name}" for name in CALLS}


def test_a_new_kind_of_hook_would_be_found():
    module = nn.Module()
    module._sideways_hooks = {}
    found = hook_names(module, {**vars(torch_module), "_global_sideways_hooks": {}})
    assert found - (OF_MODULES | OF_ALL | REGISTRATIONS) == {"_sideways_hooks", "_global_sideways_hooks"}


def test_a_call_of_a_module_looks_at_nothing_else():
    source = inspect.getsource(nn.Module._wrapped_call_impl) + inspect.getsource(nn.Module._call_impl)
    read = set(re.findall(r"self\.(_\w+)", source)) | set(re.findall(r"\b_global_\w+", source))
    assert read <= READ_BY_CALLS


def registrations():
    """Return every function that registers a hook run by calls, of a module and of all modules."""
    of_module = [name for name in dir(nn.Module) if re.fullmatch(r"register_\w*hook", name)]
    of_all = [name for name in dir(torch_module) if re.fullmatch(r"register_module_\w*hook", name)]
    others = re.compile(r"state_dict|registration")
    return [name for name in of_module + of_all if not others.search(name)]


def test_all_registrations_are_tried():
    assert len(registrations()) == 2 * 5


def heard(backend, register, part, recorded):
    """Return how often a hook is called in a forward and, if it is recorded, in its backward."""
    layer = make_layer(aux_loss_coef=0.1, backend=backend)
    target, calls = getattr(layer, part), []
    everywhere = getattr(torch_module, register, None)
    note = lambda module, *_: calls.append(1) if module is target else None  # noqa: E731
    handle = everywhere(note) if everywhere else getattr(target, register)(note)
    try:
        with nullcontext() if recorded else torch.no_grad():
            y = layer(make_input(5))
            if recorded:
                y.sum().backward()
    finally:
        handle.remove()
        torch_module._global_is_full_backward_hook = None  # the value in a fresh process
    return len(calls)


@pytest.mark.filterwarnings("ignore:.*backward hook", "ignore:For backward hooks")
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "no_grad"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("register", registrations())
def test_hooks_of_every_kind_are_heard_as_often_as_by_the_reference(register, part, recorded):
    calls = heard("native", register, part, recorded)
    assert calls == heard("reference", register, part, recorded)
    assert calls == (recorded or "backward" not in register)


def test_a_backward_hook_of_the_experts_changes_gradients_as_in_the_reference():
    found = []
    for backend in ("native", "reference"):
        layer, x = make_layer(backend=backend), make_input(5)
        layer.experts.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0, *inputs[1:]))
        layer(x).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


@contextmanager
def patched(owner, name, function):
    """Replace a function of a class or module for a while."""
    before = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before) if before is not None else delattr(owner, name)


def doubling(function, owner):
    """Return a function that doubles the output of ``function`` for modules of the class ``owner``, if it is one
    tensor.
    """

    def doubled(self, *args, **kwargs):
        result = function(self, *args, **kwargs)
        return 2 * result if isinstance(self, owner) else result

    return doubled


class Around(nn.Module):
    """A module around another one that exposes only the call, as PEFT's do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return 2 * self.inner(*args)


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


def class_forward(layer):
    return patched(Experts, "forward", doubling(Experts.forward, Experts))


def class_call(layer):
    return patched(Experts, "__call__", doubling(nn.Module.__call__, Experts))


def class_call_impl(layer):
    return patched(Experts, "_call_impl", doubling(nn.Module._call_impl, Experts))


def call_of_all_modules(layer):
    return patched(nn.Module, "__call__", doubling(nn.Module.__call__, Experts))


def call_impl_of_all_modules(layer):
    return patched(nn.Module, "_call_impl", doubling(nn.Module._call_impl, Experts))


def own_forward(layer):
    forward = layer.experts.forward
    layer.experts.forward = lambda *args: 2 * forward(*args)


def own_call_impl(layer):
    call = layer.experts._call_impl
    layer.experts._call_impl = lambda *args: 2 * call(*args)


def derived_class(layer):
    layer.experts.__class__ = type("Own", (Experts,), {"forward": doubling(Experts.forward, Experts)})


def module_around(layer):
    layer.experts = Around(layer.experts)


def compiled_in_place(layer):
    layer.experts.compile(backend=lambda graph, _: lambda *args: tuple(2 * one for one in graph(*args)))


def compiled_around(layer):
    own_forward(layer)
    layer.experts = torch.compile(layer.experts, backend="eager")


def parametrized(layer):
    with torch.no_grad():
        layer.experts.w_out *= 4
    parametrize.register_parametrization(layer.experts, "w_out", Half())


WAYS = (
    *(class_forward, class_call, class_call_impl, call_of_all_modules, call_impl_of_all_modules),
    *(own_forward, own_call_impl, derived_class, module_around, compiled_in_place, compiled_around, parametrized),
)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "no_grad"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_others_put_in_the_place_of_a_call_is_heard(way, recorded):
    layer, x = make_layer(), make_input(5)
    expected = 2 * layer(x).detach()
    with torch.set_grad_enabled(recorded):
        with way(layer) or nullcontext():
            torch.testing.assert_close(layer(x).detach(), expected)
        if vars(Experts)["forward"] is type(layer.experts).forward and "forward" not in vars(layer.experts):
            torch.testing.assert_close(make_layer()(x).detach(), expected / 2)  # and it is over


def test_a_patch_is_heard_by_torch_compile():
    layer, x = make_layer(dtype=torch.float32), make_input(5, dtype=torch.float32)
    with torch.no_grad():
        expected = 2 * layer(x)
        with class_forward(layer):
            torch._dynamo.reset()
            torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)
    torch._dynamo.reset()


@pytest.mark.thinned(usual=2)
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "no_grad"])
@pytest.mark.parametrize(
    "way", [class_forward, own_forward, derived_class, module_around, parametrized], ids=lambda way: way.__name__
)
def test_what_takes_the_place_of_a_call_after_a_compilation_is_heard(way, recorded):
    """torch.compile kept the layer's own computation after ``forward`` had been replaced. It guards neither hooks nor
    ``_call_impl`` of any module.
    """
    layer, x = make_layer(dtype=torch.float32), make_input(5, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.set_grad_enabled(recorded):
        expected = 2 * compiled(x).detach()
        with way(layer) or nullcontext():
            torch.testing.assert_close(compiled(x).detach(), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("part", PARTS)
def test_nothing_stands_before_a_fresh_layer(part):
    layer = MoE(8, 6, 4, 2)
    assert are_called_plainly((getattr(layer, part), PARTS[part]))


def offloaded(part):
    """Keep a part's parameters on the meta device, and load them for each call of its forward."""
    weights = {name: one.detach() for name, one in part.named_parameters(recurse=False)}
    for name in weights:
        setattr(part, name, nn.Parameter(weights[name].to("meta")))
    forward = part.forward

    def with_weights(*args):
        for name, one in weights.items():
            part._parameters[name] = nn.Parameter(one)
        try:
            return forward(*args)
        finally:
            for name, one in weights.items():
                part._parameters[name] = nn.Parameter(one.to("meta"))

    part.forward = with_weights


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "no_grad"])
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("names", [["router"], ["experts"], ["shared"], ["router", "experts", "shared"]], ids=str)
def test_parameters_are_read_when_their_module_has_been_called(names, backend, recorded):
    layer, x = make_layer(num_shared_experts=1, bias=True, backend=backend), make_input(5)
    with torch.set_grad_enabled(recorded):
        expected = layer(x).detach()
        for name in names:
            offloaded(getattr(layer, name))
        torch.testing.assert_close(layer(x).detach(), expected)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "no_grad"])
def test_a_wrapper_that_hides_the_parameters_is_called(recorded):
    layer, x = make_layer(num_shared_experts=1), make_input(5)
    with torch.set_grad_enabled(recorded):
        before = layer(x).detach()
        layer.shared = Around(layer.shared)
        layer.experts = Around(layer.experts)
        torch.testing.assert_close(layer(x).detach(), 2 * before)


def test_lora_of_peft_on_a_parameter_of_the_experts():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(12, 12), make_layer(dtype=torch.float32))
    config = peft.LoraConfig(r=2, target_modules=["0"], target_parameters=["1.experts.w_in"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, model)
    model(torch.randn(3, 12)).sum().backward()
    assert any("experts.lora_A" in name and one.grad is not None for name, one in model.named_parameters())


def test_offloading_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model, x = nn.Sequential(make_layer(num_shared_experts=1, dtype=torch.float32)).eval(), torch.randn(3, 12)
    with torch.no_grad():
        expected = model(x)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        torch.testing.assert_close(model(x), expected)
