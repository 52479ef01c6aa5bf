// A torch.Tensor from C++, without the headers that unwrap one: they take 15 s to compile.
#pragma once

#include <Python.h>
#include <c10/core/TensorImpl.h>

namespace nvme_ops {

using TensorPointer = c10::intrusive_ptr<c10::TensorImpl>;

// Call once, when the module is loaded.
void find_tensor_class();

bool is_tensor(PyObject* object);

// Returns the TensorImpl of `tensor`, which must be a torch.Tensor. Throws PythonError.
TensorPointer implementation(PyObject* tensor);

}  // namespace nvme_ops
