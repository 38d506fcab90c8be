// Attention of single queries by AMX, where the cache is bfloat16: scores and values. A tile's 16 rows are keys, or values, as they lie in the cache;
// queries and weights, of the query heads of a KV head, are rounded to bfloat16, sums are float32. attention.cpp, which calls this in place of
// attention.inc's, cuts contexts and merges. Nothing is asked for ahead: the processor does so by itself, and instructions for it cost more.

#include "amx.h"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

#include <algorithm>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16")

namespace flatout {
namespace amx {
namespace {

#include "amx_words.inc"

constexpr int kTileKeys = 16;
constexpr float kNothing = -1e30f;  // less than any score

// Heads of a KV head as columns of a tile: so many that its rows, of 4 bytes each, never lie across two lines of the cache.
constexpr int columns_of(int heads) {
  int columns = 1;
  while (columns < heads) columns *= 2;
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

// A KV head's keys, or values, of a piece.
struct Held {
  const uint16_t* first;
  const int64_t* at;
  int64_t count, apart;  // apart: elements from one to the next in a block
  int64_t place, block;  // of the first in its block; tokens of a block

  // 32 columns of 16 of them from t on as a tile, `stride` bytes apart: as they lie, or, out of two blocks and where there are fewer, copied, with
  // zeros beyond the last.
  inline const uint16_t* tile(int64_t t, int64_t d, uint16_t* copied, int64_t& stride) const {
    if (((place + t) & (block - 1)) + kTileKeys <= block && t + kTileKeys <= count) {
      stride = apart * 2;
      return first + at[t] + d;
    }
    for (int64_t j = 0; j < kTileKeys; j++) {
      _mm512_store_si512(copied + j * 32, t + j < count ? _mm512_loadu_si512(first + at[t + j] + d) : _mm512_setzero_si512());
    }
    stride = 64;
    return copied;
  }
};

// Tiles: 0 and 1 scores [16 keys][heads], 2 a query [16 pairs of columns][heads][2], 3 and 4 keys or values as they lie [16][32], 5 and 6 values
// weighed [heads][even columns, odd columns][16], 7 weights.
Config config_of(int heads) {
  Config config;
  for (const int scores : {0, 1, 2}) config.bytes[scores] = static_cast<uint16_t>(4 * heads);
  for (const int mixed : {5, 6, 7}) config.rows[mixed] = static_cast<uint8_t>(2 * heads);
  return config;
}

// Scores of a KV head, unscaled, [keys][columns].
void score(const Held& keys, const uint16_t* query, int columns, int64_t dim, float* to) {
  alignas(64) uint16_t copied[kTileKeys * 32];
  const uint16_t* tile;
  int64_t stride;
  for (int64_t t = 0; t < keys.count; t += 2 * kTileKeys) {
    const bool two = t + kTileKeys < keys.count;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < dim; d += 32) {
      _tile_loadd(2, query + d * columns, 4 * columns);
      tile = keys.tile(t, d, copied, stride);
      _tile_loadd(3, tile, stride);
      _tile_dpbf16ps(0, 3, 2);
      if (two) {
        tile = keys.tile(t + kTileKeys, d, copied, stride);
        _tile_loadd(4, tile, stride);
        _tile_dpbf16ps(1, 4, 2);
      }
    }
    _tile_stored(0, to + t * columns, 4 * columns);
    if (two) _tile_stored(1, to + (t + kTileKeys) * columns, 4 * columns);
  }
}

// Weights of a KV head's query heads, bfloat16. A row is 16 keys of one head, each in the first place of a pair whose other is zero, and the next row
// the same in the second place: so a tile of values as they lie gives sums of its even columns and of its odd ones.
struct Weights {
  alignas(64) uint32_t words[kPiece / kTileKeys][2 * kMostHeads][kTileKeys];
};

// [16][columns] as [columns][16].
template <int columns>
inline void turn(const __m512* from, __m512* to) {
  if constexpr (columns == 1) {
    to[0] = from[0];
  } else {
    const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    __m512 even[columns / 2], odd[columns / 2], even_to[columns / 2], odd_to[columns / 2];
#pragma GCC unroll 4
    for (int i = 0; i < columns / 2; i++) {
      even[i] = _mm512_permutex2var_ps(from[2 * i], evens, from[2 * i + 1]);
      odd[i] = _mm512_permutex2var_ps(from[2 * i], odds, from[2 * i + 1]);
    }
    turn<columns / 2>(even, even_to);
    turn<columns / 2>(odd, odd_to);
#pragma GCC unroll 4
    for (int i = 0; i < columns / 2; i++) to[2 * i] = even_to[i], to[2 * i + 1] = odd_to[i];
  }
}

inline __m512 most(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
inline __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }

// Lane by lane, of all lanes that are of one column.
template <int columns, __m512 (*fold)(__m512, __m512)>
inline __m512 folded(__m512 v) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int by = 8; by >= columns; by /= 2) v = fold(v, _mm512_permutexvar_ps(_mm512_xor_si512(lane, _mm512_set1_epi32(by)), v));
  return v;
}

// Scores [keys][columns] become weights, measured by their largest and rounded, and their sum that of what they were rounded to.
template <int heads>
void weigh(const FlatoutAttention& a, float* scores, int64_t count, Weights& to, float* peaks, float* sums) {
  constexpr int columns = columns_of(heads);
  const int64_t tiles = (count + kTileKeys - 1) / kTileKeys, numbers = count * columns;
  const __m512 scale = _mm512_set1_ps(a.scale), cap = _mm512_set1_ps(a.softcap);
  __m512 largest = _mm512_set1_ps(kNothing), total = _mm512_setzero_ps();
  for (int64_t i = 0; i < tiles * columns; i++) {
    __m512 score = _mm512_mul_ps(_mm512_load_ps(scores + 16 * i), scale);
    if (a.softcap > 0) score = _mm512_mul_ps(cap, tanh(_mm512_div_ps(score, cap)));
    if (16 * (i + 1) > numbers) {
      const int64_t left = std::max<int64_t>(numbers - 16 * i, 0);
      score = _mm512_mask_mov_ps(_mm512_set1_ps(2 * kNothing), static_cast<__mmask16>((1u << left) - 1), score);
    }
    _mm512_store_ps(scores + 16 * i, score);
    largest = _mm512_max_ps(score, largest);
  }
  largest = folded<columns, most>(largest);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000)), half = _mm512_set1_epi32(0x8000);
  for (int64_t t = 0; t < tiles; t++) {
    __m512 weight[columns], own[columns];
#pragma GCC unroll 8
    for (int i = 0; i < columns; i++) {
      const __m512 exact = exponential(_mm512_sub_ps(_mm512_load_ps(scores + 16 * (t * columns + i)), largest));
      weight[i] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(exact), half), upper));
      total = _mm512_add_ps(total, weight[i]);
    }
    turn<columns>(weight, own);
