// gemm_amx with emulated tiles, compiled once per instruction set (for_each_isa.h), since packs and stores differ.
// clang-format off: each header needs those before it
#include "kernels/cpu/gemm_micro_kernel.h"
#include "kernels/cpu/gemm_pack.h"
#include "kernels/cpu/gemm_amx.h"
// clang-format on

namespace pymoe::cpu::PYMOE_ISA {

inline void gemm_by_emulated_tiles(const Gemm<BFloat16>& g) { gemm_amx<test::EmulatedTiles>(g); }
#if PYMOE_ISA_HAS_BF16
inline void gemm_by_tiles(const Gemm<BFloat16>& g) { gemm_amx<AmxTiles>(g); }
#endif

}  // namespace pymoe::cpu::PYMOE_ISA
