// What a product and the experts' products share: which weights there are, quantised rows, and blocks of lines times ready rows. The functions
// are products.cpp's; used by it and moe.cpp.

#ifndef FLATOUT_PRODUCTS_H
#define FLATOUT_PRODUCTS_H

#include "kernels.h"

#include <algorithm>
#include <cstddef>

namespace flatout {

constexpr int64_t kPartRows = 4096;     // elements to quantise, about a microsecond: handing over a part costs some 0.2
constexpr int64_t kPartBlocks = 16384;  // bytes of weight times tiles of rows, likewise

// All quantised rows, tile after tile.
class Rows {
 public:
  Rows(int64_t rows, int64_t columns, int most, char* memory)
      : groups_(columns / kGroup), most_(most) {
    const int64_t values = rows * groups_;
    q_ = reinterpret_cast<int8_t*>(memory);
    d_ = reinterpret_cast<float*>(q_ + values * kGroup);
    s_ = d_ + values;
    shift_ = reinterpret_cast<int32_t*>(s_ + values);
    factors = reinterpret_cast<float*>(shift_ + values);
  }

  static size_t bytes(int64_t rows, int64_t columns) {
    return static_cast<size_t>(rows * (columns / kGroup) * (kGroup + 12) + rows * 4);
  }

  float* factors;  // of the norm, one for each row

  // The one that begins at row `first`, of rows before `last`.
  Tile tile(int64_t first, int64_t last) const {
    const int64_t at = first * groups_;
    const int count = static_cast<int>(std::min<int64_t>(most_, last - first));
    return {q_ + at * kGroup, d_ + at, s_ + at, shift_ + at, groups_, count};
  }

 private:
  int64_t groups_;
  int most_;
  int8_t* q_;
  float *d_, *s_;
  int32_t* shift_;
};

inline bool is_packed(const void* weight, int32_t kind, int64_t lines, int64_t columns) {
  return weight && (kind == 4 || kind == 8) && lines > 0 && lines % kLines == 0 && columns > 0 && columns % kGroup == 0;
}

inline bool is_plain(const void* weight, int32_t kind, int64_t lines, int64_t columns) {
  return weight && (kind == 16 || kind == 32) && lines > 0 && columns > 0 && columns % 16 == 0;
}

// Blocks begin ... end - 1 of 16 lines, with a gate those of the gates and the ups, times the rows first ... last - 1, into the same rows of out.
void packed_blocks(const FlatoutProduct& p, const Kernels& k, const Rows& rows, int64_t first, int64_t last, int64_t begin, int64_t end);
// x: rows as prepare() makes them, prepared_stride() apart.
void plain_blocks(const FlatoutProduct& p, const Kernels& k, const float* x, int64_t first, int64_t last, int64_t begin, int64_t end);

}  // namespace flatout

#endif
