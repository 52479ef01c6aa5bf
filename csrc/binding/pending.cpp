#include <vector>

#include "base/fork.h"
#include "binding/module.h"
#include "binding/python.h"

namespace nvme_ops {
namespace {

// Operations in the order they were submitted, as the keys of a dict. Native: no signal handler's exception can come
// between waiting for one, counting and removing it.
struct PendingObject {
  PyObject_HEAD PyObject* operations;
  unsigned long generation;
};

PyObject* operations_of(PyObject* self) {
  auto* const pending = reinterpret_cast<PendingObject*>(self);
  if (pending->generation != fork_generation()) {  // the operations are the parent's
    pending->generation = fork_generation();
    PyDict_Clear(pending->operations);
  }
  return pending->operations;
}

PyObject* pending_create(PyTypeObject* type, PyObject*) {
  Ref operations = checked(PyDict_New());
  Ref self = new_object(type);
  reinterpret_cast<PendingObject*>(self.get())->operations = operations.release();
  reinterpret_cast<PendingObject*>(self.get())->generation = fork_generation();
  return self.release();
}

void pending_deallocate(PyObject* self) {
  Py_CLEAR(reinterpret_cast<PendingObject*>(self)->operations);
  free_object(self);
}

Py_ssize_t length(PyObject* self) {
  return PyDict_Size(operations_of(self));
}

PyObject* add(PyObject* self, PyObject* operation) {
  if (PyDict_SetItem(operations_of(self), operation, Py_None) != 0) return nullptr;
  Py_RETURN_NONE;
}

PyObject* discard(PyObject* self, PyObject* operation) {
  if (PyDict_DelItem(operations_of(self), operation) != 0) {
    if (!PyErr_ExceptionMatches(PyExc_KeyError)) return nullptr;
    PyErr_Clear();
  }
  Py_RETURN_NONE;
}

bool truth(PyObject* operation, const char* method) {
  return PyObject_IsTrue(checked(PyObject_CallMethod(operation, method, nullptr)).get()) == 1;
}

// Returns the first exception, with all of them in `failures`, and in its notes from Python 3.11 on.
void raise_failures(PyObject* failures) {
  const Ref first = Ref::borrowed(PyList_GetItem(failures, 0));
  if (PyObject_SetAttrString(first.get(), "failures", failures) != 0) throw PythonError();
  for (Py_ssize_t i = 1; i < PyList_Size(failures) && PyObject_HasAttrString(first.get(), "add_note") == 1; ++i) {
    const Ref note = checked(PyUnicode_FromFormat("also failed: %S", PyList_GetItem(failures, i)));
    checked(PyObject_CallMethod(first.get(), "add_note", "O", note.get()));
  }
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(first.get())), first.get());
}

PyObject* wait(PyObject* self, PyObject*) {
  PyObject* const operations = operations_of(self);
  const Items seen(operations, "");
  for (std::size_t i = 0; i < seen.size(); ++i) {
    // Another thread is about to submit it: it was not submitted before this call.
    if (truth(seen[i], "submitted")) checked(PyObject_CallMethod(seen[i], "wait", "O", Py_None));
  }
  if (PyErr_CheckSignals() != 0) throw PythonError();
  // From here on no other code can run: this call counts exactly what no other thread's wait() has counted.
  const Ref failures = checked(PyList_New(0));
  std::vector<PyObject*> ended;
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (PyDict_Contains(operations, seen[i]) != 1 || !truth(seen[i], "done")) continue;
    ended.push_back(seen[i]);
    const Ref failure = checked(PyObject_CallMethod(seen[i], "exception", nullptr));
    if (failure.get() != Py_None && PyList_Append(failures.get(), failure.get()) != 0) throw PythonError();
  }
  Ref result = checked(PyLong_FromSize_t(ended.size()));
  if (PyList_Size(failures.get()) > 0) {
    raise_failures(failures.get());
    result = Ref();
  }
  for (PyObject* const operation : ended) remove_pending(self, operation);
  return result.release();
}

PyMethodDef pending_methods[] = {
    {"add", method<add>, METH_O, "Makes wait() wait for it."},
    {"discard", method<discard>, METH_O, "Removes one that was never submitted."},
    {"wait", method<wait>, METH_NOARGS, "Waits for all; how many, or their first failure."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void remove_pending(PyObject* pending, PyObject* operation) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  const Ref result(PyObject_CallMethod(pending, "discard", "O", operation));
  PyErr_Restore(type, value, traceback);
}

void add_pending_type(PyObject* module) {
  add_type(module, "nvme_ops.Pending", sizeof(PendingObject), "Pending(). Operations to wait for.",
           constructor<pending_create>, pending_deallocate, pending_methods,
           {{Py_mp_length, reinterpret_cast<void*>(length)}});
}

}  // namespace nvme_ops
