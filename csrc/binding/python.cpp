#include "binding/python.h"

#include <vector>

namespace nvme_ops {

std::string type_name(PyObject* object) {
  const Ref name = checked(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
  const Ref encoded = checked(PyUnicode_AsUTF8String(name.get()));
  const char* const text = PyBytes_AsString(encoded.get());
  if (text == nullptr) throw PythonError();
  return text;
}

PyTypeObject* add_type(PyObject* module, const char* name, std::size_t bytes, const char* doc, newfunc create,
                       destructor deallocate, PyMethodDef* methods, std::initializer_list<PyType_Slot> more) {
  std::vector<PyType_Slot> slots(more);
  slots.push_back({Py_tp_dealloc, reinterpret_cast<void*>(deallocate)});
  slots.push_back({Py_tp_methods, methods});
  slots.push_back({Py_tp_doc, const_cast<char*>(doc)});
  if (create != nullptr) slots.push_back({Py_tp_new, reinterpret_cast<void*>(create)});
  slots.push_back({0, nullptr});
  const unsigned flags = Py_TPFLAGS_DEFAULT | (create == nullptr ? Py_TPFLAGS_DISALLOW_INSTANTIATION : 0);
  PyType_Spec spec{name, static_cast<int>(bytes), 0, flags, slots.data()};
  auto* const type = reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&spec)).release());
  if (PyModule_AddType(module, type) != 0) throw PythonError();
  return type;
}

bool signal_raised() {
  const WithGil gil;
  return PyErr_CheckSignals() != 0;
}

Ref exception_of(const Failure& failure) {
  const Ref message = checked(PyUnicode_DecodeFSDefault(failure.message.c_str()));
  PyObject* type = PyExc_RuntimeError;
  if (failure.kind == Failure::Kind::System || failure.kind == Failure::Kind::Mismatch) {
    const Ref path =
        failure.path.empty() ? Ref::borrowed(Py_None) : checked(PyUnicode_DecodeFSDefault(failure.path.c_str()));
    return checked(PyObject_CallFunction(PyExc_OSError, "iOO", failure.error, message.get(), path.get()));
  }
  if (failure.kind == Failure::Kind::EndOfFile) type = PyExc_EOFError;
  if (failure.kind == Failure::Kind::Argument) type = PyExc_ValueError;
  if (failure.kind == Failure::Kind::Memory) type = PyExc_MemoryError;
  if (failure.kind == Failure::Kind::Interrupted) type = PyExc_KeyboardInterrupt;
  return checked(PyObject_CallFunctionObjArgs(type, message.get(), nullptr));
}

void set_error(const Failure& failure) {
  if (failure.kind == Failure::Kind::Interrupted && PyErr_Occurred() != nullptr) return;  // the handler's own exception
  try {
    const Ref exception = exception_of(failure);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.get())), exception.get());
  } catch (const PythonError&) {
  }
}

}  // namespace nvme_ops
