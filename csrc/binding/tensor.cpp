#include "binding/tensor.h"

#include "binding/python.h"

namespace nvme_ops {
namespace {

PyTypeObject* tensor_class = nullptr;
PyObject* implementation_address = nullptr;  // the descriptor of torch.Tensor._cdata; looking it up costs a microsecond
descrgetfunc get_address = nullptr;          // its getter

}  // namespace

void find_tensor_class() {
  const Ref torch = checked(PyImport_ImportModule("torch"));
  Ref type = checked(PyObject_GetAttrString(torch.get(), "Tensor"));
  if (PyObject_IsInstance(type.get(), reinterpret_cast<PyObject*>(&PyType_Type)) != 1) {
    raise_type_error("torch.Tensor is not a class");
  }
  tensor_class = reinterpret_cast<PyTypeObject*>(type.release());
  Ref address = checked(PyObject_GetAttrString(reinterpret_cast<PyObject*>(tensor_class), "_cdata"));
  get_address = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(address.get()), Py_tp_descr_get));
  if (get_address == nullptr) raise_type_error("torch.Tensor._cdata is not a descriptor");
  implementation_address = address.release();
}

bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, tensor_class);
}

// Through torch's `_cdata`, the address of the TensorImpl.
TensorPointer implementation(PyObject* tensor) {
  PyTypeObject* const type = Py_TYPE(tensor);
  const Ref address = checked(get_address(implementation_address, tensor, reinterpret_cast<PyObject*>(type)));
  auto* const pointer = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address.get()));
  if (pointer == nullptr) throw PythonError();
  return TensorPointer::unsafe_reclaim_from_nonowning(pointer);
}

}  // namespace nvme_ops
