// A product from end to end: what is refused, the scratch rows, and how rows and blocks are shared among threads. No arithmetic, which is
// kernels.inc's.
//
// Rows are normed and quantised, or prepared, once, then blocks of 16 lines are shared out; a block stays in the cache while all tiles of rows
// pass it, and a gate's goes with its up's. No two parts write the same output, so threads cannot change a bit.

#include "amx.h"
#include "kernels.h"
#include "pool.h"
#include "products.h"
#include "scratch.h"

#include <algorithm>
#include <cstdlib>

namespace flatout {
namespace {

thread_local Scratch scratch;

bool can(const FlatoutProduct& p) {
  return (is_packed(p.weight, p.kind, p.outputs, p.columns) || is_plain(p.weight, p.kind, p.outputs, p.columns)) &&
         (p.rows == 0 || (p.rows > 0 && p.x && p.out)) && is_type(p.x_type) && is_type(p.out_type) && is_type(p.bias_type) &&
         is_type(p.norm_type) && p.gate >= FLATOUT_NO_GATE && p.gate <= FLATOUT_GELU;
}

void multiply_packed(const FlatoutProduct& p, const Kernels& k, const Rows& rows) {
  if (p.norm) {
    share_ranges(p.rows, p.rows * p.columns, kPartRows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) rows.factors[r] = k.norm_factor(p, r);
    });
  }
  // by groups, not by rows, which lie side by side in a tile: two cores that write the same lines of the cache made 89 us of 57
  // (576x1536, 16 rows, 2 threads)
  share_ranges(p.columns / kGroup, p.rows * p.columns, kPartRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = 0; r < p.rows; r++) {
      const int place = static_cast<int>(r % k.most_rows);
      k.quantise(p, r, p.norm ? rows.factors[r] : 1.0f, rows.tile(r - place, p.rows), place, begin, end);
    }
  });
  const int64_t blocks = p.outputs / kLines, bytes = p.columns / kGroup * group_bytes(p.kind);
  const int64_t tiles = (p.rows + k.most_rows - 1) / k.most_rows;
  share_ranges(blocks, blocks * bytes * tiles * (p.gate ? 2 : 1), kPartBlocks,
               [&](int64_t begin, int64_t end) { packed_blocks(p, k, rows, 0, p.rows, begin, end); });
}

// By AMX. False: no memory.
bool multiply_many(const FlatoutProduct& p, const Kernels& k) {
  const int64_t blocks = p.outputs / kLines, pairs = p.gate ? blocks : (blocks + 1) / 2;
  const int parts = static_cast<int>(std::min<int64_t>(threads() * kPartsEach, std::max(pairs, p.rows)));
  const int64_t x_bytes = amx::padded(p.rows) * p.columns * 2, each = amx::scratch_bytes(p.rows, p.columns);
  char* memory = scratch.at_least(static_cast<size_t>(x_bytes + parts * each));
  if (!memory) return false;
  uint16_t* x = reinterpret_cast<uint16_t*>(memory);
  share(parts, [&](int part) {
    float* row = reinterpret_cast<float*>(memory + x_bytes + part * each);
    const int64_t all = amx::padded(p.rows);
    for (int64_t r = all * part / parts; r < all * (part + 1) / parts; r++) {
      const bool real = r < p.rows;
      if (real) k.prepare[1](p, r, row);  // as float32
      amx::round_row(real ? row : nullptr, p.columns, r, x);
    }
  });
  share(parts, [&](int part) {
    for (int64_t i = pairs * part / parts; i < pairs * (part + 1) / parts; i++) {
      const int64_t first = p.gate ? i : 2 * i, second = p.gate ? blocks + i : std::min(2 * i + 1, blocks - 1);
      amx::pair(p, x, first, second, memory + x_bytes + part * each);
    }
  });
  return true;
}

void multiply_plain(const FlatoutProduct& p, const Kernels& k, float* x) {
  const int wide = p.kind == 32;
  const int64_t stride = prepared_stride(p.columns);
  share_ranges(p.rows, p.rows * p.columns, kPartRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) k.prepare[wide](p, r, x + r * stride);
  });
  const int64_t blocks = (p.outputs + kLines - 1) / kLines, line = p.columns * p.kind / 8;
  const int64_t tiles = (p.rows + kMostRows - 1) / kMostRows;
  share_ranges(blocks, p.outputs * line * tiles * (p.gate ? 2 : 1), kPartBlocks,
               [&](int64_t begin, int64_t end) { plain_blocks(p, k, x, 0, p.rows, begin, end); });
}

}  // namespace

