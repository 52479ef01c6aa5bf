#include "binding/module.h"

#include "binding/experience_type.h"
#include "binding/open_file.h"
#include "binding/operation.h"
#include "binding/python.h"
#include "binding/tensor.h"

namespace nvme_ops {
namespace {

void add_interface(PyObject* module, const char* name) {
  const Ref interface = checked(PyImport_ImportModule(name));
  const Ref names = checked(PyObject_GetAttrString(interface.get(), "__all__"));
  const Items list(names.get(), "__all__ must be a sequence");
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Ref value = checked(PyObject_GetAttr(interface.get(), list[i]));
    if (PyObject_SetAttr(module, list[i], value.get()) != 0) throw PythonError();
  }
}

void run_at_exit(PyObject* module) {
  const Ref atexit = checked(PyImport_ImportModule("atexit"));
  const Ref function = checked(PyObject_GetAttrString(module, "shut_down"));
  checked(PyObject_CallMethod(atexit.get(), "register", "O", function.get()));
}

}  // namespace

PyObject* make_module(const char* name, const char* doc, PyMethodDef* functions, const char* interface) {
  static PyModuleDef definition{PyModuleDef_HEAD_INIT, name, doc, -1, functions, nullptr, nullptr, nullptr, nullptr};
  Ref module = checked(PyModule_Create(&definition));
  find_tensor_class();
  for (const auto add :
       {add_engine_type, add_operation_type, add_pending_type, add_open_file_type, add_experience_type}) {
    add(module.get());
  }
  add_interface(module.get(), interface);
  run_at_exit(module.get());
  return module.release();
}

PyObject* shut_down(PyObject*, PyObject*) {
  shut_down_engines();
  stop_callbacks();
  Py_RETURN_NONE;
}

}  // namespace nvme_ops
