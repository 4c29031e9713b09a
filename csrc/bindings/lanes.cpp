#include "bindings/lanes.h"

#include "runtime/lanes.h"

#include <memory>
#include <optional>
#include <utility>

#include "bindings/gil.h"
#include "bindings/process.h"
#include "runtime/sync.h"

namespace py = pybind11;

namespace pymoe::bindings {
namespace {

using Plan = runtime::LanePlan;
using Run = runtime::LaneRun<runtime::SystemSync>;

// All under the GIL. Whoever has the run's lock never asks for the GIL, so it may be held when the lock is taken.
class PyLaneRun {
 public:
  explicit PyLaneRun(Plan& plan) : run_(std::make_unique<Run>(plan)), created_(generation()) {}

  // In the child of a fork the parent's threads wait for ever in what would be destroyed.
  ~PyLaneRun() {
    if (created_ != generation()) static_cast<void>(run_.release());
  }

  PyLaneRun(const PyLaneRun&) = delete;
  PyLaneRun& operator=(const PyLaneRun&) = delete;

  std::optional<int> next(int lane, std::optional<int> finished) {
    require_this_process(created_, "LaneRun.next", "LaneRun");
    Plan::Node node = run_->ask(lane, finished);
    if (node == Run::kLater) node = wait(lane);
    return node == Run::kNone ? std::nullopt : std::optional(node);
  }

  void cancel() {
    require_this_process(created_, "LaneRun.cancel", "LaneRun");
    run_->cancel();
  }

  bool cancelled() const {
    require_this_process(created_, "LaneRun.cancelled", "LaneRun");
    return run_->cancelled();
  }

  bool done() const {
    require_this_process(created_, "LaneRun.done", "LaneRun");
    return run_->done();
  }

 private:
  Plan::Node wait(int lane) {
    Plan::Node node = Run::kLater;
    try {
      wait_interruptibly([&](Clock::time_point until) {
        node = run_->wait_until(lane, until);
        return node != Run::kLater;
      });
    } catch (const py::error_already_set&) {
      run_->leave(lane);
      throw;
    }
    return node;
  }

  std::unique_ptr<Run> run_;
  const int created_;
};

}  // namespace

void bind_lanes(py::module_& module) {
  py::class_<PyLaneRun>(module, "LaneRun", "One run of a :class:`LanePlan`. Made by :meth:`LanePlan.run`.")
      .def("next", &PyLaneRun::next, py::arg("lane"), py::arg("finished") = py::none(),
           "Wait until a node of the lane may start, and return it: it has started then.\n\n"
           "Ctrl-C ends the wait of the main thread and nothing else: the run goes on, and the lane may be asked\n"
           "again.\n\n"
           "Args:\n"
           "    lane: whose thread this is.\n"
           "    finished: the node that this lane got before, which has ended; None if it got none.\n\n"
           "Returns:\n"
           "    None if the lane has nothing left to start, or the run is cancelled.\n\n"
           "Raises:\n"
           "    IndexError: there is no such lane or node.\n"
           "    RuntimeError: ``finished`` is not what the lane runs; another thread waits in this lane; or the\n"
           "        process is a fork of the one that began the run.")
      .def("cancel", &PyLaneRun::cancel, "Start no further node; whoever waits in :meth:`next` gets None.")
      .def("cancelled", &PyLaneRun::cancelled, "True once it was cancelled.")
      .def("done", &PyLaneRun::done, "True once every node has ended.");

  py::class_<Plan>(module, "LanePlan",
                   "Nodes that depend on each other, each to be run by the thread of its lane.\n\n"
                   "The order in which nodes are added to a lane is its plan. Its front, the first that has not\n"
                   "started, starts as soon as all before it have ended. While it is not ready, another may overtake\n"
                   "it: the first of the plan that is ready, may overtake, and is the first of its queue; and if it\n"
                   "has ``live`` above 0, the lane's limit must have room for it and for those that it passes. A\n"
                   "lane never holds more than its limit, or than its plan does in order.\n\n"
                   "May be run any number of times; a run sees the plan as it was when it began.")
      .def(py::init<int>(), py::arg("lanes"),
           "Make a plan without nodes.\n\n"
           "Raises:\n"
           "    ValueError: ``lanes`` is less than 1.")
      .def("add", &Plan::add, py::arg("lane"), py::arg("queue"), py::arg("live") = 0, py::arg("overtakes") = false,
           "Add a node to the end of a lane's plan and return its number, counted from 0.\n\n"
           "Args:\n"
           "    lane: runs it.\n"
           "    queue: any number; the nodes of one queue of a lane start in their order.\n"
           "    live: what the lane holds from the node's start on, or, below 0, no longer holds after its end.\n"
           "    overtakes: it may start while one in front of it is not ready.\n\n"
           "Raises:\n"
           "    IndexError: there is no such lane.")
      .def("add_edge", &Plan::add_edge, py::arg("before"), py::arg("after"),
           "Have node ``after`` wait until node ``before`` has ended; they may be in different lanes.\n\n"
           "Raises:\n"
           "    IndexError: there is no such node.")
      .def("set_limit", &Plan::set_limit, py::arg("lane"), py::arg("limit"),
           "Say how much a lane may hold when nodes overtake; None: as much as it likes.\n\n"
           "Raises:\n"
           "    IndexError: there is no such lane.")
      .def(
          "run", [](Plan& plan) { return std::make_unique<PyLaneRun>(plan); },
          "Begin a run, for one thread a lane that calls :meth:`LaneRun.next`.\n\n"
          "Raises:\n"
          "    ValueError: the edges and the orders of the lanes make a cycle, so that a run could hang; the message\n"
          "        names it.");
}

}  // namespace pymoe::bindings
