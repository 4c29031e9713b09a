// References that are dropped later: for objects whose owner may end under a lock, where the GIL must not be taken.
#pragma once

#include "bindings/gil.h"

namespace pymoe::bindings {

// Gives up a reference from any thread, with or without the GIL, under any lock: it is dropped soon, under the GIL.
void drop_later(PyObject* object) noexcept;

// Drops what was given up so far. Under the GIL, under no lock; cheap when there is nothing.
void drop_deferred();

// Around a fork: the child, too, drops references.
void hold_deferred();
void release_deferred();

}  // namespace pymoe::bindings
