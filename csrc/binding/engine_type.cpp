#include "binding/engine_type.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <string>

#include "backends/registry.h"
#include "base/limits.h"
#include "binding/bound_engine.h"
#include "binding/file_name.h"
#include "binding/memory.h"
#include "binding/operation.h"
#include "binding/pending.h"
#include "binding/python.h"
#include "engine/endings.h"
#include "engine/population.h"
#include "engine/spans.h"

namespace nvme_ops {
namespace {

struct EngineObject {
  PyObject_HEAD BoundEngine* engine;
};

BoundEngine& engine_of(PyObject* self) {
  return *reinterpret_cast<EngineObject*>(self)->engine;
}

std::uint64_t positive(long long value, const char* name) {
  if (value < 1) raise(bad_argument(std::string(name) + " must be at least 1, not " + std::to_string(value)));
  return static_cast<std::uint64_t>(value);
}

Cache cache_named(const std::string& name) {
  if (name == "auto") return Cache::Auto;
  if (name == "direct") return Cache::Direct;
  if (name == "buffered") return Cache::Buffered;
  raise(bad_argument("cache must be 'auto', 'direct' or 'buffered', not '" + name + "'"));
}

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
  TransferBuilder(Op op, bool validate, Priority priority, bool whole)
      : transfer_{op, nullptr, {}, validate, priority}, whole_(whole) {}

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
    transfer_.job = std::make_shared<Job>(transfer_.op, std::move(extents_), transfer_.priority);
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
  const bool whole_;
  std::vector<Extent> extents_;
  std::shared_ptr<Population> population_;
  std::shared_ptr<Spans> spans_;  // of the last extent, while it grows
};

Priority priority_of(int number) {
  if (number < 0 || number >= static_cast<int>(kPriorities)) {
    raise(bad_argument("priority must lie between 0 and " + std::to_string(kPriorities - 1) + ", not " +
                       std::to_string(number)));
  }
  return static_cast<Priority>(number);
}

struct SingleCall {
  int write, validate, all_lanes = 0, priority = 0;
  PyObject *memory, *file, *offset, *pending = Py_None;

  explicit SingleCall(PyObject* arguments) {
    if (!PyArg_ParseTuple(arguments, "pOOOp|piO", &write, &memory, &file, &offset, &validate, &all_lanes, &priority,
                          &pending)) {
      throw PythonError();
    }
  }
  Op op() const { return write ? Op::Write : Op::Read; }

  Transfer transfer(BoundEngine& engine, const Memory& lent) const {
    // Without an offset the tensor is the whole file, which then ends with it. An open file is never cut.
    const FileName name(file);
    const bool whole = write && offset == Py_None && !name.is_open();
    TransferBuilder builder(op(), validate != 0, priority_of(priority), whole);
    builder.add(lent, name.share(op(), engine.cache()), offset_of(offset));
    return builder.take();
  }
};

// As an object that Python waits for, and one of `pending`, unless that is None, from before it begins.
PyObject* submit_operation(BoundEngine& engine, Transfer transfer, std::vector<Memory> memories, PyObject* pending) {
  Ref object = new_operation();
  if (pending != Py_None) checked(PyObject_CallMethod(pending, "add", "O", object.get()));
  try {
    set_operation(object.get(), engine.submit(std::move(transfer), std::move(memories)));
  } catch (...) {
    if (pending != Py_None) remove_pending(pending, object.get());
    throw;
  }
  return object.release();
}

PyObject* run(PyObject* self, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    const SingleCall call(arguments);
    const Memory memory = memory_of(call.memory, call.op(), "buffer");
    BoundEngine& engine = engine_of(self);
    return PyLong_FromUnsignedLongLong(engine.run(call.transfer(engine, memory), call.all_lanes != 0));
  });
}

PyObject* submit(PyObject* self, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    const SingleCall call(arguments);
    Memory memory = memory_of(call.memory, call.op(), "buffer");
    BoundEngine& engine = engine_of(self);
    Transfer transfer = call.transfer(engine, memory);
    std::vector<Memory> memories;
    memories.push_back(std::move(memory));
    return submit_operation(engine, std::move(transfer), std::move(memories), call.pending);
  });
}

