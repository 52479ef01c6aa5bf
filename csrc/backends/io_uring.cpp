// io_uring through the kernel's own header. Requests enter the kernel with the wait: one system call per batch.
#include "backends/registry.h"
#include "base/error.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#ifdef IORING_FEAT_RW_CUR_POS  // Linux 5.6, like plain reads and writes

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/unique_fd.h"

namespace nvme_ops {
namespace {

// Newer than the kernel headers of some distributions we build on, by their names in <linux/io_uring.h>.
constexpr unsigned kCoopTaskrun = 1U << 8;     // IORING_SETUP_COOP_TASKRUN, Linux 5.19
constexpr unsigned kEnterTimed = 1U << 3;      // IORING_ENTER_EXT_ARG, Linux 5.11
constexpr unsigned kTimedWaits = 1U << 8;      // IORING_FEAT_EXT_ARG
constexpr unsigned kRegisterBufferTable = 15;  // IORING_REGISTER_BUFFERS2, Linux 5.13
constexpr unsigned kUpdateBuffers = 16;        // IORING_REGISTER_BUFFERS_UPDATE
constexpr unsigned kSparse = 1;                // IORING_RSRC_REGISTER_SPARSE, Linux 5.19
struct WaitArgument {                          // io_uring_getevents_arg
  std::uint64_t signal_mask;
  std::uint32_t signal_mask_bytes, reserved;
  std::uint64_t timeout;
};
struct BufferTable {  // io_uring_rsrc_register
  std::uint32_t slots, flags;
  std::uint64_t reserved, data, tags;
};
struct BufferUpdate {  // io_uring_rsrc_update2
  std::uint32_t offset, reserved;
  std::uint64_t data, tags;
  std::uint32_t count, reserved2;
};

int setup(unsigned entries, io_uring_params* params) {
  return static_cast<int>(::syscall(__NR_io_uring_setup, entries, params));
}

int register_with(int ring, unsigned opcode, void* argument, unsigned count) {
  return static_cast<int>(::syscall(__NR_io_uring_register, ring, opcode, argument, count));
}

// Identifies the file behind a descriptor; every ring has an inode of its own.
std::pair<dev_t, ino_t> identity_of(int fd) {
  struct stat status{};
  ::fstat(fd, &status);
  return {status.st_dev, status.st_ino};
}

// Memory shared with a ring.
struct Unmap {
  std::size_t bytes = 0;
  void operator()(char* base) const { ::munmap(base, bytes); }
};
using Mapping = std::unique_ptr<char, Unmap>;

Mapping map_ring(int ring, std::size_t bytes, off_t what) {
  void* const base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, what);
  if (base == MAP_FAILED) raise(no_queue(errno, "mapping an io_uring"));
  ::madvise(base, bytes, MADV_DONTFORK);  // a child would keep the ring alive
  return {static_cast<char*>(base), Unmap{bytes}};
}

template <class T>
T* at(const Mapping& memory, unsigned offset) {
  return reinterpret_cast<T*>(memory.get() + offset);
}

unsigned load_acquire(const unsigned* value) {
  return __atomic_load_n(value, __ATOMIC_ACQUIRE);
}

void store_release(unsigned* value, unsigned what) {
  __atomic_store_n(value, what, __ATOMIC_RELEASE);
}

class IoUringQueue final : public Queue {
public:
  explicit IoUringQueue(const QueueOptions& options)
      : single_submit_(options.single_submit),
        ring_(set_up(options.depth, &params_)),
        identity_(identity_of(ring_.get())) {
    const int fd = ring_.get();
    const io_uring_params& params = params_;
    refused_.reserve(options.depth + params.sq_entries);
    timed_waits_ = (params.features & kTimedWaits) != 0;

    const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    sq_ = map_ring(fd, sq_bytes, IORING_OFF_SQ_RING);
    cq_ = map_ring(fd, cq_bytes, IORING_OFF_CQ_RING);
    sqe_memory_ = map_ring(fd, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    sqes_ = at<io_uring_sqe>(sqe_memory_, 0);
    sq_tail_ = at<unsigned>(sq_, params.sq_off.tail);
    sq_head_ = at<unsigned>(sq_, params.sq_off.head);
    sq_mask_ = *at<unsigned>(sq_, params.sq_off.ring_mask);
    sq_entries_ = params.sq_entries;
    cq_head_ = at<unsigned>(cq_, params.cq_off.head);
    cq_tail_ = at<unsigned>(cq_, params.cq_off.tail);
    cq_mask_ = *at<unsigned>(cq_, params.cq_off.ring_mask);
    cqes_ = at<io_uring_cqe>(cq_, params.cq_off.cqes);
    unsigned* array = at<unsigned>(sq_, params.sq_off.array);
    for (unsigned i = 0; i < sq_entries_; ++i) array[i] = i;
    if (options.buffers == 0) return;
    // An empty table that buffers enter one by one; older kernels do without.
    BufferTable table{options.buffers, kSparse, 0, 0, 0};
    buffer_table_ = register_with(fd, kRegisterBufferTable, &table, sizeof table) == 0;
  }

  ~IoUringQueue() override {
    if (lost()) ring_.release();
  }

  std::size_t submit(const Request* requests, std::size_t count) override {
    std::size_t taken = 0;
    for (; taken < count; ++taken) {
      if (broken_ != 0) {
        refused_.push_back({requests[taken].token, -broken_});
        continue;
      }
      const unsigned tail = *sq_tail_;
      if (tail - load_acquire(sq_head_) == sq_entries_) break;
      prepare(sqes_[tail & sq_mask_], requests[taken]);
      store_release(sq_tail_, tail + 1);
      ++unsubmitted_;
      if (single_submit_) enter(0, nullptr);
    }
    return taken;
  }

  std::size_t reap(Completion* completions, std::size_t most, std::size_t least,
                   std::chrono::milliseconds timeout) override {
    const unsigned ready = load_acquire(cq_tail_) - *cq_head_;
    if (broken_ == 0 && (unsubmitted_ > 0 || ready < least || ready == 0)) {
      __kernel_timespec wait{timeout.count() / 1000, (timeout.count() % 1000) * 1'000'000};
      enter(ready < least ? static_cast<unsigned>(least) : 0, &wait);
    }
    std::size_t count = 0;
    for (; count < most && !refused_.empty(); refused_.pop_back()) completions[count++] = refused_.back();
    unsigned head = *cq_head_;
    for (const unsigned tail = load_acquire(cq_tail_); head != tail && count < most; ++head) {
      const io_uring_cqe& cqe = cqes_[head & cq_mask_];
      completions[count++] = {cqe.user_data, cqe.res};
    }
    store_release(cq_head_, head);
    if (count == 0 && broken_ == 0 && lost()) fail(EBADF);
    // The mapped ring still receives the completions in flight, but it cannot be waited for any more.
    if (broken_ != 0 && count == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return count;
  }

  bool broken() const override { return broken_ != 0; }

  bool register_buffer(int index, std::byte* memory, std::size_t bytes) override {
    return buffer_table_ && update_buffer(index, memory, bytes);
  }

  void unregister_buffer(int index) override { update_buffer(index, nullptr, 0); }

private:
  static int set_up(unsigned depth, io_uring_params* params) {
    for (const unsigned flags : {IORING_SETUP_CLAMP | kCoopTaskrun, IORING_SETUP_CLAMP}) {
      *params = {};
      params->flags = flags;
      const int fd = setup(depth, params);
      if (fd >= 0) return fd;
      if (errno != EINVAL) break;
    }
    raise(no_queue(errno, "io_uring_setup"));
  }

  // Whether somebody has closed all descriptors: the number may belong to another file or ring by now.
  bool lost() const { return ring_ && identity_ != identity_of(ring_.get()); }

  static void prepare(io_uring_sqe& sqe, const Request& request) {
    std::memset(&sqe, 0, sizeof sqe);
    const bool read = request.op == Op::Read;
    if (request.buffer >= 0) {
      sqe.opcode = read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
      sqe.buf_index = static_cast<std::uint16_t>(request.buffer);
    } else {
      sqe.opcode = read ? IORING_OP_READ : IORING_OP_WRITE;
    }
    sqe.ioprio = io_priority(request.priority);
    sqe.fd = request.fd;
    sqe.addr = reinterpret_cast<std::uint64_t>(request.data);
    sqe.len = static_cast<std::uint32_t>(request.bytes);
    sqe.off = request.offset;
    sqe.user_data = request.token;
  }

  // Submits prepared requests and waits for `least` completions, a signal or the timeout. The next call does the rest.
  void enter(unsigned least, __kernel_timespec* timeout) {
    WaitArgument argument{0, 0, 0, reinterpret_cast<std::uint64_t>(timeout)};
    const bool timed = least > 0 && timed_waits_;
    const unsigned flags = IORING_ENTER_GETEVENTS | (timed ? kEnterTimed : 0);
    const long taken = ::syscall(__NR_io_uring_enter, ring_.get(), unsubmitted_, least, flags,
                                 timed ? static_cast<void*>(&argument) : nullptr, timed ? sizeof argument : 0);
    if (taken >= 0) {
      unsubmitted_ -= static_cast<unsigned>(taken);
    } else if (errno == ETIME || errno == EINTR || errno == EAGAIN || errno == EBUSY) {
      unsubmitted_ = *sq_tail_ - load_acquire(sq_head_);
    } else {
      fail(errno);
    }
  }

  // Requests that never entered the kernel fail with the error that kept them out.
  void fail(int error) {
    broken_ = error;
    for (unsigned head = load_acquire(sq_head_); head != *sq_tail_; ++head) {
      refused_.push_back({sqes_[head & sq_mask_].user_data, -broken_});
    }
    unsubmitted_ = 0;
    if (lost()) ring_.release();
  }

  bool update_buffer(int index, std::byte* memory, std::size_t bytes) {
    iovec vector{memory, bytes};
    BufferUpdate update{static_cast<unsigned>(index), 0, reinterpret_cast<std::uint64_t>(&vector), 0, 1, 0};
    return register_with(ring_.get(), kUpdateBuffers, &update, sizeof update) == 1;
  }

  const bool single_submit_;
  bool timed_waits_ = false;
  int broken_ = 0;                   // errno
  std::vector<Completion> refused_;  // never exceeds the reserved capacity
  bool buffer_table_ = false;
  io_uring_params params_{};
  UniqueFd ring_;
  const std::pair<dev_t, ino_t> identity_;
  Mapping sq_, cq_, sqe_memory_;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  unsigned *sq_tail_ = nullptr, *sq_head_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0, sq_entries_ = 0;
  unsigned unsubmitted_ = 0;
};

// Sets up a real ring, and checks that it can read and write (Linux 5.6).
Probe probe_io_uring() {
  io_uring_params params{};
  const UniqueFd ring(setup(1, &params));
  if (!ring) {
    switch (errno) {
      case ENOSYS:
        return {false, "the kernel has no io_uring (Linux 5.1), or a seccomp filter hides it"};
      case EPERM:
        return {false,
                "io_uring_setup is forbidden: by kernel.io_uring_disabled (sysctl -w kernel.io_uring_disabled=0) or by "
                "the container's seccomp profile (docker run --security-opt seccomp=unconfined)"};
      case ENOMEM:
        return {false, "no locked memory left for a ring (ulimit -l unlimited)"};
      default:
        return {false, system_failure(errno, "io_uring_setup").message};
    }
  }
  std::vector<std::byte> memory(sizeof(io_uring_probe) + 256 * sizeof(io_uring_probe_op));
  auto* answer = reinterpret_cast<io_uring_probe*>(memory.data());
  if (register_with(ring.get(), IORING_REGISTER_PROBE, answer, 256) < 0 || answer->last_op < IORING_OP_WRITE) {
    return {false, "the kernel's io_uring cannot read and write plainly (Linux 5.6 can)"};
  }
  return {true, {}};
}

}  // namespace

const Backend kIoUring{"io_uring", probe_io_uring, open_queue<IoUringQueue>};

}  // namespace nvme_ops

#else

namespace nvme_ops {

const Backend kIoUring{"io_uring", [] { return Probe{false, "built with kernel headers older than Linux 5.6"}; },
                       nullptr};

}  // namespace nvme_ops

#endif
