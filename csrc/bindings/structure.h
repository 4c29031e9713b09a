// Structures of tensors: cutting a batch's output into its requests' results, and putting results of slices together.
//
// A structure is a tensor, a tuple (named ones too), a list or a dict of structures, or anything else, which is handed
// on as it is. Under the GIL.
#pragma once

#include "bindings/gil.h"

#include <cstdint>
#include <vector>

namespace pymoe::bindings {

// One structure a part, with the rows that are its own: `rows[i]` of them in turn, views of the output's. Throws
// ValueError that begins with `where` if a tensor's first dimension is not the sum of rows.
std::vector<py::object> split_structure(const py::object& output, const std::vector<int64_t>& rows, const char* where);

// The parts, structures of one kind, with their tensors' rows one after the other.
py::object cat_structures(const py::list& parts);

}  // namespace pymoe::bindings
