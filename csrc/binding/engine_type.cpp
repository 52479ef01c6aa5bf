#include "binding/engine_type.h"

#include <algorithm>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>

#include "backends/registry.h"
#include "base/limits.h"
#include "binding/memory.h"
#include "binding/operation.h"
#include "binding/python.h"
#include "engine/fork.h"
#include "engine/worker.h"

namespace nvme_ops {
namespace {

// Everything here is touched with the GIL held only, so a fork finds it whole.
class BoundEngine {
public:
  BoundEngine(EngineOptions options, Cache cache) : options_(std::move(options)), cache_(cache) { all().insert(this); }
  ~BoundEngine() {
    finish();
    all().erase(this);
  }

  static std::set<BoundEngine*>& all() {
    static auto* const engines = new std::set<BoundEngine*>;
    return *engines;
  }

  const EngineOptions& options() const { return options_; }
  Cache cache() const { return cache_; }
  const char* backend() { return running().engine->backend(); }

  std::uint64_t run(const Transfer& transfer, bool all_lanes) {
    const std::shared_ptr<Engine> engine = running().engine;
    const WithoutGil released;
    return transfer.execute(*engine, all_lanes, signal_raised);
  }

  std::shared_ptr<Operation> submit(Transfer transfer, std::vector<Memory> memories) {
    sweep();
    Running& current = running();
    if (transfer.plain()) {
      auto operation = std::make_shared<Operation>(transfer.job->outcome(), transfer.job, std::move(memories));
      live_.push_back(operation);
      current.engine->submit(transfer.job);
      return operation;
    }
    auto outcome = std::make_shared<Outcome>();
    auto operation = std::make_shared<Operation>(outcome, transfer.job, std::move(memories));
    current.service->start();
    live_.push_back(operation);
    current.service->post([engine = current.engine, outcome, transfer = std::move(transfer)]() mutable {
      std::uint64_t moved = 0;
      std::optional<Failure> failure;
      try {
        moved = transfer.execute(*engine, true, [] { return false; });
      } catch (const IoError& error) {
        failure = error.failure();
      } catch (const std::exception& error) {
        failure = Failure{Failure::Kind::Internal, 0, error.what(), {}};
      }
      transfer = {};  // its files are closed before anybody hears of the end
      failure ? outcome->fail(std::move(*failure)) : outcome->succeed(moved);
    });
    return operation;
  }

  // What has ended lets go of its memory, also where nobody holds its future.
  void sweep() {
    std::list<std::shared_ptr<Operation>> ended;  // letting go runs Python code, which may come back here
    for (auto operation = live_.begin(); operation != live_.end();) {
      const auto next = std::next(operation);
      if ((*operation)->outcome->done()) ended.splice(ended.end(), live_, operation);
      operation = next;
    }
  }

  std::size_t staging_bytes() { return running().engine->staging_bytes(); }

  // Waits for all work and ends the threads. A signal stops what has not been started.
  void finish() {
    const std::list<std::shared_ptr<Operation>> ending = std::exchange(live_, {});
    if (running_.engine && running_.generation != fork_generation()) return leave_to_parent();
    Running stopping = std::exchange(running_, {});
    const WithoutGil released;
    for (const auto& operation : ending) {
      while (!operation->outcome->wait_for(std::chrono::milliseconds(kInterruptMilliseconds))) {
        if (!signal_raised()) continue;
        const WithGil gil;
        PyErr_WriteUnraisable(nullptr);
        for (const auto& other : ending) other->job->fail(interrupted_failure());
      }
    }
    stopping = {};
  }

private:
  struct Running {
    std::shared_ptr<Engine> engine;
    std::unique_ptr<Worker> service;  // for what takes several steps: validation, accelerators
    unsigned long generation = 0;
  };

  // In a forked child the parent's engine is left alone, and a new one made at first use.
  Running& running() {
    if (running_.engine && running_.generation == fork_generation()) return running_;
    if (running_.engine) leave_to_parent();
    running_ = {std::make_shared<Engine>(options_), std::make_unique<Worker>(), fork_generation()};
    return running_;
  }

  void leave_to_parent() {
    live_.clear();
    running_.engine->abandon();
    new std::shared_ptr<Engine>(std::move(running_.engine));  // never destroyed: its threads are the parent's
    static_cast<void>(running_.service.release());
    running_ = {};
  }

