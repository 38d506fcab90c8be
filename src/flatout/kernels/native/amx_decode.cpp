// Attention of single queries by AMX, where the cache is bfloat16: scores alone. A tile's 16 rows are keys as they lie in the cache, its columns the
// query heads of a KV head, as bfloat16. Values are mixed in float32 from bfloat16 as they lie. attention.cpp, which calls this in place of
// attention.inc's, cuts contexts and merges.

#include "amx.h"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <limits>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16")

namespace flatout {
namespace amx {
namespace {

#include "amx_words.inc"

constexpr int kTileKeys = 16;

// Heads of a KV head as columns of a tile: so many that its rows, of 4 bytes each, never lie across two lines of the cache.
int columns_of(const FlatoutAttention& a) {
  int columns = 1;
  while (columns < a.heads / a.kv_heads) columns *= 2;
  return columns;
}

// 32 columns of a query in pairs, as the words that a tile holds.
inline __m512i pairs_of(const FlatoutAttention& a, int64_t at) {
  if (a.type == FLATOUT_BFLOAT16) return _mm512_loadu_si512(static_cast<const uint16_t*>(a.q) + at);
  const float* q = static_cast<const float*>(a.q) + at;
  const __m512 first = _mm512_loadu_ps(q), second = _mm512_loadu_ps(q + 16);
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  alignas(64) uint16_t pairs[32];
  put(pairs, _mm512_permutex2var_ps(first, even, second), _mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second));
  return _mm512_load_si512(pairs);
}

inline __m512 tanh(__m512 x) {
  const __m512 size = _mm512_abs_ps(x), e = exponential(_mm512_mul_ps(size, _mm512_set1_ps(-2.0f)));
  const __m512 t = _mm512_div_ps(_mm512_sub_ps(_mm512_set1_ps(1.0f), e), _mm512_add_ps(_mm512_set1_ps(1.0f), e));
  return _mm512_or_ps(t, _mm512_and_ps(x, _mm512_set1_ps(-0.0f)));
}

inline void ask_for(const uint16_t* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(from) + line, _MM_HINT_T0);
}

// The next piece's keys and values, asked for a few lines at a time while this one's values are mixed, column by column alike.
struct Ahead {
  const uint16_t *keys, *values;
  const int64_t* at;
  int64_t count, bytes;

  Ahead of(int64_t column, int64_t columns) const { return {keys + column, values + column, at, count, columns * 2}; }

  inline void ask(int64_t t) const {
    if (t < count) ask_for(keys + at[t], bytes), ask_for(values + at[t], bytes);
  }
};

// Values of `heads` query heads, `vectors` times 32 columns of them, weighed by weights[key][head], into mixed [heads][dim].
template <int heads, int vectors>
void mix(const uint16_t* values, const int64_t* at, int64_t count, const float* weights, int64_t dim, float* mixed, const Ahead& ahead) {
  __m512 even[heads][vectors], odd[heads][vectors];
#pragma GCC unroll 8
  for (int h = 0; h < heads; h++) {
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) even[h][i] = odd[h][i] = _mm512_setzero_ps();
  }
  for (int64_t t = 0; t < count; t++) {
    const uint16_t* value = values + at[t];
    ahead.ask(t);
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) {
      const __m512i both = _mm512_loadu_si512(value + 32 * i);
      const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
#pragma GCC unroll 8
      for (int h = 0; h < heads; h++) {
        const __m512 weight = _mm512_set1_ps(weights[t * 16 + h]);
        even[h][i] = _mm512_fmadd_ps(weight, first, even[h][i]);
        odd[h][i] = _mm512_fmadd_ps(weight, second, odd[h][i]);
      }
    }
  }
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int h = 0; h < heads; h++) {
    for (int i = 0; i < vectors; i++) {
      _mm512_storeu_ps(mixed + h * dim + 32 * i, _mm512_permutex2var_ps(even[h][i], low, odd[h][i]));
      _mm512_storeu_ps(mixed + h * dim + 32 * i + 16, _mm512_permutex2var_ps(even[h][i], high, odd[h][i]));
    }
  }
}

template <int heads>
void mix_all(const uint16_t* values, const int64_t* at, int64_t count, const float* weights, int64_t dim, float* mixed, const Ahead& ahead) {
  constexpr int vectors = heads <= 4 ? 2 : 1;  // as many sums as the registers hold
  int64_t i = 0;
  for (; i + 32 * vectors <= dim; i += 32 * vectors) mix<heads, vectors>(values + i, at, count, weights, dim, mixed + i, ahead.of(i, 32 * vectors));
  for (; i < dim; i += 32) mix<heads, 1>(values + i, at, count, weights, dim, mixed + i, ahead.of(i, 32));
}

// Where a piece's keys lie.
struct Keys {
  const uint16_t* first;  // a KV head's
  const int64_t* at;
  int64_t count, apart;  // apart: elements from one to the next in a block
  int64_t place, block;  // of the first key in its block; keys of a block

  // 16 of them from t on as a tile, `stride` bytes apart: as they lie, with whatever is beyond the last, or, out of two blocks, copied.
  const uint16_t* tile(int64_t t, int64_t d, uint16_t* copied, int64_t& stride) const {
    if (((place + t) & (block - 1)) + kTileKeys <= block) {
      stride = apart * 2;
      return first + at[t] + d;
    }
    for (int64_t j = 0; j < kTileKeys; j++) std::memcpy(copied + j * 32, first + at[std::min(t + j, count - 1)] + d, 64);
    stride = 64;
    return copied;
  }
};

