// SharedFile: opened by the first who holds it, closed by the last, prepared once.
#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/shared_file.h"
#include "support.h"

using namespace nvme_ops;
using namespace support;

namespace {

struct Counted {
  std::string path = directory() / "counted";
  std::atomic<int> opened{0};
  SharedFile file{path, [this](const std::string& path) {
                    ++opened;
                    return File::open(path, Op::Write, Cache::Auto);
                  }};
};

}  // namespace

TEST(the_last_holder_closes_and_the_next_one_opens_again) {
  Counted counted;
  for (int round = 1; round <= 3; ++round) {
    const int fd = counted.file.hold().buffered();
    counted.file.hold();
    CHECK_EQUAL(counted.file.release(), 0);
    CHECK(::fcntl(fd, F_GETFD) >= 0, "open while somebody holds it");
    CHECK_EQUAL(counted.file.release(), 0);
    CHECK(::fcntl(fd, F_GETFD) < 0, "closed when nobody does");
    CHECK_EQUAL(counted.opened.load(), round);
  }
}

TEST(a_failed_opening_can_be_tried_again) {
  const std::string path = directory() / "missing";
  SharedFile file(path, [](const std::string& name) { return File::open(name, Op::Read, Cache::Auto); });
  CHECK_FAILURE(check::failure_of([&] { file.hold(); }), System, ENOENT, "opening");
  support::write_file(path, pattern(10, 1));
  CHECK_EQUAL(file.hold().size(), 10U);
  CHECK_EQUAL(file.release(), 0);
}

TEST(an_extent_is_prepared_once) {
  Counted counted;
  support::write_file(counted.path, pattern(1000, 1));
  counted.file.hold();
  bool prepared = false;
  counted.file.prepare(&prepared, Op::Write, 0, 100, true);
  CHECK(prepared, "to be told so");
  CHECK_EQUAL(std::filesystem::file_size(counted.path), 100U);
  support::write_file(counted.path, pattern(1000, 1));
  counted.file.prepare(&prepared, Op::Write, 0, 100, true);
  CHECK_EQUAL(std::filesystem::file_size(counted.path), 1000U);
  CHECK_EQUAL(counted.file.release(), 0);
}

TEST(a_hold_ends_once) {
  Counted counted;
  const std::shared_ptr<SharedFile> file(std::shared_ptr<void>(), &counted.file);
  {
    FileHold first(file);
    FileHold second(file);
    const int fd = file->file().buffered();
    CHECK_EQUAL(first.end(), 0);
    CHECK_EQUAL(first.end(), 0);
    CHECK(::fcntl(fd, F_GETFD) >= 0, "open: the second goes on");
  }
  CHECK_EQUAL(counted.opened.load(), 1);
  FileHold third(file);
  CHECK_EQUAL(counted.opened.load(), 2);
}

TEST(a_reader_sees_what_was_written) {
  Counted counted;
  const std::shared_ptr<SharedFile> file(std::shared_ptr<void>(), &counted.file);
  const FileHold hold(file);
  CHECK_EQUAL(::pwrite(file->file().buffered(), "abc", 3, 0), ssize_t{3});
  std::filesystem::rename(counted.path, counted.path + ".moved");
  const auto reader = reader_of(file, Cache::Buffered);
  const FileHold reading(reader);
  char back[3];
  CHECK_EQUAL(::pread(reader->file().buffered(), back, 3, 0), ssize_t{3});
  CHECK_EQUAL(std::string(back, 3), std::string("abc"));
  CHECK_EQUAL(reader->path(), counted.path);
}

TEST(threads_may_come_and_go) {
  Counted counted;
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 2000; ++round) {
        File& file = counted.file.hold();
        if (&file != &counted.file.file() ||
            ::fcntl(file.direct_possible() ? file.direct() : file.buffered(), F_GETFD) < 0)
          ++bad;
        if (counted.file.release() != 0) ++bad;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(bad.load(), 0);
}
