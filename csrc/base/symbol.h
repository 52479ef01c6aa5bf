// Functions of libraries that are opened at run time.
#pragma once

#include <dlfcn.h>

namespace nvme_ops {

// Returns whether the library has it.
template <class Function>
bool find_symbol(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  return *function != nullptr;
}

}  // namespace nvme_ops
