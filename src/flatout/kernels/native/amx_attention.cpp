// Attention of a chunk's queries by AMX: queries, keys, values and weights as bfloat16, scores and sums in float32, after FlashAttention (Dao et
// al. 2022): keys in blocks, a running largest score and sum for each query.
//
// Everything lies keys first: scores are K Q^T, so that a row of a tile is one key for 16 queries, the largest and the sum of a query are found
// without crossing lanes, and two rows of weights are, side by side, what the next product reads. Keys and values are rounded and put into tiles
// once a chunk. Codes of an int8 cache are exact in bfloat16: scores are multiplied by their keys' scales, weights by their values'; and where queries
// are float32 both of these are parted in three, whose sum they are. Called through flatout_chunk(), which shares blocks of queries among threads.

#include "amx.h"
#include "pool.h"
#include "scratch.h"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

#include <cstring>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16")

namespace flatout {
namespace amx {
namespace {

#include "amx_words.inc"

constexpr int kKeys = 64, kQueries = 32;  // of a block
constexpr int kMostParts = 3;             // of bfloat16, that a number is taken in
constexpr float kNothing = -1e30f;        // less than any score: hidden keys, and the largest of none

struct Laid {  // in tiles
  uint16_t* keys;    // [keys / 16][dim / 32][16 keys][32 dims]
  uint16_t* values;  // [keys / 32][dim / 16][16 dims][32 keys]
  float *key_scales, *value_scales;  // [keys], of codes
};

inline bool coded(const FlatoutChunk& c) { return c.cache_type == FLATOUT_INT8; }

inline __m512 numbers(const FlatoutChunk& c, const void* from, int64_t at) {  // 16 of the cache's
  if (coded(c)) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const int8_t*>(from) + at))));
  const uint8_t* p = static_cast<const uint8_t*>(from) + at * 2;
  if (c.cache_type == FLATOUT_FLOAT16) return halves(p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

inline __m512 query(const FlatoutChunk& c, int64_t at) {
  if (c.type == FLATOUT_FLOAT32) return _mm512_loadu_ps(static_cast<const float*>(c.q) + at);
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(c.q) + at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m256i narrowed(__m512 a) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(to_bfloat16(a), 16)); }

inline int64_t place(const FlatoutChunk& c, int64_t key, int kv_head) {
  return ((c.slots ? c.slots[key] : c.first_slot + key) * c.kv_heads + kv_head) * head_elements(c.cache_type, c.dim);
}

inline float scale_of(const FlatoutChunk& c, const void* from, int64_t at) {
  float d;
  std::memcpy(&d, static_cast<const int8_t*>(from) + at + c.dim, sizeof d);
  return d;
}

