#include "binding/experience_type.h"

#include "binding/python.h"

namespace nvme_ops {
namespace {

constexpr std::uintptr_t kAligned = 512;  // of memory, for direct I/O

PyTypeObject* experience_class = nullptr;

using Held = std::shared_ptr<Learner>;

Place place_of(const Memory& memory) {
  if (memory.device) return Place::Device;
  if (memory.fast) return Place::Pinned;
  return reinterpret_cast<std::uintptr_t>(memory.data) % kAligned == 0 ? Place::Aligned : Place::Pageable;
}

bool to_tool(PyObject* object, Tool* tool) {
  unsigned long long block_size, queue_depth, lanes;
  int in_place, bounce, cache;
  const Ref tuple = checked(PySequence_Tuple(object));
  if (!PyArg_ParseTuple(tuple.get(), "KKKppi", &block_size, &queue_depth, &lanes, &in_place, &bounce, &cache)) {
    return false;
  }
  *tool = {block_size, queue_depth, lanes, in_place != 0, bounce != 0, static_cast<Cache>(cache)};
  return true;
}

Ref from_tool(const Tool& tool) {
  const auto number = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
  return checked(Py_BuildValue("[KKKOOi]", number(tool.block_size), number(tool.queue_depth), number(tool.lanes),
                               tool.in_place ? Py_True : Py_False, tool.bounce ? Py_True : Py_False,
                               static_cast<int>(tool.cache)));
}

PyObject* entries(PyObject* self, PyObject*) {
  const Learner& learner = **held<Held>(self);
  return list_of(learner.experience.entries(),
                 [](const auto& item) {
                   const auto& [kind, entry] = item;
                   const Trials& trials = entry.trials;
                   const auto [op, size, place, cached, concurrency] = kind.fields();
                   Ref tools = list_of(entry.tools, from_tool);
                   Ref costs = list_of(trials.tried(),
                                       [](const Trials::Tried& one) { return checked(PyFloat_FromDouble(one.cost)); });
                   return checked(Py_BuildValue(
                       "((IIIII)NNnOKK)", op, size, place, cached, concurrency, tools.release(), costs.release(),
                       static_cast<Py_ssize_t>(trials.chosen()), trials.exploring() ? Py_True : Py_False,
                       static_cast<unsigned long long>(trials.explorations()),
                       static_cast<unsigned long long>(entry.transfers)));
                 })
      .release();
}

PyObject* freeze(PyObject* self, PyObject*) {
  (*held<Held>(self))->experience.freeze();
  Py_RETURN_NONE;
}

PyObject* experience_create(PyTypeObject* type, PyObject* arguments) {
  PyObject* first;
  unsigned long long lanes;
  int block_size_fixed, queue_depth_fixed, lanes_fixed, cache_fixed, cufile;
  parse(arguments, "OK(pppp)p", &first, &lanes, &block_size_fixed, &queue_depth_fixed, &lanes_fixed, &cache_fixed,
        &cufile);
  Bounds bounds{{},         lanes, block_size_fixed != 0, queue_depth_fixed != 0, lanes_fixed != 0, cache_fixed != 0,
                cufile != 0};
  if (!to_tool(first, &bounds.first)) throw PythonError();
  return new_holder(type, std::make_unique<Held>(std::make_shared<Learner>(bounds)));
}

PyMethodDef experience_methods[] = {
    {"entries", method<entries>, METH_NOARGS, "What is known of each class of transfers."},
    {"freeze", method<freeze>, METH_NOARGS, "From now on what is known is used and nothing is learned."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

Sample::Flight::Flight(std::shared_ptr<Learner> learner, Priority priority, std::uint64_t bytes)
    : learner_(std::move(learner)), priority_(priority), bytes_(bytes) {
  learner_->in_flight.begin(priority_, bytes_);
}

void Sample::Flight::end() noexcept {
  if (!ended_.exchange(true) && learner_->generation == generation_) {
    learner_->in_flight.end(priority_, bytes_);
  }
}

Sample::Sample(std::shared_ptr<Learner> learner, Op op, Priority priority, const Memory* memories, std::size_t count,
               bool waited, bool measured) {
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < count; ++i) bytes += memories[i].bytes;
  if (learner->generation != fork_generation()) {  // what is in flight is the parent's
    learner->generation = fork_generation();
    learner->in_flight.forget();
    learner->experience.forget();
  }
  const std::uint64_t beside = learner->in_flight.beside(priority, bytes);
  // Frozen, the same calls use the same tools, whether or not those before have ended.
  const bool crowd = count > 1 || (!learner->experience.frozen() && learner->in_flight.any());
  const Concurrency concurrency = crowd ? Concurrency::Crowd : waited ? Concurrency::Waited : Concurrency::Alone;
  const std::uint64_t mean = count > 0 ? bytes / count : 0;
  const Place place = count > 0 ? place_of(memories[0]) : Place::Pageable;
  measured = measured && bytes > 0;
  const auto choice = learner->experience.choose({op, size_class(mean), place, false, concurrency}, measured);
  use_ = std::unique_ptr<Use>(new Use{learner, choice, bytes, beside, measured});
  use_->flight = std::make_shared<Flight>(learner, priority, bytes);
  use_->start = Clock::now();
}

void Sample::follow(Outcome& outcome) {
  if (use_) outcome.then([flight = use_->flight] { flight->end(); });
}

void Sample::end(const Outcome& outcome, std::uint64_t cached) {
  if (use_ && outcome.done()) end(!outcome.failure(), outcome.settled_at(), cached);
}

void Sample::end(bool succeeded, Clock::time_point when, std::uint64_t cached) {
  const std::unique_ptr<Use> use = std::move(use_);
  if (!use || !succeeded || !use->measured) return;
  use->flight->end();
  // In that time the device moved both its own bytes and those beside them: together they give the device's rate.
  const double seconds = std::chrono::duration<double>(when - use->start).count();
  use->noted = true;
  use->learner->experience.note(use->choice, use->bytes + use->beside, cached > use->bytes / 2, seconds);
}

Sample::Use::~Use() {
  if (flight) flight->end();
  if (!noted) learner->experience.lose(choice);
}

std::shared_ptr<Learner> learner_of(PyObject* object) {
  if (object == Py_None) return nullptr;
  if (Py_TYPE(object) != experience_class) raise_type_error("experience must be an Experience or None");
  return *held<Held>(object);
}

void add_experience_type(PyObject* module) {
  experience_class =
      add_type(module, "nvme_ops.Experience", sizeof(Holder<Held>), "Experience(first, lanes, fixed, cufile).",
               constructor<experience_create>, free_holder<Held>, experience_methods);
}

}  // namespace nvme_ops
