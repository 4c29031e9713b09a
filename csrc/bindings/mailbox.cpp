#include "bindings/mailbox.h"

#include <new>

#include "bindings/deferred.h"
#include "bindings/outcome.h"
#include "bindings/types.h"

namespace pymoe::bindings {
namespace {

struct MailboxObject {
  PyObject_HEAD std::shared_ptr<Mailbox> mailbox;
};

PyTypeObject* mailbox_type = nullptr;
constexpr const char* kCapsule = "pymoe.Mailbox";

void dealloc(PyObject* object) {
  auto* self = reinterpret_cast<MailboxObject*>(object);
  PyTypeObject* type = Py_TYPE(object);
  self->mailbox.~shared_ptr();
  type->tp_free(object);
  Py_DECREF(type);
}

void delete_capsule(PyObject* capsule) {
  delete static_cast<std::shared_ptr<Mailbox>*>(PyCapsule_GetPointer(capsule, kCapsule));
}

}  // namespace

PyMethodDef Mailbox::deliver_method = {"deliver", &Mailbox::deliver, METH_NOARGS, nullptr};

Mailbox::~Mailbox() {
  for (PyObject* waiter : waiters_) drop_later(waiter);
  drop_later(loop_);
}

void Mailbox::put(PyObject* waiter) {
  {
    const std::lock_guard lock(mutex_);
    waiters_.push_back(waiter);
    if (std::exchange(called_, true)) return;
  }
  const WithGil gil;
  bool interrupted = false;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const Told told = call_loop();
    interrupted = interrupted || told.interrupted;
    if (told.reached) break;
    if (told.gone) {
      drop_waiters();
      break;
    }
    if (attempt == 1) {
      // They stay, and come with whatever is put next.
      const std::lock_guard lock(mutex_);
      called_ = false;
    }
  }
  if (interrupted) PyErr_SetInterrupt();
}

Mailbox::Told Mailbox::call_loop() {
  const Ref loop = Ref::steal(PyObject_CallNoArgs(loop_));
  if (!loop || loop.get() == Py_None) {
    PyErr_Clear();
    return {.gone = true};
  }
  try {
    auto self = std::make_unique<std::shared_ptr<Mailbox>>(shared_from_this());
    const Ref capsule = Ref::checked(PyCapsule_New(self.get(), kCapsule, delete_capsule));
    self.release();
    const Ref function = Ref::checked(PyCFunction_New(&deliver_method, capsule.get()));
    Ref::checked(PyObject_CallMethod(loop.get(), "call_soon_threadsafe", "O", function.get()));
    return {.reached = true};
  } catch (const ErrorSet&) {
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  const Ref error = take_error();
  const Ref closed = Ref::steal(PyObject_CallMethod(loop.get(), "is_closed", nullptr));
  const bool gone = closed && PyObject_IsTrue(closed.get()) == 1;
  PyErr_Clear();
  if (gone) return {.gone = true};
  // Ctrl-C is for the main thread's own code: what must be told is told first.
  if (is_interrupt(error.get())) return {.interrupted = true};
  set_error(error.get());
  log_error("an event loop could not be told that requests are done");
  return {};
}

void Mailbox::drop_waiters() {
  std::vector<PyObject*> waiters;
  {
    const std::lock_guard lock(mutex_);
    waiters.swap(waiters_);
    called_ = false;
  }
  for (PyObject* left : waiters) Py_DECREF(left);
}

PyObject* Mailbox::deliver(PyObject* capsule, PyObject*) {
  const auto self = *static_cast<std::shared_ptr<Mailbox>*>(PyCapsule_GetPointer(capsule, kCapsule));
  std::vector<PyObject*> waiters;
  {
    const std::lock_guard lock(self->mutex_);
    waiters.swap(self->waiters_);
    self->called_ = false;
  }
  for (PyObject* owned : waiters) {
    const Ref waiter = Ref::steal(owned);
    const Ref done = Ref::steal(PyObject_CallMethod(waiter.get(), "done", nullptr));
    if (done && done.get() == Py_False) Ref::steal(PyObject_CallMethod(waiter.get(), "set_result", "O", Py_None));
    if (PyErr_Occurred()) log_error("an event loop's future could not be told that a request is done");
  }
  Py_RETURN_NONE;
}

std::shared_ptr<Mailbox> mailbox_of(PyObject* object) {
  if (!Py_IS_TYPE(object, mailbox_type)) raise(PyExc_TypeError, "expected a Mailbox, got %s", Py_TYPE(object)->tp_name);
  return reinterpret_cast<MailboxObject*>(object)->mailbox;
}

PyObject* make_mailbox(PyObject*, PyObject* loop) {
  return guarded([&] {
    Ref weak = Ref::checked(PyWeakref_NewRef(loop, nullptr));
    auto* self = reinterpret_cast<MailboxObject*>(Ref::checked(mailbox_type->tp_alloc(mailbox_type, 0)).release());
    new (&self->mailbox) std::shared_ptr<Mailbox>(std::make_shared<Mailbox>(std::move(weak)));
    return reinterpret_cast<PyObject*>(self);
  });
}

void add_mailbox_type(PyObject* module) {
  mailbox_type = add_type<MailboxObject>(module, {.name = "pymoe._runtime.Mailbox",
                                                  .doc = "Tells an event loop that requests are done.",
                                                  .flags = Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                                  .dealloc = dealloc});
}

}  // namespace pymoe::bindings
