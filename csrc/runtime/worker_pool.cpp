#include "runtime/worker_pool.h"

namespace pymoe::runtime {

template class WorkerPool<SystemSync>;

}  // namespace pymoe::runtime
