// The thread pool's one primitive, share(), and what cuts work into its parts. Used by products.cpp and attention.cpp; its state, its workers and their sleep are pool.cpp's.

#ifndef FLATOUT_POOL_H
#define FLATOUT_POOL_H

#include <algorithm>
#include <cstdint>

namespace flatout {

int threads();  // asked for, the caller's among them

// Calls of several Python threads take turns: hold one of these around all calls of share() and the memory they work on.
class Turn {
 public:
  Turn();
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
};

using Part = void (*)(const void* context, int part);
void share(int parts, Part run, const void* context);

// Calls run(0) ... run(parts - 1), each once, here and on whatever workers are awake, a stretch for each thread; returns when all are done. Nobody waits for a worker
// that has not begun: one that sleeps or was displaced by another process costs its help, not more.
template <class Run>
void share(int parts, const Run& run) {
  share(parts, [](const void* context, int part) { (*static_cast<const Run*>(context))(part); }, &run);
}

constexpr int kPartsEach = 4;  // for every thread, so that one which is late or slow holds up the others by little

// Into how many ranges of 0 ... count - 1 work is cut; `size` is the whole work and `least` what a part should have of it.
inline int parts_of(int64_t count, int64_t size, int64_t least) {
  const int n = threads();
  const int64_t most = n == 1 ? 1 : std::min<int64_t>(n * kPartsEach, size / least);
  return static_cast<int>(std::clamp<int64_t>(most, 1, count));
}

// run(begin, end) over those ranges, by all threads.
template <class Run>
void share_ranges(int64_t count, int64_t size, int64_t least, const Run& run) {
  const int64_t parts = parts_of(count, size, least);
  share(static_cast<int>(parts), [&](int i) {
    run(count * i / parts, count * (i + 1) / parts);
  });
}

}  // namespace flatout

#endif
