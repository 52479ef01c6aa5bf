#include "binding/memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>

#include <string>

#include "base/error.h"
#include "base/limits.h"
#include "binding/device_tensor.h"
#include "binding/held_bytes.h"
#include "binding/python.h"
#include "binding/tensor.h"
#include "engine/buffer_pool.h"

namespace nvme_ops {
namespace {

Ref call(PyObject* object, const char* method) {
  return checked(PyObject_CallMethod(object, method, nullptr));
}

// Returns whether memory is page-locked; asks torch only about memory that did not come from its plain allocator.
bool pinned_by_torch(PyObject* object, const c10::TensorImpl& tensor) {
  const c10::DeleterFnPtr deleter = deleter_of(tensor.storage());
  for (const c10::Allocator* plain : {c10::GetCPUAllocator(), c10::GetDefaultCPUAllocator()}) {
    if (deleter == plain->raw_deleter()) return false;
  }
  return PyObject_IsTrue(call(object, "is_pinned").get()) == 1;
}

void require_memory(const c10::TensorImpl& tensor, const std::string& argument) {
  if (tensor.layout() != c10::kStrided || tensor.is_meta() || !tensor.has_storage()) {
    raise(bad_argument(argument + " must be a dense, strided tensor with memory of its own"));
  }
}

// Returns the bytes of a contiguous tensor, checked against its storage, which may have been made smaller since.
std::uint64_t bytes_of(const c10::TensorImpl& tensor, const std::string& argument) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(tensor.numel()) * tensor.itemsize();
  const std::uint64_t start = static_cast<std::uint64_t>(tensor.storage_offset()) * tensor.itemsize();
  if (bytes > 0 && start + bytes > tensor.storage().nbytes()) {
    raise(bad_argument(argument + " reaches beyond the " + std::to_string(tensor.storage().nbytes()) +
                       " bytes of its storage"));
  }
  return bytes;
}

std::byte* data_of(const TensorPointer& tensor, Op op) {
  // Reading a file changes the tensor, so a copy-on-write storage must be copied; writing does not.
  const void* data = op == Op::Read ? tensor->mutable_data() : tensor->data();
  return static_cast<std::byte*>(const_cast<void*>(data));
}

Memory memory_of_tensor(PyObject* object, Op op, const std::string& argument) {
  const TensorPointer tensor = implementation(object);
  require_memory(*tensor, argument);
  const bool lazy =
      tensor->key_set().has(c10::DispatchKey::Conjugate) || tensor->key_set().has(c10::DispatchKey::Negative);
  if (lazy || !tensor->is_contiguous()) {
    if (op == Op::Read) {
      raise(bad_argument(argument + " must be contiguous to be read into: read into a contiguous tensor and copy it"));
    }
    return memory_of_tensor(call(call(call(object, "resolve_conj").get(), "resolve_neg").get(), "contiguous").get(), op,
                            argument);
  }
  Memory memory;
  bool pooled = false;
  memory.bytes = bytes_of(*tensor, argument);
  if (op == Op::Read && !tensor->is_inference()) tensor->bump_version();  // autograd must notice the change
  if (memory.bytes > 0 && !tensor->is_cpu()) {
    memory.device = device_tensor(tensor.get());
  } else if (memory.bytes > 0) {
    memory.data = data_of(tensor, op);
    if (memory.data == nullptr) raise(bad_argument(argument + " has no memory"));
    const BufferPool& pool = BufferPool::instance();
    pooled = pool.contains(memory.data, memory.bytes) && !torch_manages(tensor->storage());
    memory.fast =
        memory.bytes > kInPlaceBytes && (pool.huge(memory.data, memory.bytes) || pinned_by_torch(object, *tensor));
  }
  if (memory.bytes > 0) memory.keep = hold_bytes(tensor->storage(), object, pooled);
  return memory;
}

Memory memory_of_buffer(PyObject* object, Op op, const std::string& argument) {
  auto view = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(object, view.get(), op == Op::Read ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0) {
    PyErr_Clear();
    raise_type_error(argument + " must be a torch.Tensor or a contiguous" + (op == Op::Read ? ", writable" : "") +
                     " buffer, not " + type_name(object));
  }
  Memory memory;
  memory.data = static_cast<std::byte*>(view->buf);
  memory.bytes = static_cast<std::uint64_t>(view->len);
  memory.fast = memory.bytes > kInPlaceBytes && BufferPool::instance().huge(memory.data, memory.bytes);
  memory.keep = std::shared_ptr<void>(view.release(), [](void* held) {
    PyBuffer_Release(static_cast<Py_buffer*>(held));
    delete static_cast<Py_buffer*>(held);
  });
  return memory;
}

// Returns the rows of contiguous memory, without making a tensor of each.
std::vector<Memory> rows_of(PyObject* object, Op op, const std::string& argument) {
  const TensorPointer tensor = implementation(object);
  if (tensor->dim() == 0)
    raise(bad_argument(argument + " must have at least one dimension: one tensor for each request"));
  const Memory whole = memory_of_tensor(object, op, argument);
  if (whole.device) raise(bad_argument(argument + " on an accelerator must be a list of tensors"));
  const auto count = static_cast<std::uint64_t>(tensor->size(0));
  std::vector<Memory> rows(count, whole);
  for (std::uint64_t i = 0; i < count; ++i) {
    rows[i].bytes = whole.bytes / count;
    rows[i].data = whole.data + i * rows[i].bytes;
  }
  return rows;
}

}  // namespace

Memory memory_of(PyObject* object, Op op, const char* argument) {
  return (is_tensor(object) ? memory_of_tensor : memory_of_buffer)(object, op, argument);
}

std::vector<Memory> memories_of(PyObject* objects, Op op, const char* argument) {
  if (is_tensor(objects)) return rows_of(objects, op, argument);
  // Copied to a tuple: code called below may change the list.
  const Items list(objects, std::string(argument) + " must be a sequence of tensors");
  std::vector<Memory> memories;
  memories.reserve(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) memories.push_back(memory_of(list[i], op, argument));
  return memories;
}

Memory device_memory_of(PyObject* object, const char* argument) {
  const std::string name = argument;
  if (!is_tensor(object)) raise_type_error(name + " must be a torch.Tensor, not " + type_name(object));
  const TensorPointer tensor = implementation(object);
  require_memory(*tensor, name);
  if (tensor->is_cpu()) raise(bad_argument(name + " must be a tensor on an accelerator, not on the CPU"));
  if (!tensor->is_contiguous()) raise(bad_argument(name + " must be contiguous"));
  Memory memory;
  memory.bytes = bytes_of(*tensor, name);
  memory.data = static_cast<std::byte*>(const_cast<void*>(tensor->data()));
  memory.keep = std::make_shared<c10::Storage>(tensor->storage());
  return memory;
}

bool in_pool(PyObject* object) {
  if (!is_tensor(object)) raise_type_error(std::string("buffer must be a torch.Tensor, not ") + type_name(object));
  const TensorPointer tensor = implementation(object);
  if (!tensor->is_cpu() || tensor->layout() != c10::kStrided || !tensor->has_storage()) return false;
  // A view lies inside its storage, whatever its strides.
  const c10::Storage& storage = tensor->storage();
  return BufferPool::instance().contains(static_cast<const std::byte*>(storage.data()), storage.nbytes());
}

}  // namespace nvme_ops
