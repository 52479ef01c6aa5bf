#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "binding/module.h"
#include "binding/python.h"
#include "binding/tensor.h"

namespace nvme_ops {
namespace {

struct Area {
  c10::Device device;
  const std::byte* storage;
  const std::byte* begin;
  const std::byte* end;
  std::size_t index;

  bool operator<(const Area& other) const {
    const auto key = [](const Area& area) {
      return std::make_tuple(area.device.type(), area.device.index(), area.storage, area.begin, area.end, area.index);
    };
    return key(*this) < key(other);
  }
};

// Lets every access to the storage's memory raise an error, in torch's own words if this torch takes no message.
template <class Storage>
auto deny(Storage& storage, const char* message, int)
    -> decltype(storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string())) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}

template <class Storage>
void deny(Storage& storage, const char*, long) {
  storage.set_throw_on_mutable_data_ptr();
}

Items sequence(PyObject* objects, const char* name) {
  return {objects, std::string(name) + " must be a sequence"};
}

TensorPointer tensor_of(PyObject* object) {
  if (!is_tensor(object)) raise_type_error(std::string("a torch.Tensor is needed, not ") + type_name(object));
  return implementation(object);
}

Area area_of(const c10::TensorImpl& tensor, std::size_t index) {
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto* const storage = static_cast<const std::byte*>(tensor.storage().data());
  const auto bytes = static_cast<std::int64_t>(tensor.itemsize());
  const std::byte* const begin = storage + tensor.storage_offset() * bytes;
  return {tensor.device(), storage, begin, begin + (last + 1) * bytes, index};
}

std::vector<std::int64_t> integers(PyObject* object, const char* name) {
  const Items list = sequence(object, name);
  std::vector<std::int64_t> numbers(list.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = PyLong_AsLongLong(list[i]);
    if (numbers[i] == -1 && PyErr_Occurred()) throw PythonError();
  }
  return numbers;
}

void require_lengths(std::size_t count, std::initializer_list<std::size_t> lengths) {
  for (const std::size_t length : lengths) {
    if (length != count) raise(bad_argument("each tensor needs one of everything"));
  }
}

// Returns whether elements at these offsets lie within `bytes` of a storage; no number may overflow on the way.
bool fits(std::int64_t offset, const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
          std::size_t item, std::size_t bytes) {
  const auto room = static_cast<std::int64_t>(bytes / item);
  const auto negative = [](std::int64_t number) { return number < 0; };
  if (sizes.size() != strides.size() || offset < 0 || std::any_of(sizes.begin(), sizes.end(), negative) ||
      std::any_of(strides.begin(), strides.end(), negative)) {
    return false;
  }
  if (std::count(sizes.begin(), sizes.end(), 0) > 0) return offset <= room;
  std::int64_t last = offset, count = 1;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    std::int64_t reach;
    if (__builtin_mul_overflow(count, sizes[dim], &count) ||
        __builtin_mul_overflow(sizes[dim] - 1, strides[dim], &reach) || __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
  }
  return last < room;
}

}  // namespace

PyObject* overlapping(PyObject*, PyObject* objects) {
  const Items list = sequence(objects, "tensors");
  std::vector<Area> areas;
  areas.reserve(list.size());
  for (std::size_t index = 0; index < list.size(); ++index) {
    const TensorPointer tensor = tensor_of(list[index]);
    if (tensor->numel() == 0) continue;
    if (tensor->layout() != c10::kStrided) raise(bad_argument("tensors must be strided"));
    if (!tensor->has_storage() || tensor->storage().data() == nullptr) continue;
    areas.push_back(area_of(*tensor, index));
  }
  std::sort(areas.begin(), areas.end());
  // Among areas sorted by their start, one overlaps another only if one overlaps the next.
  for (std::size_t i = 1; i < areas.size(); ++i) {
    const Area &before = areas[i - 1], &area = areas[i];
    if (before.storage == area.storage && before.device == area.device && area.begin < before.end) {
      return Py_BuildValue("nn", static_cast<Py_ssize_t>(before.index), static_cast<Py_ssize_t>(area.index));
    }
  }
  Py_RETURN_NONE;
}