// One entry for each of `count` tensors.
Ref entries(PyObject* object, std::size_t count, const std::string& name, const std::string& kind) {
  Ref tuple = tuple_of(object, name + " must be " + kind);
  const auto length = static_cast<std::size_t>(PyTuple_Size(tuple.get()));
  if (length != count) {
    raise(bad_argument(name + " has " + std::to_string(length) + " entries for " + std::to_string(count) + " tensors"));
  }
  return tuple;
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

PyObject* submit_many(PyObject* self, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    int write, priority = 0;
    PyObject *objects, *files, *offsets;
    if (!PyArg_ParseTuple(arguments, "pOOO|i", &write, &objects, &files, &offsets, &priority)) throw PythonError();
    const Op op = write ? Op::Write : Op::Read;
    std::vector<Memory> memories = memories_of(objects, op, "tensors");
    const std::size_t count = memories.size();
    const bool single = is_file(files);
    const bool whole = offsets == Py_None;
    if (whole && single) raise(bad_argument("file_offsets is needed when all tensors share one file"));
    const Ref names = single ? Ref() : entries(files, count, "files", "a path, a descriptor, or a sequence of them");
    const Ref places = whole ? Ref() : entries(offsets, count, "file_offsets", "a sequence of integers");

    ByFile by_file(count);
    for (std::size_t i = 0; i < count; ++i) {
      const auto index = static_cast<Py_ssize_t>(i);
      by_file.add(single ? files : PyTuple_GetItem(names.get(), index),
                  whole ? 0 : offset_of(PyTuple_GetItem(places.get(), index)));
    }
    TransferBuilder builder(op, false, priority_of(priority), whole && op == Op::Write);
    Transfer transfer = by_file.transfer(builder, memories, op, engine_of(self).cache());
    return submit_operation(engine_of(self), std::move(transfer), std::move(memories), Py_None);
  });
}

PyObject* staging_bytes(PyObject* self, PyObject*) {
  return guarded([&] { return PyLong_FromSize_t(engine_of(self).staging_bytes()); });
}

PyObject* backend(PyObject* self, PyObject*) {
  return guarded([&] { return PyUnicode_FromString(engine_of(self).backend()); });
}

PyObject* paths(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const DevicePath::Statistics now = engine_of(self).paths();
    Ref uses = checked(PyDict_New());
    for (const auto& [name, use] : now.uses) {
      const Ref numbers =
          checked(Py_BuildValue("{s:K,s:K}", "transfers", static_cast<unsigned long long>(use.transfers), "bytes",
                                static_cast<unsigned long long>(use.bytes)));
      if (PyDict_SetItemString(uses.get(), name.c_str(), numbers.get()) != 0) throw PythonError();
    }
    return Py_BuildValue("{s:z,s:s,s:N}", "last", now.last.empty() ? nullptr : now.last.c_str(), "why", now.why.c_str(),
                         "uses", uses.release());
  });
}

PyObject* statistics(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const Statistics now = engine_of(self).statistics();
    const auto count = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "read_bytes", count(now.read_bytes), "written_bytes",
                         count(now.written_bytes), "staged_bytes", count(now.staged_bytes), "cached_bytes",
                         count(now.cached_bytes), "requests", count(now.requests), "in_flight_sum",
                         count(now.in_flight_sum), "in_flight_max", count(now.in_flight_max), "queued_nanoseconds",
                         count(now.queued_nanoseconds), "kernel_nanoseconds", count(now.kernel_nanoseconds));
  });
}

PyObject* sweep(PyObject* self, PyObject*) {
  engine_of(self).sweep();
  Py_RETURN_NONE;
}

