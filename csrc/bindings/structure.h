// Structures of tensors: cutting a batch's output into its requests' results, and putting results of slices together.
//
// A structure is a tensor, a tuple (named ones too), a list or a dict of structures, or anything else, which is handed
// on as it is. Under the GIL; errors are thrown as ErrorSet.
#pragma once

#include "bindings/gil.h"

#include <cstdint>
#include <vector>

namespace pymoe::bindings {

// One structure a part, with the rows that are its own: `rows[i]` of them in turn, views of the output's. Raises
// ValueError that begins with `where` if a tensor's first dimension is not the sum of rows.
std::vector<Ref> split_structure(PyObject* output, const std::vector<int64_t>& rows, const char* where);

// The parts, a list of structures of one kind, with their tensors' rows one after the other.
Ref cat_structures(PyObject* parts);

}  // namespace pymoe::bindings
