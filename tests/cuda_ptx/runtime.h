// What a test may ask of the runtime that stands in for CUDA's (runtime.cpp).
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace pymoe::ptx {

// Launches that follow run in an order that depends on this alone; each launch advances it.
void set_seed(uint64_t seed);

// Of the grids of launches that follow, only so many blocks at each end run; all for 0.
void set_ends(int64_t blocks);

// Returns how often each kernel of the library, by its name in the PTX, has run in this process.
std::map<std::string, int64_t> launches();

// Returns how many instructions warps have executed in this process.
int64_t executed();

// The PTX that has a kernel with `part` in its name, or nothing.
std::string module_with(const std::string& part);
// Has `other` run instead of the module with this text.
void replace_module(const std::string& text, const std::string& other);

}  // namespace pymoe::ptx
