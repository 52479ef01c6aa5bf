// Worker: tasks in order, none lost, stopped and started again.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <vector>

#include "check.h"
#include "engine/worker.h"

using nvme_ops::Worker;

TEST(tasks_run_in_order_on_one_thread) {
  std::vector<int> order;
  std::thread::id thread;
  {
    Worker worker;
    for (int i = 0; i < 100; ++i) {
      worker.post([&order, &thread, i] {
        CHECK(i == 0 || thread == std::this_thread::get_id(), "one thread for all");
        thread = std::this_thread::get_id();
        order.push_back(i);
      });
    }
  }
  CHECK_EQUAL(order.size(), std::size_t{100});
  for (int i = 0; i < 100; ++i) CHECK_EQUAL(order[static_cast<std::size_t>(i)], i);
  CHECK(thread != std::this_thread::get_id(), "a thread of the worker's own");
}

TEST(tasks_may_post_tasks) {
  std::atomic<int> ran{0};
  Worker worker;
  for (int i = 0; i < 10; ++i) {
    worker.post([&] {
      ++ran;
      worker.post([&] { ++ran; });
    });
  }
  while (ran.load() < 20) std::this_thread::yield();
  worker.stop();
  CHECK_EQUAL(ran.load(), 20);
}

// Letting go of a tensor runs Python code, which may let go of the handle.
TEST(a_task_may_destroy_its_worker) {
  const auto threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator());
  };
  const auto before = threads();
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> ran{0};
    auto worker = std::make_unique<Worker>();
    worker->post([&] {
      worker.reset();
      ++ran;
    });
    while (ran.load() < 1 || threads() > before) std::this_thread::yield();
  }
}

// A transfer that ends while the interpreter does: its callback is posted while the worker stops.
TEST(posting_while_it_stops_neither_hangs_nor_loses_a_task) {
  for (int round = 0; round < 300; ++round) {
    std::atomic<int> ran{0}, running{0};
    {
      Worker worker;
      const auto task = [&] {
        CHECK(++running == 1, "one task at a time");
        --running;
        ++ran;
      };
      std::thread posts([&] {
        for (int i = 0; i < 20; ++i) worker.post(task);
      });
      for (int i = 0; i < 5; ++i) {
        worker.post(task);
        worker.stop();
      }
      posts.join();
    }
    CHECK_EQUAL(ran.load(), 25);
  }
}