// A number's next part, which is taken from it.
inline __m512 part_of(__m512& a) {
  const __m512 part = _mm512_castsi512_ps(_mm512_and_si512(to_bfloat16(a), _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
  a = _mm512_sub_ps(a, part);
  return part;
}

// 16 rows apart by a row of a tile: where a vector's lanes go when columns become rows.
inline __m512i column_of_tile() { return _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(64)); }

// What a block of queries of one head has found so far.
struct Found {
  alignas(64) float mixed[kMostDim * kQueries];  // [dim / 16][two tiles of queries][16 dims][16 queries]
  alignas(64) float scores[kKeys * kQueries];    // [keys / 16][two tiles][16 keys][16 queries]
  alignas(64) uint16_t weights[kMostParts][kKeys * kQueries];  // [keys / 32][two tiles][16 pairs of keys][16 queries][2]
  alignas(64) uint16_t queries[kMostParts][kMostDim * kQueries];  // [dim / 32][two tiles][16 pairs of dims][16 queries][2]
  __m512 largest[2], total[2];
};

template <int parts>
void scores_of(const Laid& laid, int64_t key, int64_t dim, Found& f) {
  for (int half = 0; half < 2; half++) {
    const uint16_t* keys = laid.keys + (key + 32 * half) * dim;
    float* to = f.scores + half * 1024;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < dim; d += 32) {
      _tile_loadd(4, keys + d * 16, 64);
      _tile_loadd(5, keys + dim * 16 + d * 16, 64);
      for (int part = 0; part < parts; part++) {
        _tile_loadd(6, f.queries[part] + d * kQueries, 64);
        _tile_loadd(7, f.queries[part] + d * kQueries + 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, to, 64);
    _tile_stored(1, to + 256, 64);
    _tile_stored(2, to + 512, 64);
    _tile_stored(3, to + 768, 64);
  }
}

inline float* score(Found& f, int key, int tile) { return f.scores + key / 16 * 512 + tile * 256 + key % 16 * 16; }

void scale_scores(const float* scales, Found& f) {
  for (int tile = 0; tile < 2; tile++) {
    for (int k = 0; k < kKeys; k++) _mm512_store_ps(score(f, k, tile), _mm512_mul_ps(_mm512_load_ps(score(f, k, tile)), _mm512_set1_ps(scales[k])));
  }
}

// Keys that a query may not see: those behind it, and those a window is past. first: the place of the block's first query among the keys.
void hide(const FlatoutChunk& c, int64_t key, int64_t first, Found& f) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const int window = c.window ? c.window : 0x7FFFFFFF;
  for (int tile = 0; tile < 2; tile++) {
    const __m512i at = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int>(first - key) + 16 * tile));  // less the key: how far behind it is
    for (int k = 0; k < kKeys; k++) {
      const __m512i behind = _mm512_sub_epi32(at, _mm512_set1_epi32(k));
      const __mmask16 seen = _mm512_cmpge_epi32_mask(behind, _mm512_setzero_si512()) & _mm512_cmplt_epi32_mask(behind, _mm512_set1_epi32(window));
      float* s = score(f, k, tile);
      _mm512_store_ps(s, _mm512_mask_mov_ps(_mm512_set1_ps(2 * kNothing), seen, _mm512_load_ps(s)));
    }
  }
}

// Scores become weights, times their values' scales where there are any; what was found before is measured by the new largest.
template <int parts>
void weigh(const float* scales, int64_t dim, Found& f) {
  for (int tile = 0; tile < 2; tile++) {
    __m512 largest = f.largest[tile];
    for (int k = 0; k < kKeys; k++) largest = _mm512_max_ps(_mm512_load_ps(score(f, k, tile)), largest);
    __m512 total = _mm512_setzero_ps();
    for (int k = 0; k < kKeys; k += 2) {
      __m512 even = exponential(_mm512_sub_ps(_mm512_load_ps(score(f, k, tile)), largest));
      __m512 odd = exponential(_mm512_sub_ps(_mm512_load_ps(score(f, k + 1, tile)), largest));
      total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
      if (scales) even = _mm512_mul_ps(even, _mm512_set1_ps(scales[k])), odd = _mm512_mul_ps(odd, _mm512_set1_ps(scales[k + 1]));
      for (int part = 0; part < parts - 1; part++) put(f.weights[part] + k / 32 * 1024 + tile * 512 + k % 32 / 2 * 32, part_of(even), part_of(odd));
      put(f.weights[parts - 1] + k / 32 * 1024 + tile * 512 + k % 32 / 2 * 32, even, odd);
    }
    const __m512 kept = exponential(_mm512_sub_ps(f.largest[tile], largest));
    f.total[tile] = _mm512_fmadd_ps(f.total[tile], kept, total);
    if (_mm512_cmpneq_ps_mask(largest, f.largest[tile])) {
      for (int64_t d = 0; d < dim; d++) {
        float* m = f.mixed + d / 16 * 512 + tile * 256 + d % 16 * 16;
        _mm512_store_ps(m, _mm512_mul_ps(_mm512_load_ps(m), kept));
      }
    }
    f.largest[tile] = largest;
  }
}

