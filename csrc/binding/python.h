// The small part of Python's C API that the binding needs, made exception-safe. pybind11 would double the build time.
// All of it is in the limited API of 3.11, so that one prebuilt op serves every later Python.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <exception>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"

namespace nvme_ops {

// An owned reference. Use only with the GIL held.
class Ref {
public:
  Ref() = default;
  explicit Ref(PyObject* stolen) : object_(stolen) {}
  static Ref borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

private:
  PyObject* object_ = nullptr;
};

// A Python exception is set; unwinds to the caller.
class PythonError : public std::exception {};

inline Ref checked(PyObject* stolen) {
  if (stolen == nullptr) throw PythonError();
  return Ref(stolen);
}

// The items of any iterable, in a tuple, which nobody else can change.
class Items {
public:
  Items() = default;
  Items(PyObject* iterable, const std::string& otherwise) : tuple_(PySequence_Tuple(iterable)) {
    if (tuple_) return;
    if (PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_SetString(PyExc_TypeError, otherwise.c_str());
    throw PythonError();
  }
  std::size_t size() const { return static_cast<std::size_t>(PyTuple_Size(tuple_.get())); }
  PyObject* operator[](std::size_t index) const {
    return PyTuple_GetItem(tuple_.get(), static_cast<Py_ssize_t>(index));
  }

private:
  Ref tuple_;
};

// A list of what `convert`, which returns a Ref, makes of each value.
template <class Values, class Convert>
Ref list_of(const Values& values, Convert&& convert) {
  Ref list = checked(PyList_New(0));
  for (const auto& value : values) {
    const Ref item = convert(value);
    if (PyList_Append(list.get(), item.get()) != 0) throw PythonError();
  }
  return list;
}

// Sets an item of a dict.
inline void set_item(const Ref& dict, const char* key, const Ref& value) {
  if (PyDict_SetItemString(dict.get(), key, value.get()) != 0) throw PythonError();
}

// The name of an object's type, for messages.
std::string type_name(PyObject* object);

// Allocates an object of one of our types, all fields zero, and frees one.
inline Ref new_object(PyTypeObject* type) {
  return checked(PyType_GenericAlloc(type, 0));
}

inline void free_object(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

// An object that owns a C++ one.
template <class Value>
struct Holder {
  PyObject_HEAD Value* value;
};
template <class Value>
Value*& held(PyObject* self) {
  return reinterpret_cast<Holder<Value>*>(self)->value;
}
template <class Value>
PyObject* new_holder(PyTypeObject* type, std::unique_ptr<Value> value) {
  Ref self = new_object(type);
  held<Value>(self.get()) = value.release();
  return self.release();
}
template <class Value>
void free_holder(PyObject* self) {
  delete held<Value>(self);
  free_object(self);
}

// Makes a type and adds it to a module, for its life. Without `create` only `new_object` makes objects. May throw.
PyTypeObject* add_type(PyObject* module, const char* name, std::size_t bytes, const char* doc, newfunc create,
                       destructor deallocate, PyMethodDef* methods, std::initializer_list<PyType_Slot> more = {});

[[noreturn]] inline void raise_type_error(const std::string& message) {
  PyErr_SetString(PyExc_TypeError, message.c_str());
  throw PythonError();
}

// At exit Python unwinds threads that take the GIL. None of ours may be unwound: it sleeps until the process is gone.
template <class Take>
void take_gil(Take&& take) noexcept {
  try {
    take();
  } catch (...) {
    for (;;) ::pause();
  }
}

class WithoutGil {
public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    take_gil([this] { PyEval_RestoreThread(state_); });
  }

private:
  PyThreadState* state_;
};

class WithGil {
public:
  WithGil() {
    take_gil([this] { state_ = PyGILState_Ensure(); });
  }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;
  ~WithGil() { PyGILState_Release(state_); }

private:
  PyGILState_STATE state_ = PyGILState_LOCKED;
};

// Polled while the engine waits: true once a signal handler has raised. The exception stays set on this thread.
bool signal_raised();

// Makes the exception for a failure: OSError with errno and filename, EOFError, ValueError, MemoryError, RuntimeError.
Ref exception_of(const Failure& failure);
void set_error(const Failure& failure);

// Runs the body of a function that Python calls; a C++ exception becomes a Python exception.
template <class Body>
PyObject* guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (const PythonError&) {
  } catch (...) {
    set_error(current_failure());
  }
  return nullptr;
}

// The same for a table of methods, and for the one that makes an object.
template <PyObject* (*body)(PyObject* self, PyObject* arguments)>
PyObject* method(PyObject* self, PyObject* arguments) noexcept {
  return guarded([&] { return body(self, arguments); });
}
template <PyObject* (*body)(PyTypeObject* type, PyObject* arguments)>
PyObject* constructor(PyTypeObject* type, PyObject* arguments, PyObject*) noexcept {
  return guarded([&] { return body(type, arguments); });
}

// Parses arguments as PyArg_ParseTuple does; throws PythonError.
template <class... Targets>
void parse(PyObject* arguments, const char* format, Targets*... targets) {
  if (!PyArg_ParseTuple(arguments, format, targets...)) throw PythonError();
}

}  // namespace nvme_ops
