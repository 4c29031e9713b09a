#include "bindings/task_graph.h"

#include "runtime/task_graph.h"

#include <pybind11/typing.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "bindings/errors.h"
#include "bindings/gil.h"
#include "bindings/process.h"
#include "bindings/worker_pool.h"

namespace py = pybind11;

namespace pymoe::bindings {
namespace {

using Graph = runtime::TaskGraph<runtime::SystemSync>;

// What a node's function raised. Copies share the exception object; they are made and destroyed without the GIL.
struct NodeRaised : std::exception {
  explicit NodeRaised(py::object error) : object(std::make_shared<GilObject>(std::move(error))) {}
  const char* what() const noexcept override { return "a node's function raised"; }
  std::shared_ptr<GilObject> object;
};

Clock::duration in_seconds(double seconds, const char* name) {
  constexpr double kYear = 366.0 * 86400;
  if (!(std::abs(seconds) <= kYear)) {
    raise(PyExc_ValueError, "TaskGraph: %s must be a number of seconds within a year", name);
  }
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

class PyRun;
thread_local PyRun* waited_for = nullptr;  // the innermost run that this thread helps

class PyRun {
 public:
  PyRun(std::shared_ptr<Graph::Run> run, std::shared_ptr<StoppablePool> pool)
      : run_(std::move(run)), pool_(std::move(pool)), created_(generation()) {}

  ~PyRun() {
    // In the child of a fork nothing of the parent's is destroyed: its locks may be held for ever.
    if (created_ != generation()) {
      new std::pair(std::move(run_), std::move(pool_));
      return;
    }
    // The last reference to a run may destroy Python objects, which take the GIL for themselves.
    const WithoutGil released;
    run_.reset();
    pool_.reset();
  }

  PyRun(const PyRun&) = delete;
  PyRun& operator=(const PyRun&) = delete;

  bool done() const { return run_->done(); }

  void cancel() {
    require_this_process(created_, "GraphRun.cancel", "GraphRun");
    const WithoutGil released;
    run_->cancel();
  }

  void wait() {
    require_this_process(created_, "GraphRun.wait", "GraphRun");
    const Helping helping(this);
    try {
      wait_interruptibly([&](Clock::time_point until) { return run_->help_until(until); });
      rethrow_interrupt();
    } catch (const py::error_already_set&) {
      cancel();
      wait_interruptibly([&](Clock::time_point until) { return run_->wait_until(until); });
      throw;
    }
  }

  void result() {
    wait();
    if (run_->error()) raise(python_error(run_->error()));
  }

  py::typing::List<py::typing::Tuple<int, py::object>> failures() const {
    if (!run_->done()) raise(PyExc_RuntimeError, "GraphRun.failures: the run has not ended");
    py::list found;
    for (const auto& failure : run_->failures()) {
      found.append(py::make_tuple(failure.node, python_error(failure.error)));
    }
    return found;
  }

  bool cancelled() const {
    if (!run_->done() || !run_->error()) return false;
    try {
      std::rethrow_exception(run_->error());
    } catch (const runtime::Cancelled&) {
      return true;
    } catch (...) {
      return false;
    }
  }

 private:
  static py::object python_error(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const NodeRaised& raised) {
      return raised.object->share();
    } catch (...) {
      set_python_error(error);
      return take_error();
    }
  }

  // While it lives the calling thread helps the run.
  struct Helping {
    explicit Helping(PyRun* run) : before(std::exchange(waited_for, run)) {}
    ~Helping() { waited_for = before; }
    PyRun* before;
  };

  // An interrupt that came while this thread, the main one, ran a node is the caller's.
  void rethrow_interrupt() const {
    if (!on_main_thread()) return;
    for (const auto& failure : run_->failures()) {
      const py::object error = python_error(failure.error);
      if (is_interrupt(error)) raise(error);
    }
  }

  std::shared_ptr<Graph::Run> run_;
  std::shared_ptr<StoppablePool> pool_;
  int created_;
};

class PyGraph {
 public:
  int add(const py::typing::Callable<py::object()>& function, double head_start, std::string name) {
    if (!PyCallable_Check(function.ptr())) {
      raise(PyExc_TypeError, "TaskGraph.add: the function must be callable, got %s", Py_TYPE(function.ptr())->tp_name);
    }
    const auto kept = std::make_shared<GilObject>(borrow(function.ptr()));
    return graph_.add(
        [kept] {
          const WithGil gil;
          try {
            own(PyObject_CallNoArgs(kept->get()));
          } catch (const py::error_already_set& raised) {
            py::object error = exception_of(raised);
            if (waited_for != nullptr && is_interrupt(error)) waited_for->cancel();
            throw NodeRaised(std::move(error));
          }
        },
        in_seconds(head_start, "head_start"), std::move(name));
  }

