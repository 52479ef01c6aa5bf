#include "binding/transfer_builder.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "binding/file_name.h"
#include "binding/python.h"
#include "engine/population.h"
#include "engine/spans.h"

namespace nvme_ops {
namespace {

std::uint64_t offset_of(PyObject* object) {
  if (object == Py_None) return 0;
  const Ref index = checked(PyNumber_Index(object));
  const long long offset = PyLong_AsLongLong(index.get());
  if (offset == -1 && PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) throw PythonError();
    PyErr_Clear();
    raise(bad_argument("file_offset must lie between 0 and 2**63 - 1"));
  }
  if (offset < 0) raise(bad_argument("file_offset must not be negative: " + std::to_string(offset)));
  return static_cast<std::uint64_t>(offset);
}

// Gathers what one call moves.
class TransferBuilder {
public:
  TransferBuilder(const TransferKind& kind, bool whole)
      : transfer_{kind.op, nullptr, {}, kind.validate, kind.priority}, tool_(kind.tool), whole_(whole) {}

  void add(const Memory& memory, const std::shared_ptr<SharedFile>& file, std::uint64_t offset) {
    check_range(offset, memory.bytes);
    if (memory.device) {
      transfer_.device.push_back({memory.device, file, offset, memory.bytes, whole_});
      return;
    }
    if (transfer_.op == Op::Read && memory.bytes >= kHugePage) populate(memory);
    if (whole_ || !joins(memory, file, offset)) {
      end_run();
      extents_.push_back({file, memory.data, memory.bytes, offset, memory.fast, whole_});
    } else {
      // What lies in one run of the file is moved as one, however small or misaligned its parts.
      Extent& run = extents_.back();
      if (!spans_) {
        spans_ = std::make_shared<Spans>();
        spans_->add({run.memory, run.bytes});
      }
      spans_->add({memory.data, memory.bytes});
      run.bytes += memory.bytes;
    }
  }

  Transfer take() {
    end_run();
    transfer_.job = std::make_shared<Job>(transfer_.op, std::move(extents_), transfer_.priority, tool_);
    if (population_ && !population_->empty()) transfer_.job->await(Population::start(std::move(population_)));
    return std::move(transfer_);
  }

private:
  void populate(const Memory& memory) {
    if (!population_) population_ = std::make_shared<Population>();
    population_->add(memory.data, memory.bytes);
  }

  // Large parts in fast memory are better off by themselves: they are moved in place.
  bool joins(const Memory& memory, const std::shared_ptr<SharedFile>& file, std::uint64_t offset) const {
    if (extents_.empty()) return false;
    const Extent& run = extents_.back();
    const bool in_place = run.fast_memory && memory.fast && !spans_;
    return run.file == file && run.offset + run.bytes == offset && !in_place;
  }

  void end_run() {
    if (spans_) extents_.back().spans = std::move(spans_);
    spans_ = nullptr;
  }

  Transfer transfer_;
  const Tool tool_;
  const bool whole_;
  std::vector<Extent> extents_;
  std::shared_ptr<Population> population_;
  std::shared_ptr<Spans> spans_;  // of the last extent, while it grows
};

// One entry for each of `count` tensors.
Items entries(PyObject* object, std::size_t count, const std::string& name, const std::string& kind) {
  Items items(object, name + " must be " + kind);
  if (items.size() != count) {
    raise(bad_argument(name + " has " + std::to_string(items.size()) + " entries for " + std::to_string(count) +
                       " tensors"));
  }
  return items;
}

// What one call moves, file by file: each is open only while it is worked on.
class ByFile {
public:
  explicit ByFile(std::size_t count) { places_.reserve(count); }

  // `file` is the one just added when it is the same object.
  void add(PyObject* file, std::uint64_t offset) {
    if (file != previous_) {
      const auto [known, fresh] = numbers_.try_emplace(FileName(file), numbers_.size());
      if (fresh) names_.push_back(&known->first);
      grouped_ = grouped_ && fresh;
      number_ = known->second;
      previous_ = file;
    }
    places_.push_back({number_, places_.size(), offset});
  }

  Transfer transfer(TransferBuilder& builder, const std::vector<Memory>& memories, Op op, Cache cache) {
    if (!grouped_) {
      std::stable_sort(places_.begin(), places_.end(),
                       [](const Place& one, const Place& other) { return one.file < other.file; });
    }
    std::shared_ptr<SharedFile> file;
    std::size_t opened = 0;
    for (const Place& place : places_) {
      if (place.file == opened) file = names_[opened++]->share(op, cache);
      builder.add(memories[place.memory], file, place.offset);
    }
    return builder.take();
  }

private:
  struct Place {
    std::size_t file, memory;
    std::uint64_t offset;
  };

  std::map<FileName, std::size_t> numbers_;  // in the order of their first appearance
  std::vector<const FileName*> names_;
  std::vector<Place> places_;
  PyObject* previous_ = nullptr;
  std::size_t number_ = 0;
  bool grouped_ = true;
};

}  // namespace

Priority priority_of(PyObject* priority) {
  const long number = priority ? PyLong_AsLong(priority) : 0;
  if (number == -1 && PyErr_Occurred()) {
    PyErr_Format(PyExc_TypeError, "priority must be one of nvme_ops.Priority, such as Priority.PREFETCH, not %R",
                 priority);
    throw PythonError();
  }
  if (number < 0 || number >= static_cast<int>(kPriorities)) {
    raise(bad_argument("priority must lie between 0 and " + std::to_string(kPriorities - 1) + ", not " +
                       std::to_string(number)));
  }
  return static_cast<Priority>(number);
}

Transfer build_transfer(const TransferKind& kind, const Memory& memory, PyObject* file, PyObject* offset) {
  // Without an offset the tensor is the whole file, which then ends with it. An open file is never cut.
  const FileName name(file);
  const bool whole = kind.op == Op::Write && offset == Py_None && !name.is_open();
  TransferBuilder builder(kind, whole);
  builder.add(memory, name.share(kind.op, kind.tool.cache), offset_of(offset));
  return builder.take();
}

Transfer build_transfer(const TransferKind& kind, const std::vector<Memory>& memories, PyObject* files,
                        PyObject* offsets) {
  const std::size_t count = memories.size();
  const bool single = is_file(files);
  const bool whole = offsets == Py_None;
  if (whole && single) raise(bad_argument("file_offsets is needed when all tensors share one file"));
  const Items names = single ? Items() : entries(files, count, "files", "a path, a descriptor, or a sequence of them");
  const Items places = whole ? Items() : entries(offsets, count, "file_offsets", "a sequence of integers");

  ByFile by_file(count);
  for (std::size_t i = 0; i < count; ++i) {
    by_file.add(single ? files : names[i], whole ? 0 : offset_of(places[i]));
  }
  TransferBuilder builder(kind, whole && kind.op == Op::Write);
  return by_file.transfer(builder, memories, kind.op, kind.tool.cache);
}

}  // namespace nvme_ops
