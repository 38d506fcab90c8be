// Products of many rows by AMX: rows and weights as bfloat16, sums in float32, from the packed weights, or the plain ones of bfloat16, themselves.
//
// A pair of blocks of 16 lines (two neighbours, or a gate's and its up's) is unpacked or turned once, in the layout of the tiles, and meets all rows, 32 at
// a time; kernels.inc's finish() takes the sums. Called by products.cpp where available() says so. No threads here.
//
// What counts is where operands lie: 512 columns of a pair are 32 KB, which stay in the L1 while rows stream past from the L2.

#include "amx.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

namespace flatout {
namespace amx {
namespace {

constexpr int kColumns = 512;  // of a pair of blocks that stay in the L1

bool supported() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned tile = 1u << 24, bf16 = 1u << 22;
  if ((d & (tile | bf16)) != (tile | bf16)) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM: tiles' registers are the process's to ask for
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

}  // namespace

bool available() {
  static const bool is = supported();
  return is && std::strcmp(kernels().name, "avx512_vnni") == 0;
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16")

namespace {

#include "amx_words.inc"

inline __m512 value(__m512i four, int shift, __m512i mask, __m512 d, __m512 m) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(four, shift), mask)), d, m);
}

// A block's groups as tiles of 32 columns by 16 lines.
template <int kind>
void unpack(const uint8_t* block, int64_t groups, uint16_t* to) {
  const __m512i mask = _mm512_set1_epi32(kind == 4 ? 15 : 255);
  for (int64_t g = 0; g < groups; g++, block += group_bytes(kind), to += 512) {
    const uint8_t* scales = block + (kind == 4 ? 256 : 512);
    const __m512 d = halves(scales);
    const __m512 m = kind == 4 ? halves(scales + 2 * kLines) : _mm512_mul_ps(d, _mm512_set1_ps(-128.0f));
    for (int c = 0; c < kind; c++) {
      const __m512i four = _mm512_loadu_si512(block + 64 * c);
      put(to + 64 * c, value(four, 0, mask, d, m), value(four, 8, mask, d, m));
      put(to + 64 * c + 32, value(four, 16, mask, d, m), value(four, 24, mask, d, m));
      if (kind == 4) {  // the upper halves are the columns from 16 on
        put(to + 64 * c + 256, value(four, 4, mask, d, m), value(four, 12, mask, d, m));
        put(to + 64 * c + 288, value(four, 20, mask, d, m), value(four, 28, mask, d, m));
      }
    }
  }
}

// 16 lines of a plain weight as such tiles, in which two neighbouring columns of all lines lie side by side: pairs are turned like a matrix of 16 x 16.
void turn(const uint16_t* lines, int64_t columns, uint16_t* to) {
  for (int64_t k = 0; k < columns; k += 32, to += 512) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(lines + i * columns + k);
    for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    for (int i = 0; i < 16; i += 4) {
      for (int j = 0; j < 2; j++) {
        a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
        a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
      }
    }
    for (int j = 0; j < 4; j++) {  // of each quarter, columns j, 4 + j, 8 + j and 12 + j of four lines
      const __m512i upper = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), lower = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
      const __m512i odd_upper = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xDD), odd_lower = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xDD);
      _mm512_store_si512(to + 32 * j, _mm512_shuffle_i32x4(upper, lower, 0x88));
      _mm512_store_si512(to + 32 * (8 + j), _mm512_shuffle_i32x4(upper, lower, 0xDD));
      _mm512_store_si512(to + 32 * (4 + j), _mm512_shuffle_i32x4(odd_upper, odd_lower, 0x88));
      _mm512_store_si512(to + 32 * (12 + j), _mm512_shuffle_i32x4(odd_upper, odd_lower, 0xDD));
    }
  }
}

// sums [row tiles][two blocks][16 rows][16 lines] of all rows, which are whole pairs of tiles, as round_row() laid them out.
void multiply(const uint16_t* x, int64_t rows, int64_t columns, const uint16_t* const (&w)[2], float* sums) {
  configure(Config());
  for (int64_t from = 0; from < columns; from += kColumns) {
    const int64_t to = from + kColumns < columns ? from + kColumns : columns;
    for (int64_t r = 0; r < rows; r += 32) {
      float* at = sums + r * 32;
      if (from == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      } else {
        _tile_loadd(0, at, 64);
        _tile_loadd(1, at + 256, 64);
        _tile_loadd(2, at + 512, 64);
        _tile_loadd(3, at + 768, 64);
      }
      const uint16_t *upper = x + r * columns, *lower = upper + 16 * columns;
      for (int64_t k = from; k < to; k += 32) {
        _tile_loadd(4, upper + k * 16, 64);
        _tile_loadd(6, w[0] + k * 16, 64);
        _tile_loadd(5, lower + k * 16, 64);
        _tile_loadd(7, w[1] + k * 16, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, at, 64);
      _tile_stored(1, at + 256, 64);
      _tile_stored(2, at + 512, 64);
      _tile_stored(3, at + 768, 64);
    }
  }
  _tile_release();
}

}  // namespace

void round_row(const float* x, int64_t columns, int64_t row, uint16_t* to) {
  to += row / 16 * 16 * columns + row % 16 * 32;
  for (int64_t i = 0; i < columns; i += 16) {
    const __m512i high = x ? to_bfloat16(_mm512_loadu_ps(x + i)) : _mm512_setzero_si512();
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i / 32 * 512 + i % 32), _mm512_cvtepi32_epi16(_mm512_srli_epi32(high, 16)));
  }
}

int64_t scratch_bytes(int64_t rows, int64_t columns) { return padded(rows) * 32 * 4 + 2 * columns * 32; }

void pair(const FlatoutProduct& p, const uint16_t* x, int64_t first, int64_t second, char* scratch) {
  const int64_t groups = p.columns / kGroup, bytes = p.kind == 16 ? p.columns * kLines * 2 : groups * group_bytes(p.kind);
  float* sums = reinterpret_cast<float*>(scratch);
  uint16_t* w = reinterpret_cast<uint16_t*>(sums + padded(p.rows) * 32);
  const uint16_t* const both[2] = {w, w + (second == first ? 0 : p.columns * 16)};
  for (int i = 0; i < (second == first ? 1 : 2); i++) {
    const uint8_t* block = static_cast<const uint8_t*>(p.weight) + (i ? second : first) * bytes;
    if (p.kind == 16) turn(reinterpret_cast<const uint16_t*>(block), p.columns, w + i * p.columns * 16);
    else if (p.kind == 4) unpack<4>(block, groups, w + i * p.columns * 16);
    else unpack<8>(block, groups, w + i * p.columns * 16);
  }
  multiply(x, padded(p.rows), p.columns, both, sums);
  for (int64_t r = 0; r < p.rows; r += 16) {
    const int count = static_cast<int>(p.rows - r < 16 ? p.rows - r : 16);
    const float* at = sums + r * 32;
    kernels().finish(p, r, count, first * kLines, at, at + 256);
    if (!p.gate && second != first) kernels().finish(p, r, count, second * kLines, at + 256, nullptr);
  }
}

#pragma GCC pop_options

}  // namespace amx
}  // namespace flatout

#else

namespace flatout {
namespace amx {

bool available() { return false; }
void round_row(const float*, int64_t, int64_t, uint16_t*) {}
int64_t scratch_bytes(int64_t, int64_t) { return 0; }
void pair(const FlatoutProduct&, const uint16_t*, int64_t, int64_t, char*) {}

}  // namespace amx
}  // namespace flatout

#endif
