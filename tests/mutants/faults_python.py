"""Faults that the test suite must notice: a text of the sources, and what replaces it."""

from faults_quantized import FAULTS as OF_QUANTIZED_WEIGHTS
from faults_ranks import FAULTS as RANKS
from faults_remote import FAULTS as REMOTE
from faults_transformers import FAULTS as TRANSFORMERS
from planting import PythonFault as Fault

BODY = "csrc/kernels/combine_cpu_body.h"
ROUTING = "csrc/kernels/build_routing_cpu.cpp"
EQUAL = "tests/ops/test_native_equals_reference.py"
RANDOM = "tests/ops/test_properties.py"
PLAN_RUN = "pymoe/pipe/execution/plan.py"
RUNS = "tests/pipe/test_pipeline_run.py"
ORDER = "tests/ops/test_grouped_linear_order.py"

FAULTS = [
    *TRANSFORMERS,
    *RANKS,
    *REMOTE,
    Fault(
        "build_routing keeps one row too many",
        ROUTING,
        "if (row < limits[expert]) {",
        "if (row <= limits[expert] && row < a.tokens * a.choices) {",
        (EQUAL, RANDOM, "-k", "build_routing"),
    ),
    Fault(
        "build_routing visits a block backwards",
        ROUTING,
        "const auto expert = experts[i];",
        "const auto expert = experts[begin + end - 1 - i];",
        (EQUAL, RANDOM, "-k", "build_routing"),
    ),
    Fault(
        "build_routing forgets the earlier blocks",
        ROUTING,
        "used + std::min(seen, a.capacity)",
        "used",
        (EQUAL, RANDOM, "-k", "build_routing"),
    ),
    Fault(
        "build_routing trusts large experts",
        ROUTING,
        "if (expert >= static_cast<uint64_t>(a.num_experts))",
        "if (expert > static_cast<uint64_t>(a.num_experts))",
        ("tests/ops/test_memory_safety.py", "-k", "expert_outside"),
    ),
    Fault(
        "build_routing takes any large expert as foreign",
        ROUTING,
        "if (a.foreign && experts[i] >= 0) continue;",
        "if (experts[i] >= 0) continue;",
        ("tests/ops/test_memory_safety.py", "-k", "expert_outside"),
    ),
    Fault(
        "the second half of a pair is the next row in memory, whatever the order",
        "csrc/kernels/cpu/gemm_pack.h",
        "(place_of(steps, std::min(p * kDepth + 1, k - 1)) - place) * k_stride;",
        "k_stride;",
        (ORDER,),
    ),
    Fault(
        "rows of an order are taken for neighbours if the last one is",
        "csrc/kernels/cpu/gemm_nt.h",
        "in_order &= place_of(",
        "in_order = place_of(",
        (ORDER,),
    ),
    Fault(
        "sums of the next block of rows go to the places of the first",
        "csrc/kernels/cpu/gemm_body.h",
        "return kInPlace ? order_from(g.rows, row) : nullptr;",
        "return kInPlace ? g.rows : nullptr;",
        (ORDER,),
    ),
    Fault(
        "a row named twice is found only where it is the last",
        "csrc/kernels/cpu/checked_order.h",
        "named[static_cast<size_t>(row)] = 1;",
        "named[static_cast<size_t>(row)] = at + 2 >= used;",
        ("tests/ops/test_errors.py", "-k", "order"),
    ),
    Fault(
        "a clamped up has a gradient",
        "csrc/core/activation_steps.h",
        "grad_up = up < -clamp.limit ? V{} : (up > clamp.limit ? V{} : of_up);",
        "grad_up = of_up;",
        (EQUAL, "-k", "expert_activation"),
    ),
    Fault(
        "an operand that is not first loses its gradient",
        "pymoe/ops/function_calls.py",
        "if isinstance(value, Tensor) and value.requires_grad:\n            return True",
        "return isinstance(value, Tensor) and value.requires_grad",
        ("tests/nn/test_apply_experts.py", "-k", "gets_its_gradient"),
    ),
    Fault(
        "the quick check of combine takes weights of float64",
        "pymoe/_common/contracts.py",
        "and (weights.dtype != torch.float64 or y.dtype == torch.float64)",
        "",
        ("tests/ops/test_quick_checks.py", "-k", "named_checks_do and combine"),
    ),
    Fault(
        "the direct way of a layer does not ask for autocast",
        "pymoe/nn/direct.py",
        "and not autocast_enabled(device.type)",
        "",
        ("tests/nn/test_moe_direct.py", "-k", "autocast"),
    ),
    Fault(
        "the direct way of a layer passes the hooks of its losses",
        "pymoe/nn/direct.py",
        "is_called_plainly(losses, AuxiliaryLosses)",
        "True",
        ("tests/nn/test_moe_direct.py", "-k", "fires_in_every_call"),
    ),
    Fault(
        "the direct way of a layer takes a router's weight of other sizes",
        "pymoe/nn/direct.py",
        "and weight.shape == (experts, layer.hidden_size)",
        "",
        ("tests/nn/test_moe_parameters.py", "-k", "another_size and router"),
    ),
    Fault(
        "a layer holds all the logits of a step until its next forward",
        "pymoe/nn/moe.py",
        "> MOST_HELD_LOGITS:",
        "> MOST_HELD_LOGITS and not logits_TE.requires_grad:",
        ("tests/nn/test_moe_statistics.py", "-k", "outlive_a_step"),
    ),
    Fault(
        "one native call for all is made past the hooks of the experts",
        "pymoe/nn/plain_calls.py",
        "        if hooks and (harmless is None or",
        "        if False and (harmless is None or",
        ("tests/nn/test_plain_calls.py", "-k", "every_kind_are_heard"),
    ),
    Fault(
        "the reference's gradient of a row has a part of dropped choices",
        "pymoe/reference/combine.py",
        "term = torch.where(kept[:, None], y[row.clamp(min=0).long()].to(dtype), 0)",
        "term = y[row.clamp(min=0).long()].to(dtype)",
        ("tests/ops/test_routing_semantics.py", "-k", "no_part_in_gradients"),
    ),
    Fault(
        "build_routing cuts wide experts to 32 bits",
        ROUTING,
        "static_cast<uint64_t>(static_cast<int64_t>(experts[i]));",
        "static_cast<uint64_t>(static_cast<uint32_t>(experts[i]));",
        ("tests/ops/test_memory_safety.py", "-k", "wide_expert"),
    ),
    Fault(
        "dispatch leaves the rows past the end as they are",
        "csrc/kernels/dispatch_cpu.cpp",
        "std::clamp<int64_t>(*a.used, 0, a.rows)",
        "std::clamp<int64_t>(*a.used + 1, 0, a.rows)",
        (EQUAL, RANDOM, "-k", "dispatch"),
    ),
    Fault(
        "dispatch drops the last token",
        "csrc/kernels/dispatch_cpu.cpp",
        "parallel_for(0, a.tokens, grain",
        "parallel_for(0, a.tokens - 1, grain",
        (EQUAL, RANDOM, "-k", "dispatch"),
    ),
    Fault(
        "dispatch takes slot S",
        "csrc/kernels/dispatch_cpu.cpp",
        "a.slot, token * a.choices + choice, a.choices, a.rows)",
        "a.slot, token * a.choices + choice, a.choices, a.rows + 1)",
        ("tests/ops/test_memory_safety.py", "-k", "slot_outside or hostile"),
    ),
    Fault(
        "combine sums in the other order",
        BODY,
        "for (int64_t k = 0; k < now.count; ++k) {\n      const T* row = now.rows[k] + column;",
        "for (int64_t k = now.count - 1; k >= 0; --k) {\n      const T* row = now.rows[k] + column;",
        (EQUAL, RANDOM, "-k", "combine"),
    ),
    Fault(
        "combine starts at -0",
        BODY,
        "vector_t<T> total = {};",
        "vector_t<T> total = broadcast(accumulate_t<T>(-0.0));",
        (EQUAL, RANDOM, "-k", "combine"),
    ),
    Fault(
        "combine weighs a dropped choice's neighbour",
        BODY,
        "static_cast<const accumulate_t<T>*>(a.weights)[choice];",
        "static_cast<const accumulate_t<T>*>(a.weights)[token * a.choices];",
        (EQUAL, RANDOM, "-k", "combine"),
    ),
    Fault(
        "combine_backward forgets the last columns",
        BODY,
        "for (int v = 0; column < hidden; ++v",
        "for (int v = 0; column + 1 < hidden; ++v",
        (EQUAL, "tests/ops/test_gradients.py", "-k", "combine"),
    ),
    Fault(
        "combine_backward leaves the rows past the end as they are",
        "csrc/kernels/combine_cpu.cpp",
        "parallel_for(used, a.rows, grain",
        "parallel_for(used + 1, a.rows, grain",
        (EQUAL, "tests/ops/test_gradients.py", "-k", "combine"),
    ),
    Fault(
        "gather_batch starts in the wrong block",
        "csrc/kernels/gather_batch_cpu.cpp",
        "std::upper_bound(a.starts, a.starts + a.count + 1, begin)",
        "std::lower_bound(a.starts + 1, a.starts + a.count + 1, begin)",
        (EQUAL, RANDOM, "tests/ops/test_determinism.py", "-k", "gather"),
    ),
    Fault(
        "dispatch's loop never leaves its thread",
        "csrc/kernels/dispatch_cpu.cpp",
        "parallel_for(0, a.tokens, grain",
        "parallel_for(0, a.tokens, a.tokens",
        ("tests/ops/test_parallel.py",),
    ),
    Fault(
        "dispatch saves no routing",
        "pymoe/ops/row_moves.py",
        "sum_choices(grad, Routing(*ctx.saved_tensors))",
        "sum_choices(grad, Routing(*ctx.saved_tensors)).detach()",
        ("tests/ops/test_gradients.py", "-k", "dispatch"),
    ),
    Fault(
        "a worker goes on without what its next action needs",
        PLAN_RUN,
        "_pass(gates[action])",
        "pass",
        (RUNS,),
    ),
    Fault(
        "an interrupt that no system call sees does not end a wait",
        PLAN_RUN,
        "gate.get(timeout=WAIT_SLICE_S)",
        "gate.get()",
        (RUNS, "-k", "no_system_call"),
    ),
    Fault(
        "a worker is not told that its next action can start",
        PLAN_RUN,
        "gates[waiting].put(None)",
        "pass",
        (RUNS, "-k", "an_end_wakes"),
    ),
    Fault(
        "actions that were performed inline are performed again",
        PLAN_RUN,
        "if action not in self._done:",
        "if True:",
        (RUNS,),
    ),
    Fault(
        "a stop is not told to who waits",
        PLAN_RUN,
        "[self._stopped, *self._gates.values()]",
        "[self._stopped]",
        (RUNS, "-k", "a_failure_stops"),
    ),
    Fault(
        "a run that was stopped starts actions",
        PLAN_RUN,
        "            if not stopped.empty():\n                return\n",
        "",
        (RUNS,),
    ),
    *OF_QUANTIZED_WEIGHTS,
]
