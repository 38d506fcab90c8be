// Which instruction set's kernels run: the best that the processor and its system support, or the one a test asks for.
// The library itself is compiled for any processor of its architecture; only the tables named here hold more.

#include "kernels.h"

#include <atomic>
#include <cstring>

namespace flatout {
namespace {

struct Choice {
  const Kernels* kernels;
  bool (*supported)();
};

// the best first
const Choice choices[] = {
#if defined(__x86_64__)
    {&kAvx512,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma") != 0;
     }},
    {&kAvx2, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") != 0; }},  // all that have AVX2 have F16C
#endif
    {&kScalar, [] { return true; }},
};

const Kernels* best() {
#if defined(__x86_64__)
  __builtin_cpu_init();  // this may run before the constructor that else does it
#endif
  for (const Choice& c : choices) {
    if (c.supported()) return c.kernels;
  }
  return &kScalar;
}

std::atomic<const Kernels*> chosen{best()};

}  // namespace

const Kernels& kernels() { return *chosen.load(std::memory_order_relaxed); }

}  // namespace flatout

FLATOUT_API const char* flatout_isa(void) { return flatout::kernels().name; }

FLATOUT_API int flatout_use_isa(const char* name) {
  using namespace flatout;
  for (const Choice& c : choices) {
    if (std::strcmp(c.kernels->name, name) == 0 && c.supported()) {
      chosen = c.kernels;
      return 0;
    }
  }
  return 1;
}
