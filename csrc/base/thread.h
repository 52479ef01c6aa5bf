// Starts threads that block every signal, so that Ctrl-C reaches the program's own threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace nvme_ops {

template <class Function>
std::thread quiet_thread(Function&& function) {
  struct Blocked {
    sigset_t before;
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  };
  const Blocked blocked;
  return std::thread(std::forward<Function>(function));
}

}  // namespace nvme_ops
