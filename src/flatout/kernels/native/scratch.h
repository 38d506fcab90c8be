// Scratch memory of one thread, used again by each of its calls. Used by products.cpp and attention.cpp.

#ifndef FLATOUT_SCRATCH_H
#define FLATOUT_SCRATCH_H

#include <cstddef>
#include <cstdlib>

namespace flatout {

// Memory that only grows, the caller's own: a thread's calls use it again and again.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }

  char* at_least(size_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      size_ = (bytes + bytes / 2 + 63) / 64 * 64;
      memory_ = static_cast<char*>(std::aligned_alloc(64, size_));
      if (!memory_) size_ = 0;
    }
    return memory_;
  }

 private:
  char* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace flatout

#endif
