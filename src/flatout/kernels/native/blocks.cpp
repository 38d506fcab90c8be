// Weights in GGUF's blocks: laid out anew for products, at load, and single lines as values, for the embedding. Each block type says what its groups of
// 32 hold; values have the bits that ggml's own formulas give. Plain C++: what is done once, or to a few rows.

#include "half.h"
#include "kernels.h"
#include "pool.h"

#include <cmath>
#include <cstring>
#include <type_traits>

namespace flatout {
namespace {

constexpr int64_t kPartValues = 16384;  // some microseconds

float half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, sizeof h);
  return half(h);
}

// 32 elements: d * (q - zero) and, where the type has minima, + m; the second 16 may have a scale of their own.
struct Group {
  uint8_t q[kGroup];
  float d[2], m;
};

void nibbles(const uint8_t* p, uint8_t* q) {
  for (int i = 0; i < 16; i++) q[i] = p[i] & 15;
  for (int i = 0; i < 16; i++) q[16 + i] = p[i] >> 4;
}

void fifth_bits(const uint8_t* p, uint8_t* q) {
  for (int i = 0; i < kGroup; i++) q[i] |= (p[i / 8] >> i % 8 & 1) << 4;
}

// A type: elements and bytes of a block, what is taken from q, whether there are minima, and how group g of a block is read.
template <int kMinimum>
struct Q4 {
  static constexpr int elements = 32, bytes = 18 + 2 * kMinimum, zero = kMinimum ? 0 : 8;
  static constexpr bool minima = kMinimum;
  static void read(const uint8_t* b, int, Group& to) {
    to.d[0] = to.d[1] = half_at(b);
    to.m = kMinimum ? half_at(b + 2) : -8 * to.d[0];
    nibbles(b + bytes - 16, to.q);
  }
};

template <int kMinimum>
struct Q5 {
  static constexpr int elements = 32, bytes = 22 + 2 * kMinimum, zero = kMinimum ? 0 : 16;
  static constexpr bool minima = kMinimum;
  static void read(const uint8_t* b, int, Group& to) {
    to.d[0] = to.d[1] = half_at(b);
    if (kMinimum) to.m = half_at(b + 2);
    nibbles(b + bytes - 16, to.q);
    fifth_bits(b + bytes - 20, to.q);
  }
};

struct Q8 {
  static constexpr int elements = 32, bytes = 34, zero = 128;
  static constexpr bool minima = false;
  static void read(const uint8_t* b, int, Group& to) {
    to.d[0] = to.d[1] = half_at(b);
    for (int i = 0; i < kGroup; i++) to.q[i] = b[2 + i] ^ 128;
  }
};

template <int kBits>
struct QK {  // 8 groups with scales and minima of 6 bits in 12 bytes, whose first 4 have them whole and share their top bits with the last 4
  static constexpr int elements = 256, bytes = kBits == 4 ? 144 : 176, zero = 0;
  static constexpr bool minima = true;
  static void read(const uint8_t* b, int g, Group& to) {
    const uint8_t* s = b + 4;
    const int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 2 & 48);
    const int minimum = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 2 & 48);
    to.d[0] = to.d[1] = half_at(b) * static_cast<float>(scale);
    to.m = -(half_at(b + 2) * static_cast<float>(minimum));
    const uint8_t* q = b + bytes - 128 + g / 2 * 32;
    for (int i = 0; i < kGroup; i++) to.q[i] = q[i] >> g % 2 * 4 & 15;
    if (kBits == 5) {
      for (int i = 0; i < kGroup; i++) to.q[i] |= (b[16 + i] >> g & 1) << 4;
    }
  }
};

struct Q6K {  // two halves of 4 groups: low bits, then the two high ones, then scales of 16 elements
  static constexpr int elements = 256, bytes = 210, zero = 32;
  static constexpr bool minima = false;
  static void read(const uint8_t* b, int g, Group& to) {
    const uint8_t *q = b + g / 4 * 64 + g % 2 * 32, *h = b + 128 + g / 4 * 32;
    for (int i = 0; i < kGroup; i++) to.q[i] = (q[i] >> g % 4 / 2 * 4 & 15) | (h[i] >> g % 4 * 2 & 3) << 4;
    for (int i = 0; i < 2; i++) to.d[i] = half_at(b + 208) * static_cast<float>(static_cast<int8_t>(b[192 + 2 * g + i]));
  }
};

