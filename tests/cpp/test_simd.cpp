#include <doctest/doctest.h>

#include <cmath>
#include <memory>

#define PYMOE_ISA_BODY "simd_checks_body.h"
#include "kernels/cpu/for_each_isa.h"

namespace {

template <typename Findings>
void judge(void (*find)(Findings*)) {
  Findings findings;
  find(&findings);
  CHECK(findings.exp_error <= 2.0);
  CHECK(findings.exp_error > 0.0);
  CHECK(findings.partial_float == 0);
  CHECK(findings.partial_double == 0);
  CHECK(findings.partial_bfloat16 == 0);
  CHECK(findings.partial_float16 == 0);
  CHECK(findings.conversions_bfloat16 == 0);
  CHECK(findings.conversions_float16 == 0);
  CHECK(findings.sums == 0.0);
}

}  // namespace

TEST_CASE("simd, baseline") { judge(&pymoe::cpu::baseline::find); }

#if PYMOE_MULTIVERSION
// An instruction set that the machine lacks cannot run; its test then passes without checking anything.
TEST_CASE("simd, v3") {
  if (pymoe::cpu::best_isa() >= pymoe::cpu::Isa::kV3) judge(&pymoe::cpu::v3::find);
}
TEST_CASE("simd, v4") {
  if (pymoe::cpu::best_isa() >= pymoe::cpu::Isa::kV4) judge(&pymoe::cpu::v4::find);
}
#endif
