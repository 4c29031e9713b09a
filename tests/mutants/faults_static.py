"""Faults that tests of values cannot detect, since results keep their bits, and one that drops a flag."""

from __future__ import annotations

from planting import StaticFault as Fault

COMBINE, PACK = "csrc/kernels/combine_cuda.cu", "csrc/kernels/cuda/pack.h"

FAULTS = [
    Fault(
        "the compiler may fuse multiplications and additions",
        "csrc/nvcc_flags.py",
        '    "--fmad=false",  # host and device share the arithmetic that decides results\n',
        "",
        "combine_cuda.cu",
        "8.0;9.0",
        "fused multiply-adds",
    ),
    Fault(
        "a store of 16 bytes is four of 4",
        PACK,
        "v4.u32 [%0], {%1, %2, %3, %4}",
        "u32 [%0], %1; st.global.u32 [%0+4], %2; st.global.u32 [%0+8], %3; st.global.u32 [%0+12], %4",
        "combine_cuda.cu",
        "9.0;12.0",
        "stores 4 bytes in",
    ),
    Fault(
        "combine: a row is loaded when the one before it is there",
        COMBINE,
        "load_pack_streaming_if<P>(now.row[k] >= 0, y +",
        "load_pack_streaming_if<P>("
        "now.row[k] >= 0 && (k == 0 || to_accumulate(values[k > 0 ? k - 1 : 0][0]) != 1), y +",
        "combine_cuda.cu",
        "8.0;9.0",
        "combine: 16-byte loads together is",
    ),
    Fault(
        "combine: more blocks on a multiprocessor than there are registers for",
        COMBINE,
        ": 3) -\n",
        ": 6) -\n",
        "combine_cuda.cu",
        "9.0;12.0",
        "on sm_120 spills",
    ),
    Fault(
        "dispatch launches its kernel twice",
        "csrc/kernels/dispatch_cuda.cu",
        '  launch("dispatch", dispatch_kernel<Word, kStreaming>,',
        '  for (int i = 0; i < 2; ++i) launch("dispatch", dispatch_kernel<Word, kStreaming>,',
        "dispatch_cuda.cu",
        "9.0",
        "dispatch: launches is 2",
    ),
]