// use(Type{}) of the type with this number; `none` for others.
template <class Use, class Result>
Result with_type(int32_t format, const Use& use, Result none) {
  switch (format) {
    case FLATOUT_Q4_0: return use(Q4<0>{});
    case FLATOUT_Q4_1: return use(Q4<1>{});
    case FLATOUT_Q5_0: return use(Q5<0>{});
    case FLATOUT_Q5_1: return use(Q5<1>{});
    case FLATOUT_Q8_0: return use(Q8{});
    case FLATOUT_Q4_K: return use(QK<4>{});
    case FLATOUT_Q5_K: return use(QK<5>{});
    case FLATOUT_Q6_K: return use(Q6K{});
    default: return none;
  }
}

template <class Type>
void read(const uint8_t* line, int64_t g, Group& to) {
  constexpr int groups = Type::elements / kGroup;
  Type::read(line + g / groups * Type::bytes, static_cast<int>(g % groups), to);
}

template <class Type>
void values_of(const Group& g, float* v) {
  for (int i = 0; i < kGroup; i++) v[i] = static_cast<float>(g.q[i] - Type::zero) * g.d[i / 16];
  for (int i = 0; Type::minima && i < kGroup; i++) v[i] += g.m;
}

// ---------------------------------------------------------------- laid out anew

bool is_finite(uint16_t h) { return (h & 0x7C00) != 0x7C00; }

// As quant/rounding.py:eight_bits; the scale. One that is not finite comes without codes.
uint16_t rounded(const float* v, uint8_t* code) {
  float largest = 0;
  for (int i = 0; i < kGroup; i++) {
    const float size = std::fabs(v[i]);
    if (!(size <= largest)) largest = size;  // NaN, too, and for good
    if (largest != largest) return 0x7E00;
  }
  uint16_t scale = to_half(largest / 127);
  if (half(scale) * 127.5f <= largest) scale++;
  if (!is_finite(scale)) return scale;
  const float d = half(scale);
  constexpr float nearest = 12582912.0f;  // 1.5 * 2^23 leaves no bits for a fraction
  for (int i = 0; i < kGroup; i++) code[i] = static_cast<uint8_t>(static_cast<int32_t>((v[i] / d + nearest) - nearest) + 128);
  return scale;
}

// Group g of a line as line r of a packed group. False: factors that float16 does not hold.
template <class Type, int kind>
bool pack(const uint8_t* line, int64_t g, int r, uint8_t* out) {
  constexpr bool same = kind == 4 || (!Type::minima && Type::elements == kGroup);  // else rounded again
  Group group;
  read<Type>(line, g, group);
  uint8_t code[kGroup];
  uint16_t scale, minimum = 0;
  if (kind == 4) {
    for (int i = 0; i < 16; i++) code[i] = static_cast<uint8_t>(group.q[i] | group.q[16 + i] << 4);
    minimum = to_half(group.m);
  } else if (same) {
    for (int i = 0; i < kGroup; i++) code[i] = static_cast<uint8_t>(group.q[i] + 128 - Type::zero);
  }
  if (same) {
    scale = to_half(group.d[0]);
  } else {
    float v[kGroup];
    values_of<Type>(group, v);
    scale = rounded(v, code);
  }
  if (!is_finite(scale) || !is_finite(minimum)) return false;
  for (int c = 0; c < kind; c++) std::memcpy(out + 64 * c + 4 * r, code + 4 * c, 4);
  std::memcpy(out + 64 * kind + 2 * r, &scale, 2);
  if (kind == 4) std::memcpy(out + 64 * kind + 2 * kLines + 2 * r, &minimum, 2);
  return true;
}

template <class Type, int kind>
int repack(const uint8_t* source, const int64_t* order, int64_t lines, int64_t columns, uint8_t* out) {
  const int64_t bytes = columns / Type::elements * Type::bytes, groups = columns / kGroup;
  for (int64_t b = 0; b < lines; b += kLines) {
    for (int64_t g = 0; g < groups; g++, out += group_bytes(kind)) {
      for (int r = 0; r < kLines; r++) {
        if (!pack<Type, kind>(source + order[b + r] * bytes, g, r, out)) return 2;
      }
    }
  }
  return 0;
}

template <class Type>
constexpr bool has_four = std::is_same_v<Type, Q4<0>> || std::is_same_v<Type, Q4<1>> || std::is_same_v<Type, QK<4>>;