PyObject* set_storage_offsets(PyObject*, PyObject* arguments) {
  PyObject *objects, *numbers;
  parse(arguments, "OO", &objects, &numbers);
  const Items list = sequence(objects, "tensors");
  const std::vector<std::int64_t> offsets = integers(numbers, "offsets");
  require_lengths(list.size(), {offsets.size()});
  for (std::size_t index = 0; index < list.size(); ++index) {
    const TensorPointer tensor = tensor_of(list[index]);
    const std::int64_t offset = offsets[index];
    const auto room = static_cast<std::int64_t>(tensor->storage().nbytes() / tensor->itemsize()) - tensor->numel();
    if (!tensor->is_contiguous() || offset < 0 || offset > room) {
      raise(bad_argument("tensor " + std::to_string(index) + " does not fit its storage there"));
    }
    tensor->set_allow_tensor_metadata_change(true);  // as for any new tensor, but not for Tensor.data
    tensor->set_storage_offset(offset);
  }
  Py_RETURN_NONE;
}

PyObject* set_parts(PyObject*, PyObject* arguments) {
  PyObject *objects, *memory, *places, *lengths;
  parse(arguments, "OOOO", &objects, &memory, &places, &lengths);
  const Items list = sequence(objects, "tensors");
  const c10::Storage whole = tensor_of(memory)->storage();
  const std::vector<std::int64_t> begins = integers(places, "places"), sizes = integers(lengths, "lengths");
  require_lengths(list.size(), {begins.size(), sizes.size()});
  const auto room = static_cast<std::int64_t>(whole.nbytes());
  for (std::size_t index = 0; index < list.size(); ++index) {
    const std::int64_t begin = begins[index], size = sizes[index];
    if (begin < 0 || size < 0 || begin > room || size > room - begin) {
      raise(bad_argument("part " + std::to_string(index) + " lies beyond the memory"));
    }
    auto keep = std::make_unique<c10::Storage>(whole);
    c10::DataPtr data(
        static_cast<std::byte*>(whole.mutable_data()) + begin, keep.get(),
        [](void* context) { delete static_cast<c10::Storage*>(context); }, whole.device());
    static_cast<void>(keep.release());
    c10::Storage part(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                            static_cast<std::size_t>(size), std::move(data),
                                                            whole.allocator(), /*resizable=*/false));
    const TensorPointer tensor = tensor_of(list[index]);
    tensor->set_allow_tensor_metadata_change(true);
    tensor->set_storage_keep_dtype(std::move(part));
    const std::int64_t elements = size / static_cast<std::int64_t>(tensor->itemsize()), step = 1;
    tensor->set_sizes_and_strides(c10::IntArrayRef(elements), c10::IntArrayRef(step), 0);
  }
  Py_RETURN_NONE;
}

PyObject* set_storages(PyObject*, PyObject* arguments) {
  PyObject *objects, *owners, *numbers, *shapes, *steps;
  parse(arguments, "OOOOO", &objects, &owners, &numbers, &shapes, &steps);
  const Items list = sequence(objects, "tensors"), from = sequence(owners, "owners"), sizes = sequence(shapes, "sizes"),
              strides = sequence(steps, "strides");
  const std::vector<std::int64_t> offsets = integers(numbers, "offsets");
  require_lengths(list.size(), {offsets.size(), from.size(), sizes.size(), strides.size()});
  for (std::size_t index = 0; index < list.size(); ++index) {
    const TensorPointer tensor = tensor_of(list[index]), owner = tensor_of(from[index]);
    const std::vector<std::int64_t> size = integers(sizes[index], "a size"),
                                    stride = integers(strides[index], "a stride");
    const std::int64_t offset = offsets[index];
    const c10::Storage& storage = owner->storage();
    if (tensor->device() != owner->device()) raise(bad_argument("tensor and storage lie on two devices"));
    if (!fits(offset, size, stride, tensor->itemsize(), storage.nbytes())) {
      raise(bad_argument("tensor " + std::to_string(index) + " reaches beyond its storage"));
    }
    tensor->set_allow_tensor_metadata_change(true);
    tensor->set_storage_keep_dtype(storage);
    tensor->set_sizes_and_strides(size, stride, offset);
  }
  Py_RETURN_NONE;
}

PyObject* deny_memory(PyObject*, PyObject* arguments) {
  PyObject* object;
  const char* message;
  parse(arguments, "Os", &object, &message);
  deny(*tensor_of(object)->storage().unsafeGetStorageImpl(), message, 0);
  Py_RETURN_NONE;
}

PyObject* share_version(PyObject*, PyObject* arguments) {
  PyObject *object, *from;
  parse(arguments, "OO", &object, &from);
  tensor_of(object)->set_version_counter(tensor_of(from)->version_counter());
  return Py_NewRef(object);
}

}  // namespace nvme_ops