  void add_edge(int before, int after) { graph_.add_edge(before, after); }
  int size() const { return graph_.size(); }

  std::unique_ptr<PyRun> run(const PyWorkerPool& pool, double patience) {
    const auto span = in_seconds(patience, "patience");
    auto workers = pool.kept("TaskGraph.run");
    std::shared_ptr<Graph::Run> run;
    {
      const WithoutGil released;
      run = graph_.run(workers->pool, span);
    }
    return std::make_unique<PyRun>(std::move(run), std::move(workers));
  }

 private:
  Graph graph_;
};

}  // namespace

void bind_task_graph(py::module_& module) {
  py::class_<PyRun>(module, "GraphRun", "One run of a :class:`TaskGraph`. Made by :meth:`TaskGraph.run`.")
      .def("done", &PyRun::done, "True once every node has run or is skipped.")
      .def("cancelled", &PyRun::cancelled, "True if it has ended, nodes were left out by :meth:`cancel`, none raised.")
      .def("cancel", &PyRun::cancel, "Skip every node that has not started; does not wait for those that have.")
      .def("wait", &PyRun::wait,
           "Run ready nodes of this run on this thread, and wait while there are none, until all have ended.\n\n"
           "On Ctrl-C nodes that have not started are skipped, those that run are waited for, and the interrupt is\n"
           "raised; a second one does not wait.\n\n"
           "Raises:\n"
           "    RuntimeError: the process is a fork of the one that began the run.")
      .def("result", &PyRun::result,
           "Wait; then raise what the first node in the order of their adding raised, if one did.\n\n"
           "Raises:\n"
           "    concurrent.futures.CancelledError: nodes were left out, and none raised.")
      .def("failures", &PyRun::failures,
           "After the end: node and exception of each node that raised, in the order of their adding.");

  py::class_<PyGraph>(module, "TaskGraph",
                      "Functions that depend on each other, run by a :class:`WorkerPool` as soon as what each depends\n"
                      "on has ended.\n\n"
                      "May be run any number of times; a run sees the graph as it was when it began. What depends on\n"
                      "a node that raised is skipped, everything else still runs.")
      .def(py::init<>())
      .def("add", &PyGraph::add, py::arg("function"), py::arg("head_start") = 0.0, py::arg("name") = "",
           "Add a node that calls ``function()`` and return its number, counted from 0.\n\n"
           "Args:\n"
           "    function: what it returns is dropped.\n"
           "    head_start: in seconds; of several ready nodes the one with the greatest goes first, and the one\n"
           "        that was added first among equals.\n"
           "    name: for error messages.\n\n"
           "Raises:\n"
           "    TypeError: ``function`` is not callable.\n"
           "    ValueError: ``head_start`` is not a number, or longer than a year.")
      .def("add_edge", &PyGraph::add_edge, py::arg("before"), py::arg("after"),
           "Have node ``after`` wait until node ``before`` has ended well.\n\n"
           "Raises:\n"
           "    IndexError: there is no such node.")
      .def("__len__", &PyGraph::size, "The number of nodes.")
      .def("run", &PyGraph::run, py::arg("pool"), py::arg("patience") = 0.0,
           "Begin a run on the workers of ``pool``.\n\n"
           "Args:\n"
           "    pool: has the workers.\n"
           "    patience: in seconds; no worker is called as long as the thread in :meth:`GraphRun.wait` ends a node\n"
           "        within every such span, since handing over shorter ones costs more than it gains. With patience\n"
           "        somebody must wait.\n\n"
           "Raises:\n"
           "    ValueError: the edges make a cycle; the message names it. Or ``patience`` is no such number.\n"
           "    RuntimeError: the pool was shut down, or belongs to the parent of this process.");
}

}  // namespace pymoe::bindings
