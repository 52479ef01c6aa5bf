// A backend that does what the kernel will not do on demand. It moves real bytes, judged by a script, and checks what
// the engine asks of it: depth, alignment, registered buffers, and that no folio is written in two ways at once.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "backends/backend.h"
#include "base/error.h"
#include "check.h"
#include "engine/folio_gate.h"
#include "support.h"

namespace fake {

using nvme_ops::Completion;
using nvme_ops::Op;
using nvme_ops::Request;

// How one request ends. `bytes` are really moved, then `error` is answered if there is one.
struct Verdict {
  std::uint64_t bytes = UINT64_MAX;
  int error = 0;
  unsigned delay = 0;  // calls of reap() to wait before
};

// Called with the mutex held, from any lane. What is not set does what a perfect kernel would.
struct Script {
  std::mutex mutex;
  using Judge = std::function<Verdict(const Request&, bool direct)>;
  Judge judge;
  std::function<std::size_t(std::size_t offered)> take;
  std::function<int()> breaks;                              // before each reap(): the errno of a queue that has failed
  std::function<std::size_t(std::size_t finished)> choose;  // which of those that are finished is told first
  std::function<void()> before_open;                        // may throw IoError
  bool registers = true, may_be_bypassed = false;

  // Looks or changes something while lanes are at work.
  template <class Action>
  auto safely(Action&& action) {
    const std::lock_guard<std::mutex> lock(mutex);
    return action(*this);
  }

  // What the engine did.
  unsigned long requests = 0, opened = 0, refused_registrations = 0;
};

// Set before an engine is made, left alone until it is destroyed.
inline std::unique_ptr<Script>& script_slot() {
  static std::unique_ptr<Script> script;
  return script;
}

inline Script& new_script() {
  script_slot() = std::make_unique<Script>();
  return *script_slot();
}

// Writes in flight in all queues.
class Ledger {
public:
  struct Write {
    dev_t device;
    ino_t inode;
    std::uint64_t from, to;
    bool direct;
  };

  static Ledger& instance() {
    static Ledger ledger;
    return ledger;
  }

  void begin(const Request& request, bool direct) {
    struct stat status{};
    ::fstat(request.fd, &status);
    const Write mine{status.st_dev, status.st_ino, request.offset, request.offset + request.bytes, direct};
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [token, other] : writes_) {
      if (other.device != mine.device || other.inode != mine.inode) continue;
      CHECK(mine.to <= other.from || other.to <= mine.from, "no byte written twice at once, got "
                                                                << mine.from << ".." << mine.to << " and " << other.from
                                                                << ".." << other.to);
      const std::uint64_t folio = nvme_ops::folio_bytes();
      const bool share_a_folio =
          mine.from / folio <= (other.to - 1) / folio && other.from / folio <= (mine.to - 1) / folio;
      CHECK(!share_a_folio || mine.direct == other.direct,
            "no folio written through the cache and past it at once, got " << mine.from << ".." << mine.to << " and "
                                                                           << other.from << ".." << other.to);
    }
    writes_.emplace(&request, mine);
  }

  void end(const Request& request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    writes_.erase(&request);
  }

private:
  std::mutex mutex_;
  std::map<const Request*, Write> writes_;
};

class FakeQueue final : public nvme_ops::Queue {
public:
  explicit FakeQueue(const nvme_ops::QueueOptions& options) : options_(options) {
    const std::lock_guard<std::mutex> lock(script_.mutex);
    if (script_.before_open) script_.before_open();
    ++script_.opened;
  }

  ~FakeQueue() override {
    CHECK(pending_.empty(), "no queue closed with " << pending_.size() << " requests in flight");
    for (const auto& entry : pending_) Ledger::instance().end(entry->request);
  }

  std::size_t submit(const Request* requests, std::size_t count) override {
    CHECK(count > 0, "no empty submission");
    std::size_t taken = count;
    {
      const std::lock_guard<std::mutex> lock(script_.mutex);
      if (script_.take) taken = std::min(count, script_.take(count));
      script_.requests += taken;
    }
    for (std::size_t i = 0; i < taken; ++i) accept(requests[i]);
    return taken;
  }