template <int parts>
void mix(const Laid& laid, int64_t key, int64_t dim, Found& f) {
  for (int64_t d = 0; d < dim; d += 16) {
    float* mixed = f.mixed + d * kQueries;
    const uint16_t* values = laid.values + key * dim + d * 32;
    _tile_loadd(0, mixed, 64);
    _tile_loadd(1, mixed + 256, 64);
    for (int half = 0; half < 2; half++) {
      _tile_loadd(4, values + half * 32 * dim, 64);
      for (int part = 0; part < parts; part++) {
        _tile_loadd(6, f.weights[part] + half * 1024, 64);
        _tile_loadd(7, f.weights[part] + half * 1024 + 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
    }
    _tile_stored(0, mixed, 64);
    _tile_stored(1, mixed + 256, 64);
  }
}

// Keys and values `first` ... first + 31 of a KV head; beyond the last, zeros.
void lay(const FlatoutChunk& c, int kv_head, int64_t first, const Laid& laid) {
  const __m512i apart = column_of_tile();
  for (int64_t key = first; coded(c) && key < first + 32; key++) {
    laid.key_scales[key] = key < c.keys ? scale_of(c, c.k, place(c, key, kv_head)) : 0.0f;
    laid.value_scales[key] = key < c.keys ? scale_of(c, c.v, place(c, key, kv_head)) : 0.0f;
  }
  for (int64_t d = 0; d < c.dim; d += 16) {
    for (int k = 0; k < 32; k++) {
      const int64_t key = first + k;
      const __m512 a = key < c.keys ? numbers(c, c.k, place(c, key, kv_head) + d) : _mm512_setzero_ps();
      uint16_t* to = laid.keys + key / 16 * 16 * c.dim + d / 32 * 512 + key % 16 * 32 + d % 32;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrowed(a));
    }
    uint16_t* tile = laid.values + first * c.dim + d * 32;
    alignas(64) uint16_t two[32];
    for (int k = 0; k < 32; k += 2) {
      const int64_t key = first + k;
      const __m512 even = key < c.keys ? numbers(c, c.v, place(c, key, kv_head) + d) : _mm512_setzero_ps();
      const __m512 odd = key + 1 < c.keys ? numbers(c, c.v, place(c, key + 1, kv_head) + d) : _mm512_setzero_ps();
      put(two, even, odd);
      _mm512_i32scatter_epi32(tile + k, apart, _mm512_load_si512(two), 1);
    }
  }
}

// Queries `first` ... of a head, of which as many parts are taken as of its weights.
template <int parts>
void attend(const FlatoutChunk& c, int head, int64_t first, const Laid& laid) {
  static thread_local Found found;
  Found& f = found;
  const __m512i apart = column_of_tile();
  const __m512 scale = _mm512_set1_ps(c.scale);
  const int count = static_cast<int>(c.count - first < kQueries ? c.count - first : kQueries);
  for (int part = 0; part < parts; part++) std::memset(f.queries[part], 0, static_cast<size_t>(c.dim) * kQueries * 2);
  std::memset(f.mixed, 0, static_cast<size_t>(c.dim) * kQueries * 4);
  for (int q = 0; q < count; q++) {
    for (int64_t d = 0; d < c.dim; d += 32) {
      const int64_t at = (first + q) * c.q_stride + head * c.dim + d;
      __m512 low = _mm512_mul_ps(query(c, at), scale), high = _mm512_mul_ps(query(c, at + 16), scale);
      for (int part = 0; part < parts; part++) {
        alignas(64) uint16_t row[32];
        _mm256_store_si256(reinterpret_cast<__m256i*>(row), narrowed(part_of(low)));
        _mm256_store_si256(reinterpret_cast<__m256i*>(row + 16), narrowed(part_of(high)));
        _mm512_i32scatter_epi32(f.queries[part] + d * kQueries + q / 16 * 512 + q % 16 * 2, apart, _mm512_load_si512(row), 1);
      }
    }
  }
  for (int tile = 0; tile < 2; tile++) f.largest[tile] = _mm512_set1_ps(kNothing), f.total[tile] = _mm512_setzero_ps();
  const int64_t place_of_first = c.keys - c.count + first, seen = place_of_first + count;  // keys that the last query sees
  const int64_t begin = c.window && place_of_first + 1 > c.window ? (place_of_first + 1 - c.window) / kKeys * kKeys : 0;
  configure(Config());
  for (int64_t key = begin; key < seen; key += kKeys) {
    scores_of<parts>(laid, key, c.dim, f);
    if (coded(c)) scale_scores(laid.key_scales + key, f);
    const bool whole = key + kKeys <= place_of_first + 1 && (!c.window || key > place_of_first + kQueries - 1 - c.window);
    if (!whole) hide(c, key, place_of_first, f);
    weigh<parts>(coded(c) ? laid.value_scales + key : nullptr, c.dim, f);
    mix<parts>(laid, key, c.dim, f);
  }
  _tile_release();
  alignas(64) float share[kQueries];
  for (int tile = 0; tile < 2; tile++) _mm512_store_ps(share + 16 * tile, _mm512_div_ps(_mm512_set1_ps(1.0f), f.total[tile]));
  const __m512i down = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int q = 0; q < count; q++) {
    for (int64_t d = 0; d < c.dim; d += 16) {
      const float* from = f.mixed + d * kQueries + q / 16 * 256 + q % 16;
      const __m512 a = _mm512_mul_ps(_mm512_i32gather_ps(_mm512_slli_epi32(down, 4), from, 4), _mm512_set1_ps(share[q]));
      const int64_t at = (first + q) * c.out_stride + head * c.dim + d;
      if (c.type == FLATOUT_FLOAT32) _mm512_storeu_ps(static_cast<float*>(c.out) + at, a);
      else _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(c.out) + at), narrowed(a));
    }
  }
}

