"""The names of the dictionaries in which ``nn.Module`` keeps its hooks."""

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

CALL_HOOKS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
"""Those that a call of the module, or its backward, runs."""

ALL_HOOKS = (
    *CALL_HOOKS,
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
