// Words of AVX2 (with FMA and F16C) for kernels.inc: 8 lines in a vector.
// Called only where cpu.cpp found the instructions; so nothing that other files share may be compiled here, or it would hold them too.

#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace flatout {
namespace {

constexpr int lanes = 8;
using F = float __attribute__((vector_size(32)));
using I = int32_t __attribute__((vector_size(32)));

inline F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline I nearest(F a) { return (I)_mm256_cvtps_epi32((__m256)a); }
inline F halves(const uint8_t* p) { return (F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void to_halves(uint8_t* p, F a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT)); }
inline I bytes(const uint8_t* p) { return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline I codes(const int8_t* p) { return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }

// Markstein's correction of a * inverse: three instructions where a division takes several cycles.
inline F exact_quotient(F a, F d, F inverse) {
  const F near = a * inverse;
  return fma(fma(-near, d, a), inverse, near);
}

template <int by, class V>
inline V turned(V a) {
  const __m256i v = (__m256i)a;
  if (by == 4) return (V)_mm256_permute2x128_si256(v, v, 1);
  return (V)(by == 2 ? _mm256_shuffle_epi32(v, 0x4E) : _mm256_shuffle_epi32(v, 0xB1));
}

inline int32_t four(const int8_t* q) {
  int32_t a;
  std::memcpy(&a, q, sizeof a);
  return a;
}

// The one multiplication of bytes, maddubs, adds pairs into 16 bits and saturates. Kind 4 cannot get there: 16 products of 15 * 127 are
// 30,480. Kind 8 would by 255 * 127 * 2, so it multiplies |code - 128| by q with the code's sign: 128 * 127 * 2 is 32,512.
template <int kind>
struct Codes {
  __m256i c[8];

  Codes(const uint8_t* p, int first) {
    const __m256i low = _mm256_set1_epi8(15), middle = _mm256_set1_epi8(-128);
    for (int i = 0; i < kind; i++) {
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * i + 4 * first));
      c[i] = kind == 4 ? _mm256_and_si256(v, low) : _mm256_xor_si256(v, middle);
      if (kind == 4) c[i + 4] = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
    }
  }

  I dot(const int8_t* q, int32_t) const {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < 8; i++) {
      const __m256i x = _mm256_set1_epi32(four(q + 4 * i));
      if (kind == 4) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(c[i], x));
      } else {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(c[i]), _mm256_sign_epi8(x, c[i]));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
      }
    }
    return (I)(kind == 4 ? _mm256_madd_epi16(sum, ones) : sum);
  }
};

#include "kernels.inc"

}  // namespace

constexpr Kernels kAvx2 = table<4>("avx2");

}  // namespace flatout

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
