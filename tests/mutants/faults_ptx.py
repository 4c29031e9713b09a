"""Faults in the kernels' sources that show only in their PTX: in tensors of more than 2^31 elements, in rare bits of
exp, or in no value at all. tests/cuda_ptx/check_kernels.py compiles each of them and must notice it.
"""

from __future__ import annotations

from planting import PtxFault as Fault

GATE, GROUPED_LINEAR, OUTSIDE = "gate_topk_cuda", "grouped_linear_cuda", "is in no tensor|NOT correct|is not a multiple"

FAULTS = [
    Fault(
        "grouped_linear: the place of a row of y in 32 bits",
        "csrc/kernels/cuda/tensor_tile.h",
        "T* const run = to + place * pitch + column;",
        "T* const run = to + static_cast<int32_t>(place * pitch + column);",
        GROUPED_LINEAR,
        "far: grouped_linear",
        OUTSIDE,
    ),
    Fault(
        "grouped_linear: the place in a weight's gradient in 32 bits",
        "csrc/kernels/grouped_linear_cuda.cu",
        "place = (expert * output_features + row) * input_features + column;",
        "place = static_cast<int32_t>((expert * output_features + row) * input_features + column);",
        GROUPED_LINEAR,
        "far: grouped_linear_weight_grad",
        OUTSIDE,
    ),
    Fault(
        "expert_activation_backward: the place of a row in 32 bits",
        "csrc/kernels/expert_activation_cuda.cu",
        "const int64_t base = place.row * strips.features * (kGated ? 2 : 1) + place.column * strips.step;",
        "const auto base = static_cast<int32_t>(place.row * strips.features * (kGated ? 2 : 1) + place.column);",
        "expert_activation_cuda",
        "far: expert_activation*",
        OUTSIDE,
    ),
    Fault(
        "gate_topk: the place of a token's logits in 32 bits",
        "csrc/kernels/gate_topk_cuda.cu",
        "const int64_t start = token * a.num_experts;",
        "const auto start = static_cast<int32_t>(token * a.num_experts);",
        GATE,
        "far: gate_topk*",
        OUTSIDE,
    ),
    Fault(
        "gate_topk loads weights that it has written through the read-only cache",
        "csrc/kernels/gate_topk_cuda.cu",
        "weight_of(weights()[choice], divisor)",
        "weight_of(__ldg(weights() + choice), divisor)",
        GATE,
        "gate_topk: the emulated kernel equals*",
        "through the read-only cache",
    ),
    Fault(
        "gate_topk: a product of exp is fused on the GPU",
        "csrc/core/score.h",
        "const S r = add_exact_product(-n, Steps::kLn2High, clamped) - n * Steps::kLn2Low;",
        "const S r = fma(-n, Steps::kLn2Low, add_exact_product(-n, Steps::kLn2High, clamped));",
        GATE,
        "gate_topk: bits that few logits show",
        "same_values.*NOT correct",
    ),
]
