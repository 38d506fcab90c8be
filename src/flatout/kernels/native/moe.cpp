// The experts of a mixture: tokens in order of expert, two products of each expert's rows, and every token's sum. No arithmetic, which is
// kernels.inc's; the products themselves are products.cpp's.
//
// Blocks of all experts are shared out together, an expert's by the number of its rows, so that one token's few experts and a batch's many both
// use all threads. A row meets a block as in any product, and a token's sum goes by its own choices: company and threads change no bit.

#include "pool.h"
#include "products.h"
#include "scratch.h"

namespace flatout {
namespace {

constexpr int64_t kMostScratch = 32 << 20;  // bytes for the rows of a chunk of tokens; longer prompts pass chunk by chunk
constexpr int64_t kPartSums = 4096;         // products to add up, about a microsecond
constexpr int64_t kBlockCost = 4;           // of reading a block of lines, where a row that meets it costs 1 (plain.inc's figures)

thread_local Scratch scratch;

// Rows of one expert, in places first ... last - 1.
struct Group {
  int64_t expert, first, last;
};

// A chunk of tokens, their choices in order of expert: places.
struct Chunk {
  int64_t* places;   // [tokens][top_k]
  int64_t* tokens;   // [places]: whose each is
  int64_t* ends;     // [experts]
  Group* groups;     // of experts that were chosen
  int64_t count, met;  // places and groups

  static int64_t bytes(int64_t count, int64_t experts) {
    return count * 2 * sizeof(int64_t) + experts * (sizeof(int64_t) + sizeof(Group));
  }
};

Chunk sorted(const FlatoutExperts& e, int64_t first, int64_t last, char* memory) {
  const int64_t count = (last - first) * e.top_k, *chosen = e.chosen + first * e.top_k;
  Chunk c;
  c.places = reinterpret_cast<int64_t*>(memory);
  c.tokens = c.places + count;
  c.ends = c.tokens + count;
  c.groups = reinterpret_cast<Group*>(c.ends + e.experts);
  c.count = count;
  c.met = 0;
  std::fill(c.ends, c.ends + e.experts, 0);
  for (int64_t i = 0; i < count; i++) c.ends[chosen[i]]++;
  int64_t place = 0;
  for (int64_t i = 0; i < e.experts; i++) {
    const int64_t rows = c.ends[i];
    if (rows) c.groups[c.met++] = {i, place, place + rows};
    c.ends[i] = place;
    place += rows;
  }
  for (int64_t i = 0; i < count; i++) {
    c.places[i] = c.ends[chosen[i]]++;
    c.tokens[c.places[i]] = first + i / e.top_k;
  }
  return c;
}

// run(group, begin, end) over blocks of all groups, each of `blocks` of so many bytes, by all threads.
template <class Run>
void share_blocks(const Chunk& c, int64_t blocks, int64_t bytes, const Run& run) {
  const int64_t all = blocks * (c.met * kBlockCost + c.count);
  share_ranges(all, all / kBlockCost * bytes, kPartBlocks, [&](int64_t begin, int64_t end) {
    int64_t at = 0;  // what the groups before cost
    for (int64_t i = 0; i < c.met && at < end; i++) {
      const Group& g = c.groups[i];
      const int64_t each = kBlockCost + g.last - g.first;
      // a block is whose part its beginning lies in
      const auto first_from = [&](int64_t cost) { return std::clamp<int64_t>((cost - at + each - 1) / each, 0, blocks); };
      if (begin < at + blocks * each) run(g, first_from(begin), first_from(end));
      at += blocks * each;
    }
  });
}

constexpr bool plain(int32_t kind) { return kind >= 16; }

int64_t weight_bytes(int32_t kind, int64_t lines, int64_t columns) {
  return plain(kind) ? lines * columns * kind / 8 : lines / kLines * (columns / kGroup) * group_bytes(kind);
}

// Of so many rows ready for a product.
int64_t row_bytes(int32_t kind, int64_t rows, int64_t columns) {
  const int64_t bytes = plain(kind) ? rows * prepared_stride(columns) * sizeof(float) : Rows::bytes(rows, columns);
  return (bytes + 63) / 64 * 64;
}

// Each place's row of x, which `from` names or which has the place's number, times its expert's lines.
void multiply(FlatoutProduct p, const Kernels& k, const Chunk& c, const int64_t* from, char* memory) {
  const int64_t blocks = (p.outputs + kLines - 1) / kLines, bytes = weight_bytes(p.kind, p.outputs * (p.gate ? 2 : 1), p.columns);
  const char* weights = static_cast<const char*>(p.weight);
  const auto row = [&](int64_t place) { return from ? from[place] : place; };
  if (plain(p.kind)) {
    float* x = reinterpret_cast<float*>(memory);
    share_ranges(c.count, c.count * p.columns, kPartRows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) k.prepare[p.kind == 32](p, row(i), x + i * prepared_stride(p.columns));
    });
    share_blocks(c, blocks, bytes / blocks, [&](const Group& g, int64_t begin, int64_t end) {
      FlatoutProduct one = p;
      one.weight = weights + g.expert * bytes;
      plain_blocks(one, k, x, g.first, g.last, begin, end);
    });
    return;
  }
  const Rows rows(c.count, p.columns, k.most_rows, memory);
  share_ranges(p.columns / kGroup, c.count * p.columns, kPartRows, [&](int64_t begin, int64_t end) {  // as in products.cpp
    for (int64_t i = 0; i < c.met; i++) {
      const Group& g = c.groups[i];
      for (int64_t r = g.first; r < g.last; r++) {
        const int place = static_cast<int>((r - g.first) % k.most_rows);
        k.quantise(p, row(r), 1.0f, rows.tile(r - place, g.last), place, begin, end);
      }
    }
  });
  share_blocks(c, blocks, bytes / blocks, [&](const Group& g, int64_t begin, int64_t end) {
    FlatoutProduct one = p;
    one.weight = weights + g.expert * bytes;
    packed_blocks(one, k, rows, g.first, g.last, begin, end);
  });
}