// Scores of a KV head, unscaled: a row of 16 for each key, of which the first columns are its query heads'. Beyond the last key: anything.
void score(const Keys& keys, const uint16_t* query, int columns, int64_t dim, float* to) {
  alignas(64) uint16_t copied[kTileKeys * 32];
  int64_t stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < dim; d += 32) {
    _tile_loadd(6, query + d * columns, 4 * columns);
    const uint16_t* tile = keys.tile(0, d, copied, stride);
    _tile_loadd(4, tile, stride);
    _tile_dpbf16ps(0, 4, 6);
    if (keys.count > 16) {
      tile = keys.tile(16, d, copied, stride);
      _tile_loadd(5, tile, stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if (keys.count > 32) {
      tile = keys.tile(32, d, copied, stride);
      _tile_loadd(4, tile, stride);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (keys.count > 48) {
      tile = keys.tile(48, d, copied, stride);
      _tile_loadd(5, tile, stride);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, to, 64);
  _tile_stored(1, to + 256, 64);
  _tile_stored(2, to + 512, 64);
  _tile_stored(3, to + 768, 64);
}

using Mix = void (*)(const uint16_t* values, const int64_t* at, int64_t count, const float* weights, int64_t dim, float* mixed, const Ahead& ahead);
constexpr Mix mixes[kMostHeads] = {mix_all<1>, mix_all<2>, mix_all<3>, mix_all<4>, mix_all<5>, mix_all<6>, mix_all<7>, mix_all<8>};

}  // namespace

bool attends(const FlatoutAttention& a) { return available() && a.cache_type == FLATOUT_BFLOAT16 && a.dim % 32 == 0; }

int64_t query_bytes(const FlatoutAttention& a) { return int64_t{2} * a.kv_heads * columns_of(a) * a.dim; }

// By KV head: [dim / 2][columns][2].
void lay_query(const FlatoutAttention& a, int64_t index, uint16_t* to) {
  const int heads = a.heads / a.kv_heads, columns = columns_of(a);
  const __m512i apart = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(4 * columns));
  for (int h = 0; h < a.heads; h++) {
    const int64_t from = a.tokens[index] * a.q_stride + h * a.dim;
    uint16_t* tile = to + (h / heads) * columns * a.dim + h % heads * 2;
    for (int64_t d = 0; d < a.dim; d += 32) _mm512_i32scatter_epi32(tile + d * columns, apart, pairs_of(a, from + d), 1);
  }
}

void attend(const FlatoutAttention& a, const int64_t* at, int64_t count, int64_t more, const uint16_t* query, const AttentionPiece& to) {
  const int heads = a.heads / a.kv_heads, columns = columns_of(a);
  const int64_t dim = a.dim, apart = static_cast<int64_t>(a.kv_heads) * dim;
  const uint16_t *keys = static_cast<const uint16_t*>(a.k), *values = static_cast<const uint16_t*>(a.v);
  const Ahead ahead{keys, values, at + count, more, 0};
  alignas(64) float scores[kPiece * 16];  // a column for each query head
  Config config;
  for (const int narrow : {0, 1, 2, 3, 6}) config.bytes[narrow] = static_cast<uint16_t>(4 * heads);
  configure(config);
  const int together = 16 / heads;  // KV heads
  for (int kv = 0; kv < a.kv_heads; kv += together) {
    const int some = std::min(together, a.kv_heads - kv);
    for (int i = 0; i < some; i++) {
      const Keys own{keys + (kv + i) * dim, at, count, apart, at[0] / apart & (a.block_size - 1), a.block_size};
      score(own, query + (kv + i) * columns * dim, columns, dim, scores + i * heads);
    }
    const __mmask16 own = static_cast<__mmask16>((1u << some * heads) - 1);
    const __m512 scale = _mm512_set1_ps(a.scale), cap = _mm512_set1_ps(a.softcap);
    __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity()), total = _mm512_setzero_ps();
    for (int64_t t = 0; t < count; t++) {
      __m512 score = _mm512_mul_ps(_mm512_maskz_loadu_ps(own, scores + 16 * t), scale);
      if (a.softcap > 0) score = _mm512_mul_ps(cap, tanh(_mm512_div_ps(score, cap)));
      _mm512_store_ps(scores + 16 * t, score);
      largest = _mm512_max_ps(score, largest);
    }
    for (int64_t t = 0; t < count; t++) {
      const __m512 weight = exponential(_mm512_sub_ps(_mm512_load_ps(scores + 16 * t), largest));
      _mm512_store_ps(scores + 16 * t, weight);
      total = _mm512_add_ps(total, weight);
    }
    _mm512_mask_storeu_ps(to.largest + kv * heads, own, largest);
    _mm512_mask_storeu_ps(to.total + kv * heads, own, total);
    for (int i = 0; i < some; i++) {
      mixes[heads - 1](values + (kv + i) * dim, at, count, scores + i * heads, dim, to.mixed + (kv + i) * heads * dim, ahead.of((kv + i) * dim, dim));
    }
  }
  _tile_release();
}

}  // namespace amx
}  // namespace flatout

#pragma GCC pop_options

#else

namespace flatout {
namespace amx {

bool attends(const FlatoutAttention&) { return false; }
int64_t query_bytes(const FlatoutAttention&) { return 0; }
void lay_query(const FlatoutAttention&, int64_t, uint16_t*) {}
void attend(const FlatoutAttention&, int64_t, int64_t, int64_t, const uint16_t*, const AttentionPiece&) {}

}  // namespace amx
}  // namespace flatout

#endif
