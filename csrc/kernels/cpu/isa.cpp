#include "kernels/cpu/isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace pymoe::cpu {
namespace {

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
#else
  return Isa::kBaseline;
#endif
}

Isa chosen() {
  const Isa best = offered();
  const char* wish = std::getenv("PYMOE_CPU_ISA");
  if (wish == nullptr) return best;
  for (const Isa isa : {Isa::kBaseline, Isa::kV3, Isa::kV4, Isa::kV4Bf16}) {
    if (std::strcmp(wish, name_of(isa)) == 0) return isa < best ? isa : best;
  }
  return best;
}

}  // namespace

Isa best_isa() {
  static const Isa isa = chosen();
  return isa;
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kV4Bf16: return "v4_bf16";
    case Isa::kV4: return "v4";
    case Isa::kV3: return "v3";
    case Isa::kBaseline: break;
  }
  return "baseline";
}

}  // namespace pymoe::cpu
