#include "binding/python.h"

namespace nvme_ops {

std::string type_name(PyObject* object) {
  const Ref name = checked(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
  const Ref encoded = checked(PyUnicode_AsUTF8String(name.get()));
  const char* const text = PyBytes_AsString(encoded.get());
  if (text == nullptr) throw PythonError();
  return text;
}

PyTypeObject* add_type(PyObject* module, PyType_Spec* spec) {
  auto* const type = reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(spec)).release());
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
  switch (failure.kind) {
    case Failure::Kind::System:
    case Failure::Kind::Mismatch: {
      const Ref path =
          failure.path.empty() ? Ref::borrowed(Py_None) : checked(PyUnicode_DecodeFSDefault(failure.path.c_str()));
      return checked(PyObject_CallFunction(PyExc_OSError, "iOO", failure.error, message.get(), path.get()));
    }
    case Failure::Kind::EndOfFile:
      type = PyExc_EOFError;
      break;
    case Failure::Kind::Argument:
      type = PyExc_ValueError;
      break;
    case Failure::Kind::Memory:
      type = PyExc_MemoryError;
      break;
    case Failure::Kind::Interrupted:
      type = PyExc_KeyboardInterrupt;
      break;
    case Failure::Kind::Unavailable:
    case Failure::Kind::Internal:
      break;
  }
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
