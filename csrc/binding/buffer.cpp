#include <Python.h>
#include <structmember.h>
#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <new>

#include "base/error.h"
#include "base/limits.h"
#include "binding/module.h"
#include "binding/python.h"
#include "engine/buffer_pool.h"
#include "engine/collapse.h"
#include "engine/population.h"

namespace nvme_ops {
namespace {

struct BufferObject {
  PyObject_HEAD std::byte* data;
  Py_ssize_t bytes;
  bool locked;
  std::shared_ptr<Collapse> collapse;
  PyObject* weak_references;
};

BufferObject* buffer_of(PyObject* self) {
  return reinterpret_cast<BufferObject*>(self);
}

PyObject* buffer_create(PyTypeObject* type, PyObject* arguments) {
  Py_ssize_t bytes;
  parse(arguments, "n", &bytes);
  if (bytes < 0) raise(bad_argument("bytes must not be negative: " + std::to_string(bytes)));
  std::byte* memory;
  {
    const WithoutGil released;
    memory = BufferPool::instance().allocate(static_cast<std::size_t>(bytes));
  }
  PyObject* const self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) {
    BufferPool::instance().release(memory);
    throw PythonError();
  }
  new (&buffer_of(self)->collapse) std::shared_ptr<Collapse>;
  buffer_of(self)->data = memory;
  buffer_of(self)->bytes = bytes;
  return self;
}

void buffer_deallocate(PyObject* self) {
  BufferObject* const buffer = buffer_of(self);
  if (buffer->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  {
    const WithoutGil released;
    if (buffer->collapse) buffer->collapse->stop();
    if (buffer->locked) ::munlock(buffer->data, static_cast<std::size_t>(buffer->bytes));
    BufferPool::instance().release(buffer->data);
  }
  buffer->collapse.~shared_ptr();
  free_object(self);
}

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  return PyBuffer_FillInfo(view, self, buffer_of(self)->data, buffer_of(self)->bytes, 0, flags);
}

// Populates every page and locks them where the system allows: marked beforehand, they are locked on the way.
PyObject* lock(PyObject* self, PyObject*) {
  BufferObject* const buffer = buffer_of(self);
  const auto bytes = static_cast<std::size_t>(buffer->bytes);
  {
    const WithoutGil released;
    buffer->locked = ::mlock2(buffer->data, bytes, MLOCK_ONFAULT) == 0;
    const bool small = populate_now(buffer->data, bytes);
    const bool populated = ::madvise(buffer->data, (bytes + 4095) / 4096 * 4096, kPopulateWrite) == 0;
    if (!populated) buffer->locked = ::mlock(buffer->data, bytes) == 0;  // on an older kernel this does both
    if (small && !buffer->collapse) buffer->collapse = Collapse::start(buffer->data, bytes);
  }
  return PyBool_FromLong(buffer->locked);
}

PyObject* unlock(PyObject* self, PyObject*) {
  BufferObject* const buffer = buffer_of(self);
  if (buffer->locked) ::munlock(buffer->data, static_cast<std::size_t>(buffer->bytes));
  buffer->locked = false;
  Py_RETURN_NONE;
}

PyMethodDef buffer_methods[] = {
    {"lock", method<lock>, METH_NOARGS, "Populates the pages and locks them; False if refused."},
    {"unlock", method<unlock>, METH_NOARGS, "Lets the pages be swapped out again."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef buffer_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(BufferObject, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

}  // namespace

void add_buffer_type(PyObject* module) {
  add_type(module, "async_io.Buffer", sizeof(BufferObject),
           "Buffer(bytes). Huge-page memory; returns to the pool when freed.", constructor<buffer_create>,
           buffer_deallocate, buffer_methods,
           {{Py_tp_members, buffer_members}, {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}});
}

}  // namespace nvme_ops
