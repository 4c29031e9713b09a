#include "bindings/mailbox.h"

#include <new>

#include "bindings/deferred.h"
#include "bindings/outcome.h"

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
  try {
    call_loop();
  } catch (const ErrorSet&) {
    // The loop is closed, or has gone: nobody waits any more.
    PyErr_Clear();
    std::vector<PyObject*> waiters;
    {
      const std::lock_guard lock(mutex_);
      waiters.swap(waiters_);
      called_ = false;
    }
    for (PyObject* left : waiters) Py_DECREF(left);
  }
}

void Mailbox::call_loop() {
  const Ref loop = Ref::checked(PyObject_CallNoArgs(loop_));
  if (loop.get() == Py_None) throw ErrorSet();
  const Ref capsule =
      Ref::checked(PyCapsule_New(new std::shared_ptr<Mailbox>(shared_from_this()), kCapsule, delete_capsule));
  const Ref function = Ref::checked(PyCFunction_New(&deliver_method, capsule.get()));
  Ref::checked(PyObject_CallMethod(loop.get(), "call_soon_threadsafe", "O", function.get()));
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
  PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("Tells an event loop that requests are done.")},
                         {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                         {0, nullptr}};
  PyType_Spec spec = {"pymoe._runtime.Mailbox", sizeof(MailboxObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  Ref type = Ref::checked(PyType_FromSpec(&spec));
  mailbox_type = reinterpret_cast<PyTypeObject*>(type.get());
  if (PyModule_AddObjectRef(module, "Mailbox", type.get()) != 0) throw ErrorSet();
  type.release();
}

}  // namespace pymoe::bindings
