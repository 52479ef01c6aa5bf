#include "binding/async_io_tensors.h"

#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "binding/python.h"
#include "binding/tensor.h"

namespace nvme_ops {
namespace {

struct Area {
  c10::Device device;
  const std::byte* storage;
  const std::byte* begin;
  const std::byte* end;
  Py_ssize_t index;

  bool operator<(const Area& other) const {
    const auto key = [](const Area& area) {
      return std::make_tuple(area.device.type(), area.device.index(), area.storage, area.begin, area.end, area.index);
    };
    return key(*this) < key(other);
  }
};

Ref sequence(PyObject* objects, const char* name) {
  return tuple_of(objects, std::string(name) + " must be a sequence");
}

TensorPointer tensor_of(PyObject* tuple, Py_ssize_t index) {
  PyObject* const object = PyTuple_GetItem(tuple, index);
  if (!is_tensor(object)) raise_type_error(std::string("a torch.Tensor is needed, not ") + type_name(object));
  return implementation(object);
}

Area area_of(const c10::TensorImpl& tensor, Py_ssize_t index) {
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto* const storage = static_cast<const std::byte*>(tensor.storage().data());
  const auto bytes = static_cast<std::int64_t>(tensor.itemsize());
  const std::byte* const begin = storage + tensor.storage_offset() * bytes;
  return {tensor.device(), storage, begin, begin + (last + 1) * bytes, index};
}

}  // namespace

PyObject* overlapping(PyObject*, PyObject* objects) {
  return guarded([&]() -> PyObject* {
    const Ref list = sequence(objects, "tensors");
    const Py_ssize_t count = PyTuple_Size(list.get());
    std::vector<Area> areas;
    areas.reserve(static_cast<std::size_t>(count));
    for (Py_ssize_t index = 0; index < count; ++index) {
      const TensorPointer tensor = tensor_of(list.get(), index);
      if (tensor->numel() == 0) continue;
      if (tensor->layout() != c10::kStrided) raise(bad_argument("tensors must be strided"));
      if (!tensor->has_storage() || tensor->storage().data() == nullptr) continue;
      areas.push_back(area_of(*tensor, index));
    }
    std::sort(areas.begin(), areas.end());
    // Of areas in the order of their beginnings, one reaches into another only if one reaches into the next.
    for (std::size_t i = 1; i < areas.size(); ++i) {
      const Area &before = areas[i - 1], &area = areas[i];
      if (before.storage == area.storage && before.device == area.device && area.begin < before.end) {
        return Py_BuildValue("nn", before.index, area.index);
      }
    }
    Py_RETURN_NONE;
  });
}

PyObject* set_storage_offsets(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    PyObject *objects, *numbers;
    if (!PyArg_ParseTuple(arguments, "OO", &objects, &numbers)) throw PythonError();
    const Ref list = sequence(objects, "tensors"), offsets = sequence(numbers, "offsets");
    const Py_ssize_t count = PyTuple_Size(list.get());
    if (PyTuple_Size(offsets.get()) != count) raise(bad_argument("each tensor needs one offset"));
    for (Py_ssize_t index = 0; index < count; ++index) {
      const TensorPointer tensor = tensor_of(list.get(), index);
      const long long offset = PyLong_AsLongLong(PyTuple_GetItem(offsets.get(), index));
      if (offset == -1 && PyErr_Occurred()) throw PythonError();
      const auto room = static_cast<std::int64_t>(tensor->storage().nbytes() / tensor->itemsize()) - tensor->numel();
      if (!tensor->is_contiguous() || offset < 0 || offset > room) {
        raise(bad_argument("tensor " + std::to_string(index) + " does not fit its storage there"));
      }
      tensor->set_allow_tensor_metadata_change(true);  // as of any new tensor, but not of Tensor.data
      tensor->set_storage_offset(offset);
    }
    Py_RETURN_NONE;
  });
}

}  // namespace nvme_ops
