#include "kernels/cpu/isa.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#if PYMOE_MULTIVERSION
#include <cpuid.h>
#endif
#if PYMOE_MULTIVERSION && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if PYMOE_NEON && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace pymoe::cpu {
namespace {

// Requests AMX tiles for this process, and returns true if it may use them for bf16 and int8: the processor has them,
// the system saves them on thread switches (XCR0), and the system grants the request. (Linux grants tiles only on
// request, because they enlarge a thread's state by 8 KiB.)
bool grants_tiles() {
#if PYMOE_MULTIVERSION && defined(__linux__)
  constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22, kInt8 = 1u << 25, kOsXsave = 1u << 27;
  constexpr unsigned kTileState = 3u << 17;                    // XCR0 bits for tile configuration and tile data
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kOsXsave) == 0) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & kTile) == 0 || (d & kBf16) == 0 || (d & kInt8) == 0) return false;
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Isa offered() {
#if PYMOE_MULTIVERSION
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt") &&
                  __builtin_cpu_supports("popcnt");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  const bool v4_bf16 = v4 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  return v4_bf16 ? Isa::kV4Bf16 : v4 ? Isa::kV4 : v3 ? Isa::kV3 : Isa::kBaseline;
#elif PYMOE_NEON && defined(__linux__)
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  constexpr unsigned long kMatrices = 1ul << 13;     // HWCAP2_I8MM
  if ((getauxval(AT_HWCAP) & kDotProducts) == 0) return Isa::kBaseline;
  return (getauxval(AT_HWCAP2) & kMatrices) != 0 ? Isa::kI8mm : Isa::kDotProd;
#else
  return Isa::kBaseline;
#endif
}

// The instruction sets that PYMOE_CPU_ISA can select: all of this architecture except its best one, which is used by
// default if the processor has it.
#if PYMOE_NEON
constexpr Isa kLower[] = {Isa::kBaseline, Isa::kDotProd};
#else
constexpr Isa kLower[] = {Isa::kBaseline, Isa::kV3, Isa::kV4, Isa::kV4Bf16};
#endif

Isa chosen() {
  const Isa best = offered();
  const char* wish = std::getenv("PYMOE_CPU_ISA");
  for (const Isa isa : kLower) {
    if (wish != nullptr && std::strcmp(wish, name_of(isa)) == 0) return isa < best ? isa : best;
  }
  return best == Isa::kV4Bf16 && grants_tiles() ? Isa::kAmx : best;
}

}  // namespace

Isa best_isa() {
  static const Isa isa = chosen();
  return isa;
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAmx: return "amx";
    case Isa::kV4Bf16: return "v4_bf16";
    case Isa::kV4: return "v4";
    case Isa::kV3: return "v3";
    case Isa::kDotProd: return "dotprod";
    case Isa::kI8mm: return "i8mm";
    case Isa::kBaseline: break;
  }
  return "baseline";
}

}  // namespace pymoe::cpu
