// float16 by plain C++, where no vector of them is at hand. Used by scalar.cpp and blocks.cpp.

#ifndef FLATOUT_HALF_H
#define FLATOUT_HALF_H

#include <cstdint>
#include <cstring>

namespace flatout {

inline float half(uint32_t h) {
  const uint32_t sign = (h & 0x8000) << 16, size = h & 0x7FFF;
  uint32_t bits = (size << 13) + (112u << 23);          // 112: what the exponents' biases differ by
  if (size >= 0x7C00) bits = (size << 13) | 0x7F800000;  // infinite or NaN
  float f;
  std::memcpy(&f, &bits, sizeof f);
  if (size < 0x400) f = static_cast<float>(size) * 0x1p-24f;  // zero or subnormal
  return sign ? -f : f;
}

// To the nearest, ties to even.
inline uint16_t to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00 | (size >> 13 & 0x1FF));  // NaN
  if (size >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);                        // beyond 65504, as rounded
  if (size < 0x38800000) {  // subnormal: adding 0.5 leaves the units of 2^-24 in the last bits
    float a;
    std::memcpy(&a, &size, sizeof a);
    a += 0.5f;
    std::memcpy(&bits, &a, sizeof bits);
    return static_cast<uint16_t>(sign | (bits - 0x3F000000));
  }
  return static_cast<uint16_t>(sign | ((size - (112u << 23) + 0xFFF + (size >> 13 & 1)) >> 13));
}

}  // namespace flatout

#endif
