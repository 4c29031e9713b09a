// The instruction set of the CPU kernels, chosen once at run time.
//
// If a kernel's loops are faster with wider vectors, they are in a body file, which is compiled once per instruction
// set (for_each_isa.h). best_isa() returns the best set that the processor offers, or a lower one if the environment
// variable PYMOE_CPU_ISA names it (x86-64: baseline, v3, v4, v4_bf16; aarch64: baseline, dotprod), so that tests can
// run every body that the machine supports. Any other value of the variable is ignored.
//
// The set amx adds AMX tiles to v4_bf16, for products of bf16 and of quantised weights. Unless PYMOE_CPU_ISA names a
// lower set, Linux is asked once to grant the tiles to the process; if it refuses, v4_bf16 is used.
#pragma once

namespace pymoe::cpu {

enum class Isa {
  kBaseline,  // the compiler's default target: SSE2 on x86-64, NEON with fused multiply-adds on aarch64
  kV3,        // x86-64-v3: AVX2, FMA, F16C, BMI
  kV4,        // x86-64-v4: AVX-512 F, BW, CD, DQ, VL
  kV4Bf16,    // v4 with AVX512_BF16 and AVX512_VNNI: such as Zen 4 and Sapphire Rapids
  kAmx,       // v4_bf16 with AMX_TILE, AMX_BF16 and AMX_INT8: such as Sapphire Rapids
  kDotProd,   // aarch64: baseline with FEAT_DotProd, which multiplies bytes; many processors since Armv8.2
  kI8mm,      // aarch64: dotprod with FEAT_I8MM, which multiplies 2 x 8 by 8 x 2 bytes; many since Armv8.6
};

Isa best_isa();
const char* name_of(Isa isa);

}  // namespace pymoe::cpu

#if defined(__x86_64__) && defined(__GNUC__)
#define PYMOE_MULTIVERSION 1
#else
#define PYMOE_MULTIVERSION 0
#endif
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__AARCH64EB__)
#define PYMOE_NEON 1
#else
#define PYMOE_NEON 0
#endif

// PYMOE_SELECT_ISA(f)(args): calls baseline::f, v3::f or v4::f; f may be a template with its arguments.
// PYMOE_SELECT_ISA_UP_TO_V3(f)(args): for a body with PYMOE_ISA_WIDEST 3 (for_each_isa.h); calls baseline::f or v3::f.
// PYMOE_SELECT_ISA_UP_TO_BF16(f)(args): for a body with PYMOE_ISA_BF16; may also call v4_bf16::f.
// PYMOE_SELECT_ISA_OF_BYTES(f)(args): for functions that multiply bytes, in a body with PYMOE_ISA_BF16 and
// PYMOE_ISA_DOTPROD; may also call v4_bf16::f on x86-64, and dotprod::f or i8mm::f on aarch64.
#if PYMOE_MULTIVERSION
#define PYMOE_SELECT_ISA(...)                                              \
  (::pymoe::cpu::best_isa() >= ::pymoe::cpu::Isa::kV4   ? &v4::__VA_ARGS__ \
   : ::pymoe::cpu::best_isa() == ::pymoe::cpu::Isa::kV3 ? &v3::__VA_ARGS__ \
                                                        : &baseline::__VA_ARGS__)
#define PYMOE_SELECT_ISA_UP_TO_V3(...) \
  (::pymoe::cpu::best_isa() == ::pymoe::cpu::Isa::kBaseline ? &baseline::__VA_ARGS__ : &v3::__VA_ARGS__)
#define PYMOE_SELECT_ISA_UP_TO_BF16(...) \
  (::pymoe::cpu::best_isa() >= ::pymoe::cpu::Isa::kV4Bf16 ? &v4_bf16::__VA_ARGS__ : PYMOE_SELECT_ISA(__VA_ARGS__))
#else
#define PYMOE_SELECT_ISA(...) (&baseline::__VA_ARGS__)
#define PYMOE_SELECT_ISA_UP_TO_V3(...) (&baseline::__VA_ARGS__)
#define PYMOE_SELECT_ISA_UP_TO_BF16(...) (&baseline::__VA_ARGS__)
#endif
#if PYMOE_NEON
#define PYMOE_SELECT_ISA_OF_BYTES(...)                                               \
  (::pymoe::cpu::best_isa() == ::pymoe::cpu::Isa::kI8mm      ? &i8mm::__VA_ARGS__    \
   : ::pymoe::cpu::best_isa() == ::pymoe::cpu::Isa::kDotProd ? &dotprod::__VA_ARGS__ \
                                                             : &baseline::__VA_ARGS__)
#else
#define PYMOE_SELECT_ISA_OF_BYTES(...) PYMOE_SELECT_ISA_UP_TO_BF16(__VA_ARGS__)
#endif
