// The Python module pymoe._runtime.
#include <pybind11/pybind11.h>

#include "bindings/batch.h"
#include "bindings/buffers.h"
#include "bindings/future.h"
#include "bindings/gil.h"
#include "bindings/mailbox.h"
#include "bindings/outcome.h"
#include "bindings/parallel_for.h"
#include "bindings/parameter_lock.h"
#include "bindings/pipeline_run.h"
#include "bindings/process.h"
#include "bindings/profiler.h"
#include "bindings/runtime.h"
#include "bindings/task_pool.h"
#include "bindings/torch_calls.h"
#include "bindings/worker_pool.h"

namespace py = pybind11;

namespace {

PyMethodDef functions[] = {
    {"set_await", pymoe::bindings::set_await, METH_O,
     "set_await(function: collections.abc.Callable[[pymoe._runtime.RequestFuture], typing.Any]) -> None\n\n"
     "Choose what makes an iterator of a future that is awaited."},
    {"set_standard", pymoe::bindings::set_standard, METH_O,
     "set_standard(function: collections.abc.Callable[[pymoe._runtime.RequestFuture], typing.Any]) -> None\n\n"
     "Choose what makes the object that functions of concurrent.futures look at."},
    {"must_help", pymoe::bindings::must_help, METH_O,
     "must_help(limited: bool) -> bool\n\n"
     "True inside a batch and on a worker, but for workers of parallel calls where the wait is limited: such a\n"
     "thread may be the only one that can run what it waits for, and does so in a future's result()."},
    {"thread_is_plain", pymoe::bindings::thread_is_plain, METH_NOARGS,
     "thread_is_plain() -> bool\n\n"
     "True on a thread in the state in which threads begin, as far as torch is concerned; gradients may be on or off."},
    {"set_plain_runner", pymoe::bindings::set_plain_runner, METH_O,
     "set_plain_runner(function: collections.abc.Callable[..., typing.Any]) -> None\n\n"
     "Choose what calls a function (its first argument) in such a state, from a thread in another one."},
    {"identity_of_this_thread", pymoe::bindings::identity_of_this_thread, METH_NOARGS,
     "identity_of_this_thread() -> typing.Any\n\n"
     "What the runtime knows the calling thread by, for a thread that works in its place."},
    {"adopt_identity", pymoe::bindings::adopt_identity, METH_O,
     "adopt_identity(identity: typing.Any) -> None\n\n"
     "Be the thread of that identity for the runtime from now on; that one must wait until this one has ended."},
    {"make_mailbox", pymoe::bindings::make_mailbox, METH_O,
     "make_mailbox(loop: typing.Any) -> pymoe._runtime.Mailbox\n\nMake the mailbox of an event loop."},
    {"buffer_statistics", pymoe::bindings::buffer_statistics, METH_NOARGS,
     "buffer_statistics() -> tuple[int, int]\n\n"
     "Blocks of memory that batches live in now, and bytes kept for batches to come."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

// Without mod_gil_not_used: an interpreter that has none takes the GIL up again, which guards much of this folder.
PYBIND11_MODULE(_runtime, module) {
  using namespace pymoe::bindings;
  module.doc() = "The native runtime of pymoe.";
  module.attr("compiler") = __VERSION__;

  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const ErrorSet&) {  // Python's own: it is set already
    }
  });
  try {
    install_process_hooks();
    find_cancelled_error();
    add_future_type(module.ptr());
    add_mailbox_type(module.ptr());
    add_task_pool_type(module.ptr());
    add_runtime_type(module.ptr());
    add_parameter_lock_type(module.ptr());
    if (PyModule_AddFunctions(module.ptr(), functions) != 0) throw ErrorSet();
  } catch (const ErrorSet&) {
    throw py::error_already_set();
  }
  bind_worker_pool(module);
  bind_parallel_for(module);
  bind_pipeline_run(module);
  bind_profiler(module);
}
