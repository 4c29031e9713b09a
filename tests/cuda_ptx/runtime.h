// Functions for tests of the runtime that replaces CUDA's (runtime.cpp).
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace pymoe::ptx {

// The order of later launches depends only on this seed; each launch advances it.
void set_seed(uint64_t seed);

// Makes later launches run only this many blocks at each end of their grids; 0: all blocks.
void set_ends(int64_t blocks);

// Returns how often each kernel of the library, by its name in the PTX, has run in this process.
std::map<std::string, int64_t> launches();

// Returns the number of instructions that warps have executed in this process.
int64_t executed();

// Returns the PTX module that has a kernel with `part` in its name, or nothing.
std::string module_with(const std::string& part);
// Makes `other` run instead of the module with this text.
void replace_module(const std::string& text, const std::string& other);

}  // namespace pymoe::ptx
