#include "bindings/pipeline_run.h"

#include "runtime/pipeline_run.h"

#include <memory>
#include <optional>
#include <utility>

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
    require_this_process(created_, "PipelineRun.next", "PipelineRun");
    Plan::Node node = run_->ask(worker, finished);
    if (node == Run::kLater) node = wait(worker);
    return node == Run::kNone ? std::nullopt : std::optional(node);
  }

  void cancel() {
    require_this_process(created_, "PipelineRun.cancel", "PipelineRun");
    run_->cancel();
  }

  bool cancelled() const {
    require_this_process(created_, "PipelineRun.cancelled", "PipelineRun");
    return run_->cancelled();
  }

  bool done() const {
    require_this_process(created_, "PipelineRun.done", "PipelineRun");
    return run_->done();
  }

 private:
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
           "Wait until the worker's next node may start, and return it: it counts as started then.\n\n"
           "Ctrl-C ends the wait of the main thread and nothing else: the run goes on, and the worker may be asked\n"
           "for again.\n\n"
           "Args:\n"
           "    worker: whose thread this is.\n"
           "    finished: the node that this worker got before, which has ended; None if it got none.\n\n"
           "Returns:\n"
           "    None if the worker has nothing left to start, or the run is cancelled.\n\n"
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
                   "it depends on have ended. A plan may be run any number of times; a run sees the plan as it was\n"
                   "when it began.")
      .def(py::init<int>(), py::arg("workers"),
           "Make a plan without nodes.\n\n"
           "Raises:\n"
           "    ValueError: ``workers`` is less than 1.")
      .def("add", &Plan::add, py::arg("worker"),
           "Add a node to the end of a worker's order and return its number, counted from 0.\n\n"
           "Raises:\n"
           "    IndexError: there is no such worker.")
      .def("add_edge", &Plan::add_edge, py::arg("before"), py::arg("after"),
           "Have node ``after`` wait until node ``before`` has ended; they may belong to different workers.\n\n"
           "Raises:\n"
           "    IndexError: there is no such node.")
      .def(
          "run", [](Plan& plan) { return std::make_unique<PyPipelineRun>(plan); },
          "Begin a run, for one thread a worker that calls :meth:`PipelineRun.next`.\n\n"
          "Raises:\n"
          "    ValueError: the edges and the orders of the workers form a cycle, so that a run could hang; the "
          "message\n"
          "        names it.");
}

}  // namespace pymoe::bindings