  const EngineOptions options_;
  const Cache cache_;
  Running running_;
  std::list<std::shared_ptr<Operation>> live_;
};

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

// A file as the caller named it: a path (str, bytes or os.PathLike) or a descriptor.
struct FileName {
  std::string path;
  int fd = -1;

  bool operator<(const FileName& other) const { return std::tie(fd, path) < std::tie(other.fd, other.path); }

  std::shared_ptr<File> open(Op op, Cache cache) const {
    return fd >= 0 ? File::adopt(fd, op, cache) : File::open(path, op, cache);
  }
};

bool is_descriptor(PyObject* object) {
  return PyLong_Check(object) && !PyBool_Check(object);
}

FileName name_of(PyObject* object) {
  if (is_descriptor(object)) {
    int overflow = 0;
    const long fd = PyLong_AsLongAndOverflow(object, &overflow);
    if (overflow != 0 || fd < 0 || fd > INT32_MAX)
      raise(bad_argument("a file descriptor must lie between 0 and 2**31 - 1"));
    return {{}, static_cast<int>(fd)};
  }
  PyObject* encoded = nullptr;
  if (PyBool_Check(object) || PyUnicode_FSConverter(object, &encoded) == 0) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) throw PythonError();
    PyErr_Clear();
    raise_type_error(std::string("a file must be a path or a file descriptor, not ") + Py_TYPE(object)->tp_name);
  }
  const Ref owned(encoded);
  return {std::string(PyBytes_AS_STRING(encoded), static_cast<std::size_t>(PyBytes_GET_SIZE(encoded))), -1};
}

// Gathers what one call moves.
class TransferBuilder {
public:
  TransferBuilder(Op op, bool validate, bool whole) : transfer_{op, nullptr, {}, validate}, whole_(whole) {}

  void add(const Memory& memory, const std::shared_ptr<File>& file, std::uint64_t offset) {
    file->prepare(transfer_.op, offset, memory.bytes, whole_);
    if (memory.device) {
      transfer_.device.push_back({memory.device, file, offset, memory.bytes});
    } else if (memory.bytes > 0) {
      extents_.push_back({file, memory.data, memory.bytes, offset, memory.fast});
    }
  }

  Transfer take() {
    transfer_.job = std::make_shared<Job>(transfer_.op, std::move(extents_));
    return std::move(transfer_);
  }

private:
  Transfer transfer_;
  const bool whole_;
  std::vector<Extent> extents_;
};

struct SingleCall {
  int write, validate, all_lanes = 0;
  PyObject *memory, *file, *offset;

  explicit SingleCall(PyObject* arguments) {
    if (!PyArg_ParseTuple(arguments, "pOOOp|p", &write, &memory, &file, &offset, &validate, &all_lanes)) {
      throw PythonError();
    }
  }
  Op op() const { return write ? Op::Write : Op::Read; }

  Transfer transfer(BoundEngine& engine, const Memory& lent) const {
    // Without an offset the tensor is the whole file, which then ends with it. A descriptor's file is never cut.
    const FileName name = name_of(file);
    const bool whole = write && offset == Py_None && name.fd < 0;
    const std::uint64_t at = offset_of(offset);
    TransferBuilder builder(op(), validate != 0, whole);
    const WithoutGil released;
    builder.add(lent, name.open(op(), engine.cache()), at);
    return builder.take();
  }
};

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
    return wrap_operation(engine.submit(std::move(transfer), std::move(memories)));
  });
}

bool one_file(PyObject* files) {
  return is_descriptor(files) || PyUnicode_Check(files) || PyBytes_Check(files) ||
         PyObject_HasAttrString(files, "__fspath__") == 1;
}

// The entries of a sequence, or one for all.
Ref entries(PyObject* object, Py_ssize_t count, const std::string& name, const std::string& kind) {
  const std::string message = name + " must be " + kind;
  Ref list = checked(PySequence_Fast(object, message.c_str()));
  const Py_ssize_t length = PySequence_Fast_GET_SIZE(list.get());
  if (length != count) {
    raise(bad_argument(name + " has " + std::to_string(length) + " entries for " + std::to_string(count) + " tensors"));
  }
  return list;
}