  std::size_t reap(Completion* completions, std::size_t most, std::size_t least, std::chrono::milliseconds) override {
    CHECK(most > 0 && least <= most, "room for " << least << " completions, got " << most);
    {
      const std::lock_guard<std::mutex> lock(script_.mutex);
      if (script_.breaks && broken_ == 0) broken_ = script_.breaks();
    }
    if (broken_ != 0) refuse_every_other();
    for (const auto& entry : pending_) {
      if (entry->verdict.delay > 0) --entry->verdict.delay;
    }
    std::size_t count = 0;
    while (count < most) {
      std::vector<std::size_t> finished;
      for (std::size_t i = 0; i < pending_.size(); ++i) {
        if (pending_[i]->verdict.delay == 0) finished.push_back(i);
      }
      if (finished.empty()) break;
      completions[count++] = finish(finished[chosen_of(finished.size())]);
    }
    if (count == 0 && least > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    return count;
  }

  bool broken() const override { return broken_ != 0; }
  bool may_be_bypassed() const override { return script_.may_be_bypassed; }

  bool register_buffer(int index, std::byte* memory, std::size_t bytes) override {
    const std::lock_guard<std::mutex> lock(script_.mutex);
    CHECK(index >= 0 && static_cast<unsigned>(index) < options_.buffers, "a buffer index below " << options_.buffers);
    if (!script_.registers) {
      ++script_.refused_registrations;
      return false;
    }
    CHECK(buffers_.count(index) == 0, "buffer " << index << " not to be registered twice");
    buffers_[index] = {memory, bytes};
    return true;
  }

  void unregister_buffer(int index) override {
    CHECK(buffers_.count(index) == 1, "only what was registered to be unregistered");
    for (const auto& entry : pending_) CHECK(entry->request.buffer != index, "no buffer unregistered while in use");
    buffers_.erase(index);
  }

private:
  struct Entry {
    Request request;
    Verdict verdict;
    bool direct;
  };

  // As in a ring that failed: what had not entered the kernel never will, what had goes on.
  void refuse_every_other() {
    for (std::size_t i = 0; i < pending_.size(); i += 2) pending_[i]->verdict = {0, broken_};
  }

  std::size_t chosen_of(std::size_t finished) {
    const std::lock_guard<std::mutex> lock(script_.mutex);
    return script_.choose ? script_.choose(finished) : 0;
  }

  void accept(const Request& request) {
    CHECK(pending_.size() < options_.depth, "at most " << options_.depth << " in flight");
    CHECK(request.bytes > 0 && request.bytes <= nvme_ops::kMaxTransfer, "a length the kernel takes");
    const bool direct = (::fcntl(request.fd, F_GETFL) & O_DIRECT) != 0;
    if (request.buffer >= 0) check_registered(request);
    auto entry = std::make_unique<Entry>(Entry{request, {}, direct});
    {
      const std::lock_guard<std::mutex> lock(script_.mutex);
      if (script_.judge) entry->verdict = script_.judge(request, direct);
      if (broken_ != 0) entry->verdict = {0, broken_};
    }
    if (request.op == Op::Write) Ledger::instance().begin(entry->request, direct);
    pending_.push_back(std::move(entry));
  }

  void check_registered(const Request& request) {
    const auto found = buffers_.find(request.buffer);
    CHECK(found != buffers_.end(), "a request to name a registered buffer, got " << request.buffer);
    if (found == buffers_.end()) return;
    const auto [memory, bytes] = found->second;
    CHECK(request.data >= memory && request.data + request.bytes <= memory + bytes, "data inside the named buffer");
  }

  // Bytes move only now, so that memory given away too early shows.
  Completion finish(std::size_t index) {
    const std::unique_ptr<Entry> entry = std::move(pending_[index]);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(index));
    const std::int64_t result = move(*entry);
    if (entry->request.op == Op::Write) Ledger::instance().end(entry->request);
    return {entry->request.token, result};
  }

  static std::int64_t move(const Entry& entry) {
    const Request& request = entry.request;
    const std::uint64_t bytes = std::min(entry.verdict.bytes, request.bytes);
    std::int64_t moved = 0;
    if (bytes == request.bytes) {
      moved = transfer(request, request.fd, bytes);
      CHECK(!(entry.direct && moved == -EINVAL),
            "an aligned direct request, got " << request.bytes << " at " << request.offset << " from " << request.data);
    } else if (bytes > 0) {
      // Through the cache: direct I/O could not end at any byte.
      const std::string name = "/proc/self/fd/" + std::to_string(request.fd);
      const nvme_ops::UniqueFd plain(::open(name.c_str(), (request.op == Op::Read ? O_RDONLY : O_WRONLY) | O_CLOEXEC));
      moved = transfer(request, plain.get(), bytes);
    }
    return entry.verdict.error != 0 ? -entry.verdict.error : moved;
  }

  static std::int64_t transfer(const Request& request, int fd, std::uint64_t bytes) {
    for (;;) {
      const auto offset = static_cast<off_t>(request.offset);
      const ssize_t moved =
          request.op == Op::Read ? ::pread(fd, request.data, bytes, offset) : ::pwrite(fd, request.data, bytes, offset);
      if (moved >= 0) return moved;
      if (errno != EINTR) return -errno;
    }
  }

  Script& script_ = *script_slot();
  const nvme_ops::QueueOptions options_;
  std::vector<std::unique_ptr<Entry>> pending_;
  std::map<int, std::pair<std::byte*, std::size_t>> buffers_;
  int broken_ = 0;  // errno
};

inline const nvme_ops::Backend kFake{"fake", [] { return nvme_ops::Probe{true, {}}; },
                                     [](const nvme_ops::QueueOptions& options) -> std::unique_ptr<nvme_ops::Queue> {
                                       return std::make_unique<FakeQueue>(options);
                                     }};

[[noreturn]] inline void raise(int error, const char* operation) {
  nvme_ops::raise(nvme_ops::system_failure(error, operation));
}

}  // namespace fake