bool can(const FlatoutExperts& e) {
  if (!is_type(e.type) || e.gate <= FLATOUT_NO_GATE || e.gate > FLATOUT_GELU || e.experts <= 0 || e.top_k <= 0 || e.tokens < 0) return false;
  const auto suits = [](const void* weight, int32_t kind, int64_t lines, int64_t columns) {
    return is_packed(weight, kind, lines, columns) || is_plain(weight, kind, lines, columns);
  };
  if (!suits(e.gate_up, e.gate_up_kind, e.width, e.hidden) || !suits(e.down, e.down_kind, e.hidden, e.width)) return false;
  if (e.tokens && (!e.x || !e.weights || !e.chosen || !e.out)) return false;
  const int64_t* end = e.chosen + e.tokens * e.top_k;
  return std::all_of(e.chosen, end, [&](int64_t expert) { return expert >= 0 && expert < e.experts; });
}

}  // namespace
}  // namespace flatout

FLATOUT_API int flatout_experts(const FlatoutExperts* experts) {
  using namespace flatout;
  if (!experts || !can(*experts)) return 1;
  const FlatoutExperts& e = *experts;
  if (e.tokens == 0) return 0;
  const Kernels& k = kernels();
  const auto ready = [&](int64_t rows) { return std::max(row_bytes(e.gate_up_kind, rows, e.hidden), row_bytes(e.down_kind, rows, e.width)); };
  const int64_t floats = (e.width + e.hidden) * static_cast<int64_t>(sizeof(float));
  const int64_t step = std::clamp<int64_t>(kMostScratch / (e.top_k * (ready(1) + floats)), 1, e.tokens), most = step * e.top_k;
  char* memory = scratch.at_least(ready(most) + most * floats + Chunk::bytes(most, e.experts));
  if (!memory) return 1;
  float* act = reinterpret_cast<float*>(memory + ready(most));  // [places][width]
  float* parts = act + most * e.width;                          // [places][hidden]
  Turn turn;
  for (int64_t first = 0; first < e.tokens; first += step) {
    const int64_t last = std::min(first + step, e.tokens);
    const Chunk chunk = sorted(e, first, last, reinterpret_cast<char*>(parts + most * e.hidden));
    FlatoutProduct p{};
    p.x = e.x, p.x_stride = e.x_stride, p.x_type = e.type;
    p.weight = e.gate_up, p.kind = e.gate_up_kind;
    p.columns = e.hidden, p.outputs = p.out_stride = e.width;
    p.gate = e.gate;
    p.out = act, p.out_type = FLATOUT_FLOAT32, p.scale = 1.0f;
    multiply(p, k, chunk, chunk.tokens, memory);
    p.x = act, p.x_stride = e.width, p.x_type = FLATOUT_FLOAT32;
    p.weight = e.down, p.kind = e.down_kind;
    p.columns = e.width, p.outputs = p.out_stride = e.hidden;
    p.gate = FLATOUT_NO_GATE;
    p.out = parts;
    multiply(p, k, chunk, nullptr, memory);
    const int64_t wide = e.hidden / 16;  // pieces of a token's sum, so that one token's is shared out too
    share_ranges((last - first) * wide, chunk.count * e.hidden, kPartSums, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin, until; at < end; at = until) {
        const int64_t token = at / wide, from = at % wide;
        until = std::min(end, (token + 1) * wide);
        k.combine(e, first + token, parts, chunk.places + token * e.top_k, from * 16, (from + until - at) * 16);
      }
    });
  }
  return 0;
}
