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
    {"backends", method<list_backends>, METH_NOARGS, "Why each one is not usable; None if it is."},
    {"checksums", method<checksums>, METH_VARARGS, "The crc32c or crc32 of each buffer."},
    {"joined_checksum", method<joined_checksum>, METH_VARARGS, "Of both runs together; the second has `bytes`."},
    {"cached_pages", method<count_cached_pages>, METH_VARARGS,
     "Pages in the page cache, or None; 0 bytes: to the end."},
    {"expand", method<expand>, METH_VARARGS, "Fills `out` with the values of a packed matrix, or of its transpose."},
    {"multiply", method<multiply>, METH_VARARGS, "Fills `out` with each input's products with packed matrices."},
    {"quantize_states", method<quantize_states>, METH_VARARGS, "Fills numbers and scales with states, in blocks."},
    {"expand_states", method<expand_states>, METH_VARARGS, "Fills `out` with the states of numbers and scales."},
    {"round_states", method<round_states>, METH_VARARGS, "Fills `out` with states in bfloat16, rounded at random."},
    {"populate", method<populate>, METH_VARARGS, "Populates parts of 2 MiB that begin in [start, stop)."},
    {"in_pool", method<in_pool>, METH_O, "Whether the memory is from the buffer pool."},
    {"overlapping", method<overlapping>, METH_O, "Two whose elements share a storage's bytes, or None."},
    {"set_storage_offsets", method<set_storage_offsets>, METH_VARARGS, "Moves contiguous tensors in their storages."},
    {"set_parts", method<set_parts>, METH_VARARGS, "Gives each tensor its bytes of `memory` as a storage."},
    {"set_storages", method<set_storages>, METH_VARARGS, "Makes each tensor a view of its owner's storage."},
    {"deny_memory", method<deny_memory>, METH_VARARGS, "Lets every access to its storage's memory raise."},
    {"share_version", method<share_version>, METH_VARARGS, "The first, with the _version of the other from now on."},
    {"pool_statistics", method<pool_statistics>, METH_NOARGS, "Bytes in use and bytes cached."},
    {"endings", method<endings>, METH_NOARGS, "A counter of ended transfers and released memory."},
    {"note_ending", method<note_ending>, METH_VARARGS, "Counts memory as released; for weak references."},
    {"wait_for_ending", method<wait_for_ending>, METH_VARARGS, "Waits for another one; sweeps all engines."},
    {"trim_pool", method<trim_pool>, METH_VARARGS, "Returns unused memory to the system, but for `keep`."},
    {"pool_large_tensors", method<pool_large_tensors>, METH_NOARGS, "Lasts as long as the result; None: it cannot be."},
    {"shut_down", method<shut_down>, METH_NOARGS, "Finishes all operations and ends all threads."},
    {nullptr, nullptr, 0, nullptr}};

class BouncePath final : public DevicePath {
  void transfer(const DeviceTransfer& transfer) override {
    bounce(transfer);
    for (const DeviceExtent& extent : transfer.extents) account("bounce", "the only path of this op", extent.bytes);
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
