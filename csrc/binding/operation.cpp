#include "binding/operation.h"

#include <errno.h>

#include <deque>
#include <system_error>
#include <utility>

#include "base/fork.h"
#include "base/limits.h"
#include "binding/device_tensor.h"
#include "engine/validate.h"
#include "engine/worker.h"

namespace nvme_ops {

std::uint64_t Transfer::execute(Engine& engine, DevicePath& path, bool all_lanes,
                                const Interrupted& interrupted) const {
  std::deque<FileHold> open;
  if (validate) {
    job->keep_extents();
    for (const Extent& extent : job->extents()) open.emplace_back(extent.file);
  }
  if (all_lanes) {
    engine.submit(job);
    wait(*job, interrupted);
  } else {
    engine.run(job, interrupted);
  }
  job->outcome()->raise_failure();
  execute_device(engine, path, interrupted);
  if (validate) nvme_ops::validate(engine, *job, interrupted);
  for (FileHold& hold : open) hold.end_after(op);
  std::uint64_t moved = job->outcome()->bytes();
  for (const DeviceExtent& extent : device) moved += extent.bytes;
  return moved;
}

void Transfer::execute_device(Engine& engine, DevicePath& path, const Interrupted& interrupted) const {
  if (device.empty()) return;
  path.transfer({engine, op, priority, job->tool(), device, interrupted});
  if (!validate) return;
  for (const DeviceExtent& extent : device) {
    FileHold hold(extent.file);
    const auto reader = reader_of(extent.file, op == Op::Write ? Cache::Direct : Cache::Buffered);
    {
      const FileHold reading(reader);
      compare(engine, *extent.tensor, reader, extent.offset, interrupted);
    }
    hold.end_after(op);
  }
}

Operation::Operation(std::shared_ptr<Outcome> result, std::shared_ptr<Job> moving, std::vector<Memory> lent,
                     Sample measured)
    : outcome(std::move(result)),
      job(std::move(moving)),
      memories(std::move(lent)),
      sample(std::move(measured)),
      generation(fork_generation()) {
  sample.follow(*outcome);
}

void Operation::end() {
  sample.end(*outcome, job->cached());
  const std::vector<Memory> ended = std::exchange(memories, {});  // releasing them may run code that calls this again
}

Operation::~Operation() {
  if (retrieved || generation != fork_generation() || !outcome->done() || !outcome->failure()) return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  set_error(*outcome->failure());
  PyErr_WriteUnraisable(nullptr);
  PyErr_Restore(type, value, traceback);
}

namespace {

// Returns the thread that runs Python callbacks, so that a slow one delays no transfer. A forked child starts its own.
Worker& callbacks() {
  return of_this_process<Worker>();
}

constexpr std::chrono::milliseconds kSlice(kInterruptMilliseconds);

struct OperationObject {
  PyObject_HEAD std::shared_ptr<Operation> operation;
};

Operation& operation_of(PyObject* self) {
  NVME_INVARIANT(reinterpret_cast<OperationObject*>(self)->operation);
  return *reinterpret_cast<OperationObject*>(self)->operation;
}

PyObject* submitted(PyObject* self, PyObject*) {
  return PyBool_FromLong(reinterpret_cast<OperationObject*>(self)->operation != nullptr);
}

void require_own_process(const Operation& operation) {
  if (!operation.outcome->done()) require_process(operation.generation);
}

// Releases the memory as soon as the result is known.
bool settled(Operation& operation) {
  if (!operation.outcome->done()) return false;
  operation.end();
  return true;
}

PyObject* done(PyObject* self, PyObject*) {
  return PyBool_FromLong(settled(operation_of(self)));
}

PyObject* wait_for(PyObject* self, PyObject* argument) {
  using Clock = std::chrono::steady_clock;
  Operation& operation = operation_of(self);
  require_own_process(operation);
  const bool for_ever = argument == Py_None;
  const double seconds = for_ever ? 0 : PyFloat_AsDouble(argument);
  if (PyErr_Occurred()) throw PythonError();
  if (seconds != seconds) raise(bad_argument("timeout must be a number of seconds, not nan"));
  const auto start = Clock::now();
  const auto keep = reinterpret_cast<OperationObject*>(self)->operation;
  while (!operation.outcome->done()) {
    const double left = for_ever ? 1 : seconds - std::chrono::duration<double>(Clock::now() - start).count();
    if (left <= 0) Py_RETURN_FALSE;
    {
      const WithoutGil released;
      const auto slice = std::chrono::microseconds(static_cast<long>(std::min(left, 1.0) * 1e6) + 1);
      operation.outcome->wait_for(std::min<std::chrono::microseconds>(slice, kSlice));
    }
    if (PyErr_CheckSignals() != 0) throw PythonError();
    require_own_process(operation);  // a handler may have forked
  }
  settled(operation);
  Py_RETURN_TRUE;
}

PyObject* request_cancel(PyObject* self, PyObject*) {
  Operation& operation = operation_of(self);
  operation.retrieved = true;  // a caller that cancels it does not care how it ends
  if (operation.generation == fork_generation() && !operation.outcome->done()) {
    operation.job->fail(system_failure(ECANCELED, "the transfer"));
  }
  Py_RETURN_NONE;
}

PyObject* failure(PyObject* self, PyObject*) {
  Operation& operation = operation_of(self);
  NVME_INVARIANT(settled(operation));
  operation.retrieved = true;
  if (!operation.outcome->failure()) Py_RETURN_NONE;
  return exception_of(*operation.outcome->failure()).release();
}

PyObject* bytes(PyObject* self, PyObject*) {
  Operation& operation = operation_of(self);
  NVME_INVARIANT(settled(operation));
  return PyLong_FromUnsignedLongLong(operation.outcome->bytes());
}

PyObject* add_callback(PyObject* self, PyObject* callable) {
  require_own_process(operation_of(self));
  Worker& worker = callbacks();
  try {
    worker.start();  // not on a lane, where a failure could not be reported
  } catch (const std::system_error&) {
    if (!operation_of(self).outcome->done()) throw;
    return PyObject_CallObject(callable, nullptr);  // no thread can be started, and none is needed
  }
  auto task = std::make_shared<Worker::Tasks>(Worker::task([callable] {
    const WithGil gil;
    const Ref owned(callable);
    const Ref result(PyObject_CallObject(callable, nullptr));
    if (!result) PyErr_WriteUnraisable(callable);
  }));
  operation_of(self).outcome->then([&worker, task] { worker.post(std::move(*task)); });
  Py_INCREF(callable);  // the task's reference; it cannot run before the GIL is free
  Py_RETURN_NONE;
}

void operation_deallocate(PyObject* self) {
  reinterpret_cast<OperationObject*>(self)->operation.~shared_ptr();
  free_object(self);
}

PyMethodDef operation_methods[] = {
    {"submitted", method<submitted>, METH_NOARGS, "False until the call that submits it has returned."},
    {"done", method<done>, METH_NOARGS, "Whether the result has arrived."},
    {"wait", method<wait_for>, METH_O, "Waits for the result; False after so many seconds."},
    {"exception", method<failure>, METH_NOARGS, "Once done: its failure."},
    {"request_cancel", method<request_cancel>, METH_NOARGS,
     "Begins nothing more of it; ECANCELED unless all had been."},
    {"bytes", method<bytes>, METH_NOARGS, "Once done: bytes moved."},
    {"add_callback", method<add_callback>, METH_O, "Called on the thread for callbacks, once done."},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject* operation_type = nullptr;

}  // namespace

Ref new_operation() {
  Ref object = new_object(operation_type);
  new (&reinterpret_cast<OperationObject*>(object.get())->operation) std::shared_ptr<Operation>();
  return object;
}

void set_operation(PyObject* object, std::shared_ptr<Operation> operation) {
  reinterpret_cast<OperationObject*>(object)->operation = std::move(operation);
}

void add_operation_type(PyObject* module) {
  operation_type = add_type(module, "nvme_ops.Operation", sizeof(OperationObject), "A submitted transfer.", nullptr,
                            operation_deallocate, operation_methods);
}

void stop_callbacks() {
  const WithoutGil released;
  callbacks().stop();
}

}  // namespace nvme_ops
