"""Lists the private names of torch on which pymoe depends, with the reason why no public name will do.

No other module of pymoe imports a name of torch that begins with an underscore (``tests/test_torch_private.py``),
except that ``pymoe.reference`` and ``pymoe._common``, which may not import this module, take ``FakeTensor`` from torch.
All of these names exist in torch 2.11.0, 2.13.0 and 2.15.0. After an update of torch the test says which ones are
missing. The objects are torch's own, so calls through this module have no extra cost.

Most names are torch's, without the underscore. Attributes of torch's objects cannot be re-exported: other modules use
them directly, and ``ATTRIBUTES`` lists them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.modules.batchnorm as _batchnorm
import torch.nn.modules.module as _module
import torch.utils._python_dispatch as _dispatch
from torch import _guards, _ops
from torch._subclasses import fake_tensor as _fake_tensor
from torch.utils import _pytree

if TYPE_CHECKING:
    import torch.distributed.pipelining.stage as _stage
    import torch.fx.experimental._config as _fx_config

    PipelineStageBase = _stage._PipelineStageBase
    fx_config = _fx_config

# --- Classes and modules
# Nested tuples, lists and dicts, taken apart and put together. The public ``torch.utils.pytree`` has other functions,
# and torch.export uses the specs of the private module.
pytree = _pytree
# Tensors without data, which torch.compile and torch.export use; the mode that creates such tensors; and a function
# that finds the active mode or the mode of given tensors.
FakeTensor = _fake_tensor.FakeTensor
FakeTensorMode = _fake_tensor.FakeTensorMode
detect_fake_mode = _guards.detect_fake_mode
# The classes of operators that occur in graphs of ``torch.export``.
OpOverload = _ops.OpOverload
OpOverloadPacket = _ops.OpOverloadPacket
HigherOrderOperator = _ops.HigherOrderOperator
# The base classes of all batch norms, of all lazy norms, and of all norms with running statistics. No public class is
# the base of them all.
BatchNormBase = _batchnorm._BatchNorm
LazyNormBase = _batchnorm._LazyNormBase
NormBase = _batchnorm._NormBase

# The dictionaries of hooks that run in a call of a module or in its backward pass: the hooks of all modules, and the
# names of the dictionaries of one module. ``register_forward_hook`` and similar functions only return handles of single
# hooks. A kind that a later version of torch adds is included, too; tests/nn/test_plain_calls.py then fails.
global_call_hooks: list[Any] = [
    hooks
    for name, hooks in vars(_module).items()
    if name.startswith("_global_") and name.endswith("_hooks") and "_registration_" not in name
]
CALL_HOOKS: tuple[str, ...] = tuple(
    name for name in vars(torch.nn.Module()) if name.endswith("_hooks") and "_state_dict_" not in name
)

_C: Any = torch._C

# --- Graphs of autograd
# Runs a backward pass. ``autograd.grad`` would first check and convert its arguments, which takes several microseconds.
run_backward: Any = torch.autograd.Variable._execution_engine.run_backward
# Makes the running backward pass call a function at its end, unless the pass raises.
queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback
# The base class of the nodes that an ``autograd.Function`` in Python creates; ``autograd.graph.Node`` is that of all
# nodes.
FunctionBase = torch._C._FunctionBase
# Creates an autograd node whose backward raises an error with a given message. A ``torch.autograd.Function`` for this
# takes several times as long.
DelayedError: Any = _C._functions.DelayedError
# Returns the sequence number that this thread's next node will have. The engine runs ready nodes in descending order of
# their sequence numbers.
get_sequence_nr: Any = _C._autograd._get_sequence_nr
# Returns whether the backward pass that this thread is running was started with ``retain_graph``. A node's
# backward cannot see this otherwise.
get_current_graph_task_keep_graph: Any = _C._autograd._get_current_graph_task_keep_graph
# Returns the ID of the backward pass that this thread is running; -1 if it is running none.
current_graph_task_id: Any = _C._current_graph_task_id
# Sets the version counters of a tuple of tensors; ``autograd._unsafe_preserve_version_counter`` is private, too, and
# only a context manager.
unsafe_set_version_counter: Any = _C._autograd._unsafe_set_version_counter
# ``autograd.Function.apply`` calls the ``apply`` of this base class, which is the part that records the node.
# FunctionMeta is the metaclass of both classes.
SingleLevelFunction = torch.autograd.function._SingleLevelFunction
FunctionMeta = torch.autograd.function.FunctionMeta

# --- Settings of a thread
# Most public counterparts are context managers. Some of them cannot copy a setting to another thread; the others cost
# microseconds more in every call.
set_grad_enabled: Any = _C._set_grad_enabled
InferenceMode: Any = _C._InferenceMode
is_fwd_grad_enabled: Any = _C._is_fwd_grad_enabled
set_fwd_grad_enabled: Any = _C._set_fwd_grad_enabled
# Returns whether backward passes may use several threads.
is_multithreading_enabled: Any = _C._is_multithreading_enabled
set_multithreading_enabled: Any = _C._set_multithreading_enabled
is_view_replay_enabled: Any = _C._is_view_replay_enabled
set_view_replay_enabled: Any = _C._set_view_replay_enabled
# The public function ``torch.is_autocast_enabled`` tests a single type of device.
is_any_autocast_enabled: Any = _C._is_any_autocast_enabled
is_torch_function_enabled: Any = _C._is_torch_function_enabled
is_torch_function_all_disabled: Any = _C._is_torch_function_all_disabled
set_torch_function_state: Any = _C._set_torch_function_state
TorchFunctionState: Any = _C._TorchFunctionState
# A context manager that disables ``__torch_function__`` of tensor subclasses and of modes.
DisableTorchFunction: Any = _C.DisableTorchFunction
len_torch_function_stack: Any = _C._len_torch_function_stack
push_on_torch_function_stack: Any = _C._push_on_torch_function_stack
pop_torch_function_stack: Any = _C._pop_torch_function_stack
# Returns the active function modes, the outermost first.
get_current_function_mode_stack = torch.overrides._get_current_function_mode_stack
len_torch_dispatch_stack: Any = _C._len_torch_dispatch_stack
get_current_dispatch_mode_stack: Any = _dispatch._get_current_dispatch_mode_stack
push_mode: Any = _dispatch._push_mode
pop_mode: Any = _dispatch._pop_mode
# The base class of modes that are called for every operator. torch offers it only in a private module.
TorchDispatchMode = _dispatch.TorchDispatchMode
# A context manager inside which no dispatch mode is active.
disable_current_modes: Any = _dispatch._disable_current_modes
# A thread-local object that contains the mode that ``torch.set_default_device`` has set.
GLOBAL_DEVICE_CONTEXT: Any = torch._GLOBAL_DEVICE_CONTEXT
top_saved_tensors_default_hooks: Any = _C._autograd._top_saved_tensors_default_hooks
push_saved_tensors_default_hooks: Any = _C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_default_hooks: Any = _C._autograd._pop_saved_tensors_default_hooks
saved_tensors_hooks_disable: Any = _C._autograd._saved_tensors_hooks_disable
saved_tensors_hooks_enable: Any = _C._autograd._saved_tensors_hooks_enable
saved_tensors_hooks_get_disabled_error_message: Any = _C._autograd._saved_tensors_hooks_get_disabled_error_message
# ``torch.autograd.profiler`` only shows whether it has started a profiler itself.
profiler_enabled: Any = _C._autograd._profiler_enabled

# --- Transforms of ``torch.func``. No public function tells whether one is active.
are_functorch_transforms_active: Any = _C._are_functorch_transforms_active
# Returns a tensor without its wrapper, if the transform that has wrapped it has ended.
unwrap_if_dead: Any = _C._functorch.unwrap_if_dead
# A context manager inside which no transform is active.
temporarily_clear_interpreter_stack = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack

# --- The dispatcher. ``torch.library`` registers kernels and cannot list them.
parse_dispatch_key: Any = _C._parse_dispatch_key
# These two functions set a dispatch key for the current thread only.
dispatch_tls_set_dispatch_key_included: Any = _C._dispatch_tls_set_dispatch_key_included
dispatch_tls_set_dispatch_key_excluded: Any = _C._dispatch_tls_set_dispatch_key_excluded
dispatch_has_backend_fallback: Any = _C._dispatch_has_backend_fallback
dispatch_has_kernel_for_dispatch_key: Any = _C._dispatch_has_kernel_for_dispatch_key
dispatch_get_all_op_names: Any = _C._dispatch_get_all_op_names
# The dispatch keys that come after ADInplaceOrView, and so after those of autograd.
after_ADInplaceOrView_keyset: Any = _C._after_ADInplaceOrView_keyset
# Adds many pairs of tensors in one call; ``torch.optim`` uses it, too.
foreach_add_: Any = torch._foreach_add_
# The operator that torch.export puts into graphs that are valid only for the dtypes of their example inputs.
assert_tensor_metadata: Any = torch.ops.aten._assert_tensor_metadata.default
# The operator that turns a tensor into a Python number: ``item()``, indices, fill values.
local_scalar_dense: Any = torch.ops.aten._local_scalar_dense.default

# Attributes that other modules of pymoe use directly, by the class or module that has them.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "torch.Tensor": {
        "_version": "how often its memory was written to; errors of autograd alone speak of it",
        "_base": "the tensor of which it is a view",
        "_is_view": "whether autograd knows it as a view",
        "_backward_hooks": "its hooks, of which ``register_hook`` gives handles alone",
        "_indices": "of a sparse tensor, also where it is not coalesced",
        "_values": "the same",
    },
    "torch.UntypedStorage": {"_cdata": "a number that is its own; memory of no bytes has no address of its own"},
    "torch.autograd.graph.Node": {
        "_sequence_nr": "the number by which the engine orders nodes",
        "_set_sequence_nr": "changes it",
        "_input_metadata": "shapes, dtypes and devices of the gradients that it takes",
    },
    "torch.nn.Module": {
        "_parameters": "without those of submodules, and without a look at ``__getattr__``",
        "_buffers": "the same",
        "_modules": "the same",
        "_non_persistent_buffers_set": "names of buffers that ``state_dict`` leaves out",
        "_forward_hooks": "hooks, of which ``register_forward_hook`` gives handles alone",
        "_forward_pre_hooks": "the same",
        "_backward_hooks": "the same",
        "_backward_pre_hooks": "the same",
        "_call_impl": "a call with its hooks, past a compiled one",
        "_compiled_call_impl": "the compiled one, of ``module.compile()``",
        "_apply": "overridden: moves parameters, for ``to`` and all that is like it",
        "_save_to_state_dict": "overridden: what one module saves",
        "_load_from_state_dict": "overridden: what one module loads",
    },
    "torch.nn.Module.state_dict": {
        "_metadata": "versions of the modules, by which they read a state of an older release",
    },
    "torch._ops.OpOverload": {
        "_schema": "names and kinds of its arguments",
    },
    "torch.compiler": {"_is_exporting_flag": "torch.compile takes is_exporting() for true in torch 2.11"},
    "torch.autograd.forward_ad": {"_current_level": "how deep this process is in ``dual_level`` blocks; -1: in none"},
    "torch.distributed.ProcessGroup": {
        "_device_types": "the devices that it can send from",
        "_get_backend": "what sends from one of them",
    },
    "torch.nn.parallel.DistributedDataParallel": {
        "_set_params_and_buffers_to_ignore_for_model": "leaves parameters to others; DTensors it does not take",
    },
    "torch.distributed.distributed_c10d": {"_get_default_group": "``group.WORLD``, with an error where there is none"},
}

# Modules of torch that are slow to import; they are imported when the name is first used.
_LAZY = {
    # The base class that torch's pipeline schedules require of a stage. The public class that derives from it,
    # PipelineStage, itself calls the stage's submodule and communicates with the other stages.
    "PipelineStageBase": ("torch.distributed.pipelining.stage", "_PipelineStageBase"),
    # Settings for symbolic shapes, which torch.export reads and does not offer as options.
    "fx_config": ("torch.fx.experimental._config", ""),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    found: Any = importlib.import_module(module)
    found = globals()[name] = getattr(found, attribute) if attribute else found
    return found
