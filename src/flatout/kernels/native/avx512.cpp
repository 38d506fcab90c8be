// Words of AVX-512 with VNNI for kernels.inc: 16 lines in a vector, 32 products of bytes for each in eight instructions.
// Called only where cpu.cpp found the instructions; so nothing that other files share may be compiled here, or it would hold them too.

#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#endif

namespace flatout {
namespace {

constexpr int lanes = 16;
using F = float __attribute__((vector_size(64)));
using I = int32_t __attribute__((vector_size(64)));

inline F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline I nearest(F a) { return (I)_mm512_cvtps_epi32((__m512)a); }
inline F halves(const uint8_t* p) { return (F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void to_halves(uint8_t* p, F a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT)); }
inline I bytes(const uint8_t* p) { return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline I codes(const int8_t* p) { return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

// Markstein's correction of a * inverse: three instructions where a division takes sixteen cycles.
inline F exact_quotient(F a, F d, F inverse) {
  const F near = a * inverse;
  return fma(fma(-near, d, a), inverse, near);
}

template <int by, class V>
inline V turned(V a) {
  const __m512i v = (__m512i)a;
  if (by == 8) return (V)_mm512_shuffle_i64x2(v, v, 0x4E);
  if (by == 4) return (V)_mm512_shuffle_i64x2(v, v, 0xB1);
  return (V)_mm512_shuffle_epi32(v, by == 2 ? _MM_PERM_BADC : _MM_PERM_CDAB);
}

// One at a time, or GCC loads pairs and parts them in registers, and each broadcast takes a port from the products.
inline int32_t four(const int8_t* q) {
  int32_t a;
  std::memcpy(&a, q, sizeof a);
  return a;
}

template <int kind>
struct Codes {
  __m512i c[8];

  Codes(const uint8_t* p, int) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int i = 0; i < kind; i++) {
      const __m512i v = _mm512_loadu_si512(p + 64 * i);
      c[i] = kind == 4 ? _mm512_and_si512(v, low) : v;
      if (kind == 4) c[i + 4] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
    }
  }

  // Two chains, as an instruction waits five cycles for the one before it.
  I dot(const int8_t* q, int32_t shift) const {
    __m512i a = kind == 4 ? _mm512_setzero_si512() : _mm512_set1_epi32(shift), b = _mm512_setzero_si512();
    for (int i = 0; i < 4; i++) {
      a = _mm512_dpbusd_epi32(a, c[i], _mm512_set1_epi32(four(q + 4 * i)));
      b = _mm512_dpbusd_epi32(b, c[i + 4], _mm512_set1_epi32(four(q + 4 * i + 16)));
    }
    return (I)_mm512_add_epi32(a, b);
  }
};

#include "kernels.inc"

}  // namespace

constexpr Kernels kAvx512 = table<16>("avx512_vnni");

}  // namespace flatout

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