void packed_blocks(const FlatoutProduct& p, const Kernels& k, const Rows& rows, int64_t first, int64_t last, int64_t begin, int64_t end) {
  alignas(64) float sums[kMostRows * kLines], ups[kMostRows * kLines];
  const int wide = p.kind == 8;
  const uint8_t* weight = static_cast<const uint8_t*>(p.weight);
  const int64_t blocks = p.outputs / kLines, bytes = p.columns / kGroup * group_bytes(p.kind);
  for (int64_t b = begin; b < end; b++) {
    const uint8_t* block[2] = {weight + b * bytes, weight + (p.gate ? blocks + b : b + 1) * bytes};
    if (last - first == 1 && (p.gate || b + 1 < end)) {
      k.pair[wide](block, rows.tile(first, last), sums);
      k.finish(p, first, 1, b * kLines, sums, sums + kLines);
      if (!p.gate) k.finish(p, first, 1, ++b * kLines, sums + kLines, nullptr);
      continue;
    }
    for (int64_t r = first; r < last; r += k.most_rows) {
      const Tile tile = rows.tile(r, last);
      const Kernels::Dot dot = k.dot[wide][tile.rows - 1];
      dot(block, tile, sums);
      if (p.gate) dot(block + 1, tile, ups);
      k.finish(p, r, tile.rows, b * kLines, sums, ups);
    }
  }
}

void plain_blocks(const FlatoutProduct& p, const Kernels& k, const float* x, int64_t first, int64_t last, int64_t begin, int64_t end) {
  alignas(64) float sums[kMostRows * kLines] = {}, ups[kMostRows * kLines] = {};
  const char* weight = static_cast<const char*>(p.weight);
  const int64_t stride = prepared_stride(p.columns), line = p.columns * p.kind / 8, ups_at = p.outputs * line;
  const int wide = p.kind == 32;
  for (int64_t b = begin; b < end; b++) {
    const char *block = weight + b * kLines * line, *next = b + 1 < end ? block + kLines * line : block;
    const int lines = static_cast<int>(std::min<int64_t>(kLines, p.outputs - b * kLines));
    for (int64_t r = first; r < last; r += kMostRows) {
      const int rows = static_cast<int>(std::min<int64_t>(kMostRows, last - r));
      const float* some = x + r * stride;
      k.multiply[wide](block, p.gate ? block + ups_at : next, p.columns, lines, some, rows, sums);
      if (p.gate) k.multiply[wide](block + ups_at, next, p.columns, lines, some, rows, ups);
      k.finish(p, r, rows, b * kLines, sums, ups);
    }
  }
}

}  // namespace flatout

FLATOUT_API int flatout_has_tiles(void) { return flatout::amx::available(); }

FLATOUT_API int flatout_product(const FlatoutProduct* product) {
  using namespace flatout;
  if (!product || !can(*product)) return 1;
  const FlatoutProduct& p = *product;
  if (p.rows == 0) return 0;
  const Kernels& k = kernels();
  if (p.many) {
    if (p.kind == 32 || p.outputs % kLines || p.columns % kGroup || !amx::available()) return 1;
    Turn turn;
    return !multiply_many(p, k);
  }
  const bool plain = p.kind >= 16;
  char* memory = scratch.at_least(plain ? p.rows * prepared_stride(p.columns) * sizeof(float) : Rows::bytes(p.rows, p.columns));
  if (!memory) return 1;
  Turn turn;
  if (plain) multiply_plain(p, k, reinterpret_cast<float*>(memory));
  else multiply_packed(p, k, Rows(p.rows, p.columns, k.most_rows, memory));
  return 0;
}

FLATOUT_API int flatout_dequantise(const uint8_t* weight, int32_t kind, int64_t lines, int64_t columns, void* out, int64_t out_stride,
                                   int32_t out_type) {
  using namespace flatout;
  if (!is_packed(weight, kind, lines, columns) || !out || !is_type(out_type)) return 1;
  const Kernels& k = kernels();
  const int64_t blocks = lines / kLines, groups = columns / kGroup, bytes = groups * group_bytes(kind);
  const int64_t out_bytes = kLines * out_stride * (out_type == FLATOUT_BFLOAT16 ? 2 : 4);
  Turn turn;
  share_ranges(blocks, blocks * bytes, kPartBlocks, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) {
      k.dequantise(weight + b * bytes, kind, groups, static_cast<char*>(out) + b * out_bytes, out_stride, out_type);
    }
  });
  return 0;
}