// ---------------------------------------------------------------- single lines

uint16_t to_bfloat16(float f) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return static_cast<uint16_t>(f != f ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void store(const FlatoutEmbed& e, int64_t row, int64_t g, const float* v) {
  const int64_t at = row * e.out_stride + g * kGroup;
  if (e.type == FLATOUT_FLOAT32) {
    float* out = static_cast<float*>(e.out) + at;
    for (int i = 0; i < kGroup; i++) out[i] = e.scale == 1.0f ? v[i] : v[i] * e.scale;
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(e.out) + at;
  for (int i = 0; i < kGroup; i++) {
    out[i] = to_bfloat16(v[i]);
    if (e.scale == 1.0f) continue;
    const uint32_t bits = static_cast<uint32_t>(out[i]) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    out[i] = to_bfloat16(f * e.scale);
  }
}

template <class Type>
void embed_blocks(const FlatoutEmbed& e, int64_t row) {
  const uint8_t* line = e.source + e.indices[row] * (e.width / Type::elements * Type::bytes);
  Group group;
  float v[kGroup];
  for (int64_t g = 0; g < e.width / kGroup; g++) {
    read<Type>(line, g, group);
    values_of<Type>(group, v);
    store(e, row, g, v);
  }
}

void embed_packed(const FlatoutEmbed& e, int64_t row) {
  const int kind = -e.format, r = static_cast<int>(e.indices[row] % kLines);
  const int64_t groups = e.width / kGroup, bytes = group_bytes(kind);
  const uint8_t* block = e.source + e.indices[row] / kLines * groups * bytes;
  for (int64_t g = 0; g < groups; g++, block += bytes) {
    uint8_t code[kGroup];
    for (int c = 0; c < kind; c++) std::memcpy(code + 4 * c, block + 64 * c + 4 * r, 4);
    const float d = half_at(block + 64 * kind + 2 * r), m = kind == 4 ? half_at(block + 64 * kind + 2 * kLines + 2 * r) : 0;
    float v[kGroup];
    if (kind == 4) {
      for (int i = 0; i < kGroup; i++) v[i] = static_cast<float>(i < 16 ? code[i] & 15 : code[i - 16] >> 4) * d + m;
    } else {
      for (int i = 0; i < kGroup; i++) v[i] = static_cast<float>(code[i] - 128) * d;
    }
    store(e, row, g, v);
  }
}

int elements_of(int32_t format) {
  if (format == -4 || format == -8) return kGroup;
  return with_type(format, [](auto type) { return type.elements; }, 0);
}

}  // namespace
}  // namespace flatout

FLATOUT_API int flatout_repack(const uint8_t* source, int32_t format, const int64_t* order, int64_t lines, int64_t columns, int32_t kind,
                               uint8_t* out) {
  using namespace flatout;
  if (!source || !order || !out || lines <= 0 || lines % kLines || columns <= 0 || (kind != 4 && kind != 8)) return 1;
  for (int64_t i = 0; i < lines; i++) {
    if (order[i] < 0 || order[i] >= lines) return 1;
  }
  return with_type(
      format,
      [&](auto type) {
        using Type = decltype(type);
        if (columns % Type::elements) return 1;
        if (kind == 8) return repack<Type, 8>(source, order, lines, columns, out);
        if constexpr (has_four<Type>) return repack<Type, 4>(source, order, lines, columns, out);
        return 1;
      },
      1);
}

FLATOUT_API int flatout_embed(const FlatoutEmbed* embed) {
  using namespace flatout;
  if (!embed || !is_type(embed->type) || embed->rows < 0 || embed->width <= 0) return 1;
  const FlatoutEmbed& e = *embed;
  const int elements = elements_of(e.format);
  if (!elements || e.width % elements || (e.format < 0 && e.lines % kLines) || (e.rows && (!e.source || !e.indices || !e.out))) return 1;
  for (int64_t r = 0; r < e.rows; r++) {
    if (e.indices[r] < 0 || e.indices[r] >= e.lines) return 1;
  }
  Turn turn;
  share_ranges(e.rows, e.rows * e.width, kPartValues, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      if (e.format < 0) embed_packed(e, r);
      else with_type(e.format, [&](auto type) { return embed_blocks<decltype(type)>(e, r), 0; }, 1);
    }
  });
  return 0;
}
