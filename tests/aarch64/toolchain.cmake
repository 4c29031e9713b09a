# Compiles for aarch64 Linux with Debian's cross compiler (g++-aarch64-linux-gnu), and has ctest run what it made by
# QEMU (qemu-user-static):
#
#   cmake -S . -B build/cpp/aarch64 -G Ninja -DCMAKE_TOOLCHAIN_FILE=tests/aarch64/toolchain.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L /usr/aarch64-linux-gnu)
