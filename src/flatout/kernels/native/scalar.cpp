// Words of plain C++ for kernels.inc, with the vectors of four that GCC and Clang offer on any processor. For machines without AVX2 and for
// architectures that have no words of their own here; right everywhere, fast nowhere.

#include "half.h"
#include "kernels.h"

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

namespace flatout {
namespace {

constexpr int lanes = 4;
using F = float __attribute__((vector_size(16)));
using I = int32_t __attribute__((vector_size(16)));

inline F fma(F a, F b, F c) { return a * b + c; }

// Adding 1.5 * 2^23 leaves no bits for a fraction. Only for |a| < 2^22, which is all that kernels.inc asks.
inline I nearest(F a) { return __builtin_convertvector((a + 12582912.0f) - 12582912.0f, I); }

inline F exact_quotient(F a, F d, F) { return a / d; }

template <int by, class V>
inline V turned(V a) {
  return by == 2 ? V{a[2], a[3], a[0], a[1]} : V{a[1], a[0], a[3], a[2]};
}

inline F halves(const uint8_t* p) {
  uint16_t h[lanes];
  std::memcpy(h, p, sizeof h);
  return F{half(h[0]), half(h[1]), half(h[2]), half(h[3])};
}

inline void to_halves(uint8_t* p, F a) {
  const uint16_t h[lanes] = {to_half(a[0]), to_half(a[1]), to_half(a[2]), to_half(a[3])};
  std::memcpy(p, h, sizeof h);
}

inline I bytes(const uint8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
inline I codes(const int8_t* p) { return I{p[0], p[1], p[2], p[3]}; }

template <int kind>
struct Codes {
  I c[8];  // in each lane a line's four codes

  Codes(const uint8_t* p, int first) {
    for (int i = 0; i < kind; i++) {
      std::memcpy(&c[i], p + 64 * i + 4 * first, sizeof c[i]);
      if (kind == 4) {
        c[i + 4] = c[i] >> 4 & 0x0F0F0F0F;
        c[i] &= 0x0F0F0F0F;
      }
    }
  }

  I dot(const int8_t* q, int32_t shift) const {
    I sum = kind == 4 ? I{} : shift - I{};
    for (int i = 0; i < 8; i++) {
      for (int j = 0; j < 4; j++) sum += (c[i] >> 8 * j & 255) * static_cast<int32_t>(q[4 * i + j]);
    }
    return sum;
  }
};

#include "kernels.inc"

}  // namespace

constexpr Kernels kScalar = table<4>("scalar");

}  // namespace flatout
