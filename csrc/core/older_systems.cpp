// Together with glibc_flags of setup.py, lets both modules be loaded on systems whose glibc and libstdc++ are older
// than the compiler's, as far back as torch's own wheels go (manylinux_2_28, with GLIBCXX_3.4.24). Defines the
// functions and variables that newer headers of libstdc++ refer to and that older libraries do not export. All are
// hidden, so no other library sees them.
//
// Functions are defined by their assembler names, because a program must not define names in namespace std.
#include <features.h>

#include <new>

#if defined(__GLIBCXX__) && defined(__GLIBC__)

#define PYMOE_HIDDEN [[gnu::visibility("hidden")]]

// GLIBC_2.32: true while the process has a single thread, so that reference counts need no atomics. False is always
// safe.
extern "C" {
PYMOE_HIDDEN extern char never_single_threaded __asm__("__libc_single_threaded");
char never_single_threaded = 0;
}

// GLIBCXX_3.4.29: std::__throw_bad_array_new_length(), called when a container is asked for more elements than memory
// can address.
PYMOE_HIDDEN [[noreturn]] void throw_bad_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_length() { throw std::bad_array_new_length(); }

// CXXABI_1.3.13: the functions that change the reference count of a std::exception_ptr's exception. Here they call the
// copy constructor and the destructor, which change that count, too, and have existed since CXXABI_1.3.3.
void copy_pointer(void* to, const void* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy_pointer(void* pointer) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

PYMOE_HIDDEN void add_reference(void* self) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void add_reference(void* self) {
  void* uncounted;  // a copy that is never destroyed
  copy_pointer(&uncounted, self);
}

PYMOE_HIDDEN void release(void** self) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void release(void** self) {
  destroy_pointer(self);
  *self = nullptr;
}

#endif
