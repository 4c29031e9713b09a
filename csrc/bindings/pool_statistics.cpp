#include "bindings/pool_statistics.h"

namespace pymoe::bindings {
namespace {

void put(const Ref& dict, const char* name, const Ref& value) {
  if (PyDict_SetItemString(dict.get(), name, value.get()) != 0) throw ErrorSet();
}

Ref histogram(const runtime::Histogram& histogram) {
  const auto values = histogram.snapshot();
  Ref counts = Ref::checked(PyTuple_New(static_cast<Py_ssize_t>(values.counts.size())));
  for (size_t i = 0; i < values.counts.size(); ++i) {
    PyObject* count = Ref::checked(PyLong_FromUnsignedLongLong(values.counts[i])).release();
    PyTuple_SET_ITEM(counts.get(), static_cast<Py_ssize_t>(i), count);
  }
  return Ref::checked(Py_BuildValue("(NKK)", counts.release(), static_cast<unsigned long long>(values.sum),
                                    static_cast<unsigned long long>(values.max)));
}

}  // namespace

Ref snapshot(const runtime::PoolStatistics& s) {
  Ref dict = Ref::checked(PyDict_New());
  const std::pair<const char*, const runtime::Counter*> counters[] = {
      {"submitted", &s.submitted}, {"completed", &s.completed}, {"failed", &s.failed}, {"cancelled", &s.cancelled},
      {"expired", &s.expired},     {"rejected", &s.rejected},   {"queued", &s.queued}, {"queued_rows", &s.queued_rows},
      {"running", &s.running},     {"batches", &s.batches},     {"rows", &s.rows}};
  for (const auto& [name, counter] : counters) {
    put(dict, name, Ref::checked(PyLong_FromLongLong(counter->value())));
  }
  put(dict, "batch_rows", histogram(s.batch_rows));
  put(dict, "wait_ns", histogram(s.wait_ns));
  put(dict, "latency_ns", histogram(s.latency_ns));
  put(dict, "process_ns", histogram(s.process_ns));
  return dict;
}

}  // namespace pymoe::bindings
