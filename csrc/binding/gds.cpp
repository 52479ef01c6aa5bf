// The module `gds`: the engine with cuFile, and accelerator memory registered with cuFile.
#include <Python.h>

#include <string>
#include <utility>
#include <vector>

#include "backends/cufile_driver.h"
#include "binding/gds_pins.h"
#include "binding/memory.h"
#include "binding/module.h"
#include "binding/python.h"

namespace nvme_ops {
namespace {

PyObject* described(const CuFileDriver& driver) {
  return Py_BuildValue("{s:s,s:i,s:s,s:O}", "path", driver.api().path.c_str(), "version", driver.version(),
                       "why_not_direct", driver.why_not_direct().c_str(), "fake",
                       driver.api().fake ? Py_True : Py_False);
}

PyObject* open_driver(PyObject*, PyObject* objects) {
  const Items list(objects, "candidates must be a sequence of paths");
  std::vector<std::string> candidates;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const char* const path = PyUnicode_AsUTF8AndSize(list[i], nullptr);
    if (path == nullptr) throw PythonError();
    candidates.emplace_back(path);
  }
  const CuFileDriver* driver;
  {
    const WithoutGil released;
    driver = &CuFileDriver::open(candidates);
  }
  return described(*driver);
}

PyObject* pin(PyObject*, PyObject* tensor) {
  Memory memory = device_memory_of(tensor, "tensor");
  if (memory.bytes == 0) raise(bad_argument("tensor has no elements: there is nothing to pin"));
  Pins::instance().pin(std::move(memory), CuFileDriver::current());
  Py_RETURN_TRUE;
}

PyObject* unpin(PyObject*, PyObject* tensor) {
  const Memory memory = device_memory_of(tensor, "tensor");
  Memory kept;
  {
    const WithoutGil released;
    kept = Pins::instance().unpin(memory);
  }
  return PyBool_FromLong(kept.bytes > 0);
}

PyObject* is_pinned(PyObject*, PyObject* tensor) {
  const Memory memory = device_memory_of(tensor, "tensor");
  return PyBool_FromLong(Pins::instance().pinned(memory.data, memory.bytes) == Pins::Part::All);
}

PyObject* shut_down_all(PyObject* self, PyObject* none) {
  const Ref done(shut_down(self, none));
  if (CuFileDriver::current() != nullptr) Pins::instance().clear();
  {
    const WithoutGil released;
    CuFileDriver::close();
  }
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"open_driver", method<open_driver>, METH_O, "Opens cuFile, once; returns its properties."},
    {"pin", method<pin>, METH_O, "Registers a tensor's memory with cuFile, once."},
    {"unpin", method<unpin>, METH_O, "False unless exactly this memory was registered."},
    {"is_pinned", method<is_pinned>, METH_O, "Whether all of its memory is registered."},
    {"shut_down", method<shut_down_all>, METH_NOARGS, "Finishes and ends everything, closes cuFile."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace
}  // namespace nvme_ops

PyMODINIT_FUNC PyInit_gds() {
  using namespace nvme_ops;
  return guarded([] { return make_module("gds", "Tensors on a GPU through cuFile.", functions, "nvme_ops.io.gds"); });
}
