// Who helps: whether a thread that would wait for a request, or for room in a queue, runs batches meanwhile.
#pragma once

#include "bindings/process.h"
#include "bindings/torch_calls.h"
#include "runtime/strand.h"

namespace pymoe::bindings {

// Inside a batch, and on a worker of a runtime, a thread must: it may be the only one that can go on. So may any other
// worker, if a batch waits for it; but nobody else whose wait is `limited` helps, since a batch may take longer. A
// client does if it `may` and a batch would run on its thread as on a worker. Under the GIL.
inline runtime::Help help_of_this_thread(bool may, bool limited) {
  const bool in_batch = runtime::SystemSync::batches_on_this_thread() > 0 || on_server_thread();
  if (in_batch || (on_worker_thread() && !limited)) return runtime::Help::kInBatch;
  return may && !limited && thread_is_plain() ? runtime::Help::kYes : runtime::Help::kNo;
}

}  // namespace pymoe::bindings
