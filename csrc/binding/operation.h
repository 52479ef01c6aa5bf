// One submitted call: what it moves, what it keeps alive, and the Python object to wait for it with.
#pragma once

#include <Python.h>

#include <memory>
#include <vector>

#include "binding/device_path.h"
#include "binding/experience_type.h"
#include "binding/memory.h"
#include "binding/python.h"
#include "engine/engine.h"

namespace nvme_ops {

struct Transfer {
  Op op;
  std::shared_ptr<Job> job;  // everything in CPU memory
  std::vector<DeviceExtent> device;
  bool validate;
  Priority priority;

  bool plain() const { return device.empty() && !validate; }

  // Executes all steps on this thread; the lanes move the bytes. Returns the bytes moved; throws IoError.
  std::uint64_t execute(Engine& engine, DevicePath& path, bool all_lanes, const Interrupted& interrupted) const;

private:
  void execute_device(Engine& engine, DevicePath& path, const Interrupted& interrupted) const;
};

// Created and destroyed with the GIL held. Reports a failure that was never retrieved when it is destroyed.
struct Operation {
  Operation(std::shared_ptr<Outcome> outcome, std::shared_ptr<Job> job, std::vector<Memory> memories, Sample sample);
  ~Operation();

  // Once done: releases the memory and notes what was learned.
  void end();

  std::shared_ptr<Outcome> outcome;
  std::shared_ptr<Job> job;  // to stop it
  std::vector<Memory> memories;
  Sample sample;
  unsigned long generation;
  bool retrieved = false;
};

// The object is made before the call is submitted, so that running out of memory cannot lose track of it.
Ref new_operation();
void set_operation(PyObject* object, std::shared_ptr<Operation> operation);
void add_operation_type(PyObject* module);

// Runs every pending callback and ends their thread.
void stop_callbacks();

}  // namespace nvme_ops
