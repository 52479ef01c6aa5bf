// Files, memory and data to test with.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/registry.h"
#include "base/unique_fd.h"
#include "engine/engine.h"

namespace support {

using nvme_ops::Cache;
using nvme_ops::Op;
using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

inline std::uint64_t between(Random& random, std::uint64_t least, std::uint64_t most) {
  return std::uniform_int_distribution<std::uint64_t>(least, most)(random);
}

inline bool one_in(Random& random, std::uint64_t times) {
  return between(random, 1, times) == 1;
}

// Data in which no two stretches are alike, so that what lands in the wrong place shows.
inline Bytes pattern(std::size_t bytes, std::uint64_t seed) {
  Bytes data((bytes + 7) / 8 * 8);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (std::size_t i = 0; i < data.size(); i += 8) {
    state = state * 6364136223846793005 + 1442695040888963407;
    const std::uint64_t word = state ^ (state >> 29);
    std::memcpy(data.data() + i, &word, 8);
  }
  data.resize(bytes);
  return data;
}

// Where two ranges of the same length first differ, or their length.
inline std::size_t difference(const std::byte* one, const std::byte* other, std::size_t bytes) {
  if (bytes == 0 || std::memcmp(one, other, bytes) == 0) return bytes;
  return static_cast<std::size_t>(std::mismatch(one, one + bytes, other).first - one);
}

// On a disk: in TMPDIR, else where temporary files are rarely a tmpfs.
class Directory {
public:
  explicit Directory(std::string parent = {}) {
    const char* const wanted = std::getenv("TMPDIR");
    if (parent.empty()) parent = wanted != nullptr && *wanted != '\0' ? wanted : "/var/tmp";
    path_ = parent + "/nvme_ops_test_XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("cannot make " + path_);
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  ~Directory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

private:
  std::string path_;
};

// One directory for all tests of a program.
inline const Directory& directory() {
  static const Directory made;
  return made;
}

inline void write_file(const std::string& path, const Bytes& data) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(data.data()), static_cast<std::streamsize>(data.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path);
}

// Returns the path of a file with these contents.
inline std::string stored(const std::string& name, const Bytes& data) {
  write_file(directory() / name, data);
  return directory() / name;
}

inline Bytes read_file(const std::string& path) {
  Bytes data(std::filesystem::file_size(path));
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(data.size()));
  if (!file) throw std::runtime_error("cannot read " + path);
  return data;
}

// Writes it out and takes it from the page cache, so that a read must ask the device.
inline void evict(const std::string& path) {
  const nvme_ops::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  ::fdatasync(fd.get());
  ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
}

// A tensor's memory: `skew` bytes off a page, with guards on both sides that nobody may touch.
class Memory {
public:
  explicit Memory(std::size_t bytes, std::size_t skew = 0) : bytes_(bytes), skew_(skew) {
    const std::size_t whole = (kGuard + skew + bytes + kGuard + kGuard - 1) / kGuard * kGuard;
    base_.reset(static_cast<std::byte*>(std::aligned_alloc(kGuard, whole)));
    if (!base_) throw std::bad_alloc();
    size_ = whole;
    std::memset(base_.get(), kMark, whole);
  }
  std::byte* data() const { return base_.get() + kGuard + skew_; }
  std::size_t size() const { return bytes_; }
  void set(const Bytes& data) { std::copy(data.begin(), data.end(), this->data()); }
  bool guards_intact() const {
    const auto is_mark = [](std::byte value) { return value == std::byte{kMark}; };
    return std::all_of(base_.get(), data(), is_mark) && std::all_of(data() + bytes_, base_.get() + size_, is_mark);
  }

private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  static constexpr std::size_t kGuard = 4096;
  static constexpr unsigned char kMark = 0xa5;
  std::size_t bytes_, skew_, size_ = 0;
  std::unique_ptr<std::byte, Free> base_;
};

inline std::vector<const nvme_ops::Backend*> usable_backends() {
  std::vector<const nvme_ops::Backend*> usable;
  for (const nvme_ops::Backend* backend : nvme_ops::backends()) {
    if (nvme_ops::probe(*backend).usable) usable.push_back(backend);
  }
  return usable;
}

inline nvme_ops::EngineOptions engine_options(const nvme_ops::Backend& backend, std::uint64_t block = 64 << 10,
                                              std::uint64_t depth = 8, std::uint64_t lanes = 2) {
  return {{&backend}, block, depth, false, true, lanes};
}

inline bool never() {
  return false;
}

inline std::shared_ptr<nvme_ops::SharedFile> shared(const std::string& path, Op op, Cache cache = Cache::Direct) {
  return std::make_shared<nvme_ops::SharedFile>(
      path, [=](const std::string& name) { return nvme_ops::File::open(name, op, cache); });
}

inline nvme_ops::Extent extent(const std::string& path, Op op, const Memory& memory, std::uint64_t offset = 0,
                               Cache cache = Cache::Direct, bool fast_memory = false) {
  return {shared(path, op, cache), memory.data(), memory.size(), offset, fast_memory};
}

inline std::shared_ptr<nvme_ops::Job> job_of(Op op, std::vector<nvme_ops::Extent> extents) {
  return std::make_shared<nvme_ops::Job>(op, std::move(extents));
}

}  // namespace support
