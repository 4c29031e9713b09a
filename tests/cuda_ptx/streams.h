// The work on streams: each piece of work is recorded with its device and stream, and done immediately, or when the
// graph that is being captured is replayed.
#pragma once

#include <functional>
#include <string>

namespace pymoe::ptx {

// Returns why a GPU would refuse the work, or nothing.
std::string issue(const std::string& what, void* stream, std::function<void()> work);

}  // namespace pymoe::ptx