#pragma GCC unroll 8
    for (int h = 0; h < heads; h++) {
      _mm512_store_si512(to.words[t][2 * h], _mm512_srli_epi32(_mm512_castps_si512(own[h]), 16));
      _mm512_store_si512(to.words[t][2 * h + 1], _mm512_castps_si512(own[h]));
    }
  }
  constexpr __mmask16 those = (1u << heads) - 1;
  _mm512_mask_storeu_ps(peaks, those, largest);
  _mm512_mask_storeu_ps(sums, those, folded<columns, add>(total));
}

using Weigh = void (*)(const FlatoutAttention& a, float* scores, int64_t count, Weights& to, float* peaks, float* sums);
constexpr Weigh weighs[kMostHeads] = {weigh<1>, weigh<2>, weigh<3>, weigh<4>, weigh<5>, weigh<6>, weigh<7>, weigh<8>};

// A KV head's values, weighed, into mixed [heads][dim].
void mix(const Held& values, const Weights& weights, int heads, int64_t dim, float* mixed) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  alignas(64) uint16_t copied[kTileKeys * 32];
  alignas(64) float sums[2][2 * kMostHeads][16];
  const uint16_t* tile;
  int64_t stride;
  for (int64_t d = 0; d < dim; d += 64) {
    const bool two = d + 32 < dim;
    _tile_zero(5);
    _tile_zero(6);
    for (int64_t t = 0; t < values.count; t += kTileKeys) {
      _tile_loadd(7, weights.words[t / kTileKeys], 64);
      tile = values.tile(t, d, copied, stride);
      _tile_loadd(3, tile, stride);
      _tile_dpbf16ps(5, 7, 3);
      if (two) {
        tile = values.tile(t, d + 32, copied, stride);
        _tile_loadd(4, tile, stride);
        _tile_dpbf16ps(6, 7, 4);
      }
    }
    _tile_stored(5, sums[0], 64);
    _tile_stored(6, sums[1], 64);
    for (int i = 0; i < 1 + two; i++) {
      for (int h = 0; h < heads; h++) {
        const __m512 even = _mm512_load_ps(sums[i][2 * h]), odd = _mm512_load_ps(sums[i][2 * h + 1]);
        _mm512_storeu_ps(mixed + h * dim + d + 32 * i, _mm512_permutex2var_ps(even, low, odd));
        _mm512_storeu_ps(mixed + h * dim + d + 32 * i + 16, _mm512_permutex2var_ps(even, high, odd));
      }
    }
  }
}

}  // namespace

