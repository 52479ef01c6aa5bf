#include <algorithm>
#include <chrono>
#include <string>

#include "backends/registry.h"
#include "base/limits.h"
#include "binding/bound_engine.h"
#include "binding/memory.h"
#include "binding/module.h"
#include "binding/operation.h"
#include "binding/python.h"
#include "binding/transfer_builder.h"
#include "engine/endings.h"

namespace nvme_ops {
namespace {

BoundEngine& engine_of(PyObject* self) {
  return *held<BoundEngine>(self);
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

// The arguments of run() and submit(), and what is made of them.
struct SingleCall {
  SingleCall(PyObject* self, PyObject* arguments, bool waited) : engine(engine_of(self)) {
    int write, validate;
    PyObject *object, *file, *offset, *urgency = nullptr;
    parse(arguments, "pOOOp|pOO", &write, &object, &file, &offset, &validate, &all_lanes, &urgency, &pending);
    const Priority priority = priority_of(urgency);
    const Op op = write ? Op::Write : Op::Read;
    memory = memory_of(object, op, "buffer");
    // Transfers that others may delay, or that are read again to be compared, do not say what their tool is worth.
    sample = engine.sample(op, priority, &memory, 1, waited, validate == 0 && priority != Priority::Background);
    transfer = build_transfer({op, priority, engine.tool(sample), validate != 0}, memory, file, offset);
  }

  BoundEngine& engine;
  int all_lanes = 0;
  PyObject* pending = Py_None;
  Memory memory;
  Sample sample;
  Transfer transfer{};
};

// Submits a transfer; returns the object to wait for, which is in `pending`, unless that is None, before it begins.
PyObject* submit_operation(BoundEngine& engine, Transfer transfer, std::vector<Memory> memories, Sample sample,
                           PyObject* pending) {
  Ref object = new_operation();
  if (pending != Py_None) checked(PyObject_CallMethod(pending, "add", "O", object.get()));
  try {
    set_operation(object.get(), engine.submit(std::move(transfer), std::move(memories), std::move(sample)));
  } catch (...) {
    if (pending != Py_None) remove_pending(pending, object.get());
    throw;
  }
  return object.release();
}

PyObject* run(PyObject* self, PyObject* arguments) {
  SingleCall call(self, arguments, true);
  return PyLong_FromUnsignedLongLong(call.engine.run(call.transfer, call.all_lanes != 0, std::move(call.sample)));
}

PyObject* submit(PyObject* self, PyObject* arguments) {
  SingleCall call(self, arguments, false);
  std::vector<Memory> memories;
  memories.push_back(std::move(call.memory));
  return submit_operation(call.engine, std::move(call.transfer), std::move(memories), std::move(call.sample),
                          call.pending);
}

PyObject* submit_many(PyObject* self, PyObject* arguments) {
  int write;
  PyObject *objects, *files, *offsets, *urgency = nullptr, *pending = Py_None;
  parse(arguments, "pOOO|OO", &write, &objects, &files, &offsets, &urgency, &pending);
  const Priority priority = priority_of(urgency);
  const Op op = write ? Op::Write : Op::Read;
  std::vector<Memory> memories = memories_of(objects, op, "tensors");
  BoundEngine& engine = engine_of(self);
  Sample sample =
      engine.sample(op, priority, memories.data(), memories.size(), false, priority != Priority::Background);
  Transfer transfer = build_transfer({op, priority, engine.tool(sample), false}, memories, files, offsets);
  return submit_operation(engine, std::move(transfer), std::move(memories), std::move(sample), pending);
}

PyObject* staging_bytes(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(engine_of(self).engine().staging_bytes());
}

PyObject* backend(PyObject* self, PyObject*) {
  return PyUnicode_FromString(engine_of(self).engine().backend());
}

PyObject* paths(PyObject* self, PyObject*) {
  const DevicePath::Statistics now = engine_of(self).paths();
  Ref uses = checked(PyDict_New());
  for (const auto& [name, use] : now.uses) {
    const auto transfers = static_cast<unsigned long long>(use.transfers);
    const auto bytes = static_cast<unsigned long long>(use.bytes);
    set_item(uses, name.c_str(), checked(Py_BuildValue("{s:K,s:K}", "transfers", transfers, "bytes", bytes)));
  }
  return Py_BuildValue("{s:z,s:s,s:N}", "last", now.last.empty() ? nullptr : now.last.c_str(), "why", now.why.c_str(),
                       "uses", uses.release());
}

PyObject* statistics(PyObject* self, PyObject*) {
  Ref numbers = checked(PyDict_New());
  for (const auto& [name, value] : engine_of(self).engine().statistics()) {
    set_item(numbers, name.c_str(), checked(PyLong_FromUnsignedLongLong(value)));
  }
  return numbers.release();
}

PyObject* sweep(PyObject* self, PyObject*) {
  engine_of(self).sweep();
  Py_RETURN_NONE;
}

PyObject* engine_create(PyTypeObject* type, PyObject* arguments) {
  long long block_size, queue_depth, lanes;
  int single_submit, overlap_events;
  const char *backend_name, *cache;
  PyObject* experience = Py_None;
  parse(arguments, "LLppLss|O", &block_size, &queue_depth, &single_submit, &overlap_events, &lanes, &backend_name,
        &cache, &experience);
  const std::shared_ptr<Learner> learner = learner_of(experience);
  const bool automatic = lanes == 0;
  const std::uint64_t given = automatic ? kAutomaticLanes : positive(lanes, "intra_op_parallelism");
  EngineOptions options{{},
                        positive(block_size, "block_size"),
                        positive(queue_depth, "queue_depth"),
                        single_submit != 0,
                        overlap_events != 0,
                        std::max(given, learner ? learner->experience.bounds().lanes : 0),
                        automatic};
  if (options.lanes > kMaxLanes) {
    raise(bad_argument("intra_op_parallelism must be at most " + std::to_string(kMaxLanes) + ", not " +
                       std::to_string(lanes)));
  }
  const Cache mode = cache_named(cache);
  options.backends = choose_backends(backend_name);
  return new_holder(type, std::make_unique<BoundEngine>(std::move(options), mode, learner));
}

PyMethodDef engine_methods[] = {
    {"run", method<run>, METH_VARARGS, "Blocks; returns the bytes moved."},
    {"submit", method<submit>, METH_VARARGS, "On all lanes; returns an Operation."},
    {"submit_many", method<submit_many>, METH_VARARGS, "The same for many tensors."},
    {"backend", method<backend>, METH_NOARGS, "The backend in use."},
    {"staging_bytes", method<staging_bytes>, METH_NOARGS, "Staging memory held at the moment."},
    {"paths", method<paths>, METH_NOARGS, "The paths that tensors on accelerators took, and why."},
    {"statistics", method<statistics>, METH_NOARGS, "What the lanes have done so far."},
    {"sweep", method<sweep>, METH_NOARGS, "Releases the memory of transfers that have ended."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_engine_type(PyObject* module) {
  add_type(module, "nvme_ops.Engine", sizeof(Holder<BoundEngine>),
           "Engine(block_size, queue_depth, single_submit, overlap_events, lanes, backend, cache, experience=None).",
           constructor<engine_create>, free_holder<BoundEngine>, engine_methods);
}

PyObject* endings(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(Endings::instance().count());
}

PyObject* note_ending(PyObject*, PyObject*) {
  Endings::instance().note();
  Py_RETURN_NONE;
}

PyObject* wait_for_ending(PyObject*, PyObject* arguments) {
  unsigned long long seen;
  double seconds;
  parse(arguments, "Kd", &seen, &seconds);
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
  BoundEngine::for_each(&BoundEngine::sweep);
  Py_RETURN_NONE;
}

void shut_down_engines() {
  BoundEngine::for_each(&BoundEngine::finish);
}

}  // namespace nvme_ops
