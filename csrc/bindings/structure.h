// Structures of tensors: cutting a batch's output into its requests' results, and concatenating results of slices.
//
// A structure is a tensor, a tuple (also a named one), a list or a dict of structures, or anything else, which is
// passed on unchanged. Call these functions with the GIL held.
#pragma once

#include "bindings/gil.h"

#include <cstdint>
#include <vector>

namespace pymoe::bindings {

// Cuts the rows of every tensor of `output` into consecutive parts of rows[i] rows; returns a structure for each part.
// Raises a ValueError whose message begins with `where` if a tensor's first dimension is not the sum of `rows`.
std::vector<py::object> split_structure(const py::object& output, const std::vector<int64_t>& rows, const char* where);

// Returns a structure with the rows of the parts' tensors concatenated. All parts must have the same structure.
py::object cat_structures(const py::list& parts);

}  // namespace pymoe::bindings
