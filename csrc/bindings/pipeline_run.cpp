// PipelinePlan and PipelineRun of pymoe._runtime: runtime/pipeline_run.h for Python.
#include "runtime/pipeline_run.h"

#include <memory>
#include <optional>
#include <utility>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/process.h"
#include "runtime/sync.h"

namespace pymoe::bindings {
namespace {

using Plan = runtime::PipelinePlan;
using Run = runtime::PipelineRun<runtime::SystemSync>;

// All under the GIL. Whoever has the run's lock never asks for the GIL, so it may be held when the lock is taken.
class PyPipelineRun {
 public:
  explicit PyPipelineRun(Plan& plan) : run_(std::make_unique<Run>(plan)), created_(generation()) {}

  // In the child of a fork the parent's threads wait for ever in what would be destroyed.
  ~PyPipelineRun() {
    if (created_ != generation()) static_cast<void>(run_.release());
  }

  PyPipelineRun(const PyPipelineRun&) = delete;
  PyPipelineRun& operator=(const PyPipelineRun&) = delete;

  std::optional<int> next(int worker, std::optional<int> finished) {
    Plan::Node node = of_this_process("PipelineRun.next").ask(worker, finished);
    if (node == Run::kLater) node = wait(worker);
    return node == Run::kNone ? std::nullopt : std::optional(node);
  }

  void cancel() { of_this_process("PipelineRun.cancel").cancel(); }
  bool cancelled() const { return of_this_process("PipelineRun.cancelled").cancelled(); }
  bool done() const { return of_this_process("PipelineRun.done").done(); }

 private:
  Run& of_this_process(const char* where) const {
    require_this_process(created_, where, "PipelineRun");
    return *run_;
  }

  Plan::Node wait(int worker) {
    Plan::Node node = Run::kLater;
    try {
      wait_interruptibly([&](Clock::time_point until) {
        node = run_->wait_until(worker, until);
        return node != Run::kLater;
      });
    } catch (const py::error_already_set&) {
      run_->leave(worker);
      throw;
    }
    return node;
  }

  std::unique_ptr<Run> run_;
  const int created_;
};

}  // namespace

void bind_pipeline_run(py::module_& module) {
  py::class_<PyPipelineRun>(module, "PipelineRun",
                            "One run of a :class:`PipelinePlan`. Made by :meth:`PipelinePlan.run`.")
      .def("next", &PyPipelineRun::next, py::arg("worker"), py::arg("finished") = py::none(),
           "Wait until the worker's next node may start, and return it: it counts as started then. None if nothing is\n"
           "left to start, or the run is cancelled.\n\n"
           "``finished`` is the node that this worker got before, which has ended. Ctrl-C ends the wait of the main\n"
           "thread and nothing else: the worker may be asked for again.\n\n"
           "Raises:\n"
           "    IndexError: there is no such worker or node.\n"
           "    RuntimeError: ``finished`` is not what the worker runs; another thread waits for this worker; or the\n"
           "        process is a fork of the one that began the run.")
      .def("cancel", &PyPipelineRun::cancel, "Start no further node; threads that wait in :meth:`next` get None.")
      .def("cancelled", &PyPipelineRun::cancelled, "Return True once it was cancelled.")
      .def("done", &PyPipelineRun::done, "Return True once every node has ended.");

  py::class_<Plan>(module, "PipelinePlan",
                   "Nodes that depend on each other, each to be run by the thread of its worker.\n\n"
                   "A worker starts its nodes in the order in which they were added, each as soon as all nodes that\n"
                   "it depends on have ended. A run sees the plan as it was when it began.")
      .def(py::init<int>(), py::arg("workers"), "Make a plan without nodes, for at least one worker.")
      .def("add", &Plan::add, py::arg("worker"),
           "Add a node to the end of a worker's order and return its number, counted from 0.")
      .def("add_edge", &Plan::add_edge, py::arg("before"), py::arg("after"),
           "Have node ``after`` wait until node ``before`` has ended; they may belong to different workers.")
      .def(
          "run", [](Plan& plan) { return std::make_unique<PyPipelineRun>(plan); },
          "Begin a run, for one thread a worker that calls :meth:`PipelineRun.next`; ValueError, which names it, for "
          "a\n"
          "cycle of edges and orders, so that a run could hang.");
}

}  // namespace pymoe::bindings
