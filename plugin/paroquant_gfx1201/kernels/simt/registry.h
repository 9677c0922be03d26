// The kernels of a program by name, called as the GPU's driver calls them: by an array of pointers to their arguments.
#pragma once
#include <string>

#include "machine.h"

namespace simt {

struct Kernel {
  size_t arguments = 0;
  std::function<void(void**)> call;
};

inline std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

template <class... Arguments, size_t... I>
inline Kernel adapt(void (*kernel)(Arguments...), std::index_sequence<I...>) {
  return {sizeof...(Arguments),
          [kernel](void** parameters) { kernel(*static_cast<Arguments*>(parameters[I])...); }};
}

template <class... Arguments>
inline bool add(const char* name, void (*kernel)(Arguments...)) {
  kernels()[name] = adapt(kernel, std::index_sequence_for<Arguments...>());
  return true;
}

}  // namespace simt

#define EXPORT(kernel) static bool kernel##_added = simt::add(#kernel, kernel);
