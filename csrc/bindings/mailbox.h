// Mailbox of pymoe._runtime: tells an event loop that requests are done.
//
// Whoever completes a batch leaves word for all of the loop's coroutines without the GIL, and calls the loop once, not
// once a request: call_soon_threadsafe costs more than all the rest.
// A loop that is there but raises when it is called is called once more, and otherwise with the next word left.
#pragma once

#include "bindings/gil.h"

#include <memory>
#include <mutex>
#include <vector>

namespace pymoe::bindings {

class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  // `loop`: a weak reference to the event loop.
  explicit Mailbox(Ref loop) : loop_(loop.release()) {}
  ~Mailbox();

  // Takes over a reference to an asyncio.Future of the loop: it gets None as its result, in the loop. Any thread.
  void put(PyObject* waiter);

 private:
  // How a call of the loop ended; nothing is set if it raised, and may be tried again.
  struct Told {
    bool reached = false;
    bool gone = false;         // the loop is closed, or has been collected: nobody waits any more
    bool interrupted = false;  // by Ctrl-C, which the caller must pass on
  };
  Told call_loop();
  void drop_waiters();
  static PyObject* deliver(PyObject* capsule, PyObject*);
  static PyMethodDef deliver_method;

  PyObject* loop_;
  std::mutex mutex_;  // guards the rest
  std::vector<PyObject*> waiters_;
  bool called_ = false;  // the loop will come and look
};

// Adds the type to the module; throws ErrorSet.
void add_mailbox_type(PyObject* module);
// make_mailbox(loop), a function of the module.
PyObject* make_mailbox(PyObject* module, PyObject* loop);
// The mailbox of an object of the type; throws ErrorSet with a TypeError for anything else.
std::shared_ptr<Mailbox> mailbox_of(PyObject* object);

}  // namespace pymoe::bindings