bool attends(const FlatoutAttention& a) { return available() && a.cache_type == FLATOUT_BFLOAT16 && a.dim % 32 == 0; }

int64_t query_bytes(const FlatoutAttention& a) { return int64_t{2} * a.kv_heads * columns_of(a.heads / a.kv_heads) * a.dim; }

// By KV head: [dim / 2][columns][2].
void lay_query(const FlatoutAttention& a, int64_t index, uint16_t* to) {
  const int heads = a.heads / a.kv_heads, columns = columns_of(heads);
  const __m512i apart = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(4 * columns));
  for (int h = 0; h < a.heads; h++) {
    const int64_t from = a.tokens[index] * a.q_stride + h * a.dim;
    uint16_t* tile = to + (h / heads) * columns * a.dim + h % heads * 2;
    for (int64_t d = 0; d < a.dim; d += 32) _mm512_i32scatter_epi32(tile + d * columns, apart, pairs_of(a, from + d), 1);
  }
}

void begin(const FlatoutAttention& a) {
  const Config config = config_of(a.heads / a.kv_heads);
  configure(config);
}

void end() { _tile_release(); }

void attend(const FlatoutAttention& a, const int64_t* at, int64_t count, const uint16_t* query, const AttentionPiece& to) {
  const int heads = a.heads / a.kv_heads, columns = columns_of(heads);
  const int64_t dim = a.dim, apart = static_cast<int64_t>(a.kv_heads) * dim, place = at[0] / apart & (a.block_size - 1);
  const uint16_t *keys = static_cast<const uint16_t*>(a.k), *values = static_cast<const uint16_t*>(a.v);
  alignas(64) float scores[kPiece * 16];
  Weights weights;
  const int together = 16 / columns;  // KV heads
  for (int kv = 0; kv < a.kv_heads; kv += together) {
    const int last = std::min(kv + together, a.kv_heads);
    for (int i = kv; i < last; i++) {
      const Held own{keys + i * dim, at, count, apart, place, a.block_size};
      score(own, query + i * columns * dim, columns, dim, scores + (i - kv) * columns * kPiece);
    }
    for (int i = kv; i < last; i++) {
      weighs[heads - 1](a, scores + (i - kv) * columns * kPiece, count, weights, to.largest + i * heads, to.total + i * heads);
      mix({values + i * dim, at, count, apart, place, a.block_size}, weights, heads, dim, to.mixed + i * heads * dim);
    }
  }
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
void begin(const FlatoutAttention&) {}
void attend(const FlatoutAttention&, const int64_t*, int64_t, const uint16_t*, const AttentionPiece&) {}
void end() {}

}  // namespace amx
}  // namespace flatout

#endif
