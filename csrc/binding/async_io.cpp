// The module `async_io`: the engine for Python, and the DeepNVMe interface that nvme_ops.handle builds on it.
#include <Python.h>

#include "backends/registry.h"
#include "binding/buffer.h"
#include "binding/engine_type.h"
#include "binding/memory.h"
#include "binding/operation.h"
#include "binding/python.h"
#include "engine/buffer_pool.h"

namespace nvme_ops {
namespace {

PyObject* list_backends(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    Ref answers = checked(PyDict_New());
    for (const Backend* backend : backends()) {
      const Probe& answer = probe(*backend);
      const Ref reason = answer.usable ? Ref::borrowed(Py_None) : checked(PyUnicode_FromString(answer.reason.c_str()));
      if (PyDict_SetItemString(answers.get(), backend->name, reason.get()) != 0) throw PythonError();
    }
    return answers.release();
  });
}

PyObject* in_pool(PyObject*, PyObject* tensor) {
  return guarded([&] { return PyBool_FromLong(nvme_ops::in_pool(tensor)); });
}

PyObject* pool_statistics(PyObject*, PyObject*) {
  const BufferPool::Statistics now = BufferPool::instance().statistics();
  return Py_BuildValue("{s:n,s:n}", "live_bytes", static_cast<Py_ssize_t>(now.live_bytes), "cached_bytes",
                       static_cast<Py_ssize_t>(now.cached_bytes));
}

PyObject* trim_pool(PyObject*, PyObject*) {
  {
    const WithoutGil released;
    BufferPool::instance().trim();
  }
  Py_RETURN_NONE;
}

PyObject* shut_down(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    shut_down_engines();
    stop_callbacks();
    Py_RETURN_NONE;
  });
}

PyMethodDef functions[] = {
    {"backends", list_backends, METH_NOARGS, "backends() -> dict[str, str | None]. Why each is not usable, or None."},
    {"in_pool", in_pool, METH_O, "in_pool(tensor) -> bool. Whether the tensor's memory came from the buffer pool."},
    {"pool_statistics", pool_statistics, METH_NOARGS, "pool_statistics() -> dict[str, int]. Bytes in use, bytes kept."},
    {"trim_pool", trim_pool, METH_NOARGS, "trim_pool(). Gives the pool's unused memory back to the system."},
    {"shut_down", shut_down, METH_NOARGS, "shut_down(). Finishes all work and ends all threads; runs at exit."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition{
    PyModuleDef_HEAD_INIT, "async_io", "Asynchronous tensor I/O.", -1, functions, nullptr, nullptr, nullptr, nullptr};

// Python's side of the op: the handle, the future and the functions of deepnvme's interface.
void add_interface(PyObject* module) {
  const Ref interface = checked(PyImport_ImportModule("nvme_ops.handle"));
  const Ref names = checked(PyObject_GetAttrString(interface.get(), "__all__"));
  const Ref list = checked(PySequence_Fast(names.get(), "nvme_ops.handle.__all__"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list.get()); ++i) {
    PyObject* const name = PySequence_Fast_GET_ITEM(list.get(), i);
    const Ref value = checked(PyObject_GetAttr(interface.get(), name));
    if (PyObject_SetAttr(module, name, value.get()) != 0) throw PythonError();
  }
}

void run_at_exit(PyObject* module) {
  const Ref atexit = checked(PyImport_ImportModule("atexit"));
  const Ref function = checked(PyObject_GetAttrString(module, "shut_down"));
  checked(PyObject_CallMethod(atexit.get(), "register", "O", function.get()));
}

}  // namespace
}  // namespace nvme_ops

PyMODINIT_FUNC PyInit_async_io() {
  using namespace nvme_ops;
  return guarded([]() -> PyObject* {
    Ref module = checked(PyModule_Create(&definition));
    find_tensor_class();
    if (!add_engine_type(module.get()) || !add_operation_type(module.get()) || !add_buffer_type(module.get())) {
      throw PythonError();
    }
    add_interface(module.get());
    run_at_exit(module.get());
    return module.release();
  });
}
