// Structures of tensors: cutting a batch's output into its requests' results, and concatenating results of slices.
//
// A structure is a tensor, a tuple (also a named one), a list or a dict of structures, or anything else, which is
// passed on unchanged. Under the GIL.
#pragma once

#include "bindings/gil.h"

#include <cstdint>
#include <vector>

namespace pymoe::bindings {

// Returns one structure per part, with views of its own rows: `rows[i]` rows of the output, in order. Throws ValueError
// that begins with `where` if a tensor's first dimension is not the sum of rows.
std::vector<py::object> split_structure(const py::object& output, const std::vector<int64_t>& rows, const char* where);

// Returns a structure like each of `parts`, which are of one kind, with the rows of their tensors concatenated.
py::object cat_structures(const py::list& parts);

}  // namespace pymoe::bindings
