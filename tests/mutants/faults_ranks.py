"""Faults of experts spread over ranks that the tests must notice."""

from planting import PythonFault as Fault

EQUALITY = "tests/ep/test_equality.py"
GRADIENTS = "tests/ep/test_gradients.py"
MISTAKES = "tests/ep/test_mistakes.py"
CLONED = "tests/ep/test_cloned_calls.py"
MOVED = "tests/ep/test_redistribute.py"

FAULTS = [
    Fault(
        "received rows are taken for sorted",
        "pymoe/ep/experts.py",
        "order = None if moves or sorted_rows else routing.token",
        "order = None",
        (EQUALITY,),
    ),
    Fault(
        "gradients of chunks travel in the order of the forward pass",
        "pymoe/ep/exchange.py",
        "last_first=not self.last_first",
        "last_first=False",
        ("tests/ep/test_calls.py", "-k", "chunks_travel"),
    ),
    Fault(
        "a group's capacity serves the last ranks first",
        "pymoe/ep/plan.py",
        "for load in loads:",
        "for load in loads[::-1]:",
        (EQUALITY, "-k", "capacity"),
    ),
    Fault(
        "ranks with few tokens weigh as much in a group's losses",
        "pymoe/ep/layer.py",
        "if everyone else 1.0",
        "if not everyone else 1.0",
        (EQUALITY, "-k", "losses"),
    ),
    Fault(
        "logits depend on how many rows a rank has",
        "pymoe/ep/shard.py",
        "layer.router.row_invariant = True",
        "pass",
        (EQUALITY,),
    ),
    Fault(
        "a rank may receive one row more than its room",
        "pymoe/ep/plan.py",
        "if count > room",
        "if count > room + 1",
        ("tests/ep/test_failures.py", "-k", "would_not_fit"),
    ),
    Fault(
        "gradients of experts are sums over their group",
        "pymoe/ep/experts.py",
        "lambda gradient: gradient / divisor",
        "lambda gradient: gradient",
        (GRADIENTS, "-k", "mean_loss"),
    ),
    Fault(
        "no_sync() does not keep experts from being summed",
        "pymoe/ep/gradients.py",
        "self._synchronises = wrapped.require_backward_grad_sync",
        "self._synchronises = True",
        (GRADIENTS, "-k", "sum_their"),
    ),
    Fault(
        "a norm counts parameters cut by FSDP once a rank",
        "pymoe/ep/gradients.py",
        "if not placement.is_replicate():",
        "if placement.is_shard():",
        (GRADIENTS, "-k", "with_clipping"),
    ),
    Fault(
        "layers of other sizes send messages of other lengths",
        "pymoe/ep/agreement.py",
        "most = max(arrangement.num_experts, most_experts(arrangement.group))",
        "most = arrangement.num_experts",
        (MISTAKES, "-k", "many"),
    ),
    Fault(
        "a checksum of routers does not depend on the order of rows",
        "pymoe/ep/shard.py",
        "zlib.crc32((ctypes.c_char * length).from_address(bits.data_ptr()))",
        "sum(bytes((ctypes.c_char * length).from_address(bits.data_ptr())))",
        (MISTAKES, "-k", "another_model"),
    ),
    Fault(
        "a rank without experts does not check its parameters",
        "pymoe/ep/parameters.py",
        "if parameter is not None:",
        "if parameter is not None and not (arrangement and not arrangement.own):",
        (MISTAKES, "-k", "also_without_experts"),
    ),
    Fault(
        "an expert is cloned for fewer rows than it is worth",
        "pymoe/ep/cloned_plan.py",
        "worth=arrangement.worth",
        "worth=1",
        (CLONED, "-k", "worth_its_way"),
    ),
    Fault(
        "rows for clones stay with those for the owner",
        "pymoe/ep/cloned_plan.py",
        "new_place[came_from] = places.int()",
        "new_place[came_from] = came_from.int()",
        (EQUALITY, "-k", "clones"),
    ),
    Fault(
        "a plan says of rows for clones that they are other tokens'",
        "pymoe/ep/cloned_plan.py",
        "token[:start] = routing.token[came_from]",
        "pass",
        ("tests/ep/test_cloned_plan.py",),
    ),
    Fault(
        "of an expert's clones the last one's gradient is kept",
        "pymoe/ep/lending.py",
        "total.index_add_(0, index, rows)",
        "total.index_copy_(0, index, rows)",
        (CLONED, "-k", "order_of_ranks"),
    ),
    Fault(
        "room does not count the rows for clones",
        "pymoe/ep/plan.py",
        "rows = self.rows_of_ranks()",
        "rows = Plan.rows_of_ranks(self)",
        (CLONED, "-k", "room"),
    ),
    Fault(
        "what an optimizer keeps stays where it was",
        "pymoe/ep/redistribute.py",
        "state = stacked_state(optimizer, parameter, arrangement)",
        "state = stacked_state(optimizer, parameter, arrangement) and {}",
        (MOVED, "-k", "goes_on"),
    ),
    Fault(
        "experts change before all have arrived",
        "pymoe/ep/redistribute.py",
        "[one.move(one.local) for one in moves]",
        "[one.local.copy_(one.move(one.local)) for one in moves]",
        (MOVED, "-k", "moved_nothing"),
    ),
    Fault(
        "an optimizer that was left out goes on",
        "pymoe/ep/optimizers.py",
        "known != experts.moves and any",
        "known > experts.moves and any",
        (MOVED, "-k", "left_out"),
    ),
    Fault(
        "files have experts in the order of their ranks",
        "pymoe/ep/experts.py",
        "as_in_one_process(spread, self.arrangement)",
        "spread",
        ("tests/ep/test_checkpoints.py",),
    ),
    Fault(
        "files of optimizers have experts in the order of their ranks",
        "pymoe/ep/optimizers.py",
        "optimizer.register_state_dict_post_hook(_in_order_of_files)",
        "pass",
        (MOVED, "-k", "files"),
    ),
    Fault(
        "experts that FSDP has cut are initialised as if it had not",
        "pymoe/ep/experts.py",
        "positions = layout_of(parameter, self.arrangement).own",
        "positions = self.arrangement.spans[self.arrangement.rank][: len(local_part(parameter))]",
        (MOVED, "-k", "initialised"),
    ),
    Fault(
        "a layer is built whole before it is spread",
        "pymoe/nn/moe.py",
        'place["device"] = "meta"',
        "pass",
        ("tests/ep/test_built_spread.py",),
    ),
]
