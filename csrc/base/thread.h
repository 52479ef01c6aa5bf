// Starts threads that block every signal, so that Ctrl-C reaches the program's own threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace nvme_ops {

template <class Function>
std::thread quiet_thread(Function&& function) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(std::forward<Function>(function));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

}  // namespace nvme_ops
