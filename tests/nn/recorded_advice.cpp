// For LD_PRELOAD: records requests with MADV_WILLNEED, and reports pages as missing or in memory as a test has set.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

extern "C" {
uintptr_t asked[1 << 16][2];  // addresses and bytes
int count = 0;
// Only pages with addresses between these are missing; if both are 0, the system answers.
uintptr_t missing[2] = {0, 0};

int madvise(void* address, size_t bytes, int advice) noexcept {
  if (advice == MADV_WILLNEED && count < 1 << 16) {
    asked[count][0] = reinterpret_cast<uintptr_t>(address);
    asked[count++][1] = bytes;
  }
  return static_cast<int>(syscall(SYS_madvise, address, bytes, advice));
}

int mincore(void* address, size_t bytes, unsigned char* states) noexcept {
  if (missing[1] == 0) return static_cast<int>(syscall(SYS_mincore, address, bytes, states));
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (uintptr_t at = 0; at < bytes; at += page) {
    const uintptr_t own = reinterpret_cast<uintptr_t>(address) + at;
    states[at / page] = own < missing[0] || own >= missing[1];
  }
  return 0;
}
}
