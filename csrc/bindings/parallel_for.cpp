#include "bindings/parallel_for.h"

#include "runtime/parallel_for.h"

#include <pybind11/typing.h>

#include <memory>
#include <utility>

#include "bindings/errors.h"
#include "bindings/gil.h"
#include "bindings/worker_pool.h"

namespace pymoe::bindings {
namespace {

using Calls = runtime::ParallelFor<runtime::SystemSync>;

// What a call raised. Copies share the exception object; they are made and destroyed without the GIL.
struct CallRaised : std::exception {
  explicit CallRaised(py::object error) : object(std::make_shared<GilObject>(std::move(error))) {}
  const char* what() const noexcept override { return "a call raised"; }
  std::shared_ptr<GilObject> object;
};

// What the innermost parallel_for of a thread shares with the calls that the thread makes for it.
struct Helped {
  Calls* run = nullptr;
  py::object interrupt;  // that came in one of these calls
};
thread_local Helped* helped = nullptr;

// While it lives, the thread makes calls of the run.
struct Helping {
  explicit Helping(Helped* now) : before(std::exchange(helped, now)) {}
  ~Helping() { helped = before; }
  Helping(const Helping&) = delete;
  Helping& operator=(const Helping&) = delete;
  Helped* before;
};

// Makes the calls that are left, and waits for those that run. An interrupt leaves out what has not started; a second
// one does not wait for the rest.
void wait_for(Calls& run) {
  Helped shared{&run, {}};
  const Helping helping(&shared);
  try {
    wait_interruptibly([&](Clock::time_point until) { return run.help_until(until); });
  } catch (const py::error_already_set& error) {
    shared.interrupt = exception_of(error);
    {
      const WithoutGil released;
      run.cancel();
    }
    wait_interruptibly([&](Clock::time_point until) { return run.wait_until(until); });
  }
  if (shared.interrupt) raise(shared.interrupt);
}

void raise_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const CallRaised& raised) {
    raise(raised.object->get());
  } catch (...) {
    set_python_error(error);
    throw py::error_already_set();
  }
}

void parallel_for(const PyWorkerPool& pool, int count, const py::typing::Callable<py::object(int)>& function,
                  double inline_limit) {
  if (count < 0) raise(PyExc_ValueError, "parallel_for: count must be at least 0, got %d", count);
  constexpr double kYear = 366.0 * 86400;
  if (!(inline_limit >= 0 && inline_limit <= kYear)) {
    raise(PyExc_ValueError, "parallel_for: inline_limit must be a number of seconds from 0 to a year");
  }
  const auto limit = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(inline_limit));
  auto workers = pool.kept("parallel_for");
  const auto kept = std::make_shared<GilObject>(borrow(function.ptr()));
  const auto call = [kept](int number) {
    const WithGil gil;
    try {
      own(PyObject_CallOneArg(kept->get(), py::int_(number).ptr()));
    } catch (const py::error_already_set& raised) {
      py::object error = exception_of(raised);
      if (helped != nullptr && is_interrupt(error)) {
        helped->interrupt = error;
        const WithoutGil released;
        helped->run->cancel();
      }
      throw CallRaised(std::move(error));
    }
  };
  std::shared_ptr<Calls> run;
  {
    const WithoutGil released;
    run = Calls::start(workers->pool, count, call, limit);
  }
  // Destroys what the calls have raised, or leaves it to a worker that is about to end: without the GIL, as the pool.
  struct Released {
    ~Released() {
      const WithoutGil released;
      run.reset();
      workers.reset();
    }
    std::shared_ptr<Calls>& run;
    std::shared_ptr<StoppablePool>& workers;
  };
  const Released at_end{run, workers};
  wait_for(*run);
  if (run->error()) raise_error(run->error());
}

}  // namespace

void bind_parallel_for(py::module_& module) {
  module.def(
      "parallel_for", &parallel_for, py::arg("pool"), py::arg("count"), py::arg("function"),
      py::arg("inline_limit") = 0.0,
      "Call ``function(i)`` for every ``i`` in ``range(count)``, on the workers of ``pool`` and on this thread.\n\n"
      "Returns when all calls have ended. This thread makes calls, too, so a call may do the same again, however\n"
      "few workers there are.\n\n"
      "Args:\n"
      "    pool: has the workers.\n"
      "    count: the number of calls.\n"
      "    function: what it returns is dropped.\n"
      "    inline_limit: in seconds; no worker is called as long as this thread ends a call within every such\n"
      "        span, since handing over shorter ones costs more than it gains.\n\n"
      "Raises:\n"
      "    BaseException: what the first call, by its number, raised. On Ctrl-C calls that have not started are\n"
      "        left out, those that run are waited for, and the interrupt is raised; a second one does not wait.\n"
      "    concurrent.futures.CancelledError: the pool was stopped before all calls had started, and none raised.\n"
      "    TypeError: ``function`` is not callable.\n"
      "    ValueError: ``count`` is negative, or ``inline_limit`` is not a number of seconds up to a year.\n"
      "    RuntimeError: the pool was shut down, or belongs to the parent of this process.");
}

}  // namespace pymoe::bindings