bool can(const FlatoutChunk& c) {
  return is_type(c.type) && c.cache_type != FLATOUT_FLOAT32 && is_cache(c.cache_type, c.type) && c.q && c.k && c.v && c.out && c.count > 0 &&
         c.keys >= c.count && c.keys < (int64_t{1} << 30) && c.kv_heads > 0 && c.heads % c.kv_heads == 0 && c.dim > 0 && c.dim % 32 == 0 &&
         c.dim <= kMostDim && c.window >= 0;
}

thread_local Scratch scratch;

}  // namespace

int chunk(const FlatoutChunk& c) {
  if (!can(c)) return 1;
  const int64_t padded_keys = (c.keys + kKeys - 1) / kKeys * kKeys, each = padded_keys * c.dim;  // numbers of a KV head
  const int64_t scales = coded(c) ? padded_keys : 0;
  char* memory = scratch.at_least(static_cast<size_t>(each * sizeof(uint16_t) + scales * sizeof(float)) * 2 * c.kv_heads);
  if (!memory) return 1;
  uint16_t* laid = reinterpret_cast<uint16_t*>(memory);
  const int group = c.heads / c.kv_heads, pieces = static_cast<int>(padded_keys / 32);
  const int blocks = static_cast<int>((c.count + kQueries - 1) / kQueries);
  struct Work {
    const FlatoutChunk& c;
    uint16_t* laid;
    int64_t each, scales;
    int group, pieces, blocks;
    Laid of(int kv_head) const {
      float* own = reinterpret_cast<float*>(laid + c.kv_heads * 2 * each) + kv_head * 2 * scales;
      return {laid + kv_head * 2 * each, laid + kv_head * 2 * each + each, own, own + scales};
    }
  } work{c, laid, each, scales, group, pieces, blocks};
  Turn turn;
  share(
      c.kv_heads * pieces,
      [](const void* context, int part) {
        const Work& w = *static_cast<const Work*>(context);
        lay(w.c, part / w.pieces, part % w.pieces * 32, w.of(part / w.pieces));
      },
      &work);
  share(
      c.heads * blocks,
      [](const void* context, int part) {  // the longest first: the last queries see the most keys
        const Work& w = *static_cast<const Work*>(context);
        const int head = part % w.c.heads;
        const auto of = coded(w.c) && w.c.type == FLATOUT_FLOAT32 ? attend<kMostParts> : attend<1>;
        of(w.c, head, static_cast<int64_t>(w.blocks - 1 - part / w.c.heads) * kQueries, w.of(head / w.group));
      },
      &work);
  return 0;
}

}  // namespace amx
}  // namespace flatout

#pragma GCC pop_options

#else

namespace flatout {
namespace amx {

int chunk(const FlatoutChunk&) { return 1; }

}  // namespace amx
}  // namespace flatout

#endif

FLATOUT_API int flatout_chunk(const FlatoutChunk* chunk) { return !chunk || !flatout::amx::available() || flatout::amx::chunk(*chunk); }
