// The module `async_io`: the engine for Python, on which nvme_ops.io.handle builds the DeepNVMe interface.
#include <Python.h>

#include <string>
#include <vector>

#include "backends/registry.h"
#include "base/crc.h"
#include "base/error.h"
#include "binding/device_path.h"
#include "binding/memory.h"
#include "binding/module.h"
#include "binding/python.h"
#include "engine/buffer_pool.h"
#include "engine/file.h"
#include "engine/population.h"

namespace nvme_ops {
namespace {

PyObject* list_backends(PyObject*, PyObject*) {
  Ref answers = checked(PyDict_New());
  for (const Backend* backend : backends()) {
    const Probe& answer = probe(*backend);
    const Ref reason = answer.usable ? Ref::borrowed(Py_None) : checked(PyUnicode_FromString(answer.reason.c_str()));
    set_item(answers, backend->name, reason);
  }
  return answers.release();
}

PyObject* in_pool(PyObject*, PyObject* tensor) {
  return PyBool_FromLong(nvme_ops::in_pool(tensor));
}

PyObject* pool_statistics(PyObject*, PyObject*) {
  const BufferPool::Statistics now = BufferPool::instance().statistics();
  return Py_BuildValue("{s:n,s:n}", "live_bytes", static_cast<Py_ssize_t>(now.live_bytes), "cached_bytes",
                       static_cast<Py_ssize_t>(now.cached_bytes));
}

PyObject* trim_pool(PyObject*, PyObject* arguments) {
  unsigned long long keep = 0;
  parse(arguments, "|K", &keep);
  {
    const WithoutGil released;
    BufferPool::instance().trim(keep);
  }
  Py_RETURN_NONE;
}

Crc crc_named(const std::string& name) {
  if (name != "crc32c" && name != "crc32") raise(bad_argument("a checksum is 'crc32c' or 'crc32', not '" + name + "'"));
  return name == "crc32c" ? Crc::Crc32c : Crc::Crc32;
}

// Releases the GIL once for all of them.
PyObject* checksums(PyObject*, PyObject* arguments) {
  const char* name;
  PyObject* objects;
  parse(arguments, "sO", &name, &objects);
  const Crc kind = crc_named(name);
  const std::vector<Memory> memories = memories_of(objects, Op::Write, "buffers");
  for (const Memory& memory : memories) {
    if (memory.device) raise(bad_argument("buffers must lie in CPU memory"));
  }
  std::vector<std::uint32_t> values(memories.size());
  {
    const WithoutGil released;
    for (std::size_t i = 0; i < memories.size(); ++i) {
      values[i] = checksum(kind, memories[i].data, memories[i].bytes);
    }
  }
  return list_of(values, [](std::uint32_t number) { return checked(PyLong_FromUnsignedLong(number)); }).release();
}

PyObject* populate(PyObject*, PyObject* arguments) {
  PyObject* buffer;
  unsigned long long start, stop;
  parse(arguments, "OKK", &buffer, &start, &stop);
  const Memory memory = memory_of(buffer, Op::Read, "buffer");
  if (!memory.device && !memory.fast) {
    const WithoutGil released;
    populate_in_part(memory.data, memory.bytes, start, stop);
  }
  Py_RETURN_NONE;
}

PyObject* count_cached_pages(PyObject*, PyObject* arguments) {
  int fd;
  unsigned long long offset, bytes;
  parse(arguments, "iKK", &fd, &offset, &bytes);
  const auto pages = cached_pages(fd, offset, bytes);
  if (!pages) Py_RETURN_NONE;
  return PyLong_FromUnsignedLongLong(*pages);
}

PyObject* joined_checksum(PyObject*, PyObject* arguments) {
  const char* name;
  unsigned int first, second;
  unsigned long long bytes;
  parse(arguments, "sIIK", &name, &first, &second, &bytes);
  return PyLong_FromUnsignedLong(joined(crc_named(name), first, second, bytes));
}

PyMethodDef functions[] = {
    {"backends", method<list_backends>, METH_NOARGS,
     "backends() -> dict[str, str | None]. Why each one is not usable; None if it is."},
    {"checksums", method<checksums>, METH_VARARGS,
     "checksums(kind, buffers) -> list[int]. The crc32c or crc32 of each buffer."},
    {"joined_checksum", method<joined_checksum>, METH_VARARGS,
     "joined_checksum(kind, first, second, bytes) -> int. The checksum of both runs together; the second has `bytes`."},
    {"cached_pages", method<count_cached_pages>, METH_VARARGS,
     "cached_pages(fd, offset, bytes) -> int | None. Pages of the range in the page cache; 0 bytes mean to the end."},
    {"populate", method<populate>, METH_VARARGS,
     "populate(buffer, start, stop). For a buffer that is filled sequentially: populates the parts of 2 MiB that begin "
     "in [start, stop) and have no pages."},
    {"in_pool", method<in_pool>, METH_O, "in_pool(tensor) -> bool. Whether the memory is from the buffer pool."},
    {"overlapping", method<overlapping>, METH_O,
     "overlapping(tensors) -> tuple[int, int] | None. The indices of two of them whose elements share a storage's "
     "bytes."},
    {"set_storage_offsets", method<set_storage_offsets>, METH_VARARGS,
     "set_storage_offsets(tensors, offsets). Moves each contiguous tensor to another element of its storage."},
    {"set_parts", method<set_parts>, METH_VARARGS,
     "set_parts(tensors, memory, places, lengths). Gives each tensor a storage of its own: these bytes of `memory`."},
    {"set_storages", method<set_storages>, METH_VARARGS,
     "set_storages(tensors, owners, offsets, sizes, strides). Makes each tensor a view of its owner's storage."},
    {"deny_memory", method<deny_memory>, METH_VARARGS,
     "deny_memory(tensor, message). Lets every access to the memory of the tensor's storage raise RuntimeError."},
    {"share_version", method<share_version>, METH_VARARGS,
     "share_version(tensor, other) -> Tensor. Returns the first, which has the _version of the other from now on."},
    {"pool_statistics", method<pool_statistics>, METH_NOARGS,
     "pool_statistics() -> dict[str, int]. Bytes in use and bytes cached."},
    {"endings", method<endings>, METH_NOARGS, "endings() -> int. A counter of ended transfers and released memory."},
    {"note_ending", method<note_ending>, METH_VARARGS,
     "note_ending(*args). Counts memory as released and wakes those that wait; a callback of weak references."},
    {"wait_for_ending", method<wait_for_ending>, METH_VARARGS,
     "wait_for_ending(seen, seconds). Waits until endings() is not `seen`; releases the memory of ended transfers."},
    {"trim_pool", method<trim_pool>, METH_VARARGS,
     "trim_pool(keep=0). Returns the pool's unused memory to the system, except for so many bytes."},
    {"allocate_from_pool", method<allocate_from_pool>, METH_O,
     "allocate_from_pool(begin) -> bool. From the first `True` to the last `False`, torch gets memory for large "
     "tensors from the pool; False where its allocator cannot be replaced."},
    {"shut_down", method<shut_down>, METH_NOARGS,
     "shut_down(). Finishes all operations and ends all threads; runs at exit."},
    {nullptr, nullptr, 0, nullptr}};

class BouncePath final : public DevicePath {
  void transfer(Engine& engine, Op op, Priority priority, const Tool& tool, const std::vector<DeviceExtent>& extents,
                const Interrupted& interrupted) override {
    bounce(engine, op, priority, tool, extents, interrupted);
    for (const DeviceExtent& extent : extents) account("bounce", "the only path of this op", extent.bytes);
  }
};

}  // namespace

std::shared_ptr<DevicePath> make_device_path(const EngineOptions&) {
  return std::make_shared<BouncePath>();
}

}  // namespace nvme_ops

PyMODINIT_FUNC PyInit_async_io() {
  using namespace nvme_ops;
  return guarded([]() -> PyObject* {
    Ref module(make_module("async_io", "Asynchronous tensor I/O.", functions, "nvme_ops.io.handle"));
    add_buffer_type(module.get());
    return module.release();
  });
}
