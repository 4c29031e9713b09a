"""Faults between a CUDA tensor and the launch of a kernel: tests/cuda_ptx/check_streams.py must notice them."""

from __future__ import annotations

from planting import StreamFault as Fault

TWINS, LAUNCH = "csrc/ops/twins.h", "csrc/kernels/cuda/launch.h"

FAULTS = [
    Fault(
        "the tensors' device is not made current",
        TWINS,
        "  const torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());\n",
        "",
        "with_torch",
        "current_stream",
    ),
    Fault(
        "the default stream in place of the current one",
        TWINS,
        "twins.cuda(arguments, current_stream(tensor));",
        "twins.cuda(arguments, nullptr);",
        "with_torch",
        "current_stream",
    ),
    Fault(
        "the current stream of the current device in place of the tensors'",
        TWINS,
        "aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream)",
        "aoti_torch_get_current_cuda_stream(0, &stream)",
        "with_torch",
        "current_stream",
    ),
    Fault(
        "a stream is kept from one call to the next",
        TWINS,
        "  twins.cuda(arguments, current_stream(tensor));",
        "  static void* const kept = current_stream(tensor);\n  twins.cuda(arguments, kept);",
        "with_torch",
        "current_then",
    ),
    Fault(
        "kernels are launched on the default stream",
        LAUNCH,
        "static_cast<size_t>(shape.shared_bytes), static_cast<cudaStream_t>(stream)>>>(",
        "static_cast<size_t>(shape.shared_bytes), cudaStream_t{}>>>(",
        "dispatch_cuda",
        "current_stream",
    ),
    Fault(
        "memory is cleared on the default stream",
        LAUNCH,
        "static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)));",
        "static_cast<size_t>(bytes), cudaStream_t{}));",
        "gate_topk_cuda",
        "current_then",
    ),
    Fault(
        "nobody asks whether a launch was refused",
        LAUNCH,
        "  check(operator_name, cudaGetLastError());\n",
        "",
        "gate_topk_cuda",
        "error_of_a_launch",
    ),
]
