"""Faults of experts spread over ranks that the tests must notice."""

from planting import PythonFault as Fault

EQUALITY = "tests/ep/test_equality.py"
GRADIENTS = "tests/ep/test_gradients.py"
MISTAKES = "tests/ep/test_mistakes.py"

FAULTS = [
    Fault(
        "received rows stay in the order of ranks",
        "pymoe/ep/experts.py",
        "moves = number > 1 and self.arrangement.ranks > 1",
        "moves = False",
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
]