PyObject* engine_create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    long long block_size, queue_depth, lanes;
    int single_submit, overlap_events;
    const char *backend_name, *cache;
    if (!PyArg_ParseTuple(arguments, "LLppLss", &block_size, &queue_depth, &single_submit, &overlap_events, &lanes,
                          &backend_name, &cache)) {
      throw PythonError();
    }
    EngineOptions options{{},
                          positive(block_size, "block_size"),
                          positive(queue_depth, "queue_depth"),
                          single_submit != 0,
                          overlap_events != 0,
                          positive(lanes, "intra_op_parallelism")};
    if (options.lanes > kMaxLanes) {
      raise(bad_argument("intra_op_parallelism must be at most " + std::to_string(kMaxLanes) + ", not " +
                         std::to_string(lanes)));
    }
    const Cache mode = cache_named(cache);
    options.backends = choose_backends(backend_name);
    auto engine = std::make_unique<BoundEngine>(std::move(options), mode);
    Ref self = new_object(type);
    reinterpret_cast<EngineObject*>(self.get())->engine = engine.release();
    return self.release();
  });
}

void engine_deallocate(PyObject* self) {
  delete reinterpret_cast<EngineObject*>(self)->engine;
  free_object(self);
}

PyMethodDef engine_methods[] = {
    {"run", run, METH_VARARGS,
     "run(op, memory, file, offset, validate, all_lanes=False, priority=0) -> int. Blocks; bytes moved."},
    {"submit", submit, METH_VARARGS,
     "submit(op, memory, file, offset, validate, True, priority=0, pending=None) -> Operation. On all lanes."},
    {"submit_many", submit_many, METH_VARARGS,
     "submit_many(op, memories, files, offsets, priority=0) -> Operation. On all lanes."},
    {"backend", backend, METH_NOARGS, "backend() -> str. The way to the kernel that was chosen."},
    {"staging_bytes", staging_bytes, METH_NOARGS, "staging_bytes() -> int. Staging memory held at the moment."},
    {"paths", paths, METH_NOARGS, "paths() -> dict. The ways that tensors on accelerators took, and why."},
    {"statistics", statistics, METH_NOARGS, "statistics() -> dict[str, int]. What the lanes have done so far."},
    {"sweep", sweep, METH_NOARGS, "sweep(). Lets go of the memory of what has ended."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot engine_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(engine_create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(engine_deallocate)},
    {Py_tp_methods, engine_methods},
    {Py_tp_doc,
     const_cast<char*>("Engine(block_size, queue_depth, single_submit, overlap_events, lanes, backend, cache).")},
    {0, nullptr}};

PyType_Spec engine_spec{"nvme_ops.Engine", sizeof(EngineObject), 0, Py_TPFLAGS_DEFAULT, engine_slots};

}  // namespace

bool add_engine_type(PyObject* module) {
  const Ref type(PyType_FromSpec(&engine_spec));
  return type && PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type.get())) == 0;
}

PyObject* endings(PyObject*, PyObject*) {
  return guarded([] { return PyLong_FromUnsignedLongLong(Endings::instance().count()); });
}

PyObject* note_ending(PyObject*, PyObject*) {
  Endings::instance().note();
  Py_RETURN_NONE;
}

PyObject* wait_for_ending(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    unsigned long long seen;
    double seconds;
    if (!PyArg_ParseTuple(arguments, "Kd", &seen, &seconds)) throw PythonError();
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::microseconds(static_cast<long>(std::min(seconds, 1e9) * 1e6));
    while (Endings::instance().count() == seen && Clock::now() < end) {
      {
        const WithoutGil released;
        const auto left = std::chrono::duration_cast<std::chrono::microseconds>(end - Clock::now());
        Endings::instance().wait(
            seen, std::min<std::chrono::microseconds>(left, std::chrono::milliseconds(kInterruptMilliseconds)));
      }
      if (PyErr_CheckSignals() != 0) throw PythonError();
    }
    const std::set<BoundEngine*> now = BoundEngine::all();
    for (BoundEngine* engine : now) {  // releasing memory runs Python code, which may drop one
      if (BoundEngine::all().count(engine) != 0) engine->sweep();
    }
    Py_RETURN_NONE;
  });
}

void shut_down_engines() {
  const std::set<BoundEngine*> now = BoundEngine::all();
  for (BoundEngine* engine : now) {  // finishing lets other threads run, which may drop one
    if (BoundEngine::all().count(engine) != 0) engine->finish();
  }
}

}  // namespace nvme_ops
