#include "binding/held_bytes.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/COW.h>

#include <map>
#include <mutex>
#include <utility>

#include "binding/python.h"

namespace nvme_ops {
namespace {

// Takes the place of a storage's DataPtr while transfers use the bytes. Storages are freed without the GIL, too.
struct HeldBytes {
  c10::DataPtr bytes;
  std::size_t transfers = 0;
  bool in_storage = true;
};

std::mutex& mutex() {
  static auto* const made = new std::mutex;
  return *made;
}

// The deleter: the storage releases its bytes.
void leave_storage(void* context) {
  auto* const held = static_cast<HeldBytes*>(context);
  {
    const std::lock_guard<std::mutex> lock(mutex());
    held->in_storage = false;
    if (held->transfers > 0) return;
  }
  delete held;
}

HeldBytes* held_bytes_of(const c10::Storage& storage) {
  const c10::DataPtr& bytes = storage.data_ptr();
  return bytes.get_deleter() == &leave_storage ? static_cast<HeldBytes*>(bytes.get_context()) : nullptr;
}

void end_transfer(const c10::Storage& storage, HeldBytes* held) {
  c10::DataPtr replaced;
  {
    const std::lock_guard<std::mutex> lock(mutex());
    if (--held->transfers > 0) return;
    if (held->in_storage && held_bytes_of(storage) == held) {  // restores the original DataPtr
      replaced = storage.set_data_ptr(std::move(held->bytes));
    }
    if (held->in_storage) return;  // it ends with its storage, be that `replaced` or another one
  }
  delete held;
}

std::shared_ptr<void> share_bytes(const c10::Storage& storage) {
  HeldBytes* held = held_bytes_of(storage);
  if (held == nullptr) {
    auto fresh = std::make_unique<HeldBytes>();
    c10::DataPtr ours(storage.data_ptr().get(), fresh.get(), &leave_storage, storage.device());
    held = fresh.release();
    held->bytes = storage.set_data_ptr(std::move(ours));
  }
  {
    const std::lock_guard<std::mutex> lock(mutex());
    ++held->transfers;
  }
  return {held, [storage](void* context) { end_transfer(storage, static_cast<HeldBytes*>(context)); }};
}

// Counts, for each storage, the transfers that forbid resizing it. Access with the GIL held.
std::map<c10::StorageImpl*, std::size_t>& forbidden() {
  static auto* const storages = new std::map<c10::StorageImpl*, std::size_t>;
  return *storages;
}

void allow_resizing(const c10::Storage& storage) {
  const auto found = forbidden().find(storage.unsafeGetStorageImpl());
  if (--found->second > 0) return;
  forbidden().erase(found);
  if (storage.allocator() != nullptr) storage.unsafeGetStorageImpl()->set_resizable(true);
}

std::shared_ptr<void> forbid_resizing(const c10::Storage& storage) {
  c10::StorageImpl* const key = storage.unsafeGetStorageImpl();
  if (forbidden().count(key) == 0 && !torch_manages(storage)) return std::make_shared<c10::Storage>(storage);
  ++forbidden()[key];
  key->set_resizable(false);
  return {key, [storage](void*) { allow_resizing(storage); }};
}

bool shared_between_processes(PyObject* tensor) {
  return PyObject_IsTrue(checked(PyObject_CallMethod(tensor, "is_shared", nullptr)).get()) == 1;
}

}  // namespace

std::shared_ptr<void> hold_bytes(const c10::Storage& storage, PyObject* tensor, bool pooled) {
  if (held_bytes_of(storage) != nullptr) return share_bytes(storage);
  const c10::DataPtr& bytes = storage.data_ptr();
  if (!storage.device().is_cpu() || c10::impl::cow::is_cow_data_ptr(bytes)) return forbid_resizing(storage);
  if (torch_manages(storage)) {
    // Other code inspects a DataPtr to learn what it is: only one straight from an allocator carries nothing else.
    const bool plain = bytes.get_deleter() == storage.allocator()->raw_deleter();
    return plain ? share_bytes(storage) : forbid_resizing(storage);
  }
  return pooled || !shared_between_processes(tensor) ? share_bytes(storage) : std::make_shared<c10::Storage>(storage);
}

bool torch_manages(const c10::Storage& storage) {
  return storage.resizable() && storage.allocator() != nullptr;
}

c10::DeleterFnPtr deleter_of(const c10::Storage& storage) {
  const HeldBytes* const held = held_bytes_of(storage);
  return held != nullptr ? held->bytes.get_deleter() : storage.data_ptr().get_deleter();
}

}  // namespace nvme_ops