PyObject* submit_many(PyObject* self, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    int write;
    PyObject *objects, *files, *offsets;
    if (!PyArg_ParseTuple(arguments, "pOOO", &write, &objects, &files, &offsets)) throw PythonError();
    const Op op = write ? Op::Write : Op::Read;
    BoundEngine& engine = engine_of(self);
    std::vector<Memory> memories = memories_of(objects, op, "tensors");
    const std::size_t count = memories.size();
    const bool single = one_file(files);
    const bool whole = offsets == Py_None;
    if (whole && single) raise(bad_argument("file_offsets is needed when all tensors share one file"));
    const auto length = static_cast<Py_ssize_t>(count);
    const Ref names = single ? Ref() : entries(files, length, "files", "a path, a descriptor, or a sequence of them");
    const Ref places = whole ? Ref() : entries(offsets, length, "file_offsets", "a sequence of integers");

    std::map<FileName, std::shared_ptr<File>> opened;  // a name that comes again is opened once
    std::vector<std::map<FileName, std::shared_ptr<File>>::iterator> file_of(count);
    std::vector<std::uint64_t> offset_at(count, 0);
    PyObject* previous = nullptr;
    for (std::size_t i = 0; i < count; ++i) {
      const auto index = static_cast<Py_ssize_t>(i);
      PyObject* const name = single ? files : PySequence_Fast_GET_ITEM(names.get(), index);
      file_of[i] = name == previous ? file_of[i - 1] : opened.try_emplace(name_of(name)).first;
      previous = name;
      if (!whole) offset_at[i] = offset_of(PySequence_Fast_GET_ITEM(places.get(), index));
    }
    TransferBuilder builder(op, false, whole && op == Op::Write);
    {
      const WithoutGil released;
      for (auto& [name, file] : opened) file = name.open(op, engine.cache());
      for (std::size_t i = 0; i < count; ++i) builder.add(memories[i], file_of[i]->second, offset_at[i]);
      opened.clear();  // the job closes them when it ends
    }
    return wrap_operation(engine.submit(builder.take(), std::move(memories)));
  });
}

PyObject* staging_bytes(PyObject* self, PyObject*) {
  return guarded([&] { return PyLong_FromSize_t(engine_of(self).staging_bytes()); });
}

PyObject* backend(PyObject* self, PyObject*) {
  return guarded([&] { return PyUnicode_FromString(engine_of(self).backend()); });
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
    PyObject* const self = type->tp_alloc(type, 0);
    if (self == nullptr) throw PythonError();
    reinterpret_cast<EngineObject*>(self)->engine = engine.release();
    return self;
  });
}

void engine_deallocate(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  delete reinterpret_cast<EngineObject*>(self)->engine;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef engine_methods[] = {
    {"run", run, METH_VARARGS,
     "run(write, memory, file, offset, validate, all_lanes=False) -> int. Blocks; bytes moved."},
    {"submit", submit, METH_VARARGS, "submit(write, memory, file, offset, validate) -> Operation. On all lanes."},
    {"submit_many", submit_many, METH_VARARGS,
     "submit_many(write, memories, files, offsets) -> Operation. On all lanes."},
    {"backend", backend, METH_NOARGS, "backend() -> str. The way to the kernel that was chosen."},
    {"staging_bytes", staging_bytes, METH_NOARGS, "staging_bytes() -> int. Staging memory held at the moment."},
    {"sweep", sweep, METH_NOARGS, "sweep(). Lets go of the memory of what has ended."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot engine_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(engine_create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(engine_deallocate)},
    {Py_tp_methods, engine_methods},
    {Py_tp_doc,
     const_cast<char*>("Engine(block_size, queue_depth, single_submit, overlap_events, lanes, backend, cache).")},
    {0, nullptr}};

PyType_Spec engine_spec{"async_io.Engine", sizeof(EngineObject), 0, Py_TPFLAGS_DEFAULT, engine_slots};

}  // namespace

bool add_engine_type(PyObject* module) {
  const Ref type(PyType_FromSpec(&engine_spec));
  return type && PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type.get())) == 0;
}

void shut_down_engines() {
  const std::set<BoundEngine*> now = BoundEngine::all();
  for (BoundEngine* engine : now) {  // finishing lets other threads run, which may drop one
    if (BoundEngine::all().count(engine) != 0) engine->finish();
  }
}

}  // namespace nvme_ops
