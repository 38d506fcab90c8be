// What an instruction set's kernels offer to products.cpp, attention.cpp, rows.cpp, moe.cpp and step.cpp: one table for each, chosen by cpu.cpp. Nothing here knows
// of threads. Filled by scalar.cpp, avx2.cpp and avx512.cpp from kernels.inc.

#ifndef FLATOUT_KERNELS_H
#define FLATOUT_KERNELS_H

#include "native.h"

namespace flatout {

constexpr int kLines = 16;    // packed together: a block
constexpr int kGroup = 32;    // elements of a line, or of a row, that share a scale
constexpr int kMostRows = 16; // in a tile

constexpr bool is_type(int32_t type) { return type == FLATOUT_FLOAT32 || type == FLATOUT_BFLOAT16; }

constexpr bool is_cache(int32_t cache_type, int32_t type) {
  return cache_type == type || cache_type == FLATOUT_INT8 ||
         (type == FLATOUT_FLOAT32 && (cache_type == FLATOUT_FLOAT16 || cache_type == FLATOUT_BFLOAT16));
}

// Elements from one head of a token to the next in a cache: codes have their scale behind them.
constexpr int64_t head_elements(int32_t cache_type, int64_t dim) {
  return cache_type == FLATOUT_INT8 ? dim + static_cast<int64_t>(sizeof(float)) : dim;
}

constexpr int64_t group_bytes(int kind) { return kind == 4 ? 320 : 544; }

// Quantised rows that pass a block together, group after group: a kernel finds those of a group side by side.
struct Tile {
  int8_t* q;       // [groups][rows][32]
  float* d;        // [groups][rows]: a row's value is d * q
  float* s;        // [groups][rows]: d * sum(q), which a weight's minimum is multiplied by
  int32_t* shift;  // [groups][rows]: -128 * sum(q), which undoes the 128 in bytes of kind 8
  int64_t groups;
  int rows;
};

// Elements from one row prepared for plain weights to the next: whole vectors, and off the powers of two, where rows would share a cache's sets.
constexpr int64_t prepared_stride(int64_t columns) { return (columns + 31) / 32 * 32 + 16; }

constexpr int kMostExperts = 1024;  // of a router

constexpr int kMostDim = 256, kMostHeads = 8;  // of a head; to a KV head

constexpr int64_t kPiece = 64;  // keys: two threads share a short context, too

// What a row's query heads found among some of its keys.
struct AttentionPiece {
  float *largest, *total;  // [heads, and up to a multiple of 16 anything]: score, sum of exponentials
  float* mixed;            // [heads][dim]: values weighted by the exponentials
  float* scores;           // [heads][kPiece], scratch
};

struct Kernels {
  using Dot = void (*)(const uint8_t* const* block, const Tile& tile, float* out);  // block: one, or two; out [blocks][rows][16]

  const char* name;
  int most_rows;  // in a tile: as many sums as the registers hold

  float (*norm_factor)(const FlatoutProduct& product, int64_t row);  // rsqrt(mean(x^2) + eps)
  // Groups begin ... end - 1 of row `row` of x, normed by its factor if that is asked, as row `place` of a tile.
  void (*quantise)(const FlatoutProduct& product, int64_t row, float factor, const Tile& tile, int place, int64_t begin, int64_t end);
  Dot dot[2][kMostRows];  // [kind 4, kind 8][rows - 1]
  Dot pair[2];             // [kind 4, kind 8]: of two blocks, one row
  // By kind, 16 and 32. Row `row` of x, normed if that is asked, as multiply() takes it: prepared_stride() elements.
  void (*prepare[2])(const FlatoutProduct& product, int64_t row, float* to);
  // Up to 16 lines of a plain weight times up to 16 prepared rows, into sums [rows][16]; `next`: the lines that will be asked for next.
  void (*multiply[2])(const void* weight, const void* next, int64_t columns, int lines, const float* x, int rows, float* sums);
  // A tile's sums over 16 lines, of a gate and its up where there is one: bias, gate, scale and residual, into out.
  void (*finish)(const FlatoutProduct& product, int64_t row, int rows, int64_t line, const float* sums, const float* ups);
  // Of row `index` 1 to kPiece keys: at[i] elements of the cache lie before each.
  void (*attend)(const FlatoutAttention& attention, int64_t index, const int64_t* at, int64_t count, const AttentionPiece& to);
  void (*merge)(const FlatoutAttention& attention, int64_t index, const AttentionPiece* pieces, int64_t count);
  void (*rotate)(const FlatoutRotation& rotation, int64_t token);
  void (*scale)(void* out, const void* x, int64_t width, int type, float scale);
  int64_t (*likeliest)(const float* logits, int64_t width);  // as flatout_greedy says
  // As native.h says, of one row.
  void (*norm)(const FlatoutNorm& norm, int64_t row);
  void (*add)(const FlatoutAdd& add, int64_t row);
  void (*gate)(const FlatoutGate& gate, int64_t row);
  void (*route)(const FlatoutRoute& route, int64_t row);
  // Columns begin ... end - 1, multiples of 16, of a token's sum over its experts, whose results are rows `places` of parts [][hidden].
  void (*combine)(const FlatoutExperts& experts, int64_t token, const float* parts, const int64_t* places, int64_t begin, int64_t end);
  // One block as 16 lines of values.
  void (*dequantise)(const uint8_t* block, int kind, int64_t groups, void* out, int64_t out_stride, int type);
};

extern const Kernels kScalar;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512;
#endif

const Kernels& kernels();  // those in use

}  // namespace flatout

#endif
