// Compiles the file named by PYMOE_ISA_BODY once per instruction set, each time into a separate namespace:
//
//     #define PYMOE_ISA_BODY "kernels/combine_cpu_body.h"
//     #include "kernels/cpu/for_each_isa.h"
//     ... PYMOE_SELECT_ISA(combine_range)(arguments) ...
//
// The body opens `namespace pymoe::cpu::PYMOE_ISA { ... }`, has no include guard, and may use simd.h, which is
// compiled along with it. PYMOE_ISA_LEVEL is 1 (baseline), 3 (v3) or 4 (v4 and v4_bf16).
//
// The including file may define these macros before it includes this one:
//
//   PYMOE_ISA_WIDEST 3   if v4 makes the body no faster; give the measurement (benchmarks/instruction_sets.py). Select
//                        the body's functions with PYMOE_SELECT_ISA_UP_TO_V3.
//   PYMOE_ISA_BF16       if the body multiplies bf16 or int8: it is also compiled at level 4 with PYMOE_ISA_HAS_BF16
//                        set to 1, where AVX512_BF16 and AVX512_VNNI are allowed. Select with
//                        PYMOE_SELECT_ISA_UP_TO_BF16.
//   PYMOE_ISA_DOTPROD    if the body multiplies int8 on aarch64: it is also compiled with PYMOE_ISA_HAS_DOTPROD set to
//                        1, where FEAT_DotProd is allowed, and with PYMOE_ISA_HAS_I8MM set to 1, where FEAT_I8MM is
//                        allowed. Select with PYMOE_SELECT_ISA_OF_BYTES. (All bodies on aarch64 have level 1.)
//
// System headers must be included before this file: if one of their inline functions were first compiled here, it would
// use the wider instruction set, and the linker might keep that copy for the whole library.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/dtype.h"
#include "core/macros.h"
#include "core/score.h"
#include "kernels/cpu/isa.h"
#if PYMOE_MULTIVERSION
#include <immintrin.h>
#elif PYMOE_NEON
#include <arm_neon.h>
#endif

#define PYMOE_ISA baseline
#define PYMOE_ISA_LEVEL 1
#define PYMOE_ISA_HAS_BF16 0
#define PYMOE_ISA_HAS_DOTPROD 0
#define PYMOE_ISA_HAS_I8MM 0
#include "kernels/cpu/simd.h"
#include PYMOE_ISA_BODY
#undef PYMOE_ISA
#undef PYMOE_ISA_LEVEL

#if PYMOE_MULTIVERSION

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt")
#endif
#define PYMOE_ISA v3
#define PYMOE_ISA_LEVEL 3
#include "kernels/cpu/simd.h"
#include PYMOE_ISA_BODY
#undef PYMOE_ISA
#undef PYMOE_ISA_LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if !defined(PYMOE_ISA_WIDEST) || PYMOE_ISA_WIDEST >= 4

#if defined(__clang__)
#pragma clang attribute push(                                                                                   \
    __attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // two false warnings from gcc 12's AVX-512 headers
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target( \
    "avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define PYMOE_ISA v4
#define PYMOE_ISA_LEVEL 4
#include "kernels/cpu/simd.h"
#include PYMOE_ISA_BODY
#undef PYMOE_ISA
#undef PYMOE_ISA_LEVEL

#if defined(PYMOE_ISA_BF16)
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(                                                                                       \
    __attribute__((target(                                                                                          \
        "avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16,avx512vnni"))), \
    apply_to = function)
#else
#pragma GCC target("avx512bf16,avx512vnni")  // in addition to v4's instructions
#endif
#define PYMOE_ISA v4_bf16
#undef PYMOE_ISA_HAS_BF16
#define PYMOE_ISA_LEVEL 4
#define PYMOE_ISA_HAS_BF16 1
#include "kernels/cpu/simd.h"
#include PYMOE_ISA_BODY
#undef PYMOE_ISA
#undef PYMOE_ISA_LEVEL
#endif  // PYMOE_ISA_BF16

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#pragma GCC diagnostic pop
#endif

#endif  // PYMOE_ISA_WIDEST

#endif  // PYMOE_MULTIVERSION

#if PYMOE_NEON && defined(PYMOE_ISA_DOTPROD)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
// If the command line already allows FEAT_DotProd, keep the command line's target: that target may allow more, and
// inline functions that were compiled for it could not be inlined into functions for a smaller target.
#if !defined(__ARM_FEATURE_DOTPROD)
#pragma GCC target("arch=armv8.2-a+dotprod")  // the target that arm_neon.h requires for vdotq_s32
#endif
#endif
#define PYMOE_ISA dotprod
#undef PYMOE_ISA_HAS_DOTPROD
#define PYMOE_ISA_LEVEL 1
#define PYMOE_ISA_HAS_DOTPROD 1
#include "kernels/cpu/simd.h"
#include PYMOE_ISA_BODY
#undef PYMOE_ISA
#undef PYMOE_ISA_LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("i8mm"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
#pragma GCC target("+i8mm")  // in addition to the command line's instructions
#elif !defined(__ARM_FEATURE_MATMUL_INT8)
#pragma GCC target("arch=armv8.2-a+i8mm")  // the target that arm_neon.h requires for vmmlaq_s32
#endif
#endif
#define PYMOE_ISA i8mm
#undef PYMOE_ISA_HAS_DOTPROD
#define PYMOE_ISA_HAS_DOTPROD 0
#undef PYMOE_ISA_HAS_I8MM
#define PYMOE_ISA_LEVEL 1
#define PYMOE_ISA_HAS_I8MM 1
#include "kernels/cpu/simd.h"
#include PYMOE_ISA_BODY
#undef PYMOE_ISA
#undef PYMOE_ISA_LEVEL
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // PYMOE_NEON

#undef PYMOE_ISA_HAS_BF16
#undef PYMOE_ISA_HAS_DOTPROD
#undef PYMOE_ISA_HAS_I8MM
#undef PYMOE_ISA_BODY
#undef PYMOE_ISA_WIDEST
#undef PYMOE_ISA_BF16
#undef PYMOE_ISA_DOTPROD
