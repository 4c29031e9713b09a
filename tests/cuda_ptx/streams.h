// What is asked of streams: each piece of work is noted with its device and stream, and done at once, or when the graph
// that is being captured is replayed.
#pragma once

#include <functional>
#include <string>

namespace pymoe::ptx {

// Returns why a GPU would refuse the work, or nothing.
std::string issue(const std::string& what, void* stream, std::function<void()> work);

}  // namespace pymoe::ptx
